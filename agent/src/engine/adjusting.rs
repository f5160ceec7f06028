//! What the daemon decides about policies beside their settings: decided once a second, and put in force as every
//! other change is.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_common::brake::Brake;
use tracing::{error, info, warn};

use super::{
    Engine, EngineError,
    audit::{Cause, Source},
    desired::Desired,
    experiments::RunningExperiments,
    reconcile::{Change, Persist},
    tuning_store::TuningStore,
};
use crate::{
    config::AgentConfig,
    datapath::{ArmStatistics, DatapathError, KernelReader},
    policy::{Adjustment, Adjustments, PolicyName, compile::compile_adjusted},
    problem::Problem,
    progress,
    tuning::{Due, Moment, Pace, Told, Tuning},
    wire::{
        events::{StreamItem, TunedEvent},
        tune::{TuneAction, TuneAnswer},
        types::Caller,
    },
};

/// How long automatic values stay in force without the daemon.
const LEASE: Duration = Duration::from_secs(3600);
/// How often that is renewed.
const RENEWAL: Duration = Duration::from_secs(60);

/// What is learnt, as everybody may see it.
#[derive(Clone, Debug, Default)]
pub(super) struct Tuned(Arc<RwLock<Arc<TuneAnswer>>>);

impl Tuned {
    pub(super) fn get(&self) -> Arc<TuneAnswer> {
        // A writer that panicked has left a complete answer.
        let answer = self.0.read().unwrap_or_else(PoisonError::into_inner);
        answer.clone()
    }

    fn set(&self, answer: TuneAnswer) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(answer);
    }

    fn change(&self, change: impl FnOnce(&mut TuneAnswer)) {
        let mut answer = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // Copied only while a reader holds it.
        change(Arc::make_mut(&mut answer));
    }
}

/// What was counted, read once for all that decide in a tick.
pub(super) struct Readings {
    reader: Arc<dyn KernelReader>,
    read: BTreeMap<PolicyName, Option<ArmStatistics>>,
}

impl Readings {
    pub(super) const fn new(reader: Arc<dyn KernelReader>) -> Self {
        Self {
            reader,
            read: BTreeMap::new(),
        }
    }

    pub(super) fn reader(&self) -> &dyn KernelReader {
        self.reader.as_ref()
    }

    /// Of a policy; `None` if it has no slot (yet). Of one that several ask for.
    pub(super) fn shared(
        &mut self,
        policy: &PolicyName,
    ) -> Result<Option<&ArmStatistics>, DatapathError> {
        if !self.read.contains_key(policy) {
            let read = self.reader.statistics_of(policy)?;
            self.read.insert(policy.clone(), read);
        }
        Ok(self.read.get(policy).and_then(Option::as_ref))
    }

    /// Of a policy that only the tuner asks for; what it shares with an experiment is read already.
    pub(super) fn due(
        &mut self,
        policy: &PolicyName,
        due: Due,
        tuning: &Tuning,
    ) -> Result<Option<(ArmStatistics, [Brake; 2])>, DatapathError> {
        let brakes = self.reader.brakes(policy)?;
        let statistics = match self.read.remove(policy) {
            Some(statistics) => statistics,
            None if due == Due::Brakes && !tuning.has_other_brakes(policy, &brakes) => None,
            None => self.reader.statistics_of(policy)?,
        };
        Ok(statistics.map(|statistics| (statistics, brakes)))
    }
}

/// What decides, and what it needs.
pub(super) struct Deciding {
    pub(super) tuning: Tuning,
    pub(super) tuned: Tuned,
    pub(super) experiments: RunningExperiments,
    store: TuningStore,
    /// The last tick. When the next one is due depends on what there is to look at by then.
    ticked: Option<Instant>,
    /// The lease was renewed.
    renewed: Option<Instant>,
    /// Why decisions are not in force, or counters cannot be read.
    problem: Problem,
    /// Which decisions do not go with the settings.
    misfits: RefCell<Problem>,
    /// Nothing is counted.
    is_blind: bool,
}

