//! The experiments and their document: shared with readers, saved and loaded. See
//! [`super::control`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rto_agent_common::{Policy, policy_flags};
use rto_agent_core::{
    config::AgentConfig,
    policy::{PolicyName, Settings, plan::MapState},
    wire::{
        experiments::ExperimentsAnswer,
        types::{ExperimentSummary, now_s},
    },
};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::{
    EngineError,
    document::{LastingDocument, Unsaved},
};
use crate::experiment::{Experiments, MOST_ENDED, Record};

pub(super) const FILE: &str = "experiments.json";
const FORMAT: u32 = 2;
/// The experiments, for any reader.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedExperiments(Arc<Mutex<Experiments>>);

impl SharedExperiments {
    /// A holder that panicked has left complete records.
    pub(super) fn lock(&self) -> MutexGuard<'_, Experiments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All experiments and their current answers.
    pub(super) fn answer(&self) -> ExperimentsAnswer {
        let all = self.lock().clone();
        let views = all.iter();
        ExperimentsAnswer {
            at_s: now_s(),
            experiments: views
                .map(|(name, record)| (name.clone(), record.view()))
                .collect(),
        }
    }

    /// A short form of all experiments, by policy.
    pub(super) fn summaries(&self) -> BTreeMap<PolicyName, ExperimentSummary> {
        let all = self.lock();
        let all = all.iter();
        all.map(|(name, record)| (name.clone(), record.summary()))
            .collect()
    }

    /// Experiments that leave a policy out of force, or have an arm without connections.
    pub(super) fn warnings(&self) -> Vec<String> {
        let all = self.lock();
        let warnings = all.iter().filter_map(|(name, record)| {
            Some(format!("policy {name}: experiment {}", record.warning()?))
        });
        warnings.collect()
    }
}

/// The saved form. Of two files, the higher revision is used.
#[derive(Default, Serialize, Deserialize)]
struct Saved {
    revision: u64,
    experiments: Experiments,
}

/// The engine's handle: only the engine changes and saves experiments.
#[derive(Debug)]
pub(super) struct RunningExperiments {
    pub(super) shared: SharedExperiments,
    pub(super) document: LastingDocument,
    revision: u64,
    /// Experiments that a change of policies has ended, for the answer to the next reload.
    pub(super) notes: Vec<String>,
    /// Why the experiments of an earlier run are lost, and how to fix it.
    pub(super) unreadable: Option<String>,
}

impl RunningExperiments {
    /// Loads what an earlier run left. Moves a file that cannot be parsed aside, with a warning.
    ///
    /// # Errors
    ///
    /// If the file exists but cannot be read. The start fails, as a suspended policy could be back
    /// in force otherwise.
    pub(super) fn load(agent: &AgentConfig) -> io::Result<Self> {
        let mut document = LastingDocument::new(agent, FILE, FORMAT);
        let mut newest = Saved::default();
        let mut unreadable = None;
        for file in [&mut document.of_boot, &mut document.lasting] {
            let loaded = file.load::<Saved>().map_err(|e| {
                let fix = "make it readable for root, or remove it to forget all experiments";
                io::Error::new(e.kind(), format!("{e}; {fix}"))
            });
            let (saved, why) = loaded?;
            newest = saved
                .filter(|saved| saved.revision > newest.revision)
                .unwrap_or(newest);
            unreadable = unreadable.or(why);
        }
        let unreadable = unreadable.map(|why| {
            format!("experiments were lost, and their policies are active as configured: {why}")
        });
        if let Some(text) = &unreadable {
            warn!("{text}");
        }
        Ok(Self {
            shared: SharedExperiments(Arc::new(Mutex::new(newest.experiments))),
            document,
            revision: newest.revision,
            notes: Vec::new(),
            unreadable,
        })
    }

    pub(super) fn get(&self, policy: &PolicyName) -> Result<Record, EngineError> {
        let record = self.shared.lock().get(policy).cloned();
        record.ok_or_else(|| {
            let text = format!("policy {policy} has no experiment; see rto-agent experiment show");
            EngineError::Refused(text)
        })
    }

    /// Replaces the policy's experiment, or removes it, and returns the previous one.
    pub(super) fn replace(&self, policy: &PolicyName, record: Option<Record>) -> Option<Record> {
        let mut all = self.shared.lock();
        match record {
            Some(record) => all.insert(policy.clone(), record),
            None => all.remove(policy),
        }
    }

    /// Whether any experiment is counting.
    pub(super) fn needs_ticks(&self) -> bool {
        self.shared.lock().counting().next().is_some()
    }

    /// Ends experiments whose policy is gone or has other settings.
    pub(super) fn follow(&mut self, policies: &BTreeMap<&PolicyName, &Settings>) {
        let ended = self.shared.lock().follow(policies, now_s());
        if ended.is_empty() {
            return;
        }
        for (policy, why) in ended {
            let note = format!("the experiment of policy {policy} has ended: {why}");
            info!(%policy, "{note}");
            self.notes.push(note);
        }
        self.save();
    }

    /// Why the experiments are not saved, or only until reboot.
    pub(super) fn problem(&self) -> Option<&String> {
        self.document.problem.text()
    }

    /// Saves the experiments. A failure is a [problem](Self::problem), and is retried.
    pub(super) fn save(&mut self) {
        let _is_problem = self.try_save();
    }

    /// Saves the experiments again if that failed.
    pub(super) fn retry_save(&mut self) {
        if self.problem().is_some() {
            self.save();
        }
    }

    /// Saves the experiments to `persistent_dir`, or else to `state_dir`: a verdict must outlive a
    /// kill.
    pub(super) fn try_save(&mut self) -> Result<(), Unsaved> {
        let experiments = {
            let mut all = self.shared.lock();
            for policy in all.trim() {
                info!(%policy, "its ended experiment was dropped: only the last {MOST_ENDED} are \
                                kept");
            }
            all.clone()
        };
        self.revision += 1;
        let saved = Saved {
            revision: self.revision,
            experiments,
        };
        self.document.save(&saved, |unsaved| {
            let until = if unsaved.of_boot.is_none() {
                "reboot"
            } else {
                "restart"
            };
            format!(
                "{}; until it is saved, a {until} returns to the state saved before",
                unsaved.error
            )
        })
    }
}

/// Policies that are in both states, and whose arms are drawn differently.
pub(super) fn arms_changed(before: &MapState, next: &MapState) -> BTreeSet<PolicyName> {
    let arms = |policy: &Policy| {
        let by_peer = policy.flags & policy_flags::CONTROL_BY_PEER;
        (policy.control_below, policy.control_seed, by_peer)
    };
    let differs = |(name, policy): &(&PolicyName, &Policy)| {
        let held = before.policies.get(*name);
        held.is_some_and(|held| arms(held) != arms(policy))
    };
    let all = next.policies.iter().filter(differs);
    all.map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests;
