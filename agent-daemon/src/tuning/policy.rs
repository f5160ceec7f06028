//! The learnt and guarded timers of one policy.

use std::collections::{BTreeMap, VecDeque};

use rto_agent_common::brake::Brake;
use rto_agent_core::{
    policy::{Adjustment, InitialRto, PolicyName, Timer, units::jiffies_duration},
    wire::{events::VerdictEvent, stats::ArmStatistics, tune::TransitionCount},
};
use rto_model::tune::{
    budget,
    holdout::Verdict,
    tuner::{Cause, Growth, Transition, Tuner},
};
use serde::{Deserialize, Serialize};

use super::{
    holdout::Holdout,
    moment::Moment,
    reading::Reading,
    spec::{Spec, TimerId, TimerSpec},
};

/// How often counters are read on which decisions depend, milliseconds. Shorter in the engine's
/// tests.
pub const TICK_MS: u64 = if cfg!(test) { 20 } else { 1000 };
/// How often counters are read that are only reported, milliseconds: the daemon wakes as often as
/// for a health check.
pub(super) const RARELY_MS: u64 = 5000;
/// The cost of a retransmission in the budget.
const COST: u32 = Brake::BUDGET_COST.cast_unsigned();
/// An idle policy is read in one of this many ticks.
const IDLE_TICKS: u64 = 5;
/// Most transitions that are kept for display.
const SHOWN: usize = 16;

/// What to read for a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing.
    Nothing,
    /// The brakes, and the counters if the brakes have changed. Brakes are 32 bytes; counters and
    /// histograms are 7 kB for each arm and CPU. Both include what is urgent: retransmissions and
    /// spurious ones.
    Brakes {
        /// The brakes as last read, active and passive.
        known: [Brake; 2],
    },
    /// The brakes and the counters.
    Counters,
}

/// The state of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PolicyTuning {
    pub(super) spec: Spec,
    pub(super) state: State,
    /// Brakes as last read, active and passive.
    brakes: [Brake; 2],
    read_ms: Option<u64>,
    /// The last reading showed growth or led to a decision.
    is_busy: bool,
    /// Counters have grown since the state was last stored.
    pub(super) has_grown: bool,
}

/// The state that outlives the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    /// When the counters were first read, milliseconds of the tuner's clock.
    pub(super) since_ms: Option<u64>,
    pub(super) timers: BTreeMap<TimerId, TimerState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) holdout: Option<Holdout>,
    /// The last transitions, oldest first.
    pub(super) transitions: VecDeque<(TimerId, Transition)>,
}

/// The state of one timer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct TimerState {
    pub(super) tuner: Tuner,
    /// The last reading.
    pub(super) reading: Option<Reading>,
    /// How often the timer changed to each state, by cause.
    pub(super) totals: Vec<TransitionCount>,
    /// The last transition in which a brake removed the value.
    pub(super) alarm: Option<Transition>,
    /// The program uses the value, if there is one.
    #[serde(skip)]
    pub(super) is_set: bool,
    /// The brake at the last reading. If the value is not set, the brake that the program would
    /// have.
    #[serde(skip)]
    pub(super) brake: Brake,
    /// The budget last applied, whole retransmissions.
    #[serde(skip)]
    pub(super) budget: u32,
}

impl TimerState {
    fn new(spec: &TimerSpec) -> Self {
        Self {
            tuner: Tuner::new(spec.law, spec.configured),
            reading: None,
            totals: Vec::new(),
            alarm: None,
            is_set: false,
            brake: Brake::default(),
            budget: 0,
        }
    }

    /// Follows new settings. A timer whose configured value changed starts again.
    fn following(former: Option<Self>, spec: &TimerSpec) -> Self {
        let mut timer = match former {
            Some(mut known) if known.tuner.configured() == spec.configured => {
                known.tuner.configure(spec.law);
                known
            }
            Some(other) => {
                let mut new = Self::new(spec);
                new.tuner.skip_epochs(other.tuner.epoch());
                new
            }
            None => Self::new(spec),
        };
        if timer.is_set != spec.is_set {
            timer.brake = Brake::default();
        }
        timer.is_set = spec.is_set;
        timer.note_budget();
        timer
    }

    /// Whether the program uses a value.
    pub(super) fn is_in_force(&self) -> bool {
        self.is_set && self.tuner.jiffies().is_some()
    }

    /// Whether decisions have an effect: a configured value without a guard is only watched.
    fn acts(&self) -> bool {
        self.is_set || self.tuner.configured().is_none()
    }

    fn note_budget(&mut self) {
        self.budget = budget::for_peak(self.tuner.peak_per_s());
    }

