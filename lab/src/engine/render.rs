//! Renders records as tables, charts and sentences.

use std::collections::{BTreeMap, BTreeSet};

use rto_testbed::{facts::HostFacts, machine::Machine};

use super::{
    ChartSpec, Design, Manifest, Only, Record, Stat, TableSpec, effects, interval, log, pivot,
};
use crate::{
    chart::{Axis, Chart, Series, Unit},
    report::{Method, Report, Table},
};

/// Points of the curve of a distribution.
const POINTS: usize = 200;

/// Makes the report of a log.
pub fn report(manifest: &Manifest, records: &[Record]) -> Report {
    let Manifest {
        machine,
        seed,
        design,
        ..
    } = manifest;
    let measured: Vec<&Record> = records.iter().collect();
    let all: Vec<&Record> = records.iter().chain(&design.references).collect();
    let mut report = Report {
        name: design.name.clone(),
        question: design.question.clone(),
        machine: machine.clone(),
        seed: *seed,
        method: method(design, &manifest.hosts),
        findings: Vec::new(),
        effects: Vec::new(),
        tables: Vec::new(),
        charts: charts(design, &all),
    };
    conclude(&mut report, design, &measured, machine);
    for (number, spec) in (1..).zip(&design.agreements) {
        let mut table = effects::agreement(design, spec, &all, machine);
        if number > 1 {
            table.name = format!("{}-{number}", table.name);
        }
        report.tables.push(table);
    }
    report
        .tables
        .extend(design.tables.iter().map(|spec| table(design, spec, &all)));
    report.tables.retain(|table| !table.rows.is_empty());
    for table in report.effects.iter_mut().chain(&mut report.tables) {
        if !design.rto_min.is_empty() && !table.title.contains("rto_min") {
            table
                .title
                .push_str(&format!(" (rto_min: {})", design.rto_min));
        }
        if !design.congestion.is_empty() {
            table.title.push_str(&format!(", {}", design.congestion));
        }
    }
    report
}

/// The method, and the hosts.
pub(super) fn method(design: &Design, hosts: &[(String, HostFacts)]) -> Method {
    let mut method = design.method.clone();
    for (name, host) in hosts {
        let lines = host.lines().into_iter();
        method.extend(lines.map(|(fact, is)| (format!("{name}, {fact}"), is)));
    }
    method
}

/// Adds the effects, and a sentence for each kind of effect.
fn conclude(report: &mut Report, design: &Design, records: &[&Record], machine: &Machine) {
    for (number, spec) in design.effects.iter().enumerate() {
        let all = effects::effects(design, spec, records, machine);
        if all.is_empty() {
            continue;
        }
        if number == 0 {
            report.findings.push(effects::headline(design, spec, &all));
            if design.pivot {
                report.effects.push(pivot::table(design, spec, &all));
            }
        }
        let name = match number {
            0 => "effects".to_owned(),
            _ => format!("effects-{}", number + 1),
        };
        report
            .effects
            .push(effects::table(&name, design, spec, &all));
    }
}

impl Design {
    /// A name with its unit, such as "lost, ms".
    pub(super) fn titled(&self, name: &str) -> String {
        match self.units.get(name) {
            Some(unit) => format!("{name}, {unit}"),
            None => name.to_owned(),
        }
    }

    /// The names of factors with their units.
    pub(super) fn all_titled(&self, factors: &[String]) -> Vec<String> {
        factors.iter().map(|factor| self.titled(factor)).collect()
    }

    /// The unit of a statistic of a measure; empty if it has no unit.
    pub(super) fn unit(&self, (measure, stat): (&str, &Stat)) -> &str {
        match stat {
            Stat::PercentOf(_) | Stat::Above(_) => "%",
            _ => self.units.get(measure).map_or("", String::as_str),
        }
    }

