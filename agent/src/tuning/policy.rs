//! What is tuned of one policy.

use std::collections::{BTreeMap, VecDeque};

use rto_agent_common::brake::Brake;
use rto_model::tune::{
    acks::AckTuner,
    brake::Budget,
    tuner::{Cause, Growth, Next, Numbers, Phase, Transition, Tuner},
};
use serde::{Deserialize, Serialize};

use super::{
    Pace,
    counts::{Counts, Handshakes},
    spec::{Spec, TimerSpec},
};
use crate::{
    datapath::ArmStatistics,
    policy::{
        Adjustment, InitialRto, Timer,
        units::{jiffies_duration, jiffies_to_usecs},
    },
};

/// What a retransmission spends of the budget.
const COST: u32 = Brake::BUDGET_COST.cast_unsigned();
/// A policy of which nothing was counted is read in one tick of so many.
const IDLE_TICKS: u64 = 5;
/// Transitions that are remembered to be shown.
const SHOWN: usize = 16;

/// What is to be read of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing.
    Nothing,
    /// The brakes, and the counters if these have changed. They are 32 bytes, the counters with their histograms 7 kB of
    /// each arm and CPU: what cannot wait, retransmissions and spurious ones, is in both.
    Brakes,
    /// The counters.
    Counters,
}

/// Which timer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimerId {
    /// The initial RTO of connections that this host opens.
    Active,
    /// Of those that it accepts.
    Passive,
    /// `rto_min`.
    RtoMin,
}

impl TimerId {
    /// The setting's name in the configuration.
    #[must_use]
    pub const fn setting(self) -> &'static str {
        match self {
            Self::Active | Self::Passive => "initial_rto",
            Self::RtoMin => "rto_min",
        }
    }

    /// Whose connections it is for.
    #[must_use]
    pub const fn direction(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Passive => "passive",
            Self::RtoMin => "both",
        }
    }
}

/// Of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PolicyTuning {
    pub(super) spec: Spec,
    pub(super) state: State,
    /// Brakes as last read, active and passive.
    brakes: [Brake; 2],
    /// As last put in force, whole retransmissions; 0: none.
    capacities: [u32; 2],
    /// Of guards that only warn: what the program would have spent, as [`Brake::budget`] has it.
    spent: [u64; 2],
    read_ms: Option<u64>,
    /// Something was counted or decided when it was last read.
    is_busy: bool,
    /// Since it was last stored.
    pub(super) has_grown: bool,
}

/// What outlives the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) active: Option<Tuner>,
    pub(super) passive: Option<Tuner>,
    pub(super) rto_min: Option<AckTuner>,
    /// As last read.
    pub(super) counts: Option<Counts>,
    /// Epoch and connections with a spurious copy of the brakes as last read.
    judged: [(u32, u32); 2],
    /// The last ones.
    pub(super) transitions: VecDeque<(TimerId, Transition)>,
    /// How many there were: timer, phase and cause.
    #[serde(with = "as_list")]
    pub(super) totals: BTreeMap<(TimerId, Phase, Cause), u64>,
}

/// JSON has no objects with such keys.
mod as_list {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{BTreeMap, Cause, Phase, TimerId};

    type Totals = BTreeMap<(TimerId, Phase, Cause), u64>;

    pub(super) fn serialize<S: Serializer>(all: &Totals, to: S) -> Result<S::Ok, S::Error> {
        all.iter().collect::<Vec<_>>().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Totals, D::Error> {
        Vec::deserialize(from).map(|all| all.into_iter().collect())
    }
}

/// One of its timers, to be shown.
pub(super) struct Shown<'a> {
    pub(super) id: TimerId,
    pub(super) phase: Phase,
    pub(super) jiffies: Option<u64>,
    pub(super) percent: u8,
    pub(super) numbers: Numbers,
    pub(super) next: Next,
    /// Of the initial RTO.
    pub(super) tuner: Option<&'a Tuner>,
}

impl PolicyTuning {
    /// Of a policy that nothing is known of.
    pub(super) fn new(spec: Spec) -> Self {
        Self::restored(spec, State::default())
    }

