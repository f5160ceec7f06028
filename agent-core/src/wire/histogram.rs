//! A histogram of times in JSON.

use std::collections::BTreeMap;

use rto_agent_common::histogram::{BUCKETS, Histogram, LAST, bucket_end_us};
use rto_model::{distribution::Distribution, tune::evidence::Moments};
use serde::{Deserialize, Serialize};

/// A histogram of times: log-linear, four buckets to a power of two, 16 us to 67 s.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HistogramView {
    /// Number of times.
    pub count: u64,
    /// Their sum, microseconds.
    pub sum_us: u64,
    /// The buckets that are not empty, in order.
    pub buckets: Vec<BucketView>,
}

/// One bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BucketView {
    /// The bucket's lower end, microseconds.
    pub from_us: u64,
    /// The bucket's upper end (exclusive), microseconds; absent: no upper end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_us: Option<u64>,
    /// How many.
    pub count: u64,
}

/// Adds the times of a program's histogram; each counts as its bucket's upper bound.
pub fn add_times(times: &mut Distribution, histogram: &Histogram) {
    for (bucket, count) in histogram.buckets.iter().enumerate() {
        times.add(bucket_end_us(bucket).unwrap_or(u64::MAX), *count);
    }
}

impl HistogramView {
    /// Each time as the upper bound of its bucket. A sampled connection represents `sampling`
    /// connections and becomes one sample; rounding up keeps slow times that were counted individually.
    pub fn distribution(&self, sampling: u64) -> Distribution {
        let mut times = Distribution::default();
        for bucket in &self.buckets {
            let samples = bucket.count.div_ceil(sampling.max(1));
            times.add(bucket.below_us.unwrap_or(u64::MAX), samples);
        }
        times
    }

    /// Whether there are no times.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The quantile of a share, microseconds, with times spread evenly within a bucket; `None` for
    /// an empty histogram. Times in the last bucket count as its lower bound.
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
    #[expect(clippy::cast_precision_loss, reason = "a mean has fractions")]
    pub fn mean_us(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_us as f64 / self.count as f64)
    }

    /// The mean and the variance, microseconds, with times spread evenly within a bucket.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn moments(&self) -> Option<Moments> {
        let mean = self.mean_us()?;
        let count = self.count as f64;
        let squares = self.buckets.iter().map(|bucket| {
            let from = bucket.from_us as f64;
            let end = bucket.below_us.unwrap_or(1 << LAST) as f64;
            bucket.count as f64 * (from * from + from * end + end * end) / 3.0
        });
        let variance = squares.sum::<f64>() / count - mean * mean;
        Some(Moments {
            count,
            mean,
            variance: variance.max(0.0),
        })
    }

    /// The cumulative counts: each bucket's upper bound, microseconds, and the number of times
    /// below it. The last bucket has no upper bound.
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

    /// Combines two histograms, bucket by bucket.
    pub fn with(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
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

impl From<&Histogram> for HistogramView {
    fn from(histogram: &Histogram) -> Self {
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
    fn histogram_growth_is_the_difference() {
        let (before, after) = (of(&[10, 100]), of(&[10, 100, 100, 5000]));
        let since = after.with(&before, u64::saturating_sub);
        assert_eq!(since, of(&[100, 5000]));
        assert_eq!(before.with(&since, u64::saturating_add), after);
    }

    #[test]
    fn last_cumulative_count_is_total() {
        let cumulative = of(&[1, 17, 17, 1 << 30]).cumulative();
        assert_eq!(cumulative.len(), BUCKETS);
        assert_eq!(cumulative[0], (Some(16), 1));
        assert_eq!(cumulative[1], (Some(20), 3));
        assert_eq!(cumulative[BUCKETS - 1], (None, 4));
    }
}
