//! Phases of a tuner, and what leads from one to another.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tune::law::Want;

/// What a tuner does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Too few samples: the kernel's own timer.
    Learning,
    /// The value is above what path times ask for, and is lowered step by step.
    Lowering,
    /// The value is what path times ask for.
    Steady,
    /// After an alarm: a raised value, which is not lowered until the hold is over.
    Backoff,
    /// The program gives new connections the kernel's own timer, as the budget is half spent.
    Throttled,
    /// The kernel's own timer for all until the hold is over, then a value for a few.
    Suspended,
    /// The kernel's own timer until somebody ends that.
    Frozen,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Learning,
        Self::Lowering,
        Self::Steady,
        Self::Backoff,
        Self::Throttled,
        Self::Suspended,
        Self::Frozen,
    ];

    /// Its name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Learning => "learning",
            Self::Lowering => "lowering",
            Self::Steady => "steady",
            Self::Backoff => "backoff",
            Self::Throttled => "throttled",
            Self::Suspended => "suspended",
            Self::Frozen => "frozen",
        }
    }
}

/// Why something changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// There are enough samples for a value.
    EnoughSamples,
    /// Path times ask for less.
    WantLower,
    /// Path times ask for more.
    WantHigher,
    /// Path times ask for no less.
    Settled,
    /// Too many connections had a spurious copy: the e-CUSUM.
    Alarm,
    /// The program's fuse is blown.
    Fuse,
    /// The program's budget for copies is half spent.
    Budget,
    /// More than half of the budget is left again.
    BudgetRefilled,
    /// The hold is over.
    HoldOver,
    /// The few connections that had the value had no spurious copy.
    CanaryClean,
    /// An experiment has proven harm.
    HarmProven,
    /// Path times ask for the largest value.
    AtMaximum,
    /// An operator said so.
    Operator,
    /// The daemon did not renew the value in time.
    LeaseOver,
    /// The host was booted.
    Boot,
}

impl Cause {
    /// Its name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EnoughSamples => "enough-samples",
            Self::WantLower => "want-lower",
            Self::WantHigher => "want-higher",
            Self::Settled => "settled",
            Self::Alarm => "alarm",
            Self::Fuse => "fuse",
            Self::Budget => "budget",
            Self::BudgetRefilled => "budget-refilled",
            Self::HoldOver => "hold-over",
            Self::CanaryClean => "canary-clean",
            Self::HarmProven => "harm-proven",
            Self::AtMaximum => "at-maximum",
            Self::Operator => "operator",
            Self::LeaseOver => "lease-over",
            Self::Boot => "boot",
        }
    }
}

/// What a transition rests on; counts are of the epoch that it ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// What path times ask for.
    pub want: Option<Want>,
    /// Path times remembered.
    pub samples: u64,
    /// Connections without a spurious copy.
    pub clean: u64,
    /// Connections with one.
    pub spurious: u64,
    /// Connection attempts.
    pub attempts: u64,
    /// Copies of SYNs or SYN-ACKs.
    pub copies: u64,
    /// Logarithm of the e-CUSUM's evidence.
    pub log_evidence: f64,
    /// When the last hold ends, milliseconds.
    pub hold_until_ms: u64,
}

/// A change of phase or value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// When, milliseconds.
    pub at_ms: u64,
    /// The phase before.
    pub from: Phase,
    /// The phase after; the same where only the value changes.
    pub to: Phase,
    /// Why.
    pub cause: Cause,
    /// The value before, jiffies; `None`: the kernel's own.
    pub before: Option<u64>,
    /// The value after, jiffies.
    pub after: Option<u64>,
    /// What it rests on.
    pub numbers: Numbers,
}

impl Transition {
    /// Whether the value changed.
    #[must_use]
    pub fn is_change(&self) -> bool {
        self.before != self.after
    }
}

/// "steady -> backoff (alarm): 6 -> 50 jiffies; 4 of 40 spurious, 5000 samples".
impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |jiffies: Option<u64>| match jiffies {
            Some(jiffies) => jiffies.to_string(),
            None => "kernel".to_owned(),
        };
        let Numbers {
            clean,
            spurious,
            samples,
            ..
        } = self.numbers;
        write!(
            f,
            "{} -> {} ({}): {} -> {} jiffies; {spurious} of {} spurious, {samples} samples",
            self.from.name(),
            self.to.name(),
            self.cause.name(),
            value(self.before),
            value(self.after),
            clean.saturating_add(spurious),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transition_says_whether_and_why_the_value_changed() {
        let transition = |before, after| Transition {
            at_ms: 0,
            from: Phase::Steady,
            to: Phase::Steady,
            cause: Cause::LeaseOver,
            before,
            after,
            numbers: Numbers {
                want: None,
                samples: 5_000,
                clean: 36,
                spurious: 4,
                attempts: 0,
                copies: 0,
                log_evidence: 0.0,
                hold_until_ms: 0,
            },
        };
        assert!(transition(Some(6), None).is_change() && transition(Some(6), Some(50)).is_change());
        assert!(!transition(Some(6), Some(6)).is_change() && !transition(None, None).is_change());
        assert_eq!(
            transition(Some(6), None).to_string(),
            "steady -> steady (lease-over): 6 -> kernel jiffies; 4 of 40 spurious, 5000 samples"
        );
    }
}
