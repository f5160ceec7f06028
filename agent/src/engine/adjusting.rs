//! What the daemon decides about policies beside their settings: decided once a second, and put in force as every
//! other change is.

use std::{
    cell::RefCell,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
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
    tuning::{Moment, Pace, Told, Tuning},
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
        // Whoever died while he had the lock has left a whole answer.
        let answer = self.0.read().unwrap_or_else(PoisonError::into_inner);
        answer.clone()
    }

    fn set(&self, answer: TuneAnswer) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(answer);
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
    /// Goes on with what an earlier run has learnt of what is desired, and decides.
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
            log(one, now, desired.host.hz);
        }
        deciding.store.save_if_due(&mut deciding.tuning);
        let desired = deciding.adjusted(desired);
        deciding.show();
        (deciding, desired)
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

    /// A desired state with what is decided about its policies.
    fn adjusted(&self, next: Desired) -> Desired {
        match self.other_adjustments(&next) {
            Some(adjustments) => next.with_adjustments(adjustments),
            None => next,
        }
    }

    /// What is decided about the policies of a desired state, where it has something else. What its settings do not allow
    /// is left out: no decision stands in the way of what somebody asks for.
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
                // What an experiment, the guard or somebody has taken out of force stays so.
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

    /// Takes in what was counted, and puts in force what follows from it, if a tick is due.
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
        let due: Vec<PolicyName> = self.deciding.tuning.due(now.tuner_ms).cloned().collect();
        let Some(reader) = self.snapshots.borrow().reader.clone() else {
            return;
        };
        self.look_at_experiments();
        let mut problem = None;
        let mut told = Vec::new();
        for name in &due {
            progress::step();
            match read(reader.as_ref(), name) {
                Ok(Some((statistics, brakes))) => {
                    let tuning = &mut self.deciding.tuning;
                    told.extend(tuning.step(now.tuner_ms, name, &statistics, brakes));
                }
                // It has no slot (yet).
                Ok(None) => {}
                Err(e) => {
                    let text = format!("policy {name}: nothing is learnt of it: {e}");
                    problem.get_or_insert(text);
                }
            }
        }
        let decided = self.decided(&told, now);
        let problem = decided
            .err()
            .map(|e| format!("what was decided is not in force: {e}"))
            .or(problem);
        self.deciding
            .problem
            .becomes(problem, |text| error!("{text}"));
    }

    /// Puts what was decided in force, tells of it and stores it.
    ///
    /// # Errors
    ///
    /// If it could not be put in force; that is tried again by the next tick.
    pub(super) fn decided(&mut self, told: &[Told], now: Moment) -> Result<(), EngineError> {
        let hz = self.reconciler.desired().host.hz;
        for one in told {
            log(one, now, hz);
            self.events.tell(StreamItem::Tuned(TunedEvent {
                policy: one.policy.clone(),
                transition: one.view(now, hz),
            }));
        }
        // First: a daemon that is killed now comes back with no less than was decided.
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_if_due(tuning);
        let renewed = self.renew_lease();
        let adjusted = self.adjust(&Source::Tuner.into());
        if renewed || !matches!(adjusted, Ok(None)) {
            self.publish();
        }
        self.deciding.show();
        adjusted.map(drop)
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

    /// A desired state with what is decided about its policies.
    pub(super) fn adjusted(&self, next: Desired) -> Desired {
        self.deciding.adjusted(next)
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
    /// As [`Engine::reconcile`].
    pub(super) fn adjust(&mut self, cause: &Cause) -> Result<Option<Change>, EngineError> {
        let desired = self.reconciler.desired();
        let Some(adjustments) = self.deciding.other_adjustments(desired) else {
            return Ok(None);
        };
        let next = desired.with_adjustments(adjustments);
        self.reconcile(next, &Persist::Later, cause).map(Some)
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
        self.decided(&told, now)?;
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
                "policy {policy}: nothing of it is learnt, and its guard is not \"on\": there is nothing to {}",
                action.name()
            ),
            TuneAction::Reset => format!("policy {policy}: nothing of it is learnt or guarded"),
        }
    }

    /// Stores what is not stored yet, at the end.
    pub(super) fn store_tuning(&mut self) {
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_last(tuning);
    }
}

type Reading = (ArmStatistics, [rto_agent_common::brake::Brake; 2]);

fn read(reader: &dyn KernelReader, name: &PolicyName) -> Result<Option<Reading>, DatapathError> {
    let Some(statistics) = reader.statistics_of(name)? else {
        return Ok(None);
    };
    Ok(Some((statistics, reader.brakes(name)?)))
}

/// One line a transition.
fn log(told: &Told, now: Moment, hz: u32) {
    let Told { policy, .. } = told;
    let view = told.view(now, hz);
    macro_rules! line {
        ($level:ident) => {
            $level!(
                audit = true,
                action = "tune",
                source = "tuner",
                %policy,
                setting = view.setting,
                direction = view.direction,
                from = view.from,
                to = view.to,
                cause = view.cause,
                before_us = view.before_us,
                after_us = view.after_us,
                samples = view.samples,
                judged = view.judged,
                spurious = view.spurious,
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