    /// Evaluates a reading. Returns whether the counters have grown, and the decision.
    fn step(&mut self, now_ms: u64, reading: Reading, brake: Brake) -> (bool, Option<Transition>) {
        let earlier = self.reading.replace(reading.clone());
        let grown = earlier.and_then(|earlier| reading.since(&earlier));
        let grown = grown.unwrap_or_default();
        let has_grown = grown != Reading::default();
        if self.is_set {
            // The daemon's state was lost, but the maps were kept.
            if brake.epoch > self.tuner.epoch() {
                self.tuner.skip_epochs(brake.epoch);
            }
            self.brake = brake;
        } else {
            self.brake_without_program(&grown);
        }
        let growth = Growth {
            fuse_blown: self.brake.is_blown(self.tuner.epoch()),
            throttled: self.brake.is_throttled(parts(self.budget)),
            counts: grown.counts,
            samples: grown.samples,
        };
        let transition = self.tuner.step(now_ms, &growth);
        self.note_budget();
        (has_grown, transition)
    }

    /// Computes what the program's brakes would have spent, if the value is not set.
    fn brake_without_program(&mut self, grown: &Reading) {
        let epoch = self.tuner.epoch();
        if self.brake.epoch != epoch {
            (self.brake.epoch, self.brake.fuse) = (epoch, 0);
        }
        let (spurious, copies) = match (self.tuner.configured(), self.tuner.value_us()) {
            (Some(_), _) => (grown.spurious, grown.counts.copies),
            (None, value_us) => (value_us.map_or(0, |us| grown.samples.above(us)), 0),
        };
        let connections = grown.counts.connections;
        // What remains of the spending after the credits, and the spending in excess of them.
        let net = |before: i32, cost: i32, count: u64, credits: u64| {
            let net = i128::from(count) * i128::from(cost) - i128::from(credits);
            let left = (i128::from(before) + net.min(0)).max(0);
            let beyond = u32::try_from(net.max(0) / i128::from(cost)).unwrap_or(u32::MAX);
            (i32::try_from(left).unwrap_or(before), beyond)
        };
        let brake = &mut self.brake;
        let clean = connections.saturating_sub(spurious);
        let (fuse, spurious) = net(brake.fuse, Brake::FUSE_COST, spurious, clean);
        brake.fuse = fuse;
        brake.fuse += brake.fuse_cost(spurious);
        let (budget, copies) = net(brake.budget, Brake::BUDGET_COST, copies, connections);
        brake.budget = budget;
        brake.budget += brake.budget_cost(parts(self.budget), copies);
    }

    fn note(&mut self, transition: &Transition) {
        let Transition { to, cause, .. } = *transition;
        let known = self.totals.iter_mut();
        match known
            .into_iter()
            .find(|known| known.to == to && known.cause == cause)
        {
            Some(known) => known.count += 1,
            None => self.totals.push(TransitionCount {
                to,
                cause,
                count: 1,
            }),
        }
        if to.is_braked() && matches!(cause, Cause::Fuse | Cause::Budget) {
            self.alarm = Some(*transition);
        }
    }

    fn initial_rto(&self, hz: u32) -> InitialRto {
        let configured = self.tuner.configured();
        match self.tuner.jiffies().filter(|_| self.is_set) {
            Some(jiffies) => InitialRto {
                timer: match configured {
                    Some(_) => Timer::Configured,
                    None => Timer::Value(jiffies_duration(jiffies, hz)),
                },
                epoch: self.tuner.epoch(),
                budget: self.budget,
            },
            None if self.is_set && configured.is_some() => InitialRto {
                timer: Timer::Kernel,
                ..InitialRto::default()
            },
            None => InitialRto::default(),
        }
    }
}

impl PolicyTuning {
    /// Resumes from a stored state. Timers follow the current settings.
    pub(super) fn new(spec: Spec, mut state: State) -> Self {
        let mut former = std::mem::take(&mut state.timers);
        let timers = spec.timers.iter();
        let timers = timers.map(|(id, spec)| (*id, TimerState::following(former.remove(id), spec)));
        state.timers = timers.collect();
        state.holdout = Holdout::following(state.holdout.take(), spec.holdout.as_ref());
        Self {
            spec,
            state,
            brakes: Default::default(),
            read_ms: None,
            is_busy: true,
            has_grown: false,
        }
    }

    /// Follows new settings of a policy. An unknown policy starts without a state.
    pub(super) fn following(known: Option<Self>, spec: Spec) -> Self {
        match known {
            None => Self::new(spec, State::default()),
            Some(known) if known.spec == spec => known,
            Some(known) => Self {
                has_grown: known.has_grown,
                ..Self::new(spec, known.state)
            },
        }
    }

    /// The maps were re-created: their counts are unrelated to earlier readings.
    pub(super) fn begin_again(&mut self) {
        self.state.since_ms = None;
        for timer in self.state.timers.values_mut() {
            timer.reading = None;
        }
        if let Some(holdout) = &mut self.state.holdout {
            holdout.begin_again();
        }
    }

    /// What must be read now.
    pub(super) fn due(&self, now_ms: u64) -> Due {
        let Some(read_ms) = self.read_ms else {
            return Due::Counters;
        };
        let since_ms = now_ms.saturating_sub(read_ms);
        if !self.acts() {
            return match since_ms >= RARELY_MS {
                true => Due::Counters,
                false => Due::Nothing,
            };
        }
        // Idle policies take turns, so that each tick reads a part of them.
        let is_turn = (now_ms / TICK_MS) % IDLE_TICKS == u64::from(self.spec.seed) % IDLE_TICKS;
        match self.is_busy || is_turn || since_ms >= 2 * IDLE_TICKS * TICK_MS {
            true => Due::Counters,
            false => Due::Brakes { known: self.brakes },
        }
    }