    /// Goes on with what was stored, as far as that is of the same kind.
    pub(super) fn restored(spec: Spec, state: State) -> Self {
        let mut policy = Self {
            spec: spec.clone(),
            state,
            brakes: Default::default(),
            capacities: [0; 2],
            spent: [0; 2],
            read_ms: None,
            is_busy: true,
            has_grown: false,
        };
        policy.follow(spec);
        policy
    }

    /// Goes by other settings from now on.
    pub(super) fn follow(&mut self, spec: Spec) {
        let goes_on = |tuner: &Option<Tuner>, spec: &Option<TimerSpec>| {
            let both = tuner.as_ref().zip(spec.as_ref());
            both.is_some_and(|(tuner, spec)| tuner.guarded() == spec.guarded())
        };
        // Another number of the host's is no other setting.
        if spec.passive_follows_host && goes_on(&self.state.active, &spec.active) {
            follow_host(self.state.passive.as_mut(), spec.passive.as_ref());
        }
        let tuners = [
            (&mut self.state.active, &spec.active),
            (&mut self.state.passive, &spec.passive),
        ];
        for (place, (tuner, spec)) in tuners.into_iter().enumerate() {
            let had_one = tuner.is_some();
            *tuner = following(tuner.take(), spec.as_ref());
            // Epochs of a new tuner begin anew, and its brakes count from nothing.
            if !had_one || tuner.is_none() {
                self.state.judged[place] = (0, 0);
                self.brakes[place] = Brake::default();
                self.spent[place] = 0;
            }
        }
        self.state.rto_min = match (self.state.rto_min.take(), spec.rto_min) {
            (_, None) => None,
            (None, Some(settings)) => Some(AckTuner::new(settings)),
            (Some(mut tuner), Some(settings)) => {
                tuner.configure(settings);
                Some(tuner)
            }
        };
        self.spec = spec;
        self.note_capacities();
    }

    /// The maps are new: what they count has nothing to do with what was read before.
    pub(super) fn begin_again(&mut self) {
        self.state.counts = None;
        self.state.judged = Default::default();
    }

    /// What is to be read of it now.
    pub(super) fn due(&self, now_ms: u64) -> Due {
        let Some(read_ms) = self.read_ms else {
            return Due::Counters;
        };
        let since_ms = now_ms.saturating_sub(read_ms);
        if !self.spec.acts() {
            return match since_ms >= Pace::Rarely.interval_ms() {
                true => Due::Counters,
                false => Due::Nothing,
            };
        }
        let tick_ms = Pace::EachSecond.interval_ms();
        // By turns, so that of many that are idle a part is read in each tick.
        let is_turn = (now_ms / tick_ms) % IDLE_TICKS == u64::from(self.spec.seed) % IDLE_TICKS;
        match self.is_busy || is_turn || since_ms >= 2 * IDLE_TICKS * tick_ms {
            true => Due::Counters,
            false => Due::Brakes,
        }
    }

    /// Whether the program has changed the brakes since they were last read.
    pub(super) fn has_other_brakes(&self, brakes: &[Brake; 2]) -> bool {
        self.brakes != *brakes
    }

    /// Takes in what was counted, and decides.
    pub(super) fn step(
        &mut self,
        now_ms: u64,
        statistics: &ArmStatistics,
        brakes: [Brake; 2],
    ) -> Vec<(TimerId, Transition)> {
        self.read_ms = Some(now_ms);
        let counts = Counts::of(statistics);
        let earlier = self.state.counts.replace(counts.clone());
        let is_first = earlier.is_none();
        let growth = earlier.map(|earlier| counts.since(&earlier));
        let growth = growth.flatten().unwrap_or_default();
        let has_grown = growth != Counts::default();
        self.has_grown |= has_grown;
        self.brakes = brakes;
        let mut all = Vec::new();
        for (place, id) in [TimerId::Active, TimerId::Passive].into_iter().enumerate() {
            let grown = match id {
                TimerId::Passive => &growth.passive,
                TimerId::Active | TimerId::RtoMin => &growth.active,
            };
            let Some(grown) = self.growth(place, grown) else {
                continue;
            };
            if let Some(tuner) = self.tuner_mut(id) {
                let decision = tuner.step(now_ms, &grown);
                all.extend(decision.transitions.into_iter().map(|one| (id, one)));
            }
        }
        if let Some(tuner) = &mut self.state.rto_min {
            let transition = tuner.step(now_ms, &growth.delays);
            all.extend(transition.map(|one| (TimerId::RtoMin, one)));
        }
        self.is_busy = is_first || has_grown || !all.is_empty();
        self.note(&all);
        all
    }

