//! What a policy's counters had come to at the last reading, and what they have grown by since.

use rto_agent_common::{Statistics, direction};
use rto_model::advice::Distribution;
use serde::{Deserialize, Serialize};

use crate::{datapath::ArmStatistics, wire::histogram::add_times};

/// A reading. It is stored, so that what is counted while the daemon is away is taken in later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) active: Handshakes,
    pub(super) passive: Handshakes,
    /// [`Statistics::ack_excess`] of the control arm.
    pub(super) delays: Distribution,
    /// Connections of the control arm.
    pub(super) in_control: u64,
}

/// Of one direction, of connections that have the policy's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Handshakes {
    pub(super) connections: u64,
    pub(super) failed: u64,
    /// Of `connections`.
    pub(super) retransmitted: u64,
    /// Connections and attempts that a brake gave the kernel's own timer.
    #[serde(default)]
    pub(super) braked: u64,
    pub(super) copies: u64,
    /// Connections of which a copy was spurious.
    pub(super) spurious: u64,
    pub(super) path_times: Distribution,
}

impl Counts {
    pub(super) fn of(statistics: &ArmStatistics) -> Self {
        let [active, passive] =
            [direction::ACTIVE, direction::PASSIVE].map(|d| &statistics.treated[d as usize]);
        let mut counts = Self {
            active: Handshakes::of(active),
            passive: Handshakes::of(passive),
            ..Self::default()
        };
        for control in statistics.control.iter().flatten() {
            add_times(&mut counts.delays, &control.ack_excess);
            counts.in_control += control.counters.connections;
        }
        counts
    }

    /// What was counted since an earlier reading. `None` if anything is less than it was: the statistics were made anew,
    /// and what they say now has no beginning.
    pub(super) fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            active: self.active.since(&earlier.active)?,
            passive: self.passive.since(&earlier.passive)?,
            // A control arm comes and goes, and its counters with it.
            delays: times_since(&self.delays, &earlier.delays).unwrap_or_default(),
            in_control: self.in_control.saturating_sub(earlier.in_control),
        })
    }
}

impl Handshakes {
    fn of(statistics: &Statistics) -> Self {
        let counters = &statistics.counters;
        let mut path_times = Distribution::default();
        add_times(&mut path_times, &statistics.handshake);
        Self {
            connections: counters.connections,
            failed: counters.failed,
            retransmitted: counters.retransmitted_handshakes,
            braked: counters.braked,
            copies: counters.handshake_retransmissions,
            spurious: counters.spurious_connections,
            path_times,
        }
    }

    fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            connections: self.connections.checked_sub(earlier.connections)?,
            failed: self.failed.checked_sub(earlier.failed)?,
            retransmitted: self.retransmitted.checked_sub(earlier.retransmitted)?,
            braked: self.braked.checked_sub(earlier.braked)?,
            copies: self.copies.checked_sub(earlier.copies)?,
            spurious: self.spurious.checked_sub(earlier.spurious)?,
            path_times: times_since(&self.path_times, &earlier.path_times)?,
        })
    }

    /// Connections of which nothing was retransmitted, and which had the value in force: at least so many.
    pub(super) const fn clean(&self) -> u64 {
        // They are counted one after the other.
        let others = self.retransmitted.saturating_add(self.braked);
        self.connections.saturating_sub(others)
    }
}

fn times_since(now: &Distribution, earlier: &Distribution) -> Option<Distribution> {
    let mut growth = now.clone();
    growth.remove(earlier);
    // What is not there any more was not taken away.
    let complete = growth.count().checked_add(earlier.count())? == now.count();
    complete.then_some(growth)
}

#[cfg(test)]
mod tests {
    use rto_agent_common::histogram;

    use super::*;

    fn reading(connections: u64, times: &[(u64, u64)]) -> Counts {
        let mut statistics = Statistics::default();
        statistics.counters.connections = connections;
        for (us, count) in times {
            statistics.handshake.buckets[histogram::bucket_of(*us)] += count;
        }
        Counts::of(&ArmStatistics {
            treated: [statistics, Statistics::default(), Statistics::default()],
            control: None,
        })
    }

    #[test]
    fn growth_is_what_came_since() {
        let (first, second) = (
            reading(5, &[(10_000, 4)]),
            reading(8, &[(10_000, 6), (90_000, 1)]),
        );
        let growth = second.since(&first).unwrap();
        assert_eq!(growth.active.connections, 3);
        let times: Vec<_> = growth.active.path_times.iter().collect();
        // Of a bucket of 8 to 10.24 ms, and of 81.92 to 98.304 ms.
        assert_eq!(times, [(10_240, 2), (98_304, 1)]);
        assert_eq!(second.since(&second), Some(Counts::default()));
    }

    #[test]
    fn the_end_of_a_control_arm_is_no_new_beginning() {
        let mut all = [Statistics::default(); 3];
        all[0].counters.connections = 5;
        all[0].ack_excess.buckets[3] = 2;
        let with = |control| {
            Counts::of(&ArmStatistics {
                treated: all,
                control,
            })
        };
        assert_eq!(with(None).since(&with(Some(all))), Some(Counts::default()));
    }

    #[test]
    fn braked_connections_are_no_evidence() {
        let mut statistics = Statistics::default();
        statistics.counters.connections = 9;
        statistics.counters.retransmitted_handshakes = 1;
        statistics.counters.braked = 5;
        assert_eq!(Handshakes::of(&statistics).clean(), 3);
        statistics.counters.braked = 50;
        assert_eq!(Handshakes::of(&statistics).clean(), 0);
    }

    #[test]
    fn counters_that_went_back_have_no_growth() {
        let first = reading(5, &[(10_000, 4)]);
        assert_eq!(reading(4, &[(10_000, 4)]).since(&first), None);
        // As many, and other ones.
        assert_eq!(reading(9, &[(20_000, 9)]).since(&first), None);
        assert_eq!(reading(9, &[(10_000, 3)]).since(&first), None);
    }

    #[test]
    fn delays_are_of_the_control_arm_alone() {
        let mut all = [Statistics::default(); 3];
        all[1].ack_excess.buckets[histogram::bucket_of(5_000)] = 7;
        all[1].counters.connections = 2;
        let statistics = ArmStatistics {
            treated: all,
            control: None,
        };
        assert_eq!(Counts::of(&statistics).delays.count(), 0);
        let statistics = ArmStatistics {
            treated: all,
            control: Some(all),
        };
        let counts = Counts::of(&statistics);
        assert_eq!((counts.delays.count(), counts.in_control), (7, 2));
    }
}
