//! Criteria that a self-tuning timer must meet, and their evaluation.

use serde::Deserialize;

use super::{
    Outage, Results, Saturated, Timed, fleet::Prefix, scenarios::Step, tables::DEFINITION,
};
use crate::summary::{f, median, quantile, share};

/// A criterion.
#[derive(Clone, Debug, PartialEq)]
pub struct Criterion {
    /// The examined quantity.
    pub name: String,
    /// The required value.
    pub wanted: String,
    /// The found value.
    pub found: String,
    /// Whether the criterion is met.
    pub met: bool,
}

/// A criterion in the definition.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Limit {
    name: String,
    #[serde(flatten)]
    bound: Bound,
    #[serde(default)]
    unit: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Limit {
    fn judge(&self, found: f64) -> Criterion {
        let Self { name, bound, unit } = self;
        let (sign, limit, met) = match *bound {
            Bound::AtMost(limit) => ("<=", limit, found <= limit),
            Bound::AtLeast(limit) => (">=", limit, found >= limit),
        };
        Criterion {
            name: name.clone(),
            wanted: format!("{sign} {limit}{unit}"),
            found: format!("{}{unit}", digits(found)),
            met,
        }
    }
}

/// Judges the found values of a kind, in the order of the definition; `None` for values that were not examined.
fn judge(kind: &str, found: &[Option<f64>]) -> Vec<Criterion> {
    let limits = DEFINITION.criteria.get(kind).into_iter().flatten();
    let looked_at = limits.zip(found);
    let judged = looked_at.filter_map(|(limit, found)| Some(limit.judge((*found)?)));
    judged.collect()
}

/// Three decimal places, without trailing zeros.
pub(super) fn digits(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// All criteria.
pub fn criteria(results: &Results) -> Vec<Criterion> {
    let mut all = of_prefixes(&results.prefixes);
    if let Some(step) = results.steps.iter().find(|step| step.per_s == 50.0) {
        all.extend(of_step(step));
    }
    all.extend(of_outages(&results.outages));
    all.extend(of_saturated(&results.saturated));
    all.extend(of_orphans(&results.orphans));
    all
}

/// Criteria of generated prefixes.
pub fn of_prefixes(prefixes: &[Prefix]) -> Vec<Criterion> {
    let percent: Vec<f64> = prefixes.iter().map(|p| p.spurious * 100.0).collect();
    let quiet = || prefixes.iter().filter(|p| !p.eventful);
    let ratios: Vec<f64> = prefixes.iter().filter_map(|p| p.ratio).collect();
    let changes: Vec<f64> = quiet().filter_map(|p| p.changes_per_h).collect();
    let of = |values: &[f64], share| quantile(values, share).unwrap_or(f64::NAN);
    let found = [
        of(&percent, 0.99),
        of(&percent, 1.0),
        f(quiet().map(|p| p.alarms).sum()),
        of(&changes, 0.99),
        of(&changes, 1.0),
        median(&ratios).unwrap_or(f64::NAN),
    ];
    judge("prefixes", &found.map(Some))
}

/// Criteria of a step at 50 connections per second.
pub fn of_step(step: &Step) -> Vec<Criterion> {
    let found = [
        f(step.spurious),
        step.later * 100.0,
        f(step.changes as u64),
        step.timer_ms,
    ];
    judge("step", &found.map(Some))
}

/// Criteria of outages: the gain of the guarded timer in outages of up to a second, of that of the bare one; the least
/// gain in longer ones; the SYNs of a black hole, of those of the kernel.
pub fn of_outages(outages: &[Outage]) -> Vec<Criterion> {
    let gains = outages.iter().map(|one| (one, one.timed.gains_ms()));
    let (short, long): (Vec<_>, Vec<_>) = gains.partition(|(one, _)| one.seconds <= 1.0);
    let kept = short.iter().map(|(_, [bare, guarded])| guarded / bare);
    let gained = long.iter().map(|(_, [_, guarded])| *guarded);
    let syns = outages.last().map(|one| {
        let Timed {
            kernel, guarded, ..
        } = one.timed;
        share(guarded.outage_syns, kernel.outage_syns)
    });
    let found = [
        kept.reduce(f64::min).map(|kept| kept * 100.0),
        gained.reduce(f64::min),
        syns,
    ];
    judge("outages", &found)
}

/// Criteria of servers near their capacity and above it: late attempts beyond those of the kernel's own timers.
pub fn of_saturated(saturated: &[Saturated]) -> Vec<Criterion> {
    let worst = |is_of: fn(f64) -> bool| {
        let of = saturated.iter().filter(|one| is_of(one.load));
        let more = of.map(|one| {
            let Timed {
                kernel, guarded, ..
            } = one.timed;
            guarded.later_late_share() - kernel.later_late_share()
        });
        more.reduce(f64::max).map(|more| more * 100.0)
    };
    judge(
        "saturated",
        &[worst(|load| load < 1.0), worst(|load| load > 1.0)],
    )
}

/// Criteria of steps after which the daemon is dead.
pub fn of_orphans(steps: &[Step]) -> Vec<Criterion> {
    let all: Vec<_> = steps.iter().filter_map(|step| step.fell_back).collect();
    let judged = all.iter().map(|one| one.judged).max().unwrap_or(0);
    let after = all.iter().map(|one| one.spurious_after).sum();
    let all_fall_back = Limit {
        name: "daemon dead, steps: fallbacks".to_owned(),
        bound: Bound::AtLeast(f(steps.len() as u64)),
        unit: String::new(),
    };
    let mut criteria = vec![all_fall_back.judge(f(all.len() as u64))];
    criteria.extend(judge("orphans", &[f(judged), f(after)].map(Some)));
    criteria
}
