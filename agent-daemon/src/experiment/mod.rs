//! Experiments: a policy's timers against the kernel's own, on a share of its connections. The
//! counters of both arms become evidence (`rto_model::tune::experiment`), and the evidence decides
//! the share.
//!
//! No clock and no I/O: the engine reads the counters, keeps the time, applies the share and saves.

mod counted;
mod record;
mod view;

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    ops::{Deref, DerefMut},
};

use rto_agent_core::policy::{Adjustments, PolicyName, Settings};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use self::{
    record::Record,
    view::{duration, merged, number, part, percent, ratio_text},
};

/// Most experiments that may count at the same time on a host.
pub const MOST_COUNTING: usize = 64;
/// Most ended experiments that are kept if their policy is in force as configured.
pub const MOST_ENDED: usize = 256;

/// The experiments of a host, at most one per policy. An ended experiment is kept until it is
/// cleared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Experiments(BTreeMap<PolicyName, Record>);

impl Deref for Experiments {
    type Target = BTreeMap<PolicyName, Record>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Experiments {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Experiments {
    /// Policies whose experiments are counting.
    pub fn counting(&self) -> impl Iterator<Item = &PolicyName> {
        let counting = self.0.iter().filter(|(_, record)| record.is_counting());
        counting.map(|(policy, _)| policy)
    }

    /// Adds the control arms of policies that still have their experiments' settings. Keeps another
    /// control arm, such as the guard's, unless the policy is suspended. The arms are then not the
    /// experiment's, and it does not count.
    pub fn adjust(&self, policies: &BTreeMap<&PolicyName, &Settings>, all: &mut Adjustments) {
        for (policy, record) in &self.0 {
            let is_same = |settings: &&Settings| digest(settings) == record.design().settings;
            // Computed last, as the digest takes longer.
            if let Some(control) = record.control()
                && policies.get(policy).is_some_and(is_same)
            {
                let adjustment = all.entry(policy.clone()).or_default();
                if adjustment.control.is_none() || record.share() == 0.0 {
                    adjustment.control = Some(control);
                }
            }
        }
    }

    /// Ends experiments whose policy is gone or has other settings; returns them with the reasons.
    pub fn follow(
        &mut self,
        policies: &BTreeMap<&PolicyName, &Settings>,
        now_s: u64,
    ) -> Vec<(PolicyName, &'static str)> {
        let mut ended = Vec::new();
        for (policy, record) in &mut self.0 {
            let why = match policies.get(policy) {
                _ if record.is_released => continue,
                None => "the policy was removed",
                Some(settings) if digest(settings) != record.design().settings => {
                    "the policy's settings changed"
                }
                Some(_) => continue,
            };
            record.release(why, now_s);
            ended.push((policy.clone(), why));
        }
        ended
    }

    /// Keeps the last [`MOST_ENDED`] ended experiments. Forgets older ones whose policy is in force
    /// as configured, and returns them.
    pub fn trim(&mut self) -> Vec<PolicyName> {
        let ended = self.0.iter().filter(|(_, record)| !record.is_counting());
        let ended = ended.map(|(policy, record)| (Reverse(record.ended_s), policy.clone()));
        let mut ended: Vec<_> = ended.collect();
        ended.sort_unstable();
        let older = ended.into_iter().skip(MOST_ENDED).map(|(_, policy)| policy);
        let is_in_force = |policy: &PolicyName| {
            let record = self.0.get(policy);
            record.is_some_and(|record| record.control().is_none())
        };
        let forgotten: Vec<PolicyName> = older.filter(is_in_force).collect();
        self.0.retain(|policy, _| !forgotten.contains(policy));
        forgotten
    }

    /// All counters were re-created.
    pub fn reset_counters(&mut self) {
        self.0.values_mut().for_each(Record::reset_counters);
    }
}

/// Identifies settings on all hosts. The holdout is excluded, as an experiment has a control arm of
/// its own.
pub fn digest(settings: &Settings) -> String {
    let settings = Settings {
        holdout: None,
        ..settings.clone()
    };
    // Later versions must omit unset new settings, so that digests stay the same.
    let text = serde_json::to_string(&settings).unwrap_or_default();
    let digest = Sha256::digest(text);
    digest.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
