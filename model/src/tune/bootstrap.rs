//! Quantiles of latency by arm with a bootstrap by minutes: to be shown, never to be tested.
//!
//! Connections of one burst of loss are slow together, so that bounds that take them for independent are too narrow.
//! Whole minutes are drawn instead, with both arms' connections in them: what all connections of a minute share is in
//! both arms of a draw. What lasts longer than a minute is not covered, nor is looking many times.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::advice::{Distribution, SplitMix64};

/// Where the generator begins: the same minutes have the same bounds.
const SEED: u64 = 0x426f_6f74_7374_7261;

/// The latencies of one minute, by arm.
#[derive(Clone, Debug, Default)]
pub struct Minute {
    /// Of the treatment.
    pub treated: Distribution,
    /// Of the control arm.
    pub control: Distribution,
}

/// A quantile and the bounds that 90 % of the draws were between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bounded {
    /// Of all minutes, microseconds: the upper end of a bucket.
    pub value_us: u64,
    /// 5 % of the draws were below it, microseconds.
    pub low_us: u64,
    /// 5 % of the draws were above it, microseconds.
    pub high_us: u64,
}

/// A quantile of latency of both arms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Quantiles {
    /// Of the treatment.
    pub treated: Bounded,
    /// Of the control arm.
    pub control: Bounded,
}

/// A quantile (0 to 1) of both arms, with bounds from `draws` draws of as many minutes as there are.
///
/// `None` where an arm has no latencies, or there are fewer than 20 minutes, of which draws say little. Draws
/// without latencies of an arm are left out of its bounds.
pub fn quantiles(minutes: &[Minute], quantile: f64, draws: u32) -> Option<Quantiles> {
    if minutes.len() < 20 {
        return None;
    }
    let treated = Table::of(minutes.iter().map(|minute| &minute.treated));
    let control = Table::of(minutes.iter().map(|minute| &minute.control));
    let mut random = SplitMix64(SEED);
    let mut drawn = (Vec::new(), Vec::new());
    let count = minutes.len() as u64;
    for _ in 0..draws.max(1) {
        let mut weights = vec![0; minutes.len()];
        for _ in 0..count {
            let index = usize::try_from(random.below(count)).unwrap_or(usize::MAX);
            if let Some(weight) = weights.get_mut(index) {
                *weight += 1;
            }
        }
        drawn.0.extend(treated.quantile(&weights, quantile));
        drawn.1.extend(control.quantile(&weights, quantile));
    }
    let once = vec![1; minutes.len()];
    let bounded = |table: &Table, drawn: Vec<u64>| {
        let drawn: Distribution = drawn.into_iter().collect();
        Some(Bounded {
            value_us: table.quantile(&once, quantile)?,
            low_us: drawn.quantile_us(0.05)?,
            high_us: drawn.quantile_us(0.95)?,
        })
    };
    Some(Quantiles {
        treated: bounded(&treated, drawn.0)?,
        control: bounded(&control, drawn.1)?,
    })
}

/// The latencies of one arm by minute, as positions in the list of all values, so that a draw is sums alone.
struct Table {
    values: Vec<u64>,
    minutes: Vec<Vec<(usize, u64)>>,
}

