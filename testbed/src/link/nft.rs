//! A real veth that drops packets with nftables rules, to validate the emulated link. It does not delay packets and
//! does not track sequence numbers.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::{
    Blackout, Link, Outage, RuleId,
    packet::{Direction, Kind},
    rule::{DropPattern, PacketFilter, Rule},
};
use crate::netns::{CLIENT_V4, CLIENT_V6, Pair, SERVER_V4, SERVER_V6, nft};

/// The table in each namespace.
const TABLE: &str = "rto_lab";
/// The table of a host's own firewall.
const OWN_TABLE: &str = "rto_lab_own";
/// Bytes of an IPv4 and of an IPv6 packet before the data, with TCP timestamps and no other options.
const HEADERS: [(&str, u32); 2] = [("ipv4", 20 + 32), ("ipv6", 40 + 32)];

/// The veth of a pair of namespaces.
#[derive(Debug)]
pub struct Veth {
    client: String,
    server: String,
    rules: Mutex<Rules>,
}

#[derive(Debug, Default)]
struct Rules {
    next: u64,
    /// Where each rule is installed.
    placed: HashMap<RuleId, Placed>,
}

#[derive(Clone, Debug)]
struct Placed {
    directions: Vec<Direction>,
    /// Whether packets pass again, so that only the counter is left.
    lifted: bool,
}

impl Veth {
    /// Creates the tables.
    pub fn new(pair: &Pair) -> anyhow::Result<Self> {
        let veth = Self {
            client: pair.client.clone(),
            server: pair.server.clone(),
            rules: Mutex::default(),
        };
        for netns in [&veth.client, &veth.server] {
            nft(netns, &["-f", "-"], &format!("add table inet {TABLE}\n"))
                .context("--link nft needs nft(8) and a kernel with nf_tables")?;
        }
        Ok(veth)
    }

