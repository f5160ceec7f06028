//! An experiment as it is told.

use std::{collections::BTreeMap, time::Duration};

use rto_model::{
    advice::Distribution,
    tune::experiment::{Arms, Counts, Event, GAIN, HARM, Outcome, STEP_ATTEMPTS, Verdict},
};

use super::Record;
use crate::{
    policy::Share,
    wire::experiments::{
        ArmsView, Evidence, ExperimentSummary, ExperimentView, OutcomeView, QuantileView,
        RatioView, State, UnitView, e_value, outcome_name,
    },
};

/// Quantiles of latency that are shown.
const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];

impl Record {
    /// All of it.
    pub fn view(&self, now_s: u64) -> ExperimentView {
        let is_by_connection = self.evidence.unit() == UnitView::Connection;
        ExperimentView {
            state: self.state(now_s),
            text: self.text(now_s),
            share: self.share(),
            by: Some(self.by),
            ended_s: self.ended_s,
            waits_for: self.waits_for(now_s),
            handshake: {
                let total = self.latency.total();
                let all = QUANTILES.into_iter();
                all.map(|quantile| {
                    let bounds = is_by_connection.then(|| self.latency.quantiles(quantile));
                    quantile_view(quantile, &total, bounds.flatten())
                })
                .collect()
            },
            ..view(self.evidence.clone())
        }
    }

    /// In short.
    pub fn summary(&self, now_s: u64) -> ExperimentSummary {
        ExperimentSummary {
            state: self.state(now_s),
            text: self.text(now_s),
            share: self.share(),
            e_values: e_values(&self.evidence),
        }
    }

    /// How it stands, in a sentence.
    pub fn text(&self, now_s: u64) -> String {
        let policy = &self.design().policy;
        let unit = self.evidence.unit().plural();
        let clear = || {
            format!(
                "none of its {unit} is treated until its settings change or rto-agent experiment clear {policy} puts \
                 it in force as configured"
            )
        };
        let verdict = match (self.state(now_s), self.experiment().verdict()) {
            (State::Settling, _) => {
                return format!(
                    "{}; it counts in {}, when connections of before have settled",
                    self.treated(),
                    duration(self.counts_from_s.saturating_sub(now_s))
                );
            }
            (_, None) => {
                let proven = self.experiment().gain_proven_s().is_some();
                let proven = if proven { "; a gain is proven" } else { "" };
                return format!("{}{proven}", self.treated());
            }
            (_, Some(Verdict::GainProven { promoted: true })) => {
                return format!("gain proven: all {unit} are treated");
            }
            (_, Some(Verdict::GainProven { promoted: false })) if !self.is_released => {
                return format!(
                    "gain proven: {}, and harm is still judged; rto-agent experiment clear {policy} treats all",
                    self.treated()
                );
            }
            (_, Some(Verdict::GainProven { promoted: false })) => "gain proven".to_owned(),
            (_, Some(Verdict::Harm { outcome })) => {
                format!("harm proven ({})", outcome_name(outcome))
            }
            (_, Some(Verdict::Invalid)) => {
                "invalid: the arms do not have the connections that they should have".to_owned()
            }
            (_, Some(Verdict::Inconclusive)) => match self.evidence.unit() {
                UnitView::Connection => {
                    "inconclusive: its time is over and nothing is proven".to_owned()
                }
                UnitView::Peer => "its time is over".to_owned(),
            },
            (_, Some(Verdict::Stopped)) => match &self.stopped_by {
                Some(why) => format!("stopped: {why}"),
                None => "stopped".to_owned(),
            },
        };
        if self.is_released {
            format!("{verdict}; the policy is in force as configured")
        } else {
            format!("{verdict}; {}", clear())
        }
    }

    /// "5% of connections are treated, share 1 of 3".
    fn treated(&self) -> String {
        let shares = self.design().ramp.shares().len();
        let step = match shares {
            1 => String::new(),
            _ => format!(", share {} of {shares}", self.experiment().step() + 1),
        };
        format!(
            "{} of {} are treated{step}",
            percent(self.share()),
            self.evidence.unit().plural()
        )
    }

