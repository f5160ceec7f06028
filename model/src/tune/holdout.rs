//! Compares a policy's timers with the kernel's own on the connections of its control arm, and says
//! what the counts prove.
//!
//! There is no clock and no I/O: the caller passes the counts and the time since the last
//! observation.
//!
//! # Attempts under way
//!
//! An attempt is bad until it is established. Attempts under way at an observation are therefore
//! counted as bad. Their number differs between the arms by chance, and differently at each
//! observation, which an e-value that is computed each second would take for evidence. So twice the
//! average number under way is added to the arm that would need few bad attempts, and subtracted
//! from the other arm, and a verdict counts only after it has held at all observations for
//! [`HOLD_MS`]. Attempts under way when counting starts are established later and reduce the number
//! of bad ones; they are allowed for in the same way, in the other direction.

#[cfg(test)]
mod tests;

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use super::evidence::{Direction, Probability, Ratio, Tally};

/// The e-value from which harm is proven; reached by chance by at most one of 400 policies.
pub const HARM: f64 = 400.0;
/// The e-value from which a gain is proven; by chance by at most one of 20 policies.
pub const GAIN: f64 = 20.0;
/// The e-value from which the arms do not have the attempts that the hash should assign to them.
pub const MISMATCH: f64 = 1000.0;
/// How long evidence must hold, milliseconds.
pub const HOLD_MS: u64 = 10_000;
/// The allowance for attempts under way, as a multiple of their average number.
const ALLOWANCE: f64 = 2.0;
/// The largest e-value that is reported, because JSON has no infinity.
const LARGEST_E: f64 = 1e300;
/// If the arms differ so little that a proof would need more than this many times the attempts so
/// far, the number is not estimated.
const MOST_TIMES: f64 = 10_000.0;

/// One value for each arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Arms<T> {
    /// For connections with the policy's timers.
    pub treated: T,
    /// For connections with the kernel's own timers.
    pub control: T,
}

impl<T> Arms<T> {
    /// Applies a function to each arm.
    pub fn map<U>(&self, mut of: impl FnMut(&T) -> U) -> Arms<U> {
        Arms {
            treated: of(&self.treated),
            control: of(&self.control),
        }
    }

    /// Applies a function to each arm of both.
    pub fn zip<U, V>(&self, other: &Arms<U>, of: impl Fn(&T, &U) -> V) -> Arms<V> {
        Arms {
            treated: of(&self.treated, &other.treated),
            control: of(&self.control, &other.control),
        }
    }
}

impl<T: Add<Output = T> + Copy> AddAssign for Arms<T> {
    fn add_assign(&mut self, other: Self) {
        *self = self.zip(&other, |one, other| *one + *other);
    }
}

/// Counts of an arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Attempts: connect() calls whose first SYN was sent.
    pub attempts: u64,
    /// Of these, established within 500 ms. The others are bad.
    pub good: u64,
}

impl Counts {
    /// Attempts that were not established within 500 ms. An attempt under way is one of them.
    pub const fn bad(&self) -> u64 {
        self.attempts.saturating_sub(self.good)
    }

    /// The growth of each count since an earlier time. Counters of several processors are not read
    /// at once, so a count may appear to shrink; its growth is then 0.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            attempts: self.attempts.saturating_sub(earlier.attempts),
            good: self.good.saturating_sub(earlier.good),
        }
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            attempts: self.attempts.saturating_add(other.attempts),
            good: self.good.saturating_add(other.good),
        }
    }
}

/// The counts since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Increments {
    /// Counts by arm.
    pub counts: Arms<Counts>,
    /// The average number of attempts under way that became good: the sum of their connect times,
    /// divided by the time since the last observation.
    pub under_way: Arms<f64>,
}

names!(
    /// What the counts prove.
    Verdict {
        /// Nothing yet.
        NotYet = "not-yet",
        /// Bad attempts are less frequent with the policy's timers.
        Gain = "gain",
        /// Bad attempts are more frequent with the policy's timers.
        Harm = "harm",
        /// The arms do not have the attempts that they should have: assignment or counting is
        /// wrong.
        Invalid = "invalid",
    }
);

/// Evaluation of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Assessment {
    /// The ratio of the shares of bad attempts, treated to control.
    pub ratio: Ratio,
    /// The e-value of a gain: proven at 20.
    pub gain_e: f64,
    /// The e-value of harm: proven at 400.
    pub harm_e: f64,
    /// The e-value of a sample-ratio mismatch: no verdict from 1000.
    pub mismatch_e: f64,
    /// Attempts of both arms that are still needed for a verdict, if bad attempts remain as
    /// frequent in each arm; absent with a verdict, without a bad attempt, and while the arms do
    /// not differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts_needed: Option<u64>,
}

/// Since when the evidence holds, milliseconds of observed time. Not stored: after a restart it
/// must hold again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Held {
    gain: Option<u64>,
    harm: Option<u64>,
}

/// The comparison of both arms, stored across restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The share of treated connections.
    treated: Probability,
    /// The observed time, milliseconds.
    elapsed_ms: u64,
    counts: Arms<Counts>,
    /// Attempts under way when counting started, each time.
    begun: Arms<f64>,
    /// Attempts under way now.
    under_way: Arms<f64>,
    /// Attempts under way before the next observation, which starts counting.
    #[serde(skip)]
    waiting: Arms<f64>,
    #[serde(skip)]
    held: Held,
    verdict: Verdict,
}

impl Comparison {
    /// Starts without counts.
    pub fn new(treated: Probability) -> Self {
        Self {
            treated,
            elapsed_ms: 0,
            counts: Arms::default(),
            begun: Arms::default(),
            under_way: Arms::default(),
            waiting: Arms::default(),
            held: Held::default(),
            verdict: Verdict::NotYet,
        }
    }

