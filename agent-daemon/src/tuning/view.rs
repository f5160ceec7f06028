//! Views of learnt and guarded timers, and of compared arms.

use std::collections::BTreeMap;

use rto_agent_core::{
    policy::{Adjustments, PolicyName},
    wire::tune::{TimerKind, TransitionView, TunedPolicy, TunedTimer},
};
use rto_model::tune::tuner::{State, Transition};

use super::{
    Tuning,
    moment::Moment,
    policy::{PolicyTuning, TimerState},
    spec::TimerId,
};

impl Tuning {
    /// Views of all policies. `in_force`: the decisions that were applied.
    #[must_use]
    pub fn view(&self, now: Moment, in_force: &Adjustments) -> BTreeMap<PolicyName, TunedPolicy> {
        self.view_of(self.policies.keys(), now, in_force).collect()
    }

    /// Views of these policies, if they are watched.
    pub fn view_of<'a>(
        &self,
        names: impl Iterator<Item = &'a PolicyName>,
        now: Moment,
        in_force: &Adjustments,
    ) -> impl Iterator<Item = (PolicyName, TunedPolicy)> {
        names.filter_map(move |name| {
            let fallback = in_force.get(name).is_some_and(|adjustment| adjustment.harm);
            Some((name.clone(), self.policies.get(name)?.view(now, fallback)))
        })
    }
}

impl TimerId {
    /// The view of a transition of the timer.
    pub(super) fn transition(self, transition: Transition, now: Moment) -> TransitionView {
        TransitionView {
            direction: self.direction().to_owned(),
            transition: now.transition(transition),
        }
    }
}

impl PolicyTuning {
    fn view(&self, now: Moment, fallback: bool) -> TunedPolicy {
        let timers = self.state.timers.iter();
        let transitions = self.state.transitions.iter();
        TunedPolicy {
            since_ms: self.state.since_ms.map(|at_ms| now.unix(at_ms)),
            timers: timers.map(|(id, timer)| timer.view(*id, now)).collect(),
            holdout: self
                .state
                .holdout
                .as_ref()
                .map(|holdout| holdout.view(now, fallback)),
            transitions: transitions
                .map(|(id, one)| id.transition(*one, now))
                .collect(),
        }
    }
}

impl TimerState {
    fn view(&self, id: TimerId, now: Moment) -> TunedTimer {
        let tuner = &self.tuner;
        let configured = tuner.configured();
        TunedTimer {
            direction: id.direction().to_owned(),
            kind: match (configured, self.is_set) {
                (Some(_), _) => TimerKind::Guarded,
                (None, true) => TimerKind::Auto,
                (None, false) => TimerKind::Advice,
            },
            // In an outage the program itself gives new connections the kernel's own.
            value_us: tuner
                .value_us()
                .filter(|_| tuner.state() != State::FallbackOutage),
            configured_us: configured.map(|jiffies| tuner.settings().micros(jiffies)),
            state: tuner.state(),
            evidence: tuner.evidence(),
            alarm: self.alarm.map(|alarm| now.transition(alarm)),
            next: now.next(tuner.next()),
            transitions: self.totals.clone(),
        }
    }
}
