//! The daemon's decisions about policies beyond their settings: made once a second, and applied
//! like every other change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_common::brake::Brake;
use rto_agent_core::{
    config::AgentConfig,
    policy::{Adjustments, PolicyName},
    progress,
    wire::{
        events::{StreamItem, TunedEvent},
        stats::ArmStatistics,
        tune::{TuneAction, TuneAnswer},
        types::Caller,
    },
};
use rto_agent_kernel::datapath::{DatapathError, KernelReader};
use tracing::{error, info, warn};

use super::{
    EngineError,
    apply::Apply,
    audit::{Cause, Change, Source},
    desired::Desired,
    error::refused,
    experiments::{RunningExperiments, SharedExperiments},
    reconcile::Persist,
    snapshot::Published,
    tuning_store::TuningStore,
};
use crate::{
    problem::Problem,
    tuning::{Due, Policies, TICK_MS, Tuning},
};

mod design;
mod experiments;

/// How long automatic values stay in force if the daemon does not renew them.
const LEASE: Duration = Duration::from_secs(3600);
/// Interval between renewals of the lease.
const RENEWAL: Duration = Duration::from_secs(60);

/// Statistics, read once a tick and shared by the tuner and the experiments.
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

    /// Statistics of a policy that several callers read; `None` if it has no slot (yet).
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

    /// Statistics of a policy for the tuner alone. Reuses what an experiment has read.
    pub(super) fn due(
        &mut self,
        policy: &PolicyName,
        due: Due,
    ) -> Result<Option<(ArmStatistics, [Brake; 2])>, DatapathError> {
        let brakes = self.reader.brakes(policy)?;
        let statistics = match self.read.remove(policy) {
            Some(statistics) => statistics,
            None if due == (Due::Brakes { known: brakes }) => None,
            None => self.reader.statistics_of(policy)?,
        };
        Ok(statistics.map(|statistics| (statistics, brakes)))
    }
}

/// Owns the controllers (tuner and experiments), what they have learnt, and the lease of their values.
pub(super) struct Control {
    tuning: Tuning,
    tuned: Published<TuneAnswer>,
    experiments: RunningExperiments,
    store: TuningStore,
    /// Time of the last tick. The tuner's pace at that moment decides when the next one is due.
    ticked: Option<Instant>,
    /// Time of the last renewal of the lease.
    renewed: Option<Instant>,
    /// Why decisions are not in force, or counters cannot be read.
    problem: Problem,
    /// Statistics are off.
    is_blind: bool,
}

impl Control {
    /// Restores the learnt state of an earlier run, and makes the first decisions.
    pub(super) fn start(
        agent: &AgentConfig,
        experiments: RunningExperiments,
        desired: Desired,
    ) -> (Self, Desired) {
        let (store, stored) = TuningStore::open(agent);
        let mut control = Self {
            tuning: Tuning::default(),
            tuned: Published::default(),
            experiments,
            store,
            ticked: None,
            renewed: None,
            problem: Problem::default(),
            is_blind: !agent.statistics,
        };
        control.experiments.follow(&desired.policies());
        let now = control.store.now();
        let policies = control.watched(&desired);
        let boot_id = control.store.boot_id();
        let tuning = &mut control.tuning;
        let told = tuning.restore(stored, boot_id, now, &policies, &desired.host);
        told.iter().for_each(log);
        control.store.save_if_due(&mut control.tuning);
        let desired = control.adjusted(&desired);
        control.show();
        (control, desired)
    }

    /// An experiment has ended because a policy's timers do harm.
    pub(super) fn harm_proven(&mut self, policy: &PolicyName) -> Vec<TunedEvent> {
        self.tuning.harm_proven(self.store.now(), policy)
    }

