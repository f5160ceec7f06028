//! Compares a policy's timers with the kernel's own on a share of the connections: judges the
//! counts, and decides when the experiment ends.
//!
//! There is no clock and no I/O: the caller passes the counts and the time since the last
//! observation, and sets the share that [`Experiment::share`] returns.
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

mod counts;
mod design;
mod merge;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::{
    counts::{Arms, Counts, Outcome},
    design::{Design, DesignError, Ramp, Unit},
    merge::MergeError,
};
use super::evidence::{Direction, Probability, Ratio, Tally};

/// The e-value from which harm is proven, for any [`Outcome`]. With three outcomes this happens by
/// chance in at most one of 130 experiments.
pub const HARM: f64 = 400.0;
/// The e-value from which a gain is proven; by chance in at most one of 20 experiments.
pub const GAIN: f64 = 20.0;
/// The e-value of harm from which the ramp stops rising, and no gain is proven.
pub const SUSPECTED_HARM: f64 = 20.0;
/// The e-value from which the arms do not have the connections that the hash should assign to them.
pub const MISMATCH: f64 = 1000.0;
/// Treated connections that a step needs: an outcome that none of these had has a share of at most
/// 0.3 % (95 %).
pub const STEP_ATTEMPTS: u64 = 1000;
/// How long evidence of bad attempts must hold, milliseconds.
pub const HOLD_MS: u64 = 10_000;
/// The allowance for attempts under way, as a multiple of their average number.
const ALLOWANCE: f64 = 2.0;
/// The largest e-value that is reported, because JSON has no infinity.
const LARGEST_E: f64 = 1e300;

/// The counts since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Increments {
    /// Counts by arm.
    pub counts: Arms<Counts>,
    /// The average number of attempts under way that became good: the sum of their connect times,
    /// divided by the time since the last observation.
    pub under_way: Arms<f64>,
}

/// How an experiment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    /// The treated arm has fewer bad attempts, and no harm is suspected.
    GainProven {
        /// Whether all connections are treated now.
        promoted: bool,
    },
    /// An outcome is more frequent in the treated arm.
    Harm {
        /// The outcome that proved harm.
        outcome: Outcome,
    },
    /// The arms do not have the connections that they should have: assignment or counting is wrong.
    Invalid,
    /// The duration ended without a proven gain or harm.
    Inconclusive,
    /// An operator stopped it.
    Stopped,
}

names!(
    /// State of an experiment.
    State {
        /// The experiment is running.
        Running = "running",
        /// A gain is proven at all shares; the last share stays, and harm is still judged.
        GainProven = "gain-proven",
        /// A gain is proven at all shares, and the policy is active as configured.
        Promoted = "promoted",
        /// Harm is proven: no connection is treated.
        Harm = "harm",
        /// The sizes of the arms do not match the share: no connection is treated.
        Invalid = "invalid",
        /// Its maximum duration has passed and nothing was proven: no connection is treated.
        Inconclusive = "inconclusive",
        /// Stopped by the operator, or by a change of the policy.
        Stopped = "stopped",
    }
);

/// A change in an experiment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The share rises to the next share of the ramp.
    Raised {
        /// The new share, 0 to 1.
        share: f64,
    },
    /// The e-value of the gain has reached [`GAIN`]. The ramp continues.
    GainProven,
    /// The experiment has ended.
    Ended(Verdict),
}

/// The counts at one share of the ramp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Step {
    /// Start of the step, milliseconds since the start of the experiment.
    began_ms: u64,
    counts: Arms<Counts>,
    /// Attempts under way when counting started.
    under_way: Arms<f64>,
}

/// Counts at one share, and their evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShareResult {
    /// The share, 0 to 1.
    pub share: f64,
    /// What was counted, by arm.
    #[serde(flatten)]
    pub counts: Arms<Counts>,
    /// The ratio of the shares of bad attempts, treated to control.
    pub ratio: Ratio,
}

/// Evaluation of the counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Assessment {
    /// The e-value of a gain: proven at 20.
    pub gain_e: f64,
    /// The e-values of harm by outcome: proven at 400.
    pub harm_e: BTreeMap<Outcome, f64>,
    /// The e-value of a sample-ratio mismatch: invalid at 1000.
    pub mismatch_e: f64,
}

/// Since when the evidence holds, milliseconds since the start of the experiment. Not stored: after
/// a restart it must hold again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Held {
    gain: Option<u64>,
    harm: Option<u64>,
    last_share: Option<u64>,
}

/// An experiment, stored across restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    design: Design,
    /// The hosts whose counts it contains, and their seeds.
    hosts: BTreeMap<String, u32>,
    /// The observed time, milliseconds.
    elapsed_ms: u64,
    /// The steps so far; the last one is the current step.
    steps: Vec<Step>,
    /// The current attempts under way.
    under_way: Arms<f64>,
    #[serde(skip)]
    held: Held,
    is_gain_proven: bool,
    verdict: Option<Verdict>,
}

