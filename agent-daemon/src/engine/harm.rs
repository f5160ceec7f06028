//! Harm that policies' counters show. `status` reads no counters: it reports what their last reading
//! for another purpose has shown.

use std::collections::{BTreeMap, BTreeSet};

use rto_agent_core::{
    policy::PolicyName,
    printable::counted,
    wire::{
        stats::{ArmStats, DirectionStats, PolicyStats, TOO_MANY_SPURIOUS},
        types::now_s,
    },
};
use rto_agent_kernel::datapath::DatapathError;

/// From this share of connections with a spurious SYN or SYN-ACK, a policy counts as harmful.
const MOSTLY_SPURIOUS: f64 = 0.5;
/// Fewer connections with a spurious SYN or SYN-ACK are not reported.
const FEWEST: u64 = 20;

/// What the last readings of all policies' counters have shown.
#[derive(Debug, Default)]
pub(super) struct Harms {
    /// Without policies that have done none.
    policies: BTreeMap<PolicyName, Harm>,
    /// When the counters of all policies had last been read, Unix seconds.
    read_at_s: Option<u64>,
    /// Why counters could not be read the last time.
    unread: Option<String>,
}

/// What the counters of one policy show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Harm {
    problem: Option<String>,
    warnings: Vec<String>,
}

impl Harms {
    /// Notes the counters of policies; `is_last`: the counters of all policies have now been read.
    pub(super) fn note<'a>(
        &mut self,
        read: impl IntoIterator<Item = (&'a PolicyName, &'a PolicyStats)>,
        is_last: bool,
    ) {
        for (policy, stats) in read {
            match Harm::of(policy, stats) {
                none if none == Harm::default() => drop(self.policies.remove(policy)),
                harm => drop(self.policies.insert(policy.clone(), harm)),
            }
        }
        self.unread = None;
        if is_last {
            self.read_at_s = Some(now_s());
        }
    }

    /// Counters could not be read.
    pub(super) fn note_unread(&mut self, error: &DatapathError) {
        self.unread = Some(format!("{error}; the statistics shown are out of date"));
    }

    /// When the counters of all policies had last been read, Unix seconds.
    pub(super) const fn read_at_s(&self) -> Option<u64> {
        self.read_at_s
    }

    /// The problems and the warnings of these policies.
    pub(super) fn report(&self, active: &BTreeSet<PolicyName>) -> (Vec<String>, Vec<String>) {
        let of = self.policies.iter();
        let of = of.filter(|(name, _)| active.contains(*name));
        let (mut problems, mut warnings) = (Vec::from_iter(self.unread.clone()), Vec::new());
        for (_, harm) in of {
            problems.extend(harm.problem.clone());
            warnings.extend_from_slice(&harm.warnings);
        }
        (problems, warnings)
    }
}

impl Harm {
    /// Of the treated arm, except for connections without memory: in either arm, these are counted
    /// only in part.
    fn of(name: &PolicyName, stats: &PolicyStats) -> Self {
        let mut harm = Self::default();
        let treated = stats.treated.directions().map(|(_, stats)| stats);
        let sum = |of: fn(&DirectionStats) -> u64| treated.iter().map(|stats| of(stats)).sum();
        let mut refused = BTreeMap::<&str, u64>::new();
        for (option, count) in treated.iter().flat_map(|stats| &stats.setsockopt_failures) {
            *refused.entry(option).or_default() += count;
        }
        harm.warnings.extend(refused.iter().map(|(option, count)| {
            let times = counted(*count, "time", "times");
            format!("policy {name}: the kernel refused {option} {times}")
        }));
        let connections = stats.treated.active.connections + stats.treated.passive.connections;
        match spurious(name, sum(|stats| stats.spurious_connections), connections) {
            Some((share, text)) if share > MOSTLY_SPURIOUS => harm.problem = Some(text),
            Some((share, text)) if share > TOO_MANY_SPURIOUS => harm.warnings.push(text),
            _ => {}
        }
        let all = stats
            .arms()
            .flat_map(|(_, arm)| ArmStats::directions(arm).map(|(_, stats)| stats));
        let without_memory = all.map(|stats| stats.storage_failures).sum::<u64>();
        if without_memory > 0 {
            harm.warnings.push(format!(
                "policy {name}: not enough memory for the state of {}, which may lack options or \
                 be counted only in part",
                counted(without_memory, "connection", "connections")
            ));
        }
        let lost = sum(|stats| stats.callbacks_lost);
        if lost > 0 {
            harm.warnings.push(format!(
                "policy {name}: another sock_ops program overwrote the callbacks of {} with a loss, \
                 so not all losses are counted; rto-agent doctor names the programs \
                 (other-programs)",
                counted(lost, "connection", "connections")
            ));
        }
        harm
    }
}

