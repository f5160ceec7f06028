//! Experiments: started, stopped and cleared on request; evaluated once a second, saved and
//! reported. Their control arms are applied like other decisions about policies, see
//! [`super::adjusting`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::sys::utsname::uname;
use rto_agent_common::{Policy, policy_flags};
use rto_agent_core::{
    config::AgentConfig,
    policy::{PolicyName, Settings, compile::Compiled, plan::MapState},
    wire::{
        events::{ExperimentEvent, StreamItem, TunedEvent},
        experiments::{ExperimentAnswer, ExperimentsAnswer, StartRequest, State},
        types::{Caller, now_ms, now_s},
    },
};
use rto_agent_kernel::kernel::clock::boottime_ms;
use rto_model::tune::experiment::{Design, Event, Unit, Verdict};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use self::design::design;
use super::{
    Engine, EngineError,
    adjusting::Readings,
    audit::{Cause, Source},
    detach::DETACHED,
    document::{LastingDocument, Unsaved},
};
use crate::experiment::{Experiments, MOST_COUNTING, MOST_ENDED, Record};

mod design;

pub(super) const FILE: &str = "experiments.json";
const FORMAT: u32 = 2;
/// Fewest peers an arm may have.
const LEAST_PEERS: f64 = 20.0;

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
    pub(super) fn summaries(
        &self,
    ) -> BTreeMap<PolicyName, rto_agent_core::wire::types::ExperimentSummary> {
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
    document: LastingDocument,
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

    fn get(&self, policy: &PolicyName) -> Result<Record, EngineError> {
        let record = self.shared.lock().get(policy).cloned();
        record.ok_or_else(|| {
            let text = format!("policy {policy} has no experiment; see rto-agent experiment show");
            EngineError::Refused(text)
        })
    }

    /// Replaces the policy's experiment, or removes it, and returns the previous one.
    fn replace(&self, policy: &PolicyName, record: Option<Record>) -> Option<Record> {
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
    fn try_save(&mut self) -> Result<(), Unsaved> {
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

impl Engine {
    /// `rto-agent experiment start`.
    pub(super) fn start_experiment(
        &mut self,
        policy: PolicyName,
        request: &StartRequest,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        self.check_not_restoring()?;
        self.check_can_experiment(&policy)?;
        let resolved = self.reconciler.resolved().clone();
        let settings = match resolved.set.policies.get(&policy) {
            Some(known) => &known.settings,
            None => return refused(&super::requests::unknown_policy(&resolved.desired, &policy)),
        };
        let design = design(&policy, settings, request)?;
        if let Some(compiled) = resolved.policies.get(&policy)
            && !compares(settings, compiled)
        {
            return refused(&format!(
                "policy {policy} has nothing to compare, because none of its timers is applied: it sets \
                 none (mode = \"advise\" does not apply any), they are not learnt yet, or its guard holds \
                 them back"
            ));
        }
        let reader = self.snapshots.borrow().reader.clone();
        let Some(reader) = reader else {
            return refused(DETACHED);
        };
        let Some(statistics) = reader.statistics_of(&policy)? else {
            return refused(DETACHED);
        };
        let mut notes = Vec::new();
        if design.unit == Unit::Peer {
            let is_peer = |address: &IpAddr| {
                let entry = resolved.set.entry_for(*address);
                entry.is_some_and(|(entry, _)| *entry.policy == policy)
            };
            let peers: BTreeSet<IpAddr> =
                reader.recent_peers().into_iter().filter(is_peer).collect();
            check_peers(&design, peers.len())?;
            if peers.is_empty() {
                notes.push(
                    "the number of peers is unknown: in the last hour no connection of this \
                     network namespace to a peer of the policy ended"
                        .to_owned(),
                );
            }
        }
        let host = host_name();
        let record = Record::start(design, host, by, &statistics, now_s())
            .map_err(|e| EngineError::Refused(e.to_string()))?;
        if let Some(holdout) = settings.control_share() {
            notes.push(format!(
                "while it runs, its control arm replaces that of holdout = {holdout}"
            ));
        }
        let before = self.deciding.experiments.replace(&policy, Some(record));
        let saved = self.deciding.experiments.try_save();
        let saved = saved.map_err(|unsaved| EngineError::Unsaved(unsaved.error));
        let cause = Cause::done("experiment start", by);
        if let Err(e) = saved.and_then(|()| self.adjust(&cause).map(drop)) {
            self.deciding.experiments.replace(&policy, before);
            self.deciding.experiments.save();
            return Err(e);
        }
        self.answer_experiment(&policy, "started", notes)
    }

    /// `rto-agent experiment stop`.
    pub(super) fn stop_experiment(
        &mut self,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        self.look_now();
        // An experiment may have ended just before the stop. Applied even if the stop is refused:
        // there may be no further tick.
        if let Err(e) = self.adjust(&Source::Tuner.into()) {
            self.deciding.not_in_force(&e);
        }
        let before = self.deciding.experiments.get(policy)?;
        if !before.is_counting() {
            let text = before.text();
            return refused(&format!("the experiment of {policy} has ended: {text}"));
        }
        let mut stopped = before.clone();
        stopped.stop(now_s());
        self.deciding.experiments.replace(policy, Some(stopped));
        if let Err(unsaved) = self.deciding.experiments.try_save()
            && unsaved.of_boot.is_some()
        {
            self.deciding.experiments.replace(policy, Some(before));
            return Err(EngineError::Unsaved(unsaved.error));
        }
        if let Err(e) = self.adjust(&Cause::done("experiment stop", by)) {
            self.deciding.not_in_force(&e);
            return Err(e);
        }
        let unsaved = self.deciding.experiments.problem().cloned();
        self.answer_experiment(policy, "stopped", unsaved.into_iter().collect())
    }

    /// `rto-agent experiment clear`.
    pub(super) fn clear_experiment(
        &mut self,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        if self.deciding.experiments.get(policy)?.state() == State::Running {
            return refused(&format!(
                "the experiment of {policy} is still running: stop it first, with rto-agent \
                 experiment stop {policy}"
            ));
        }
        let before = self.deciding.experiments.replace(policy, None);
        let cause = Cause::done("experiment clear", by);
        match self.adjust(&cause) {
            Ok(Some(_)) => {}
            Ok(None) => cause.audit_other("experiment clear"),
            Err(e) => {
                self.deciding.experiments.replace(policy, before);
                return Err(e);
            }
        }
        self.deciding.experiments.save();
        let text = "cleared: the policy is active as configured";
        let notes = std::iter::once(format!("{policy}: {text}"));
        let notes = notes.chain(self.deciding.experiments.problem().cloned());
        let notes = notes.collect();
        self.answer_experiment(policy, text, notes)
    }

    /// After a start with an earlier run's counters: finds arms that were not drawn as the
    /// experiments say.
    pub(super) fn resume_experiments(&mut self) {
        let mut all = self.deciding.experiments.shared.lock();
        for policy in self.reconciler.arms_changed_at_start() {
            if let Some(record) = all.get_mut(policy) {
                record.arms_changed();
            }
        }
    }

    /// Before the counters are removed: evaluates and saves what they hold.
    pub(super) fn keep_experiments(&mut self) {
        if self.detached_by.is_none() && self.deciding.experiments.needs_ticks() {
            self.look_now();
            self.deciding.experiments.save();
        } else {
            self.deciding.experiments.retry_save();
        }
    }

    fn check_can_experiment(&self, policy: &PolicyName) -> Result<(), EngineError> {
        if !self.config.config.agent.statistics {
            return refused("no statistics: statistics = false in [agent]");
        }
        if let Some(by) = self.detached_by {
            return refused(&by.detached());
        }
        if let Some(reader) = self.snapshots.borrow().reader.as_deref()
            && reader.missing_stats().contains(policy)
        {
            return refused(&format!(
                "policy {policy} has no statistics, because there was not enough memory"
            ));
        }
        let all = self.deciding.experiments.shared.lock();
        if all.counting().count() >= MOST_COUNTING {
            return refused(&format!(
                "{MOST_COUNTING} experiments are running on this host, the limit; stop one with \
                 rto-agent experiment stop"
            ));
        }
        if let Some(record) = all.get(policy)
            && record.is_counting()
        {
            return refused(&format!(
                "an experiment of {policy} is already running: {}; stop it with rto-agent \
                 experiment stop {policy}",
                record.text()
            ));
        }
        Ok(())
    }

    fn answer_experiment(
        &mut self,
        policy: &PolicyName,
        what: &str,
        notes: Vec<String>,
    ) -> Result<ExperimentAnswer, EngineError> {
        let all = self.deciding.experiments.shared.lock();
        let view = all.get(policy).map(Record::view);
        drop(all);
        let text = match &view {
            Some(view) => format!("{what}: {}", view.text),
            None => what.to_owned(),
        };
        info!(%policy, "experiment: {text}");
        self.tell_experiment(policy, &text);
        Ok(ExperimentAnswer {
            experiment: view,
            notes,
        })
    }

    /// Evaluates the experiments now, not in the next tick.
    fn look_now(&mut self) {
        if let Some(mut readings) = self.readings() {
            let told = self.look_at_experiments(&mut readings);
            self.tell_decisions(&told);
        }
    }

    /// Evaluates the arms' counters, with the consequences for learnt and guarded timers.
    /// [`Engine::adjust`] applies the result.
    pub(super) fn look_at_experiments(&mut self, readings: &mut Readings) -> Vec<TunedEvent> {
        let (now_ms, mut told, mut is_changed) = (boottime_ms(), Vec::new(), false);
        {
            let mut all = self.deciding.experiments.shared.lock();
            let counting: Vec<PolicyName> = all.counting().cloned().collect();
            let in_force = &self.reconciler.desired().adjustments;
            let resolved = self.reconciler.resolved();
            for policy in counting {
                let is_missing = readings.reader().missing_stats().contains(&policy);
                let Ok(Some(statistics)) = readings.shared(&policy) else {
                    // The counters continue; the next evaluation includes these connections.
                    continue;
                };
                let Some(record) = all.get_mut(&policy) else {
                    continue;
                };
                is_changed = true;
                let drawn = in_force
                    .get(&policy)
                    .and_then(|adjustment| adjustment.control);
                let is_treated = resolved.set.policies.get(&policy).is_some_and(|known| {
                    let compiled = resolved.policies.get(&policy);
                    compiled.is_some_and(|compiled| compares(&known.settings, compiled))
                });
                // Without a treatment (frozen timers) both arms are the same.
                if drawn != record.control() || !is_treated || is_missing {
                    record.arms_changed();
                }
                if let Some(event) = record.look(statistics, now_ms, now_s()) {
                    told.push((policy.clone(), event, record.describe(event)));
                }
            }
        }
        let mut of_timers = Vec::new();
        for (policy, event, text) in &told {
            if matches!(event, Event::Ended(Verdict::Harm { .. })) {
                of_timers.extend(self.deciding.harm_proven(policy));
            }
            let is_bad = matches!(
                event,
                Event::Ended(Verdict::Harm { .. } | Verdict::Invalid | Verdict::Inconclusive)
            );
            if is_bad {
                warn!(%policy, "experiment: {text}");
            } else {
                info!(%policy, "experiment: {text}");
            }
            self.tell_experiment(policy, text);
        }
        // Save before applying, so that a suspended policy stays suspended after a kill.
        if !told.is_empty() || (is_changed && self.deciding.experiments.document.is_save_due()) {
            self.deciding.experiments.save();
        }
        of_timers
    }

    /// Sends an event to watchers.
    fn tell_experiment(&self, policy: &PolicyName, text: &str) {
        self.events.tell(StreamItem::Experiment(ExperimentEvent {
            at_us: now_ms().saturating_mul(1000),
            policy: policy.clone(),
            experiment: text.to_owned(),
        }));
    }
}

/// Refuses to draw from so few peers that chance decides the result. Zero peers means that their
/// number is unknown.
#[expect(clippy::cast_precision_loss, reason = "a number of peers is small")]
fn check_peers(design: &Design, peers: usize) -> Result<(), EngineError> {
    let share = design
        .ramp
        .shares()
        .first()
        .map_or(0.5, |share| share.get());
    let fewest = (peers as f64 * share.min(1.0 - share)).floor();
    if peers == 0 || fewest >= LEAST_PEERS {
        return Ok(());
    }
    refused(&format!(
        "policy {}: {peers} peers were seen in the last hour; with {:.0} % treated, the smaller \
         arm has {fewest:.0} of the {LEAST_PEERS} it needs: randomise connections (--unit \
         connection), or cover more peers",
        design.policy,
        share * 100.0
    ))
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

/// Whether connections with these settings have timers of their own.
fn compares(settings: &Settings, compiled: &Compiled) -> bool {
    let kernel = &compiled.kernel;
    let of_requests = kernel.syn_ack_rto_jiffies.iter();
    kernel.initial_rto_jiffies != 0
        || of_requests.into_iter().any(|jiffies| *jiffies != 0)
        || settings.outlives_connections()
}

fn host_name() -> String {
    let name = uname().map(|name| name.nodename().to_string_lossy().into_owned());
    name.unwrap_or_else(|_| "localhost".to_owned())
}

fn refused<T>(text: &str) -> Result<T, EngineError> {
    Err(EngineError::Refused(text.to_owned()))
}

#[cfg(test)]
mod tests;
