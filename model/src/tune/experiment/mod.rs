//! A policy's timers against the kernel's own, on a share of the connections: what was counted, and when it ends.
//!
//! No clock and no I/O: whoever drives it says what was counted since the last time and what time it is, and sets the
//! share that [`Experiment::share`] says. Times are seconds of one clock that goes on through restarts. The counters
//! of the arms begin with the experiment: connections of before count nowhere.

mod counts;
mod design;
mod merge;
mod spill_over;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use self::spill_over::Blocks;
pub use self::{
    counts::{Arms, Counts, Outcome},
    design::{Design, DesignError, Ramp, SETTLING_S, Unit},
    merge::MergeError,
    spill_over::{Change, SpillOver},
};
use super::{
    evidence::{Direction, Evidence, Tally},
    interval::Interval,
};
use crate::advice::Distribution;

/// The e-value from which harm is proven, at once, by any [`Outcome`]: of five, one is so by chance in 80 experiments
/// at most.
pub const HARM: f64 = 400.0;
/// The e-value from which a gain is proven: by chance in 20 experiments at most.
pub const GAIN: f64 = 20.0;
/// The e-value of harm from which the ramp is held and no gain is proven.
pub const SUSPECTED_HARM: f64 = 20.0;
/// The e-value from which the arms do not have the connections that the hash should give them.
pub const MISMATCH: f64 = 1000.0;
/// What the treatment is to make rarer.
pub const PRIMARY: Outcome = Outcome::Beyond500Ms;
/// How many treated attempts a step needs: with an outcome that none of them had, 0.3 % have it at most (95 %).
pub const STEP_ATTEMPTS: u64 = 1000;
/// Blocks of time in a step, by which the control arm's changes are judged.
const BLOCKS_A_STEP: u64 = 24;

/// What was counted since the last time.
#[derive(Clone, Debug, Default)]
pub struct Increments {
    /// By arm.
    pub counts: Arms<Counts>,
    /// RTTs of the control arm, microseconds.
    pub control_rtt: Distribution,
}

/// How an experiment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    /// The treatment's share of the primary outcome is lower, at each share of the ramp without harm.
    GainProven {
        /// Whether all connections are treated now.
        promoted: bool,
    },
    /// An outcome is more frequent in the treatment.
    Harm {
        /// Which.
        outcome: Outcome,
    },
    /// The arms do not have the connections they should have: something draws or counts wrongly.
    Invalid,
    /// Neither in time.
    Inconclusive,
    /// By the operator.
    Stopped,
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// The next share of the ramp.
    Raised {
        /// 0 to 1.
        share: f64,
    },
    /// The e-value of the gain has reached [`GAIN`]. The ramp goes on.
    GainProven,
    /// The end.
    Ended(Verdict),
}

/// One share of the ramp.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Step {
    /// Counted while outcomes of connections of the step before could still come.
    settling: Arms<Counts>,
    /// Counted after that.
    settled: Arms<Counts>,
    /// The control arm after that.
    blocks: Blocks,
}

/// What the counts say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Assessment {
    /// Natural logarithm of the e-value of a gain in [`PRIMARY`].
    pub gain_ln_e: f64,
    /// Natural logarithms of the e-values of harm.
    pub harm_ln_e: BTreeMap<Outcome, f64>,
    /// Natural logarithm of the e-value of a sample-ratio mismatch.
    pub mismatch_ln_e: f64,
    /// The ratio of the shares that had [`PRIMARY`], treatment to control, at 95 %.
    pub ratio: Interval,
    /// The likeliest one; `None` while the control arm has had none.
    pub likeliest_ratio: Option<f64>,
    /// How the control arm has changed with the share.
    pub spill_over: SpillOver,
}

/// An experiment, as it is kept through restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    design: Design,
    /// Whose counts are in it, and their seeds.
    hosts: BTreeMap<String, u32>,
    started_s: u64,
    /// When the present share was set.
    raised_s: u64,
    /// Those that were reached; the last is the present one.
    steps: Vec<Step>,
    gain_proven_s: Option<u64>,
    verdict: Option<Verdict>,
}

impl Experiment {
    /// Begins with the ramp's first share.
    ///
    /// # Errors
    ///
    /// A duration that is too short for the ramp.
    pub fn start(design: Design, host: String, now_s: u64) -> Result<Self, DesignError> {
        design.check()?;
        Ok(Self {
            hosts: BTreeMap::from([(host, design.seed)]),
            design,
            started_s: now_s,
            raised_s: now_s,
            steps: vec![Step::default()],
            gain_proven_s: None,
            verdict: None,
        })
    }

