//! `GET /v1/stats`: what policies did, by who began the connections.

use std::collections::BTreeMap;

use rto_agent_common::{
    RTO_STEPS, SockOpt, Statistics,
    histogram::{self, BUCKETS, LAST, bucket_end_us},
};
use serde::{Deserialize, Serialize};

use crate::policy::PolicyName;

/// The answer. Counts begin with the policy (or the boot) and only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Whether anything is counted (`statistics` in `[agent]`).
    pub on: bool,
    /// When smoothed RTTs are sampled (`rtt_sampling` in `[agent]`): "off", "end" or a duration.
    pub rtt_sampling: String,
    /// By policy; "unlisted" is what no entry covers, where that is counted (`count_unlisted`).
    pub policies: BTreeMap<PolicyName, PolicyStats>,
}

/// One policy's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyStats {
    /// Connections this host opens.
    pub active: DirectionStats,
    /// Connections it accepts.
    pub passive: DirectionStats,
    /// Sockets that were open before their policy: who began them is not known.
    pub unknown: DirectionStats,
}

impl PolicyStats {
    /// Each with its name.
    #[must_use]
    pub fn directions(&self) -> [(&'static str, &DirectionStats); 3] {
        [
            ("active", &self.active),
            ("passive", &self.passive),
            ("unknown", &self.unknown),
        ]
    }

    /// What came since an earlier look.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            active: self.active.since(&earlier.active),
            passive: self.passive.since(&earlier.passive),
            unknown: self.unknown.since(&earlier.unknown),
        }
    }

    /// All together.
    #[must_use]
    pub fn total(&self) -> DirectionStats {
        self.active.plus(&self.passive).plus(&self.unknown)
    }
}

impl From<&[Statistics; 3]> for PolicyStats {
    fn from([active, passive, unknown]: &[Statistics; 3]) -> Self {
        Self {
            active: active.into(),
            passive: passive.into(),
            unknown: unknown.into(),
        }
    }
}

/// One direction's. Fields as in [`rto_agent_common::Counters`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionStats {
    /// Connections established.
    pub connections: u64,
    /// Initial RTOs set.
    pub initial_rtos_set: u64,
    /// SYNs (active) or SYN-ACKs (passive) sent again.
    pub handshake_retransmissions: u64,
    /// Of these, needless: the answer to an earlier copy was on its way.
    pub spurious: u64,
    /// Of these, those of which it could not be told.
    pub undecided: u64,
    /// Connections that a needed one brought about.
    pub recovered: u64,
    /// By how much sooner than with the kernel's own timers, microseconds (an estimate).
    pub time_saved_us: u64,
    /// By how much later, where the policy's are longer, microseconds.
    pub time_lost_us: u64,
    /// bpf_setsockopt calls the kernel refused, by option; only those that happened.
    pub setsockopt_failures: BTreeMap<String, u64>,
    /// Connections left alone for want of memory.
    pub storage_failures: u64,
    /// Retransmission timeouts by how many came right before without an answer: 0, 1, ... 6, and 7 or
    /// more.
    pub rtos: [u64; RTO_STEPS],
    /// Connections given up at a retransmission timeout; they are among the aborted.
    pub expired: u64,
    /// Tail loss probes that sent a segment again.
    pub tail_loss_probes: u64,
    /// Segments sent again, other than by a tail loss probe.
    pub segments_retransmitted: u64,
    /// Times linear mode was ended by `linear_retries`.
    pub linear_ended: u64,
    /// Sockets that were open already and got the policy's options.
    pub open_sockets: u64,
    /// Connections that ended without both sides having finished.
    pub aborted: u64,
    /// How long handshakes took.
    pub handshake: HistogramView,
    /// Smoothed round-trip times.
    pub srtt: HistogramView,
}

impl DirectionStats {
    /// The sum of two.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    /// What came since an earlier look.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }

