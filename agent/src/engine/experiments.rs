//! Experiments: started, stopped and cleared on request; looked at once a second, saved, and told of. Their control
//! arms are in force as other decisions about policies are, see [`super::adjusting`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::utsname::uname;
use rto_agent_common::{Policy, policy_flags};
use rto_model::tune::experiment::{Event, Verdict};
use tracing::{info, warn};

use self::design::design;
use super::{
    Engine, EngineError,
    adjusting::Readings,
    audit::{Cause, Source},
    document::Document,
};
use crate::{
    config::AgentConfig,
    experiment::{Experiments, MOST_COUNTING, MOST_ENDED, Record},
    policy::{
        Adjustments, PolicyName, Settings,
        compile::{Compiled, outlives_connections},
        plan::MapState,
    },
    tuning::Told,
    wire::{
        events::{ExperimentEvent, StreamItem},
        experiments::{
            ExperimentAnswer, ExperimentSummary, ExperimentView, ExperimentsAnswer, StartRequest,
        },
        types::{Caller, now_ms, now_s},
    },
};

mod design;

pub(super) const FILE: &str = "experiments.json";
const FORMAT: u32 = 1;
/// How often what was counted is saved: the kernel's counters have what came since, so that a kill loses nothing.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);
/// The experiments as everybody may read them.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedExperiments(Arc<Mutex<Experiments>>);

impl SharedExperiments {
    /// Whoever died while having it has left whole records.
    fn lock(&self) -> MutexGuard<'_, Experiments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them, with what they say now.
    pub(super) fn answer(&self) -> ExperimentsAnswer {
        let at_s = now_s();
        // The bootstrap takes long.
        let all = self.lock().clone();
        let views = all
            .iter()
            .map(|(name, record)| (name.clone(), record.view(at_s)));
        ExperimentsAnswer {
            at_s,
            experiments: views.collect(),
        }
    }

    /// In short.
    pub(super) fn summaries(&self) -> BTreeMap<PolicyName, ExperimentSummary> {
        let now_s = now_s();
        let all = self.lock();
        let all = all.iter();
        all.map(|(name, record)| (name.clone(), record.summary(now_s)))
            .collect()
    }

    /// What to know of those that leave a policy out of force, or were ended by something else than a request.
    pub(super) fn warnings(&self) -> Vec<String> {
        let now_s = now_s();
        let all = self.lock();
        let warnings = all.iter().filter_map(|(name, record)| {
            Some(format!(
                "policy {name}: experiment {}",
                record.warning(now_s)?
            ))
        });
        warnings.collect()
    }
}

/// The engine's half: it alone changes and saves them.
#[derive(Debug)]
pub(super) struct RunningExperiments {
    shared: SharedExperiments,
    document: Document,
    saved_at: Instant,
    /// What a reload is to tell.
    notes: Vec<String>,
    /// Why those of an earlier run are lost, and how to fix it.
    unreadable: Option<String>,
}

impl RunningExperiments {
    /// What an earlier run has left. What cannot be understood is moved aside and said.
    ///
    /// # Errors
    ///
    /// If there is a file and it cannot be read: a policy that was suspended must not be in force again for that.
    pub(super) fn load(agent: &AgentConfig) -> io::Result<Self> {
        let owner = agent.pin_dir.to_string_lossy().into_owned();
        let mut document = Document::new(&agent.persistent_dir, FILE, FORMAT, owner);
        let loaded = document.load::<Experiments>().map_err(|e| {
            let fix = "let root read it, or remove it: experiments are forgotten then";
            io::Error::new(e.kind(), format!("{e}; {fix}"))
        });
        let (experiments, unreadable) = loaded?;
        let experiments = SharedExperiments(Arc::new(Mutex::new(experiments.unwrap_or_default())));
        let unreadable = unreadable.map(|why| {
            format!("experiments were lost, and their policies are in force as configured: {why}")
        });
        if let Some(text) = &unreadable {
            warn!("{text}");
        }
        Ok(Self {
            shared: experiments,
            document,
            saved_at: Instant::now(),
            notes: Vec::new(),
            unreadable,
        })
    }

    /// Why those of an earlier run are lost, and how to fix it.
    pub(super) fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    pub(super) fn shared(&self) -> SharedExperiments {
        self.shared.clone()
    }

    /// Whether any counts what happens.
    pub(super) fn needs_ticks(&self) -> bool {
        self.shared.lock().counting().next().is_some()
    }

    /// Adds the control arms of experiments to what is decided about these policies.
    pub(super) fn adjust(
        &self,
        policies: &BTreeMap<&PolicyName, &Settings>,
        all: &mut Adjustments,
    ) {
        self.shared.lock().adjust(policies, all);
    }

    /// Ends experiments of policies that are gone or have other settings.
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

    /// What has ended by a change of policies since this was last asked.
    pub(super) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// All counters have begun anew.
    pub(super) fn counters_anew(&self) {
        self.shared.lock().counters_anew();
    }

