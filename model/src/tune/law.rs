//! The law: the initial RTO that path RTTs require. `auto`, `advise` and `discover` use the same ([`required_us`]).
//!
//! A host sees the RTT of each path whatever its timer is: a spurious SYN does not delay the answer
//! to the first one. So the timer is computed from the whole distribution, without trying values.

use rto_agent_common::syn::least_initial_rto;
use serde::{Deserialize, Serialize};

use super::{
    history::{History, RECENT_COUNT},
    quantile::{allowed_with, bounded_quantile_us, samples_needed},
};
use crate::{distribution::Distribution, syn::INITIAL_RTO_US};

/// With fewer samples there is no value.
pub const LEAST_SAMPLES: u64 = 300;
/// The share of the last samples that may exceed `fast`.
const RECENT_SHARE: f64 = 0.02;
/// The error probability of `fast`: 4 of 300 samples raise it. With 5 % it would be 2 of 300.
/// Because it is computed each second, two slow samples of a long tail would raise it by chance
/// about once an hour.
const RECENT_ERROR: f64 = 0.2;

/// Requirements for a learnt timer of one policy and direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Jiffies per second.
    pub hz: u32,
    /// The smallest value, microseconds.
    pub min_us: u64,
    /// The largest value, microseconds; not above the kernel's own.
    pub max_us: u64,
    /// The share of samples that may exceed half the timer, 0 to 1.
    pub spurious: f64,
}

impl Settings {
    /// The default requirements for the initial RTO.
    pub const fn new(hz: u32) -> Self {
        Self {
            hz,
            min_us: 60_000,
            max_us: INITIAL_RTO_US,
            spurious: 0.001,
        }
    }

    /// Microseconds rounded up to jiffies, so that the timer does not fire early.
    pub fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz.into()).div_ceil(1_000_000)
    }

    /// Converts jiffies to microseconds.
    pub fn micros(&self, jiffies: u64) -> u64 {
        jiffies.saturating_mul(1_000_000) / u64::from(self.hz.max(1))
    }

    /// Limits a value to the bounds, jiffies; at least what keeps two SYNs ten milliseconds apart.
    pub fn clamped(&self, us: u64) -> u64 {
        let least = self
            .jiffies(self.min_us)
            .max(least_initial_rto(self.hz).into());
        self.jiffies(us).min(self.largest()).max(least)
    }

    /// The largest value, jiffies.
    pub fn largest(&self) -> u64 {
        self.jiffies(self.max_us.min(INITIAL_RTO_US)).max(1)
    }
}

/// The timer for a quantile of the samples, microseconds: a number of halves of it, because the
/// variation of a path is unknown before its first sample.
const fn with_headroom(us: u64, halves: u64) -> u64 {
    us.saturating_mul(halves) / 2
}

/// The timer that samples require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// The timer, jiffies.
    pub jiffies: u64,
    /// The value to which a shorter timer is raised, jiffies; larger than `jiffies` if the last
    /// samples require more. When a path has just become longer, each second only part of the last
    /// samples shows it, so the value would otherwise rise in many steps.
    pub raised: u64,
    /// Quantile of the remembered hours, microseconds.
    pub slow_us: u64,
    /// Quantile of the last samples, microseconds; absent with too few samples.
    pub fast_us: Option<u64>,
}

impl Want {
    /// The timer that a history requires; `None` with fewer than [`LEAST_SAMPLES`] samples.
    pub fn of(history: &History, settings: &Settings) -> Option<Self> {
        let slow_us = slow_us(history, settings)?;
        let fast_us = fast_us(history.recent());
        let jiffies = settings.clamped(slow_us.max(fast_us.unwrap_or(0)));
        let raised = fast_us
            .filter(|us| *us > slow_us)
            .map(|us| settings.clamped(us.saturating_mul(2)))
            // Headroom alone must not lead to the kernel's own timer.
            .filter(|raised| (jiffies..settings.largest()).contains(raised));
        Some(Self {
            jiffies,
            raised: raised.unwrap_or(jiffies),
            slow_us,
            fast_us,
        })
    }
}