    /// What it compares.
    pub const fn design(&self) -> &Design {
        &self.design
    }

    /// The hosts whose counts are in it.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.hosts.keys().map(String::as_str)
    }

    /// When it began, seconds.
    pub const fn started_s(&self) -> u64 {
        self.started_s
    }

    /// When the present share was set, seconds.
    pub const fn raised_s(&self) -> u64 {
        self.raised_s
    }

    /// Which share of the ramp is the present one, from 0.
    pub fn step(&self) -> usize {
        self.steps.len().saturating_sub(1)
    }

    /// How it ended; `None` while it runs.
    pub const fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// When the gain was proven, seconds.
    pub const fn gain_proven_s(&self) -> Option<u64> {
        self.gain_proven_s
    }

    /// The share of connections to be treated now, 0 to 1.
    ///
    /// A proven gain without `promote` keeps the last share, with a control arm that harm is still judged by.
    pub fn share(&self) -> f64 {
        match self.verdict {
            None | Some(Verdict::GainProven { promoted: false }) => self.present_share(),
            Some(Verdict::GainProven { promoted: true }) => 1.0,
            Some(
                Verdict::Harm { .. } | Verdict::Invalid | Verdict::Inconclusive | Verdict::Stopped,
            ) => 0.0,
        }
    }

    /// All that was counted, by arm.
    pub fn counts(&self) -> Arms<Counts> {
        let all = self.steps.iter().map(|step| step.settling + step.settled);
        all.fold(Arms::default(), |sum, arms| sum + arms)
    }

    /// Takes in what was counted since the last time, and judges. What comes after the end is left out.
    ///
    /// At most one thing changes at a time; the next does when it is asked again. In this order:
    ///
    /// 1. A sample-ratio mismatch of [`MISMATCH`] ends it as invalid.
    /// 2. Harm of [`HARM`] in any outcome, and in excess of what is [tolerated](Outcome::tolerated), ends it.
    /// 3. A gain of [`GAIN`] with no harm of [`SUSPECTED_HARM`] is proven, and stays so.
    /// 4. A step is complete after [`Design::step_s`] and [`STEP_ATTEMPTS`] treated attempts, with no harm suspected
    ///    and no spill-over. After the last one a proven gain ends it.
    /// 5. At the end of its duration it is inconclusive, also where a gain was proven at a part of the ramp.
    /// 6. After a complete step the next share follows.
    pub fn observe(&mut self, increments: &Increments, now_s: u64) -> Option<Event> {
        if !matches!(
            self.verdict,
            None | Some(Verdict::GainProven { promoted: false })
        ) {
            return None;
        }
        self.count(increments, now_s);
        if self.mismatch().reaches(Direction::Either, MISMATCH) {
            return Some(self.end(Verdict::Invalid));
        }
        if let Some(outcome) = self.harm(HARM) {
            return Some(self.end(Verdict::Harm { outcome }));
        }
        if self.verdict.is_some() {
            return None;
        }
        let suspected = self.harm(SUSPECTED_HARM).is_some();
        if self.gain_proven_s.is_none() && !suspected && self.gain().reaches(Direction::Gain, GAIN)
        {
            self.gain_proven_s = Some(now_s);
            return Some(Event::GainProven);
        }
        let complete = now_s.saturating_sub(self.raised_s) >= self.design.step_s()
            && self.step_attempts() >= STEP_ATTEMPTS
            && !suspected
            && !self.spill_over().is_suspected();
        let last = self.steps.len() >= self.design.ramp.shares().len();
        if complete && last && self.gain_proven_s.is_some() {
            let promoted = self.design.promote;
            return Some(self.end(Verdict::GainProven { promoted }));
        }
        if now_s.saturating_sub(self.started_s) >= self.design.duration_s {
            return Some(self.end(Verdict::Inconclusive));
        }
        (complete && !last).then(|| {
            self.steps.push(Step::default());
            self.raised_s = now_s;
            let share = self.present_share();
            Event::Raised { share }
        })
    }

    /// Ends it, unless it has ended: no connection is treated any more.
    pub fn stop(&mut self) {
        if self.share() > 0.0 {
            self.verdict = Some(Verdict::Stopped);
        }
    }

    /// The first outcome by which harm is suspected: it holds the ramp and the conclusion of a gain.
    pub fn suspected_harm(&self) -> Option<Outcome> {
        self.harm(SUSPECTED_HARM)
    }

    /// What the counts say now.
    pub fn assess(&self) -> Assessment {
        let harm = |outcome| (outcome, self.harm_by(outcome).ln_e(Direction::Harm));
        let gain = self.gain();
        Assessment {
            gain_ln_e: gain.ln_e(Direction::Gain),
            harm_ln_e: Outcome::ALL.into_iter().map(harm).collect(),
            mismatch_ln_e: self.mismatch().ln_e(Direction::Either),
            ratio: Interval::of(&gain, 0.95),
            likeliest_ratio: gain.likeliest_ratio(),
            spill_over: self.spill_over(),
        }
    }

    fn count(&mut self, increments: &Increments, now_s: u64) {
        let first = self.steps.len() == 1;
        let settling = !first && now_s.saturating_sub(self.raised_s) < SETTLING_S;
        let block_s = self.design.step_s() / BLOCKS_A_STEP;
        let Some(step) = self.steps.last_mut() else {
            return;
        };
        if settling {
            step.settling += increments.counts;
        } else {
            step.settled += increments.counts;
            // After a proven gain the ramp is at its end, and nothing is compared any more.
            if self.verdict.is_none() {
                let control = increments.counts.control;
                step.blocks
                    .add(control, &increments.control_rtt, now_s, block_s);
            }
        }
    }

    fn end(&mut self, verdict: Verdict) -> Event {
        self.verdict = Some(verdict);
        Event::Ended(verdict)
    }

    fn present_share(&self) -> f64 {
        let shares = self.design.ramp.shares();
        let present = shares.get(self.steps.len().saturating_sub(1));
        present.map_or(0.0, |share| share.get())
    }

    /// Treated attempts at the present share; [`STEP_ATTEMPTS`] complete a step.
    pub fn step_attempts(&self) -> u64 {
        let present = self.steps.last();
        present.map_or(0, |step| (step.settling + step.settled).treated.attempts)
    }

    /// The counts at each share, each with the share its arms were drawn with: those of an outcome that came while a
    /// step settled are left out, as some are of the share before. When they came says nothing about their arm.
    fn settled(&self, count: impl Fn(&Counts) -> u64) -> Evidence {
        self.tallies(|step| step.settled, count)
    }

    fn gain(&self) -> Evidence {
        self.settled(|counts| counts.of(PRIMARY))
    }

    fn mismatch(&self) -> Evidence {
        self.settled(|counts| counts.attempts)
    }

    /// With what came while a step settled: the share was lower when some of it was drawn, so that harm is rather
    /// taken for too small. An abort long after the connection began is no different.
    fn harm_by(&self, outcome: Outcome) -> Evidence {
        self.tallies(
            |step| step.settling + step.settled,
            |counts| counts.of(outcome),
        )
    }

    /// The first outcome that has reached an e-value of harm, also against "no more than is tolerated" where something
    /// is. That second one takes connections for independent; it can only stop later than the first alone would.
    fn harm(&self, e: f64) -> Option<Outcome> {
        let treated = self.counts().treated;
        let intolerable = |outcome: Outcome| {
            let bad = treated.of(outcome);
            outcome.tolerated().is_none_or(|share| {
                let tally = Tally {
                    share,
                    treated: bad,
                    control: treated.attempts.saturating_sub(bad),
                };
                Evidence::of(&[tally]).reaches(Direction::Harm, e)
            })
        };
        Outcome::ALL.into_iter().find(|outcome| {
            self.harm_by(*outcome).reaches(Direction::Harm, e) && intolerable(*outcome)
        })
    }

    fn tallies(
        &self,
        arms: impl Fn(&Step) -> Arms<Counts>,
        count: impl Fn(&Counts) -> u64,
    ) -> Evidence {
        let tally = |(share, step)| {
            let arms = arms(step);
            Tally {
                share,
                treated: count(&arms.treated),
                control: count(&arms.control),
            }
        };
        let shares = self.design.ramp.shares().iter().copied();
        let tallies: Vec<Tally> = shares.zip(&self.steps).map(tally).collect();
        Evidence::of(&tallies)
    }

    /// How the control arm has changed with the share.
    pub fn spill_over(&self) -> SpillOver {
        match self.steps.as_slice() {
            [first, .., present] => SpillOver::between(&first.blocks, &present.blocks),
            _ => SpillOver::default(),
        }
    }
}