    /// Whether decisions depend on its counters, which are then read each second.
    pub(super) fn acts(&self) -> bool {
        self.has_acting_timers() || self.state.holdout.is_some()
    }

    /// Whether decisions about its timers have an effect.
    pub(super) fn has_acting_timers(&self) -> bool {
        self.state.timers.values().any(TimerState::acts)
    }

    /// The comparison of its arms.
    pub(super) const fn holdout(&self) -> Option<&Holdout> {
        self.state.holdout.as_ref()
    }

    /// Whether harm is proven: new connections get the kernel's own timers.
    pub(super) fn is_harm(&self) -> bool {
        self.holdout().is_some_and(Holdout::is_harm)
    }

    /// Compares the arms; returns a new verdict.
    pub(super) fn look(
        &mut self,
        now_ms: u64,
        statistics: &ArmStatistics,
        paused: Option<&'static str>,
    ) -> Option<Verdict> {
        let holdout = self.state.holdout.as_mut()?;
        let (has_grown, verdict) = holdout.look(now_ms, statistics, paused);
        self.has_grown |= has_grown;
        verdict
    }

    /// Ends a fallback (harm); returns whether there was one.
    pub(super) fn resume_holdout(&mut self) -> bool {
        self.state.holdout.as_mut().is_some_and(Holdout::resume)
    }

    /// The present verdict; `None` without a holdout.
    pub(super) fn verdict(&self, name: &PolicyName, now: Moment) -> Option<VerdictEvent> {
        Some(self.holdout()?.event(name, now))
    }

    /// Reads the counters, and decides.
    pub(super) fn step(
        &mut self,
        now_ms: u64,
        statistics: &ArmStatistics,
        brakes: [Brake; 2],
    ) -> Vec<(TimerId, Transition)> {
        self.read_ms = Some(now_ms);
        self.state.since_ms.get_or_insert(now_ms);
        self.brakes = brakes;
        self.is_busy = false;
        let mut all = Vec::new();
        for (id, timer) in &mut self.state.timers {
            let brake = match id {
                TimerId::Active => brakes[0],
                TimerId::Passive => brakes[1],
            };
            let is_first = timer.reading.is_none();
            let reading = Reading::of(statistics, *id);
            let (has_grown, transition) = timer.step(now_ms, reading, brake);
            self.has_grown |= has_grown;
            self.is_busy |= is_first || has_grown || transition.is_some();
            all.extend(transition.map(|one| (*id, one)));
        }
        self.noted(all)
    }

    /// Makes a decision about each timer on which decisions have an effect.
    pub(super) fn each(
        &mut self,
        mut decide: impl FnMut(&mut TimerState) -> Option<Transition>,
    ) -> Vec<(TimerId, Transition)> {
        let timers = self.state.timers.iter_mut();
        let decided = timers.filter(|(_, timer)| timer.acts());
        let decided = decided.filter_map(|(id, timer)| Some((*id, decide(timer)?)));
        let all = decided.collect();
        self.noted(all)
    }

    /// Forgets what was learnt, including by timers that are only watched.
    pub(super) fn reset(&mut self, now_ms: u64) -> Vec<(TimerId, Transition)> {
        let timers = self.state.timers.iter_mut();
        let all = timers.map(|(id, timer)| (*id, timer.tuner.reset(now_ms)));
        let all = all.collect();
        self.noted(all)
    }

    fn noted(&mut self, all: Vec<(TimerId, Transition)>) -> Vec<(TimerId, Transition)> {
        for (id, transition) in &all {
            if let Some(timer) = self.state.timers.get_mut(id) {
                timer.note(transition);
            }
            self.state.transitions.push_back((*id, *transition));
        }
        while self.state.transitions.len() > SHOWN {
            self.state.transitions.pop_front();
        }
        all
    }

    /// Whether a value is in force that the program drops at the end of its lease.
    pub(super) fn is_leased(&self) -> bool {
        let mut timers = self.state.timers.values();
        timers.any(|timer| timer.tuner.configured().is_none() && timer.is_in_force())
    }

    /// The decisions about the policy.
    pub(super) fn adjustment(&self) -> Adjustment {
        let hz = self.spec.host.hz;
        let initial_rto = |id| {
            let timer = self.state.timers.get(&id);
            timer.map_or_else(InitialRto::default, |timer| timer.initial_rto(hz))
        };
        Adjustment {
            active: initial_rto(TimerId::Active),
            passive: initial_rto(TimerId::Passive),
            harm: self.is_harm(),
        }
    }
}

/// A budget in the unit of [`rto_agent_common::Policy::budgets`].
pub(super) const fn parts(budget: u32) -> u32 {
    budget.saturating_mul(COST)
}
