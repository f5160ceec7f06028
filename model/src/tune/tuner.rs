//! The tuner: decides the current timer. The daemon calls it once a second.
//!
//! It has no clock and does no I/O. Its state is plain data that the daemon stores. Times are
//! milliseconds of a clock that never goes back, not even across a reboot if the state is kept
//! across it.
//!
//! A value is raised at once, and lowered after a minute, or an hour after the last raise. The
//! program decides the fallbacks, in which new connections have the kernel's own timer. Fallback
//! (spurious) means that the value was wrong: it lasts for [`HOLD_MS`], and then the value that
//! samples require is set. Fallback (outage) ends with the first establishment.

#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    history::{HOUR_MS, History, MEMORY_MS},
    law::{LEAST_SAMPLES, Settings, Want, asks_for_less},
};
use crate::distribution::Distribution;

/// How long fallback (spurious) lasts, milliseconds.
pub const HOLD_MS: u64 = 600_000;
/// Minimum time between a change and a lower value, milliseconds.
const BETWEEN_MS: u64 = 60_000;
/// A raised value is lowered if no sample required as much for this time, milliseconds. On a path
/// whose RTTs vary over minutes, as with a queue, the last 300 connections are alternately fast and
/// slow.
const AFTER_RAISE_MS: u64 = HOUR_MS;

names!(
    /// State of a timer.
    State {
        /// Too few samples: the kernel's own timer.
        Learning = "learning",
        /// The value that the samples suggest, or the configured value; the kernel's own timer if
        /// the samples suggest that.
        Active = "active",
        /// Too many connections had a spurious retransmission: the kernel's own timer for ten minutes.
        FallbackSpurious = "fallback-spurious",
        /// Attempts lose their first SYN and none is established: the program gives new connections
        /// the kernel's own timer until one is.
        FallbackOutage = "fallback-outage",
        /// The kernel's own timer until an operator resumes it.
        Frozen = "frozen",
    }
);

names!(
    /// How a timer is treated.
    TimerKind {
        /// The value is learnt and applied.
        Auto = "auto",
        /// The value is learnt, but not applied (`mode = "advise"`).
        Advice = "advice",
        /// The value is configured (`guard = "on"`).
        Guarded = "guarded",
    }
);

names!(
    /// Why a state or a value changed.
    Cause {
        /// There are enough samples for a value.
        EnoughSamples = "enough-samples",
        /// The samples suggest a lower value.
        WantLower = "want-lower",
        /// The samples suggest a higher value.
        WantHigher = "want-higher",
        /// Too many connections had a spurious retransmission.
        Spurious = "spurious",
        /// Fallback (spurious) has lasted ten minutes.
        HoldOver = "hold-over",
        /// Attempts lose their first SYN and none is established.
        Outage = "outage",
        /// A connection was established after an outage.
        Established = "established",
        /// The samples are older than a day.
        Forgotten = "forgotten",
        /// An operator froze it.
        Operator = "operator",
    }
);

impl State {
    /// Whether new connections get the kernel's own timer because of a fallback.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Self::FallbackSpurious | Self::FallbackOutage)
    }

    /// Its name in text.
    pub const fn text(self) -> &'static str {
        match self {
            Self::FallbackSpurious => "fallback (spurious)",
            Self::FallbackOutage => "fallback (outage)",
            Self::Learning | Self::Active | Self::Frozen => self.name(),
        }
    }
}

/// The growth of the counters since the previous step, for one policy and direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Growth {
    /// The samples from which the value is learnt: path RTTs. Each sample counts once.
    pub samples: Distribution,
    /// The outcomes of connections.
    pub counts: Counts,
    /// Whether the program has begun fallback (spurious) in this epoch.
    pub spurious: bool,
    /// Whether the program is in fallback (outage).
    pub outage: bool,
}

/// What happened to connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Connections that were established.
    pub connections: u64,
    /// Connections with a spurious SYN or SYN-ACK.
    pub spurious: u64,
}

impl Counts {
    fn add(&mut self, more: &Self) {
        self.connections = self.connections.saturating_add(more.connections);
        self.spurious = self.spurious.saturating_add(more.spurious);
    }
}

/// The evidence for a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Evidence {
    /// Samples remembered: path RTTs.
    pub samples: u64,
    /// The timer that the samples suggest, microseconds; absent with too few samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub want_us: Option<u64>,
    /// The timer that all remembered hours suggest, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_us: Option<u64>,
    /// The timer that the latest samples suggest, microseconds; absent with too few samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_us: Option<u64>,
    /// Since the value was last set.
    #[serde(flatten)]
    pub counts: Counts,
}