    /// The namespace in which packets of a direction arrive.
    fn netns(&self, direction: Direction) -> &str {
        match direction {
            Direction::ToServer => &self.server,
            Direction::ToClient => &self.client,
        }
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        // A panic cannot leave a partial change.
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets packets pass again; the counter stays.
    fn lift(&self, rule: RuleId) -> anyhow::Result<Placed> {
        let mut rules = self.rules();
        let placed = rules.placed.get_mut(&rule).context("no such rule")?;
        if !placed.lifted {
            let name = name(rule);
            let text =
                format!("flush chain inet {TABLE} {name}\ndelete chain inet {TABLE} {name}\n");
            for direction in &placed.directions {
                nft(self.netns(*direction), &["-f", "-"], &text)?;
            }
            placed.lifted = true;
        }
        Ok(placed.clone())
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
        if rule.until.is_some() {
            bail!("a veth does not record times: use --link relay");
        }
        let directions = match rule.filter.direction {
            Some(only) => vec![only],
            None => Direction::BOTH.to_vec(),
        };
        let mut texts = Vec::new();
        let mut rules = self.rules();
        let id = RuleId(rules.next);
        let name = name(id);
        for direction in &directions {
            let mut text = format!(
                "add counter inet {TABLE} {name}\n\
                 add chain inet {TABLE} {name} {{ type filter hook input priority 0; }}\n"
            );
            for line in statements(&rule, *direction)? {
                text.push_str(&format!(
                    "add rule inet {TABLE} {name} {line} counter name {name} drop\n"
                ));
            }
            texts.push((*direction, text));
        }
        rules.next += 1;
        for (direction, text) in texts {
            nft(self.netns(direction), &["-f", "-"], &text)?;
        }
        let lifted = false;
        rules.placed.insert(id, Placed { directions, lifted });
        Ok(id)
    }

    fn dropped(&self, rule: RuleId) -> anyhow::Result<u64> {
        let Some(placed) = self.rules().placed.get(&rule).cloned() else {
            return Ok(0);
        };
        let mut packets = 0;
        for direction in placed.directions {
            let name = name(rule);
            let args = ["list", "counter", "inet", TABLE, name.as_str()];
            packets += counted(&nft(self.netns(direction), &args, "")?)
                .with_context(|| format!("no packets in counter {name}"))?;
        }
        Ok(packets)
    }

    fn remove(&self, rule: RuleId) -> anyhow::Result<u64> {
        let placed = self.lift(rule)?;
        let dropped = self.dropped(rule)?;
        let name = name(rule);
        for direction in placed.directions {
            let args = ["delete", "counter", "inet", TABLE, name.as_str()];
            nft(self.netns(direction), &args, "")?;
        }
        self.rules().placed.remove(&rule);
        Ok(dropped)
    }

    fn start_outage(&self, filter: PacketFilter, length: Duration) -> anyhow::Result<Outage> {
        let rule = self.drops(Rule::new(filter, DropPattern::All))?;
        // The outage begins only now, as both directions are closed.
        Ok(Outage {
            rule,
            from: Instant::now(),
            length,
        })
    }

    fn end_outage(&self, outage: Outage) -> anyhow::Result<Blackout> {
        outage.sleep();
        self.lift(outage.rule)?;
        let until = Instant::now();
        Ok(Blackout {
            from: outage.from,
            until,
            dropped: self.remove(outage.rule)?,
        })
    }
}

/// Starts to drop all TCP packets in INPUT and in OUTPUT of a host, as its own firewall does.
pub fn start_own_outage(netns: &str, length: Duration) -> anyhow::Result<Outage> {
    let chain = |hook: &str| {
        format!(
            "add chain inet {OWN_TABLE} {hook} {{ type filter hook {hook} priority 0; }}\n\
             add rule inet {OWN_TABLE} {hook} meta l4proto tcp counter drop\n"
        )
    };
    let text = format!(
        "add table inet {OWN_TABLE}\n{}{}",
        chain("input"),
        chain("output")
    );
    nft(netns, &["-f", "-"], &text)?;
    Ok(Outage {
        rule: RuleId(0),
        from: Instant::now(),
        length,
    })
}

/// Waits until it is over.
pub fn end_own_outage(netns: &str, outage: Outage) -> anyhow::Result<Blackout> {
    outage.sleep();
    let list = nft(netns, &["list", "table", "inet", OWN_TABLE], "")?;
    nft(netns, &["delete", "table", "inet", OWN_TABLE], "")?;
    Ok(Blackout {
        from: outage.from,
        until: Instant::now(),
        dropped: list.split("counter ").filter_map(counted).sum(),
    })
}

/// The name of a rule's chain and counter.
fn name(rule: RuleId) -> String {
    format!("r{}", rule.0)
}

fn parsed(address: &str) -> IpAddr {
    address.parse().unwrap_or(IpAddr::from([0, 0, 0, 0]))
}

/// The rules of a chain: one per address family if the filter has a payload length.
fn statements(rule: &Rule, direction: Direction) -> anyhow::Result<Vec<String>> {
    let PacketFilter {
        direction: _,
        kind,
        client_port,
        payload,
        from_byte,
        first_time,
    } = &rule.filter;
    if from_byte.is_some() || *first_time {
        bail!("a veth cannot follow sequence numbers: take --link relay");
    }
    let mut parts = vec!["meta l4proto tcp".to_owned()];
    if let Some(port) = client_port {
        let end = match direction {
            Direction::ToServer => "sport",
            Direction::ToClient => "dport",
        };
        parts.push(format!("tcp {end} {port}"));
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
            bail!("a veth cannot distinguish {kind:?} from other packets: use --link relay")
        }
    }
    let pattern = match rule.pattern {
        DropPattern::All => String::new(),
        DropPattern::Every(n) => format!("numgen inc mod {} 0", n.max(1)),
        DropPattern::Share(share) => format!("numgen random mod 1000000 < {:.0}", share * 1e6),
        DropPattern::Above { per_s, burst } => {
            format!("limit rate over {per_s}/second burst {burst} packets")
        }
        DropPattern::Next(_) | DropPattern::Runs { .. } => {
            bail!("a veth cannot count packets or drop them in a row: take --link relay")
        }
    };
    let filter = parts.join(" ");
    Ok(match payload {
        None => vec![format!("{filter} {pattern}")],
        Some((least, most)) => HEADERS
            .iter()
            .map(|(family, headers)| {
                let (from, to) = (least + headers, most.saturating_add(*headers));
                let to = to.min(u16::MAX.into());
                format!("meta nfproto {family} {filter} meta length {from}-{to} {pattern}")
            })
            .collect(),
    })
}

/// The packets of a counter, from its listing.
fn counted(list: &str) -> Option<u64> {
    let (_, after) = list.split_once("packets ")?;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_nft_statements() {
        let every = Rule::new(PacketFilter::SYN.of_client(80), DropPattern::Every(2));
        assert_eq!(
            statements(&every, Direction::ToServer).unwrap(),
            ["meta l4proto tcp tcp sport 80 tcp flags & (syn|ack) == syn numgen inc mod 2 0"]
        );
        let last = PacketFilter::SERVER_DATA.with_payload(1321).of_client(7);
        let last = Rule::new(last, DropPattern::Share(0.5));
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
        for (filter, pattern) in [
            (PacketFilter::ALL, DropPattern::Next(1)),
            (PacketFilter::CLIENT_ACK, DropPattern::All),
            (PacketFilter::ALL.first_time(), DropPattern::All),
        ] {
            let error = statements(&Rule::new(filter, pattern), Direction::ToServer).unwrap_err();
            assert!(error.to_string().contains("--link relay"), "{error}");
        }
    }

    #[test]
    fn nft_counters_are_parsed() {
        let list = "table inet rto_lab {\n\tcounter r1 {\n\t\tpackets 7 bytes 100\n\t}\n}\n";
        assert_eq!(counted(list), Some(7));
        assert_eq!(counted("table inet rto_lab {\n}\n"), None);
        let both = "chain input {\ncounter packets 2 bytes 104 drop\n}\nchain output {\ncounter packets 3 bytes 9 drop\n}";
        assert_eq!(both.split("counter ").filter_map(counted).sum::<u64>(), 5);
    }
}
