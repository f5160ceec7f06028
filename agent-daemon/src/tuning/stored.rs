//! The stored state, and how the daemon resumes from it.
//!
//! The tuner's clock follows CLOCK_BOOTTIME until a reboot; over a reboot it follows the wall
//! clock.

use std::{borrow::Cow, collections::BTreeMap};

use rto_agent_core::policy::PolicyName;
use serde::{Deserialize, Serialize};

use super::{
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

impl<'a> Stored<'a> {
    /// The state of these policies.
    pub(super) fn of(
        policies: &'a BTreeMap<PolicyName, PolicyTuning>,
        boot_id: &'a str,
        at: Moment,
    ) -> Self {
        let policies = policies.iter();
        Self {
            boot_id: Cow::Borrowed(boot_id),
            at,
            policies: policies
                .map(|(name, policy)| (name.clone(), Cow::Borrowed(&policy.state)))
                .collect(),
        }
    }

    /// Takes the state of a policy out.
    pub(super) fn take(&mut self, name: &PolicyName) -> Option<State> {
        self.policies.remove(name).map(Cow::into_owned)
    }

    /// Whether it was stored in this boot. Without a boot ID it must be assumed that the host was
    /// rebooted.
    pub(super) fn is_of(&self, boot_id: &str) -> bool {
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
