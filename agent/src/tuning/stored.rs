//! The stored state, and how the daemon resumes from it.
//!
//! The tuner's clock follows CLOCK_BOOTTIME until a reboot; over a reboot it follows the wall
//! clock.

use std::collections::BTreeMap;

use rto_model::tune::{history::HOUR_MS, tuner::Growth};
use serde::{Deserialize, Serialize};

use super::{
    Policies, Told, Tuning,
    policy::{PolicyTuning, State},
    told,
};
use crate::{
    policy::{HostFacts, PolicyName},
    tuning::spec::Spec,
};

/// Most hours of path RTTs and ACK delays that all timers together remember. With the maximum
/// number of policies that is a day each, and the file stays within `MAX_STATE_FILE`.
const MOST_HOURS: usize = 80_000;

/// The clock hours that a memory of `memory` hours covers: the first and the last are incomplete.
const fn hours_stored(memory: usize) -> usize {
    memory.saturating_add(2)
}

/// The same moment on three clocks, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The tuner's clock.
    pub tuner_ms: u64,
    /// CLOCK_BOOTTIME.
    pub boottime_ms: u64,
    /// Unix time.
    pub unix_ms: u64,
}

/// The stored form of the state.
#[derive(Serialize)]
pub struct Kept<'a> {
    boot_id: &'a str,
    at: Moment,
    policies: BTreeMap<&'a PolicyName, &'a State>,
}

/// [`Kept`], as it is read.
#[derive(Deserialize)]
pub struct Stored {
    boot_id: String,
    at: Moment,
    policies: BTreeMap<PolicyName, State>,
}

/// The state of an earlier run.
#[derive(Debug, Default)]
pub struct Restored {
    policies: BTreeMap<PolicyName, State>,
    at: Moment,
    is_same_boot: bool,
}

impl Restored {
    /// The stored state, for a daemon of this boot.
    #[must_use]
    pub fn of(stored: Stored, boot_id: &str) -> Self {
        Self {
            policies: stored.policies,
            at: stored.at,
            // Without a boot ID it must be assumed that the host was rebooted.
            is_same_boot: stored.boot_id == boot_id && !boot_id.is_empty(),
        }
    }

    /// The current time of the tuner's clock. It never goes back: if the wall clock was set back,
    /// no time has passed.
    #[must_use]
    pub fn now_ms(&self, boottime_ms: u64, unix_ms: u64) -> u64 {
        let passed = match self.is_same_boot {
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
        mut restored: Restored,
        now_ms: u64,
        policies: &Policies<'_>,
        host: &HostFacts,
    ) -> Vec<Told> {
        let mut all = Vec::new();
        for (name, settings) in policies {
            let Some(spec) = Spec::of(name, settings, host) else {
                continue;
            };
            let Some(state) = restored.policies.remove(*name) else {
                continue;
            };
            let mut policy = PolicyTuning::new(spec, state);
            if !restored.is_same_boot {
                policy.begin_again();
            }
            // Decided before the values are applied, as a value may be older than the memory.
            let transitions = policy.each(|_, timer| timer.tuner.step(now_ms, &Growth::default()));
            all.extend(told(name, transitions));
            self.policies.insert((*name).clone(), policy);
        }
        self.has_changed |= !all.is_empty();
        self.follow(policies, host);
        all
    }

    /// Forgets the oldest hours if all timers together have more than `MOST_HOURS`. Returns the
    /// hours per timer if they are less than the configured memory.
    pub fn limit_memory(&mut self) -> Option<usize> {
        let mut timers: Vec<_> = (self.policies.values_mut())
            .flat_map(|policy| policy.state.timers.values_mut())
            .collect();
        let each = MOST_HOURS / timers.len().max(1);
        let memories = timers.iter().map(|timer| timer.tuner.settings().memory_ms);
        let longest_ms = memories.max().unwrap_or(0);
        let needed = usize::try_from(longest_ms / HOUR_MS).map_or(usize::MAX, hours_stored);
        for timer in &mut timers {
            timer.tuner.limit_memory(each);
        }
        (each < needed).then_some(each)
    }

    /// The state to store.
    #[must_use]
    pub fn kept<'a>(&'a self, boot_id: &'a str, at: Moment) -> Kept<'a> {
        let policies = self.policies.iter();
        Kept {
            boot_id,
            at,
            policies: policies
                .map(|(name, policy)| (name, &policy.state))
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