/// A change of a state or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Transition {
    /// When, milliseconds: of the tuner's clock internally, Unix time in the API.
    pub at_ms: u64,
    /// The state before.
    pub from: State,
    /// The state after; unchanged if only the value changes.
    pub to: State,
    /// Why.
    pub cause: Cause,
    /// The value before, microseconds; absent: the kernel's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_us: Option<u64>,
    /// The value after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_us: Option<u64>,
    /// The evidence; counts refer to the previous value.
    pub evidence: Evidence,
}

impl Transition {
    /// Whether the value changed.
    pub fn is_change(&self) -> bool {
        self.before_us != self.after_us
    }
}

/// "active -> fallback (spurious), 24ms -> the kernel's own; 20 of 400 connections spurious, 5000 samples".
impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.from != self.to {
            write!(f, "{} -> ", self.from.text())?;
        }
        f.write_str(self.to.text())?;
        if !self.to.is_fallback() {
            write!(f, " ({})", self.cause.name())?;
        }
        f.write_str(", ")?;
        if self.is_change() {
            write!(f, "{} -> ", Value(self.before_us))?;
        }
        let Evidence {
            samples, counts, ..
        } = self.evidence;
        write!(
            f,
            "{}; {} of {} connections spurious, {samples} samples",
            Value(self.after_us),
            counts.spurious,
            counts.connections,
        )
    }
}

/// A value in microseconds as text: "24ms", or the kernel's own.
#[derive(Clone, Copy, Debug)]
pub struct Value(pub Option<u64>);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("the kernel's own"),
            Some(us) if us % 1_000_000 == 0 => write!(f, "{}s", us / 1_000_000),
            Some(us) if us % 1000 == 0 => write!(f, "{}ms", us / 1000),
            Some(us) => write!(f, "{us}us"),
        }
    }
}

/// The next step, if nothing else changes. Times are as in [`Transition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Next {
    /// Nothing.
    Nothing,
    /// A value is learnt after this many more samples.
    Learn {
        /// Missing samples.
        samples: u64,
    },
    /// The samples suggest the kernel's own timer or a longer one.
    NothingToGain,
    /// A lower value.
    Lower {
        /// The value, microseconds.
        to_us: u64,
        /// Earliest time of the change.
        at_ms: u64,
    },
    /// The value returns after fallback (spurious).
    HoldEnds {
        /// When.
        at_ms: u64,
    },
    /// The value returns when a connection is established.
    OutageEnds,
    /// An operator must resume the timer.
    Resume,
}

/// Learns a timer of one policy and direction, or guards a configured timer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuner {
    settings: Settings,
    /// The configured value, jiffies; `None` if it is learnt.
    configured: Option<u64>,
    state: State,
    /// The value, jiffies; `None`: the kernel's own.
    jiffies: Option<u64>,
    /// The epoch of the value: the program counts spurious connections by epoch.
    epoch: u32,
    history: History,
    /// Counts since the value was set.
    counts: Counts,
    changed_ms: Option<u64>,
    /// When samples last required as much as the raised value.
    raised_ms: Option<u64>,
    last_step_ms: Option<u64>,
    /// End of fallback (spurious).
    hold_until_ms: u64,
    /// Of a configured value.
    repath: Option<Repath>,
}

/// From when retransmissions of SYNs may take another path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Repath {
    /// After the first SYN.
    jiffies: u64,
    changed_ms: u64,
}

impl Tuner {
    /// A tuner without samples. It starts with the kernel's own timer, or with the configured one,
    /// jiffies.
    pub fn new(settings: Settings, configured: Option<u64>) -> Self {
        Self {
            settings,
            configured,
            state: match configured {
                Some(_) => State::Active,
                None => State::Learning,
            },
            jiffies: configured,
            epoch: u32::from(configured.is_some()),
            history: History::default(),
            counts: Counts::default(),
            changed_ms: None,
            raised_ms: None,
            last_step_ms: None,
            hold_until_ms: 0,
            repath: None,
        }
    }

    /// Skips the epochs that the program knows from another tuner, so that this tuner's epochs are
    /// new.
    pub const fn skip_epochs(&mut self, seen: u32) {
        if self.epoch <= seen {
            self.epoch = seen.wrapping_add(1);
        }
    }

    /// The current state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// The configured value, jiffies; `None` if it is learnt.
    pub const fn configured(&self) -> Option<u64> {
        self.configured
    }

