//! Tunes `rto_min`: how long after a round trip an acknowledgement may come.
//!
//! Its evidence is by how much RTT samples of the **control arm** exceed the least of their connection. A low `rto_min`
//! censors its own: a spurious copy is acknowledged at once, and Karn's algorithm drops the sample.

use serde::{Deserialize, Serialize};

use super::{
    history::{HOUR_MS, History, RECENT_COUNT},
    law::{LEAST_SAMPLES, Want},
    quantile::bounded_quantile_us,
    tuner::{Cause, Next, Numbers, Phase, Transition},
};
use crate::advice::{Distribution, samples_needed};

/// `TCP_RTO_MIN`: the kernel's own, microseconds.
const KERNEL_US: u64 = 200_000;
/// The share of delays that may exceed the value.
const SHARE: f64 = 0.001;
/// The share of the last delays that may.
const RECENT_SHARE: f64 = 0.02;
/// No value is lowered sooner after a change, milliseconds.
const BETWEEN_MS: u64 = 60_000;
/// A raised value is lowered when for so long nothing asked for as much, milliseconds: of the last few delays more than
/// 2 % are long now and then.
const AFTER_RAISE_MS: u64 = HOUR_MS;
/// The estimator's own granularity, jiffies.
const SLACK_JIFFIES: u64 = 2;

/// What is asked of a tuned `rto_min`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Jiffies a second.
    pub hz: u32,
    /// The least value, microseconds: what a peer may delay an ACK by, and two jiffies.
    pub floor_us: u64,
    /// How long an hour is remembered, and a value over a reboot, milliseconds.
    pub memory_ms: u64,
}

impl Settings {
    /// Peers with the kernel's own delay of ACKs: up to 40 ms.
    #[must_use]
    pub const fn new(hz: u32) -> Self {
        Self {
            hz,
            floor_us: 48_000,
            memory_ms: 24 * HOUR_MS,
        }
    }

    fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz.into()).div_ceil(1_000_000)
    }

    /// The kernel's own, jiffies.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.jiffies(KERNEL_US)
    }

    /// `1.25 x us + 2 jiffies`, at least the floor, jiffies.
    fn covering(&self, us: u64) -> u64 {
        let quarter_more = us.saturating_add(us / 4);
        let jiffies = self.jiffies(quarter_more).saturating_add(SLACK_JIFFIES);
        jiffies.max(self.jiffies(self.floor_us)).min(self.largest())
    }
}

/// Tunes the `rto_min` of one policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AckTuner {
    settings: Settings,
    phase: Phase,
    /// Jiffies; `None`: the kernel's own.
    jiffies: Option<u64>,
    history: History,
    /// Delays taken in since the last change.
    samples: u64,
    changed_ms: Option<u64>,
    /// When delays last asked for a value that they raised.
    raised_ms: Option<u64>,
    last_step_ms: Option<u64>,
}

