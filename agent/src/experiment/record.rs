//! One experiment, as it is kept through restarts.

use rto_model::tune::experiment::{
    Arms, Counts, Design, DesignError, Event, Experiment, Increments, Outcome, SETTLING_S, Unit,
    Verdict,
};
use serde::{Deserialize, Serialize};

use super::{
    counted::{Counted, is_untouched},
    latency::Latency,
};
use crate::{
    datapath::ArmStatistics,
    policy::{ControlArm, Share},
    wire::{
        experiments::{Evidence, State},
        types::Caller,
    },
};

/// Blocks of time that are kept of latencies after the end: between 20 and so many, for the bootstrap.
const ENDED_BLOCKS: usize = 40;

/// An experiment, and what is needed to go on with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub(super) evidence: Evidence,
    pub(super) by: Caller,
    /// The counters at the last look: what they have grown by since is counted at the next one, also after a restart.
    pub(super) before: Arms<Counted>,
    /// What was counted before is left out: arms of connections were drawn with another share, seconds.
    pub(super) counts_from_s: u64,
    pub(super) latency: Latency,
    /// When it ended, seconds.
    pub(super) ended_s: Option<u64>,
    /// Why it was stopped, if that was not asked for.
    pub(super) stopped_by: Option<String>,
    /// The policy is in force as configured: only the verdict is kept.
    pub(super) is_released: bool,
}

impl Record {
    /// Begins with what the counters are before the arms are drawn.
    ///
    /// Where the policy has counted anything, connections of before are open, all or most of them treated: their
    /// handshakes may fail for another [`SETTLING_S`], which is left out, and they may end at any time.
    ///
    /// # Errors
    ///
    /// A duration that is too short for the ramp.
    pub fn start(
        design: Design,
        host: String,
        by: Caller,
        statistics: &ArmStatistics,
        now_s: u64,
    ) -> Result<Self, DesignError> {
        let is_untouched = is_untouched(statistics);
        let counts_from_s = if is_untouched {
            now_s
        } else {
            now_s.saturating_add(SETTLING_S)
        };
        Ok(Self {
            evidence: Evidence {
                experiment: Experiment::start(design, host, counts_from_s)?,
                unjudged: Arms::default(),
                judges_ends: is_untouched,
            },
            by,
            before: Counted::of(statistics),
            counts_from_s,
            latency: Latency::new(counts_from_s),
            ended_s: None,
            stopped_by: None,
            is_released: false,
        })
    }

    pub(super) const fn experiment(&self) -> &Experiment {
        &self.evidence.experiment
    }

    pub(super) fn design(&self) -> &Design {
        self.experiment().design()
    }

    /// How it stands.
    pub fn state(&self, now_s: u64) -> State {
        let verdict = self.experiment().verdict();
        if verdict.is_none() && now_s < self.counts_from_s {
            return State::Settling;
        }
        verdict.into()
    }

    /// Whether it counts what happens.
    pub fn is_counting(&self) -> bool {
        !self.is_released
            && matches!(
                self.experiment().verdict(),
                None | Some(Verdict::GainProven { promoted: false })
            )
    }

    /// The share that is treated now, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.is_released {
            1.0
        } else {
            self.experiment().share()
        }
    }

    /// The control arm that the policy has for it; `None` where it is in force as configured.
    pub fn control(&self) -> Option<ControlArm> {
        let share = Share::of_ratio(self.share()).complement();
        (share > Share::ZERO).then(|| ControlArm {
            share,
            seed: self.design().seed,
            by_peer: self.design().unit == Unit::Peer,
        })
    }

    /// Takes in what was counted since the last look, and judges.
    pub fn look(&mut self, statistics: &ArmStatistics, now_s: u64) -> Option<Event> {
        let now = Counted::of(statistics);
        let grown = Arms {
            treated: now.treated.since(&self.before.treated),
            control: now.control.since(&self.before.control),
        };
        self.before = now;
        if now_s < self.counts_from_s || !self.is_counting() {
            return None;
        }
        let Arms { treated, control } = grown;
        let counts = Arms {
            treated: treated.counts,
            control: control.counts,
        };
        self.latency.add(
            &Arms {
                treated: treated.handshake,
                control: control.handshake,
            },
            now_s,
        );
        let (judged, unjudged) = self.split(counts);
        self.evidence.unjudged += unjudged;
        let increments = Increments {
            counts: judged,
            control_rtt: control.rtt,
        };
        let event = self.evidence.experiment.observe(&increments, now_s);
        if matches!(event, Some(Event::Ended(_))) {
            self.ended_s = Some(now_s);
        }
        self.trim();
        event
    }

    /// After its end: what is only needed to go on is forgotten, and latencies are kept in fewer blocks.
    pub(super) fn trim(&mut self) {
        if !self.is_counting() {
            self.before = Arms::default();
            self.latency.coarsen(ENDED_BLOCKS);
        }
    }

    /// The same, and of latencies only their sum is kept.
    pub(super) fn trim_more(&mut self) {
        self.latency.coarsen(1);
    }

    /// What is judged of some counts, and what is only shown.
    fn split(&self, counts: Arms<Counts>) -> (Arms<Counts>, Arms<Counts>) {
        let judged = |outcome, count| {
            if self.evidence.judges(outcome) {
                count
            } else {
                0
            }
        };
        let of = |counts: Counts| {
            if self.design().unit == Unit::Peer {
                return (Counts::default(), counts);
            }
            let dsack = judged(Outcome::Dsack, counts.dsack);
            let aborted = judged(Outcome::Aborted, counts.aborted);
            let unjudged = Counts {
                dsack: counts.dsack - dsack,
                aborted: counts.aborted - aborted,
                ..Counts::default()
            };
            let judged = Counts {
                dsack,
                aborted,
                ..counts
            };
            (judged, unjudged)
        };
        let (treated, control) = (of(counts.treated), of(counts.control));
        let arms = |treated, control| Arms { treated, control };
        (arms(treated.0, control.0), arms(treated.1, control.1))
    }

    /// The counters have begun anew, with nothing in them.
    pub fn counters_anew(&mut self) {
        self.before = Arms::default();
    }

    /// Arms were drawn with another share than the experiment's, up to now: what was counted since the last look is
    /// left out, and what such connections may still come to.
    pub fn resettle(&mut self, now_s: u64) {
        self.counts_from_s = now_s.saturating_add(SETTLING_S);
        self.evidence.judges_ends = false;
    }

    /// Ends it, unless it has ended; no connection is treated then.
    pub fn stop(&mut self, now_s: u64) {
        if self.is_counting() {
            self.evidence.experiment.stop();
            self.ended_s = Some(now_s);
        }
        self.trim();
    }

    /// Ends it, unless it has ended, as the policy is another one; that is in force as configured.
    pub fn release(&mut self, why: &str, now_s: u64) {
        if self.is_counting() {
            self.stop(now_s);
            self.stopped_by = Some(why.to_owned());
        }
        self.is_released = true;
    }
}
