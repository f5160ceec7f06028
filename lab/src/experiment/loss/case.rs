//! What gets lost, and how the requests are made.

use serde::Serialize;

use crate::{
    ends::http::LAST_SEGMENT,
    link::{
        Medium,
        packet::Direction,
        rule::{Matching, Rule, Which},
    },
};

/// How requests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Talk {
    /// Each over a connection of its own.
    New,
    /// One after the other over one connection.
    Kept,
    /// Over one connection, the next one sent before the last one is answered.
    Pipelined,
}

/// How many requests a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volume {
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
pub enum Side {
    /// Nobody: the kernel's own timers.
    Kernel,
    /// Client and server.
    Agent,
    /// The server alone.
    Server,
    /// The server alone, and its SYN-ACKs as short as SYNs.
    ServerShort,
}

impl Side {
    /// All.
    pub const ALL: [Self; 4] = [Self::Kernel, Self::Agent, Self::Server, Self::ServerShort];

    /// Whether the agent covers the server alone.
    #[must_use]
    pub const fn is_server_alone(self) -> bool {
        matches!(self, Self::Server | Self::ServerShort)
    }

    /// For tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Agent => "agent",
            Self::Server => "agent at the server",
            Self::ServerShort => "agent at the server, syn_ack_rto 100ms",
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
    pub talk: Talk,
    /// How many.
    pub volume: Volume,
    /// Whether the agent at the server alone makes a difference that was published.
    pub server_alone: bool,
}

impl Case {
    /// Whether it is measured for a side.
    #[must_use]
    pub fn is_for(&self, side: Side) -> bool {
        !side.is_server_alone() || self.server_alone
    }
}

/// All cases that a link can make; for a quick run some.
pub(super) fn all(quick: bool, medium: Medium) -> Vec<Case> {
    let exact = |name: &str, title: &str, rule: Option<(Matching, u64)>, talk| Case {
        name: name.to_owned(),
        title: title.to_owned(),
        rule: rule.map(|(matching, n)| Rule::new(matching, Which::Every(n))),
        talk,
        volume: Volume::Exact,
        server_alone: name == "syn-ack-2",
    };
    let syn = Matching::SYN.towards(Direction::ToServer);
    let syn_ack = Matching::SYN_ACK.towards(Direction::ToClient);
    let last = Matching::SERVER_DATA.with_payload(LAST_SEGMENT);
    let mut cases = vec![
        exact("nothing", "nothing", None, Talk::New),
        exact("syn-2", "every second SYN", Some((syn, 2)), Talk::New),
        exact("syn-3", "every third SYN", Some((syn, 3)), Talk::New),
        exact(
            "syn-ack-2",
            "every second SYN-ACK",
            Some((syn_ack, 2)),
            Talk::New,
        ),
        exact(
            "last-2",
            "every second last data segment",
            Some((last, 2)),
            Talk::New,
        ),
        exact("nothing-kept", "nothing, kept alive", None, Talk::Kept),
        exact(
            "last-2-kept",
            "every second last data segment, kept alive",
            Some((last, 2)),
            Talk::Kept,
        ),
        exact(
            "last-2-pipelined",
            "every second last data segment at its first copy, kept alive and pipelined",
            Some((last.first_time(), 2)),
            Talk::Pipelined,
        ),
    ];
    for (percent, volume) in [(3, Volume::Rare), (50, Volume::Heavy)] {
        for (towards, to) in [
            (Direction::ToServer, "server"),
            (Direction::ToClient, "client"),
        ] {
            for (talk, suffix, words) in
                [(Talk::New, "", ""), (Talk::Kept, "-kept", ", kept alive")]
            {
                cases.push(Case {
                    name: format!("random-{percent}-to-{to}{suffix}"),
                    title: format!("{percent} % random to the {to}{words}"),
                    rule: Some(Rule::new(
                        Matching::ALL.towards(towards),
                        Which::Share(f64::from(percent) / 100.0),
                    )),
                    talk,
                    volume,
                    server_alone: false,
                });
            }
        }
    }
    if medium == Medium::Nft {
        // It cannot tell copies.
        cases.retain(|case| case.rule.is_none_or(|rule| !rule.matching.first_time));
    }
    if quick {
        cases.retain(|case| {
            case.volume == Volume::Exact || (case.volume == Volume::Rare && case.talk == Talk::New)
        });
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let cases = all(false, Medium::Relay);
        let names: std::collections::BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
        assert_eq!((names.len(), cases.len()), (16, 16));
        assert!(all(true, Medium::Relay).len() < 12);
        assert_eq!(all(false, Medium::Nft).len(), 15);
        for side in [Side::Server, Side::ServerShort] {
            assert_eq!(cases.iter().filter(|c| c.is_for(side)).count(), 1);
        }
    }
}