    /// The value, microseconds; `None`: the kernel's own.
    pub fn value_us(&self) -> Option<u64> {
        self.jiffies.map(|jiffies| self.settings.micros(jiffies))
    }

    /// The value, jiffies.
    pub const fn jiffies(&self) -> Option<u64> {
        self.jiffies
    }

    /// What the law says of the path, also if the value is configured: from this time on after a SYN, jiffies, its answer
    /// would have arrived, and retransmissions may take another path. `None`: nothing is learnt.
    pub fn repath_jiffies(&self) -> Option<u64> {
        match self.configured {
            Some(_) => self.repath.map(|repath| repath.jiffies),
            None => self.jiffies,
        }
    }

    /// The current epoch, which counts the values.
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The requirements for the value.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The evidence for the next decision.
    pub fn evidence(&self) -> Evidence {
        let want = self.want();
        Evidence {
            samples: self.history.all().count(),
            want_us: want.map(|want| self.settings.micros(want.jiffies)),
            slow_us: want.map(|want| want.slow_us),
            fast_us: want.and_then(|want| want.fast_us),
            counts: self.counts,
        }
    }

    /// Sets new requirements; the value follows in the next steps.
    pub fn configure(&mut self, settings: Settings) {
        if self.settings.spurious != settings.spurious {
            self.history.rebound(settings.spurious);
        }
        self.settings = settings;
    }

    /// Adds the growth of the counters, and decides. The daemon calls it about once a second.
    pub fn step(&mut self, now_ms: u64, growth: &Growth) -> Option<Transition> {
        let last_ms = self.last_step_ms.replace(now_ms).unwrap_or(now_ms);
        self.history
            .add(now_ms, &growth.samples, self.settings.spurious);
        self.counts.add(&growth.counts);
        let want = self.want();
        let is_old = now_ms.saturating_sub(last_ms) > MEMORY_MS;
        if self.configured.is_some() {
            self.follow_path(now_ms, want, is_old);
        }
        match self.state {
            State::Frozen => None,
            State::FallbackSpurious => {
                (now_ms >= self.hold_until_ms).then(|| self.begin(now_ms, Cause::HoldOver))
            }
            _ if growth.spurious && self.jiffies.is_some() => {
                self.hold_until_ms = now_ms.saturating_add(HOLD_MS);
                Some(self.enter(now_ms, State::FallbackSpurious, Cause::Spurious, None))
            }
            _ => self.follow(now_ms, growth.outage, want, is_old),
        }
    }

    /// Uses the kernel's own timer until [`Tuner::resume`].
    pub fn freeze(&mut self, now_ms: u64) -> Option<Transition> {
        (self.state != State::Frozen)
            .then(|| self.enter(now_ms, State::Frozen, Cause::Operator, None))
    }

    /// Ends [`Tuner::freeze`]. A hold still lasts for its full time.
    pub fn resume(&mut self, now_ms: u64) -> Option<Transition> {
        (self.state == State::Frozen).then(|| match now_ms < self.hold_until_ms {
            true => self.enter(now_ms, State::FallbackSpurious, Cause::Operator, None),
            false => self.begin(now_ms, Cause::Operator),
        })
    }

    /// Drops everything learnt.
    pub fn reset(&mut self, now_ms: u64) -> Transition {
        let mut new = Self::new(self.settings, self.configured);
        new.skip_epochs(self.epoch);
        let transition = self.transition(now_ms, new.state, Cause::Operator, new.jiffies);
        *self = new;
        transition
    }

    /// What follows if nothing changes.
    pub fn next(&self) -> Next {
        match (self.state, self.want()) {
            (State::Frozen, _) => Next::Resume,
            (State::FallbackSpurious, _) => Next::HoldEnds {
                at_ms: self.hold_until_ms,
            },
            (State::FallbackOutage, _) => Next::OutageEnds,
            _ if self.configured.is_some() => Next::Nothing,
            (_, None) => Next::Learn {
                samples: LEAST_SAMPLES.saturating_sub(self.history.all().count()),
            },
            (_, Some(want)) if asks_for_less(want.jiffies, self.at_present()) => Next::Lower {
                to_us: self.settings.micros(want.jiffies),
                at_ms: self.may_lower_ms(),
            },
            _ if self.jiffies.is_none() => Next::NothingToGain,
            _ => Next::Nothing,
        }
    }

    fn want(&self) -> Option<Want> {
        Want::of(&self.history, &self.settings)
    }

