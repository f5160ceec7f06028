//! `GET /v1/tune`: what the daemon has learnt, what that rests on, and what comes next.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    policy::{PolicyName, units::format_duration},
    printable::counted,
};

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TuneAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Why what is learnt does not outlive the boot, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_stored: Option<String>,
    /// By policy: those of which anything is learnt or guarded.
    pub policies: BTreeMap<PolicyName, TunedPolicy>,
}

impl TuneAnswer {
    /// Of one policy alone.
    #[must_use]
    pub fn only(&self, policy: &PolicyName) -> Self {
        let found = self.policies.get_key_value(policy);
        let policies = found.map(|(name, policy)| (name.clone(), policy.clone()));
        Self {
            policies: policies.into_iter().collect(),
            ..self.clone_without_policies()
        }
    }

    fn clone_without_policies(&self) -> Self {
        Self {
            at_ms: self.at_ms,
            not_stored: self.not_stored.clone(),
            policies: BTreeMap::new(),
        }
    }

    /// Each timer of each policy.
    pub fn timers(&self) -> impl Iterator<Item = (&PolicyName, &TunedTimer)> {
        let policies = self.policies.iter();
        policies.flat_map(|(name, policy)| policy.timers.iter().map(move |timer| (name, timer)))
    }
}

/// Of one policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunedPolicy {
    /// Its timers.
    pub timers: Vec<TunedTimer>,
    /// What happened last, oldest first.
    pub transitions: Vec<TransitionView>,
    /// What to know beside that, one sentence each.
    pub notes: Vec<String>,
}

/// One timer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunedTimer {
    /// The setting: "initial_rto" or "rto_min".
    pub setting: String,
    /// Whose connections it is for: "active", "passive", or "both" of `rto_min`.
    pub direction: String,
    /// What is done about it.
    pub kind: TimerKind,
    /// The value, microseconds; absent: the kernel's own. Where it is advised or only watched, that is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_us: Option<u64>,
    /// The configured one, microseconds; absent where it is learnt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured_us: Option<u64>,
    /// Share of connections that get it, percent; the others have the kernel's own timers.
    pub percent: u8,
    /// "learning", "lowering", "steady", "backoff", "throttled", "suspended" or "frozen".
    pub phase: String,
    /// What the next decision rests on.
    pub evidence: Evidence,
    /// The brakes in the program; absent where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brakes: Option<BrakesView>,
    /// What comes next, if things stay as they are.
    pub next: NextStep,
    /// How often it came to a phase, and why, since it is watched.
    pub transitions: Vec<TransitionCount>,
}

impl TunedTimer {
    /// The value for people.
    #[must_use]
    pub fn value(&self) -> String {
        kernels_or(self.value_us)
    }

    /// One line for `status`.
    #[must_use]
    pub fn line(&self, policy: &PolicyName) -> String {
        let Self {
            setting,
            direction,
            phase,
            ..
        } = self;
        let set = match self.kind {
            TimerKind::Auto | TimerKind::Guarded => self.value(),
            TimerKind::Advice | TimerKind::Watched => "nothing is done".to_owned(),
        };
        let next = self.next.describe();
        format!("policy {policy}: {setting} {direction} {phase}, {set}; next: {next}")
    }

    /// Whether it is in a state that somebody should know of.
    #[must_use]
    pub fn is_unusual(&self) -> bool {
        !matches!(self.phase.as_str(), "learning" | "lowering" | "steady")
    }
}

/// "24ms", or the kernel's own.
#[must_use]
pub fn kernels_or(us: Option<u64>) -> String {
    match us {
        Some(us) => format_duration(Duration::from_micros(us)),
        None => "the kernel's own".to_owned(),
    }
}

/// What is done about a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TimerKind {
    /// It is learnt, and set.
    Auto,
    /// It is learnt, and not set (`mode = "advise"`).
    Advice,
    /// It is configured, and raised by an alarm (`guard = "on"`).
    Guarded,
    /// It is configured, and alarms are told (`guard = "warn"`).
    Watched,
}

impl TimerKind {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Advice => "advice",
            Self::Guarded => "guarded",
            Self::Watched => "watched",
        }
    }
}

/// What a decision rests on. Connections are counted since the value was last set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Evidence {
    /// Times remembered: of paths, or for `rto_min` delays of ACKs.
    pub samples: u64,
    /// What they ask for, microseconds; absent with too few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub want_us: Option<u64>,
    /// By the hours remembered, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_us: Option<u64>,
    /// By the last connections, microseconds; absent with too few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_us: Option<u64>,
    /// Connections without a spurious retransmission.
    pub clean: u64,
    /// Connections with one.
    pub spurious: u64,
    /// Connection attempts.
    pub attempts: u64,
    /// Retransmissions of SYNs or SYN-ACKs.
    pub copies: u64,
    /// Natural logarithm of the evidence that too many are spurious; 9.2 is an alarm.
    pub log_evidence: f64,
}

/// Brakes in the program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BrakesView {
    /// Connections with a spurious retransmission, by this value.
    pub spurious: u64,
    /// What is spent of the fuse, 0 to 1.
    pub fuse_spent: f64,
    /// New connections get the kernel's own timer, as the fuse is blown.
    pub blown: bool,
    /// What is left of the budget, 0 to 1.
    pub budget_left: f64,
    /// All of the budget, retransmissions.
    pub budget: u32,
    /// New connections get the kernel's own timer, as half of the budget is spent.
    pub throttled: bool,
}

