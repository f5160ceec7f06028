//! Distributions of times whose order is unknown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    estimator::{Sample, in_turn},
    retransmit::RTO_MAX_US,
};

/// Number of samples in a flow that is drawn from values without order.
const DRAWN_FLOW: usize = 250;

/// Times and their frequencies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<u64, u64>", into = "BTreeMap<u64, u64>")]
pub struct Distribution {
    pub(super) counts: BTreeMap<u64, u64>,
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

    /// At least `samples` samples, drawn at random (always the same), as flows of 250 segments,
    /// each of which is sent when the previous one is answered; empty if there are no times.
    pub fn drawn(&self, samples: usize) -> Vec<Vec<Sample>> {
        if self.count == 0 {
            return Vec::new();
        }
        // Cumulative counts, so that a value can be found by binary search.
        let sums: Vec<(u64, u64)> = self
            .counts
            .iter()
            .scan(0, |sum, (us, count)| {
                *sum += count;
                Some((*sum, (*us).min(RTO_MAX_US)))
            })
            .collect();
        let mut random = SplitMix64(0x5274_6f41_6476_6973);
        let mut one = || {
            let n = random.below(self.count);
            let index = sums.partition_point(|(sum, _)| *sum <= n);
            sums.get(index).map_or(0, |(_, us)| *us)
        };
        (0..samples.div_ceil(DRAWN_FLOW))
            .map(|_| in_turn((0..DRAWN_FLOW).map(|_| one())))
            .collect()
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

/// The generator by Steele, Lea and Flood. It always yields the same draws, so that the same evidence gives the same
/// advice.
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`: the upper half of a product, which is uniform enough for counts far below 2^64.
    pub(crate) const fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of the reference implementation (prng.di.unimi.it/splitmix64.c) for the seed 1234567.
    #[test]
    fn draws_are_those_of_splitmix64() {
        let mut random = SplitMix64(1_234_567);
        for draw in [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ] {
            assert_eq!(random.next(), draw);
        }
    }

    #[test]
    fn a_map_is_a_distribution_without_what_is_not_there() {
        let counts = BTreeMap::from([(500, 3), (700, 0), (9_000, 2)]);
        let distribution = Distribution::from(counts);
        assert_eq!(distribution.count(), 5);
        let counts = BTreeMap::from(distribution);
        assert_eq!(counts, BTreeMap::from([(500, 3), (9_000, 2)]));
    }
}