impl Table {
    fn of<'a>(minutes: impl Iterator<Item = &'a Distribution> + Clone) -> Self {
        let mut places: BTreeMap<u64, usize> = BTreeMap::new();
        for minute in minutes.clone() {
            places.extend(minute.iter().map(|(us, _)| (us, 0)));
        }
        for (place, slot) in places.values_mut().enumerate() {
            *slot = place;
        }
        let placed = |minute: &Distribution| {
            let counts = minute.iter();
            counts
                .filter_map(|(us, count)| Some((*places.get(&us)?, count)))
                .collect()
        };
        Self {
            minutes: minutes.map(placed).collect(),
            values: places.into_keys().collect(),
        }
    }

    /// A quantile if each minute counts so many times.
    fn quantile(&self, weights: &[u64], quantile: f64) -> Option<u64> {
        let mut sums = vec![0_u64; self.values.len()];
        for (minute, weight) in self.minutes.iter().zip(weights) {
            for (place, count) in minute {
                if let Some(sum) = sums.get_mut(*place) {
                    *sum = weight.saturating_mul(*count).saturating_add(*sum);
                }
            }
        }
        let all = sums.iter().fold(0_u64, |all, sum| all.saturating_add(*sum));
        let wanted = (all as f64 * quantile.clamp(0.0, 1.0)).ceil().max(1.0);
        let mut before = 0.0;
        let found = self.values.iter().zip(&sums).find(|(_, sum)| {
            before += **sum as f64;
            before >= wanted
        });
        found.map(|(us, _)| *us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minute(treated_us: &[u64], control_us: &[u64]) -> Minute {
        Minute {
            treated: treated_us.iter().copied().collect(),
            control: control_us.iter().copied().collect(),
        }
    }

    #[test]
    fn of_equal_minutes_the_bounds_are_the_quantile() {
        let minutes = vec![minute(&[10, 20, 30], &[1000, 1020, 1030]); 60];
        let median = quantiles(&minutes, 0.5, 100).unwrap();
        let exactly = |us| Bounded {
            value_us: us,
            low_us: us,
            high_us: us,
        };
        assert_eq!(median.treated, exactly(20));
        assert_eq!(median.control, exactly(1020));
    }

    #[test]
    fn few_minutes_and_an_empty_arm_have_no_bounds() {
        assert_eq!(quantiles(&vec![minute(&[1], &[1]); 19], 0.5, 10), None);
        assert_eq!(quantiles(&vec![minute(&[], &[1]); 60], 0.5, 10), None);
    }

    /// 60 minutes of 100 connections; in one minute of 20 half of them are slow, so that 2.5 % are in all. How often
    /// the bounds of the p98 contain the value that 5,000 minutes have, against bounds by order statistics, which
    /// take the connections for independent.
    #[test]
    fn minutes_cover_bursts_better_than_order_statistics() {
        let mut random = SplitMix64(7);
        let one = |random: &mut SplitMix64| {
            let burst = random.below(20) == 0;
            let times = (0..100).map(|_| {
                let slow = burst && random.below(2) == 0;
                // In buckets, as the agent counts them.
                if slow {
                    20_000 * (1 + random.below(50))
                } else {
                    10_000 + 100 * random.below(10)
                }
            });
            times.collect::<Vec<u64>>()
        };
        let long: Distribution = (0..5000).flat_map(|_| one(&mut random)).collect();
        let truth = long.quantile_us(0.98).unwrap();
        let (mut by_minutes, mut by_order) = (0, 0);
        for _ in 0..100 {
            let minutes: Vec<_> = (0..60).map(|_| one(&mut random)).collect();
            let all: Distribution = minutes.iter().flatten().copied().collect();
            // 6000 connections: the 5880th of them, and 1.645 standard deviations (10.8) to both sides.
            let (low, high) = (5862.0 / 6000.0, 5898.0 / 6000.0);
            let order = all.quantile_us(low).unwrap()..=all.quantile_us(high).unwrap();
            by_order += u32::from(order.contains(&truth));
            let minutes: Vec<_> = minutes.iter().map(|us| minute(us, us)).collect();
            let bounds = quantiles(&minutes, 0.98, 100).unwrap().treated;
            by_minutes += u32::from((bounds.low_us..=bounds.high_us).contains(&truth));
        }
        println!("90 % bounds of the p98 in bursts: minutes {by_minutes}, order {by_order} of 100");
        assert!(by_minutes >= 75, "{by_minutes}");
        assert!(by_order + 20 <= by_minutes, "{by_order} {by_minutes}");
    }
}