impl Deciding {
    /// Resumes with the learnt state of an earlier run, and decides.
    pub(super) fn start(
        agent: &AgentConfig,
        experiments: RunningExperiments,
        desired: Desired,
    ) -> (Self, Desired) {
        let (store, restored) = TuningStore::open(agent);
        let mut deciding = Self {
            tuning: Tuning::default(),
            tuned: Tuned::default(),
            experiments,
            store,
            ticked: None,
            renewed: None,
            problem: Problem::default(),
            misfits: RefCell::default(),
            is_blind: !agent.statistics,
        };
        deciding.experiments.follow(&desired.policies());
        if deciding.is_blind {
            let desired = deciding.adjusted(desired);
            return (deciding, desired);
        }
        let now = deciding.store.now();
        let policies = desired.policies();
        let tuning = &mut deciding.tuning;
        let told = tuning.restore(restored, now.tuner_ms, &policies, &desired.host);
        for one in &told {
            log(one, now);
        }
        deciding.store.save_if_due(&mut deciding.tuning);
        let desired = deciding.adjusted(desired);
        deciding.show();
        (deciding, desired)
    }

    /// An experiment has ended with harm of a policy's timers.
    pub(super) fn harm_proven(&mut self, policy: &PolicyName) -> Vec<Told> {
        let now = self.store.now();
        self.tuning.harm_proven(now.tuner_ms, policy)
    }

    fn pace(&self) -> Option<Pace> {
        if self.experiments.needs_ticks() || self.problem.text().is_some() {
            return Some(Pace::EachSecond);
        }
        self.tuning.pace().filter(|_| !self.is_blind)
    }

    /// What was decided could not be put in force: ticks try again until it is.
    pub(super) fn not_in_force(&mut self, why: &EngineError) {
        let problem = format!("what was decided is not in force: {why}");
        self.problem.becomes(Some(problem), |text| error!("{text}"));
    }

    /// What is not as decided, or not stored.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let misfits = self.misfits.borrow().text().cloned();
        let problem = self.problem.text().cloned();
        problem
            .into_iter()
            .chain(misfits)
            .chain(self.store.problem())
            .chain(self.store.warnings())
            .chain(self.experiments.unreadable().map(str::to_owned))
    }

    /// When the next tick is due.
    fn tick_due(&self) -> Option<Instant> {
        let interval = self.pace()?.interval();
        Some(self.ticked.map_or_else(Instant::now, |at| at + interval))
    }

    /// Decisions about the policies of a desired state, from all that decide. A later one overrides an earlier one.
    fn adjustments(&self, next: &Desired) -> Adjustments {
        let mut all = Adjustments::new();
        if !self.is_blind {
            self.tuning.adjust(&next.policies(), &next.host, &mut all);
        }
        self.experiments.adjust(&next.policies(), &mut all);
        all
    }

    /// A desired state with the current decisions about its policies.
    fn adjusted(&self, next: Desired) -> Desired {
        match self.other_adjustments(&next) {
            Some(adjustments) => next.with_adjustments(adjustments),
            None => next,
        }
    }

    /// The decisions about the policies of a desired state, if they differ. A decision that the settings do not allow is
    /// left out: no decision blocks a requested change.
    fn other_adjustments(&self, next: &Desired) -> Option<Adjustments> {
        let mut adjustments = self.adjustments(next);
        if *next.adjustments == adjustments {
            return None;
        }
        let policies = next.policies();
        let mut misfits = Vec::new();
        adjustments.retain(|name, adjustment| {
            let compiled = policies
                .get(name)
                .map(|settings| compile_adjusted(name, settings, adjustment, &next.host));
            let fits = compiled.is_some_and(|compiled| compiled.is_ok());
            if !fits {
                misfits.push(name.to_string());
                // An experiment, the guard or the operator may have suspended it; it stays suspended.
                *adjustment = Adjustment {
                    active: adjustment.active.without_value(),
                    passive: adjustment.passive.without_value(),
                    control: adjustment.control,
                    rto_min: None,
                };
            }
            fits || *adjustment != Adjustment::default()
        });
        let problem = (!misfits.is_empty()).then(|| {
            format!(
                "what is learnt does not go with the settings of {}: it is not in force",
                misfits.join(", ")
            )
        });
        let mut known = self.misfits.borrow_mut();
        known.becomes(problem, |text| warn!("{text}"));
        (*next.adjustments != adjustments).then_some(adjustments)
    }

    /// Has everybody see what these policies are now: a thousand others take as long as all decisions.
    fn show_some(&self, policies: &BTreeSet<PolicyName>) {
        let now = self.store.now();
        self.tuned.change(|answer| {
            answer.at_ms = now.unix_ms;
            answer.not_stored = self.store.problem();
            let changed = self.tuning.view_of(policies.iter(), now);
            answer.policies.extend(changed);
        });
    }

    /// Has everybody see what it is now.
    fn show(&self) {
        let now = self.store.now();
        self.tuned.set(TuneAnswer {
            at_ms: now.unix_ms,
            not_stored: self.store.problem(),
            policies: self.tuning.view(now),
        });
    }
}

