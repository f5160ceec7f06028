//! Timers that tune themselves, guards of configured timers, and the comparison of a policy's arms:
//! turns counters into decisions.
//! Pure: the engine reads the counters and applies the decisions.
//!
//! Times are milliseconds of the tuner's clock, which the engine keeps
//! ([`rto_model::tune::tuner`]).

use std::{collections::BTreeMap, time::Duration};

use rto_agent_common::fallback::Fallback;
use rto_agent_core::{
    policy::{Adjustment, Adjustments, HostFacts, PolicyName, Settings},
    wire::{
        events::{TunedEvent, VerdictEvent},
        stats::ArmStatistics,
        tune::{TuneAction, TunedPolicy},
    },
};
use rto_model::tune::tuner::{Growth, Transition};

use self::{
    holdout::Holdout,
    policy::PolicyTuning,
    spec::{Spec, TimerId},
};

mod holdout;
mod moment;
mod policy;
mod reading;
mod spec;
mod stored;
mod view;

pub use self::{
    moment::Moment,
    policy::{Due, TICK_MS},
    stored::Stored,
};

/// Settings of policies, by name.
pub type Policies<'a> = BTreeMap<&'a PolicyName, &'a Settings>;

/// The state of tuned and guarded timers, by policy.
#[derive(Debug, Default)]
pub struct Tuning {
    policies: BTreeMap<PolicyName, PolicyTuning>,
    /// There were transitions or verdicts, which must be stored at once.
    has_changed: bool,
    /// Nothing is counted: no timer is learnt or guarded, and no arms are compared.
    is_blind: bool,
}

/// What an operator's request has changed.
#[derive(Debug, Default)]
pub struct Acted {
    /// Transitions of timers.
    pub timers: Vec<TunedEvent>,
    /// The fallback (harm) that has ended.
    pub verdict: Option<VerdictEvent>,
}

/// A policy's state before a request that may fail.
#[derive(Debug)]
pub struct StateBefore(Option<PolicyTuning>, bool);

impl Tuning {
    /// Without policies. `is_blind`: statistics are off.
    #[must_use]
    pub fn new(is_blind: bool) -> Self {
        Self {
            is_blind,
            ..Self::default()
        }
    }

    /// How often counters must be read; `None` if no policy is watched.
    #[must_use]
    pub fn interval(&self) -> Option<Duration> {
        let read = self.policies.values().filter(|_| !self.is_blind);
        read.map(PolicyTuning::interval_ms)
            .min()
            .map(Duration::from_millis)
    }

    /// Adds the decisions about these policies, including policies that are not followed yet.
    pub fn adjust(&self, policies: &Policies<'_>, host: &HostFacts, all: &mut Adjustments) {
        for (name, settings) in policies {
            let adjustment = match self.policies.get(*name) {
                Some(known) if known.spec.is_of(settings, host) => known.adjustment(),
                known => {
                    let holdout = known.and_then(PolicyTuning::holdout);
                    match self.spec(name, settings, host, holdout) {
                        Some(spec) => PolicyTuning::following(known.cloned(), spec).adjustment(),
                        None => continue,
                    }
                }
            };
            if adjustment != Adjustment::default() {
                all.insert((*name).clone(), adjustment);
            }
        }
    }

    /// Follows these policies from this moment. Returns those whose fallback (harm) has ended with
    /// this.
    pub fn follow(&mut self, policies: &Policies<'_>, host: &HostFacts) -> Vec<PolicyName> {
        let mut former = std::mem::take(&mut self.policies);
        let mut ended = Vec::new();
        for (name, settings) in policies {
            let known = former.remove(*name);
            let was_harm = known.as_ref().is_some_and(PolicyTuning::is_harm);
            let holdout = known.as_ref().and_then(PolicyTuning::holdout);
            let spec = self.spec(name, settings, host, holdout);
            let policy = spec.map(|spec| PolicyTuning::following(known, spec));
            if was_harm && !policy.as_ref().is_some_and(PolicyTuning::is_harm) {
                ended.push((*name).clone());
            }
            if let Some(policy) = policy {
                self.policies.insert((*name).clone(), policy);
            }
        }
        self.has_changed |= !ended.is_empty();
        ended
    }

    /// What to watch of a policy; `None`: nothing.
    fn spec(
        &self,
        name: &PolicyName,
        settings: &Settings,
        host: &HostFacts,
        known: Option<&Holdout>,
    ) -> Option<Spec> {
        let mut spec = Spec::of(name, settings, host);
        if self.is_blind {
            spec.without_statistics();
        }
        if let Some(known) = known {
            spec.keep(known);
        }
        (!spec.is_idle()).then_some(spec)
    }

    /// The maps were re-created: their counts are unrelated to earlier readings.
    pub fn begin_again(&mut self) {
        for policy in self.policies.values_mut() {
            policy.begin_again();
        }
    }

    /// Policies that must be read now.
    pub fn due(&self, now_ms: u64) -> impl Iterator<Item = (&PolicyName, Due)> {
        let due = self.policies.iter().filter(|_| !self.is_blind);
        let due = due.map(move |(name, policy)| (name, policy.due(now_ms)));
        due.filter(|(_, due)| *due != Due::Nothing)
    }

