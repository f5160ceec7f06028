//! Views of an experiment.

use std::{collections::BTreeMap, time::Duration};

use rto_agent_core::{
    policy::Share,
    wire::{experiments::ExperimentView, histogram::HistogramView, types::ExperimentSummary},
};
use rto_model::tune::{
    evidence::Ratio,
    experiment::{
        Arms, Counts, Event, Experiment, GAIN, HARM, Outcome, STEP_ATTEMPTS, ShareResult, Unit,
        Verdict,
    },
};

use super::Record;

/// An arm without connections for this long causes a warning, milliseconds.
const EMPTY_MS: u64 = 600_000;

impl Record {
    /// The full view.
    pub fn view(&self) -> ExperimentView {
        ExperimentView {
            text: self.text(),
            next: self.next(),
            share: self.share(),
            by: Some(self.by),
            started_s: Some(self.started_s),
            ended_s: self.ended_s,
            ..merged(&self.experiment, self.connect_time.clone())
        }
    }

    /// The short form.
    pub fn summary(&self) -> ExperimentSummary {
        ExperimentSummary {
            state: self.state(),
            text: self.text(),
            share: self.share(),
            e_values: e_values(&self.experiment),
        }
    }

    /// The state in a sentence.
    pub fn text(&self) -> String {
        let policy = &self.design().policy;
        let unit = self.design().unit.plural();
        let verdict = match self.experiment.verdict() {
            None => {
                let proven = self.experiment.is_gain_proven();
                let proven = if proven { "; a gain is proven" } else { "" };
                return format!("{}{proven}", self.treated());
            }
            Some(Verdict::GainProven { promoted: true }) => {
                return format!("gain proven: all {unit} are treated");
            }
            Some(Verdict::GainProven { promoted: false }) if !self.is_released => {
                return format!(
                    "gain proven: {}, and harm is still judged; rto-agent experiment clear {policy} treats all",
                    self.treated()
                );
            }
            Some(Verdict::Stopped) => match &self.stopped_by {
                Some(why) => format!("stopped: {why}"),
                None => "stopped".to_owned(),
            },
            Some(Verdict::Inconclusive) if self.design().unit == Unit::Peer => {
                "its maximum duration has passed".to_owned()
            }
            Some(verdict) => verdict_text(verdict),
        };
        if self.is_released {
            format!("{verdict}; the policy is active as configured")
        } else {
            format!(
                "{verdict}; none of its {unit} is treated until the policy's settings change, or \
                 until rto-agent experiment clear {policy} activates the policy as configured"
            )
        }
    }

    /// "5% of connections are treated, share 1 of 3".
    fn treated(&self) -> String {
        let shares = self.design().ramp.shares().len();
        let step = match shares {
            1 => String::new(),
            _ => format!(", share {} of {shares}", self.experiment.step() + 1),
        };
        format!(
            "{} of {} are treated{step}",
            percent(self.share()),
            self.design().unit.plural()
        )
    }

    /// Why no connection is treated, or which arm has no connections.
    pub fn warning(&self) -> Option<String> {
        if self.share() == 0.0 {
            return Some(self.text());
        }
        let Arms { treated, control } = self.experiment.counts().map(Counts::drawn);
        let empty = match (treated, control) {
            (0, 0) => {
                "no attempt in either arm for ten minutes: check that the policy covers its peers"
            }
            (0, _) => {
                "no connection in the treated arm for ten minutes: too few peers for two arms"
            }
            (_, 0) => {
                "no connection in the control arm for ten minutes: too few peers for two arms"
            }
            _ => return None,
        };
        let is_due = self.is_counting() && self.experiment.elapsed_ms() >= EMPTY_MS;
        is_due.then(|| empty.to_owned())
    }

    /// An event in a sentence.
    pub fn describe(&self, event: Event) -> String {
        match event {
            Event::Raised { share } => format!("raised to {} of connections", percent(share)),
            Event::GainProven => format!(
                "a gain is proven; the ramp continues; {}",
                answer(&self.experiment)
            ),
            Event::Ended(_) => format!("{}; {}", self.text(), answer(&self.experiment)),
        }
    }

    /// What happens next, one item each.
    fn next(&self) -> Vec<String> {
        let experiment = &self.experiment;
        if experiment.verdict().is_some() || self.is_released {
            return Vec::new();
        }
        let left = duration(experiment.left_s());
        let Some(evidence) = experiment.assess() else {
            return vec![format!("ends in {left}")];
        };
        let mut next = Vec::new();
        if self.begins_in_ms > 0 {
            next.push("counting starts shortly".to_owned());
        }
        let is_last = experiment.is_at_last_share();
        let shares = self.design().ramp.shares();
        let step = match shares.get(experiment.step() + 1) {
            Some(share) => format!("{} of connections are treated", percent(share.get())),
            None if self.design().promote => "all connections are treated".to_owned(),
            None => "ends".to_owned(),
        };
        let mut needs = Vec::new();
        if experiment.step_left_s() > 0 {
            needs.push(format!("another {}", duration(experiment.step_left_s())));
        }
        let attempts = experiment.step_attempts();
        if attempts < STEP_ATTEMPTS {
            needs.push(format!(
                "{} more treated connections",
                STEP_ATTEMPTS - attempts
            ));
        }
        if is_last && !experiment.is_gain_proven() {
            needs.push(format!(
                "a proven gain (e = {} of {GAIN})",
                number(evidence.gain_e)
            ));
        } else if is_last && self.design().promote {
            needs.push("a ratio at this share whose interval is below 1".to_owned());
        }
        if let Some(outcome) = experiment.suspected_harm() {
            let e = evidence.harm_e.get(&outcome).copied().unwrap_or_default();
            needs.push(format!(
                "the suspicion of harm ({}, e = {}) to pass; harm is proven at {HARM}",
                outcome.name(),
                number(e)
            ));
        }
        match needs.is_empty() {
            true => next.push(step),
            false => next.push(format!("{step} after {}", needs.join(", "))),
        }
        next.push(format!(
            "ends inconclusive in {left}, unless a gain is proven at all shares"
        ));
        next
    }
}

