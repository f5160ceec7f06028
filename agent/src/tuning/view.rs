//! What is tuned, for those who look.

use std::collections::BTreeMap;

use rto_agent_common::brake::Brake;
use rto_model::tune::tuner::{Next, Numbers, Transition, Tuner};

use super::{
    Told, Tuning,
    policy::{PolicyTuning, Shown, TimerId, parts},
    stored::Moment,
};
use crate::{
    policy::{PolicyName, units::jiffies_to_usecs},
    wire::tune::{
        BrakesView, Evidence, NextStep, TimerKind, TransitionCount, TransitionView, TunedPolicy,
        TunedTimer,
    },
};

/// Connections of a control arm after which there should be a delay of an ACK.
const SILENT: u64 = 1000;

impl Tuning {
    /// All of it.
    #[must_use]
    pub fn view(&self, now: Moment) -> BTreeMap<PolicyName, TunedPolicy> {
        let policies = self.policies.iter();
        policies
            .map(|(name, policy)| (name.clone(), policy.view(now)))
            .collect()
    }

    /// Of these policies alone, as far as they are watched.
    pub fn view_of<'a>(
        &self,
        names: impl Iterator<Item = &'a PolicyName>,
        now: Moment,
    ) -> impl Iterator<Item = (PolicyName, TunedPolicy)> {
        names.filter_map(move |name| Some((name.clone(), self.policies.get(name)?.view(now))))
    }
}

impl Told {
    /// For those who look.
    #[must_use]
    pub fn view(&self, now: Moment, hz: u32) -> TransitionView {
        transition(self.timer, &self.transition, now, hz)
    }
}

impl PolicyTuning {
    fn view(&self, now: Moment) -> TunedPolicy {
        let hz = self.spec.hz;
        let transitions = self.state.transitions.iter();
        TunedPolicy {
            timers: self.shown().map(|shown| self.timer(&shown, now)).collect(),
            transitions: transitions
                .map(|(id, one)| transition(*id, one, now, hz))
                .collect(),
            notes: self.notes(),
        }
    }

    fn timer(&self, shown: &Shown<'_>, now: Moment) -> TunedTimer {
        let us = |jiffies| jiffies_to_usecs(jiffies, self.spec.hz);
        let guarded = shown.tuner.and_then(Tuner::guarded);
        let kind = match guarded {
            Some((_, true)) => TimerKind::Guarded,
            Some((_, false)) => TimerKind::Watched,
            None if self.spec.advises => TimerKind::Advice,
            None => TimerKind::Auto,
        };
        let Numbers {
            want,
            samples,
            clean,
            spurious,
            attempts,
            copies,
            log_evidence,
            hold_until_ms: _,
        } = shown.numbers;
        let totals = self.state.totals.iter();
        let totals = totals.filter(|((id, _, _), _)| *id == shown.id);
        TunedTimer {
            setting: shown.id.setting().to_owned(),
            direction: shown.id.direction().to_owned(),
            kind,
            value_us: shown.jiffies.map(us),
            configured_us: guarded.map(|(jiffies, _)| us(jiffies)),
            percent: shown.percent,
            phase: shown.phase.name().to_owned(),
            evidence: Evidence {
                samples,
                want_us: want.map(|want| us(want.jiffies)),
                slow_us: want.map(|want| want.slow_us),
                fast_us: want.and_then(|want| want.fast_us),
                clean,
                spurious,
                attempts,
                copies,
                log_evidence,
            },
            brakes: self
                .brake(shown.id)
                .zip(shown.tuner)
                .map(|((brake, budget), tuner)| brakes(&brake, tuner.setting().epoch, budget)),
            next: next_step(shown.next, now.tuner_ms, us),
            transitions: totals
                .map(|((_, to, cause), count)| TransitionCount {
                    to: to.name().to_owned(),
                    cause: cause.name().to_owned(),
                    count: *count,
                })
                .collect(),
        }
    }

    fn notes(&self) -> Vec<String> {
        let counts = self.state.counts.as_ref();
        let mut notes = Vec::new();
        if self.state.rto_min.is_some()
            && let Some(counts) = counts
            && counts.delays.count() == 0
            && counts.in_control >= SILENT
        {
            notes.push(format!(
                "rto_min: of {} connections of the control arm no delay of an ACK was counted: does this kernel tell a \
                 program of RTT samples? The kernel's own value stays in force",
                counts.in_control
            ));
        }
        notes
    }
}

fn brakes(brake: &Brake, epoch: u32, budget: u32) -> BrakesView {
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
        budget_left: 1.0 - share(brake.budget, f64::from(parts(budget))),
        budget,
        throttled: brake.is_throttled(parts(budget)),
    }
}

fn next_step(next: Next, now_ms: u64, us: impl Fn(u64) -> u64) -> NextStep {
    let seconds = |at_ms: u64| at_ms.saturating_sub(now_ms).div_ceil(1000);
    let (kind, to_us, in_s, lacks) = match next {
        Next::Nothing => ("nothing", None, None, None),
        Next::Learn { samples } => ("learn", None, None, Some(samples)),
        Next::NothingToGain => ("nothing-to-gain", None, None, None),
        Next::Lower {
            to,
            at_ms,
            connections,
        } => (
            "lower",
            Some(us(to)),
            Some(seconds(at_ms)),
            Some(connections),
        ),
        Next::HoldEnds { at_ms, connections } => {
            ("hold-ends", None, Some(seconds(at_ms)), Some(connections))
        }
        Next::CanaryEnds { connections } => ("canary-ends", None, None, Some(connections)),
        Next::BudgetRefills => ("budget-refills", None, None, None),
        Next::Resume => ("resume", None, None, None),
    };
    NextStep {
        kind: kind.to_owned(),
        to_us,
        in_s,
        lacks,
    }
}

fn transition(id: TimerId, transition: &Transition, now: Moment, hz: u32) -> TransitionView {
    let us = |jiffies: Option<u64>| jiffies.map(|jiffies| jiffies_to_usecs(jiffies, hz));
    let Numbers {
        samples,
        clean,
        spurious,
        ..
    } = transition.numbers;
    let ago_ms = now.tuner_ms.saturating_sub(transition.at_ms);
    TransitionView {
        at_ms: now.unix_ms.saturating_sub(ago_ms),
        setting: id.setting().to_owned(),
        direction: id.direction().to_owned(),
        from: transition.from.name().to_owned(),
        to: transition.to.name().to_owned(),
        cause: transition.cause.name().to_owned(),
        before_us: us(transition.before),
        after_us: us(transition.after),
        samples,
        judged: clean.saturating_add(spurious),
        spurious,
    }
}
