//! What a tuner is going to do, for people.

use serde::{Deserialize, Serialize};

use super::{LEAST_SAMPLES, Phase, Tuner, asks_for_less};

/// What comes next, if things stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Next {
    /// Nothing.
    Nothing,
    /// A value, after so many samples more.
    Learn {
        /// Samples that lack.
        samples: u64,
    },
    /// Path times ask for the kernel's own timer or more.
    NothingToGain,
    /// A lower value.
    Lower {
        /// It, jiffies.
        to: u64,
        /// No sooner than this, milliseconds.
        at_ms: u64,
        /// Connections that must be judged before.
        connections: u64,
    },
    /// The hold ends.
    HoldEnds {
        /// No sooner than this, milliseconds.
        at_ms: u64,
        /// Clean connections that it takes beside.
        connections: u64,
    },
    /// All connections get what a few have.
    CanaryEnds {
        /// Clean connections that lack.
        connections: u64,
    },
    /// The program gives new connections the policy's timer again.
    BudgetRefills,
    /// An operator resumes it.
    Resume,
}

impl Tuner {
    /// What comes next, if things stay as they are.
    #[must_use]
    pub fn next(&self) -> Next {
        let lacks = |count: u64| LEAST_SAMPLES.saturating_sub(count);
        let want = self.want().filter(|_| self.guarded.is_none());
        if self.setting.percent < 100 {
            let connections = lacks(self.clean);
            return Next::CanaryEnds { connections };
        }
        match (self.phase, self.setting.jiffies) {
            (Phase::Frozen, _) => Next::Resume,
            (Phase::Suspended, _) => Next::HoldEnds {
                at_ms: self.hold_until_ms,
                connections: 0,
            },
            (Phase::Backoff, _) => Next::HoldEnds {
                at_ms: self.hold_until_ms,
                connections: lacks(self.clean),
            },
            (Phase::Throttled, _) => Next::BudgetRefills,
            (_, None) => match want {
                Some(_) => Next::NothingToGain,
                None => Next::Learn {
                    samples: lacks(self.history.all().count()),
                },
            },
            (_, Some(value)) => match want.filter(|want| asks_for_less(want.jiffies, value)) {
                Some(want) => Next::Lower {
                    to: want.jiffies.max(value.div_ceil(2)),
                    at_ms: self.may_lower_ms(),
                    connections: lacks(self.judged()),
                },
                None => Next::Nothing,
            },
        }
    }
}