/// The timer that path RTTs require, microseconds: twice the quantile bound, or three times the
/// largest if there are too few samples for that; `None` with fewer than [`LEAST_SAMPLES`].
pub fn required_us(times: &Distribution, spurious: f64) -> Option<u64> {
    if times.count() < LEAST_SAMPLES {
        return None;
    }
    if times.count() < samples_needed(spurious) {
        return times.largest_us().map(|us| us.saturating_mul(3));
    }
    let exceeded = bounded_quantile_us(times, spurious)?;
    Some(with_headroom(exceeded, 4))
}

/// The largest quantile bound of the closed hours, doubled; before the first such hour, what all
/// samples require.
fn slow_us(history: &History, settings: &Settings) -> Option<u64> {
    match history.hours_us() {
        Some(exceeded) => Some(with_headroom(exceeded, 4)),
        None => required_us(history.all(), settings.spurious),
    }
}

/// The value that one in fifty of the last samples exceeds.
fn fast_us(recent: &Distribution) -> Option<u64> {
    if recent.count() < RECENT_COUNT {
        return None;
    }
    let exceeded = recent.exceeded_by(allowed_with(recent.count(), RECENT_SHARE, RECENT_ERROR)?)?;
    Some(with_headroom(exceeded, 3))
}

/// Whether a value is so far above the required one that it is lowered.
pub const fn asks_for_less(want: u64, value: u64) -> bool {
    want.saturating_mul(10) <= value.saturating_mul(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings {
        min_us: 20_000,
        ..Settings::new(250)
    };

    /// A history with these samples in each second.
    fn history(per_s: &[&[(u64, u64)]]) -> History {
        let mut history = History::default();
        for (second, buckets) in (0..).zip(per_s) {
            let mut times = Distribution::default();
            for (us, count) in *buckets {
                times.add(*us, *count);
            }
            history.add(second * 1000, &times, SETTINGS.spurious);
        }
        history
    }

    #[test]
    fn values_are_whole_jiffies_within_the_bounds() {
        assert_eq!(SETTINGS.clamped(1), 5);
        assert_eq!(SETTINGS.clamped(20_001), 6);
        assert_eq!(SETTINGS.clamped(u64::MAX), 250);
        assert_eq!(SETTINGS.micros(6), 24_000);
        let beyond = Settings {
            max_us: 5_000_000,
            hz: 300,
            ..SETTINGS
        };
        assert_eq!((beyond.largest(), beyond.clamped(10_000_000)), (300, 300));
    }

    #[test]
    fn few_samples_take_three_times_longest() {
        assert_eq!(Want::of(&history(&[&[(10_000, 299)]]), &SETTINGS), None);
        let want = Want::of(&history(&[&[(10_000, 300)]]), &SETTINGS).unwrap();
        // With few samples, three times the largest.
        assert_eq!((want.slow_us, want.fast_us), (30_000, Some(15_000)));
        assert_eq!(want.jiffies, 8);
        let want = Want::of(&history(&[&[(10_000, 3_000)]]), &SETTINGS).unwrap();
        assert_eq!((want.slow_us, want.jiffies), (20_000, 5));
    }

    #[test]
    fn latest_connections_raise_value() {
        let before: Vec<(u64, u64)> = vec![(10_000, 30_000)];
        let few = vec![(100_000, 3), (10_000, 297)];
        let want = Want::of(&history(&[&before, &few]), &SETTINGS).unwrap();
        assert_eq!(want.fast_us, Some(15_000));
        let more = vec![(100_000, 4), (10_000, 296)];
        let want = Want::of(&history(&[&before, &more]), &SETTINGS).unwrap();
        assert_eq!((want.slow_us, want.fast_us), (20_000, Some(150_000)));
        assert_eq!(want.jiffies, 38);
        // With headroom, unless that reaches the kernel's own timer.
        assert_eq!(want.raised, 75);
        let slow = vec![(400_000, 4), (10_000, 296)];
        let want = Want::of(&history(&[&before, &slow]), &SETTINGS).unwrap();
        assert_eq!((want.jiffies, want.raised), (150, 150));
    }

    #[test]
    fn unbounded_times_take_largest_value() {
        let want = Want::of(&history(&[&[(u64::MAX, 3_000)]]), &SETTINGS).unwrap();
        assert_eq!(want.jiffies, SETTINGS.largest());
    }
}