/// What comes next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NextStep {
    /// "nothing", "learn", "nothing-to-gain", "lower", "hold-ends", "canary-ends", "budget-refills" or "resume".
    pub kind: String,
    /// The next value, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_us: Option<u64>,
    /// No sooner than in so many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_s: Option<u64>,
    /// Connections, or samples, that it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks: Option<u64>,
}

impl NextStep {
    /// For people.
    #[must_use]
    pub fn describe(&self) -> String {
        let lacks = self.lacks.unwrap_or(0);
        let after = |what: (&str, &str)| match lacks {
            0 => String::new(),
            lacks => format!(", after {} more", counted(lacks, what.0, what.1)),
        };
        let connections = ("connection", "connections");
        let wait = |s: u64| match s {
            0 => "now".to_owned(),
            s => format!("in {}", humantime::format_duration(Duration::from_secs(s))),
        };
        let wait = self.in_s.map_or_else(String::new, wait);
        match self.kind.as_str() {
            "learn" => format!("a value after {} more", counted(lacks, "sample", "samples")),
            "nothing-to-gain" => "none: a value would be as long as the kernel's own".to_owned(),
            "lower" => format!(
                "lower to {} {wait}{}",
                kernels_or(self.to_us),
                after(connections)
            ),
            "hold-ends" => format!("the hold ends {wait}{}", after(connections)),
            "canary-ends" => format!("for all connections{}", after(connections)),
            "budget-refills" => "when the budget refills".to_owned(),
            "resume" => "rto-agent tune resume".to_owned(),
            _ => "none".to_owned(),
        }
    }
}

/// How often a timer came to a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransitionCount {
    /// The phase.
    pub to: String,
    /// Why.
    pub cause: String,
    /// How often.
    pub count: u64,
}

/// A change of a phase or a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransitionView {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// The setting.
    pub setting: String,
    /// Whose connections it is for.
    pub direction: String,
    /// The phase before.
    pub from: String,
    /// The phase after.
    pub to: String,
    /// Why: "enough-samples", "want-lower", "want-higher", "settled", "alarm", "fuse", "budget", "budget-refilled",
    /// "hold-over", "canary-clean", "harm-proven", "at-maximum", "operator", "lease-over" or "boot".
    pub cause: String,
    /// The value before, microseconds; absent: the kernel's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_us: Option<u64>,
    /// The value after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_us: Option<u64>,
    /// Times that it rests on.
    pub samples: u64,
    /// Connections that were judged by the value before.
    pub judged: u64,
    /// Those of them with a spurious retransmission.
    pub spurious: u64,
}

/// "initial_rto active: steady -> backoff (alarm), 24ms -> 200ms; 4 of 40 connections spurious, 5000 samples".
impl std::fmt::Display for TransitionView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (before, after) = (kernels_or(self.before_us), kernels_or(self.after_us));
        write!(f, "{} {}: ", self.setting, self.direction)?;
        if self.from == self.to {
            write!(f, "{} ({})", self.to, self.cause)?;
        } else {
            write!(f, "{} -> {} ({})", self.from, self.to, self.cause)?;
        }
        if before == after {
            write!(f, ", {after}")?;
        } else {
            write!(f, ", {before} -> {after}")?;
        }
        write!(
            f,
            "; {} of {} spurious, {}",
            self.spurious,
            counted(self.judged, "connection", "connections"),
            counted(self.samples, "sample", "samples")
        )
    }
}

/// `POST /v1/tune/freeze`, `resume` and `reset`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TuneRequest {
    /// The policy.
    pub policy: PolicyName,
}

/// What is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuneAction {
    /// The kernel's own timers, until it is resumed.
    Freeze,
    /// Ends that.
    Resume,
    /// Forgets what was learnt.
    Reset,
}

impl TuneAction {
    /// Its name on the command line and in the path.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Freeze => "freeze",
            Self::Resume => "resume",
            Self::Reset => "reset",
        }
    }

    /// For the log.
    #[must_use]
    pub const fn audited(self) -> &'static str {
        match self {
            Self::Freeze => "tune freeze",
            Self::Resume => "tune resume",
            Self::Reset => "tune reset",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_steps_for_people() {
        let next = |kind: &str, to_us, in_s, lacks| NextStep {
            kind: kind.to_owned(),
            to_us,
            in_s,
            lacks,
        };
        for (next, text) in [
            (
                next("lower", Some(24_000), Some(40), Some(0)),
                "lower to 24ms in 40s",
            ),
            (
                next("lower", Some(24_000), Some(0), Some(120)),
                "lower to 24ms now, after 120 connections more",
            ),
            (
                next("hold-ends", None, Some(600), Some(1)),
                "the hold ends in 10m, after 1 connection more",
            ),
            (
                next("learn", None, None, Some(300)),
                "a value after 300 samples more",
            ),
            (next("nothing", None, None, None), "none"),
        ] {
            assert_eq!(next.describe(), text);
        }
    }
}
