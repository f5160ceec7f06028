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
    Engine, EngineError,
    audit::{Cause, Source},
    desired::Desired,
    experiments::RunningExperiments,
    reconcile::{Change, Persist},
    snapshot::Published,
    tuning_store::TuningStore,
};
use crate::{
    problem::Problem,
    tuning::{Due, Policies, TICK_MS, Tuning},
};

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

/// The controllers (tuner and experiments) and their state.
pub(super) struct Deciding {
    pub(super) tuning: Tuning,
    pub(super) tuned: Published<TuneAnswer>,
    pub(super) experiments: RunningExperiments,
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

impl Deciding {
    /// Restores the learnt state of an earlier run, and makes the first decisions.
    pub(super) fn start(
        agent: &AgentConfig,
        experiments: RunningExperiments,
        desired: Desired,
    ) -> (Self, Desired) {
        let (store, stored) = TuningStore::open(agent);
        let mut deciding = Self {
            tuning: Tuning::default(),
            tuned: Published::default(),
            experiments,
            store,
            ticked: None,
            renewed: None,
            problem: Problem::default(),
            is_blind: !agent.statistics,
        };
        deciding.experiments.follow(&desired.policies());
        let now = deciding.store.now();
        let policies = deciding.watched(&desired);
        let boot_id = deciding.store.boot_id();
        let tuning = &mut deciding.tuning;
        let told = tuning.restore(stored, boot_id, now, &policies, &desired.host);
        told.iter().for_each(log);
        deciding.store.save_if_due(&mut deciding.tuning);
        let desired = deciding.adjusted(&desired);
        deciding.show();
        (deciding, desired)
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
    pub(super) fn not_in_force(&mut self, why: &EngineError) {
        let problem = format!("a decision of the tuner could not be applied: {why}");
        self.problem.becomes(Some(problem), |text| error!("{text}"));
    }

    /// Why decisions are not applied, or not stored.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let problem = self.problem.text().cloned();
        problem
            .into_iter()
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
        self.tuned.change(|answer| {
            answer.at_ms = now.unix_ms;
            answer.not_stored = self.store.problem();
            let changed = self.tuning.view_of(policies.iter(), now);
            answer.policies.extend(changed);
        });
    }

    /// Publishes the state of all policies.
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
    /// Time until the next tick; `None` while no policy needs one, so that an idle daemon does not
    /// wake.
    pub(super) fn until_tick(&self) -> Option<Duration> {
        let is_off = self.detached_by.is_some() || self.restoring.is_some();
        let interval = self.deciding.interval().filter(|_| !is_off)?;
        let ticked = self.deciding.ticked;
        Some(ticked.map_or(Duration::ZERO, |at| interval.saturating_sub(at.elapsed())))
    }

    /// If a tick is due, reads the counters and applies the resulting decisions.
    pub(super) fn tick_if_due(&mut self) {
        if self.until_tick().is_some_and(|wait| wait.is_zero()) {
            self.deciding.ticked = Some(Instant::now());
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

    /// Applies, reports and stores decisions.
    ///
    /// # Errors
    ///
    /// If they could not be applied. The next tick tries again.
    pub(super) fn decided(&mut self, told: &[TunedEvent]) -> Result<(), EngineError> {
        // Persist first, so that a crash cannot lose a decision.
        self.tell_decisions(told);
        let renewed = self.renew_lease();
        let adjusted = self.adjust(&Source::Tuner.into());
        if renewed || !matches!(adjusted, Ok(None)) {
            self.publish();
        }
        adjusted.map(drop)
    }

    /// A reader of the current counters; `None` while detached.
    pub(super) fn readings(&self) -> Option<Readings> {
        let reader = self.snapshots.borrow().reader.clone();
        reader.map(Readings::new)
    }

    /// Reports and stores decisions.
    pub(super) fn tell_decisions(&mut self, told: &[TunedEvent]) {
        for one in told {
            log(one);
            self.events.tell(StreamItem::Tuned(one.clone()));
        }
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_if_due(tuning);
    }

    /// Renews the lease of automatic values once a minute, and right before the first one is
    /// applied. Returns whether the kernel was written.
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
                warn!("the lease of learnt values cannot be renewed: {e}");
                true
            }
        }
    }

    /// Makes a change, together with the current decisions about its policies.
    pub(super) fn reconcile(
        &mut self,
        next: Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        let next = self.deciding.adjusted(&next);
        self.reconcile_decided(next, persist, cause)
    }

    /// After a change: the tuner follows the policies that are now in force.
    pub(super) fn follow_policies(&mut self) {
        let desired = self.reconciler.desired();
        self.deciding.experiments.follow(&desired.policies());
        let policies = self.deciding.watched(desired);
        self.deciding.tuning.follow(&policies, &desired.host);
        self.deciding.show();
    }

    /// The maps were re-created: there is no lease, and the counters restart at 0.
    pub(super) fn maps_are_new(&mut self) {
        self.deciding.tuning.begin_again();
        self.deciding.experiments.shared.lock().reset_counters();
        self.deciding.renewed = None;
        if self.renew_lease() {
            self.publish();
        }
    }

    /// Applies the current decisions. Reconciles only if they have changed.
    pub(super) fn adjust(&mut self, cause: &Cause) -> Result<Option<Change>, EngineError> {
        let desired = self.reconciler.desired();
        let next = self.deciding.adjusted(desired);
        if next.adjustments == desired.adjustments {
            return Ok(None);
        }
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
        let told = self.deciding.tuning.act(now, policy, action);
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
            return format!("no active policy {policy}");
        }
        if self.deciding.is_blind {
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

    /// Stores what is not stored yet. Called when the engine stops.
    pub(super) fn store_tuning(&mut self) {
        let Deciding { store, tuning, .. } = &mut self.deciding;
        store.save_last(tuning);
    }
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
