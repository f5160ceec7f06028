//! Experiments: a policy's timers against the kernel's own on a share of its connections. What is counted of both arms
//! becomes evidence (`rto_model::tune::experiment`), and the evidence a share.
//!
//! No clock and no I/O: the engine reads the counters, keeps the time, sets the share and saves.

mod counted;
mod record;
mod view;

use std::{cmp::Reverse, collections::BTreeMap};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use self::{
    record::Record,
    view::{merged, number, part, percent, ratio_text},
};
use crate::policy::{Adjustments, PolicyName, Settings};

/// Experiments that may count at the same time on a host.
pub const MOST_COUNTING: usize = 64;
/// Ended ones that are kept where their policy is in force as configured.
pub const MOST_ENDED: usize = 256;

/// The experiments of a host: one of a policy, which stays after its end until it is cleared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Experiments(BTreeMap<PolicyName, Record>);

impl Experiments {
    /// Whether there is no experiment.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// That of a policy.
    pub fn get(&self, policy: &PolicyName) -> Option<&Record> {
        self.0.get(policy)
    }

    /// Each with its policy.
    pub fn iter(&self) -> impl Iterator<Item = (&PolicyName, &Record)> {
        self.0.iter()
    }

    /// Puts one in the place of the last one of its policy, and returns that.
    pub fn insert(&mut self, policy: PolicyName, record: Record) -> Option<Record> {
        self.0.insert(policy, record)
    }

    /// Forgets one.
    pub fn remove(&mut self, policy: &PolicyName) -> Option<Record> {
        self.0.remove(policy)
    }

    /// That of a policy, to be changed.
    pub fn get_mut(&mut self, policy: &PolicyName) -> Option<&mut Record> {
        self.0.get_mut(policy)
    }

    /// Policies whose counters are to be looked at.
    pub fn counting(&self) -> impl Iterator<Item = &PolicyName> {
        let counting = self.0.iter().filter(|(_, record)| record.is_counting());
        counting.map(|(policy, _)| policy)
    }

    /// The control arms of policies that have the settings of their experiments. The control arm of a suspended policy stays,
    /// unless nothing is to be treated: the arms are not those of the experiment
    /// then, and it does not count.
    pub fn adjust(&self, policies: &BTreeMap<&PolicyName, &Settings>, all: &mut Adjustments) {
        for (policy, record) in &self.0 {
            let is_same = |settings: &&Settings| digest(settings) == record.design().settings;
            // The digest is more work.
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

    /// Ends experiments of policies that are gone, or have other settings; which, and why.
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

    /// Of ended ones before the last [`MOST_ENDED`] forgets those whose policy is in force as configured. Returns which.
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
    pub fn counters_anew(&mut self) {
        self.0.values_mut().for_each(Record::counters_anew);
    }
}

/// Identifies settings, on all hosts. The holdout is not included: an experiment has a control arm of its own.
pub fn digest(settings: &Settings) -> String {
    let settings = Settings {
        holdout: None,
        ..settings.clone()
    };
    // As it is written: what later versions know beside it is left out where it is not set.
    let text = serde_json::to_string(&settings).unwrap_or_default();
    let digest = Sha256::digest(text);
    digest.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