/// The view of the counts alone, of one host or of several merged.
pub fn merged(experiment: &Experiment, connect_time: Arms<HistogramView>) -> ExperimentView {
    let design = experiment.design();
    ExperimentView {
        answer: answer(experiment),
        text: match experiment.verdict() {
            Some(verdict) => verdict_text(verdict),
            None if design.unit == Unit::Peer => {
                "no verdict: peers are randomised, but connections are counted".to_owned()
            }
            None => "nothing is proven yet".to_owned(),
        },
        next: Vec::new(),
        result: experiment.result(),
        state: experiment.state(),
        gain_proven: experiment.is_gain_proven(),
        share: experiment.share(),
        unit: design.unit,
        ramp: design.ramp.clone().into(),
        step: experiment.step() + 1,
        promote: design.promote,
        name: design.identity.clone(),
        hosts: experiment.hosts().map(ToOwned::to_owned).collect(),
        by: None,
        started_s: None,
        duration_s: design.duration_s,
        elapsed_s: experiment.elapsed_ms() / 1000,
        ended_s: None,
        notes: vec![note(design.unit).to_owned()],
        counts: experiment.counts(),
        shares: experiment.results().collect(),
        evidence: experiment.assess(),
        connect_time,
        experiment: experiment.clone(),
    }
}

/// "12 of 5012 connects were bad with the policy's timers (0.24 %), 60 of 4988 with the kernel's own (1.2 %); ...".
fn answer(experiment: &Experiment) -> String {
    let ShareResult {
        share,
        counts,
        ratio,
    } = experiment.result();
    let is_active = counts.treated.attempts + counts.control.attempts > 0;
    let is_passive = counts.treated.requests + counts.control.requests > 0;
    let (outcome, of) = match is_passive && !is_active {
        true => (Outcome::LateAccepted, "accepted connections were late"),
        false => (Outcome::Bad, "connects were bad"),
    };
    let Arms { treated, control } = counts.map(|counts| part(counts, outcome));
    let at = match experiment.design().ramp.shares().len() {
        1 => String::new(),
        _ => format!(" at {}", percent(share)),
    };
    let ratio = match (experiment.design().unit, outcome) {
        (Unit::Connection, Outcome::Bad) => format!("; ratio {}", ratio_text(ratio)),
        _ => String::new(),
    };
    format!("{treated} {of}{at} with the policy's timers, {control} with the kernel's own{ratio}")
}

/// "0.20 (0.10 to 0.38)".
#[must_use]
pub fn ratio_text(ratio: Ratio) -> String {
    let text = |value: Option<f64>, none: &str| value.map_or_else(|| none.to_owned(), number);
    let (likeliest, high) = (text(ratio.likeliest, "-"), text(ratio.high, "any"));
    format!("{likeliest} ({} to {high})", number(ratio.low))
}

/// "12 of 5012 (0.239 %)".
#[expect(clippy::cast_precision_loss, reason = "a rate is an estimate")]
pub fn part(counts: &Counts, outcome: Outcome) -> String {
    let (count, all) = (counts.of(outcome), counts.all(outcome));
    match all {
        0 => format!("{count} of {all}"),
        _ => format!(
            "{count} of {all} ({:.3} %)",
            count as f64 / all as f64 * 100.0
        ),
    }
}

fn verdict_text(verdict: Verdict) -> String {
    match verdict {
        Verdict::GainProven { .. } => "gain proven".to_owned(),
        Verdict::Harm { outcome } => format!("harm proven ({})", outcome.name()),
        Verdict::Invalid => "invalid: the sizes of the arms do not match the share".to_owned(),
        Verdict::Inconclusive => "inconclusive: its maximum duration has passed and nothing is \
                                  proven"
            .to_owned(),
        Verdict::Stopped => "stopped".to_owned(),
    }
}

/// How to read the counts.
const fn note(unit: Unit) -> &'static str {
    match unit {
        Unit::Connection => {
            "a connect counts as bad until it is established; after 500 ms it stays bad"
        }
        Unit::Peer => {
            "no verdict: peers are randomised, but connections are counted, and the connections of \
             a peer are not independent"
        }
    }
}

/// The e-values by name; empty if peers are drawn.
fn e_values(experiment: &Experiment) -> BTreeMap<String, f64> {
    let Some(evidence) = experiment.assess() else {
        return BTreeMap::new();
    };
    let harm = evidence.harm_e.iter();
    let harm = harm.map(|(outcome, e)| (format!("harm-{}", outcome.name()), *e));
    let others = [
        ("gain".to_owned(), evidence.gain_e),
        ("mismatch".to_owned(), evidence.mismatch_e),
    ];
    others.into_iter().chain(harm).collect()
}

/// "5%".
#[must_use]
pub fn percent(share: f64) -> String {
    Share::of_ratio(share).to_string()
}

/// "2h 10m".
#[must_use]
pub fn duration(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

/// Two decimals below 100, none below a million, then scientific notation.
#[must_use]
pub fn number(value: f64) -> String {
    if value < 100.0 {
        format!("{value:.2}")
    } else if value < 1e6 {
        format!("{value:.0}")
    } else {
        format!("{value:.0e}")
    }
}
