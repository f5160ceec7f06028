//! What must hold of a timer that tunes itself, and whether it does.

use super::{Braked, Results, Saturated, fleet::Prefix, scenarios::Step};
use crate::summary::{median, quantile};

/// One thing that must hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Criterion {
    /// What is looked at.
    pub name: &'static str,
    /// What must hold.
    pub wanted: String,
    /// What was found.
    pub found: String,
    /// Whether it holds.
    pub met: bool,
}

fn at_most(name: &'static str, limit: f64, unit: &str, found: f64) -> Criterion {
    Criterion {
        name,
        wanted: format!("<= {limit}{unit}"),
        found: format!("{}{unit}", digits(found)),
        met: found <= limit,
    }
}

fn at_least(name: &'static str, limit: f64, unit: &str, found: f64) -> Criterion {
    Criterion {
        name,
        wanted: format!(">= {limit}{unit}"),
        found: format!("{}{unit}", digits(found)),
        met: found >= limit,
    }
}

/// Three digits after the point, without zeros at the end.
pub(super) fn digits(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// All of them.
#[must_use]
pub fn criteria(results: &Results) -> Vec<Criterion> {
    let mut all = of_prefixes(&results.prefixes);
    if let Some(step) = results.steps.iter().find(|step| step.per_s == 50.0) {
        all.extend(of_step(step));
    }
    all.extend(of_budget(&results.braked));
    all.extend(of_saturated(&results.saturated));
    all.extend(of_orphans(&results.orphans));
    all
}

/// Of generated prefixes.
#[must_use]
pub fn of_prefixes(prefixes: &[Prefix]) -> Vec<Criterion> {
    let percent: Vec<f64> = prefixes.iter().map(|p| p.spurious * 100.0).collect();
    let quiet = || prefixes.iter().filter(|p| !p.eventful);
    let ratios: Vec<f64> = prefixes.iter().filter_map(|p| p.ratio).collect();
    let changes: Vec<f64> = quiet().filter_map(|p| p.changes_per_h).collect();
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    let alarms = quiet().map(|p| p.alarms).sum::<u64>() as f64;
    let of = |values: &[f64], share| quantile(values, share).unwrap_or(f64::NAN);
    vec![
        at_most(
            "prefixes: spurious share, p99",
            0.1,
            " %",
            of(&percent, 0.99),
        ),
        at_most(
            "prefixes: spurious share, most",
            0.2,
            " %",
            of(&percent, 1.0),
        ),
        at_most("prefixes without events: alarms", 0.0, "", alarms),
        at_most(
            "prefixes without events: changes an hour, p99",
            2.0,
            "",
            of(&changes, 0.99),
        ),
        at_most(
            "prefixes without events: changes an hour, most",
            2.0,
            "",
            of(&changes, 1.0),
        ),
        at_most(
            "prefixes: timer / (2 x true p99.9), median",
            1.5,
            "",
            median(&ratios).unwrap_or(f64::NAN),
        ),
    ]
}

/// Of a step at 50 connections a second.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a few")]
pub fn of_step(step: &Step) -> Vec<Criterion> {
    vec![
        at_most(
            "step at 50/s: spurious connections",
            200.0,
            "",
            step.spurious as f64,
        ),
        at_most(
            "step at 50/s: spurious share from the fourth second on",
            1.0,
            " %",
            step.later * 100.0,
        ),
        at_most(
            "step at 50/s: changes in ten minutes",
            3.0,
            "",
            step.changes as f64,
        ),
        at_least(
            "step at 50/s: initial_rto after 5 s",
            300.0,
            " ms",
            step.timer_ms,
        ),
    ]
}

/// Of the budget: an overload of a minute, a short blackout and a long one. An overload of 20 s is shown only: by then the
/// kernel's own copies have not yet filled the server's queue, and a short timer fills it at once.
#[must_use]
pub fn of_budget(braked: &[Braked]) -> Vec<Criterion> {
    let [_, overload, short, long] = braked else {
        return Vec::new();
    };
    vec![
        at_most(
            "overload of 60 s, budget: SYNs an attempt, of those of the kernel",
            1.25,
            "",
            overload.budget.syns_per_attempt() / overload.kernel.syns_per_attempt(),
        ),
        at_most(
            "overload of 60 s, budget: beyond 500 ms, of the share of the kernel",
            1.15,
            "",
            overload.budget.late_share() / overload.kernel.late_share(),
        ),
        at_most(
            "blackout of 0.3 s, budget: beyond 500 ms",
            0.1,
            " %",
            short.budget.late_share() * 100.0,
        ),
        at_most(
            "blackout of 10 s, budget: SYNs an attempt, of those of the kernel",
            1.1,
            "",
            long.budget.syns_per_attempt() / long.kernel.syns_per_attempt(),
        ),
    ]
}

/// More late connections than with the kernel's own timers, of a server near its capacity, percentage points: about as
/// many as begin in 0.3 s of the 29 s that are looked at.
const MORE_LATE: f64 = 1.0;

/// Of servers near their capacity, at both loads: whether they get over a stall, and over their own queue.
#[must_use]
pub fn of_saturated(saturated: &[Saturated]) -> Vec<Criterion> {
    let servers = [
        (
            10_000.0,
            "stall, 10,000 SYNs/s, budget: beyond 500 ms later, above the share of the kernel",
        ),
        (
            1_000.0,
            "stall, 1,000 SYNs/s, budget: beyond 500 ms later, above the share of the kernel",
        ),
        (
            100.0,
            "no stall, 100 SYNs/s, budget: beyond 500 ms later, above the share of the kernel",
        ),
    ];
    let worst = |per_s: f64| {
        let of = saturated.iter().filter(|one| one.per_s == per_s);
        let more = of.map(|one| one.budget.later_late_share() - one.kernel.later_late_share());
        more.reduce(f64::max)
    };
    let found = servers
        .iter()
        .filter_map(|(per_s, name)| Some((*name, worst(*per_s)?)));
    found
        .map(|(name, more)| at_most(name, MORE_LATE, " %", more * 100.0))
        .collect()
}

/// The verdict that blows the fuse may be on a connection with so many spurious copies.
const OF_THE_LAST: f64 = 5.0;

/// Of steps after which the daemon is dead.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a few hundred")]
pub fn of_orphans(steps: &[Step]) -> Vec<Criterion> {
    let blown = || steps.iter().filter_map(|step| step.blown);
    let judged = blown().map(|blown| blown.judged).max().unwrap_or(0);
    let after: u64 = blown().map(|blown| blown.spurious_after).sum();
    vec![
        at_least(
            "daemon dead, steps: fuses that blew",
            steps.len() as f64,
            "",
            blown().count() as f64,
        ),
        at_most(
            "daemon dead, steps: copies judged spurious until then",
            20.0 + OF_THE_LAST - 1.0,
            "",
            judged as f64,
        ),
        at_most(
            "daemon dead, steps: spurious connections begun after it",
            0.0,
            "",
            after as f64,
        ),
    ]
}