    /// What a tuner takes in; `None` if there is no tuner.
    fn growth(&mut self, place: usize, grown: &Handshakes) -> Option<Growth> {
        let brake = self.brakes[place];
        let capacity = self.capacities[place];
        let advises = self.spec.advises;
        let hz = self.spec.hz;
        let tuner = match place {
            0 => self.state.active.as_mut(),
            _ => self.state.passive.as_mut(),
        }?;
        if brake.epoch > tuner.setting().epoch {
            // The state was lost, and the maps were not.
            tuner.skip_epochs(brake.epoch);
        }
        let setting = tuner.setting();
        let mut growth = Growth {
            epoch: setting.epoch,
            clean: grown.clean(),
            spurious: grown.spurious,
            attempts: grown.connections.saturating_add(grown.failed),
            copies: grown.copies,
            path_times: grown.path_times.clone(),
            fuse_blown: false,
            throttled: false,
        };
        match tuner.guarded() {
            Some((_, false)) => {
                let most = u64::from(parts(capacity_of(tuner)));
                let cost = grown.copies.saturating_mul(u64::from(COST));
                let spent = self.spent[place].saturating_add(cost);
                let spent = spent.min(most).saturating_sub(grown.connections);
                self.spent[place] = spent;
                growth.throttled = 2 * spent >= most;
            }
            None if advises => {
                // What the value would have done.
                let value_us = setting.jiffies.map(|jiffies| jiffies_to_usecs(jiffies, hz));
                let late = value_us.map_or(0, |us| grown.path_times.above(us));
                growth.spurious = late;
                growth.clean = growth.clean.saturating_sub(late);
            }
            _ => {
                let before =
                    std::mem::replace(&mut self.state.judged[place], (brake.epoch, brake.spurious));
                let known = match before {
                    // Brakes that were made anew count from nothing.
                    (epoch, spurious) if epoch == brake.epoch && spurious <= brake.spurious => {
                        spurious
                    }
                    _ => 0,
                };
                growth.spurious = match brake.epoch == setting.epoch {
                    true => brake.spurious.saturating_sub(known).into(),
                    false => 0,
                };
                growth.fuse_blown = brake.is_blown(setting.epoch);
                growth.throttled = capacity != 0 && brake.is_throttled(parts(capacity));
            }
        }
        Some(growth)
    }

    fn tuner_mut(&mut self, id: TimerId) -> Option<&mut Tuner> {
        match id {
            TimerId::Active => self.state.active.as_mut(),
            TimerId::Passive => self.state.passive.as_mut(),
            TimerId::RtoMin => None,
        }
    }

    /// Has each tuner of an initial RTO, and that of `rto_min`, do something.
    pub(super) fn each(
        &mut self,
        initial_rto: impl Fn(&mut Tuner) -> Vec<Transition>,
        rto_min: impl Fn(&mut AckTuner) -> Option<Transition>,
    ) -> Vec<(TimerId, Transition)> {
        let mut all = Vec::new();
        for id in [TimerId::Active, TimerId::Passive] {
            let transitions = self.tuner_mut(id).map(&initial_rto);
            all.extend(transitions.into_iter().flatten().map(|one| (id, one)));
        }
        let transition = self.state.rto_min.as_mut().and_then(rto_min);
        all.extend(transition.map(|one| (TimerId::RtoMin, one)));
        self.note(&all);
        all
    }

