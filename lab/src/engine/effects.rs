//! What a level of a factor changes against another one: a difference, its interval, and what may be concluded.

use std::{collections::BTreeMap, fmt};

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::machine::Machine;

use super::{Design, EffectSpec, Record, Stat, render::groups};
use crate::{
    report::Table,
    summary::{f, median, quantile},
};

/// Draws of a bootstrap.
const DRAWS: usize = 400;
/// Of the draws, those that an interval leaves out at either end.
const TAIL: f64 = 0.025;
/// Of fewer values nothing is concluded: draws of them cover too little.
const LEAST: usize = 5;
/// Where the generator begins: the same records have the same intervals.
const SEED: u64 = 0x426f_6f74_7374_7261;
/// Of shares, percent: what nobody acts upon.
const POINTS: f64 = 1.0;

/// What may be concluded. What is smaller than a jiffy of the machine, or one percent of all, is no difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The whole interval is below that.
    Better,
    /// The whole interval is above it.
    Worse,
    /// The whole interval is within it.
    Same,
    /// The interval is too wide, or there are too few values for one.
    NotTold,
}

impl Verdict {
    fn of(interval: Option<(f64, f64)>, tolerance: f64) -> Self {
        match interval {
            Some((low, _)) if low > tolerance => Self::Worse,
            Some((_, high)) if high < -tolerance => Self::Better,
            Some((low, high)) if low >= -tolerance && high <= tolerance => Self::Same,
            _ => Self::NotTold,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "no different",
            Self::NotTold => "not told",
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
    /// What the interval is over.
    over: String,
    pub(super) verdict: Verdict,
}

impl Effect {
    pub(super) fn difference(&self) -> f64 {
        self.value - self.base
    }
}

/// All of them, in the order of the rows.
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
        let (one, of_base) = (runs(&pair.records), runs(&pair.base));
        let interval = interval(spec, &one, &of_base);
        Some(Effect {
            over: interval.map_or_else(String::new, |_| over(design, spec, &one, &of_base)),
            rows: pair.rows,
            level: pair.level,
            base,
            value,
            interval,
            verdict: Verdict::of(interval, tolerance),
        })
    });
    effects.collect()
}

/// Records of a level, and those of the base with the same levels of the rows.
struct Pair<'a> {
    rows: Vec<String>,
    level: String,
    records: Vec<&'a Record>,
    base: Vec<&'a Record>,
}

impl Pair<'_> {
    /// Of the level and of the base; `None` if one of them has none.
    fn values(&self, stat: &Stat, measure: &str) -> Option<(f64, f64)> {
        let of = |records: &[&Record]| stat.of(records.iter().copied(), measure);
        Some((of(&self.records)?, of(&self.base)?))
    }
}

/// Every level of a factor but the base next to it, in the order of the rows.
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

/// What belongs to each level, in the order in which levels first come.
fn by_level<'a, T>(all: impl Iterator<Item = (&'a str, T)>) -> Vec<(&'a str, Vec<T>)> {
    let mut by_level: Vec<(&str, Vec<T>)> = Vec::new();
    for (level, one) in all {
        match by_level.iter_mut().find(|(known, _)| *known == level) {
            Some((_, known)) => known.push(one),
            None => by_level.push((level, vec![one])),
        }
    }
    by_level
}

/// What is no difference, in the unit of a number: a jiffy, which timers are made of, or one percent.
fn tolerance(design: &Design, number: (&str, &Stat), machine: &Machine) -> f64 {
    match design.unit(number) {
        "ms" => 1e3 / f(machine.hz),
        "us" => 1e6 / f(machine.hz),
        "%" => POINTS,
        _ => 0.0,
    }
}

/// Records by number of the run.
type Runs<'a> = BTreeMap<u32, Vec<&'a Record>>;

fn runs<'a>(records: &[&'a Record]) -> Runs<'a> {
    let mut runs = Runs::new();
    for record in records {
        runs.entry(record.run).or_default().push(record);
    }
    runs
}

/// What is drawn for an interval: the fewer runs of both levels, or of a single one its values.
fn over(design: &Design, spec: &EffectSpec, one: &Runs<'_>, base: &Runs<'_>) -> String {
    let run = match design.run_is.as_str() {
        "" => "run",
        named => named,
    };
    let count = match spec.paired {
        true => one
            .keys()
            .filter(|number| base.contains_key(number))
            .count(),
        false => one.len().min(base.len()),
    };
    match count {
        1 => format!("values of 1 {run}"),
        count => format!("{count} {run}s"),
    }
}

