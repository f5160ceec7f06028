//! The report of `rto-lab tune`.

use std::{collections::BTreeMap, sync::LazyLock};

use rand::{SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::machine::Machine;
use serde::Deserialize;

use super::{
    Options, Outage, Results, Saturated, Timed,
    criteria::{Limit, criteria, digits},
    fleet::{self, Prefix},
    host::{Host, Point},
    path::Path,
    scenarios::{STEP_S, auto, step_path},
};
use crate::{
    chart::{Axis, Chart, Series},
    report::{Method, Report, Table},
    summary::{median, quantile, share},
};

/// The criteria, and the design of the report.
pub(super) static DEFINITION: LazyLock<Definition> = LazyLock::new(|| {
    let text = include_str!("../../../experiments/tune.toml");
    toml::from_str(text).unwrap_or_default()
});
/// Seconds per point of a chart.
const POINT_S: u32 = 60;
/// Draws for a quantile of a chart.
const DRAWS: usize = 20_000;

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Definition {
    question: String,
    method: Method,
    pub(super) criteria: BTreeMap<String, Vec<Limit>>,
    tables: Vec<Heading>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Heading {
    name: String,
    title: String,
    columns: Vec<String>,
}

impl Definition {
    /// A table without lines.
    fn table(&self, name: &str) -> Table {
        let heading = self.tables.iter().find(|heading| heading.name == name);
        let (title, columns) = heading.map_or_else(Default::default, |heading| {
            (heading.title.as_str(), heading.columns.clone())
        });
        Table::with_columns(name, title, columns)
    }
}

pub(super) fn report(results: &Results, options: &Options, machine: Machine) -> Report {
    let criteria = criteria(results);
    let mut table = DEFINITION.table("criteria");
    for one in &criteria {
        let holds = if one.met { "yes" } else { "NO" };
        table.row([&*one.name, &one.wanted, &one.found, holds].map(str::to_owned));
    }
    let missed = criteria.iter().filter(|one| !one.met);
    let mut findings: Vec<String> = missed
        .map(|one| {
            format!(
                "Does not hold: {}: {} ({}).",
                one.name, one.found, one.wanted
            )
        })
        .collect();
    if findings.is_empty() {
        findings.push(format!("All {} criteria hold.", criteria.len()));
    }
    Report {
        name: "tune".to_owned(),
        question: DEFINITION.question.clone(),
        machine,
        seed: options.seed,
        method: method(results, options),
        findings,
        effects: Vec::new(),
        tables: vec![
            table,
            fleet_table(&results.prefixes),
            scenarios(results),
            steps(results),
            outages(&results.outages),
            saturation(&results.saturated),
        ],
        charts: charts(options),
    }
}

fn method(results: &Results, options: &Options) -> Method {
    let connections: u64 = results.prefixes.iter().map(|one| one.connections).sum();
    let prefixes = format!(
        "{} generated ones for {} h, {connections} connections: 1 to 40 a second, 0.2 to 100 ms, up to 1 % of the packets \
         lost each way; to half of them something happens",
        results.prefixes.len(),
        digits(f64::from(options.seconds) / 3600.0)
    );
    let mut method = vec![("prefixes".to_owned(), prefixes)];
    method.extend_from_slice(&DEFINITION.method);
    method
}

fn fleet_table(prefixes: &[Prefix]) -> Table {
    let mut table = DEFINITION.table("prefixes");
    let shapes = ["lognormal", "Pareto", "bimodal", "queue"];
    for eventful in [false, true] {
        for shape in shapes.into_iter().map(Some).chain([None]) {
            let is_of = |p: &&Prefix| shape.is_none_or(|shape| p.shape == shape);
            let of: Vec<&Prefix> = prefixes
                .iter()
                .filter(|p| p.eventful == eventful)
                .filter(is_of)
                .collect();
            let values = |value: fn(&Prefix) -> Option<f64>| -> Vec<f64> {
                of.iter().filter_map(|p| value(p)).collect()
            };
            let percent = values(|p| Some(p.spurious * 100.0));
            let ratios = values(|p| p.ratio);
            let changes = values(|p| p.changes_per_h);
            let saved = values(|p| Some(p.saved_ms));
            let at = |values: &[f64], share| quantile(values, share).map_or("-".to_owned(), digits);
            table.row([
                shape.unwrap_or("all").to_owned(),
                if eventful { "yes" } else { "no" }.to_owned(),
                of.len().to_string(),
                at(&percent, 0.5),
                at(&percent, 0.99),
                at(&percent, 1.0),
                median(&ratios).map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                quantile(&ratios, 0.9).map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                at(&changes, 0.9),
                at(&changes, 0.99),
                at(&changes, 1.0),
                of.iter().map(|p| p.alarms).sum::<u64>().to_string(),
                median(&saved).map_or("-".to_owned(), |saved| format!("{saved:.1}")),
            ]);
        }
    }
    table
}

fn scenarios(results: &Results) -> Table {
    let mut table = DEFINITION.table("scenarios");
    for (name, compared) in [
        ("metropolitan network", &results.metro),
        ("10 or 150 ms, every 10 min", &results.flapping),
        ("a queue each evening", &results.evening),
    ] {
        for (value, course) in compared {
            table.row([
                name.to_owned(),
                value.clone(),
                digits(course.timer_ms),
                digits(course.spurious * 100.0),
                digits(course.worst * 100.0),
                course.changes.to_string(),
                format!("{:.1}", course.saved_ms),
            ]);
        }
    }
    table
}

fn steps(results: &Results) -> Table {
    let mut table = DEFINITION.table("steps");
    let all = results.steps.iter().zip(&results.fixed_steps);
    for ((auto, fixed), orphan) in all.zip(&results.orphans) {
        let fell_back = orphan.fell_back;
        table.row([
            digits(auto.per_s),
            auto.spurious.to_string(),
            digits(auto.clean_after_s),
            auto.changes.to_string(),
            digits(auto.timer_ms),
            fixed.spurious.to_string(),
            orphan.spurious.to_string(),
            fell_back.map_or("-".to_owned(), |one| format!("{:.1}", one.at_s)),
            fell_back.map_or("-".to_owned(), |one| one.judged.to_string()),
        ]);
    }
    table
}

fn outages(outages: &[Outage]) -> Table {
    let mut table = DEFINITION.table("outages");
    for one in outages {
        let Timed {
            kernel,
            bare,
            guarded,
        } = one.timed;
        let gains = one.timed.gains_ms().map(|ms| format!("{ms:.0}"));
        let syns = [bare, guarded].map(|sums| {
            let syns = share(sums.outage_syns, kernel.outage_syns);
            format!("{syns:.2}")
        });
        let outage = [digits(one.seconds), digits(one.per_s)];
        table.row(outage.into_iter().chain(gains).chain(syns));
    }
    table
}

fn saturation(saturated: &[Saturated]) -> Table {
    let mut table = DEFINITION.table("saturation");
    for one in saturated {
        let Timed {
            kernel,
            bare,
            guarded,
        } = one.timed;
        let late = [kernel, bare, guarded];
        let late = late.map(|sums| format!("{:.1}", sums.later_late_share() * 100.0));
        let server = [
            digits(one.per_s),
            digits(one.load * 100.0),
            digits(one.stall_s),
        ];
        let syns = format!("{:.2}", guarded.syns_per_attempt());
        table.row(server.into_iter().chain(late).chain([syns]));
    }
    table
}

/// Charts of the step, and of one generated prefix of each shape with events.
fn charts(options: &Options) -> Vec<Chart> {
    let mut charts = Vec::new();
    let step = format!("step from 10 to 150 ms after {STEP_S} s, 20 connections a second");
    let mut add = |title: &str, path: Path, seconds: u32, seed: u64| {
        let mut host = Host::new(path.clone(), auto(), seed, POINT_S);
        host.run(seconds, true);
        charts.extend(drawn(title, &path, &host.end().points, seed));
    };
    add(&step, step_path(20.0), 2 * 3_600, options.seed);
    for n in [28, 5, 14, 23] {
        let (path, seed) = fleet::path(n, options.seconds, options.seed);
        let title = format!("generated prefix {n}, {}", path.shape.name());
        add(&title, path, options.seconds, seed);
    }
    charts
}

fn drawn(title: &str, path: &Path, points: &[Point], seed: u64) -> Vec<Chart> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let timer = points.iter().map(|p| (p.at_s / 3600.0, p.timer_ms));
    let truth = points.iter().map(|p| {
        let from_s = p.at_s - f64::from(POINT_S);
        let us = path.quantile_us(0.999, from_s, p.at_s, DRAWS, &mut rng);
        (p.at_s / 3600.0, us / 1e3)
    });
    let percent = |p: &Point| p.spurious_share() * 100.0;
    let spurious = points.iter().map(|p| (p.at_s / 3600.0, percent(p)));
    let chart = |title: String, y, log_y, series| Chart {
        title,
        x: Axis::number("hours"),
        y,
        log_x: false,
        log_y,
        series,
    };
    let times = vec![
        Series::line("initial_rto", timer.collect()),
        Series::line("p99.9 of the path", truth.collect()),
    ];
    let shares = vec![Series::line(
        "connections with a spurious copy",
        spurious.collect(),
    )];
    vec![
        chart(format!("{title}: timer"), Axis::ms("time"), true, times),
        chart(
            format!("{title}: spurious"),
            Axis::percent("of a minute"),
            false,
            shares,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn tune_report_of_few_scenarios() {
        let options = Options {
            prefixes: 8,
            seconds: 1_200,
            hours: 0,
            rates: &[1.0, 5.0],
            server_per_s: 100.0,
            seed: 1,
        };
        let results = super::super::simulate(&options);
        let report = report(&results, &options, Machine::here().unwrap());
        let rows = report
            .tables
            .iter()
            .map(|table| (table.name.as_str(), table.rows.len()));
        assert_eq!(
            rows.collect::<Vec<_>>(),
            [
                ("criteria", 14),
                ("prefixes", 10),
                ("scenarios", 10),
                ("steps", 2),
                ("outages", 13),
                ("saturation", 3)
            ]
        );
        for table in &report.tables {
            assert!(!table.title.is_empty(), "{}", table.name);
            assert_eq!(table.columns.len(), table.rows[0].len(), "{}", table.name);
        }
        let limits = DEFINITION.criteria.values().map(Vec::len);
        // Orphans, outages, prefixes, saturated servers, a step.
        assert_eq!(limits.collect::<Vec<_>>(), [2, 3, 6, 2, 4]);
        // The step and four prefixes, each with two charts that can be drawn.
        assert_eq!(report.charts.len(), 10);
        let dir = tempfile::tempdir().unwrap();
        report.write(dir.path()).unwrap();
        assert!(dir.path().join("tune.html").exists());
        // A missed criterion is reported.
        let missed = report.tables[0]
            .rows
            .iter()
            .filter(|row| row[3] == "NO")
            .count();
        let message = report
            .findings
            .iter()
            .filter(|finding| finding.starts_with("Does not hold: "));
        assert_eq!(message.count(), missed);
    }

    #[test]
    fn tuning_page_is_current() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/research/tuning.md");
        let page = fs::read_to_string(page).unwrap();
        let part = |name: &str| {
            let (_, rest) = page
                .split_once(&format!("<!-- tune: {name} -->\n"))
                .unwrap();
            let (part, _) = rest.split_once(&format!("<!-- end: {name} -->")).unwrap();
            part.to_owned()
        };
        for name in [
            "criteria",
            "prefixes",
            "scenarios",
            "steps",
            "outages",
            "saturation",
        ] {
            assert!(part(name).lines().count() > 5, "{name} was never simulated");
        }
        assert!(
            !part("criteria").contains("| NO "),
            "a criterion does not hold"
        );
        // Repeats the fast simulations. A debug build omits the largest server.
        let most_per_s = if cfg!(debug_assertions) { 1e3 } else { 1e9 };
        let rows = saturation(&super::super::saturated(most_per_s, 1));
        let page = part("saturation");
        for row in rows.rows {
            let is_row = |line: &&str| {
                line.split('|')
                    .map(str::trim)
                    .filter(|cell| !cell.is_empty())
                    .eq(row.iter())
            };
            assert!(page.lines().any(|line| is_row(&line)), "{row:?}");
        }
    }
}