    fn with(&self, other: &Self, f: impl Fn(u64, u64) -> u64 + Copy) -> Self {
        let mut failures = self.setsockopt_failures.clone();
        for (option, count) in &other.setsockopt_failures {
            let sum = failures.entry(option.clone()).or_default();
            *sum = f(*sum, *count);
        }
        failures.retain(|_, count| *count > 0);
        Self {
            connections: f(self.connections, other.connections),
            initial_rtos_set: f(self.initial_rtos_set, other.initial_rtos_set),
            handshake_retransmissions: f(
                self.handshake_retransmissions,
                other.handshake_retransmissions,
            ),
            spurious: f(self.spurious, other.spurious),
            undecided: f(self.undecided, other.undecided),
            recovered: f(self.recovered, other.recovered),
            time_saved_us: f(self.time_saved_us, other.time_saved_us),
            time_lost_us: f(self.time_lost_us, other.time_lost_us),
            setsockopt_failures: failures,
            storage_failures: f(self.storage_failures, other.storage_failures),
            rtos: std::array::from_fn(|i| f(self.rtos[i], other.rtos[i])),
            expired: f(self.expired, other.expired),
            tail_loss_probes: f(self.tail_loss_probes, other.tail_loss_probes),
            segments_retransmitted: f(self.segments_retransmitted, other.segments_retransmitted),
            linear_ended: f(self.linear_ended, other.linear_ended),
            open_sockets: f(self.open_sockets, other.open_sockets),
            aborted: f(self.aborted, other.aborted),
            handshake: self.handshake.with(&other.handshake, f),
            srtt: self.srtt.with(&other.srtt, f),
        }
    }
}

impl From<&Statistics> for DirectionStats {
    fn from(statistics: &Statistics) -> Self {
        let c = &statistics.counters;
        let failures = SockOpt::NAMES
            .iter()
            .map(|(option, name)| ((*name).to_owned(), c.setsockopt_failures[*option as usize]))
            .filter(|(_, count)| *count > 0);
        Self {
            connections: c.connections,
            initial_rtos_set: c.initial_rtos_set,
            handshake_retransmissions: c.handshake_retransmissions,
            spurious: c.spurious,
            undecided: c.undecided,
            recovered: c.recovered,
            time_saved_us: c.time_saved_us,
            time_lost_us: c.time_lost_us,
            setsockopt_failures: failures.collect(),
            storage_failures: c.storage_failures,
            rtos: c.rtos,
            expired: c.expired,
            tail_loss_probes: c.tail_loss_probes,
            segments_retransmitted: c.segments_retransmitted,
            linear_ended: c.linear_ended,
            open_sockets: c.open_sockets,
            aborted: c.aborted,
            handshake: (&statistics.handshake).into(),
            srtt: (&statistics.srtt).into(),
        }
    }
}

/// A histogram of times: log-linear, four buckets to a power of two, 16 us to 67 s.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistogramView {
    /// How many times.
    pub count: u64,
    /// Their sum, microseconds.
    pub sum_us: u64,
    /// The buckets with something in them, in order.
    pub buckets: Vec<BucketView>,
}

/// One bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketView {
    /// Times from here on, microseconds.
    pub from_us: u64,
    /// And below this, microseconds; absent: of any length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_us: Option<u64>,
    /// How many.
    pub count: u64,
}

