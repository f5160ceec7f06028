//! A tuner of a configured value: it has the same evidence and states, and goes back to that value.

use serde::{Deserialize, Serialize};

use super::{Cause, Phase, Setting, Settings, Transition, Tuner};

/// A configured value that is guarded and not tuned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Guarded {
    /// It, jiffies: nothing less is ever set.
    pub(super) jiffies: u64,
    /// An alarm raises the value; otherwise it is only told.
    pub(super) acts: bool,
}

impl Tuner {
    /// The phase without an alarm.
    pub(super) const fn settling(&self) -> Phase {
        match self.guarded {
            Some(_) => Phase::Steady,
            None => Phase::Lowering,
        }
    }

    /// One that guards a configured value, jiffies: an alarm raises it for a while, and nothing lowers it.
    #[must_use]
    pub fn guarding(settings: Settings, jiffies: u64) -> Self {
        Self::with_guarded(
            settings,
            Guarded {
                jiffies,
                acts: true,
            },
        )
    }

    /// One that tells of alarms and leaves the configured value alone: the phase after an alarm is
    /// [`Phase::Backoff`] until the hold is over.
    #[must_use]
    pub fn warning(settings: Settings, jiffies: u64) -> Self {
        Self::with_guarded(
            settings,
            Guarded {
                jiffies,
                acts: false,
            },
        )
    }

    fn with_guarded(settings: Settings, guarded: Guarded) -> Self {
        let setting = Setting {
            jiffies: Some(guarded.jiffies),
            percent: 100,
            epoch: 1,
        };
        Self {
            phase: Phase::Steady,
            setting,
            guarded: Some(guarded),
            ..Self::new(settings)
        }
    }

    /// The configured value, jiffies, and whether alarms raise it; `None` where the value is tuned.
    #[must_use]
    pub fn guarded(&self) -> Option<(u64, bool)> {
        self.guarded.map(|guarded| (guarded.jiffies, guarded.acts))
    }

    /// Guards another configured value from now on, jiffies; phase and hold stay.
    pub fn guard_instead(&mut self, jiffies: u64) {
        let Some(guarded) = self
            .guarded
            .as_mut()
            .filter(|known| known.jiffies != jiffies)
        else {
            return;
        };
        let before = std::mem::replace(&mut guarded.jiffies, jiffies);
        self.setting.jiffies = self.setting.jiffies.map(|value| match value == before {
            true => jiffies,
            false => value.max(jiffies),
        });
        self.setting.epoch = self.setting.epoch.wrapping_add(1);
        self.forget_counts();
    }

    pub(super) const fn only_warns(&self) -> bool {
        matches!(self.guarded, Some(Guarded { acts: false, .. }))
    }

    /// An alarm that changes nothing: told once a hold.
    pub(super) fn warn(&mut self, now_ms: u64, cause: Cause, transitions: &mut Vec<Transition>) {
        self.hold(now_ms);
        if self.phase != Phase::Backoff {
            self.rename(now_ms, Phase::Backoff, cause, transitions);
        }
        self.forget_counts();
    }
}
