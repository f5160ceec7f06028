//! `rto-agent explain`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use nix::sched::{CloneFlags, setns};
use rto_agent_core::{
    policy::{compile::settings_text, units::format_duration},
    wire::types::{LookupAnswer, LookupEntry},
};
use serde::Serialize;

use super::{
    print,
    sock_diag::{Connection, connections},
};
use crate::{cli::Explain, client::Client};

/// The most connections that are explained in one answer.
const SHOWN: usize = 50;

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    connections: Vec<Explained>,
    /// The number of connections beyond [`SHOWN`].
    more: usize,
}

#[derive(Serialize)]
struct Explained {
    #[serde(flatten)]
    connection: Connection,
    lookup: LookupAnswer,
}

pub(super) fn run(args: &Explain) -> anyhow::Result<ExitCode> {
    let wanted: Wanted = args.what.parse()?;
    let inodes = wanted.inodes()?;
    let all = connections().context("the kernel cannot list connections (sock_diag)")?;
    let mut found: Vec<_> = all
        .into_iter()
        .filter(|one| wanted.is(one, &inodes))
        .collect();
    ensure!(
        !found.is_empty(),
        "{}: no TCP connection in this network namespace",
        args.what
    );
    let more = found.len().saturating_sub(SHOWN);
    found.truncate(SHOWN);
    let client = Client::new(&args.daemon.socket);
    let mut lookups: BTreeMap<IpAddr, LookupAnswer> = BTreeMap::new();
    let mut answer = Answer {
        connections: Vec::new(),
        more,
    };
    for connection in found {
        let peer = connection.peer.ip();
        let lookup = match lookups.get(&peer) {
            Some(known) => known.clone(),
            None => client.get(&format!("/v1/lookup?address={peer}"))?,
        };
        lookups.insert(peer, lookup.clone());
        answer.connections.push(Explained { connection, lookup });
    }
    print(args.daemon.json, &answer, || text(&answer))
}

/// The connections to explain.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Process(u32),
    Port(u16),
    End(SocketAddr),
}

impl std::str::FromStr for Wanted {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        if let Some(Ok(port)) = text.strip_prefix(':').map(str::parse) {
            return Ok(Self::Port(port));
        }
        match (text.parse(), text.parse()) {
            (Ok(pid), _) => Ok(Self::Process(pid)),
            (_, Ok(end)) => Ok(Self::End(end)),
            _ => bail!(
                "{text:?} is not a process ID, :PORT or ADDRESS:PORT; write, for example, \
                 10.1.2.3:443 or [fd00:1::7]:443"
            ),
        }
    }
}

impl Wanted {
    /// The inodes of a process's sockets. Enters the network namespace of that process.
    fn inodes(&self) -> anyhow::Result<Vec<u32>> {
        let Self::Process(pid) = self else {
            return Ok(Vec::new());
        };
        let open =
            |what: &str| format!("process {pid}: its {what} cannot be read; run this as root");
        let files = fs::read_dir(format!("/proc/{pid}/fd")).with_context(|| open("open files"))?;
        let links = files
            .flatten()
            .filter_map(|file| fs::read_link(file.path()).ok());
        let inode = |link: std::path::PathBuf| {
            let number = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            number.parse().ok()
        };
        let inodes = links.filter_map(inode).collect();
        let namespaces =
            ["self".to_owned(), pid.to_string()].map(|pid| format!("/proc/{pid}/ns/net"));
        if fs::read_link(&namespaces[0]).ok() != fs::read_link(&namespaces[1]).ok() {
            let namespace =
                File::open(&namespaces[1]).with_context(|| open("network namespace"))?;
            setns(namespace, CloneFlags::CLONE_NEWNET)
                .with_context(|| open("network namespace"))?;
        }
        Ok(inodes)
    }

    fn is(&self, connection: &Connection, inodes: &[u32]) -> bool {
        let Connection {
            local, peer, inode, ..
        } = connection;
        match self {
            Self::Process(_) => inodes.contains(inode),
            Self::Port(port) => local.port() == *port || peer.port() == *port,
            Self::End(end) => local == end || peer == end,
        }
    }
}

fn text(answer: &Answer) -> String {
    let mut text = String::new();
    let time = |us: u32| format_duration(Duration::from_micros(us.into()));
    for Explained { connection, lookup } in &answer.connections {
        let Connection {
            local, peer, state, ..
        } = connection;
        text.push_str(&format!("{local} -> {peer}  {state}\n"));
        text.push_str(&match &lookup.entry {
            None => format!("  {}\n", lookup.reason),
            Some(LookupEntry { entry, sets }) => format!(
                "  entry {}, policy {} ({}): {}\n",
                entry.cidr,
                entry.policy,
                entry.source,
                settings_text(&sets.effects)
            ),
        });
        if has_no_thin_streams(connection) && sets(lookup, "thin_linear") {
            text.push_str(
                "  thin_linear has no effect: the connection uses BBR, under which no stream counts as \
                 thin\n",
            );
        }
        if let Some(info) = &connection.info {
            let rtt = match info.rtt_us {
                0 => "no RTT sample yet".to_owned(),
                rtt => format!("RTT {} +- {}", time(rtt), time(info.rtt_variation_us)),
            };
            text.push_str(&format!(
                "  now: RTO {}, {rtt}, cwnd {}\n  so far: {} segments retransmitted, {} \
                 consecutive timeouts without an answer\n",
                time(info.rto_us),
                info.cwnd,
                info.retransmissions,
                info.timeouts_in_a_row
            ));
        }
    }
    if answer.more > 0 {
        text.push_str(&format!("and {} more\n", answer.more));
    }
    text.push_str(
        "a connection keeps the policy it started with; the entries shown are the current ones\n",
    );
    text
}

/// BBR keeps the slow start threshold infinite, so `tcp_stream_is_thin()` is false (Linux 6.18).
fn has_no_thin_streams(connection: &Connection) -> bool {
    let name = connection.congestion_control.as_deref();
    name.is_some_and(|name| name.starts_with("bbr"))
}

/// Whether the policy that covers the peer switches a setting on.
fn sets(lookup: &LookupAnswer, setting: &str) -> bool {
    let effects = lookup.entry.iter().flat_map(|found| &found.sets.effects);
    effects
        .into_iter()
        .any(|effect| effect.setting == setting && effect.effective == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pid_port_and_address_are_distinguished() {
        let good = [
            ("4711", Wanted::Process(4711)),
            (":443", Wanted::Port(443)),
            ("10.1.2.3:443", Wanted::End("10.1.2.3:443".parse().unwrap())),
            (
                "[fd00::7]:443",
                Wanted::End("[fd00::7]:443".parse().unwrap()),
            ),
        ];
        for (text, wanted) in good {
            assert_eq!(text.parse::<Wanted>().unwrap(), wanted);
        }
        for bad in ["", ":", ":65536", "10.1.2.3", "host:443", "-1"] {
            let error = bad.parse::<Wanted>().unwrap_err().to_string();
            assert!(error.contains("ADDRESS:PORT"), "{error}");
        }
    }
}