    /// A value of a measure, rounded to significant digits.
    pub(super) fn number(&self, measure: &str, value: f64) -> String {
        let digits = match self.units.get(measure).map(String::as_str) {
            Some("us") => 0,
            _ if value.abs() < 0.01 => 4,
            _ if value.abs() < 0.1 => 3,
            _ if value.abs() < 1.0 => 2,
            _ => 1,
        };
        let text = format!("{value:.digits$}");
        let text = match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.'),
            false => &text,
        };
        // Avoids a negative zero.
        if text == "-0" {
            "0".to_owned()
        } else {
            text.to_owned()
        }
    }

    /// Levels of a factor in their order.
    fn sorted(&self, factor: &str, levels: BTreeSet<&str>) -> Vec<String> {
        let known = self.levels.get(factor);
        let place = |level: &str| known.and_then(|known| known.iter().position(|one| one == level));
        let mut levels: Vec<&str> = levels.into_iter().collect();
        let number = |level: &str| level.parse::<f64>().unwrap_or(f64::MAX);
        levels.sort_by(|a, b| {
            let places = place(a)
                .unwrap_or(usize::MAX)
                .cmp(&place(b).unwrap_or(usize::MAX));
            places.then(number(a).total_cmp(&number(b)))
        });
        levels.into_iter().map(str::to_owned).collect()
    }
}

/// Records of each existing combination of levels, in the order of the levels; without factors, all records.
pub(super) fn groups<'a>(
    design: &Design,
    records: &[&'a Record],
    factors: &[String],
    only: &Only,
) -> Vec<(Vec<String>, Vec<&'a Record>)> {
    let places: Vec<BTreeMap<String, usize>> = factors
        .iter()
        .map(|factor| {
            let levels = records.iter().map(|record| record.level(factor)).collect();
            design.sorted(factor, levels).into_iter().zip(0..).collect()
        })
        .collect();
    let mut groups: BTreeMap<Vec<usize>, (Vec<String>, Vec<&Record>)> = BTreeMap::new();
    for &record in records {
        let is_meant = |(factor, levels): (&String, &Vec<String>)| {
            levels.iter().any(|one| one == record.level(factor))
        };
        if !only.iter().all(is_meant) {
            continue;
        }
        let levels: Vec<String> = factors
            .iter()
            .map(|factor| record.level(factor).to_owned())
            .collect();
        let place = levels
            .iter()
            .zip(&places)
            .filter_map(|(level, places)| places.get(level).copied());
        let group = groups
            .entry(place.collect())
            .or_insert_with(|| (levels, Vec::new()));
        group.1.push(record);
    }
    groups.into_values().collect()
}

/// A table with lines by rows and columns by levels across.
fn table(design: &Design, spec: &TableSpec, records: &[&Record]) -> Table {
    let of_it = |record: &&&Record| {
        let has = |measure: &str| {
            let mut names = record.values.keys();
            names.any(|name| {
                name.strip_prefix(measure)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
            })
        };
        spec.columns.iter().any(|column| has(&column.measure))
    };
    let records: Vec<&Record> = records.iter().filter(of_it).copied().collect();
    let across: Vec<Vec<String>> = groups(design, &records, &spec.across, &spec.only)
        .into_iter()
        .map(|(levels, _)| levels)
        .collect();
    let mut columns = design.all_titled(&spec.rows);
    for levels in &across {
        columns.extend(spec.columns.iter().map(|column| {
            match (levels.is_empty(), spec.columns.len()) {
                (true, _) => column.title.clone(),
                (false, 1) => levels.join(", "),
                (false, _) => format!("{}, {}", levels.join(", "), column.title),
            }
        }));
    }
    let mut table = Table::with_columns(&spec.name, &spec.title, columns);
    for (levels, records) in groups(design, &records, &spec.rows, &spec.only) {
        let cells = groups(design, &records, &spec.across, &spec.only);
        let mut row = levels;
        for levels in &across {
            let records = cells.iter().find(|(known, _)| known == levels);
            for column in &spec.columns {
                let value = records.and_then(|(_, records)| value(column, records));
                row.push(
                    value
                        .map(|value| design.number(&column.measure, value))
                        .unwrap_or_default(),
                );
            }
        }
        table.row(row);
    }
    table
}

