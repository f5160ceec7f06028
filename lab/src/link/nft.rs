//! A real veth that drops by nftables, so that the emulated link can be checked against it. It neither delays
//! nor knows sequence numbers.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::{
    Blackout, Dark, Link, RuleId,
    packet::{Direction, Kind},
    rule::{Matching, Rule, When, Which},
};
use crate::ground::{
    netns::{CLIENT_V4, CLIENT_V6, Pair, SERVER_V4, SERVER_V6},
    process::{Guard, command_in, run, stdout_of},
};

/// Our table in each namespace.
const TABLE: &str = "rto_lab";
/// Bytes of an IPv4 and of an IPv6 packet before the data, with TCP timestamps and no other options.
const HEADERS: [(&str, u32); 2] = [("ipv4", 20 + 32), ("ipv6", 40 + 32)];

/// The veth of a pair of namespaces.
#[derive(Debug)]
pub struct Veth {
    client: String,
    server: String,
    next: AtomicU64,
}

impl Veth {
    /// Makes the tables.
    ///
    /// # Errors
    ///
    /// If `nft` is missing or fails: the kernel lacks nf_tables.
    pub fn new(pair: &Pair) -> anyhow::Result<Self> {
        let veth = Self {
            client: pair.client.clone(),
            server: pair.server.clone(),
            next: AtomicU64::new(0),
        };
        for netns in [&veth.client, &veth.server] {
            nft(netns, &format!("add table inet {TABLE}\n"))
                .context("--link nft needs nft(8) and a kernel with nf_tables")?;
        }
        Ok(veth)
    }

    /// Where packets of a direction arrive.
    fn netns(&self, direction: Direction) -> &str {
        match direction {
            Direction::ToServer => &self.server,
            Direction::ToClient => &self.client,
        }
    }
}

impl Link for Veth {
    fn client(&self, v6: bool) -> IpAddr {
        parsed(if v6 { CLIENT_V6 } else { CLIENT_V4 })
    }

    fn server(&self, v6: bool) -> IpAddr {
        parsed(if v6 { SERVER_V6 } else { SERVER_V4 })
    }

    fn drops(&self, rule: Rule) -> anyhow::Result<RuleId> {
        if rule.when != When::Always {
            bail!("a veth cannot tell times of its own: take --link relay");
        }
        let id = RuleId(self.next.fetch_add(1, Ordering::Relaxed));
        for direction in directions(&rule.matching) {
            let mut text = format!(
                "add chain inet {TABLE} {} {{ type filter hook input priority 0; }}\n",
                chain(id)
            );
            for line in statements(&rule, direction)? {
                text.push_str(&format!("add rule inet {TABLE} {} {line}\n", chain(id)));
            }
            nft(self.netns(direction), &text)?;
        }
        Ok(id)
    }

    fn dropped(&self, rule: RuleId) -> anyhow::Result<u64> {
        let mut packets = 0;
        for netns in [&self.client, &self.server] {
            let list = format!("ip netns exec {netns} nft list table inet {TABLE}");
            packets += counted(&run(&list)?, &chain(rule));
        }
        Ok(packets)
    }

    fn remove(&self, rule: RuleId) -> anyhow::Result<u64> {
        let dropped = self.dropped(rule)?;
        let chain = chain(rule);
        for netns in [&self.client, &self.server] {
            let list = run(&format!(
                "ip netns exec {netns} nft list table inet {TABLE}"
            ))?;
            if list.contains(&format!("chain {chain} {{")) {
                let text = format!(
                    "flush chain inet {TABLE} {chain}\ndelete chain inet {TABLE} {chain}\n"
                );
                nft(netns, &text)?;
            }
        }
        Ok(dropped)
    }

    fn darken(&self, matching: Matching, length: Duration) -> anyhow::Result<Dark> {
        let rule = self.drops(Rule::new(matching, Which::All))?;
        // Only now are both directions closed.
        Ok(Dark {
            rule,
            from: Instant::now(),
            length,
        })
    }

    fn brighten(&self, dark: Dark) -> anyhow::Result<Blackout> {
        dark.sleep();
        let until = Instant::now();
        Ok(Blackout {
            from: dark.from,
            until,
            dropped: self.remove(dark.rule)?,
        })
    }
}

fn chain(rule: RuleId) -> String {
    format!("r{}", rule.0)
}

fn parsed(address: &str) -> IpAddr {
    address.parse().unwrap_or(IpAddr::from([0, 0, 0, 0]))
}

fn directions(matching: &Matching) -> Vec<Direction> {
    matching
        .direction
        .map_or(Direction::BOTH.to_vec(), |only| vec![only])
}