    /// The verdict.
    pub const fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// The counts, by arm.
    pub const fn counts(&self) -> &Arms<Counts> {
        &self.counts
    }

    /// Whether counts still matter: harm and a mismatch are final.
    pub const fn is_open(&self) -> bool {
        matches!(self.verdict, Verdict::NotYet | Verdict::Gain)
    }

    /// Counting starts with the next observation, also after a pause: attempts that are under way
    /// now will be good, but were not counted.
    pub fn wait(&mut self, under_way: Arms<f64>) {
        self.waiting = self.waiting.zip(&under_way, |one, other| one.max(*other));
    }

    /// Adds the growth of the counters since the last observation, and judges; returns a new
    /// verdict. In this order:
    ///
    /// 1. With a sample-ratio mismatch of [`MISMATCH`] there is no verdict any more.
    /// 2. Harm of [`HARM`] is final.
    /// 3. A gain of [`GAIN`] stays proven, unless harm is proven later.
    pub fn observe(&mut self, increments: &Increments, elapsed_ms: u64) -> Option<Verdict> {
        if !self.is_open() {
            return None;
        }
        self.count(increments, elapsed_ms);
        let attempts = self.counts.map(|counts| counts.attempts as f64);
        let is_mismatch = self.tally(attempts).reaches(Direction::Either, MISMATCH);
        let is_harm = self.harm_tally().reaches(Direction::Harm, HARM);
        let is_gain = self.gain_tally().reaches(Direction::Gain, GAIN);
        let now_ms = self.elapsed_ms;
        let is_harm = has_held(&mut self.held.harm, is_harm, now_ms);
        let is_gain = has_held(&mut self.held.gain, is_gain, now_ms);
        let verdict = match (is_mismatch, is_harm, is_gain) {
            (true, ..) => Verdict::Invalid,
            (_, true, _) => Verdict::Harm,
            (.., true) => Verdict::Gain,
            _ => return None,
        };
        let is_new = verdict != self.verdict;
        self.verdict = verdict;
        is_new.then_some(verdict)
    }

    /// What the counts currently prove.
    pub fn assess(&self) -> Assessment {
        let e = |tally: Tally, direction| tally.ln_e(direction).exp().min(LARGEST_E);
        let (gain, harm) = (self.gain_tally(), self.harm_tally());
        let attempts = self.counts.map(|counts| counts.attempts as f64);
        Assessment {
            // Allows for attempts under way in both directions.
            ratio: Ratio {
                likeliest: self.tally(self.bad()).ratio().likeliest,
                low: harm.ratio().low,
                high: gain.ratio().high,
            },
            gain_e: e(gain, Direction::Gain),
            harm_e: e(harm, Direction::Harm),
            mismatch_e: e(self.tally(attempts), Direction::Either),
            attempts_needed: self.attempts_needed(),
        }
    }

    /// How many more attempts would prove the difference that was observed so far.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an estimate of a count"
    )]
    fn attempts_needed(&self) -> Option<u64> {
        let bad = self.bad();
        let p = self.treated.get();
        let (direction, e) = match bad.treated * (1.0 - p) < bad.control * p {
            true => (Direction::Gain, GAIN),
            false => (Direction::Harm, HARM),
        };
        let is_proven = |times: f64| {
            let tally = self.tally(bad.map(|count| count * times));
            tally.ln_e(direction) >= e.ln()
        };
        if self.verdict != Verdict::NotYet || !is_proven(MOST_TIMES) {
            return None;
        }
        let (mut too_few, mut enough) = (0.0, MOST_TIMES.ln());
        for _ in 0..40 {
            let middle = f64::midpoint(too_few, enough);
            match is_proven(middle.exp()) {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        let attempts = self.counts.treated.attempts + self.counts.control.attempts;
        Some((attempts as f64 * (enough.exp() - 1.0)).ceil() as u64)
    }

    fn count(&mut self, increments: &Increments, elapsed_ms: u64) {
        self.elapsed_ms = self.elapsed_ms.saturating_add(elapsed_ms);
        let now = increments.under_way;
        if self.counts == Arms::default() {
            self.wait(now);
        }
        self.begun += std::mem::take(&mut self.waiting);
        self.counts += increments.counts;
        // A moving average, which forgets a burst after some observations.
        self.under_way = self
            .under_way
            .zip(&now, |before, now| now.max(before * 0.9));
    }

    fn bad(&self) -> Arms<f64> {
        self.counts.map(|counts| counts.bad() as f64)
    }

    /// Bad attempts; attempts under way favour the control arm.
    fn gain_tally(&self) -> Tally {
        let bad = self.bad();
        self.tally(Arms {
            treated: bad.treated + ALLOWANCE * self.begun.treated,
            control: (bad.control - ALLOWANCE * self.under_way.control).max(0.0),
        })
    }

    /// Bad attempts; attempts under way favour the treated arm.
    fn harm_tally(&self) -> Tally {
        let bad = self.bad();
        self.tally(Arms {
            treated: (bad.treated - ALLOWANCE * self.under_way.treated).max(0.0),
            control: bad.control + ALLOWANCE * self.begun.control,
        })
    }

    const fn tally(&self, arms: Arms<f64>) -> Tally {
        Tally {
            share: self.treated,
            treated: arms.treated,
            control: arms.control,
        }
    }
}

/// Whether a condition has held at all observations for [`HOLD_MS`].
fn has_held(since_ms: &mut Option<u64>, holds: bool, now_ms: u64) -> bool {
    if !holds {
        *since_ms = None;
        return false;
    }
    now_ms.saturating_sub(*since_ms.get_or_insert(now_ms)) >= HOLD_MS
}