impl Engine {
    /// How long until the next tick; `None` while no policy needs one: an idle daemon does not wake for it.
    pub(super) fn until_tick(&self) -> Option<Duration> {
        let due = self.deciding.tick_due().filter(|_| self.needs_ticks())?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    fn needs_ticks(&self) -> bool {
        self.detached_by.is_none() && self.restoring.is_none() && self.deciding.pace().is_some()
    }

    /// If a tick is due, takes in the counters and puts the resulting decisions in force.
    pub(super) fn tick_if_due(&mut self) {
        let due = self.deciding.tick_due().filter(|_| self.needs_ticks());
        let now = Instant::now();
        if due.is_some_and(|due| now >= due) {
            self.deciding.ticked = Some(now);
            self.tick();
        }
    }

    fn tick(&mut self) {
        let now = self.deciding.store.now();
        let due = self.deciding.tuning.due(now.tuner_ms);
        let due: Vec<_> = due.map(|(name, due)| (name.clone(), due)).collect();
        let Some(mut readings) = self.readings() else {
            return;
        };
        let mut told = self.look_at_experiments(&mut readings);
        let of_experiments = told.iter().map(|told| told.policy.clone());
        let mut changed: BTreeSet<PolicyName> = of_experiments.collect();
        let mut problem = None;
        for (name, due) in due {
            progress::step();
            let tuning = &mut self.deciding.tuning;
            match readings.due(&name, due, tuning) {
                Ok(Some((statistics, brakes))) => {
                    told.extend(tuning.step(now.tuner_ms, &name, &statistics, brakes));
                    changed.insert(name);
                }
                // It has no slot (yet), or it is not its turn.
                Ok(None) => {}
                Err(e) => {
                    let text = format!("policy {name}: nothing is learnt of it: {e}");
                    problem.get_or_insert(text);
                }
            }
        }
        let decided = self.decided(&told);
        self.deciding.show_some(&changed);
        match decided {
            Err(e) => self.deciding.not_in_force(&e),
            Ok(()) => {
                let known = &mut self.deciding.problem;
                known.becomes(problem, |text| error!("{text}"));
            }
        }
    }

    /// Puts decisions in force, reports and stores them.
    ///
    /// # Errors
    ///
    /// If it could not be put in force; that is tried again by the next tick.
    pub(super) fn decided(&mut self, told: &[Told]) -> Result<(), EngineError> {
        // First: a daemon that is killed now comes back with no less than was decided.
        self.tell_decisions(told);
        let renewed = self.renew_lease();
        let adjusted = self.adjust(&Source::Tuner.into());
        if renewed || !matches!(adjusted, Ok(None)) {
            self.publish();
        }
        adjusted.map(drop)
    }

    /// What is counted now, to be read; `None` while detached.
    pub(super) fn readings(&self) -> Option<Readings> {
        let reader = self.snapshots.borrow().reader.clone();
        reader.map(Readings::new)
    }

    /// Reports and stores decisions.
    pub(super) fn tell_decisions(&mut self, told: &[Told]) {
        let now = self.deciding.store.now();
        for one in told {
            log(one, now);
            self.events.tell(StreamItem::Tuned(TunedEvent {
                policy: one.policy.clone(),
                transition: one.view(now),
            }));
        }
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_if_due(tuning);
    }

    /// Renews the lease of automatic values once a minute; also right before the first one comes into force. Tells
    /// whether the kernel was written.
    pub(super) fn renew_lease(&mut self) -> bool {
        let is_due = |renewed: Instant| renewed.elapsed() >= RENEWAL;
        if !self.deciding.tuning.is_leased() || !self.deciding.renewed.is_none_or(is_due) {
            return false;
        }
        match self.reconciler.renew_lease(monotonic_ns(LEASE)) {
            Ok(true) => {
                self.deciding.renewed = Some(Instant::now());
                true
            }
            Ok(false) => false,
            Err(e) => {
                warn!("automatic values cannot be kept in force: {e}");
                true
            }
        }
    }

    /// Makes a change, with the current decisions about its policies.
    ///
    /// # Errors
    ///
    /// As [`Engine::reconcile_decided`].
    pub(super) fn reconcile(
        &mut self,
        next: Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        let next = self.deciding.adjusted(next);
        self.reconcile_decided(next, persist, cause)
    }

    /// After a change: what is tuned is what the policies in force say.
    pub(super) fn follow_policies(&mut self) {
        let desired = self.reconciler.desired();
        self.deciding.experiments.follow(&desired.policies());
        if self.deciding.is_blind {
            return;
        }
        self.deciding
            .tuning
            .follow(&desired.policies(), &desired.host);
        self.deciding.show();
    }

    /// The maps are new: nothing is leased, and counters begin again.
    pub(super) fn maps_are_new(&mut self) {
        self.deciding.tuning.begin_again();
        self.deciding.experiments.counters_anew();
        self.deciding.renewed = None;
        if self.renew_lease() {
            self.publish();
        }
    }

    /// Has the kernel hold what is decided now. Reconciles only where that is something else than before.
    ///
    /// # Errors
    ///
    /// As [`Engine::reconcile_decided`].
    pub(super) fn adjust(&mut self, cause: &Cause) -> Result<Option<Change>, EngineError> {
        let desired = self.reconciler.desired();
        let Some(adjustments) = self.deciding.other_adjustments(desired) else {
            return Ok(None);
        };
        let next = desired.with_adjustments(adjustments);
        let change = self.reconcile_decided(next, &Persist::Later, cause);
        change.map(Some)
    }

    /// `rto-agent tune freeze`, `resume` and `reset`.
    pub(super) fn tune(
        &mut self,
        action: TuneAction,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<TuneAnswer, EngineError> {
        let now = self.deciding.store.now();
        let tuning = &mut self.deciding.tuning;
        let told = match action {
            TuneAction::Freeze => tuning.freeze(now.tuner_ms, policy),
            TuneAction::Resume => tuning.resume(now.tuner_ms, policy),
            TuneAction::Reset => tuning.reset(now.tuner_ms, policy),
        };
        let Some(told) = told else {
            return Err(EngineError::Refused(self.not_tuned(action, policy)));
        };
        Cause::done(action.audited(), by).audit_other(action.audited());
        let decided = self.decided(&told);
        self.deciding.show();
        decided?;
        Ok(self.deciding.tuned.get().only(policy))
    }

    fn not_tuned(&self, action: TuneAction, policy: &PolicyName) -> String {
        let desired = self.reconciler.desired();
        if !desired.policies().contains_key(policy) {
            return format!("no policy {policy} is in force");
        }
        if self.deciding.is_blind {
            return format!(
                "policy {policy}: nothing is learnt or guarded: statistics = false in [agent]"
            );
        }
        match action {
            TuneAction::Freeze | TuneAction::Resume => format!(
                "policy {policy}: it learns nothing, and its guard is not \"on\": there is nothing to {}",
                action.name()
            ),
            TuneAction::Reset => format!("policy {policy}: it learns nothing and has no guard"),
        }
    }

    /// Stores what is not stored yet, at the end.
    pub(super) fn store_tuning(&mut self) {
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_last(tuning);
    }
}

/// One line a transition.
fn log(told: &Told, now: Moment) {
    let Told { policy, .. } = told;
    let view = told.view(now);
    let (of, evidence) = (&view.transition, &view.transition.evidence);
    macro_rules! line {
        ($level:ident) => {
            $level!(
                audit = true,
                action = "tune",
                source = "tuner",
                %policy,
                setting = view.setting,
                direction = view.direction,
                from = of.from.name(),
                to = of.to.name(),
                cause = of.cause.name(),
                before_us = of.before_us,
                after_us = of.after_us,
                samples = evidence.samples,
                connections = evidence.counts.connections,
                spurious = evidence.counts.spurious,
                "policy {policy}: {view}"
            )
        };
    }
    if told.is_warning() {
        line!(warn);
    } else {
        line!(info);
    }
}

/// So much later, nanoseconds of CLOCK_MONOTONIC.
fn monotonic_ns(later: Duration) -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.saturating_add(later).as_nanos()).unwrap_or(u64::MAX)
}