impl Experiment {
    /// Starts with the ramp's first share.
    /// Fails if the duration is too short for the ramp.
    pub fn start(design: Design, host: String) -> Result<Self, DesignError> {
        design.check()?;
        Ok(Self {
            hosts: BTreeMap::from([(host, design.seed)]),
            design,
            elapsed_ms: 0,
            steps: vec![Step::default()],
            under_way: Arms::default(),
            held: Held::default(),
            is_gain_proven: false,
            verdict: None,
        })
    }

    /// Its design.
    pub const fn design(&self) -> &Design {
        &self.design
    }

    /// The hosts whose counts it contains.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.hosts.keys().map(String::as_str)
    }

    /// The observed time, milliseconds.
    pub const fn elapsed_ms(&self) -> u64 {
        self.elapsed_ms
    }

    /// The maximum remaining time, seconds.
    pub const fn left_s(&self) -> u64 {
        self.design
            .duration_s
            .saturating_sub(self.elapsed_ms / 1000)
    }

    /// The minimum remaining time of the current share, seconds.
    pub fn step_left_s(&self) -> u64 {
        let began_ms = self.steps.last().map_or(0, |step| step.began_ms);
        let age_s = self.elapsed_ms.saturating_sub(began_ms) / 1000;
        self.design.step_s().saturating_sub(age_s)
    }

    /// Index of the current share, from 0.
    pub fn step(&self) -> usize {
        self.steps.len().saturating_sub(1)
    }

    /// Whether the current share is the last.
    pub fn is_at_last_share(&self) -> bool {
        self.steps.len() >= self.design.ramp.shares().len()
    }

    /// Its verdict; `None` while it runs.
    pub const fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// How it stands.
    pub const fn state(&self) -> State {
        match self.verdict {
            None => State::Running,
            Some(Verdict::GainProven { promoted: false }) => State::GainProven,
            Some(Verdict::GainProven { promoted: true }) => State::Promoted,
            Some(Verdict::Harm { .. }) => State::Harm,
            Some(Verdict::Invalid) => State::Invalid,
            Some(Verdict::Inconclusive) => State::Inconclusive,
            Some(Verdict::Stopped) => State::Stopped,
        }
    }

    /// Whether a gain was proven.
    pub const fn is_gain_proven(&self) -> bool {
        self.is_gain_proven
    }

    /// Whether it counts connections.
    pub const fn is_counting(&self) -> bool {
        matches!(self.state(), State::Running | State::GainProven)
    }

    /// The current share of treated connections, 0 to 1.
    ///
    /// After a proven gain without `promote` it stays at the last share, and its control arm is
    /// still used to judge harm.
    pub fn share(&self) -> f64 {
        match self.state() {
            State::Running | State::GainProven => self.present_share(),
            State::Promoted => 1.0,
            State::Harm | State::Invalid | State::Inconclusive | State::Stopped => 0.0,
        }
    }

    /// The total counts, by arm.
    pub fn counts(&self) -> Arms<Counts> {
        let all = self.steps.iter().map(|step| step.counts);
        all.fold(Arms::default(), |sum, counts| sum + counts)
    }

    /// Adds the growth of the counters since the last observation, and judges. Counts after the end
    /// are ignored. With [`Unit::Peer`] nothing is judged.
    ///
    /// At most one change happens in each call. In this order:
    ///
    /// 1. A sample-ratio mismatch of [`MISMATCH`] ends the experiment as invalid.
    /// 2. Harm of [`HARM`] in any outcome, beyond the [tolerated](Outcome::tolerated) excess, ends
    ///    it.
    /// 3. A gain of [`GAIN`] without harm of [`SUSPECTED_HARM`] is proven, and stays proven.
    /// 4. A step is complete after [`Design::step_s`] and [`STEP_ATTEMPTS`] treated connections, if
    ///    no harm is suspected. After the last step a proven gain ends the experiment. It is
    ///    promoted only if the ratio at the last share alone is below 1.
    /// 5. At the end of its duration it is inconclusive, even if a gain was proven on part of the
    ///    ramp.
    /// 6. After a complete step the next share follows.
    pub fn observe(&mut self, increments: &Increments, elapsed_ms: u64) -> Option<Event> {
        if !self.is_counting() {
            return None;
        }
        self.count(increments, elapsed_ms);
        let is_over = self.left_s() == 0;
        if self.design.unit == Unit::Peer {
            return is_over.then(|| self.end(Verdict::Inconclusive));
        }
        if self.mismatch_reaches(MISMATCH) {
            return Some(self.end(Verdict::Invalid));
        }
        let now_ms = self.elapsed_ms;
        let harm = self.harm(HARM);
        let is_bad = harm == Some(Outcome::Bad);
        let is_bad_held = has_held(&mut self.held.harm, is_bad, now_ms);
        if let Some(outcome) = harm
            && (!is_bad || is_bad_held)
        {
            return Some(self.end(Verdict::Harm { outcome }));
        }
        if self.verdict.is_some() {
            return None;
        }
        let is_suspected = self.suspected_harm().is_some();
        let gains = !is_suspected && (self.is_gain_proven || self.gain_reaches(GAIN));
        if has_held(&mut self.held.gain, gains, now_ms) && !self.is_gain_proven {
            self.is_gain_proven = true;
            return Some(Event::GainProven);
        }
        let is_complete =
            self.step_left_s() == 0 && self.step_attempts() >= STEP_ATTEMPTS && !is_suspected;
        let is_last = self.is_at_last_share();
        if is_last && self.is_gain_proven && !is_suspected && (is_complete || is_over) {
            let promote = self.design.promote;
            let is_below = promote && self.gains_at_last_share();
            let promoted = has_held(&mut self.held.last_share, is_below, now_ms) && is_complete;
            if promoted || !promote || is_over {
                return Some(self.end(Verdict::GainProven { promoted }));
            }
        }
        if is_over {
            return Some(self.end(Verdict::Inconclusive));
        }
        (is_complete && !is_last).then(|| {
            self.steps.push(Step {
                began_ms: now_ms,
                ..Step::default()
            });
            self.held = Held::default();
            Event::Raised {
                share: self.present_share(),
            }
        })
    }

    /// Ends the experiment, unless it has ended: no connection is treated any more.
    pub fn stop(&mut self) {
        if self.share() > 0.0 {
            self.verdict = Some(Verdict::Stopped);
        }
    }

    /// The first outcome with suspected harm, which stops the ramp and prevents a verdict of gain.
    pub fn suspected_harm(&self) -> Option<Outcome> {
        self.harm(SUSPECTED_HARM)
    }

    /// What the counts currently prove; `None` if peers are assigned.
    pub fn assess(&self) -> Option<Assessment> {
        let e = |ln_e: f64| ln_e.exp().min(LARGEST_E);
        (self.design.unit == Unit::Connection).then(|| Assessment {
            gain_e: e(self.ln_gain()),
            harm_e: BTreeMap::from(Outcome::ALL.map(|outcome| {
                let tallies = self.harm_tallies(outcome);
                (outcome, self.mean_e(tallies, Direction::Harm))
            })),
            mismatch_e: self.mean_e(self.drawn_tallies(), Direction::Either),
        })
    }

    /// The counts at each share so far.
    pub fn results(&self) -> impl Iterator<Item = ShareResult> {
        let bounds = self.gain_tallies().zip(self.harm_tallies(Outcome::Bad));
        self.by_share()
            .zip(bounds)
            .map(|((share, step), (gain, harm))| {
                let bad = step.counts.map(|counts| counts.of(Outcome::Bad) as f64);
                ShareResult {
                    share: share.get(),
                    counts: step.counts,
                    // Allows for attempts under way in both directions.
                    ratio: Ratio {
                        likeliest: tally(share, bad).ratio().likeliest,
                        low: harm.ratio().low,
                        high: gain.ratio().high,
                    },
                }
            })
    }

    /// The result at the latest share with a bad attempt; at the current share if none has one.
    pub fn result(&self) -> ShareResult {
        let all: Vec<_> = self.results().collect();
        let is_bad = |result: &&ShareResult| {
            let Arms { treated, control } = result.counts.map(|counts| counts.of(Outcome::Bad));
            treated + control > 0
        };
        let latest = all.iter().rfind(is_bad).or(all.last());
        latest.copied().unwrap_or_default()
    }

    /// Treated connections at the current share; [`STEP_ATTEMPTS`] complete a step.
    pub fn step_attempts(&self) -> u64 {
        let present = self.steps.last();
        present.map_or(0, |step| step.counts.treated.drawn())
    }

    fn count(&mut self, increments: &Increments, elapsed_ms: u64) {
        self.elapsed_ms = self.elapsed_ms.saturating_add(elapsed_ms);
        let Some(step) = self.steps.last_mut() else {
            return;
        };
        let now = increments.under_way;
        if step.counts == Arms::default() {
            step.under_way = step.under_way.zip(&now, |before, now| now.max(*before));
        }
        step.counts += increments.counts;
        // A moving average, which forgets a burst after some observations.
        self.under_way = self
            .under_way
            .zip(&now, |before, now| now.max(before * 0.9));
    }

    fn end(&mut self, verdict: Verdict) -> Event {
        self.verdict = Some(verdict);
        Event::Ended(verdict)
    }

    fn present_share(&self) -> f64 {
        let share = self.design.ramp.shares().get(self.step());
        share.map_or(0.0, |share| share.get())
    }

    fn by_share(&self) -> impl Iterator<Item = (Probability, &Step)> {
        self.design.ramp.shares().iter().copied().zip(&self.steps)
    }

    /// Bad attempts at each share; attempts under way favour the control arm.
    fn gain_tallies(&self) -> impl Iterator<Item = Tally> {
        self.by_share().map(|(share, step)| {
            let (begun, now) = self.allowances(step);
            let bad = step.counts.map(|counts| counts.of(Outcome::Bad) as f64);
            tally(
                share,
                Arms {
                    treated: bad.treated + begun.treated,
                    control: (bad.control - now.control).max(0.0),
                },
            )
        })
    }

    /// An outcome at each share; attempts under way favour the treated arm.
    fn harm_tallies(&self, outcome: Outcome) -> impl Iterator<Item = Tally> {
        self.by_share().map(move |(share, step)| {
            let (begun, now) = match outcome {
                Outcome::Bad => self.allowances(step),
                Outcome::LateAccepted | Outcome::Spurious => Default::default(),
            };
            let count = step.counts.map(|counts| counts.of(outcome) as f64);
            tally(
                share,
                Arms {
                    treated: (count.treated - now.treated).max(0.0),
                    control: count.control + begun.control,
                },
            )
        })
    }

    fn drawn_tallies(&self) -> impl Iterator<Item = Tally> {
        self.by_share()
            .map(|(share, step)| tally(share, step.counts.map(|counts| counts.drawn() as f64)))
    }

    /// The allowances for attempts under way when counting started, and now.
    fn allowances(&self, step: &Step) -> (Arms<f64>, Arms<f64>) {
        (
            step.under_way.map(|count| ALLOWANCE * count),
            self.under_way.map(|count| ALLOWANCE * count),
        )
    }

    fn ln_gain(&self) -> f64 {
        self.gain_tallies()
            .map(|tally| tally.ln_e(Direction::Gain))
            .sum()
    }

    fn gain_reaches(&self, e: f64) -> bool {
        let at_most: f64 = self
            .gain_tallies()
            .map(|tally| tally.at_most(Direction::Gain))
            .sum();
        at_most >= e.ln() && self.ln_gain() >= e.ln()
    }

    fn gains_at_last_share(&self) -> bool {
        let last = self.gain_tallies().last();
        last.is_some_and(|tally| tally.ratio().high.is_some_and(|high| high < 1.0))
    }

    fn mismatch_reaches(&self, e: f64) -> bool {
        self.mean_reaches(|| self.drawn_tallies(), Direction::Either, e)
    }

    /// The first outcome whose e-value of harm has reached `e`. For an outcome with a tolerated
    /// share, the e-value against "no more than is tolerated" must reach it too. That second
    /// e-value assumes independent connections; it can only delay the verdict.
    fn harm(&self, e: f64) -> Option<Outcome> {
        let treated = self.counts().treated;
        let is_intolerable = |outcome: Outcome| {
            let bad = treated.of(outcome);
            outcome.tolerated().is_none_or(|share| {
                let others = treated.all(outcome).saturating_sub(bad);
                let arms = Arms {
                    treated: bad as f64,
                    control: others as f64,
                };
                tally(share, arms).ln_e(Direction::Harm) >= e.ln()
            })
        };
        Outcome::ALL.into_iter().find(|outcome| {
            self.mean_reaches(|| self.harm_tallies(*outcome), Direction::Harm, e)
                && is_intolerable(*outcome)
        })
    }

    /// The average e-value of the ramp's shares; a share not reached yet has 1.
    fn mean_e(&self, tallies: impl Iterator<Item = Tally>, direction: Direction) -> f64 {
        let shares = self.design.ramp.shares().len();
        let rest = shares.saturating_sub(self.steps.len()) as f64;
        let sum: f64 = tallies.map(|tally| tally.ln_e(direction).exp()).sum();
        ((sum + rest) / shares as f64).min(LARGEST_E)
    }

    fn mean_reaches<T: Iterator<Item = Tally>>(
        &self,
        tallies: impl Fn() -> T,
        direction: Direction,
        e: f64,
    ) -> bool {
        // An average is not larger than its largest part.
        tallies().any(|tally| tally.at_most(direction) >= e.ln())
            && self.mean_e(tallies(), direction) >= e
    }
}

const fn tally(share: Probability, arms: Arms<f64>) -> Tally {
    Tally {
        share,
        treated: arms.treated,
        control: arms.control,
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