impl HistogramView {
    /// The time that a share of all do not exceed, microseconds, evenly spread within a bucket; `None`
    /// if there are none. What lies beyond the last bucket counts as its end.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a quantile of buckets is an estimate"
    )]
    pub fn quantile_us(&self, share: f64) -> Option<f64> {
        let wanted = share * self.count as f64;
        let mut below = 0.0;
        for bucket in &self.buckets {
            let count = bucket.count as f64;
            if below + count >= wanted {
                let from = bucket.from_us as f64;
                let end = bucket.below_us.unwrap_or(1 << LAST) as f64;
                let part = ((wanted - below) / count).clamp(0.0, 1.0);
                return Some(from + (end - from) * part);
            }
            below += count;
        }
        None
    }

    /// The mean, microseconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a mean has fractions")]
    pub fn mean_us(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_us as f64 / self.count as f64)
    }

    /// How many times are below the end of each bucket, one after the other: (end in microseconds, so
    /// many), the last without an end.
    #[must_use]
    pub fn cumulative(&self) -> Vec<(Option<u64>, u64)> {
        let mut sum = 0;
        let mut rest = self.buckets.iter().peekable();
        (0..BUCKETS)
            .map(|bucket| {
                let end = bucket_end_us(bucket);
                if let Some(found) = rest.next_if(|b| b.below_us == end) {
                    sum += found.count;
                }
                (end, sum)
            })
            .collect()
    }

    fn with(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let mut counts: BTreeMap<u64, BucketView> =
            self.buckets.iter().map(|b| (b.from_us, *b)).collect();
        for bucket in &other.buckets {
            let empty = BucketView {
                count: 0,
                ..*bucket
            };
            let sum = counts.entry(bucket.from_us).or_insert(empty);
            sum.count = f(sum.count, bucket.count);
        }
        let buckets: Vec<_> = counts.into_values().filter(|b| b.count > 0).collect();
        Self {
            count: buckets.iter().map(|b| b.count).sum(),
            sum_us: f(self.sum_us, other.sum_us),
            buckets,
        }
    }
}

impl From<&histogram::Histogram> for HistogramView {
    fn from(histogram: &histogram::Histogram) -> Self {
        let from = |bucket: usize| bucket.checked_sub(1).and_then(bucket_end_us).unwrap_or(0);
        let buckets = histogram.buckets.iter().enumerate();
        let buckets: Vec<_> = buckets
            .filter(|(_, count)| **count > 0)
            .map(|(bucket, count)| BucketView {
                from_us: from(bucket),
                below_us: bucket_end_us(bucket),
                count: *count,
            })
            .collect();
        Self {
            count: buckets.iter().map(|b| b.count).sum(),
            sum_us: histogram.sum_us,
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::histogram::{Histogram, bucket_of};

    use super::*;

    fn of(times_us: &[u64]) -> HistogramView {
        let mut histogram = Histogram::default();
        for us in times_us {
            histogram.sum_us += us;
            histogram.buckets[bucket_of(*us)] += 1;
        }
        (&histogram).into()
    }

    #[test]
    fn quantiles_lie_in_the_bucket_of_the_time() {
        let times: Vec<u64> = (1..=1000).map(|n| n * 100).collect();
        let view = of(&times);
        assert_eq!((view.count, view.mean_us()), (1000, Some(50_050.0)));
        for (share, exact) in [(0.5, 50_000.0), (0.99, 99_000.0), (1.0, 100_000.0)] {
            let found = view.quantile_us(share).unwrap();
            assert!((found - exact).abs() <= exact / 4.0, "{share}: {found}");
        }
        assert_eq!(of(&[]).quantile_us(0.5), None);
        assert_eq!(of(&[u64::MAX / 2]).quantile_us(0.5), Some(67_108_864.0));
    }

    #[test]
    fn what_came_since_is_the_difference() {
        let (before, after) = (of(&[10, 100]), of(&[10, 100, 100, 5000]));
        let since = after.with(&before, u64::saturating_sub);
        assert_eq!(since, of(&[100, 5000]));
        assert_eq!(before.with(&since, u64::saturating_add), after);
    }

    #[test]
    fn cumulative_counts_end_with_all() {
        let cumulative = of(&[1, 17, 17, 1 << 30]).cumulative();
        assert_eq!(cumulative.len(), BUCKETS);
        assert_eq!(cumulative[0], (Some(16), 1));
        assert_eq!(cumulative[1], (Some(20), 3));
        assert_eq!(cumulative[BUCKETS - 1], (None, 4));
    }
}