/// The measured value, or the value of a reference.
fn value(column: &super::Column, records: &[&Record]) -> Option<f64> {
    let measured = column.stat.of(records.iter().copied(), &column.measure);
    let reference = format!("{} {}", column.measure, column.stat);
    measured.or_else(|| {
        records
            .iter()
            .find_map(|one| one.values.get(&reference)?.first().copied())
    })
}

type Points = Vec<(f64, f64)>;
type Band = Vec<(f64, f64, f64)>;

fn charts(design: &Design, records: &[&Record]) -> Vec<Chart> {
    let mut charts = Vec::new();
    for spec in &design.charts {
        let of_it = |record: &&&Record| record.values.contains_key(&spec.measure);
        let records: Vec<&Record> = records.iter().filter(of_it).copied().collect();
        for (levels, records) in groups(design, &records, &spec.per, &spec.only) {
            let series = groups(design, &records, &spec.across, &spec.only);
            let series = series.into_iter().map(|(levels, records)| {
                let (points, band) = match &spec.x {
                    Some(x) if records.iter().any(|one| one.values.contains_key(x)) => {
                        (series_of(spec, x, &records), Vec::new())
                    }
                    Some(x) => curve(design, spec, x, &records),
                    None => distribution(spec, &records),
                };
                let name = levels.join(", ");
                Series {
                    band,
                    ..if spec.steps {
                        Series::steps(&name, points)
                    } else {
                        Series::line(&name, points)
                    }
                }
            });
            let mut series: Vec<Series> = series.collect();
            if let Some(base) = &spec.against {
                improve(&mut series, base);
            }
            // A single point is not a curve.
            series.retain(|series| series.points.len() > 1);
            if series.is_empty() {
                continue;
            }
            let mut title = vec![spec.title.clone(), levels.join(", ")];
            title.retain(|part| !part.is_empty());
            let axis = |name: &str| match design.units.get(name).map(String::as_str) {
                Some("ms") => Axis::ms(name.to_owned()),
                Some("us") => Axis::of(name.to_owned(), Unit::Microseconds),
                Some("%") => Axis::percent(name.to_owned()),
                _ => Axis::number(design.titled(name)),
            };
            let (x, y) = match &spec.x {
                Some(x) if spec.against.is_some() => (axis(x), Axis::number("improvement")),
                Some(x) => (axis(x), axis(&spec.measure)),
                None => (
                    axis(&spec.measure),
                    Axis {
                        marks: &[(1.0, "p99"), (0.1, "p99.9")],
                        ..Axis::percent("share of values of this or more")
                    },
                ),
            };
            charts.push(Chart {
                title: title.join(": "),
                x,
                y,
                log_x: spec.log,
                log_y: spec.log || spec.x.is_none(),
                series,
            });
        }
    }
    charts
}

/// Replaces values by the improvement over the series with this name, which becomes 1; without intervals.
fn improve(series: &mut [Series], base: &str) {
    let base = series.iter().find(|one| one.name == base);
    let base = base.map_or_else(Vec::new, |base| base.points.clone());
    for one in series {
        one.band.clear();
        one.points.retain_mut(|(x, value)| {
            let own = base.iter().find(|(at, _)| at == x);
            *value = own.map_or(f64::NAN, |(_, own)| own / *value);
            value.is_finite()
        });
    }
}

