//! Text output for experiments.

use std::time::{Duration, UNIX_EPOCH};

use rto_agent_core::{
    policy::PolicyName,
    printable,
    wire::experiments::{ExperimentAnswer, ExperimentView, ExperimentsAnswer},
};
use rto_agent_daemon::experiment::{duration, number, part, percent, ratio_text};
use rto_model::tune::experiment::{Arms, GAIN, HARM, MISMATCH, Outcome};

use crate::commands::{stats::quantile, table};

/// The result of starting, stopping or clearing an experiment.
pub(super) fn answer(answer: &ExperimentAnswer, policy: &PolicyName) -> String {
    let mut text = String::new();
    if let Some(view) = &answer.experiment {
        text.push_str(&format!("{policy}: {}\n{}", view.text, next(view)));
    }
    text.push_str(&table::remarks("note", &answer.notes));
    text
}

/// All experiments.
pub(in crate::commands) fn all(answer: &ExperimentsAnswer) -> String {
    if answer.experiments.is_empty() {
        return "no experiments; start one with rto-agent experiment start POLICY\n".to_owned();
    }
    let all = answer.experiments.iter();
    let texts: Vec<String> = all.map(|(policy, view)| one(policy, view)).collect();
    texts.join("\n")
}

fn one(policy: &PolicyName, view: &ExperimentView) -> String {
    let mut text = format!("{policy}: {}\n  {}\n{}", view.answer, view.text, next(view));
    text.push_str(&counts(view));
    text.push_str(&connect_times(view));
    if let Some(evidence) = &view.evidence {
        text.push_str(&format!(
            "  gain e = {} (proven at {GAIN}; harm at {HARM}), mismatch e = {} (invalid at {MISMATCH})\n",
            number(evidence.gain_e),
            number(evidence.mismatch_e)
        ));
    }
    let ramp: Vec<_> = view.ramp.iter().map(|share| percent(*share)).collect();
    text.push_str(&format!(
        "  {}: {} of {}{}; {} of {}\n",
        printable::text(&view.name),
        ramp.join(", "),
        view.unit.plural(),
        if view.promote { ", then all" } else { "" },
        duration(view.elapsed_s),
        duration(view.duration_s),
    ));
    if view.hosts.len() > 1 {
        let hosts = view.hosts.join(", ");
        text.push_str(&format!("  hosts: {}\n", printable::text(&hosts)));
    }
    if let (Some(started_s), Some(by)) = (view.started_s, view.by) {
        text.push_str(&format!("  started {} by {by}\n", time(started_s)));
    }
    if let Some(ended_s) = view.ended_s {
        text.push_str(&format!("  ended {}\n", time(ended_s)));
    }
    text.push_str(&table::remarks("  note", &view.notes));
    text
}

fn next(view: &ExperimentView) -> String {
    table::remarks("  next", &view.next)
}

/// The counts of both arms.
fn counts(view: &ExperimentView) -> String {
    let row = |name: &str, treated: &str, control: &str, last: &str| {
        let line = format!("  {name:16}{treated:>26}{control:>26}{last:>24}");
        line.trim_end().to_owned() + "\n"
    };
    let mut text = row("", "TREATED", "CONTROL", "HARM, e");
    for outcome in Outcome::ALL {
        let Arms { treated, control } = view.counts.map(|counts| part(counts, outcome));
        let evidence = view.evidence.as_ref();
        let e = evidence.and_then(|evidence| evidence.harm_e.get(&outcome));
        let e = e.map_or_else(|| "no verdict".to_owned(), |e| number(*e));
        text.push_str(&row(outcome.name(), &treated, &control, &e));
    }
    if view.shares.len() > 1 {
        text.push_str(&row("bad by share", "TREATED", "CONTROL", "RATIO"));
        for result in &view.shares {
            let Arms { treated, control } = result.counts.map(|counts| part(counts, Outcome::Bad));
            let ratio = ratio_text(result.ratio);
            text.push_str(&row(&percent(result.share), &treated, &control, &ratio));
        }
    }
    text
}

fn connect_times(view: &ExperimentView) -> String {
    let Arms { treated, control } = view.connect_time.map(|times| {
        format!(
            "p50 {}, p99 {}",
            quantile(times, 0.5),
            quantile(times, 0.99)
        )
    });
    format!("  connect times: treated {treated}; control {control} (not used for the verdict)\n")
}

fn time(at_s: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at_s)).to_string()
}
