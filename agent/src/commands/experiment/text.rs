//! Experiments for people.

use std::time::{Duration, UNIX_EPOCH};

use rto_model::tune::experiment::{GAIN, HARM, MISMATCH};

use crate::{
    experiment::{number, percent},
    policy::{PolicyName, units::format_duration},
    printable,
    wire::experiments::{
        ArmsView, ChangeView, ExperimentAnswer, ExperimentView, ExperimentsAnswer, QuantileView,
        UnitView,
    },
};

/// What starting, stopping or clearing one did.
pub(super) fn answer(answer: &ExperimentAnswer, policy: &PolicyName) -> String {
    let mut text = String::new();
    if let Some(view) = &answer.experiment {
        text.push_str(&format!("{policy}: {}\n", view.text));
        text.push_str(&waits(view));
    }
    for note in &answer.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

/// All of them.
pub(super) fn all(answer: &ExperimentsAnswer) -> String {
    if answer.experiments.is_empty() {
        return "no experiment; rto-agent experiment start POLICY begins one\n".to_owned();
    }
    let all = answer.experiments.iter();
    let texts: Vec<String> = all.map(|(policy, view)| one(policy, view)).collect();
    texts.join("\n")
}

fn one(policy: &PolicyName, view: &ExperimentView) -> String {
    let ramp: Vec<_> = view.ramp.iter().map(|share| percent(*share)).collect();
    let mut text = format!(
        "{policy}: {}\n  {}: {} of {}{}, for {} since {}\n",
        view.text,
        printable::text(&view.name),
        ramp.join(", "),
        view.unit.plural(),
        if view.promote { ", then all" } else { "" },
        humantime::format_duration(Duration::from_secs(view.duration_s)),
        time(view.started_s)
    );
    if view.hosts.len() > 1 {
        let hosts = view.hosts.join(", ");
        text.push_str(&format!("  hosts: {}\n", printable::text(&hosts)));
    }
    if let Some(by) = &view.by {
        text.push_str(&format!("  started by {by}\n"));
    }
    if let Some(ended_s) = view.ended_s {
        text.push_str(&format!("  ended {}\n", time(ended_s)));
    }
    text.push_str(&waits(view));
    text.push_str(&counts(view));
    text.push_str(&verdicts(view));
    text.push_str(&latency(&view.handshake));
    for note in &view.notes {
        text.push_str(&format!("  note: {note}\n"));
    }
    text
}

fn waits(view: &ExperimentView) -> String {
    let waits = view.waits_for.iter();
    waits.map(|wait| format!("  waits for {wait}\n")).collect()
}

/// What was counted in both arms.
fn counts(view: &ExperimentView) -> String {
    let row = |name: &str, treated: &str, control: &str, e: &str| {
        let line = format!("  {name:16}{treated:>20}{control:>20}{e:>16}");
        line.trim_end().to_owned() + "\n"
    };
    let mut text = row("", "TREATED", "CONTROL", "HARM, e");
    let ArmsView { treated, control } = view.attempts;
    let (treated, control) = (treated.to_string(), control.to_string());
    text.push_str(&row("attempts", &treated, &control, ""));
    for outcome in &view.outcomes {
        let of = |count: u64, rate: Option<f64>| match rate {
            Some(rate) => format!("{count} ({:.3} %)", rate * 100.0),
            None => count.to_string(),
        };
        let e = outcome.harm_e.map(number);
        text.push_str(&row(
            &outcome.outcome,
            &of(outcome.count.treated, outcome.rate.treated),
            &of(outcome.count.control, outcome.rate.control),
            e.as_deref().unwrap_or("not judged"),
        ));
    }
    text
}

/// What that says; nothing where peers are drawn.
fn verdicts(view: &ExperimentView) -> String {
    let mut text = String::new();
    if view.unit == UnitView::Peer {
        return text;
    }
    if let Some(ratio) = view.ratio {
        text.push_str(&format!(
            "  ratio of the shares beyond 500 ms: {} ({} to {}, 95 % whenever one looks)\n",
            ratio.likeliest.map_or_else(|| "-".to_owned(), number),
            number(ratio.low),
            ratio.high.map_or_else(|| "any".to_owned(), number)
        ));
    }
    if let (Some(gain), Some(mismatch)) = (view.gain_e, view.mismatch_e) {
        text.push_str(&format!(
            "  gain: e = {}, proven from {GAIN} on; harm is proven from {HARM} on\n  mismatch of the arms: e = {}, \
             invalid from {MISMATCH} on\n",
            number(gain),
            number(mismatch)
        ));
    }
    let changed = |what: &str, change: Option<ChangeView>, of: &dyn Fn(f64) -> String| {
        change.map(|change| {
            format!(
                "  control arm, {what}: {} at the first share, {} now; a rise by {} would be seen\n",
                of(change.first),
                of(change.present),
                of(change.visible)
            )
        })
    };
    let spill_over = &view.spill_over;
    let slow = changed("beyond 500 ms", spill_over.beyond_500_ms, &|share| {
        format!("{:.3} %", share * 100.0)
    });
    let rtt = changed("median RTT", spill_over.median_rtt_us, &|us| {
        format!("{:.1} ms", us / 1000.0)
    });
    text.extend(slow.into_iter().chain(rtt));
    text
}

fn latency(quantiles: &[QuantileView]) -> String {
    let us = |us: u64| format_duration(Duration::from_micros(us));
    let of = |value: Option<u64>, bounds: Option<(u64, u64)>| match (value, bounds) {
        (None, _) => "-".to_owned(),
        (Some(value), None) => us(value),
        (Some(value), Some((low, high))) => {
            format!("{} ({} to {})", us(value), us(low), us(high))
        }
    };
    let mut text = String::new();
    for quantile in quantiles {
        let ArmsView { treated, control } = quantile.value_us;
        if treated.is_none() && control.is_none() {
            continue;
        }
        let bounds = quantile.low_us.zip(quantile.high_us);
        text.push_str(&format!(
            "  handshake p{}: {} treated, {} control\n",
            quantile.quantile * 100.0,
            of(
                treated,
                bounds.map(|(low, high)| (low.treated, high.treated))
            ),
            of(
                control,
                bounds.map(|(low, high)| (low.control, high.control))
            ),
        ));
    }
    if !text.is_empty() {
        text.push_str(
            "  (these times are shown, never tested; bounds: 90 % of draws of whole blocks of time)\n",
        );
    }
    text
}

fn time(at_s: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at_s)).to_string()
}
