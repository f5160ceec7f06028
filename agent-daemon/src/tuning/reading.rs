//! Readings of a timer's counters, and the growth between two readings.

use rto_agent_common::direction;
use rto_agent_core::wire::{histogram::add_times, stats::ArmStatistics};
use rto_model::{distribution::Distribution, tune::tuner};
use serde::{Deserialize, Serialize};

use super::spec::TimerId;

/// The counters of one timer. Stored, so that what is counted while the daemon is stopped is
/// evaluated later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reading {
    /// Connections with the policy's settings.
    pub(super) counts: tuner::Counts,
    /// Path RTTs.
    pub(super) samples: Distribution,
}

impl Reading {
    pub(super) fn of(statistics: &ArmStatistics, id: TimerId) -> Self {
        let direction = match id {
            TimerId::Active => direction::ACTIVE,
            TimerId::Passive => direction::PASSIVE,
        };
        let statistics = &statistics.treated[direction as usize];
        let counters = &statistics.counters;
        let mut samples = Distribution::default();
        add_times(&mut samples, &statistics.path_rtt);
        Self {
            counts: tuner::Counts {
                connections: statistics.connections(),
                spurious: counters.spurious_connections,
            },
            samples,
        }
    }

    /// The growth since an earlier reading. `None` if a counter is lower than before: the
    /// statistics were re-created, and cannot be compared.
    pub(super) fn since(&self, earlier: &Self) -> Option<Self> {
        let (now, then) = (&self.counts, &earlier.counts);
        let mut samples = self.samples.clone();
        samples.remove(&earlier.samples);
        // `remove()` ignores counts that are higher in `earlier`: the totals detect that.
        let is_complete =
            samples.count().checked_add(earlier.samples.count())? == self.samples.count();
        is_complete.then_some(())?;
        Some(Self {
            counts: tuner::Counts {
                connections: now.connections.checked_sub(then.connections)?,
                spurious: now.spurious.checked_sub(then.spurious)?,
            },
            samples,
        })
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{Statistics, histogram};

    use super::*;

    fn statistics(connections: u64, times: &[(u64, u64)]) -> ArmStatistics {
        let mut statistics = Statistics::default();
        let timed: u64 = times.iter().map(|(_, count)| count).sum();
        statistics.counters.untimed = connections.saturating_sub(timed);
        for (us, count) in times {
            statistics.path_rtt.buckets[histogram::bucket_of(*us)] += count;
        }
        ArmStatistics {
            treated: [statistics, Statistics::default(), Statistics::default()],
            control: None,
        }
    }

    fn reading(connections: u64, times: &[(u64, u64)]) -> Reading {
        Reading::of(&statistics(connections, times), TimerId::Active)
    }

    #[test]
    fn growth_counts_since_last_reading() {
        let (first, second) = (
            reading(5, &[(10_000, 4)]),
            reading(8, &[(10_000, 6), (90_000, 1)]),
        );
        let growth = second.since(&first).unwrap();
        assert_eq!(growth.counts.connections, 3);
        let times: Vec<_> = growth.samples.iter().collect();
        // The buckets are 8 to 10.24 ms and 81.92 to 98.304 ms.
        assert_eq!(times, [(10_240, 2), (98_304, 1)]);
        assert_eq!(second.since(&second), Some(Reading::default()));
    }

    #[test]
    fn decreased_counters_have_no_growth() {
        let first = reading(5, &[(10_000, 4)]);
        assert_eq!(reading(4, &[(10_000, 4)]).since(&first), None);
        // As many samples in total, in another bucket.
        assert_eq!(reading(9, &[(20_000, 9)]).since(&first), None);
        assert_eq!(reading(9, &[(10_000, 3)]).since(&first), None);
    }
}
