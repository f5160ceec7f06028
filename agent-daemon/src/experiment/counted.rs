//! The counters of a policy's arms, and their growth.

use rto_agent_common::{GOOD_US, Statistics};
use rto_agent_core::wire::{histogram::HistogramView, stats::ArmStatistics};
use rto_model::tune::experiment::{Arms, Counts, Increments};
use serde::{Deserialize, Serialize};

/// The counters of one arm, for connections that this host opened or accepted. Sockets that were
/// open before their policy are left out, as they were not drawn into an arm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counted {
    pub(super) counts: Counts,
    /// Connect times of connections that this host opened.
    pub(super) connect_time: HistogramView,
}

impl Counted {
    /// The counters of both arms; all zero for a missing control arm.
    pub(super) fn of(statistics: &ArmStatistics) -> Arms<Self> {
        let control = statistics.control.as_ref();
        Arms {
            treated: Self::of_arm(&statistics.treated),
            control: control.map_or_else(Self::default, Self::of_arm),
        }
    }

    fn of_arm([active, passive, _]: &[Statistics; 3]) -> Self {
        let late = active.counters.late;
        Self {
            counts: Counts {
                attempts: active.counters.attempts,
                good: active.connections().saturating_sub(late),
                requests: passive.counters.attempts,
                late_accepted: passive.counters.late,
                spurious: active.counters.spurious_connections
                    + passive.counters.spurious_connections,
            },
            connect_time: (&active.connect_times()).into(),
        }
    }

    pub(super) fn since(&self, earlier: &Self) -> Self {
        Self {
            counts: self.counts.since(&earlier.counts),
            connect_time: self
                .connect_time
                .with(&earlier.connect_time, u64::saturating_sub),
        }
    }

    /// The average number of attempts in progress that became good, over a period.
    #[expect(clippy::cast_precision_loss, reason = "an average")]
    fn under_way(&self, in_ms: u64) -> f64 {
        if in_ms == 0 {
            return 0.0;
        }
        let good = self.connect_time.buckets.iter();
        // Each lasts as long as its bucket's upper bound.
        let sum_us: f64 = good
            .filter(|bucket| bucket.from_us <= u64::from(GOOD_US))
            .map(|bucket| (bucket.count * bucket.below_us.unwrap_or_default()) as f64)
            .sum();
        sum_us / (in_ms * 1000) as f64
    }
}

/// The increments of both arms over a period.
pub(super) fn increments(grown: &Arms<Counted>, in_ms: u64) -> Increments {
    Increments {
        counts: grown.map(|arm| arm.counts),
        under_way: grown.map(|arm| arm.under_way(in_ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_active_and_requests_passive() {
        let mut active = Statistics::default();
        active.counters.attempts = 100;
        active.counters.late = 2;
        active.path_rtt.buckets[20] = 90;
        let mut passive = active;
        passive.counters.attempts = 50;
        let statistics = ArmStatistics {
            treated: [active, passive, active],
            control: None,
        };
        let before = Counted::of(&statistics);
        let Counts {
            attempts,
            good,
            requests,
            late_accepted,
            ..
        } = before.treated.counts;
        assert_eq!((attempts, good, requests, late_accepted), (100, 88, 50, 2));
        assert_eq!(before.control, Counted::default());
        active.counters.attempts = 110;
        active.path_rtt.buckets[20] = 99;
        let now = Counted::of(&ArmStatistics {
            treated: [active, passive, active],
            control: None,
        });
        let grown = now.zip(&before, Counted::since);
        assert_eq!(
            (grown.treated.counts.attempts, grown.treated.counts.good),
            (10, 9)
        );
        assert_eq!(grown.treated.connect_time.count, 9);
    }

    #[test]
    fn average_under_way_is_that_of_good_attempts() {
        let mut active = Statistics::default();
        // 100 of 320 to 384 ms in a second, and some late ones.
        let bucket = rto_agent_common::histogram::bucket_of(350_000);
        active.path_rtt.buckets[bucket] = 100;
        active.path_rtt.buckets[rto_agent_common::histogram::bucket_of(1_000_000)] = 100;
        let none = Statistics::default();
        let counted = Counted::of(&ArmStatistics {
            treated: [active, none, none],
            control: None,
        });
        let Arms { treated, control } = increments(&counted, 1000).under_way;
        assert!((35.0..40.0).contains(&treated), "{treated}");
        assert_eq!(control, 0.0);
    }
}
