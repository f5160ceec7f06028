//! Distributions of times whose order is unknown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Times and their frequencies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<u64, u64>", into = "BTreeMap<u64, u64>")]
pub struct Distribution {
    counts: BTreeMap<u64, u64>,
    count: u64,
}

impl Distribution {
    /// Adds times of at most this length: a value, or the upper bound of a histogram's bucket (`u64::MAX` if it has
    /// none), microseconds.
    pub fn add(&mut self, at_most_us: u64, count: u64) {
        // The limit keeps the total, and therefore all partial sums, within u64.
        let count = count.min(u64::MAX - self.count);
        if count > 0 {
            *self.counts.entry(at_most_us).or_default() += count;
            self.count += count;
        }
    }

    /// Adds all times of another distribution.
    pub fn extend(&mut self, other: &Self) {
        for (at_most_us, count) in &other.counts {
            self.add(*at_most_us, *count);
        }
    }

    /// Removes the times of another distribution that was added before. Times that are not present are ignored.
    pub fn remove(&mut self, other: &Self) {
        for (at_most_us, count) in &other.counts {
            let Some(present) = self.counts.get_mut(at_most_us) else {
                continue;
            };
            let count = (*count).min(*present);
            *present -= count;
            self.count -= count;
            if *present == 0 {
                self.counts.remove(at_most_us);
            }
        }
    }

    /// The largest time, microseconds; `None` without times.
    pub fn largest_us(&self) -> Option<u64> {
        self.counts.last_key_value().map(|(us, _)| *us)
    }

    /// The smallest value that at most `at_most` times exceed, microseconds; `None` if there are no times.
    pub fn exceeded_by(&self, at_most: u64) -> Option<u64> {
        let mut above = 0;
        let mut longest_first = self.counts.iter().rev();
        let mut found = longest_first.next();
        for shorter in longest_first {
            above += found.map_or(0, |(_, count)| *count);
            if above > at_most {
                break;
            }
            found = Some(shorter);
        }
        found.map(|(us, _)| *us)
    }

    /// The number of times.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Each time in microseconds and its frequency, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().map(|(us, count)| (*us, *count))
    }

    /// The number of times that may be longer than this.
    pub fn above(&self, us: u64) -> u64 {
        let longer = self.counts.range(us.saturating_add(1)..);
        longer.map(|(_, count)| *count).sum()
    }

    /// The time that a share of all times does not exceed, microseconds; `None` if there are no times.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count is not above it"
    )]
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let wanted = ((self.count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
        self.nth(wanted - 1)
    }

    /// The n-th shortest time, counted from 0.
    fn nth(&self, n: u64) -> Option<u64> {
        let mut before = 0;
        let found = self.counts.iter().find(|(_, count)| {
            before += **count;
            n < before
        });
        found.map(|(us, _)| *us)
    }
}

impl From<BTreeMap<u64, u64>> for Distribution {
    fn from(counts: BTreeMap<u64, u64>) -> Self {
        let mut distribution = Self::default();
        for (us, count) in counts {
            distribution.add(us, count);
        }
        distribution
    }
}

impl From<Distribution> for BTreeMap<u64, u64> {
    fn from(distribution: Distribution) -> Self {
        distribution.counts
    }
}

impl FromIterator<u64> for Distribution {
    fn from_iter<I: IntoIterator<Item = u64>>(times_us: I) -> Self {
        let mut distribution = Self::default();
        for us in times_us {
            distribution.add(us, 1);
        }
        distribution
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn zero_counts_are_omitted_from_distribution() {
        let counts = BTreeMap::from([(500, 3), (700, 0), (9_000, 2)]);
        let distribution = Distribution::from(counts);
        assert_eq!(distribution.count(), 5);
        let counts = BTreeMap::from(distribution);
        assert_eq!(counts, BTreeMap::from([(500, 3), (9_000, 2)]));
    }

    proptest! {
        #[test]
        fn quantiles_match_sorted_list(
            mut times in prop::collection::vec(0u64..1_000_000, 1..200),
            share in 0.0f64..1.0,
        ) {
            let distribution: Distribution = times.iter().copied().collect();
            times.sort_unstable();
            // The first value that this share does not exceed.
            let all = times.len() as f64;
            let expected = (1..).zip(&times).find(|(n, _)| f64::from(*n) >= share * all);
            let (_, expected) = expected.unwrap();
            prop_assert_eq!(distribution.quantile_us(share), Some(*expected));
            let above = times.iter().filter(|t| *t > expected).count() as u64;
            prop_assert_eq!(distribution.above(*expected), above);
        }
    }
}
