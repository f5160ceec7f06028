//! The effect of a level of a factor compared with another one: the difference, its interval, and the verdict.

use std::fmt;

use rto_testbed::machine::Machine;

use super::{Design, EffectSpec, Record, Stat, interval::Samples, render::groups};
use crate::{
    report::Table,
    summary::{f, median, quantile},
};

/// Tolerance of shares, percentage points: too small to act upon.
const POINTS: f64 = 1.0;

/// The verdict on a difference. A difference smaller than a jiffy of the machine, or than one percentage point, counts
/// as no difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The whole interval is below the tolerance.
    Better,
    /// The whole interval is above the tolerance.
    Worse,
    /// The whole interval is within the tolerance.
    Same,
    /// The interval is too wide, or there are too few values for one.
    Inconclusive,
}

impl Verdict {
    fn of(interval: Option<(f64, f64)>, tolerance: f64) -> Self {
        match interval {
            Some((low, _)) if low > tolerance => Self::Worse,
            Some((_, high)) if high < -tolerance => Self::Better,
            Some((low, high)) if low >= -tolerance && high <= tolerance => Self::Same,
            _ => Self::Inconclusive,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "no different",
            Self::Inconclusive => "inconclusive",
        })
    }
}

/// One line of the table of effects.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    pub(super) rows: Vec<String>,
    pub(super) level: String,
    pub(super) base: f64,
    value: f64,
    pub(super) interval: Option<(f64, f64)>,
    /// The runs or values that the interval is computed over.
    over: String,
    /// The number of runs (or values) needed for a verdict, if there is no verdict yet.
    runs_needed: Option<u64>,
    pub(super) verdict: Verdict,
}

impl Effect {
    pub(super) fn difference(&self) -> f64 {
        self.value - self.base
    }
}

/// All effects, in the order of the rows.
pub(super) fn effects(
    design: &Design,
    spec: &EffectSpec,
    records: &[&Record],
    machine: &Machine,
) -> Vec<Effect> {
    let tolerance = tolerance(design, (&spec.measure, &spec.stat), machine);
    let measured = |record: &&&Record| record.values.contains_key(&spec.measure);
    let of_measure: Vec<&Record> = records.iter().filter(measured).copied().collect();
    let pairs = pairs(design, &of_measure, spec);
    let effects = pairs.into_iter().filter_map(|pair| {
        let (value, base) = pair.values(&spec.stat, &spec.measure)?;
        let samples = Samples::new(spec, &pair.records, &pair.base);
        let interval = samples.interval();
        let verdict = Verdict::of(interval, tolerance);
        let inconclusive = interval.filter(|_| verdict == Verdict::Inconclusive);
        Some(Effect {
            over: interval.map_or_else(String::new, |_| samples.over(design)),
            runs_needed: inconclusive
                .map(|bounds| samples.runs_needed(value - base, bounds, tolerance)),
            rows: pair.rows,
            level: pair.level,
            base,
            value,
            interval,
            verdict,
        })
    });
    effects.collect()
}

/// Records of a level, and records of the base with the same levels of the rows.
struct Pair<'a> {
    rows: Vec<String>,
    level: String,
    records: Vec<&'a Record>,
    base: Vec<&'a Record>,
}

impl Pair<'_> {
    /// The statistic for the level and for the base; `None` if one of them is missing.
    fn values(&self, stat: &Stat, measure: &str) -> Option<(f64, f64)> {
        let of = |records: &[&Record]| stat.of(records.iter().copied(), measure);
        Some((of(&self.records)?, of(&self.base)?))
    }
}

/// Pairs every level of a factor with the base, in the order of the rows.
fn pairs<'a>(design: &Design, records: &[&'a Record], spec: &EffectSpec) -> Vec<Pair<'a>> {
    let across = std::slice::from_ref(&spec.across);
    let mut pairs = Vec::new();
    for (rows, records) in groups(design, records, &spec.rows, &spec.only) {
        let (of_base, others): (Vec<_>, Vec<_>) = groups(design, &records, across, &spec.only)
            .into_iter()
            .partition(|(level, _)| level[0] == spec.base);
        let Some((_, base)) = of_base.first() else {
            continue;
        };
        pairs.extend(others.into_iter().map(|(level, records)| Pair {
            rows: rows.clone(),
            level: level[0].clone(),
            records,
            base: base.clone(),
        }));
    }
    pairs
}

/// Groups by level, in the order in which the levels first appear.
pub(crate) fn by_level<'a, T>(all: impl Iterator<Item = (&'a str, T)>) -> Vec<(&'a str, Vec<T>)> {
    let mut by_level: Vec<(&str, Vec<T>)> = Vec::new();
    for (level, one) in all {
        match by_level.iter_mut().find(|(known, _)| *known == level) {
            Some((_, known)) => known.push(one),
            None => by_level.push((level, vec![one])),
        }
    }
    by_level
}