/// The bounds of the difference that 95 % of the draws are between. Runs are drawn, and of each its values, as those of
/// one run may be alike. Where runs are paired, both levels draw the same ones.
fn interval(spec: &EffectSpec, one: &Runs<'_>, base: &Runs<'_>) -> Option<(f64, f64)> {
    let count = |runs: &Runs<'_>| {
        let records = runs.values().flatten();
        let values = records.filter_map(|record| record.values.get(&spec.measure));
        values.map(Vec::len).sum::<usize>()
    };
    if count(one) < LEAST || count(base) < LEAST {
        return None;
    }
    let numbers = |runs: &Runs<'_>| runs.keys().copied().collect::<Vec<u32>>();
    let (mut of_one, mut of_base) = (numbers(one), numbers(base));
    if spec.paired {
        of_one.retain(|number| base.contains_key(number));
        of_base.clone_from(&of_one);
    }
    if of_one.is_empty() || of_base.is_empty() {
        return None;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut differences = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let numbers = draw(&of_one, &mut rng);
        let value = drawn(spec, one, &numbers, &mut rng);
        let numbers = if spec.paired {
            numbers
        } else {
            draw(&of_base, &mut rng)
        };
        let at_base = drawn(spec, base, &numbers, &mut rng);
        if let (Some(value), Some(at_base)) = (value, at_base) {
            differences.push(value - at_base);
        }
    }
    Some((
        quantile(&differences, TAIL)?,
        quantile(&differences, 1.0 - TAIL)?,
    ))
}

/// As many as there are, some of them more than once.
fn draw<T: Copy>(of: &[T], rng: &mut ChaCha8Rng) -> Vec<T> {
    of.iter()
        .map(|_| of[rng.random_range(0..of.len())])
        .collect()
}

fn drawn(spec: &EffectSpec, runs: &Runs<'_>, numbers: &[u32], rng: &mut ChaCha8Rng) -> Option<f64> {
    let records = numbers
        .iter()
        .filter_map(|number| runs.get(number))
        .flatten();
    if matches!(spec.stat, Stat::PercentOf(_)) {
        // Whole runs: their counts have no values to draw.
        return spec.stat.of(records.copied(), &spec.measure);
    }
    let mut values = Vec::new();
    for record in records {
        let of_run: Vec<_> = record.weighted(&spec.measure).collect();
        values.extend(draw(&of_run, rng));
    }
    spec.stat.of_values(&values)
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
    let mut columns: Vec<String> = spec
        .rows
        .iter()
        .map(|factor| design.titled(factor))
        .collect();
    columns.push(design.titled(&spec.across));
    columns.extend(
        [
            &*spec.base,
            "with it",
            "difference",
            "from",
            "to",
            "interval over",
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
            effect.verdict.to_string(),
        ]);
        table.row(row);
    }
    table
}

