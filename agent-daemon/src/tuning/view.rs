//! Views of learnt and guarded timers, and of compared arms.

use rto_agent_core::wire::tune::{TimerKind, TransitionView, TunedPolicy, TunedTimer};
use rto_model::tune::tuner::{State, Transition};

use super::{
    moment::Moment,
    policy::{PolicyTuning, TimerState},
    spec::TimerId,
};

/// The view of a transition of a timer.
pub(super) fn transition(id: TimerId, transition: Transition, now: Moment) -> TransitionView {
    TransitionView {
        direction: id.direction().to_owned(),
        transition: now.transition(transition),
    }
}

/// The view of a policy. `fallback`: its harm is proven and in force.
pub(super) fn policy(policy: &PolicyTuning, now: Moment, fallback: bool) -> TunedPolicy {
    let state = &policy.state;
    let timers = state.timers.iter();
    let transitions = state.transitions.iter();
    TunedPolicy {
        since_ms: state.since_ms.map(|at_ms| now.unix(at_ms)),
        timers: timers
            .map(|(id, timer)| timer_view(*id, timer, now))
            .collect(),
        holdout: state
            .holdout
            .as_ref()
            .map(|holdout| holdout.view(now, fallback)),
        transitions: transitions
            .map(|(id, one)| transition(*id, *one, now))
            .collect(),
    }
}

fn timer_view(id: TimerId, timer: &TimerState, now: Moment) -> TunedTimer {
    let tuner = &timer.tuner;
    let configured = tuner.configured();
    TunedTimer {
        direction: id.direction().to_owned(),
        kind: match (configured, timer.is_set) {
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
        alarm: timer.alarm.map(|alarm| now.transition(alarm)),
        next: now.next(tuner.next()),
        transitions: timer.totals.clone(),
    }
}
