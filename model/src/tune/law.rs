//! The control law: which timer path times ask for.
//!
//! A host sees the time of each path whatever its timer is: a spurious copy does not delay the answer to the first one.
//! So the timer is computed from the whole distribution, and nothing is tried out.

use serde::{Deserialize, Serialize};

use super::{
    cusum::Rates,
    history::{HOUR_MS, History, RECENT_COUNT},
    quantile::{allowed_with, bounded_quantile_us},
};
use crate::advice::{Distribution, INITIAL_RTO_US, samples_needed};

/// With so few samples there is no value.
pub const LEAST_SAMPLES: u64 = 300;
/// The share of the last connections that `fast` lets exceed it.
const RECENT_SHARE: f64 = 0.02;
/// `fast` may be wrong so often: 4 of 300 connections raise it. At 5 % it were 2, and as it is asked each second, two
/// slow ones of a long tail that come together by chance would do it about once an hour.
const RECENT_ERROR: f64 = 0.2;

/// What is asked of a tuned timer, of one policy and direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Jiffies a second.
    pub hz: u32,
    /// The least value, microseconds.
    pub min_us: u64,
    /// The largest, microseconds; not above the kernel's own.
    pub max_us: u64,
    /// The share of connections that may take longer than half the timer, 0 to 1.
    pub spurious: f64,
    /// How long an hour is remembered, and a value over a reboot, milliseconds.
    pub memory_ms: u64,
    /// How long nothing is lowered after the first alarm, milliseconds.
    pub hold_ms: u64,
    /// How long a value is in force without the daemon, milliseconds.
    pub lease_ms: u64,
    /// Shares of connections with a spurious copy.
    pub guard: Rates,
}

impl Settings {
    /// The defaults.
    #[must_use]
    pub const fn new(hz: u32) -> Self {
        Self {
            hz,
            min_us: 20_000,
            max_us: INITIAL_RTO_US,
            spurious: 0.001,
            memory_ms: 24 * HOUR_MS,
            hold_ms: 600_000,
            lease_ms: HOUR_MS,
            guard: Rates::DEFAULT,
        }
    }

    /// Rounded up to jiffies: a timer never fires sooner than asked.
    #[must_use]
    pub fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz.into()).div_ceil(1_000_000)
    }

    /// Whole jiffies as microseconds.
    #[must_use]
    pub fn micros(&self, jiffies: u64) -> u64 {
        jiffies.saturating_mul(1_000_000) / u64::from(self.hz.max(1))
    }

    /// Within the bounds, jiffies; at least one.
    #[must_use]
    pub fn clamped(&self, us: u64) -> u64 {
        let least = self.jiffies(self.min_us).max(1);
        self.jiffies(us).min(self.largest()).max(least)
    }

    /// The largest value, jiffies.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.jiffies(self.max_us.min(INITIAL_RTO_US)).max(1)
    }
}

/// What path times ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// The timer, jiffies.
    pub jiffies: u64,
    /// By the hours remembered, microseconds.
    pub slow_us: u64,
    /// By the last connections, microseconds; absent if these are too few.
    pub fast_us: Option<u64>,
}

impl Want {
    /// What a history asks for; `None` with fewer samples than [`LEAST_SAMPLES`].
    #[must_use]
    pub fn of(history: &History, settings: &Settings) -> Option<Self> {
        let slow_us = slow_us(history, settings)?;
        let fast_us = fast_us(history.recent());
        Some(Self {
            jiffies: settings.clamped(slow_us.max(fast_us.unwrap_or(0))),
            slow_us,
            fast_us,
        })
    }
}

/// Twice what a closed hour's share exceeds; before there is such an hour, what the share of all exceeds; with too few
/// samples for that, three times the largest.
fn slow_us(history: &History, settings: &Settings) -> Option<u64> {
    let all = history.all();
    if all.count() < LEAST_SAMPLES {
        return None;
    }
    if all.count() < samples_needed(settings.spurious) {
        return all.largest_us().map(|us| us.saturating_mul(3));
    }
    let exceeded = history
        .hours_us()
        .or_else(|| bounded_quantile_us(all, settings.spurious));
    exceeded.map(|us| us.saturating_mul(2))
}

/// One and a half times what one in fifty of the last connections exceeds.
fn fast_us(recent: &Distribution) -> Option<u64> {
    if recent.count() < RECENT_COUNT {
        return None;
    }
    let exceeded = recent.exceeded_by(allowed_with(recent.count(), RECENT_SHARE, RECENT_ERROR)?)?;
    Some(exceeded.saturating_mul(3) / 2)
}

/// After an alarm: three times what one in fifty of the last connections exceeds, or, with too few of them, the largest.
/// The hours before are no evidence then, and of the last connections most began before: as few are left as in the
/// beginning, and get the same headroom. With twice, the next minute raises it again.
#[must_use]
pub fn after_alarm_us(history: &History) -> Option<u64> {
    let recent = history.recent();
    let exceeded = bounded_quantile_us(recent, RECENT_SHARE).or_else(|| recent.largest_us())?;
    Some(exceeded.saturating_mul(3))
}

/// Whether a value is so much above what is asked for that it is lowered.
#[must_use]
pub const fn asks_for_less(want: u64, value: u64) -> bool {
    want.saturating_mul(10) <= value.saturating_mul(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings::new(250);

    /// So many a second.
    fn history(per_s: &[&[(u64, u64)]]) -> History {
        let mut history = History::default();
        for (second, buckets) in (0..).zip(per_s) {
            let mut times = Distribution::default();
            for (us, count) in *buckets {
                times.add(*us, *count);
            }
            history.add(second * 1000, &times, SETTINGS.memory_ms, SETTINGS.spurious);
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
    fn little_is_known_at_first() {
        assert_eq!(Want::of(&history(&[&[(10_000, 299)]]), &SETTINGS), None);
        let want = Want::of(&history(&[&[(10_000, 300)]]), &SETTINGS).unwrap();
        // Three times the largest.
        assert_eq!((want.slow_us, want.fast_us), (30_000, Some(15_000)));
        assert_eq!(want.jiffies, 8);
        let want = Want::of(&history(&[&[(10_000, 3_000)]]), &SETTINGS).unwrap();
        assert_eq!((want.slow_us, want.jiffies), (20_000, 5));
    }

    #[test]
    fn the_last_connections_raise_it() {
        let before: Vec<(u64, u64)> = vec![(10_000, 30_000)];
        let few = vec![(100_000, 3), (10_000, 297)];
        let want = Want::of(&history(&[&before, &few]), &SETTINGS).unwrap();
        assert_eq!(want.fast_us, Some(15_000));
        let more = vec![(100_000, 4), (10_000, 296)];
        let want = Want::of(&history(&[&before, &more]), &SETTINGS).unwrap();
        assert_eq!((want.slow_us, want.fast_us), (20_000, Some(150_000)));
        assert_eq!(want.jiffies, 38);
        assert_eq!(after_alarm_us(&history(&[&before, &more])), Some(300_000));
        // Too few to say what one in fifty exceeds.
        assert_eq!(after_alarm_us(&history(&[&[(70_000, 4)]])), Some(210_000));
        assert_eq!(after_alarm_us(&History::default()), None);
    }

    #[test]
    fn times_without_an_end_ask_for_the_largest_value() {
        let want = Want::of(&history(&[&[(u64::MAX, 3_000)]]), &SETTINGS).unwrap();
        assert_eq!(want.jiffies, SETTINGS.largest());
    }
}
