//! What was counted of a policy's arms, and by how much it has grown.

use rto_agent_common::Statistics;
use rto_model::{
    advice::Distribution,
    tune::experiment::{Arms, Counts},
};
use serde::{Deserialize, Serialize};

use crate::{datapath::ArmStatistics, wire::histogram::add_times};

/// What was counted of one arm: of the connections that this host opened and of those that it accepted, not of
/// sockets that were open before their policy, which were drawn into no arm when they began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counted {
    pub(super) counts: Counts,
    /// How long handshakes took, microseconds.
    pub(super) handshake: Distribution,
    /// Smoothed round-trip times, microseconds.
    pub(super) rtt: Distribution,
}

impl Counted {
    /// Of both arms; nothing where there is no control arm.
    pub(super) fn of(statistics: &ArmStatistics) -> Arms<Self> {
        Arms {
            treated: Self::of_arm(&statistics.treated),
            control: statistics
                .control
                .as_ref()
                .map_or_else(Self::default, Self::of_arm),
        }
    }

    fn of_arm([active, passive, _]: &[Statistics; 3]) -> Self {
        let mut counted = Self::default();
        for direction in [active, passive] {
            let c = &direction.counters;
            counted.counts = counted.counts
                + Counts {
                    attempts: c.connections.saturating_add(c.failed),
                    failed: c.failed,
                    beyond_500_ms: c.slow_handshakes,
                    spurious: c.spurious_connections,
                    dsack: c.dsack_connections,
                    aborted: c.aborted_after_loss,
                };
            add_times(&mut counted.handshake, &direction.handshake);
            add_times(&mut counted.rtt, &direction.srtt);
        }
        counted
    }

    /// What came since an earlier look. Where anything is less than it was the counters have begun anew, and all of
    /// it came since.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        if !self.may_follow(earlier) {
            return self.clone();
        }
        let (now, before) = (&self.counts, &earlier.counts);
        let rest = |now: &Distribution, before: &Distribution| {
            let mut rest = now.clone();
            rest.remove(before);
            rest
        };
        Self {
            counts: Counts {
                attempts: now.attempts - before.attempts,
                failed: now.failed - before.failed,
                beyond_500_ms: now.beyond_500_ms - before.beyond_500_ms,
                spurious: now.spurious - before.spurious,
                dsack: now.dsack - before.dsack,
                aborted: now.aborted - before.aborted,
            },
            handshake: rest(&self.handshake, &earlier.handshake),
            rtt: rest(&self.rtt, &earlier.rtt),
        }
    }

    fn may_follow(&self, earlier: &Self) -> bool {
        let numbers = |counted: &Self| {
            let Counts {
                attempts,
                failed,
                beyond_500_ms,
                spurious,
                dsack,
                aborted,
            } = counted.counts;
            let times = [counted.handshake.count(), counted.rtt.count()];
            let [handshake, rtt] = times;
            [
                attempts,
                failed,
                beyond_500_ms,
                spurious,
                dsack,
                aborted,
                handshake,
                rtt,
            ]
        };
        let pairs = numbers(self).into_iter().zip(numbers(earlier));
        pairs.into_iter().all(|(now, before)| now >= before)
    }
}

/// Whether nothing was ever counted of a policy, so that no connection of before is open.
pub(super) fn is_untouched(statistics: &ArmStatistics) -> bool {
    let mut arms = std::iter::once(&statistics.treated).chain(&statistics.control);
    arms.all(|arm| {
        arm.iter()
            .all(|direction| *direction == Statistics::default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(connections: u64) -> Statistics {
        let mut statistics = Statistics::default();
        statistics.counters.connections = connections;
        statistics.counters.failed = connections / 10;
        statistics.handshake.buckets[20] = connections;
        statistics
    }

    fn both(active: u64, passive: u64) -> ArmStatistics {
        let [active, passive] = [active, passive].map(statistics);
        ArmStatistics {
            treated: [active, passive, statistics(1000)],
            control: None,
        }
    }

    #[test]
    fn attempts_are_of_both_directions_and_of_those_that_failed() {
        let arms = Counted::of(&both(100, 50));
        assert_eq!(arms.treated.counts.attempts, 165);
        assert_eq!(arms.treated.counts.failed, 15);
        assert_eq!(arms.treated.handshake.count(), 150);
        assert_eq!(arms.control, Counted::default());
        let later = Counted::of(&both(110, 50)).treated;
        let since = later.since(&arms.treated);
        assert_eq!((since.counts.attempts, since.handshake.count()), (11, 10));
    }

    #[test]
    fn counters_that_begin_anew_are_counted_from_nothing() {
        let before = Counted::of(&both(100, 0)).treated;
        let anew = Counted::of(&both(30, 0)).treated;
        assert_eq!(anew.since(&before), anew);
        assert_eq!(before.since(&before), Counted::default());
    }

    #[test]
    fn a_policy_that_has_counted_anything_is_not_untouched() {
        assert!(!is_untouched(&both(0, 0)));
        let none = [Statistics::default(); 3];
        let untouched = ArmStatistics {
            treated: none,
            control: Some(none),
        };
        assert!(is_untouched(&untouched));
        let mut control = none;
        control[1].counters.initial_rtos_set = 1;
        let control = Some(control);
        assert!(!is_untouched(&ArmStatistics {
            control,
            ..untouched
        }));
    }
}