/// A point, and its interval, for each level of a factor.
fn curve(design: &Design, spec: &ChartSpec, x: &str, records: &[&Record]) -> (Points, Band) {
    let x = [x.to_owned()];
    let stat = spec.stat.clone().unwrap_or(Stat::P50);
    let (mut points, mut band) = (Vec::new(), Vec::new());
    for (level, records) in groups(design, records, &x, &spec.only) {
        let value = stat.of(records.iter().copied(), &spec.measure);
        if let (Ok(at), Some(value)) = (level[0].parse(), value) {
            points.push((at, value));
            let bounds = interval::of_level(&stat, &spec.measure, &records);
            band.extend(bounds.map(|(least, most)| (at, least, most)));
        }
    }
    (points, band)
}

/// A point for each record, at its own value of a measure.
fn series_of(spec: &ChartSpec, x: &str, records: &[&Record]) -> Vec<(f64, f64)> {
    let stat = spec.stat.clone().unwrap_or(Stat::P50);
    let points = records.iter().filter_map(|record| {
        let at = record.values.get(x)?.first()?;
        Some((*at, stat.of(std::iter::once(*record), &spec.measure)?))
    });
    let mut points: Vec<(f64, f64)> = points.collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// The share of values that are at least x, percent, and its interval: the tail shows on a logarithmic axis.
fn distribution(spec: &ChartSpec, records: &[&Record]) -> (Points, Band) {
    let mut values = log::values(records.iter().copied(), &spec.measure);
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all: f64 = values.iter().map(|(_, weight)| weight).sum();
    let step = (values.len() / POINTS).max(1);
    let tail = values.len().saturating_sub(POINTS);
    let mut above = all;
    let points = values.iter().map(|(value, weight)| {
        let share = 100.0 * above / all;
        above -= weight;
        (*value, share)
    });
    let points = points.enumerate();
    let points = points.filter(|(n, _)| n % step == 0 || *n >= tail);
    let points: Points = points.map(|(_, point)| point).collect();
    let least = points.last().map_or(0.0, |point| point.1 / 2.0);
    let at: Vec<f64> = points.iter().map(|point| point.0).collect();
    let band = interval::of_shares(&at, &spec.measure, records).into_iter();
    let band =
        band.map(|(at, low, high)| (at, (100.0 - high).max(least), (100.0 - low).max(least)));
    (points, band.collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::log::tests::manifest_of, *};

    pub(in super::super) fn manifest() -> Manifest {
        let design = r#"
            name = "trial"
            question = "Does it pay?"
            rto_min = "agent 8 ms"
            levels = { timers = ["kernel", "agent"] }
            units = { time = "ms", lost = "ms" }
            pivot = true
            effects = [{ measure = "time", stat = "p50", across = "timers", base = "kernel", rows = ["lost"] }]
            [[tables]]
            name = "medians"
            title = "medians"
            rows = ["lost"]
            across = ["timers"]
            columns = [{ measure = "time", stat = "p50", title = "" }]
            [[tables]]
            name = "long"
            title = "long"
            rows = ["lost"]
            columns = [
                { measure = "time", stat = "p50", title = "p50" },
                { measure = "time", stat = "count", title = "requests" },
            ]
            only = { timers = ["agent"] }
            [[charts]]
            title = "over"
            across = ["timers"]
            x = "lost"
            measure = "time"
            [[charts]]
            per = ["lost"]
            across = ["timers"]
            measure = "time"
            [[references]]
            factors = { lost = "9", timers = "published" }
            values = { "time p50" = [7.0] }
        "#;
        manifest_of(toml::from_str(design).unwrap())
    }

    pub(in super::super) fn records(agent_ms: f64) -> Vec<Record> {
        let mut all = Vec::new();
        for lost in ["100", "9"] {
            for run in 0..6 {
                for (timers, ms) in [("agent", agent_ms), ("kernel", 208.0)] {
                    let record = Record::new([("lost", lost), ("timers", timers)], run);
                    all.push(record.with_all("time", [ms, ms + f64::from(run) / 4.0]));
                }
            }
        }
        all
    }

    #[test]
    fn report_is_rendered_from_records() {
        let report = report(&manifest(), &records(16.0));
        assert_eq!(report.findings.len(), 1);
        assert!(
            report.findings[0].contains("agent better in 2 of 2"),
            "{:?}",
            report.findings
        );
        let names: Vec<&str> = report
            .tables
            .iter()
            .map(|table| table.name.as_str())
            .collect();
        assert_eq!(names, ["medians", "long"]);
        let effects = report.effects.iter().map(|table| table.name.as_str());
        assert_eq!(effects.collect::<Vec<_>>(), ["differences", "effects"]);
        // A line for each row, and a column for each level.
        let differences = &report.effects[0];
        assert_eq!(differences.columns, ["lost, ms", "kernel", "agent"]);
        assert_eq!(differences.rows[0][..2], ["9", "208"]);
        assert!(
            differences.rows[0][2].starts_with("-192 [-192"),
            "{differences:?}"
        );
        let medians = &report.tables[0];
        assert_eq!(
            medians.columns,
            ["lost, ms", "kernel", "agent", "published"]
        );
        // Numbers are in ascending order, next to the published values.
        assert_eq!(
            medians.rows,
            [["9", "208", "16", "7"], ["100", "208", "16", ""]]
        );
        let long = &report.tables[1];
        assert_eq!(long.columns, ["lost, ms", "p50", "requests"]);
        assert_eq!(long.rows, [["9", "16", "12"], ["100", "16", "12"]]);
        for table in report.all_tables() {
            assert!(
                table.title.ends_with(" (rto_min: agent 8 ms)"),
                "{}",
                table.title
            );
        }
        assert_eq!(report.charts.len(), 3);
        for chart in &report.charts {
            assert!(crate::chart::svg(std::slice::from_ref(chart)).contains("kernel"));
        }
    }

    #[test]
    fn time_series_has_point_for_each_record() {
        let mut manifest = manifest();
        let design = &mut manifest.design;
        design.units.insert("elapsed".to_owned(), "s".to_owned());
        design.charts.truncate(1);
        design.charts[0].x = Some("elapsed".to_owned());
        let mut records = records(16.0);
        for record in &mut records {
            let at = 10.0 - f64::from(record.run);
            record.values.insert("elapsed".to_owned(), vec![at]);
        }
        records.retain(|record| record.level("lost") == "9");
        let chart = &report(&manifest, &records).charts[0];
        assert_eq!(chart.x.label, "elapsed, s");
        let of = |name: &str| {
            &chart
                .series
                .iter()
                .find(|one| one.name == name)
                .unwrap()
                .points
        };
        // Both arms in one chart, in the order of time.
        assert_eq!(of("kernel").len(), 6);
        assert_eq!(of("agent")[0], (5.0, 16.0));
        assert_eq!(of("agent")[5].0, 10.0);
    }

    #[test]
    fn numbers_have_significant_digits() {
        let design = manifest().design;
        for (value, text) in [
            (207.54, "207.5"),
            (208.0, "208"),
            (0.054, "0.054"),
            (0.0048, "0.0048"),
            (-0.00001, "0"),
            (100.0, "100"),
        ] {
            assert_eq!(design.number("time", value), text);
        }
    }

    #[test]
    fn improvement_is_relative_to_base() {
        let line = |name: &str, points: &[(f64, f64)]| Series::line(name, points.to_vec());
        let mut series = [
            line("default", &[(1.0, 200.0), (2.0, 400.0)]),
            line("short", &[(1.0, 50.0), (2.0, 500.0), (3.0, 1.0)]),
        ];
        improve(&mut series, "default");
        assert_eq!(series[0].points, [(1.0, 1.0), (2.0, 1.0)]);
        // A point without a value of the base is left out.
        assert_eq!(series[1].points, [(1.0, 4.0), (2.0, 0.8)]);
        improve(&mut series, "absent");
        assert!(series.iter().all(|one| one.points.is_empty()));
    }
}