    /// The value; for the kernel's own timer the largest possible value.
    fn at_present(&self) -> u64 {
        self.jiffies.unwrap_or(self.settings.largest())
    }

    /// The value, or `None` if it is as long as the kernel's own and gains nothing.
    fn worthwhile(&self, jiffies: u64) -> Option<u64> {
        (jiffies < self.settings.largest()).then_some(jiffies)
    }

    /// Starts again from the kernel's own timer.
    fn begin(&mut self, now_ms: u64, cause: Cause) -> Transition {
        // A configured value does not depend on samples.
        let want = self.want().map(|want| want.jiffies);
        let (state, value) = match (self.configured, want) {
            (Some(jiffies), _) => (State::Active, Some(jiffies)),
            (None, Some(jiffies)) => (State::Active, self.worthwhile(jiffies)),
            (None, None) => (State::Learning, None),
        };
        self.enter(now_ms, state, cause, value)
    }

    /// Follows the path: at once to a longer time, after a minute to a shorter one.
    fn follow_path(&mut self, now_ms: u64, want: Option<Want>, is_old: bool) {
        let Some(jiffies) = want.map(|want| want.jiffies) else {
            self.repath = self.repath.filter(|_| !is_old);
            return;
        };
        let is_due = self.repath.is_none_or(|known| {
            let is_lower = asks_for_less(jiffies, known.jiffies);
            jiffies > known.jiffies || is_lower && now_ms >= known.changed_ms + BETWEEN_MS
        });
        if is_due {
            let changed_ms = now_ms;
            self.repath = Some(Repath {
                jiffies,
                changed_ms,
            });
        }
    }

    /// Follows an outage, and the value that samples require.
    fn follow(
        &mut self,
        now_ms: u64,
        outage: bool,
        want: Option<Want>,
        is_old: bool,
    ) -> Option<Transition> {
        let want = want.filter(|_| self.configured.is_none());
        let present = self.at_present();
        if let Some(want) = want.filter(|want| want.jiffies > present) {
            self.raised_ms = Some(now_ms);
            let raised = self.worthwhile(want.raised);
            let state = raised.map_or(State::Active, |_| self.state);
            return Some(self.enter(now_ms, state, Cause::WantHigher, raised));
        }
        let is_known = self.state == State::FallbackOutage;
        if self.jiffies.is_some() && outage != is_known {
            let (state, cause) = match outage {
                true => (State::FallbackOutage, Cause::Outage),
                false => (State::Active, Cause::Established),
            };
            return Some(self.enter(now_ms, state, cause, self.jiffies));
        }
        let Some(want) = want else {
            // A host without connections keeps its value, unless the daemon was stopped for longer
            // than the memory.
            let is_forgotten = is_old && self.configured.is_none() && self.jiffies.is_some();
            return is_forgotten
                .then(|| self.enter(now_ms, State::Learning, Cause::Forgotten, None));
        };
        if !asks_for_less(want.jiffies, present) {
            if self.raised_ms.is_some() {
                self.raised_ms = Some(now_ms);
            }
            let learnt = self.state == State::Learning;
            return learnt.then(|| self.begin(now_ms, Cause::EnoughSamples));
        }
        if is_known || now_ms < self.may_lower_ms() {
            return None;
        }
        self.raised_ms = None;
        let cause = match self.state {
            State::Learning => Cause::EnoughSamples,
            _ => Cause::WantLower,
        };
        Some(self.begin(now_ms, cause))
    }

    fn may_lower_ms(&self) -> u64 {
        let after = |since_ms: Option<u64>, ms: u64| since_ms.map_or(0, |at_ms| at_ms + ms);
        after(self.changed_ms, BETWEEN_MS).max(after(self.raised_ms, AFTER_RAISE_MS))
    }

    fn enter(&mut self, now_ms: u64, to: State, cause: Cause, after: Option<u64>) -> Transition {
        let transition = self.transition(now_ms, to, cause, after);
        self.state = to;
        if after != self.jiffies {
            self.jiffies = after;
            self.epoch = self.epoch.wrapping_add(1);
            self.changed_ms = Some(now_ms);
            self.counts = Counts::default();
        }
        transition
    }

    fn transition(&self, at_ms: u64, to: State, cause: Cause, after: Option<u64>) -> Transition {
        Transition {
            at_ms,
            from: self.state,
            to,
            cause,
            before_us: self.value_us(),
            after_us: after.map(|jiffies| self.settings.micros(jiffies)),
            evidence: self.evidence(),
        }
    }
}