/// The tolerance, in the unit of the number: a jiffy, because timers consist of jiffies, or one percentage point.
fn tolerance(design: &Design, number: (&str, &Stat), machine: &Machine) -> f64 {
    match design.unit(number) {
        "ms" => 1e3 / f(machine.hz),
        "us" => 1e6 / f(machine.hz),
        "%" => POINTS,
        _ => 0.0,
    }
}

/// The table of effects.
pub(super) fn table(name: &str, design: &Design, spec: &EffectSpec, effects: &[Effect]) -> Table {
    let unit = design.unit((&spec.measure, &spec.stat));
    let title = format!(
        "{} ({}{}) against {}: difference with its 95 % interval{}",
        spec.measure,
        spec.stat,
        if unit.is_empty() {
            String::new()
        } else {
            format!(", {unit}")
        },
        spec.base,
        if spec.paired { ", runs paired" } else { "" }
    );
    let mut columns = design.all_titled(&spec.rows);
    columns.push(design.titled(&spec.across));
    columns.extend(
        [
            &*spec.base,
            "with it",
            "difference",
            "from",
            "to",
            "interval over",
            "runs needed",
            "verdict",
        ]
        .map(str::to_owned),
    );
    let mut table = Table::with_columns(name, &title, columns);
    let number = |value: f64| design.number(&spec.measure, value);
    for effect in effects {
        let mut row = effect.rows.clone();
        row.push(effect.level.clone());
        row.extend([effect.base, effect.value, effect.difference()].map(number));
        let bound =
            |pick: fn((f64, f64)) -> f64| effect.interval.map(pick).map(number).unwrap_or_default();
        row.extend([
            bound(|(low, _)| low),
            bound(|(_, high)| high),
            effect.over.clone(),
            effect
                .runs_needed
                .map(|n| n.to_string())
                .unwrap_or_default(),
            effect.verdict.to_string(),
        ]);
        table.row(row);
    }
    table
}

