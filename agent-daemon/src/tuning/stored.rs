//! The stored state, and how the daemon resumes from it.
//!
//! The tuner's clock follows CLOCK_BOOTTIME until a reboot; over a reboot it follows the wall
//! clock.

use std::{borrow::Cow, collections::BTreeMap};

use rto_agent_core::{
    policy::{HostFacts, PolicyName},
    wire::events::TunedEvent,
};
use rto_model::tune::tuner::Growth;
use serde::{Deserialize, Serialize};

use super::{
    Policies, Tuning,
    moment::Moment,
    policy::{PolicyTuning, State},
};

/// The stored form of the state.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Stored<'a> {
    boot_id: Cow<'a, str>,
    at: Moment,
    policies: BTreeMap<PolicyName, Cow<'a, State>>,
}

impl Stored<'_> {
    /// Whether it was stored in this boot. Without a boot ID it must be assumed that the host was
    /// rebooted.
    fn is_of(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id && !boot_id.is_empty()
    }

    /// The current time of the tuner's clock. It never goes back: if the wall clock was set back,
    /// no time has passed.
    #[must_use]
    pub fn now_ms(&self, boot_id: &str, boottime_ms: u64, unix_ms: u64) -> u64 {
        let passed = match self.is_of(boot_id) {
            true => boottime_ms.saturating_sub(self.at.boottime_ms),
            false => unix_ms.saturating_sub(self.at.unix_ms),
        };
        match self.at {
            // A new clock starts at Unix time, so that its hours are those of the wall clock.
            Moment { tuner_ms: 0, .. } => unix_ms,
            Moment { tuner_ms, .. } => tuner_ms.saturating_add(passed),
        }
    }

    /// When the state was stored, by the tuner's clock.
    #[must_use]
    pub const fn at_ms(&self) -> u64 {
        self.at.tuner_ms
    }
}

impl Tuning {
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
            let Some(state) = stored.policies.remove(*name) else {
                continue;
            };
            let Some(spec) = self.spec(name, settings, host, state.holdout.as_ref()) else {
                continue;
            };
            let mut policy = PolicyTuning::new(spec, state.into_owned());
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
        let policies = self.policies.iter();
        Stored {
            boot_id: Cow::Borrowed(boot_id),
            at,
            policies: policies
                .map(|(name, policy)| (name.clone(), Cow::Borrowed(&policy.state)))
                .collect(),
        }
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

    /// The state has been stored.
    pub fn was_stored(&mut self) {
        self.has_changed = false;
        for policy in self.policies.values_mut() {
            policy.has_grown = false;
        }
    }
}