    /// An experiment has proven harm of the timers in force.
    pub(super) fn harm_proven(&mut self, now_ms: u64) -> Vec<(TimerId, Transition)> {
        let advises = self.spec.advises;
        let suspend = |tuner: &mut Tuner| match is_in_force(tuner, advises) {
            true => tuner.harm_proven(now_ms).transitions,
            false => Vec::new(),
        };
        self.each(suspend, |_| None)
    }

    /// Forgets what was learnt.
    pub(super) fn reset(&mut self, now_ms: u64) -> Vec<(TimerId, Transition)> {
        let operator = |from: Phase, before, to: Phase, after, numbers| Transition {
            at_ms: now_ms,
            from,
            to,
            cause: Cause::Operator,
            before,
            after,
            numbers,
        };
        let mut all = Vec::new();
        let specs = [
            (TimerId::Active, self.spec.active),
            (TimerId::Passive, self.spec.passive),
        ];
        for (id, spec) in specs {
            let (Some(spec), Some(tuner)) = (spec, self.tuner_mut(id)) else {
                continue;
            };
            let mut new = spec.tuner();
            new.skip_epochs(tuner.setting().epoch);
            let transition = operator(
                tuner.phase(),
                tuner.setting().jiffies,
                new.phase(),
                new.setting().jiffies,
                tuner.numbers(),
            );
            all.push((id, transition));
            *tuner = new;
        }
        if let (Some(settings), Some(tuner)) = (self.spec.rto_min, &mut self.state.rto_min) {
            let new = AckTuner::new(settings);
            let transition = operator(
                tuner.phase(),
                tuner.jiffies(),
                new.phase(),
                new.jiffies(),
                tuner.numbers(),
            );
            all.push((TimerId::RtoMin, transition));
            *tuner = new;
        }
        self.note(&all);
        all
    }

    fn note(&mut self, transitions: &[(TimerId, Transition)]) {
        for (id, transition) in transitions {
            let key = (*id, transition.to, transition.cause);
            *self.state.totals.entry(key).or_default() += 1;
            self.state.transitions.push_back((*id, *transition));
        }
        while self.state.transitions.len() > SHOWN {
            self.state.transitions.pop_front();
        }
        self.note_capacities();
    }

    fn note_capacities(&mut self) {
        let tuners = [&self.state.active, &self.state.passive];
        self.capacities = tuners.map(|tuner| match tuner {
            Some(tuner) if self.is_in_force(tuner) => capacity_of(tuner),
            _ => 0,
        });
    }

    /// Whether the program has its value and its brakes.
    fn is_in_force(&self, tuner: &Tuner) -> bool {
        is_in_force(tuner, self.spec.advises)
    }

    /// Whether a value is in force that the program leaves when its lease is over.
    pub(super) fn is_leased(&self) -> bool {
        let tuners = [&self.state.active, &self.state.passive];
        let is_leased = |tuner: &Tuner| tuner.guarded().is_none() && self.is_in_force(tuner);
        tuners.into_iter().flatten().any(is_leased)
    }

    /// What is decided about it.
    pub(super) fn adjustment(&self) -> Adjustment {
        let timer = |place: usize, tuner: &Option<Tuner>| {
            let tuner = tuner.as_ref()?;
            self.initial_rto(tuner, self.capacities[place])
        };
        let rto_min = self.state.rto_min.as_ref();
        let rto_min = rto_min.filter(|_| !self.spec.advises);
        let percent = [&self.state.active, &self.state.passive]
            .into_iter()
            .flatten()
            .filter(|tuner| self.is_in_force(tuner))
            .map(|tuner| tuner.setting().percent)
            .min()
            .unwrap_or(100);
        Adjustment {
            active: timer(0, &self.state.active).unwrap_or_default(),
            passive: timer(1, &self.state.passive).unwrap_or_default(),
            rto_min: rto_min
                .and_then(AckTuner::jiffies)
                .map(|jiffies| jiffies_duration(jiffies, self.spec.hz)),
            control: (percent < 100).then(|| self.spec.all_but(percent)),
        }
    }