/// A sentence: in how many cells each level is better and worse, and the largest loss.
pub(super) fn headline(design: &Design, spec: &EffectSpec, effects: &[Effect]) -> String {
    let unit = design.unit((&spec.measure, &spec.stat));
    let of_level = |(level, all): (&str, Vec<&Effect>)| {
        let of = |verdict| all.iter().filter(move |effect| effect.verdict == verdict);
        let mut text = format!(
            "{level} better in {} of {}",
            of(Verdict::Better).count(),
            all.len()
        );
        let worst = of(Verdict::Worse).max_by(|a, b| a.difference().total_cmp(&b.difference()));
        if let Some(worst) = worst {
            let most = design.number(&spec.measure, worst.difference());
            text.push_str(&format!(
                " and worse in {} (by up to {most} {unit}, at {})",
                of(Verdict::Worse).count(),
                worst.rows.join(", ")
            ));
        }
        let unknown = all
            .iter()
            .filter(|effect| effect.interval.is_none())
            .count();
        if unknown > 0 {
            text.push_str(&format!(" ({unknown} with too few values for a verdict)"));
        }
        text
    };
    let levels = by_level(effects.iter().map(|effect| (&*effect.level, effect)));
    let levels: Vec<String> = levels.into_iter().map(of_level).collect();
    let [measure, levels] = [capital(&spec.measure), levels.join("; ")];
    format!("{measure}, {}, against {}: {levels}.", spec.stat, spec.base)
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

/// The shares of the cells whose difference is at most a given value.
pub(super) fn agreement(
    design: &Design,
    spec: &EffectSpec,
    records: &[&Record],
    machine: &Machine,
) -> Table {
    let title = format!(
        "{} ({}), {} against others: share of the cells with at most this difference, %",
        capital(&spec.measure),
        spec.stat,
        spec.base
    );
    let columns = [
        "against",
        "cells",
        "a jiffy",
        "1 %",
        "5 %",
        "10 %",
        "25 %",
        "median, %",
        "worst, %",
    ];
    let mut table = Table::new("agreement", &title, &columns);
    let pairs = pairs(design, records, spec);
    let cells = pairs.iter().filter_map(|pair| {
        let (other, base) = pair.values(&spec.stat, &spec.measure)?;
        Some((&*pair.level, (base, other)))
    });
    let tolerance = tolerance(design, (&spec.measure, &spec.stat), machine);
    for (level, pairs) in by_level(cells) {
        let percent: Vec<f64> = pairs
            .iter()
            .map(|(m, o)| ((m - o) / o).abs() * 100.0)
            .collect();
        let share = |count: usize| (count * 100 / pairs.len()).to_string();
        let within = |limit: f64| share(percent.iter().filter(|p| **p <= limit).count());
        let near = pairs
            .iter()
            .filter(|(m, o)| (m - o).abs() <= tolerance)
            .count();
        table.row([
            level.to_owned(),
            pairs.len().to_string(),
            share(near),
            within(1.0),
            within(5.0),
            within(10.0),
            within(25.0),
            format!("{:.1}", median(&percent).unwrap_or(0.0)),
            format!("{:.0}", quantile(&percent, 1.0).unwrap_or(0.0)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{super::log::tests::machine, *};

    fn design() -> (Design, EffectSpec) {
        let spec = EffectSpec {
            measure: "time".to_owned(),
            stat: Stat::P50,
            across: "timers".to_owned(),
            base: "kernel".to_owned(),
            rows: vec!["lost".to_owned()],
            ..EffectSpec::default()
        };
        let design = Design {
            units: [("time".to_owned(), "ms".to_owned())].into(),
            run_is: "flow".to_owned(),
            ..Design::default()
        };
        (design, spec)
    }

    /// The effect of `runs` runs of a base around 200 ms, and of another level.
    fn effect_of(runs: u32, other: impl Fn(u32) -> f64, paired: bool) -> Effect {
        let (design, mut spec) = design();
        spec.paired = paired;
        let record = |timers, run, ms| {
            Record::new([("lost", "10"), ("timers", timers)], run).with("time", ms)
        };
        let records: Vec<Record> = (0..runs)
            .flat_map(|run| {
                [
                    record("kernel", run, 200.0 + f64::from(run)),
                    record("agent", run, other(run)),
                ]
            })
            .collect();
        let records: Vec<&Record> = records.iter().collect();
        let all = effects(&design, &spec, &records, &machine());
        assert_eq!(all.len(), 1);
        all[0].clone()
    }

    #[test]
    fn verdict_follows_from_interval_and_tolerance() {
        assert_eq!(
            effect_of(11, |run| 20.0 + f64::from(run), false).verdict,
            Verdict::Better
        );
        assert_eq!(
            effect_of(11, |run| 240.0 + f64::from(run), false).verdict,
            Verdict::Worse
        );
        // Less than a jiffy of 4 ms in each run.
        assert_eq!(
            effect_of(11, |run| 201.0 + f64::from(run), true).verdict,
            Verdict::Same
        );
        // Runs are 10 ms apart, so 3 ms without pairs are inconclusive.
        assert_eq!(
            effect_of(11, |run| 203.0 + f64::from(run), false).verdict,
            Verdict::Inconclusive
        );
        // More runs would show that there is no difference; a verdict needs no more runs.
        let more =
            [203.0, 240.0].map(|ms| effect_of(11, |run| ms + f64::from(run), false).runs_needed);
        assert!(matches!(more, [Some(100..=500), None]), "{more:?}");
        // Four runs are always inconclusive.
        let few = effect_of(4, |_| 20.0, false);
        assert_eq!((few.verdict, few.interval), (Verdict::Inconclusive, None));
        assert_eq!(
            (&*effect_of(11, |_| 20.0, true).over, &*few.over),
            ("11 flows", "")
        );
        // A single run has an interval over its values.
        let (design, spec) = design();
        let one = Record::new([], 0).with_all("time", (0..9).map(f64::from));
        let over = Samples::new(&spec, &[&one], &[&one]).over(&design);
        assert_eq!(over, "values of 1 flow");
    }

    #[test]
    fn headline_counts_verdicts() {
        let (design, spec) = design();
        let effects = [
            effect_of(11, |_| 20.0, false),
            effect_of(11, |_| 300.0, false),
            effect_of(3, |_| 1.0, false),
        ];
        let text = headline(&design, &spec, &effects);
        assert!(
            text == "Time, p50, against kernel: agent better in 1 of 3 and worse in 1 (by up to 95 ms, at 10) \
                     (1 with too few values for a verdict).",
            "{text}"
        );
        let table = table("effects", &design, &spec, &effects).text();
        assert!(
            table.contains("better") && table.contains("inconclusive"),
            "{table}"
        );
    }

    #[test]
    fn agreement_counts_cells() {
        let (design, spec) = design();
        let spec = EffectSpec {
            across: "by".to_owned(),
            base: "agent".to_owned(),
            ..spec
        };
        let record = |by, lost, ms| Record::new([("lost", lost), ("by", by)], 0).with("time", ms);
        let records = [
            record("agent", "10", 100.0),
            record("model", "10", 103.0),
            record("agent", "20", 100.0),
            record("model", "20", 200.0),
            record("model", "30", 1.0),
        ];
        let records: Vec<&Record> = records.iter().collect();
        let table = agreement(&design, &spec, &records, &machine());
        assert_eq!(
            table.rows,
            [["model", "2", "50", "0", "50", "50", "50", "26.5", "50"]]
        );
    }
}