/// One sentence: how often each level is better and worse, and where it is worst.
pub(super) fn headline(design: &Design, spec: &EffectSpec, effects: &[Effect]) -> String {
    let by_level = by_level(effects.iter().map(|effect| (&*effect.level, effect)));
    let unit = design.unit((&spec.measure, &spec.stat));
    let said = by_level.into_iter().map(|(level, all)| {
        let count = |verdict| all.iter().filter(|effect| effect.verdict == verdict).count();
        let differences: Vec<f64> = all.iter().map(|effect| effect.difference()).collect();
        let mut text = format!(
            "{level} better in {} of {}, worse in {}, no different in {}, not told in {} (median difference {} {unit}",
            count(Verdict::Better),
            all.len(),
            count(Verdict::Worse),
            count(Verdict::Same),
            count(Verdict::NotTold),
            design.number(&spec.measure, median(&differences).unwrap_or(0.0)),
        );
        let worse = all.iter().filter(|effect| effect.verdict == Verdict::Worse);
        if let Some(worst) = worse.max_by(|a, b| a.difference().total_cmp(&b.difference())) {
            text.push_str(&format!(
                "; at worst {} {unit} more at {}",
                design.number(&spec.measure, worst.difference()),
                worst.rows.join(", ")
            ));
        }
        text.trim_end().to_owned() + ")"
    });
    let said: Vec<String> = said.collect();
    format!(
        "{}, {}, against {}: {}.",
        capital(&spec.measure),
        spec.stat,
        spec.base,
        said.join("; ")
    )
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

/// Shares of the cells whose difference is at most so much.
pub(super) fn agreement(
    design: &Design,
    spec: &EffectSpec,
    records: &[&Record],
    machine: &Machine,
) -> Table {
    let title = format!(
        "{} ({}), {} against others: share of the cells whose difference is at most so much, %",
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
            effects: vec![spec.clone()],
            ..Design::default()
        };
        (design, spec)
    }

    /// So many runs of a base around 200 ms, and of another level.
    fn told(runs: u32, other: impl Fn(u32) -> f64, paired: bool) -> Effect {
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
    fn one_rule_says_what_is_worse() {
        assert_eq!(
            told(11, |run| 20.0 + f64::from(run), false).verdict,
            Verdict::Better
        );
        assert_eq!(
            told(11, |run| 240.0 + f64::from(run), false).verdict,
            Verdict::Worse
        );
        // Less than a jiffy of 4 ms, in each run.
        assert_eq!(
            told(11, |run| 201.0 + f64::from(run), true).verdict,
            Verdict::Same
        );
        // Runs lie 10 ms apart, so that 3 ms are not told without pairs.
        assert_eq!(
            told(11, |run| 203.0 + f64::from(run), false).verdict,
            Verdict::NotTold
        );
        // Nor is anything of four runs.
        let few = told(4, |_| 20.0, false);
        assert_eq!((few.verdict, few.interval), (Verdict::NotTold, None));
        assert_eq!(
            (&*told(11, |_| 20.0, true).over, &*few.over),
            ("11 runs", "")
        );
    }

    #[test]
    fn an_interval_says_what_it_is_over() {
        let (mut design, spec) = design();
        let record = |timers, run| {
            let values = (0..9).map(f64::from);
            Record::new([("lost", "10"), ("timers", timers)], run).with_all("time", values)
        };
        let of = |design: &Design, runs: u32| {
            let records: Vec<Record> = (0..runs)
                .flat_map(|run| ["kernel", "agent"].map(|timers| record(timers, run)))
                .collect();
            let records: Vec<&Record> = records.iter().collect();
            effects(design, &spec, &records, &machine())[0].over.clone()
        };
        assert_eq!(
            (of(&design, 1), of(&design, 3)),
            ("values of 1 run".into(), "3 runs".into())
        );
        design.run_is = "flow".to_owned();
        assert_eq!(of(&design, 3), "3 flows");
    }

    #[test]
    fn nothing_is_found_in_noise() {
        let mut wrong = 0;
        for seed in 0..200 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let noise: Vec<f64> = (0..22)
                .map(|_| 200.0 + 40.0 * rng.random::<f64>())
                .collect();
            let value = [&noise[..11], &noise[11..]].map(|half| {
                let record =
                    |(run, ms): (u32, &f64)| Record::new([("n", "1")], run).with("time", *ms);
                (0..).zip(half).map(record).collect::<Vec<_>>()
            });
            let [one, base] = value
                .each_ref()
                .map(|half| half.iter().collect::<Vec<&Record>>());
            let bounds = interval(&design().1, &runs(&one), &runs(&base));
            let verdict = Verdict::of(bounds, 4.0);
            wrong += i32::from(matches!(verdict, Verdict::Better | Verdict::Worse));
        }
        // A twentieth, had the intervals no tolerance.
        assert!(wrong <= 10, "{wrong} of 200");
    }

    #[test]
    fn the_headline_counts() {
        let (design, spec) = design();
        let effects = [
            told(11, |_| 20.0, false),
            told(11, |_| 300.0, false),
            told(3, |_| 1.0, false),
        ];
        let text = headline(&design, &spec, &effects);
        assert!(
            text.starts_with("Time, p50, against kernel: agent better in 1 of 3, worse in 1, no different in 0, not told in 1"),
            "{text}"
        );
        assert!(text.contains("at worst 95 ms more at 10"), "{text}");
        let table = table("effects", &design, &spec, &effects).text();
        assert!(
            table.contains("better") && table.contains("not told"),
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
