//! The tuner: what a daemon asks once a second which timer is right now.
//!
//! It has no clock and does no I/O. Its state is plain data that a daemon stores; times are milliseconds of a clock that
//! does not go back, also not over a reboot if the state is kept over it.
//!
//! Each value that is set begins an *epoch*. A verdict counts only in the epoch whose timer the connection began with:
//! verdicts come late, and those on the timer before would raise the next one again.

mod guard;
mod next;
mod state;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use self::guard::Guarded;
pub use self::{
    next::Next,
    state::{Cause, Numbers, Phase, Transition},
};

use super::{
    cusum::Cusum,
    history::{HOUR_MS, History},
    law::{LEAST_SAMPLES, Settings, Want, after_alarm_us, asks_for_less},
};
use crate::{advice::Distribution, tune::brake::Budget};

/// The longest hold, milliseconds.
const LONGEST_HOLD_MS: u64 = 24 * HOUR_MS;
/// After so long without an alarm the next hold is the shortest again, milliseconds.
const CLEAN_MS: u64 = 24 * HOUR_MS;
/// No value is lowered sooner after a change, milliseconds.
const BETWEEN_MS: u64 = 60_000;
/// A raised value is lowered when for so long nothing asked for as much, milliseconds. On a path whose times vary over
/// minutes, as with a queue, the last 300 connections are fast and slow by turns.
const AFTER_RAISE_MS: u64 = HOUR_MS;
/// Of connections, while a value is tried again after a suspension, percent.
const CANARY_PERCENT: u8 = 5;

/// What was counted since the step before, of one policy and direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Growth {
    /// The epoch that the verdicts and the fuse are of.
    pub epoch: u32,
    /// Connections that began with this epoch's timer, and of which no copy was spurious.
    pub clean: u64,
    /// Those of which a copy was.
    pub spurious: u64,
    /// Connection attempts, in any epoch.
    pub attempts: u64,
    /// Copies of SYNs or SYN-ACKs, in any epoch.
    pub copies: u64,
    /// Path times of connections judged meanwhile, whatever their timer; each connection counts once.
    pub path_times: Distribution,
    /// The fuse of this epoch is blown.
    pub fuse_blown: bool,
    /// The budget does not allow the policy's timer.
    pub throttled: bool,
}

/// The timer in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The timer, jiffies; `None`: the kernel's own.
    pub jiffies: Option<u64>,
    /// Of connections that get it, percent; the others have the kernel's own.
    pub percent: u8,
    /// Which epoch it began.
    pub epoch: u32,
}

/// What a step decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// What to set; `None`: nothing changes.
    pub setting: Option<Setting>,
    /// What happened, in order.
    pub transitions: Vec<Transition>,
}

/// Tunes the initial RTO of one policy and direction, or guards the one that is configured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuner {
    settings: Settings,
    phase: Phase,
    setting: Setting,
    history: History,
    cusum: Cusum,
    /// Of this epoch.
    clean: u64,
    spurious: u64,
    attempts: u64,
    copies: u64,
    changed_ms: Option<u64>,
    /// When path times last asked for a value that they raised.
    raised_ms: Option<u64>,
    last_step_ms: Option<u64>,
    hold_until_ms: u64,
    /// The next hold is 2^level times the shortest.
    hold_level: u32,
    last_alarm_ms: Option<u64>,
    /// Absent where the value is tuned.
    #[serde(default)]
    guarded: Option<Guarded>,
}

