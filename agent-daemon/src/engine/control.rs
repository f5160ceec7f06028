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
        types::now_ms,
    },
};
use rto_agent_kernel::{
    datapath::{DatapathError, KernelReader},
    kernel::clock::boottime_ms,
};
use tracing::{error, info, warn};

use super::{
    desired::{Desired, Resolved},
    error::EngineError,
    snapshot::Published,
    store::{TuningStore, boot_id},
};
use crate::{
    problem::Problem,
    tuning::{Due, Moment, StateBefore, Stored, TICK_MS, Tuning},
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

/// The decisions of a tick.
#[derive(Default)]
pub(super) struct Decisions {
    /// What watchers and the log are told.
    pub(super) items: Vec<StreamItem>,
    /// The policies that were read.
    pub(super) policies: BTreeSet<PolicyName>,
    /// Why a policy could not be read.
    pub(super) problem: Option<String>,
}

/// A decision of an operator.
pub(super) struct Decision {
    before: StateBefore,
    pub(super) items: Vec<StreamItem>,
}

/// Owns the tuner and what it has learnt.
pub(super) struct Control {
    tuning: Tuning,
    tuned: Published<TuneAnswer>,
    clock: Clock,
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
    pub(super) fn start(
        agent: &AgentConfig,
        desired: Desired,
        learnt: Stored<'static>,
        store: &mut TuningStore,
    ) -> (Self, Desired) {
        let mut control = Self {
            tuning: Tuning::new(!agent.statistics),
            tuned: Published::default(),
            clock: Clock::continued(&learnt),
            ticked: None,
            problem: Problem::default(),
            is_blind: !agent.statistics,
            notes: Vec::new(),
        };
        let (now, boot_id) = (control.clock.now(), &control.clock.boot_id);
        let policies = desired.policies();
        let tuning = &mut control.tuning;
        let events = tuning.restore(learnt, boot_id, now, &policies, &desired.host);
        events.iter().for_each(log);
        control.save_if_due(store);
        let desired = control.adjusted(&desired);
        control.show(&desired.adjustments, store);
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
    pub(super) fn not_in_force(&mut self, why: &EngineError) {
        let problem = format!("a decision of the tuner could not be applied: {why}");
        self.problem.becomes(Some(problem), |text| error!("{text}"));
    }

    /// Why decisions are not applied.
    pub(super) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }

    /// A desired state with the current decisions about its policies.
    pub(super) fn adjusted(&self, next: &Desired) -> Desired {
        let mut all = Adjustments::new();
        self.tuning.adjust(&next.policies(), &next.host, &mut all);
        next.with_adjustments(all)
    }

    /// Publishes the state of these policies only: with a thousand policies, publishing all would
    /// take as long as deciding.
    pub(super) fn show_some(
        &self,
        policies: &BTreeSet<PolicyName>,
        in_force: &Adjustments,
        store: &TuningStore,
    ) {
        let now = self.clock.now();
        self.tuned.send_modify(|answer| {
            // Copied only while a reader holds it.
            let answer = Arc::make_mut(answer);
            answer.at_ms = now.unix_ms;
            answer.not_stored = store.problem().cloned();
            let changed = self.tuning.view_of(policies.iter(), now, in_force);
            answer.policies.extend(changed);
        });
    }

    /// Publishes the state of all policies. `in_force`: the decisions that were applied.
    pub(super) fn show(&self, in_force: &Adjustments, store: &TuningStore) {
        let now = self.clock.now();
        self.tuned.send_replace(Arc::new(TuneAnswer {
            at_ms: now.unix_ms,
            not_stored: store.problem().cloned(),
            policies: self.tuning.view(now, in_force),
        }));
    }

    /// Time until the next tick; `None` while no policy needs one, so that an idle daemon does not
    /// wake.
    pub(super) fn until_tick(&self) -> Option<Duration> {
        let interval = self.interval()?;
        let ticked = self.ticked;
        Some(ticked.map_or(Duration::ZERO, |at| interval.saturating_sub(at.elapsed())))
    }

    /// Reads what is due, and decides.
    pub(super) fn tick(&mut self, reader: &dyn KernelReader, resolved: &Resolved) -> Decisions {
        self.ticked = Some(Instant::now());
        let now = self.clock.now();
        let due = self.tuning.due(now.tuner_ms);
        let due: Vec<_> = due.map(|(name, due)| (name.clone(), due)).collect();
        let mut decisions = Decisions::default();
        for (name, due) in due {
            progress::step();
            match read_due(reader, &name, due) {
                Ok(Some(read)) => {
                    let Read {
                        statistics,
                        fallbacks,
                        outage,
                    } = read;
                    let timers = self.tuning.step(now, &name, &statistics, fallbacks, outage);
                    let items = &mut decisions.items;
                    items.extend(timers.into_iter().map(StreamItem::Tuned));
                    let paused = self.not_compared(resolved, reader, &name);
                    let verdict = self.tuning.look(now, &name, &statistics, paused);
                    items.extend(verdict.map(StreamItem::Verdict));
                    decisions.policies.insert(name);
                }
                // The policy has no slot (yet), or is not due in this tick.
                Ok(None) => {}
                Err(e) => {
                    let text = format!("policy {name}: the tuner cannot learn its values: {e}");
                    decisions.problem.get_or_insert(text);
                }
            }
        }
        decisions
    }

    /// Logs and stores decisions.
    pub(super) fn record(&mut self, items: &[StreamItem], store: &mut TuningStore) {
        for item in items {
            match item {
                StreamItem::Tuned(event) => log(event),
                StreamItem::Verdict(event) => log_verdict(event),
                StreamItem::Event(_) | StreamItem::Lost { .. } => {}
            }
        }
        self.save_if_due(store);
    }

    /// Decisions are in force, and the counters were read, unless there is a problem.
    pub(super) fn in_force(&mut self, problem: Option<String>) {
        self.problem.becomes(problem, |text| error!("{text}"));
    }

    /// What `rto-agent tune freeze`, `resume` and `reset` decide; an error is the reason why not.
    pub(super) fn act(
        &mut self,
        policy: &PolicyName,
        action: TuneAction,
        desired: &Desired,
    ) -> Result<Decision, String> {
        let before = self.tuning.state_of(policy);
        let acted = self.tuning.act(self.clock.now(), policy, action);
        let acted = acted.ok_or_else(|| self.not_tuned(desired, action, policy))?;
        let timers = acted.timers.into_iter().map(StreamItem::Tuned);
        let verdict = acted.verdict.map(StreamItem::Verdict);
        Ok(Decision {
            before,
            items: timers.chain(verdict).collect(),
        })
    }

    /// Undoes [`Self::act`]: what is answered, shown and stored is what the kernel has.
    pub(super) fn undo(&mut self, policy: &PolicyName, decision: Decision) {
        self.tuning.set_state_of(policy, decision.before);
    }

    /// After a change: the tuner follows the policies that are now in force.
    pub(super) fn follow(&mut self, desired: &Desired, store: &mut TuningStore) {
        for policy in self.tuning.follow(&desired.policies(), &desired.host) {
            let note = format!(
                "policy {policy}: fallback (harm) has ended: the policy's settings changed"
            );
            info!(%policy, "{note}");
            self.notes.push(note);
        }
        self.save_if_due(store);
        self.show(&desired.adjustments, store);
    }

    /// The maps were re-created: the counters restart at 0.
    pub(super) fn maps_are_new(&mut self) {
        self.tuning.begin_again();
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
        resolved: &Resolved,
        reader: &dyn KernelReader,
        policy: &PolicyName,
    ) -> Option<&'static str> {
        let settings = &resolved.set.policies.get(policy)?.settings;
        let kernel = &resolved.policies.get(policy)?.kernel;
        let adjustment = resolved.desired.adjustments.get(policy);
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

    /// Stores a transition at once, growing statistics once a minute.
    fn save_if_due(&mut self, store: &mut TuningStore) {
        let (has_changed, has_grown) = (self.tuning.has_changed(), self.tuning.has_grown());
        if has_changed && store.is_writable() || has_grown && store.is_due() {
            self.save(store);
        }
    }

    /// Stores what is not stored yet. Called when the engine stops.
    pub(super) fn save_last(&mut self, store: &mut TuningStore) {
        if self.tuning.is_unstored() {
            self.save(store);
        }
    }

    fn save(&mut self, store: &mut TuningStore) {
        let stored = self.tuning.stored(&self.clock.boot_id, self.clock.now());
        if store.save(&stored) {
            self.tuning.was_stored();
        }
    }
}

/// The clock of the tuner: it goes on after a restart and a boot.
struct Clock {
    boot_id: String,
    /// Start values of the tuner's clock and of CLOCK_BOOTTIME, milliseconds.
    began: (u64, u64),
}

impl Clock {
    fn continued(learnt: &Stored<'_>) -> Self {
        let (boot_id, boottime_ms) = (boot_id(), boottime_ms());
        Self {
            began: (learnt.now_ms(&boot_id, boottime_ms, now_ms()), boottime_ms),
            boot_id,
        }
    }

    fn now(&self) -> Moment {
        let (tuner_ms, began_ms) = self.began;
        let boottime_ms = boottime_ms();
        Moment {
            tuner_ms: tuner_ms.saturating_add(boottime_ms.saturating_sub(began_ms)),
            boottime_ms,
            unix_ms: now_ms(),
        }
    }
}

/// Logs one line per transition.
fn log(event: &TunedEvent) {
    let TunedEvent {
        policy,
        transition: view,
    } = event;
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