/// The share of a policy's connections that sent a spurious copy in their handshake, and what to do
/// about it; `None` if too few have been counted.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn spurious(name: &PolicyName, spurious: u64, connections: u64) -> Option<(f64, String)> {
    let share = spurious as f64 / connections.max(spurious) as f64;
    (spurious >= FEWEST).then(|| {
        let text = format!(
            "policy {name}: {spurious} of {connections} connections ({:.1}%) sent a spurious SYN \
             or SYN-ACK, because the initial RTO is shorter than their path RTT; raise it above \
             the path RTT that rto-agent stats --policy {name} shows, or set it to \"auto\"",
            share * 100.0
        );
        (share, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn harm(stats: PolicyStats) -> Harm {
        Harm::of(&"near".parse().unwrap(), &stats)
    }

    fn active(active: DirectionStats) -> ArmStats {
        ArmStats {
            active,
            ..ArmStats::default()
        }
    }

    #[test]
    fn spurious_share_warns_and_beyond_half_is_a_problem() {
        let found = |connections, spurious_connections| {
            let stats = DirectionStats {
                connections,
                spurious_connections,
                ..DirectionStats::default()
            };
            let harm = harm(active(stats).into());
            (harm.warnings.len(), harm.problem.is_some())
        };
        assert_eq!(found(10_000, 100), (0, false));
        assert_eq!(found(10_000, 101), (1, false));
        // Too few for a warning.
        assert_eq!(found(19, 19), (0, false));
        assert_eq!(found(200, 150), (0, true));
    }

    #[test]
    fn connections_without_memory_are_counted_in_both_arms() {
        let counted = |treated, control| {
            let of = |storage_failures| {
                active(DirectionStats {
                    storage_failures,
                    ..DirectionStats::default()
                })
            };
            let stats = PolicyStats {
                control: Some(of(control)),
                ..of(treated).into()
            };
            harm(stats).warnings.pop().unwrap_or_default()
        };
        assert_eq!(counted(0, 0), "");
        assert!(counted(2, 0).contains("state of 2 connections"));
        assert!(counted(2, 3).contains("state of 5 connections"));
        assert!(counted(0, 3).contains("state of 3 connections"));
    }

    #[test]
    fn lost_callbacks_are_reported_with_their_number() {
        let stats = |callbacks_lost| DirectionStats {
            callbacks_lost,
            ..DirectionStats::default()
        };
        assert!(harm(active(stats(0)).into()).warnings.is_empty());
        let unknown = ArmStats {
            unknown: stats(3),
            ..active(stats(2))
        };
        let warnings = harm(unknown.into()).warnings;
        assert!(warnings[0].contains("callbacks of 5 connections"));
    }

    #[test]
    fn harm_of_inactive_policy_is_not_reported() {
        let refused = BTreeMap::from([("TCP_RTO_MIN_US".to_owned(), 2)]);
        let near: PolicyName = "near".parse().unwrap();
        let stats = DirectionStats {
            setsockopt_failures: refused,
            ..DirectionStats::default()
        };
        let mut harms = Harms::default();
        harms.note([(&near, &active(stats).into())], false);
        let text = "policy near: the kernel refused TCP_RTO_MIN_US 2 times";
        let warnings =
            |harms: &Harms, all: &[PolicyName]| harms.report(&all.iter().cloned().collect()).1;
        assert_eq!(warnings(&harms, std::slice::from_ref(&near)), [text]);
        assert!(warnings(&harms, &[]).is_empty());
        harms.note([(&near, &PolicyStats::default())], true);
        assert!(warnings(&harms, &[near]).is_empty() && harms.read_at_s().is_some());
    }
}
