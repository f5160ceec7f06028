//! Views of learnt and guarded timers.

use std::collections::BTreeMap;

use rto_agent_common::brake::Brake;
use rto_agent_core::{
    policy::PolicyName,
    wire::tune::{BrakesView, TimerKind, TransitionView, TunedPolicy, TunedTimer},
};
use rto_model::tune::tuner::{Next, Transition};

use super::{
    Tuning,
    policy::{PolicyTuning, TimerState, parts},
    spec::TimerId,
    stored::Moment,
};

/// A control arm with this many connections should have reported an ACK delay.
const SILENT: u64 = 1000;

impl Tuning {
    /// Views of all policies.
    #[must_use]
    pub fn view(&self, now: Moment) -> BTreeMap<PolicyName, TunedPolicy> {
        self.view_of(self.policies.keys(), now).collect()
    }

    /// Views of these policies, if they are watched.
    pub fn view_of<'a>(
        &self,
        names: impl Iterator<Item = &'a PolicyName>,
        now: Moment,
    ) -> impl Iterator<Item = (PolicyName, TunedPolicy)> {
        names.filter_map(move |name| Some((name.clone(), self.policies.get(name)?.view(now))))
    }
}

impl Moment {
    /// Converts a time of the tuner's clock to Unix time.
    const fn unix(self, at_ms: u64) -> u64 {
        self.unix_ms
            .saturating_add(at_ms)
            .saturating_sub(self.tuner_ms)
    }

    const fn transition(self, transition: Transition) -> Transition {
        Transition {
            at_ms: self.unix(transition.at_ms),
            ..transition
        }
    }

    fn next(self, mut next: Next) -> Next {
        if let Next::Lower { at_ms, .. } | Next::HoldEnds { at_ms } = &mut next {
            *at_ms = self.unix(*at_ms);
        }
        next
    }
}

impl TimerId {
    /// The view of a transition of the timer.
    pub(super) fn transition(self, transition: Transition, now: Moment) -> TransitionView {
        TransitionView {
            setting: self.setting().to_owned(),
            direction: self.direction().to_owned(),
            transition: now.transition(transition),
        }
    }
}

impl PolicyTuning {
    fn view(&self, now: Moment) -> TunedPolicy {
        let timers = self.state.timers.iter();
        let transitions = self.state.transitions.iter();
        let silent = self.state.timers.get(&TimerId::RtoMin).filter(|timer| {
            timer.reading.as_ref().is_some_and(|reading| {
                reading.samples.count() == 0 && reading.counts.connections >= SILENT
            })
        });
        let note = silent.map(|_| {
            format!(
                "rto_min: no ACK delay was sampled in {SILENT} connections of the control arm: \
                 check that this kernel reports RTT samples to sock_ops programs (Linux 6.10 and \
                 later). The kernel's own value stays active"
            )
        });
        TunedPolicy {
            since_ms: self.state.since_ms.map(|at_ms| now.unix(at_ms)),
            timers: timers.map(|(id, timer)| timer.view(*id, now)).collect(),
            transitions: transitions
                .map(|(id, one)| id.transition(*one, now))
                .collect(),
            notes: note.into_iter().collect(),
        }
    }
}

impl TimerState {
    fn view(&self, id: TimerId, now: Moment) -> TunedTimer {
        let tuner = &self.tuner;
        let configured = tuner.configured();
        TunedTimer {
            setting: id.setting().to_owned(),
            direction: id.direction().to_owned(),
            kind: match (configured, self.is_set) {
                (Some(_), true) => TimerKind::Guarded,
                (Some(_), false) => TimerKind::Watched,
                (None, true) => TimerKind::Auto,
                (None, false) => TimerKind::Advice,
            },
            value_us: tuner.value_us(),
            configured_us: configured.map(|jiffies| tuner.settings().micros(jiffies)),
            state: tuner.state(),
            evidence: tuner.evidence(),
            alarm: self.alarm.map(|alarm| now.transition(alarm)),
            brakes: (id != TimerId::RtoMin && self.is_in_force()).then(|| self.brakes()),
            next: now.next(tuner.next()),
            transitions: self.totals.clone(),
        }
    }

    fn brakes(&self) -> BrakesView {
        let (brake, budget) = (&self.brake, parts(self.budget));
        let epoch = self.tuner.epoch();
        let is_of_epoch = brake.epoch == epoch;
        let fuse = if is_of_epoch { brake.fuse } else { 0 };
        let share = |spent: i32, all: f64| (f64::from(spent) / all).clamp(0.0, 1.0);
        BrakesView {
            spurious: if is_of_epoch {
                brake.spurious.into()
            } else {
                0
            },
            fuse_spent: share(fuse, f64::from(Brake::FUSE)),
            blown: brake.is_blown(epoch),
            budget_left: 1.0 - share(brake.budget, f64::from(budget)),
            budget: self.budget,
            throttled: brake.is_throttled(budget),
        }
    }
}
