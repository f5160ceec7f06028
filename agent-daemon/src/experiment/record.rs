//! One experiment, in the form that survives restarts.

use rto_agent_core::{
    policy::{ControlArm, Share},
    wire::{histogram::HistogramView, stats::ArmStatistics, types::Caller},
};
use rto_model::tune::experiment::{Arms, Design, DesignError, Event, Experiment, State, Unit};
use serde::{Deserialize, Serialize};

use super::counted::{Counted, increments};

/// How long after a change of the arms counting begins, milliseconds. Attempts that were in
/// progress have become good by then, or never will. (An attempt is good within 500 ms; the rest is
/// for the change itself.)
const BEGINS_AFTER_MS: u64 = 2000;

/// An experiment, with the state that is needed to continue it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub(super) experiment: Experiment,
    pub(super) by: Caller,
    /// When it was started, Unix seconds; only shown.
    pub(super) started_s: u64,
    /// When it ended, Unix seconds.
    pub(super) ended_s: Option<u64>,
    /// Connect times of both arms.
    pub(super) connect_time: Arms<HistogramView>,
    /// The counters at the last evaluation. The next one counts their growth, even after a restart.
    pub(super) before: Arms<Counted>,
    /// Time until counting begins, milliseconds.
    pub(super) begins_in_ms: u64,
    /// Time of the last evaluation, milliseconds of CLOCK_BOOTTIME. Time without a running daemon
    /// does not count.
    #[serde(skip)]
    pub(super) looked_ms: Option<u64>,
    /// Why the daemon stopped it; `None` if an operator did.
    pub(super) stopped_by: Option<String>,
    /// The policy is active as configured, and only the verdict is kept.
    pub(super) is_released: bool,
}

impl Record {
    /// Starts an experiment; `statistics` were read before the arms are drawn.
    ///
    /// # Errors
    ///
    /// If the duration is too short for the ramp.
    pub fn start(
        design: Design,
        host: String,
        by: Caller,
        statistics: &ArmStatistics,
        started_s: u64,
    ) -> Result<Self, DesignError> {
        let before = Counted::of(statistics);
        // Without counts, no attempt is in progress.
        let begins_in_ms = match before == Arms::default() {
            true => 0,
            false => BEGINS_AFTER_MS,
        };
        Ok(Self {
            experiment: Experiment::start(design, host)?,
            by,
            started_s,
            ended_s: None,
            connect_time: Arms::default(),
            before,
            begins_in_ms,
            looked_ms: None,
            stopped_by: None,
            is_released: false,
        })
    }

    pub(super) fn design(&self) -> &Design {
        self.experiment.design()
    }

    /// The state of the experiment.
    pub fn state(&self) -> State {
        self.experiment.state()
    }

    /// Whether the experiment is counting.
    pub fn is_counting(&self) -> bool {
        !self.is_released && self.experiment.is_counting()
    }

    /// The share that is currently treated, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.is_released {
            1.0
        } else {
            self.experiment.share()
        }
    }

    /// The control arm of the policy; `None` if the policy is active as configured.
    pub fn control(&self) -> Option<ControlArm> {
        let share = Share::of_ratio(self.share()).complement();
        (share > Share::ZERO).then(|| ControlArm {
            share,
            seed: self.design().seed,
            by_peer: self.design().unit == Unit::Peer,
        })
    }

    /// Evaluates the growth of the counters since the last call. `now_ms` is CLOCK_BOOTTIME.
    pub fn look(&mut self, statistics: &ArmStatistics, now_ms: u64, unix_s: u64) -> Option<Event> {
        let now = Counted::of(statistics);
        let grown = now.zip(&self.before, Counted::since);
        self.before = now;
        let before_ms = self.looked_ms.replace(now_ms).unwrap_or(now_ms);
        let elapsed_ms = now_ms.saturating_sub(before_ms);
        if !self.is_counting() {
            return None;
        }
        let mut increments = increments(&grown, elapsed_ms);
        if self.begins_in_ms > 0 {
            self.begins_in_ms = self.begins_in_ms.saturating_sub(elapsed_ms);
            increments.counts = Arms::default();
        } else {
            let sum = |all: &HistogramView, more: &Counted| {
                all.with(&more.connect_time, u64::saturating_add)
            };
            self.connect_time = self.connect_time.zip(&grown, sum);
        }
        let event = self.experiment.observe(&increments, elapsed_ms);
        match event {
            Some(Event::Raised { .. }) => self.arms_changed(),
            Some(Event::Ended(_)) => self.ended_s = Some(unix_s),
            Some(Event::GainProven) | None => {}
        }
        self.trim();
        event
    }

    /// Drops state that an ended experiment does not need.
    fn trim(&mut self) {
        if !self.is_counting() {
            self.before = Arms::default();
        }
    }

    /// The counters were re-created, and are 0.
    pub fn reset_counters(&mut self) {
        self.before = Arms::default();
    }

    /// The arms were drawn differently until now: ignores the counts since the last evaluation, and
    /// attempts in progress.
    pub fn arms_changed(&mut self) {
        self.begins_in_ms = BEGINS_AFTER_MS;
    }

    /// Ends the experiment, unless it has ended. No connection is treated any more.
    pub fn stop(&mut self, unix_s: u64) {
        if self.is_counting() {
            self.experiment.stop();
            self.ended_s = Some(unix_s);
        }
        self.trim();
    }

    /// Ends the experiment, unless it has ended, as the policy has changed. The policy is active as
    /// configured.
    pub fn release(&mut self, why: &str, unix_s: u64) {
        if self.is_counting() {
            self.stop(unix_s);
            self.stopped_by = Some(why.to_owned());
        }
        self.is_released = true;
    }
}