impl Tuner {
    /// One that knows nothing: it begins with the kernel's own timer.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            phase: Phase::Learning,
            setting: Setting {
                jiffies: None,
                percent: 100,
                epoch: 0,
            },
            history: History::default(),
            cusum: Cusum::default(),
            clean: 0,
            spurious: 0,
            attempts: 0,
            copies: 0,
            changed_ms: None,
            raised_ms: None,
            last_step_ms: None,
            hold_until_ms: 0,
            hold_level: 0,
            last_alarm_ms: None,
            guarded: None,
        }
    }

    /// The program knows this epoch of somebody before: those of this one come after it.
    pub const fn skip_epochs(&mut self, seen: u32) {
        if self.setting.epoch <= seen {
            self.setting.epoch = seen.wrapping_add(1);
        }
    }

    /// In which phase it is.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// What is in force.
    #[must_use]
    pub const fn setting(&self) -> Setting {
        self.setting
    }

    /// What path times ask for at the moment.
    #[must_use]
    pub fn want(&self) -> Option<Want> {
        Want::of(&self.history, &self.settings)
    }

    /// What the value rests on.
    #[must_use]
    pub const fn history(&self) -> &History {
        &self.history
    }

    /// What the next decision rests on; counts are of this epoch.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        Numbers {
            want: self.want(),
            samples: self.history.all().count(),
            clean: self.clean,
            spurious: self.spurious,
            attempts: self.attempts,
            copies: self.copies,
            log_evidence: self.cusum.log_evidence(),
            hold_until_ms: self.hold_until_ms,
        }
    }

    /// What it is asked to be like.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The last step, milliseconds.
    #[must_use]
    pub const fn last_step_ms(&self) -> Option<u64> {
        self.last_step_ms
    }

    /// The capacity of the policy's [`Budget`], copies.
    #[must_use]
    pub fn budget_capacity(&self) -> u32 {
        Budget::capacity_for(u32::try_from(self.history.peak_per_s()).unwrap_or(u32::MAX))
    }

    /// Takes other settings; the value follows with the next steps.
    pub fn configure(&mut self, settings: Settings) {
        self.history.rebound(settings.spurious);
        self.settings = settings;
    }

    /// Remembers so many hours at most, the present one among them.
    pub fn limit_memory(&mut self, hours: usize) {
        self.history.limit(hours);
    }

    /// Takes in what was counted, and decides. To be called about once a second.
    #[must_use]
    pub fn step(&mut self, now_ms: u64, growth: &Growth) -> Decision {
        self.deciding(|tuner, transitions| {
            tuner.renew_lease(now_ms, transitions);
            let Settings {
                memory_ms,
                spurious,
                ..
            } = tuner.settings;
            tuner
                .history
                .add(now_ms, &growth.path_times, memory_ms, spurious);
            let alarm = tuner.count(growth);
            // A hold is no quiet time: nothing shorter was tried in it.
            let alarm_ms = tuner.last_alarm_ms;
            let quiet_since = alarm_ms.map_or(0, |at_ms| at_ms.max(tuner.hold_until_ms));
            if now_ms.saturating_sub(quiet_since) >= CLEAN_MS {
                tuner.hold_level = 0;
            }
            let alarm = alarm.then_some(Cause::Alarm);
            let fuse = growth.fuse_blown && growth.epoch == tuner.setting.epoch;
            let alarm = alarm.or(fuse.then_some(Cause::Fuse));
            tuner.advance(now_ms, alarm, growth.throttled, transitions);
        })
    }

    /// An experiment has proven harm: all connections get the kernel's own timer, and 5 % of them a value after the hold.
    #[must_use]
    pub fn harm_proven(&mut self, now_ms: u64) -> Decision {
        self.deciding(|tuner, transitions| {
            if tuner.phase != Phase::Frozen && !tuner.only_warns() {
                tuner.suspend(now_ms, Cause::HarmProven, transitions);
            }
        })
    }

    /// The kernel's own timer, until [`Tuner::resume`].
    #[must_use]
    pub fn freeze(&mut self, now_ms: u64) -> Decision {
        self.deciding(|tuner, transitions| {
            if tuner.phase != Phase::Frozen && !tuner.only_warns() {
                tuner.enter(now_ms, Phase::Frozen, Cause::Operator, None, transitions);
            }
        })
    }

    /// Ends [`Tuner::freeze`]: it learns anew from what it remembers, or the configured value is back.
    #[must_use]
    pub fn resume(&mut self, now_ms: u64) -> Decision {
        self.deciding(|tuner, transitions| {
            if tuner.phase == Phase::Frozen {
                let (phase, value) = match tuner.guarded {
                    // A hold lasts as long as it would have.
                    _ if now_ms < tuner.hold_until_ms => (Phase::Suspended, None),
                    Some(guarded) => (Phase::Steady, Some(guarded.jiffies)),
                    None => (Phase::Learning, None),
                };
                tuner.enter(now_ms, phase, Cause::Operator, value, transitions);
            }
        })
    }

    /// Continues after a reboot with twice the stored value, if that is not older than the memory, or learns.
    #[must_use]
    pub fn after_boot(&mut self, now_ms: u64) -> Decision {
        self.deciding(|tuner, transitions| {
            let last_ms = tuner.last_step_ms.replace(now_ms).unwrap_or(0);
            if tuner.guarded.is_some() {
                // A hold ends by the clock and by clean connections, also where the configured value is back.
                tuner.history.forget_recent();
                return;
            }
            // A suspension lasts as long as it would have; the other ends by the operator alone.
            let knows_nothing = tuner.phase == Phase::Learning;
            if knows_nothing {
                tuner.history.forget_recent();
            } else if !matches!(tuner.phase, Phase::Frozen | Phase::Suspended) {
                let (stored, age_ms) = (tuner.setting.jiffies, now_ms.saturating_sub(last_ms));
                tuner.start_over(now_ms, stored, age_ms, Cause::Boot, transitions);
            }
        })
    }

    fn deciding(&mut self, decide: impl FnOnce(&mut Self, &mut Vec<Transition>)) -> Decision {
        let before = self.setting;
        let mut transitions = Vec::new();
        decide(self, &mut transitions);
        Decision {
            setting: (self.setting != before).then_some(self.setting),
            transitions,
        }
    }

    /// The program has left a value whose lease was over; it does not come back unchanged.
    fn renew_lease(&mut self, now_ms: u64, transitions: &mut Vec<Transition>) {
        let last_ms = self.last_step_ms.replace(now_ms).unwrap_or(now_ms);
        let away_ms = now_ms.saturating_sub(last_ms);
        let stored = self.setting.jiffies;
        if away_ms > self.settings.lease_ms && stored.is_some() && self.guarded.is_none() {
            let over_ms = last_ms.saturating_add(self.settings.lease_ms);
            let percent = self.setting.percent;
            self.enter(over_ms, Phase::Frozen, Cause::LeaseOver, None, transitions);
            self.setting.percent = percent;
            self.start_over(now_ms, stored, away_ms, Cause::LeaseOver, transitions);
        }
    }

    /// With twice the stored value, if that is known and not too old.
    fn start_over(
        &mut self,
        now_ms: u64,
        stored: Option<u64>,
        age_ms: u64,
        cause: Cause,
        transitions: &mut Vec<Transition>,
    ) {
        self.history.forget_recent();
        let twice = stored.map(|jiffies| jiffies.saturating_mul(2));
        let twice = twice.filter(|jiffies| {
            age_ms < self.settings.memory_ms && *jiffies < self.settings.largest()
        });
        let phase = match twice {
            // A hold lasts as long as it would have.
            Some(_) if now_ms < self.hold_until_ms => Phase::Backoff,
            Some(_) => Phase::Lowering,
            // Nothing shorter is tried in a hold, and by a few at first what was tried by a few.
            None if now_ms < self.hold_until_ms || self.setting.percent < 100 => Phase::Suspended,
            None => Phase::Learning,
        };
        self.enter(now_ms, phase, cause, twice, transitions);
        if twice.is_none() {
            self.setting.percent = 100;
        }
    }

    /// Counts what is of this epoch; tells whether there is an alarm.
    fn count(&mut self, growth: &Growth) -> bool {
        self.attempts = self.attempts.saturating_add(growth.attempts);
        self.copies = self.copies.saturating_add(growth.copies);
        if growth.epoch != self.setting.epoch {
            return false;
        }
        self.clean = self.clean.saturating_add(growth.clean);
        self.spurious = self.spurious.saturating_add(growth.spurious);
        self.cusum
            .add(&self.settings.guard, growth.clean, growth.spurious)
    }

    /// One step of the state machine.
    fn advance(
        &mut self,
        now_ms: u64,
        alarm: Option<Cause>,
        throttled: bool,
        transitions: &mut Vec<Transition>,
    ) {
        // What path times ask for does not concern a configured value.
        let want = self.want().filter(|_| self.guarded.is_none());
        let want = want.map(|want| want.jiffies);
        let largest = self.settings.largest();
        let Some(value) = self.setting.jiffies else {
            let may_begin = match self.phase {
                Phase::Learning | Phase::Suspended => now_ms >= self.hold_until_ms,
                _ => false,
            };
            if let Some(guarded) = self.guarded.filter(|_| may_begin) {
                self.begin(now_ms, guarded.jiffies, transitions);
                return;
            }
            // A value as long as the kernel's own gains nothing.
            if let Some(want) = want.filter(|want| may_begin && *want < largest) {
                self.begin(now_ms, want, transitions);
            }
            return;
        };
        let settling = matches!(self.phase, Phase::Lowering | Phase::Steady);
        if let Some(cause) = alarm {
            self.back_off(now_ms, cause, value, transitions);
        } else if let Some(higher) = self.higher(now_ms, value, want) {
            if higher >= largest {
                self.suspend(now_ms, Cause::AtMaximum, transitions);
            } else {
                let phase = self.phase;
                self.enter(now_ms, phase, Cause::WantHigher, Some(higher), transitions);
            }
        } else if self.setting.percent < 100 && self.clean >= LEAST_SAMPLES {
            self.setting.percent = 100;
            self.report(
                now_ms,
                self.phase,
                Cause::CanaryClean,
                Some(value),
                transitions,
            );
        } else if self.phase == Phase::Backoff {
            if now_ms >= self.hold_until_ms && self.clean >= LEAST_SAMPLES {
                let value = self.guarded.map_or(value, |guarded| guarded.jiffies);
                let phase = self.settling();
                self.enter(now_ms, phase, Cause::HoldOver, Some(value), transitions);
            }
        } else if throttled && settling {
            self.rename(now_ms, Phase::Throttled, Cause::Budget, transitions);
        } else if !throttled && self.phase == Phase::Throttled {
            self.rename(now_ms, self.settling(), Cause::BudgetRefilled, transitions);
        } else if let Some(want) = want.filter(|_| settling) {
            self.lower_or_settle(now_ms, value, want, transitions);
        }
    }

    /// What is asked for beyond the value. An alarm may know of but a few connections of the path as it is now, the first
    /// of which began before it was so: until enough are judged, the value is too short where it is not twice what the
    /// last ones took. As little is known where path times ask for twice the value without an alarm.
    fn higher(&mut self, now_ms: u64, value: u64, want: Option<u64>) -> Option<u64> {
        let want = want.filter(|want| *want > value);
        if want.is_some() {
            self.raised_ms = Some(now_ms);
        }
        let is_new = self.phase == Phase::Backoff && self.judged() < LEAST_SAMPLES;
        let is_another = want.is_some_and(|want| want >= value.saturating_mul(2));
        let thrice = after_alarm_us(&self.history).map(|us| self.settings.clamped(us));
        want.max(thrice.filter(|thrice| {
            // Headroom alone is no reason to have no timer at all.
            let is_another = is_another && *thrice < self.settings.largest();
            (is_new || is_another) && !self.only_warns() && thrice * 2 > value.saturating_mul(3)
        }))
    }

    /// From the kernel's own timer.
    fn begin(&mut self, now_ms: u64, want: u64, transitions: &mut Vec<Transition>) {
        let value = match self.guarded {
            Some(guarded) => guarded.jiffies,
            None => want.max(self.settings.largest().div_ceil(2)),
        };
        let cause = if self.phase == Phase::Suspended {
            self.setting.percent = CANARY_PERCENT;
            Cause::HoldOver
        } else {
            Cause::EnoughSamples
        };
        let phase = self.settling();
        self.enter(now_ms, phase, cause, Some(value), transitions);
    }

    fn lower_or_settle(
        &mut self,
        now_ms: u64,
        value: u64,
        want: u64,
        transitions: &mut Vec<Transition>,
    ) {
        if !asks_for_less(want, value) {
            if self.raised_ms.is_some() {
                self.raised_ms = Some(now_ms);
            }
            if self.phase == Phase::Lowering {
                self.rename(now_ms, Phase::Steady, Cause::Settled, transitions);
            }
            return;
        }
        if now_ms >= self.may_lower_ms() && self.judged() >= LEAST_SAMPLES {
            self.raised_ms = None;
            let next = want.max(value.div_ceil(2));
            self.enter(
                now_ms,
                Phase::Lowering,
                Cause::WantLower,
                Some(next),
                transitions,
            );
        }
    }

    /// When the value may be lowered, as far as time decides.
    fn may_lower_ms(&self) -> u64 {
        let after = |since_ms: Option<u64>, ms: u64| since_ms.map_or(0, |at_ms| at_ms + ms);
        after(self.changed_ms, BETWEEN_MS).max(after(self.raised_ms, AFTER_RAISE_MS))
    }

    /// Connections judged in this epoch.
    const fn judged(&self) -> u64 {
        self.clean.saturating_add(self.spurious)
    }

    fn back_off(
        &mut self,
        now_ms: u64,
        cause: Cause,
        value: u64,
        transitions: &mut Vec<Transition>,
    ) {
        if self.only_warns() {
            self.warn(now_ms, cause, transitions);
            return;
        }
        let recent = after_alarm_us(&self.history).map_or(0, |us| self.settings.clamped(us));
        let want = self.want().map_or(0, |want| want.jiffies);
        let next = want.max(recent).max(value.saturating_mul(2));
        if next >= self.settings.largest() || self.setting.percent < 100 {
            self.suspend(now_ms, cause, transitions);
            return;
        }
        self.hold(now_ms);
        self.enter(now_ms, Phase::Backoff, cause, Some(next), transitions);
    }

    fn suspend(&mut self, now_ms: u64, cause: Cause, transitions: &mut Vec<Transition>) {
        self.hold(now_ms);
        self.enter(now_ms, Phase::Suspended, cause, None, transitions);
    }

    /// Nothing is lowered for a while, twice as long as the last time. An alarm within a hold is of the same cause: the
    /// hold begins anew, and is no longer.
    fn hold(&mut self, now_ms: u64) {
        if !matches!(self.phase, Phase::Backoff) {
            self.hold_level = (self.hold_level + 1).min(32);
        }
        let hold_ms = self.settings.hold_ms << (self.hold_level.max(1) - 1).min(16);
        self.hold_until_ms = now_ms.saturating_add(hold_ms.min(LONGEST_HOLD_MS));
        self.last_alarm_ms = Some(now_ms);
    }

    /// Another phase with another value, which begins an epoch.
    fn enter(
        &mut self,
        now_ms: u64,
        phase: Phase,
        cause: Cause,
        jiffies: Option<u64>,
        transitions: &mut Vec<Transition>,
    ) {
        self.report(now_ms, phase, cause, jiffies, transitions);
        self.phase = phase;
        if jiffies == self.setting.jiffies {
            return;
        }
        self.setting.jiffies = jiffies;
        self.setting.epoch = self.setting.epoch.wrapping_add(1);
        if jiffies.is_none() {
            self.setting.percent = 100;
        }
        self.changed_ms = Some(now_ms);
        self.forget_counts();
    }

    /// What was counted says nothing about what comes.
    fn forget_counts(&mut self) {
        self.cusum = Cusum::default();
        (self.clean, self.spurious) = (0, 0);
        (self.attempts, self.copies) = (0, 0);
    }

    /// Another phase with the same value.
    fn rename(
        &mut self,
        now_ms: u64,
        phase: Phase,
        cause: Cause,
        transitions: &mut Vec<Transition>,
    ) {
        self.enter(now_ms, phase, cause, self.setting.jiffies, transitions);
    }

    fn report(
        &self,
        at_ms: u64,
        to: Phase,
        cause: Cause,
        after: Option<u64>,
        transitions: &mut Vec<Transition>,
    ) {
        transitions.push(Transition {
            at_ms,
            from: self.phase,
            to,
            cause,
            before: self.setting.jiffies,
            after,
            numbers: self.numbers(),
        });
    }
}
