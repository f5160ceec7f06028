//! What gets lost, and how the requests are made.

use rto_testbed::{
    link::{
        packet::Direction,
        rule::{DropPattern, PacketFilter, Rule},
    },
    workload::http::LAST_SEGMENT,
};
use serde::Serialize;

use crate::topology::LinkBackend;

/// How requests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConnectionReuse {
    /// Each over a connection of its own.
    New,
    /// One after the other over one connection.
    Kept,
    /// Over one connection, the next one sent before the last one is answered.
    Pipelined,
}

/// How many requests a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleSize {
    /// Of those with an exact loss.
    Exact,
    /// Of those with few losses by chance.
    Rare,
    /// Of those with many losses by chance.
    Heavy,
}

/// Whom the agent covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coverage {
    /// Nobody: the kernel's own timers.
    Kernel,
    /// Client and server.
    Agent,
    /// The server alone.
    Server,
    /// The server alone, and its SYN-ACKs as short as SYNs.
    ServerShort,
    /// Client and server, with an initial RTO that is learnt.
    Auto,
}

impl Coverage {
    /// All.
    pub const ALL: [Self; 5] = [
        Self::Kernel,
        Self::Agent,
        Self::Server,
        Self::ServerShort,
        Self::Auto,
    ];

    /// For tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Agent => "agent",
            Self::Server => "agent at the server",
            Self::ServerShort => "agent at the server, syn_ack_rto 100ms",
            Self::Auto => "initial_rto auto",
        }
    }
}

/// One thing that gets lost.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its name, for files.
    pub name: String,
    /// In words.
    pub title: String,
    /// What is dropped.
    pub rule: Option<Rule>,
    /// How requests are made.
    pub reuse: ConnectionReuse,
    /// How many.
    pub sample_size: SampleSize,
    /// Whether the agent at the server alone makes a difference that was published.
    pub server_alone: bool,
}

impl Case {
    /// Whether it is measured for a coverage.
    #[must_use]
    pub fn is_for(&self, coverage: Coverage) -> bool {
        match coverage {
            Coverage::Kernel | Coverage::Agent => true,
            Coverage::Server | Coverage::ServerShort => self.server_alone,
            // Where each connection loses its SYN, the budget would have the kernel's own timer from then on.
            Coverage::Auto => self.rule.is_none() || self.sample_size != SampleSize::Exact,
        }
    }
}

/// All cases that a link can make; for a quick run some.
pub(super) fn all(quick: bool, backend: LinkBackend) -> Vec<Case> {
    let exact = |name: &str, title: &str, rule: Option<(PacketFilter, u64)>, reuse| Case {
        name: name.to_owned(),
        title: title.to_owned(),
        rule: rule.map(|(matching, n)| Rule::new(matching, DropPattern::Every(n))),
        reuse,
        sample_size: SampleSize::Exact,
        server_alone: name == "syn-ack-2",
    };
    let syn = PacketFilter::SYN.towards(Direction::ToServer);
    let syn_ack = PacketFilter::SYN_ACK.towards(Direction::ToClient);
    let last = PacketFilter::SERVER_DATA.with_payload(LAST_SEGMENT);
    let mut cases = vec![
        exact("nothing", "nothing", None, ConnectionReuse::New),
        exact(
            "syn-2",
            "every second SYN",
            Some((syn, 2)),
            ConnectionReuse::New,
        ),
        exact(
            "syn-3",
            "every third SYN",
            Some((syn, 3)),
            ConnectionReuse::New,
        ),
        exact(
            "syn-ack-2",
            "every second SYN-ACK",
            Some((syn_ack, 2)),
            ConnectionReuse::New,
        ),
        exact(
            "last-2",
            "every second last data segment",
            Some((last, 2)),
            ConnectionReuse::New,
        ),
        exact(
            "nothing-kept",
            "nothing, kept alive",
            None,
            ConnectionReuse::Kept,
        ),
        exact(
            "last-2-kept",
            "every second last data segment, kept alive",
            Some((last, 2)),
            ConnectionReuse::Kept,
        ),
        exact(
            "last-2-pipelined",
            "every second last data segment at its first copy, kept alive and pipelined",
            Some((last.first_time(), 2)),
            ConnectionReuse::Pipelined,
        ),
    ];
    for (percent, sample_size) in [(3, SampleSize::Rare), (50, SampleSize::Heavy)] {
        for (towards, to) in [
            (Direction::ToServer, "server"),
            (Direction::ToClient, "client"),
        ] {
            for (reuse, suffix, words) in [
                (ConnectionReuse::New, "", ""),
                (ConnectionReuse::Kept, "-kept", ", kept alive"),
            ] {
                cases.push(Case {
                    name: format!("random-{percent}-to-{to}{suffix}"),
                    title: format!("{percent} % random to the {to}{words}"),
                    rule: Some(Rule::new(
                        PacketFilter::ALL.towards(towards),
                        DropPattern::Share(f64::from(percent) / 100.0),
                    )),
                    reuse,
                    sample_size,
                    server_alone: false,
                });
            }
        }
    }
    if backend == LinkBackend::Nft {
        // It cannot tell copies.
        cases.retain(|case| case.rule.is_none_or(|rule| !rule.filter.first_time));
    }
    if quick {
        cases.retain(|case| {
            case.sample_size == SampleSize::Exact
                || (case.sample_size == SampleSize::Rare && case.reuse == ConnectionReuse::New)
        });
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let cases = all(false, LinkBackend::Relay);
        let names: std::collections::BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
        assert_eq!((names.len(), cases.len()), (16, 16));
        assert!(all(true, LinkBackend::Relay).len() < 12);
        assert_eq!(all(false, LinkBackend::Nft).len(), 15);
        for coverage in [Coverage::Server, Coverage::ServerShort] {
            assert_eq!(cases.iter().filter(|c| c.is_for(coverage)).count(), 1);
        }
    }
}