impl AckTuner {
    /// One that knows nothing.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            phase: Phase::Learning,
            jiffies: None,
            history: History::default(),
            samples: 0,
            changed_ms: None,
            raised_ms: None,
            last_step_ms: None,
        }
    }

    /// In which phase it is.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// The value, jiffies; `None`: the kernel's own.
    #[must_use]
    pub const fn jiffies(&self) -> Option<u64> {
        self.jiffies
    }

    /// What it is asked to be like.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes other settings; the value follows with the next steps.
    pub const fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Remembers so many hours at most, the present one among them.
    pub fn limit_memory(&mut self, hours: usize) {
        self.history.limit(hours);
    }

    /// What delays ask for; `None` with too few.
    #[must_use]
    pub fn want(&self) -> Option<Want> {
        let all = self.history.all();
        if all.count() < LEAST_SAMPLES {
            return None;
        }
        let slow_us = if all.count() < samples_needed(SHARE) {
            all.largest_us()?.saturating_mul(3)
        } else {
            self.history
                .hours_us()
                .or_else(|| bounded_quantile_us(all, SHARE))?
        };
        let recent = self.history.recent();
        let fast_us = (recent.count() >= RECENT_COUNT)
            .then(|| bounded_quantile_us(recent, RECENT_SHARE))
            .flatten();
        Some(Want {
            jiffies: self.settings.covering(slow_us.max(fast_us.unwrap_or(0))),
            slow_us,
            fast_us,
        })
    }

    /// What the next decision rests on.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        Numbers {
            want: self.want(),
            samples: self.history.all().count(),
            clean: 0,
            spurious: 0,
            attempts: 0,
            copies: 0,
            log_evidence: 0.0,
            hold_until_ms: 0,
        }
    }

    /// Takes in delays that were counted since the step before. To be called about once a second.
    #[must_use]
    pub fn step(&mut self, now_ms: u64, delays: &Distribution) -> Option<Transition> {
        self.last_step_ms = Some(now_ms);
        self.history
            .add(now_ms, delays, self.settings.memory_ms, SHARE);
        self.samples = self.samples.saturating_add(delays.count());
        if self.phase == Phase::Frozen {
            return None;
        }
        let want = self.want()?.jiffies;
        let largest = self.settings.largest();
        let value = self.jiffies.unwrap_or(largest);
        if want > value {
            self.raised_ms = Some(now_ms);
            // At the kernel's own there is nothing to set.
            let next = (want < largest).then_some(want);
            return Some(self.enter(now_ms, Phase::Steady, Cause::WantHigher, next));
        }
        if want.saturating_mul(10) > value.saturating_mul(8) {
            if self.raised_ms.is_some() {
                self.raised_ms = Some(now_ms);
            }
            let settles = self.phase == Phase::Lowering;
            return settles
                .then(|| self.enter(now_ms, Phase::Steady, Cause::Settled, self.jiffies));
        }
        if now_ms < self.may_lower_ms() || self.samples < LEAST_SAMPLES {
            return None;
        }
        self.raised_ms = None;
        let cause = match self.jiffies {
            Some(_) => Cause::WantLower,
            None => Cause::EnoughSamples,
        };
        let next = want.max(value.div_ceil(2));
        Some(self.enter(now_ms, Phase::Lowering, cause, Some(next)))
    }

    /// When the value may be lowered, as far as time decides.
    fn may_lower_ms(&self) -> u64 {
        let after = |since_ms: Option<u64>, ms: u64| since_ms.map_or(0, |at_ms| at_ms + ms);
        after(self.changed_ms, BETWEEN_MS).max(after(self.raised_ms, AFTER_RAISE_MS))
    }

    /// What comes next, if things stay as they are.
    #[must_use]
    pub fn next(&self) -> Next {
        let lacks = |count: u64| LEAST_SAMPLES.saturating_sub(count);
        if self.phase == Phase::Frozen {
            return Next::Resume;
        }
        let Some(want) = self.want() else {
            let samples = lacks(self.history.all().count());
            return Next::Learn { samples };
        };
        let value = self.jiffies.unwrap_or(self.settings.largest());
        if want.jiffies.saturating_mul(10) > value.saturating_mul(8) {
            return match self.jiffies {
                Some(_) => Next::Nothing,
                None => Next::NothingToGain,
            };
        }
        Next::Lower {
            to: want.jiffies.max(value.div_ceil(2)),
            at_ms: self.may_lower_ms(),
            connections: lacks(self.samples),
        }
    }

    /// The kernel's own, until [`AckTuner::resume`].
    #[must_use]
    pub fn freeze(&mut self, now_ms: u64) -> Option<Transition> {
        (self.phase != Phase::Frozen)
            .then(|| self.enter(now_ms, Phase::Frozen, Cause::Operator, None))
    }

    /// Ends [`AckTuner::freeze`].
    #[must_use]
    pub fn resume(&mut self, now_ms: u64) -> Option<Transition> {
        (self.phase == Phase::Frozen)
            .then(|| self.enter(now_ms, Phase::Learning, Cause::Operator, None))
    }

    /// Continues after a reboot with twice the stored value, if that is not older than the memory, or learns.
    #[must_use]
    pub fn after_boot(&mut self, now_ms: u64) -> Option<Transition> {
        let last_ms = self.last_step_ms.replace(now_ms).unwrap_or(0);
        self.history.forget_recent();
        let stored = self.jiffies?;
        let age_ms = now_ms.saturating_sub(last_ms);
        let twice = Some(stored.saturating_mul(2)).filter(|jiffies| {
            age_ms < self.settings.memory_ms && *jiffies < self.settings.largest()
        });
        let phase = match twice {
            Some(_) => Phase::Lowering,
            None => Phase::Learning,
        };
        Some(self.enter(now_ms, phase, Cause::Boot, twice))
    }

    fn enter(&mut self, at_ms: u64, to: Phase, cause: Cause, after: Option<u64>) -> Transition {
        let transition = Transition {
            at_ms,
            from: self.phase,
            to,
            cause,
            before: self.jiffies,
            after,
            numbers: self.numbers(),
        };
        self.phase = to;
        if after != self.jiffies {
            self.jiffies = after;
            self.changed_ms = Some(at_ms);
            self.samples = 0;
        }
        transition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host {
        tuner: AckTuner,
        now_ms: u64,
        all: Vec<Transition>,
    }

    impl Host {
        fn new() -> Self {
            Self {
                tuner: AckTuner::new(Settings::new(250)),
                now_ms: 0,
                all: Vec::new(),
            }
        }

        fn run(&mut self, seconds: u64, us: u64, per_s: u64) {
            for _ in 0..seconds {
                self.now_ms += 1_000;
                let mut delays = Distribution::default();
                delays.add(us, per_s);
                self.all.extend(self.tuner.step(self.now_ms, &delays));
            }
        }

        fn values(&self) -> Vec<Option<u64>> {
            self.all.iter().map(|t| t.after).collect()
        }
    }

    #[test]
    fn down_by_halves_to_what_covers_a_delayed_ack() {
        let mut host = Host::new();
        host.run(5, 5_000, 50);
        assert_eq!((host.tuner.phase(), host.all.len()), (Phase::Learning, 0));
        host.run(595, 5_000, 50);
        // 200 ms are 50 jiffies; 48 ms 12.
        assert_eq!(host.values(), [Some(25), Some(13), Some(13)]);
        assert_eq!(host.tuner.phase(), Phase::Steady);
        assert_eq!(host.all[1].at_ms - host.all[0].at_ms, 60_000);
        // Nothing more happens.
        host.run(100_000, 5_000, 1);
        assert_eq!(host.all.len(), 3);
    }

    #[test]
    fn other_settings_and_a_shorter_memory_are_for_what_is_known() {
        let mut host = Host::new();
        host.run(600, 5_000, 50);
        let before = host.tuner.want().unwrap();
        assert_eq!(before.jiffies, 12);
        let coarse = Settings::new(100);
        host.tuner.configure(coarse);
        assert_eq!(*host.tuner.settings(), coarse);
        assert!(host.tuner.want().unwrap().jiffies < before.jiffies);
        // Of six hours with 100 ms and one with 5 only the last is remembered.
        let mut host = Host::new();
        host.run(6 * 3_600, 100_000, 1);
        host.run(3_600, 5_000, 1);
        assert_eq!(host.tuner.want().unwrap().slow_us, 100_000);
        host.tuner.limit_memory(1);
        assert!(host.tuner.want().is_none_or(|want| want.slow_us < 100_000));
    }

    #[test]
    fn a_value_is_lowered_once_enough_was_seen_with_it() {
        let mut host = Host::new();
        while host.all.is_empty() {
            host.run(1, 5_000, 50);
        }
        // A minute and more, with one sample short of what is needed.
        host.run(1, 5_000, LEAST_SAMPLES - 1);
        host.run(120, 5_000, 0);
        assert_eq!(host.all.len(), 1);
        host.run(1, 5_000, 1);
        assert_eq!(host.all.len(), 2);
    }

    #[test]
    fn a_longer_delay_raises_it_at_once() {
        let mut host = Host::new();
        host.run(1_000, 5_000, 50);
        host.all.clear();
        host.run(6, 60_000, 50);
        // 1.25 x 60 ms + 8 ms.
        assert_eq!(host.values(), [Some(21)]);
        host.run(10, 160_000, 50);
        // At the kernel's own there is nothing to set.
        assert_eq!(host.values(), [Some(21), None]);
        host.run(10_000, 160_000, 50);
        assert_eq!(host.all.len(), 2);
        assert_eq!(host.tuner.next(), Next::NothingToGain);
    }

    #[test]
    fn a_few_long_delays_raise_it_for_an_hour() {
        let mut host = Host::new();
        host.run(4_000, 5_000, 50);
        host.all.clear();
        host.run(1, 60_000, 2);
        host.run(3_590, 5_000, 50);
        assert_eq!(host.values(), [Some(21)]);
        host.run(20, 5_000, 50);
        assert_eq!(host.values()[1..], [Some(12), Some(12)]);
    }

    #[test]
    fn few_delays_count_three_times_the_largest() {
        let mut host = Host::new();
        host.run(1, 10_000, 300);
        assert_eq!(host.tuner.want().unwrap().jiffies, 12);
        host.run(1, 40_000, 1);
        // 1.25 x 120 ms + 8 ms.
        assert_eq!(host.tuner.want().unwrap().jiffies, 40);
        host.run(1, 10_000, 5_000);
        assert_eq!(host.tuner.want().unwrap().jiffies, 12);
    }

    #[test]
    fn without_samples_nothing_changes() {
        let mut host = Host::new();
        host.run(100_000, 5_000, 0);
        assert_eq!((host.tuner.phase(), host.all.len()), (Phase::Learning, 0));
        let mut host = Host::new();
        host.run(1_000, 5_000, 50);
        let before = host.all.len();
        host.run(90_000, 5_000, 0);
        assert_eq!(host.all.len(), before);
    }

    #[test]
    fn a_boot_doubles_it_and_an_operator_freezes_it() {
        let mut host = Host::new();
        host.run(1_000, 5_000, 50);
        let booted = host.tuner.after_boot(host.now_ms + HOUR_MS).unwrap();
        assert_eq!((booted.before, booted.after), (Some(13), Some(26)));
        let frozen = host.tuner.freeze(host.now_ms).unwrap();
        assert_eq!((frozen.to, frozen.after), (Phase::Frozen, None));
        host.run(1_000, 5_000, 50);
        assert_eq!(host.tuner.jiffies(), None);
        assert_eq!(host.tuner.resume(host.now_ms).unwrap().to, Phase::Learning);
        host.run(1_000, 5_000, 50);
        assert_eq!(host.tuner.jiffies(), Some(13));
        let late = host.tuner.after_boot(host.now_ms + 30 * HOUR_MS).unwrap();
        assert_eq!((late.to, late.after), (Phase::Learning, None));
    }

    #[test]
    fn a_known_delay_is_a_lower_floor() {
        let settings = Settings {
            floor_us: 13_000,
            ..Settings::new(250)
        };
        assert_eq!(settings.covering(0), 4);
        assert_eq!(settings.covering(u64::MAX), 50);
        assert_eq!(Settings::new(1000).covering(5_000), 48);
    }
}