/// The rules of a chain: one for each family if a length is asked for.
fn statements(rule: &Rule, direction: Direction) -> anyhow::Result<Vec<String>> {
    let Matching {
        direction: _,
        kind,
        client_port,
        server_port,
        payload,
        from_byte,
        first_time,
    } = &rule.matching;
    if from_byte.is_some() || *first_time {
        bail!("a veth cannot follow sequence numbers: take --link relay");
    }
    let mut parts = vec!["meta l4proto tcp".to_owned()];
    let (to_port, from_port) = match direction {
        Direction::ToServer => (server_port, client_port),
        Direction::ToClient => (client_port, server_port),
    };
    if let Some(port) = to_port {
        parts.push(format!("tcp dport {port}"));
    }
    if let Some(port) = from_port {
        parts.push(format!("tcp sport {port}"));
    }
    let mut payload = *payload;
    match kind {
        None => {}
        Some(Kind::Syn) => parts.push("tcp flags & (syn|ack) == syn".to_owned()),
        Some(Kind::SynAck) => parts.push("tcp flags & (syn|ack) == (syn|ack)".to_owned()),
        Some(Kind::Rst) => parts.push("tcp flags & rst == rst".to_owned()),
        Some(Kind::Data) => {
            parts.push("tcp flags & (syn|rst) == 0".to_owned());
            payload = payload.or(Some((1, u16::MAX.into())));
        }
        Some(kind @ (Kind::Ack | Kind::Fin)) => {
            bail!("a veth cannot tell {kind:?} from other packets: take --link relay")
        }
    }
    let which = match rule.which {
        Which::All => String::new(),
        Which::Every(n) => format!("numgen inc mod {} 0", n.max(1)),
        Which::Share(share) => format!("numgen random mod 1000000 < {:.0}", share * 1e6),
        Which::Next(_) | Which::Nth(_) => {
            bail!("a veth cannot stop after a number of packets: take --link relay")
        }
    };
    let matching = parts.join(" ");
    let end = format!("{which} counter drop");
    Ok(match payload {
        None => vec![format!("{matching} {end}")],
        Some((least, most)) => HEADERS
            .iter()
            .map(|(family, headers)| {
                let (from, to) = (least + headers, most.saturating_add(*headers));
                let to = to.min(u16::MAX.into());
                format!("meta nfproto {family} {matching} meta length {from}-{to} {end}")
            })
            .collect(),
    })
}

/// Sum of the packets of a chain's counters in a listing.
fn counted(list: &str, chain: &str) -> u64 {
    list.lines()
        .skip_while(|line| line.trim() != format!("chain {chain} {{"))
        .take_while(|line| line.trim() != "}")
        .filter_map(|line| {
            let (_, after) = line.split_once("counter packets ")?;
            after.split(' ').next()?.parse::<u64>().ok()
        })
        .sum()
}

fn nft(netns: &str, text: &str) -> anyhow::Result<()> {
    use std::{io::Write as _, process::Stdio};
    let mut command = command_in(Some(netns), None, "nft")?;
    command.args(["-f", "-"]).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Guard(command.spawn().context("nft")?);
    let mut stdin = child.0.stdin.take().context("no stdin")?;
    stdin.write_all(text.as_bytes())?;
    drop(stdin);
    let mut said = String::new();
    if let Some(mut stderr) = child.0.stderr.take() {
        std::io::Read::read_to_string(&mut stderr, &mut said)?;
    }
    let output = std::process::Output {
        status: child.0.wait()?,
        stdout: Vec::new(),
        stderr: said.into_bytes(),
    };
    stdout_of(text, output).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_as_nft_takes_them() {
        let every = Rule::new(Matching::SYN.of_server(80), Which::Every(2));
        assert_eq!(
            statements(&every, Direction::ToServer).unwrap(),
            [
                "meta l4proto tcp tcp dport 80 tcp flags & (syn|ack) == syn numgen inc mod 2 0 counter drop"
            ]
        );
        let last = Matching::SERVER_DATA.with_payload(1321).of_client(7);
        let last = Rule::new(last, Which::Share(0.5));
        let both = statements(&last, Direction::ToClient).unwrap();
        assert_eq!(both.len(), 2);
        for (line, length) in both.iter().zip(["1373-1373", "1393-1393"]) {
            assert!(line.contains("tcp dport 7 "), "{line}");
            assert!(line.contains(&format!("meta length {length} ")), "{line}");
            assert!(
                line.contains("numgen random mod 1000000 < 500000"),
                "{line}"
            );
        }
        for (matching, which) in [
            (Matching::ALL, Which::Next(1)),
            (Matching::CLIENT_ACK, Which::All),
            (Matching::ALL.first_time(), Which::All),
        ] {
            let error = statements(&Rule::new(matching, which), Direction::ToServer).unwrap_err();
            assert!(error.to_string().contains("--link relay"), "{error}");
        }
    }

    #[test]
    fn counters_of_one_chain() {
        let list = "table inet rto_lab {\n\tchain r1 {\n\t\ttype filter hook input priority filter; policy accept;\n\
            \t\tmeta l4proto 6 counter packets 7 bytes 100 drop\n\t\tmeta l4proto 6 counter packets 2 bytes 1 drop\n\t}\n\
            \n\tchain r12 {\n\t\tmeta l4proto 6 counter packets 5 bytes 100 drop\n\t}\n}\n";
        assert_eq!(counted(list, "r1"), 9);
        assert_eq!(counted(list, "r12"), 5);
        assert_eq!(counted(list, "r2"), 0);
    }
}