    /// Why no connection of a policy is treated that is in force, if so.
    pub fn warning(&self, now_s: u64) -> Option<String> {
        (self.share() == 0.0).then(|| self.text(now_s))
    }

    /// What happened, in a sentence.
    pub fn told(&self, event: Event, now_s: u64) -> String {
        match event {
            Event::Raised { share } => {
                format!("raised to {} of connections", percent(share))
            }
            Event::GainProven => {
                let ln_e = self.experiment().assess().gain_ln_e;
                format!(
                    "a gain is proven (e = {}); the ramp goes on",
                    number(e_value(ln_e))
                )
            }
            Event::Ended(_) => self.text(now_s),
        }
    }

    fn waits_for(&self, now_s: u64) -> Vec<String> {
        let experiment = self.experiment();
        let left = |end_s: u64| duration(end_s.saturating_sub(now_s));
        let end_s = experiment.started_s() + self.design().duration_s;
        match self.state(now_s) {
            State::Settling => {
                return vec![format!(
                    "outcomes of connections that began before, for another {}",
                    left(self.counts_from_s)
                )];
            }
            State::Running => {}
            _ => return Vec::new(),
        }
        if self.evidence.unit() == UnitView::Peer {
            return vec![format!("the end of its time, in {}", left(end_s))];
        }
        let mut waits = Vec::new();
        let is_last = experiment.step() + 1 >= self.design().ramp.shares().len();
        let step_end_s = experiment.raised_s() + self.design().step_s();
        if step_end_s > now_s {
            waits.push(format!(
                "time: this share lasts another {} at least",
                left(step_end_s)
            ));
        }
        let attempts = experiment.step_attempts();
        if attempts < STEP_ATTEMPTS {
            waits.push(format!(
                "attempts: {attempts} of {STEP_ATTEMPTS} treated ones at this share"
            ));
        }
        if let Some(outcome) = experiment.suspected_harm() {
            let ln_e = experiment.assess().harm_ln_e.get(&outcome).copied();
            waits.push(format!(
                "suspected harm ({}, e = {}): it holds the ramp until it is proven, at {HARM}, or no longer suspected",
                outcome_name(outcome),
                number(e_value(ln_e.unwrap_or_default()))
            ));
        }
        if experiment.spill_over().is_suspected() {
            waits.push(
                "spill-over: the control arm fares worse than at the first share, which holds the ramp".to_owned(),
            );
        }
        if experiment.gain_proven_s().is_none() && is_last {
            let ln_e = experiment.assess().gain_ln_e;
            waits.push(format!(
                "a gain: e = {} of {GAIN}, for another {}",
                number(e_value(ln_e)),
                left(end_s)
            ));
        }
        waits
    }
}

/// Those of several hosts as one.
pub fn merged(evidence: Evidence) -> ExperimentView {
    let mut view = view(evidence);
    if view.unit == UnitView::Peer {
        return view;
    }
    let verdict = view.evidence.experiment.verdict();
    view.text = match verdict {
        None => "nothing is proven yet".to_owned(),
        Some(Verdict::Harm { outcome }) => format!("harm proven ({})", outcome_name(outcome)),
        Some(Verdict::GainProven { .. }) => "gain proven".to_owned(),
        Some(Verdict::Invalid) => {
            "invalid: the arms do not have the connections that they should have".to_owned()
        }
        Some(Verdict::Inconclusive | Verdict::Stopped) => "nothing is proven".to_owned(),
    };
    view
}