    /// The policies whose timers are learnt or guarded; none without statistics.
    fn watched<'a>(&self, desired: &'a Desired) -> Policies<'a> {
        match self.is_blind {
            true => Policies::new(),
            false => desired.policies(),
        }
    }

    /// Interval between two ticks.
    fn interval(&self) -> Option<Duration> {
        match self.experiments.needs_ticks() || self.problem.text().is_some() {
            true => Some(Duration::from_millis(TICK_MS)),
            false => self.tuning.interval(),
        }
    }

    /// Decisions could not be applied: each tick tries again until they are.
    fn not_in_force(&mut self, why: &EngineError) {
        let problem = format!("a decision of the tuner could not be applied: {why}");
        self.problem.becomes(Some(problem), |text| error!("{text}"));
    }

    /// Why decisions are not applied, or not stored.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let problem = self.experiments.problem().into_iter();
        let problem = problem.chain(self.problem.text()).cloned();
        problem
            .chain(self.store.problem())
            .chain(self.store.warnings())
            .chain(self.experiments.unreadable.clone())
    }

    /// The decisions of all controllers about the policies of a desired state. A later controller
    /// overrides an earlier one.
    fn adjustments(&self, next: &Desired) -> Adjustments {
        let mut all = Adjustments::new();
        self.tuning
            .adjust(&self.watched(next), &next.host, &mut all);
        let experiments = self.experiments.shared.lock();
        experiments.adjust(&next.policies(), &mut all);
        all
    }

    /// A desired state with the current decisions about its policies.
    fn adjusted(&self, next: &Desired) -> Desired {
        next.with_adjustments(self.adjustments(next))
    }

    /// Publishes the state of these policies only: with a thousand policies, publishing all would
    /// take as long as deciding.
    fn show_some(&self, policies: &BTreeSet<PolicyName>) {
        let now = self.store.now();
        self.tuned.send_modify(|answer| {
            // Copied only while a reader holds it.
            let answer = Arc::make_mut(answer);
            answer.at_ms = now.unix_ms;
            answer.not_stored = self.store.problem();
            let changed = self.tuning.view_of(policies.iter(), now);
            answer.policies.extend(changed);
        });
    }

    /// Publishes the state of all policies.
    fn show(&self) {
        let now = self.store.now();
        self.tuned.send_replace(Arc::new(TuneAnswer {
            at_ms: now.unix_ms,
            not_stored: self.store.problem(),
            policies: self.tuning.view(now),
        }));
    }

    /// Time until the next tick; `None` while no policy needs one, so that an idle daemon does not
    /// wake.
    pub(super) fn until_tick(&self, apply: &Apply) -> Option<Duration> {
        let interval = self.interval().filter(|_| apply.is_attached())?;
        let ticked = self.ticked;
        Some(ticked.map_or(Duration::ZERO, |at| interval.saturating_sub(at.elapsed())))
    }

    /// If a tick is due, reads the counters and applies the resulting decisions. Returns whether
    /// there is something to publish.
    pub(super) fn tick_if_due(&mut self, apply: &mut Apply) -> bool {
        if self.until_tick(apply).is_none_or(|wait| !wait.is_zero()) {
            return false;
        }
        self.ticked = Some(Instant::now());
        self.tick(apply)
    }

    fn tick(&mut self, apply: &mut Apply) -> bool {
        let now = self.store.now();
        let due = self.tuning.due(now.tuner_ms);
        let due: Vec<_> = due.map(|(name, due)| (name.clone(), due)).collect();
        let Some(mut readings) = readings(apply) else {
            return false;
        };
        let mut told = self.look_at_experiments(apply, &mut readings);
        let of_experiments = told.iter().map(|told| told.policy.clone());
        let mut changed: BTreeSet<PolicyName> = of_experiments.collect();
        let mut problem = None;
        for (name, due) in due {
            progress::step();
            let tuning = &mut self.tuning;
            match readings.due(&name, due) {
                Ok(Some((statistics, brakes))) => {
                    told.extend(tuning.step(now, &name, &statistics, brakes));
                    changed.insert(name);
                }
                // The policy has no slot (yet), or is not due in this tick.
                Ok(None) => {}
                Err(e) => {
                    let text = format!("policy {name}: the tuner cannot learn its values: {e}");
                    problem.get_or_insert(text);
                }
            }
        }
        let decided = self.decided(apply, &told);
        self.show_some(&changed);
        match decided {
            Err(e) => {
                self.not_in_force(&e);
                true
            }
            Ok(is_changed) => {
                let known = &mut self.problem;
                known.becomes(problem, |text| error!("{text}"));
                is_changed
            }
        }
    }

    /// Applies, reports and stores decisions; returns whether that changed the kernel.
    ///
    /// # Errors
    ///
    /// If they could not be applied. The next tick tries again.
    fn decided(&mut self, apply: &mut Apply, told: &[TunedEvent]) -> Result<bool, EngineError> {
        // Persist first, so that a crash cannot lose a decision.
        self.tell_decisions(apply, told);
        let renewed = self.renew_lease(apply);
        let adjusted = self.adjust(apply, &Source::Tuner.into())?;
        Ok(renewed || adjusted.is_some())
    }

    /// Reports and stores decisions.
    fn tell_decisions(&mut self, apply: &Apply, told: &[TunedEvent]) {
        for one in told {
            log(one);
            apply.tell(StreamItem::Tuned(one.clone()));
        }
        self.store.save_if_due(&mut self.tuning);
    }

    /// Renews the lease of automatic values once a minute, and right before the first one is
    /// applied. Returns whether the kernel was written.
    pub(super) fn renew_lease(&mut self, apply: &mut Apply) -> bool {
        let is_due = |renewed: Instant| renewed.elapsed() >= RENEWAL;
        if !self.tuning.is_leased() || !self.renewed.is_none_or(is_due) {
            return false;
        }
        match apply.renew_lease(monotonic_ns(LEASE)) {
            Ok(true) => {
                self.renewed = Some(Instant::now());
                true
            }
            Ok(false) => false,
            Err(e) => {
                warn!("the lease of learnt values cannot be renewed: {e}");
                true
            }
        }
    }

    /// Makes a change, together with the current decisions about its policies.
    pub(super) fn reconcile(
        &mut self,
        apply: &mut Apply,
        next: &Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        let change = apply.reconcile(self.adjusted(next), persist, cause)?;
        self.follow_policies(apply);
        Ok(change)
    }

    /// After a change: the tuner follows the policies that are now in force.
    fn follow_policies(&mut self, apply: &Apply) {
        let desired = apply.desired();
        self.experiments.follow(&desired.policies());
        let policies = self.watched(desired);
        self.tuning.follow(&policies, &desired.host);
        self.show();
    }

    /// The maps were re-created: there is no lease, and the counters restart at 0.
    pub(super) fn maps_are_new(&mut self, apply: &mut Apply) {
        self.tuning.begin_again();
        self.experiments.shared.lock().reset_counters();
        self.renewed = None;
        self.renew_lease(apply);
    }

    /// Detaches. The experiments first keep what the counters hold; if that is refused, what they have
    /// decided by it takes effect.
    pub(super) fn detach<T>(
        &mut self,
        apply: &mut Apply,
        detach: impl FnOnce(&mut Apply) -> T,
    ) -> T {
        self.keep_experiments(apply);
        let outcome = detach(apply);
        if apply.is_attached() {
            self.adjust_or_retry(apply);
        }
        outcome
    }

    /// Applies the current decisions outside of a tick, as there may be no further one. If that fails,
    /// each tick tries again.
    fn adjust_or_retry(&mut self, apply: &mut Apply) {
        if let Err(e) = self.adjust(apply, &Source::Tuner.into()) {
            self.not_in_force(&e);
        }
    }

    /// Applies the current decisions. Reconciles only if they have changed.
    fn adjust(&mut self, apply: &mut Apply, cause: &Cause) -> Result<Option<Change>, EngineError> {
        let next = self.adjusted(apply.desired());
        if next.adjustments == apply.desired().adjustments {
            return Ok(None);
        }
        let change = apply.reconcile(next, &Persist::Later, cause)?;
        self.follow_policies(apply);
        Ok(Some(change))
    }

    /// `rto-agent tune freeze`, `resume` and `reset`.
    pub(super) fn tune(
        &mut self,
        apply: &mut Apply,
        action: TuneAction,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<TuneAnswer, EngineError> {
        let now = self.store.now();
        let before = self.tuning.state_of(policy);
        let told = self.tuning.act(now, policy, action);
        let Some(told) = told else {
            return refused(self.not_tuned(apply.desired(), action, policy));
        };
        self.renew_lease(apply);
        if let Err(e) = self.adjust(apply, &Source::Tuner.into()) {
            // What is answered, shown and stored is what the kernel has.
            self.tuning.set_state_of(policy, before);
            return Err(e);
        }
        Cause::done(action.audited(), by).audit_other(action.audited());
        self.tell_decisions(apply, &told);
        self.show();
        Ok(self.tuned.borrow().only(policy))
    }

    fn not_tuned(&self, desired: &Desired, action: TuneAction, policy: &PolicyName) -> String {
        if !desired.policies().contains_key(policy) {
            return format!("no active policy {policy}");
        }
        if self.is_blind {
            return format!(
                "policy {policy} has no learnt or guarded timers: statistics = false in [agent]"
            );
        }
        match action {
            TuneAction::Freeze | TuneAction::Resume => format!(
                "policy {policy} learns no value, and its guard is not \"on\": there is nothing to \
                 {}",
                action.name()
            ),
            TuneAction::Reset => format!("policy {policy} learns no value and has no guard"),
        }
    }

    /// What readers see.
    pub(super) fn published(&self) -> (Published<TuneAnswer>, SharedExperiments) {
        (self.tuned.clone(), self.experiments.shared.clone())
    }

    /// Experiments that changes of policies have ended.
    pub(super) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.experiments.notes)
    }

    /// Saves again what could not be saved.
    pub(super) fn retry_save(&mut self) {
        self.experiments.retry_save();
    }

    /// Stores what is not stored yet. Called when the engine stops.
    pub(super) fn store_tuning(&mut self) {
        self.store.save_last(&mut self.tuning);
    }
}

/// A reader of the current counters; `None` while detached.
fn readings(apply: &Apply) -> Option<Readings> {
    apply.reader().cloned().map(Readings::new)
}

/// Logs one line per transition.
fn log(told: &TunedEvent) {
    let TunedEvent {
        policy,
        transition: view,
    } = told;
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
    if view.is_warning() {
        line!(warn);
    } else {
        line!(info);
    }
}

/// The time this much later, nanoseconds of CLOCK_MONOTONIC.
fn monotonic_ns(later: Duration) -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.saturating_add(later).as_nanos()).unwrap_or(u64::MAX)
}
