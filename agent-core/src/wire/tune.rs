//! `GET /v1/tune`: what the daemon has learnt, the evidence for it, and what it does next.

use std::{collections::BTreeMap, time::Duration};

pub use rto_model::tune::tuner::TimerKind;
use rto_model::tune::tuner::{Cause, Evidence, Next, State, Transition, Value};
use serde::{Deserialize, Serialize};

use super::holdout::HoldoutView;
use crate::{
    policy::PolicyName,
    printable::{counted, direction_text},
};

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TuneAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Why learnt values do not survive a reboot; absent if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_stored: Option<String>,
    /// By policy: policies that learn a timer, or have a guard or a holdout.
    pub policies: BTreeMap<PolicyName, TunedPolicy>,
}

impl TuneAnswer {
    /// The answer for one policy only.
    #[must_use]
    pub fn only(&self, policy: &PolicyName) -> Self {
        let found = self.policies.get_key_value(policy);
        let policies = found.map(|(name, policy)| (name.clone(), policy.clone()));
        Self {
            at_ms: self.at_ms,
            not_stored: self.not_stored.clone(),
            policies: policies.into_iter().collect(),
        }
    }

    /// All timers of all policies.
    pub fn timers(&self) -> impl Iterator<Item = (&PolicyName, &TunedTimer)> {
        let policies = self.policies.iter();
        policies.flat_map(|(name, policy)| policy.timers.iter().map(move |timer| (name, timer)))
    }
}

/// Of one policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunedPolicy {
    /// Start of the counts of its connections, Unix milliseconds; absent before they are first
    /// read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Its timers.
    pub timers: Vec<TunedTimer>,
    /// The comparison of its arms; absent without a control arm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holdout: Option<HoldoutView>,
    /// The latest transitions, oldest first.
    pub transitions: Vec<TransitionView>,
}

/// One timer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunedTimer {
    /// Direction of its connections: "active" or "passive".
    pub direction: String,
    /// How the timer is treated.
    pub kind: TimerKind,
    /// The value, microseconds; absent: the kernel's own. A value that is only advised is
    /// not applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_us: Option<u64>,
    /// The configured value, microseconds; absent if it is learnt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured_us: Option<u64>,
    /// How the timer is treated.
    pub state: State,
    /// The evidence for the next decision.
    pub evidence: Evidence,
    /// When a fallback last began, and its evidence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<Transition>,
    /// The next step, if nothing else changes.
    pub next: Next,
    /// How often it entered a state, and why, since it has been watched.
    pub transitions: Vec<TransitionCount>,
}

impl TunedTimer {
    /// One line for `status`; `now_ms` is in the same clock as [`TuneAnswer::at_ms`].
    pub fn line(&self, policy: &PolicyName, now_ms: u64) -> String {
        let set = match self.kind {
            TimerKind::Auto | TimerKind::Guarded => Value(self.value_us).to_string(),
            TimerKind::Advice => "not applied".to_owned(),
        };
        let state = self.state.text();
        let next = next_text(self.next, now_ms);
        let direction = direction_text(&self.direction);
        format!("policy {policy}, {direction}: initial_rto {set}, {state}; next: {next}")
    }

    /// Whether an operator should know about the timer's state.
    pub const fn is_unusual(&self) -> bool {
        !matches!(self.state, State::Learning | State::Active)
    }
}

/// What happens next, in words.
pub fn next_text(next: Next, now_ms: u64) -> String {
    let wait = |at_ms: u64| match at_ms.saturating_sub(now_ms).div_ceil(1000) {
        0 => "now".to_owned(),
        s => format!("in {}", humantime::format_duration(Duration::from_secs(s))),
    };
    match next {
        Next::Nothing => "none".to_owned(),
        Next::Learn { samples } => {
            format!(
                "a value after {}",
                counted(samples, "more sample", "more samples")
            )
        }
        Next::NothingToGain => {
            "none: a learnt value would not be shorter than the kernel's own".to_owned()
        }
        Next::Lower { to_us, at_ms } => format!("lower to {} {}", Value(Some(to_us)), wait(at_ms)),
        Next::HoldEnds { at_ms } => format!("the value again {}", wait(at_ms)),
        Next::OutageEnds => "the value again when a connection is established".to_owned(),
        Next::Resume => "rto-agent tune resume".to_owned(),
    }
}

/// How often a timer entered a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransitionCount {
    /// The state.
    pub to: State,
    /// Why.
    pub cause: Cause,
    /// How often.
    pub count: u64,
}

/// A change of a state or a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransitionView {
    /// Direction of its connections.
    pub direction: String,
    /// What happened.
    #[serde(flatten)]
    pub transition: Transition,
}

impl TransitionView {
    /// Whether an operator should look at the transition.
    pub fn is_warning(&self) -> bool {
        let Transition { from, to, .. } = self.transition;
        to.is_fallback() && from != to
    }
}

impl std::fmt::Display for TransitionView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let direction = direction_text(&self.direction);
        write!(f, "{direction} initial_rto: {}", self.transition)
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

/// An operator's request about a policy's timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuneAction {
    /// Use the kernel's own timers until resumed.
    Freeze,
    /// End a freeze, and a fallback (harm).
    Resume,
    /// Forget what was learnt.
    Reset,
}

impl TuneAction {
    /// All actions.
    pub const ALL: [Self; 3] = [Self::Freeze, Self::Resume, Self::Reset];

    /// The name on the command line and in the path.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Freeze => "freeze",
            Self::Resume => "resume",
            Self::Reset => "reset",
        }
    }

    /// The name in the audit log.
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
    fn next_steps_are_shown() {
        let to_us = 24_000;
        for (next, text) in [
            (
                Next::Lower {
                    to_us,
                    at_ms: 50_000,
                },
                "lower to 24ms in 40s",
            ),
            (Next::Lower { to_us, at_ms: 0 }, "lower to 24ms now"),
            (Next::HoldEnds { at_ms: 610_000 }, "the value again in 10m"),
            (Next::Learn { samples: 1 }, "a value after 1 more sample"),
            (Next::Nothing, "none"),
        ] {
            assert_eq!(next_text(next, 10_000), text);
        }
    }
}
