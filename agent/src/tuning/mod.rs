//! Timers that tune themselves, and guards of configured timers: counters become decisions. Pure: the
//! engine reads the counters and puts the decisions in force.
//!
//! Times are milliseconds of a clock that the engine keeps ([`rto_model::tune::tuner`]).

use std::{collections::BTreeMap, time::Duration};

use rto_agent_common::brake::Brake;
use rto_model::tune::tuner::{Cause, Transition};

use self::{policy::PolicyTuning, spec::Spec};
use crate::{
    datapath::ArmStatistics,
    policy::{Adjustment, Adjustments, HostFacts, PolicyName, Settings},
};

mod policy;
mod reading;
mod spec;
mod stored;
mod view;

pub use self::{
    policy::{Due, TimerId},
    stored::{Kept, Moment, Restored, Stored},
};

/// Settings of policies, by name.
pub type Policies<'a> = BTreeMap<&'a PolicyName, &'a Settings>;

/// What is tuned and guarded, by policy.
#[derive(Debug, Default)]
pub struct Tuning {
    policies: BTreeMap<PolicyName, PolicyTuning>,
    /// Something is to be stored at once: a transition.
    has_changed: bool,
}

/// A transition of a policy's timer.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// The policy.
    pub policy: PolicyName,
    /// Which of its timers.
    pub timer: TimerId,
    /// What happened.
    pub transition: Transition,
}

impl Told {
    /// Whether an operator should look at it.
    #[must_use]
    pub fn is_warning(&self) -> bool {
        let Transition { from, to, .. } = self.transition;
        to.is_braked() && from != to || self.transition.cause == Cause::HarmProven
    }
}

impl Tuning {
    /// Whether any policy is watched, and whether any needs what was counted each second.
    #[must_use]
    pub fn pace(&self) -> Option<Pace> {
        if self.policies.values().any(PolicyTuning::acts) {
            Some(Pace::EachSecond)
        } else {
            (!self.policies.is_empty()).then_some(Pace::Rarely)
        }
    }

    /// Adds what is decided about these policies, whether they are followed already or not.
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

    /// Uses these policies from here.
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

    /// The maps are new: their counts are unrelated to earlier readings.
    pub fn begin_again(&mut self) {
        for policy in self.policies.values_mut() {
            policy.begin_again();
        }
    }

    /// Policies of which something is to be read now.
    pub fn due(&self, now_ms: u64) -> impl Iterator<Item = (&PolicyName, Due)> {
        let due = self.policies.iter();
        let due = due.map(move |(name, policy)| (name, policy.due(now_ms)));
        due.filter(|(_, due)| *due != Due::Nothing)
    }

    /// Whether the program has changed a policy's brakes since they were last read.
    pub fn has_other_brakes(&self, name: &PolicyName, brakes: &[Brake; 2]) -> bool {
        let policy = self.policies.get(name);
        policy.is_some_and(|policy| policy.has_other_brakes(brakes))
    }

    /// Takes in the counters of a policy, and decides.
    pub fn step(
        &mut self,
        now_ms: u64,
        name: &PolicyName,
        statistics: &ArmStatistics,
        brakes: [Brake; 2],
    ) -> Vec<Told> {
        self.decide(name, |policy| policy.step(now_ms, statistics, brakes))
    }

    /// An experiment has proven harm: what is in force of the policy's learnt or guarded timers is frozen.
    pub fn harm_proven(&mut self, now_ms: u64, name: &PolicyName) -> Vec<Told> {
        self.decide(name, |policy| {
            policy.each(|id, timer| {
                let is_meant = id != TimerId::RtoMin && timer.is_in_force();
                is_meant.then(|| timer.tuner.freeze(now_ms, Cause::HarmProven))?
            })
        })
    }

    /// The kernel's own timers, until [`Tuning::resume`]. `None` if the policy has nothing to freeze.
    pub fn freeze(&mut self, now_ms: u64, name: &PolicyName) -> Option<Vec<Told>> {
        self.acting(name)?;
        Some(self.decide(name, |policy| {
            policy.each(|_, timer| timer.tuner.freeze(now_ms, Cause::Operator))
        }))
    }

    /// Ends [`Tuning::freeze`]. `None` as there.
    pub fn resume(&mut self, now_ms: u64, name: &PolicyName) -> Option<Vec<Told>> {
        self.acting(name)?;
        Some(self.decide(name, |policy| {
            policy.each(|_, timer| timer.tuner.resume(now_ms))
        }))
    }

    /// Forgets what a policy has learnt. `None` if the policy is not watched.
    pub fn reset(&mut self, now_ms: u64, name: &PolicyName) -> Option<Vec<Told>> {
        self.policies.get(name)?;
        Some(self.decide(name, |policy| policy.reset(now_ms)))
    }

    fn acting(&self, name: &PolicyName) -> Option<()> {
        self.policies.get(name)?.acts().then_some(())
    }

    fn decide(
        &mut self,
        name: &PolicyName,
        decide: impl FnOnce(&mut PolicyTuning) -> Vec<(TimerId, Transition)>,
    ) -> Vec<Told> {
        let Some(policy) = self.policies.get_mut(name) else {
            return Vec::new();
        };
        let transitions = decide(policy);
        self.has_changed |= !transitions.is_empty();
        told(name, transitions)
    }

    /// Whether a value is in force that the program leaves when its lease is over.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.policies.values().any(PolicyTuning::is_leased)
    }
}

fn told(name: &PolicyName, transitions: Vec<(TimerId, Transition)>) -> Vec<Told> {
    let told = transitions.into_iter().map(|(timer, transition)| Told {
        policy: name.clone(),
        timer,
        transition,
    });
    told.collect()
}

/// How often counters are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Something follows from them.
    EachSecond,
    /// They only report: the daemon wakes as often as for its health.
    Rarely,
}

impl Pace {
    /// From one time to the next.
    #[must_use]
    pub const fn interval(self) -> Duration {
        match self {
            // Tests of the engine have no time.
            Self::EachSecond if cfg!(test) => Duration::from_millis(20),
            Self::EachSecond => Duration::from_secs(1),
            Self::Rarely => Duration::from_secs(5),
        }
    }

    /// The same, milliseconds.
    fn interval_ms(self) -> u64 {
        u64::try_from(self.interval().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
