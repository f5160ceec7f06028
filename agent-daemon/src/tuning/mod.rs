//! Timers that tune themselves, and guards of configured timers: turns counters into decisions.
//! Pure: the engine reads the counters and applies the decisions.
//!
//! Times are milliseconds of the tuner's clock, which the engine keeps
//! ([`rto_model::tune::tuner`]).

use std::{collections::BTreeMap, time::Duration};

use rto_agent_common::brake::Brake;
use rto_agent_core::{
    policy::{Adjustment, Adjustments, HostFacts, PolicyName, Settings},
    wire::{events::TunedEvent, stats::ArmStatistics, tune::TuneAction},
};
use rto_model::tune::tuner::{Cause, Transition};

use self::{
    policy::{PolicyTuning, RARELY_MS},
    spec::{Spec, TimerId},
};

mod policy;
mod reading;
mod spec;
mod stored;
mod view;

pub use self::{
    policy::{Due, TICK_MS},
    stored::{Moment, Stored},
};

/// Settings of policies, by name.
pub type Policies<'a> = BTreeMap<&'a PolicyName, &'a Settings>;

/// The state of tuned and guarded timers, by policy.
#[derive(Debug, Default)]
pub struct Tuning {
    policies: BTreeMap<PolicyName, PolicyTuning>,
    /// There were transitions, which must be stored at once.
    has_changed: bool,
}

/// A policy's state before a request that may fail.
#[derive(Debug)]
pub struct StateBefore(Option<PolicyTuning>, bool);

impl Tuning {
    /// How often counters must be read; `None` if no policy is watched.
    #[must_use]
    pub fn interval(&self) -> Option<Duration> {
        let acts = self.policies.values().map(PolicyTuning::acts).max()?;
        let interval_ms = if acts { TICK_MS } else { RARELY_MS };
        Some(Duration::from_millis(interval_ms))
    }

    /// Adds the decisions about these policies, including policies that are not followed yet.
    pub fn adjust(&self, policies: &Policies<'_>, host: &HostFacts, all: &mut Adjustments) {
        for (name, settings) in policies {
            let Some(spec) = Spec::of(name, settings, host) else {
                continue;
            };
            let adjustment = match self.policies.get(*name) {
                Some(known) if known.spec == spec => known.adjustment(),
                known => PolicyTuning::following(known.cloned(), spec).adjustment(),
            };
            if adjustment != Adjustment::default() {
                all.insert((*name).clone(), adjustment);
            }
        }
    }

    /// Follows these policies from this moment.
    pub fn follow(&mut self, policies: &Policies<'_>, host: &HostFacts) {
        let mut former = std::mem::take(&mut self.policies);
        for (name, settings) in policies {
            let Some(spec) = Spec::of(name, settings, host) else {
                continue;
            };
            let policy = PolicyTuning::following(former.remove(*name), spec);
            self.policies.insert((*name).clone(), policy);
        }
    }

    /// The maps were re-created: their counts are unrelated to earlier readings.
    pub fn begin_again(&mut self) {
        for policy in self.policies.values_mut() {
            policy.begin_again();
        }
    }

    /// Policies that must be read now.
    pub fn due(&self, now_ms: u64) -> impl Iterator<Item = (&PolicyName, Due)> {
        let due = self.policies.iter();
        let due = due.map(move |(name, policy)| (name, policy.due(now_ms)));
        due.filter(|(_, due)| *due != Due::Nothing)
    }

    /// Reads the counters of a policy, and decides.
    pub fn step(
        &mut self,
        now: Moment,
        name: &PolicyName,
        statistics: &ArmStatistics,
        brakes: [Brake; 2],
    ) -> Vec<TunedEvent> {
        self.decide(now, name, |policy| {
            policy.step(now.tuner_ms, statistics, brakes)
        })
    }

    /// An experiment has proven harm: freezes the policy's initial RTOs that are in force.
    pub fn harm_proven(&mut self, now: Moment, name: &PolicyName) -> Vec<TunedEvent> {
        self.decide(now, name, |policy| {
            policy.each(|id, timer| {
                let is_meant = id != TimerId::RtoMin && timer.is_in_force();
                is_meant.then(|| timer.tuner.freeze(now.tuner_ms, Cause::HarmProven))?
            })
        })
    }

    /// Follows an operator's request. `None` if the policy has no timer that it concerns: a timer
    /// that is only watched can be reset, but not frozen.
    pub fn act(
        &mut self,
        now: Moment,
        name: &PolicyName,
        action: TuneAction,
    ) -> Option<Vec<TunedEvent>> {
        let acts = self.policies.get(name)?.acts();
        let now_ms = now.tuner_ms;
        (acts || action == TuneAction::Reset).then(|| {
            self.decide(now, name, |policy| match action {
                TuneAction::Freeze => {
                    policy.each(|_, timer| timer.tuner.freeze(now_ms, Cause::Operator))
                }
                TuneAction::Resume => policy.each(|_, timer| timer.tuner.resume(now_ms)),
                TuneAction::Reset => policy.reset(now_ms),
            })
        })
    }

    /// A copy of what is known about a policy, for [`Self::set_state_of`].
    #[must_use]
    pub fn state_of(&self, name: &PolicyName) -> StateBefore {
        StateBefore(self.policies.get(name).cloned(), self.has_changed)
    }

    /// Takes decisions about a policy back that are not in force.
    pub fn set_state_of(&mut self, name: &PolicyName, before: StateBefore) {
        let StateBefore(policy, has_changed) = before;
        self.has_changed = has_changed;
        if let Some(policy) = policy {
            self.policies.insert(name.clone(), policy);
        }
    }

    fn decide(
        &mut self,
        now: Moment,
        name: &PolicyName,
        decide: impl FnOnce(&mut PolicyTuning) -> Vec<(TimerId, Transition)>,
    ) -> Vec<TunedEvent> {
        let transitions = self.policies.get_mut(name).map(decide).unwrap_or_default();
        self.has_changed |= !transitions.is_empty();
        let events = transitions
            .into_iter()
            .map(|(timer, transition)| TunedEvent {
                policy: name.clone(),
                transition: timer.transition(transition, now),
            });
        events.collect()
    }

    /// Whether a value is in force that the program drops at the end of its lease.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.policies.values().any(PolicyTuning::is_leased)
    }
}

#[cfg(test)]
mod tests;
