//! The learnt and guarded timers of one policy.

use std::collections::{BTreeMap, VecDeque};

use rto_agent_common::fallback::Fallback;
use rto_agent_core::{
    policy::{Adjustment, InitialRto, PolicyName, Timer, units::jiffies_duration},
    wire::{events::VerdictEvent, stats::ArmStatistics, tune::TransitionCount},
};
use rto_model::tune::{
    holdout::Verdict,
    tuner::{Growth, Transition, Tuner},
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
/// How often counters are read of policies that learn nothing and have no control arm,
/// milliseconds: the daemon wakes as often as for a health check.
pub(super) const RARELY_MS: u64 = 5000;
/// An idle policy is read in one of this many ticks.
const IDLE_TICKS: u64 = 5;
/// Most transitions that are kept for display.
const SHOWN: usize = 16;

/// What to read for a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing.
    Nothing,
    /// The fallbacks, and the counters if the fallbacks have changed. Fallbacks are 32 bytes;
    /// counters and histograms are 7 kB for each arm and CPU. Both include what is urgent: spurious
    /// retransmissions.
    Fallbacks {
        /// The fallbacks as last read, active and passive.
        known: [Fallback; 2],
    },
    /// The fallbacks and the counters.
    Counters,
}

/// The state of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PolicyTuning {
    pub(super) spec: Spec,
    pub(super) state: State,
    /// Fallbacks as last read, active and passive.
    fallbacks: [Fallback; 2],
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
    /// The last transition to a fallback.
    pub(super) alarm: Option<Transition>,
    /// The program uses the value, if there is one.
    #[serde(skip)]
    pub(super) is_set: bool,
    /// The program decides fallbacks.
    #[serde(skip)]
    is_guarded: bool,
}

impl TimerState {
    fn new(spec: &TimerSpec) -> Self {
        Self {
            tuner: Tuner::new(spec.law, spec.configured),
            reading: None,
            totals: Vec::new(),
            alarm: None,
            is_set: false,
            is_guarded: false,
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
        timer.is_set = spec.is_set;
        timer.is_guarded = spec.is_guarded;
        timer
    }

    /// Evaluates a reading. Returns whether the counters have grown, and the decision.
    fn step(
        &mut self,
        now_ms: u64,
        reading: Reading,
        fallback: Fallback,
        outage: bool,
    ) -> (bool, Option<Transition>) {
        let earlier = self.reading.replace(reading.clone());
        let grown = earlier.and_then(|earlier| reading.since(&earlier));
        let grown = grown.unwrap_or_default();
        let has_grown = grown != Reading::default();
        let is_guarded = self.is_set && self.is_guarded;
        // The daemon's state was lost, but the maps were kept.
        if is_guarded && fallback.epoch > self.tuner.epoch() {
            self.tuner.skip_epochs(fallback.epoch);
        }
        let growth = Growth {
            spurious: is_guarded && fallback.is_spurious(self.tuner.epoch()),
            outage: is_guarded && outage,
            counts: grown.counts,
            samples: grown.samples,
        };
        (has_grown, self.tuner.step(now_ms, &growth))
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
        if to.is_fallback() && transition.from != to {
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
                epoch: if self.is_guarded {
                    self.tuner.epoch()
                } else {
                    0
                },
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
            fallbacks: Default::default(),
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
            return match since_ms >= self.interval_ms() {
                true => Due::Counters,
                false => Due::Nothing,
            };
        }
        // Idle policies take turns, so that each tick reads a part of them.
        let is_turn = (now_ms / TICK_MS) % IDLE_TICKS == u64::from(self.spec.seed) % IDLE_TICKS;
        match self.is_busy || is_turn || since_ms >= 2 * IDLE_TICKS * TICK_MS {
            true => Due::Counters,
            false => Due::Fallbacks {
                known: self.fallbacks,
            },
        }
    }

    /// How often it must be read: rarely while it only has guards.
    pub(super) fn interval_ms(&self) -> u64 {
        let in_outage = self.fallbacks.iter().any(|seen| seen.lost != 0);
        if self.acts() || in_outage {
            TICK_MS
        } else {
            RARELY_MS
        }
    }

    /// Whether a value is learnt or arms are compared.
    pub(super) fn acts(&self) -> bool {
        let mut timers = self.state.timers.values();
        timers.any(|timer| timer.tuner.configured().is_none()) || self.state.holdout.is_some()
    }

    /// Whether any of its timers is learnt or guarded.
    pub(super) fn has_timers(&self) -> bool {
        !self.state.timers.is_empty()
    }

    /// The comparison of its arms.
    pub(super) const fn holdout(&self) -> Option<&Holdout> {
        self.state.holdout.as_ref()
    }

    /// Fallback (harm): harm is proven, and new connections get the kernel's own timers.
    pub(super) fn is_harm(&self) -> bool {
        self.spec.is_guarded && self.holdout().is_some_and(Holdout::is_harm)
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
        fallbacks: [Fallback; 2],
        outage: bool,
    ) -> Vec<(TimerId, Transition)> {
        self.read_ms = Some(now_ms);
        self.state.since_ms.get_or_insert(now_ms);
        self.fallbacks = fallbacks;
        self.is_busy = false;
        let mut all = Vec::new();
        for (id, timer) in &mut self.state.timers {
            let (fallback, outage) = match id {
                TimerId::Active => (fallbacks[0], outage),
                TimerId::Passive => (fallbacks[1], false),
            };
            let is_first = timer.reading.is_none();
            let reading = Reading::of(statistics, *id);
            let (has_grown, transition) = timer.step(now_ms, reading, fallback, outage);
            self.has_grown |= has_grown;
            self.is_busy |= is_first || has_grown || transition.is_some();
            all.extend(transition.map(|one| (*id, one)));
        }
        self.noted(all)
    }

    /// Makes a decision about each timer.
    pub(super) fn each(
        &mut self,
        mut decide: impl FnMut(&mut TimerState) -> Option<Transition>,
    ) -> Vec<(TimerId, Transition)> {
        let timers = self.state.timers.iter_mut();
        let decided = timers.filter_map(|(id, timer)| Some((*id, decide(timer)?)));
        let all = decided.collect();
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

    /// [`rto_agent_common::Policy::repath_jiffies`].
    pub(super) fn repath_jiffies(&self) -> u16 {
        let active = self.state.timers.get(&TimerId::Active);
        let repath = active
            .filter(|timer| timer.is_set)
            .and_then(|timer| timer.tuner.repath_jiffies());
        repath.map_or(0, |jiffies| u16::try_from(jiffies).unwrap_or(u16::MAX))
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
            repath_jiffies: self.repath_jiffies(),
            harm: self.is_harm(),
        }
    }
}