    /// Until now the kernel has drawn arms of these policies in another way than their experiments say.
    pub(super) fn drawn_otherwise<'a>(&self, policies: impl Iterator<Item = &'a PolicyName>) {
        let mut all = self.shared.lock();
        for policy in policies {
            if let Some(record) = all.get_mut(policy) {
                record.resettle(now_s());
            }
        }
    }

    /// Why they are not saved.
    pub(super) fn problem(&self) -> Option<&String> {
        self.document.problem()
    }

    /// Saves them; where that fails it is said, and tried again.
    pub(super) fn save(&mut self) {
        let _told = self.try_save();
    }

    /// Saves them again where that failed.
    pub(super) fn retry_save(&mut self) {
        if self.problem().is_some() {
            self.save();
        }
    }

    fn try_save(&mut self) -> io::Result<()> {
        let all = {
            let mut all = self.shared.lock();
            for policy in all.trim() {
                info!(%policy, "its ended experiment is forgotten: {MOST_ENDED} others ended later");
            }
            all.clone()
        };
        self.saved_at = Instant::now();
        self.document.save(&all)
    }

    fn is_save_due(&self) -> bool {
        self.saved_at.elapsed() >= SAVE_INTERVAL
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
        self.check_not_suspended(&policy)?;
        if let Some(compiled) = resolved.policies.get(&policy) {
            check_compares(&policy, settings, compiled)?;
        }
        let reader = self.snapshots.borrow().reader.clone();
        let statistics = match reader.as_deref() {
            Some(reader) => reader.statistics_of(&policy)?,
            None => None,
        };
        let Some(statistics) = statistics else {
            return refused("nothing is in force; rto-agent reload attaches again");
        };
        let host = host_name();
        let record = Record::start(design, host, by, &statistics, now_s())
            .map_err(|e| EngineError::Refused(e.to_string()))?;
        let mut notes = Vec::new();
        if let Some(holdout) = settings.control_share() {
            notes.push(format!(
                "its control arm takes the place of that of holdout = {holdout} while it lasts"
            ));
        }
        let before = {
            let mut all = self.deciding.experiments.shared.lock();
            let before = all.remove(&policy);
            all.insert(policy.clone(), record);
            before
        };
        let saved = self
            .deciding
            .experiments
            .try_save()
            .map_err(EngineError::Unsaved);
        let cause = Cause::done("experiment start", by);
        if let Err(e) = saved.and_then(|()| self.adjust(&cause).map(drop)) {
            let mut all = self.deciding.experiments.shared.lock();
            all.remove(&policy);
            if let Some(before) = before {
                all.insert(policy, before);
            }
            drop(all);
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
        // What has ended by that is in force, whatever becomes of the request: there may be no tick for it.
        if let Err(e) = self.adjust(&Source::Tuner.into()) {
            self.deciding.not_in_force(&e);
        }
        {
            let now_s = now_s();
            let mut all = self.deciding.experiments.shared.lock();
            let Some(record) = all.get_mut(policy) else {
                return refused(&none_of(policy));
            };
            if !record.is_counting() {
                let text = record.text(now_s);
                return refused(&format!("the experiment of {policy} has ended: {text}"));
            }
            record.stop(now_s);
        }
        self.deciding.experiments.save();
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
        let record = {
            let mut all = self.deciding.experiments.shared.lock();
            match all.get(policy) {
                None => return refused(&none_of(policy)),
                Some(record) if record.state(now_s()).is_running() => {
                    return refused(&format!(
                        "the experiment of {policy} runs: rto-agent experiment stop {policy} ends it first"
                    ));
                }
                Some(_) => {}
            }
            all.remove(policy)
        };
        let cause = Cause::done("experiment clear", by);
        match self.adjust(&cause) {
            Ok(Some(_)) => {}
            Ok(None) => cause.audit_other("experiment clear"),
            Err(e) => {
                if let Some(record) = record {
                    let mut all = self.deciding.experiments.shared.lock();
                    all.insert(policy.clone(), record);
                }
                return Err(e);
            }
        }
        self.deciding.experiments.save();
        let text = "cleared: the policy is in force as configured";
        info!(%policy, "experiment: {text}");
        self.tell_experiment(policy, text);
        Ok(ExperimentAnswer {
            experiment: None,
            notes: std::iter::once(format!("{policy}: {text}"))
                .chain(self.deciding.experiments.problem().cloned())
                .collect(),
        })
    }

    /// After a start at which counters went on: whether arms were drawn as the experiments say.
    pub(super) fn resume_experiments(&mut self) {
        let drawn_otherwise = self.reconciler.arms_changed_at_start();
        self.deciding
            .experiments
            .drawn_otherwise(drawn_otherwise.iter());
    }

    /// Before the counters go: what they have is taken in and saved.
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
            return refused("nothing is counted: statistics = false in [agent]");
        }
        if let Some(by) = self.detached_by {
            return refused(&format!(
                "nothing is in force: detached by {by}; rto-agent reload attaches again"
            ));
        }
        if let Some(reader) = self.snapshots.borrow().reader.as_deref()
            && reader.missing_stats().contains(policy)
        {
            return refused(&format!(
                "policy {policy}: nothing is counted, as there is no memory for it"
            ));
        }
        let all = self.deciding.experiments.shared.lock();
        if all.counting().count() >= MOST_COUNTING {
            return refused(&format!(
                "{MOST_COUNTING} experiments run on this host, which is the most there may be; rto-agent experiment \
                 stop ends one"
            ));
        }
        if let Some(record) = all.get(policy)
            && record.is_counting()
        {
            return refused(&format!(
                "an experiment of {policy} runs already: {}; rto-agent experiment stop {policy} ends it",
                record.text(now_s())
            ));
        }
        Ok(())
    }

    /// Refuses a policy of which the guard treats a part of the connections, or none.
    fn check_not_suspended(&self, policy: &PolicyName) -> Result<(), EngineError> {
        let adjustments = &self.reconciler.desired().adjustments;
        let in_force = adjustments.get(policy).and_then(|a| a.control);
        let all = self.deciding.experiments.shared.lock();
        let of_experiment = all.get(policy).and_then(Record::control);
        if in_force.is_some() && in_force != of_experiment {
            return refused(&format!(
                "policy {policy}: its guard has suspended it; see rto-agent tune {policy}"
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
        let view = all.get(policy).map(|record| record.view(now_s()));
        drop(all);
        let text = view.as_ref().map_or("", |view: &ExperimentView| &view.text);
        let text = format!("{what}: {text}");
        info!(%policy, "experiment: {text}");
        self.tell_experiment(policy, &text);
        Ok(ExperimentAnswer {
            experiment: view,
            notes,
        })
    }

    /// Looks at once, not in the next tick.
    fn look_now(&mut self) {
        if let Some(mut readings) = self.readings() {
            let told = self.look_at_experiments(&mut readings);
            self.tell_decisions(&told);
        }
    }

    /// Takes in what was counted of the arms, and what follows from it, also for timers that are learnt or guarded;
    /// [`Engine::adjust`] puts that in force.
    pub(super) fn look_at_experiments(&mut self, readings: &mut Readings) -> Vec<Told> {
        let (now_s, mut told, mut is_changed) = (now_s(), Vec::new(), false);
        {
            let mut all = self.deciding.experiments.shared.lock();
            let counting: Vec<PolicyName> = all.counting().cloned().collect();
            let in_force = &self.reconciler.desired().adjustments;
            let resolved = self.reconciler.resolved();
            for policy in counting {
                let is_missing = readings.reader().missing_stats().contains(&policy);
                let Ok(Some(statistics)) = readings.shared(&policy) else {
                    // The counters go on: what came meanwhile is in the next look.
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
                // Without a treatment (frozen, suspended) both arms are the same.
                if drawn != record.control() || !is_treated || is_missing {
                    record.resettle(now_s);
                }
                if let Some(event) = record.look(statistics, now_s) {
                    told.push((policy.clone(), event, record.told(event, now_s)));
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
        // First saved, then in force: what is suspended stays so whenever the daemon is killed.
        if !told.is_empty() || (is_changed && self.deciding.experiments.is_save_due()) {
            self.deciding.experiments.save();
        }
        of_timers
    }

    /// A line for who watches.
    fn tell_experiment(&self, policy: &PolicyName, text: &str) {
        self.events.tell(StreamItem::Experiment(ExperimentEvent {
            at_us: now_ms().saturating_mul(1000),
            policy: policy.clone(),
            experiment: text.to_owned(),
        }));
    }
}

/// Policies of which both states have arms, and draw them in another way.
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

/// Refuses a policy whose connections do not differ from others now.
fn check_compares(
    policy: &PolicyName,
    settings: &Settings,
    compiled: &Compiled,
) -> Result<(), EngineError> {
    if compares(settings, compiled) {
        return Ok(());
    }
    refused(&format!(
        "policy {policy}: nothing would be compared, as none of its timers is in force: it sets none (mode = \"advise\" \
         sets none either), they are not learnt yet, or its guard has taken them back"
    ))
}

/// Whether connections with these settings have timers of their own.
fn compares(settings: &Settings, compiled: &Compiled) -> bool {
    let kernel = &compiled.kernel;
    let of_requests = kernel.syn_ack_rto_jiffies.iter();
    kernel.initial_rto_jiffies != 0
        || of_requests.into_iter().any(|jiffies| *jiffies != 0)
        || outlives_connections(settings)
}

fn none_of(policy: &PolicyName) -> String {
    format!("there is no experiment of {policy}; see rto-agent experiment show")
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