    /// Reads the counters of a policy, and decides. `outage`: the program is in fallback (outage).
    pub fn step(
        &mut self,
        now: Moment,
        name: &PolicyName,
        statistics: &ArmStatistics,
        fallbacks: [Fallback; 2],
        outage: bool,
    ) -> Vec<TunedEvent> {
        self.decide(now, name, |policy| {
            policy.step(now.tuner_ms, statistics, fallbacks, outage)
        })
    }

    /// Compares a policy's arms by its counters, which [`Tuning::step`] has read; returns a new
    /// verdict. `paused`: why the arms cannot be compared now.
    pub fn look(
        &mut self,
        now: Moment,
        name: &PolicyName,
        statistics: &ArmStatistics,
        paused: Option<&'static str>,
    ) -> Option<VerdictEvent> {
        let policy = self.policies.get_mut(name)?;
        let verdict = policy.look(now.tuner_ms, statistics, paused);
        self.has_changed |= verdict.is_some();
        verdict?;
        policy.verdict(name, now)
    }

    /// Whether a policy's harm is proven.
    #[must_use]
    pub fn is_harm(&self, name: &PolicyName) -> bool {
        self.policies.get(name).is_some_and(PolicyTuning::is_harm)
    }

    /// Follows an operator's request. `None` if the policy has no timer or fallback that it
    /// concerns.
    pub fn act(&mut self, now: Moment, name: &PolicyName, action: TuneAction) -> Option<Acted> {
        let now_ms = now.tuner_ms;
        let policy = self.policies.get_mut(name)?;
        let has_timers = policy.has_timers();
        let is_resumed = action == TuneAction::Resume && policy.resume_holdout();
        let verdict = is_resumed.then(|| policy.verdict(name, now)).flatten();
        self.has_changed |= is_resumed;
        (has_timers || is_resumed).then(|| Acted {
            timers: self.decide(now, name, |policy| match action {
                TuneAction::Freeze => policy.each(|timer| timer.tuner.freeze(now_ms)),
                TuneAction::Resume => policy.each(|timer| timer.tuner.resume(now_ms)),
                TuneAction::Reset => policy.each(|timer| Some(timer.tuner.reset(now_ms))),
            }),
            verdict,
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

    /// Resumes the stored state of these policies; returns the resulting decisions.
    pub fn restore(
        &mut self,
        mut stored: Stored<'_>,
        boot_id: &str,
        now: Moment,
        policies: &Policies<'_>,
        host: &HostFacts,
    ) -> Vec<TunedEvent> {
        let is_same_boot = stored.is_of(boot_id);
        let mut all = Vec::new();
        for (name, settings) in policies {
            let Some(state) = stored.take(name) else {
                continue;
            };
            let Some(spec) = self.spec(name, settings, host, state.holdout.as_ref()) else {
                continue;
            };
            let mut policy = PolicyTuning::new(spec, state);
            if !is_same_boot {
                policy.begin_again();
            }
            self.policies.insert((*name).clone(), policy);
            // Decided before the values are applied, as a value may be older than the memory.
            let step = |policy: &mut PolicyTuning| {
                policy.each(|timer| timer.tuner.step(now.tuner_ms, &Growth::default()))
            };
            all.extend(self.decide(now, name, step));
        }
        self.follow(policies, host);
        all
    }

    /// The state to store.
    #[must_use]
    pub fn stored<'a>(&'a self, boot_id: &'a str, at: Moment) -> Stored<'a> {
        Stored::of(&self.policies, boot_id, at)
    }

    /// Whether there were transitions since the last [`Tuning::was_stored`].
    #[must_use]
    pub const fn has_changed(&self) -> bool {
        self.has_changed
    }

    /// Whether counters on which decisions depend have grown since the last [`Tuning::was_stored`].
    #[must_use]
    pub fn has_grown(&self) -> bool {
        let mut policies = self.policies.values();
        policies.any(|policy| policy.has_grown && policy.acts())
    }

    /// Whether any counters have grown since the last [`Tuning::was_stored`].
    #[must_use]
    pub fn is_unstored(&self) -> bool {
        self.has_changed || self.policies.values().any(|policy| policy.has_grown)
    }

    /// The state has been stored.
    pub fn was_stored(&mut self) {
        self.has_changed = false;
        for policy in self.policies.values_mut() {
            policy.has_grown = false;
        }
    }

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
            let policy = self.policies.get(name)?;
            Some((name.clone(), view::policy(policy, now, fallback)))
        })
    }

    fn decide(
        &mut self,
        now: Moment,
        name: &PolicyName,
        decide: impl FnOnce(&mut PolicyTuning) -> Vec<(TimerId, Transition)>,
    ) -> Vec<TunedEvent> {
        let Some(policy) = self.policies.get_mut(name) else {
            return Vec::new();
        };
        let repath_jiffies = policy.repath_jiffies();
        let transitions = decide(policy);
        self.has_changed |= !transitions.is_empty() || policy.repath_jiffies() != repath_jiffies;
        let events = transitions
            .into_iter()
            .map(|(timer, transition)| TunedEvent {
                policy: name.clone(),
                transition: view::transition(timer, transition, now),
            });
        events.collect()
    }
}

#[cfg(test)]
mod tests;