/// What the evidence alone says.
fn view(evidence: Evidence) -> ExperimentView {
    let (experiment, unit) = (&evidence.experiment, evidence.unit());
    let counts = evidence.counts();
    let assessment = experiment.assess();
    let is_by_connection = unit == UnitView::Connection;
    let design = experiment.design();
    let harm_e = |outcome| {
        let ln_e = assessment.harm_ln_e.get(&outcome).copied();
        ln_e.filter(|_| evidence.judges(outcome)).map(e_value)
    };
    ExperimentView {
        state: experiment.verdict().into(),
        text: "not told: counts are of connections, draws of peers".to_owned(),
        share: experiment.share(),
        unit,
        ramp: design
            .ramp
            .shares()
            .iter()
            .map(|share| share.get())
            .collect(),
        step: experiment.step() + 1,
        promote: design.promote,
        name: design.identity.clone(),
        hosts: experiment.hosts().map(ToOwned::to_owned).collect(),
        by: None,
        started_s: experiment.started_s(),
        duration_s: design.duration_s,
        ended_s: None,
        gain_proven_s: experiment.gain_proven_s(),
        waits_for: Vec::new(),
        notes: notes(&evidence),
        attempts: arms(counts, |counts| counts.attempts),
        outcomes: Outcome::ALL
            .into_iter()
            .map(|outcome| OutcomeView {
                outcome: outcome_name(outcome).to_owned(),
                count: arms(counts, |counts| counts.of(outcome)),
                rate: arms(counts, |counts| rate(counts, outcome)),
                harm_e: harm_e(outcome),
            })
            .collect(),
        ratio: is_by_connection.then_some(RatioView {
            likeliest: assessment.likeliest_ratio,
            low: assessment.ratio.low,
            high: assessment.ratio.high,
        }),
        gain_e: is_by_connection.then(|| e_value(assessment.gain_ln_e)),
        mismatch_e: is_by_connection.then(|| e_value(assessment.mismatch_ln_e)),
        spill_over: assessment.spill_over.into(),
        handshake: Vec::new(),
        evidence,
    }
}

fn notes(evidence: &Evidence) -> Vec<String> {
    if evidence.unit() == UnitView::Peer {
        return vec![
            "no verdict is told: counts are of connections, draws of peers, and a peer's connections fare alike"
                .to_owned(),
        ];
    }
    let mut notes = vec![
        "aborts are shown and not judged: they are counted after a retransmission, also a spurious one, of which the \
         treatment has more"
            .to_owned(),
    ];
    if !evidence.judges_ends {
        notes.push(
            "DSACKs are not judged, as connections of before the start may be among those that end"
                .to_owned(),
        );
    }
    notes
}

/// The e-values by name; none where peers are drawn.
fn e_values(evidence: &Evidence) -> BTreeMap<String, f64> {
    if evidence.unit() == UnitView::Peer {
        return BTreeMap::new();
    }
    let assessment = evidence.experiment.assess();
    let harm = assessment.harm_ln_e.iter();
    let harm = harm.filter(|(outcome, _)| evidence.judges(**outcome));
    let harm = harm.map(|(outcome, ln_e)| (format!("harm-{}", outcome_name(*outcome)), *ln_e));
    let others = [
        ("gain".to_owned(), assessment.gain_ln_e),
        ("mismatch".to_owned(), assessment.mismatch_ln_e),
    ];
    let all = others.into_iter().chain(harm);
    all.map(|(name, ln_e)| (name, e_value(ln_e))).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a rate is an estimate")]
fn rate(counts: &Counts, outcome: Outcome) -> Option<f64> {
    (counts.attempts > 0).then(|| counts.of(outcome) as f64 / counts.attempts as f64)
}

fn arms<T>(counts: Arms<Counts>, of: impl Fn(&Counts) -> T) -> ArmsView<T> {
    ArmsView {
        treated: of(&counts.treated),
        control: of(&counts.control),
    }
}

fn quantile_view(
    quantile: f64,
    total: &Arms<Distribution>,
    bounds: Option<rto_model::tune::bootstrap::Quantiles>,
) -> QuantileView {
    // What lies beyond the last bucket has no end.
    let value = |times: &Distribution| times.quantile_us(quantile).filter(|us| *us < u64::MAX);
    let bound = |of: fn(&rto_model::tune::bootstrap::Bounded) -> u64| {
        bounds.map(|bounds| ArmsView {
            treated: of(&bounds.treated),
            control: of(&bounds.control),
        })
    };
    QuantileView {
        quantile,
        value_us: ArmsView {
            treated: value(&total.treated),
            control: value(&total.control),
        },
        low_us: bound(|bounded| bounded.low_us),
        high_us: bound(|bounded| bounded.high_us),
    }
}

/// "5%".
#[must_use]
pub fn percent(share: f64) -> String {
    Share::of_ratio(share).to_string()
}

/// "2h 10m".
fn duration(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

/// Two decimals where they are seen.
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
