//! Compares the agent's counters with the clients' own counts.

use rto_agent_core::wire::stats::{PolicyStats, StatsAnswer};
use rto_testbed::workload::counted::Counts;
use serde::Serialize;

/// The agent's counters, summed over all policies and arms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counted {
    /// Connections that the host opened.
    active: u64,
    /// Connections that the host accepted.
    passive: u64,
    /// SYNs that the host retransmitted.
    syn_retransmissions: u64,
    /// Connections that no entry covered.
    unmatched: u64,
}

/// The policy of connections that no entry covers.
const UNMATCHED: &str = "unmatched";

impl Counted {
    pub(super) fn of(stats: &StatsAnswer) -> Self {
        let mut counted = Self::default();
        for (name, policy) in &stats.policies {
            let arms = |policy: &PolicyStats| -> [u64; 3] {
                policy.arms().fold([0; 3], |sum, (_, arm)| {
                    let of_arm = [
                        arm.active.connections,
                        arm.passive.connections,
                        arm.active.handshake_retransmissions,
                    ];
                    std::array::from_fn(|i| sum[i] + of_arm[i])
                })
            };
            let [active, passive, copies] = arms(policy);
            if name.to_string() == UNMATCHED {
                counted.unmatched += active + passive + copies;
            } else {
                counted.active += active;
                counted.passive += passive;
                counted.syn_retransmissions += copies;
            }
        }
        counted
    }

    /// The values that are expected.
    pub(super) const fn expected(host: &Counts, accepted: u64) -> Self {
        Self {
            active: host.established,
            passive: accepted,
            syn_retransmissions: host.syn_retransmissions,
            unmatched: 0,
        }
    }

    /// The differences to the expected values.
    pub(super) fn differences(&self, expected: &Self) -> Vec<Difference> {
        let pairs = [
            ("connections opened", self.active, expected.active),
            ("connections accepted", self.passive, expected.passive),
            (
                "SYNs retransmitted",
                self.syn_retransmissions,
                expected.syn_retransmissions,
            ),
            (
                "connections without a policy",
                self.unmatched,
                expected.unmatched,
            ),
        ];
        let differs = pairs
            .into_iter()
            .filter(|(_, counted, sent)| counted != sent);
        let difference = |(what, counted, sent): (&'static str, u64, u64)| Difference {
            text: format!("{what}: {counted} counted, {sent} sent"),
            what,
            by: counted.wrapping_sub(sent),
        };
        differs.map(difference).collect()
    }
}

/// A counter that differs from its expected value.
#[derive(Clone, Debug)]
pub(super) struct Difference {
    pub(super) text: String,
    what: &'static str,
    by: u64,
}

impl Difference {
    /// Whether it is the same difference as `other`, so that nothing more has gone wrong.
    pub(super) fn is_still(&self, other: &Self) -> bool {
        (self.what, self.by) == (other.what, other.by)
    }

    /// The failures of a client; `None` if there were none.
    pub(super) fn of_client(what: &'static str, counts: &Counts) -> Option<Self> {
        let bad = counts.unanswered + counts.refused;
        let last = counts.error.as_deref().unwrap_or_default();
        (bad > 0).then(|| Self {
            text: format!(
                "{what}: {} connections without an answer, {} not made; {last}",
                counts.unanswered, counts.refused
            ),
            what,
            by: bad,
        })
    }

    /// The difference between the connections that a client made and the number that the other machine's server
    /// accepted.
    pub(super) fn of_servers(made: u64, accepted: u64) -> Option<Self> {
        (made != accepted).then(|| Self {
            text: format!("the host's server: {accepted} connections accepted, {made} made"),
            what: "server",
            by: accepted.wrapping_sub(made),
        })
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_core::wire::stats::ArmStats;

    use super::*;

    fn arm(active: u64, passive: u64, copies: u64) -> ArmStats {
        let mut arm = ArmStats::default();
        arm.active.connections = active;
        arm.passive.connections = passive;
        arm.active.handshake_retransmissions = copies;
        arm
    }

    fn stats(unmatched: u64) -> StatsAnswer {
        let mut answer = StatsAnswer::default();
        let policies = &mut answer.policies;
        policies.insert("near".parse().unwrap(), arm(10, 5, 0).into());
        let learnt = PolicyStats {
            control: Some(arm(2, 1, 1)),
            ..arm(3, 0, 4).into()
        };
        policies.insert("learnt".parse().unwrap(), learnt);
        let name = rto_agent_core::policy::PolicyName::unmatched();
        policies.insert(name, arm(unmatched, 0, 0).into());
        answer
    }

    #[test]
    fn all_arms_and_unmatched_connections_are_compared() {
        let sent = Counts {
            established: 15,
            lost: 2,
            syn_retransmissions: 5,
            ..Counts::default()
        };
        let texts = |unmatched, accepted| -> Vec<String> {
            let expected = Counted::expected(&sent, accepted);
            let all = Counted::of(&stats(unmatched)).differences(&expected);
            all.into_iter().map(|difference| difference.text).collect()
        };
        assert!(texts(0, 6).is_empty());
        let without = "connections without a policy: 2 counted, 0 sent";
        let accepted = "connections accepted: 6 counted, 7 sent";
        assert_eq!(texts(2, 7), [accepted, without]);
    }

    #[test]
    fn unchanged_difference_is_still_the_same() {
        let counted = |active| Counted {
            active,
            ..Counted::default()
        };
        let of = |one: u64, other: u64| counted(one).differences(&counted(other)).remove(0);
        assert!(of(9, 10).is_still(&of(19, 20)));
        assert!(!of(9, 10).is_still(&of(18, 20)));
        let server = Difference::of_servers(10, 9).unwrap();
        assert!(!of(9, 10).is_still(&server), "{server:?}");
        assert!(Difference::of_servers(10, 10).is_none());
    }

    #[test]
    fn failed_client_connections_are_a_difference() {
        assert!(Difference::of_client("peer", &Counts::default()).is_none());
        let counts = Counts {
            refused: 1,
            error: Some("ECONNREFUSED".to_owned()),
            ..Counts::default()
        };
        let text = Difference::of_client("peer", &counts).unwrap().text;
        assert!(text.ends_with("1 not made; ECONNREFUSED"), "{text}");
    }
}