    fn initial_rto(&self, tuner: &Tuner, budget: u32) -> Option<InitialRto> {
        let setting = tuner.setting();
        if !self.is_in_force(tuner) {
            let is_taken_back = matches!(tuner.guarded(), Some((_, true)));
            return is_taken_back.then(|| InitialRto {
                timer: Timer::Kernel,
                ..InitialRto::default()
            });
        }
        let jiffies = setting.jiffies?;
        let is_configured = tuner.guarded().is_some_and(|(value, _)| value == jiffies);
        Some(InitialRto {
            timer: match is_configured {
                true => Timer::Configured,
                false => Timer::Value(jiffies_duration(jiffies, self.spec.hz)),
            },
            epoch: setting.epoch,
            budget,
        })
    }

    /// Its timers, to be shown.
    pub(super) fn shown(&self) -> impl Iterator<Item = Shown<'_>> {
        let tuners = [
            (TimerId::Active, &self.state.active),
            (TimerId::Passive, &self.state.passive),
        ];
        let tuners = tuners.into_iter().filter_map(|(id, tuner)| {
            let tuner = tuner.as_ref()?;
            Some(Shown {
                id,
                phase: tuner.phase(),
                jiffies: tuner.setting().jiffies,
                percent: tuner.setting().percent,
                numbers: tuner.numbers(),
                next: tuner.next(),
                tuner: Some(tuner),
            })
        });
        let rto_min = self.state.rto_min.as_ref().map(|tuner| Shown {
            id: TimerId::RtoMin,
            phase: tuner.phase(),
            jiffies: tuner.jiffies(),
            percent: 100,
            numbers: tuner.numbers(),
            next: tuner.next(),
            tuner: None,
        });
        tuners.chain(rto_min)
    }

    /// The brakes as last read, and their capacity in whole retransmissions; `None` if there are none.
    pub(super) fn brake(&self, id: TimerId) -> Option<(Brake, u32)> {
        let place = match id {
            TimerId::Active => 0,
            TimerId::Passive => 1,
            TimerId::RtoMin => return None,
        };
        let capacity = self.capacities[place];
        (capacity != 0).then(|| (self.brakes[place], capacity))
    }
}

/// Another host has another configured value of a guarded timer.
fn follow_host(tuner: Option<&mut Tuner>, spec: Option<&TimerSpec>) {
    if let Some(TimerSpec::Guard { jiffies, acts, .. }) = spec
        && let Some(tuner) = tuner
        && let Some((_, acted)) = tuner.guarded()
        && acted == *acts
    {
        tuner.guard_instead(*jiffies);
    }
}

/// A tuner for settings: the one that there was, if it is of the same kind.
fn following(tuner: Option<Tuner>, spec: Option<&TimerSpec>) -> Option<Tuner> {
    let spec = spec?;
    let Some(mut tuner) = tuner else {
        return Some(spec.tuner());
    };
    if tuner.guarded() == spec.guarded() {
        let (TimerSpec::Auto(law) | TimerSpec::Guard { law, .. }) = *spec;
        if *tuner.settings() != law {
            tuner.configure(law);
        }
        return Some(tuner);
    }
    let mut new = spec.tuner();
    new.skip_epochs(tuner.setting().epoch);
    Some(new)
}

/// Whether the program has a tuner's value and brakes.
fn is_in_force(tuner: &Tuner, advises: bool) -> bool {
    let is_set = match tuner.guarded() {
        Some((_, acts)) => acts,
        None => !advises,
    };
    is_set && tuner.setting().jiffies.is_some()
}

fn capacity_of(tuner: &Tuner) -> u32 {
    /// 2^31 parts are more than a brake counts.
    const MOST: u32 = 1 << 24;
    tuner.budget_capacity().clamp(Budget::LEAST_CAPACITY, MOST)
}

/// As [`rto_agent_common::Policy::budgets`] has it.
pub(super) const fn parts(capacity: u32) -> u32 {
    capacity.saturating_mul(COST)
}
