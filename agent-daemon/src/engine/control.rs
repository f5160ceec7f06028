//! The daemon's decisions about policies beyond their settings: made once a second, and applied
//! like every other change.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_common::fallback::Fallback;
use rto_agent_core::{
    config::AgentConfig,
    policy::{Adjustments, PolicyName},
    progress,
    wire::{
        events::{StreamItem, TunedEvent, VerdictEvent},
        holdout::Verdict,
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
    reconcile::Persist,
    snapshot::Published,
    tuning_store::TuningStore,
};
use crate::{
    problem::Problem,
    tuning::{Due, TICK_MS, Tuning},
};

/// What is due of a policy.
pub(super) struct Read {
    statistics: ArmStatistics,
    fallbacks: [Fallback; 2],
    /// The program is in fallback (outage).
    outage: bool,
}

/// Reads what is due of a policy; `None` if it has no slot (yet), or if its fallbacks, which are
/// all that is due, have not changed.
pub(super) fn read_due(
    reader: &dyn KernelReader,
    policy: &PolicyName,
    due: Due,
) -> Result<Option<Read>, DatapathError> {
    let fallbacks = reader.fallbacks(policy)?;
    let [active, _] = fallbacks;
    // An outage begins and ends with time.
    let is_known = due == (Due::Fallbacks { known: fallbacks }) && active.lost < Fallback::LOST;
    if is_known {
        return Ok(None);
    }
    let statistics = reader.statistics_of(policy)?;
    Ok(statistics.map(|statistics| Read {
        statistics,
        fallbacks,
        outage: active.is_outage(monotonic_ms),
    }))
}

/// Owns the tuner and what it has learnt.
pub(super) struct Control {
    tuning: Tuning,
    tuned: Published<TuneAnswer>,
    store: TuningStore,
    /// Time of the last tick. The tuner's pace at that moment decides when the next one is due.
    ticked: Option<Instant>,
    /// Why decisions are not in force, or counters cannot be read.
    problem: Problem,
    /// Statistics are off.
    is_blind: bool,
    /// Fallbacks that a change of policies has ended, for the answer to the next reload.
    notes: Vec<String>,
}

impl Control {
    /// Restores the learnt state of an earlier run, and makes the first decisions.
    pub(super) fn start(agent: &AgentConfig, desired: Desired) -> (Self, Desired) {
        let (store, stored) = TuningStore::open(agent);
        let mut control = Self {
            tuning: Tuning::new(!agent.statistics),
            tuned: Published::default(),
            store,
            ticked: None,
            problem: Problem::default(),
            is_blind: !agent.statistics,
            notes: Vec::new(),
        };
        let now = control.store.now();
        let policies = desired.policies();
        let boot_id = control.store.boot_id();
        let tuning = &mut control.tuning;
        let told = tuning.restore(stored, boot_id, now, &policies, &desired.host);
        told.iter().for_each(log);
        control.store.save_if_due(&mut control.tuning);
        let desired = control.adjusted(&desired);
        control.show(&desired.adjustments);
        (control, desired)
    }

    /// Interval between two ticks.
    fn interval(&self) -> Option<Duration> {
        match self.problem.text().is_some() {
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
        let problem = self.problem.text().into_iter().cloned();
        problem
            .chain(self.store.problem())
            .chain(self.store.warnings())
    }

    /// A desired state with the current decisions about its policies.
    fn adjusted(&self, next: &Desired) -> Desired {
        let mut all = Adjustments::new();
        self.tuning.adjust(&next.policies(), &next.host, &mut all);
        next.with_adjustments(all)
    }

    /// Publishes the state of these policies only: with a thousand policies, publishing all would
    /// take as long as deciding.
    fn show_some(&self, policies: &BTreeSet<PolicyName>, in_force: &Adjustments) {
        let now = self.store.now();
        self.tuned.send_modify(|answer| {
            // Copied only while a reader holds it.
            let answer = Arc::make_mut(answer);
            answer.at_ms = now.unix_ms;
            answer.not_stored = self.store.problem();
            let changed = self.tuning.view_of(policies.iter(), now, in_force);
            answer.policies.extend(changed);
        });
    }

    /// Publishes the state of all policies. `in_force`: the decisions that were applied.
    fn show(&self, in_force: &Adjustments) {
        let now = self.store.now();
        self.tuned.send_replace(Arc::new(TuneAnswer {
            at_ms: now.unix_ms,
            not_stored: self.store.problem(),
            policies: self.tuning.view(now, in_force),
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
        let Some(reader) = apply.reader().cloned() else {
            return false;
        };
        let (mut told, mut changed, mut problem) = (Vec::new(), BTreeSet::new(), None);
        for (name, due) in due {
            progress::step();
            match read_due(reader.as_ref(), &name, due) {
                Ok(Some(read)) => {
                    let Read {
                        statistics,
                        fallbacks,
                        outage,
                    } = read;
                    let timers = self.tuning.step(now, &name, &statistics, fallbacks, outage);
                    told.extend(timers.into_iter().map(StreamItem::Tuned));
                    let paused = self.not_compared(apply, reader.as_ref(), &name);
                    let verdict = self.tuning.look(now, &name, &statistics, paused);
                    told.extend(verdict.map(StreamItem::Verdict));
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
        self.show_some(&changed, &apply.desired().adjustments);
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
    fn decided(&mut self, apply: &mut Apply, told: &[StreamItem]) -> Result<bool, EngineError> {
        // Persist first, so that a crash cannot lose a decision.
        self.tell_decisions(apply, told);
        let adjusted = self.adjust(apply, &Source::Tuner.into())?;
        Ok(adjusted.is_some())
    }

    /// Reports and stores decisions.
    fn tell_decisions(&mut self, apply: &Apply, told: &[StreamItem]) {
        for one in told {
            match one {
                StreamItem::Tuned(event) => log(event),
                StreamItem::Verdict(event) => log_verdict(event),
                StreamItem::Event(_) | StreamItem::Lost { .. } => {}
            }
            apply.tell(one.clone());
        }
        self.store.save_if_due(&mut self.tuning);
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
        for policy in self.tuning.follow(&desired.policies(), &desired.host) {
            let note = format!(
                "policy {policy}: fallback (harm) has ended: the policy's settings changed"
            );
            info!(%policy, "{note}");
            self.notes.push(note);
        }
        self.store.save_if_due(&mut self.tuning);
        self.show(&desired.adjustments);
    }

    /// The maps were re-created: the counters restart at 0.
    pub(super) fn maps_are_new(&mut self) {
        self.tuning.begin_again();
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
        let Some(acted) = self.tuning.act(now, policy, action) else {
            return refused(self.not_tuned(apply.desired(), action, policy));
        };
        if let Err(e) = self.adjust(apply, &Source::Tuner.into()) {
            // What is answered, shown and stored is what the kernel has.
            self.tuning.set_state_of(policy, before);
            return Err(e);
        }
        Cause::done(action.audited(), by).audit_other(action.audited());
        let timers = acted.timers.into_iter().map(StreamItem::Tuned);
        let told: Vec<_> = timers
            .chain(acted.verdict.map(StreamItem::Verdict))
            .collect();
        self.tell_decisions(apply, &told);
        self.show(&apply.desired().adjustments);
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
                "policy {policy} learns no value, has no guard, and is in no fallback (harm): there is \
                 nothing to {}",
                action.name()
            ),
            TuneAction::Reset => format!("policy {policy} learns no value and has no guard"),
        }
    }

    /// What readers see.
    pub(super) fn published(&self) -> Published<TuneAnswer> {
        self.tuned.clone()
    }

    /// Fallbacks that changes of policies have ended.
    pub(super) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Why the arms of a policy cannot be compared now; `None` if they can.
    fn not_compared(
        &self,
        apply: &Apply,
        reader: &dyn KernelReader,
        policy: &PolicyName,
    ) -> Option<&'static str> {
        let resolved = apply.resolved();
        let settings = &resolved.set.policies.get(policy)?.settings;
        let kernel = &resolved.policies.get(policy)?.kernel;
        let adjustment = apply.desired().adjustments.get(policy);
        let in_force = adjustment.is_some_and(|adjustment| adjustment.harm);
        let sets_timer = settings.initial_rto.is_some() || settings.syn_ack_rto.fixed().is_some();
        let syn_ack = kernel.syn_ack_rto_jiffies.iter();
        let has_timer =
            kernel.initial_rto_jiffies != 0 || syn_ack.into_iter().any(|jiffies| *jiffies != 0);
        if in_force != self.tuning.is_harm(policy) {
            Some("a decision about the policy is not applied yet")
        } else if sets_timer && !has_timer {
            Some("both arms have the kernel's own initial RTO")
        } else if reader.missing_stats().contains(policy) {
            Some("an arm has no statistics, because there was not enough memory")
        } else {
            None
        }
    }

    /// Stores what is not stored yet. Called when the engine stops.
    pub(super) fn store_tuning(&mut self) {
        self.store.save_last(&mut self.tuning);
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

/// Logs a verdict.
fn log_verdict(event: &VerdictEvent) {
    let VerdictEvent {
        policy,
        verdict,
        text,
        ..
    } = event;
    macro_rules! line {
        ($level:ident) => {
            $level!(
                audit = true,
                action = "verdict",
                source = "tuner",
                %policy,
                verdict = verdict.name(),
                "policy {policy}: {text}"
            )
        };
    }
    match verdict {
        Verdict::Harm | Verdict::Invalid => line!(warn),
        Verdict::Gain | Verdict::NotYet => line!(info),
    }
}

/// CLOCK_MONOTONIC as in [`Fallback::lost_since_ms`].
pub(super) fn monotonic_ms() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    // The remainder fits.
    u32::try_from(now.as_millis() % (1 << u32::BITS)).unwrap_or_default()
}
