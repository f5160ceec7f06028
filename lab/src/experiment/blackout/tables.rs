//! What the runs say.

use std::{collections::BTreeMap, time::Duration};

use rto_model::{
    chart::{Chart, Mark, Series},
    predict,
    published::Table as Published,
};

use super::{
    Manifest, RunRecord, SRTT_US,
    plan::{Cell, Mechanism, Setting, ms, us},
};
use crate::{
    report::{Report, Table},
    summary::{median, quantile},
};

/// What the names of published measurements begin with.
const PUBLISHED: &str = "Linux";
/// Worse is more than a jiffy and this share: chance decides over less.
const SHARE: f64 = 0.02;

/// Medians of the cells, milliseconds.
struct Medians(BTreeMap<Cell, f64>);

impl Medians {
    fn of(done: &[RunRecord]) -> Self {
        let mut all: BTreeMap<Cell, Vec<f64>> = BTreeMap::new();
        for one in done {
            all.entry(one.run.cell).or_default().push(ms(one.idle_us));
        }
        let medians = all.into_iter();
        Self(
            medians
                .filter_map(|(cell, values)| Some((cell, median(&values)?)))
                .collect(),
        )
    }

    fn get(&self, mechanism: Mechanism, setting: Setting, disruption_us: u64) -> Option<f64> {
        let cell = Cell {
            mechanism,
            setting,
            disruption_us,
        };
        self.0.get(&cell).copied()
    }

    /// The kernel's own timers; by the agent with the kernel's values if that was not measured.
    fn kernel(&self, disruption_us: u64) -> Option<f64> {
        self.get(Mechanism::Kernel, Setting::KERNEL, disruption_us)
            .or_else(|| self.get(Mechanism::Agent, Setting::KERNEL, disruption_us))
    }
}

pub(super) fn report(manifest: &Manifest, done: &[RunRecord]) -> Report {
    let medians = Medians::of(done);
    let mut tables = vec![overview(manifest, &medians)];
    tables.push(nearness(manifest, &medians));
    tables.push(spread(manifest, done));
    tables.extend(side_by_side(manifest, &medians));
    tables.extend(
        manifest
            .plan
            .settings
            .iter()
            .map(|s| beside(manifest, &medians, *s)),
    );
    Report {
        name: "blackout".to_owned(),
        question: "How long is a connection of one small request at a time idle if all its packets are lost \
                   for a while, by rto_min and backoff?"
            .to_owned(),
        machine: manifest.machine.clone(),
        seed: manifest.seed,
        method: method(manifest, done),
        findings: findings(manifest, &medians),
        tables,
        charts: charts(manifest, &medians),
    }
}

fn method(manifest: &Manifest, done: &[RunRecord]) -> Vec<(String, String)> {
    let plan = &manifest.plan;
    let repeated: u32 = done.iter().map(|done| done.repeated).sum();
    [
        (
            "transaction",
            "1 byte out, 2 bytes back, one at a time; 40 before the disruption".to_owned(),
        ),
        (
            "disruption",
            "all packets of the connection in both directions, from a random moment of a transaction on"
                .to_owned(),
        ),
        (
            "value",
            "the longest time between two responses; the median of the runs".to_owned(),
        ),
        ("link", format!("{:?}", manifest.link).to_lowercase()),
        (
            "runs of a cell",
            format!("{}; {} by route and sysctl", plan.runs, plan.control_runs),
        ),
        (
            "attempts that did not count (nothing lost, or too long)",
            repeated.to_string(),
        ),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// In the manner of the published tables.
fn overview(manifest: &Manifest, medians: &Medians) -> Table {
    let settings = &manifest.plan.settings;
    let mechanism = main_way(manifest);
    let names: Vec<String> = settings.iter().map(|setting| setting.name()).collect();
    let mut columns = vec!["lost for, ms"];
    columns.extend(names.iter().map(String::as_str));
    columns.push("kernel");
    let title = format!("Idle, ms: medians, settings by {mechanism}");
    let mut table = Table::new("medians", &title, &columns);
    for &disruption_us in &manifest.plan.disruptions_us {
        let mut row = vec![number(ms(disruption_us))];
        for &setting in settings {
            row.push(cell(medians.get(mechanism, setting, disruption_us)));
        }
        row.push(cell(medians.kernel(disruption_us)));
        table.row(row);
    }
    table
}

/// The agent, unless it was not asked for.
fn main_way(manifest: &Manifest) -> Mechanism {
    let mechanisms = &manifest.plan.mechanisms;
    let first = mechanisms
        .iter()
        .find(|mechanism| **mechanism != Mechanism::Kernel);
    if mechanisms.contains(&Mechanism::Agent) {
        Mechanism::Agent
    } else {
        first.copied().unwrap_or(Mechanism::Kernel)
    }
}

/// For each rto_min, measured and published next to each other.
fn side_by_side(manifest: &Manifest, medians: &Medians) -> Vec<Table> {
    let mechanism = main_way(manifest);
    let references = references(manifest);
    let published: Vec<&Reference> = references
        .iter()
        .filter(|(name, _)| name.starts_with(PUBLISHED))
        .collect();
    let mut all = Vec::new();
    for rto_min_us in rto_mins(manifest) {
        let mut columns = vec!["lost for, ms".to_owned()];
        let settings = manifest.plan.settings.iter();
        let settings: Vec<Setting> = settings
            .copied()
            .filter(|setting| setting.rto_min_us == rto_min_us)
            .collect();
        for setting in &settings {
            let kind = setting.kind();
            columns.push(format!("{kind}, here"));
            columns.extend(published.iter().map(|(name, _)| format!("{kind}, {name}")));
        }
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        let ms_of = rto_min_us / 1000;
        let title = format!("Idle, ms: rto_min {ms_of} ms, here and published");
        let mut table = Table::new(&format!("published-{ms_of}-ms"), &title, &columns);
        for &disruption_us in &manifest.plan.disruptions_us {
            let mut row = vec![number(ms(disruption_us))];
            for &setting in &settings {
                row.push(cell(medians.get(mechanism, setting, disruption_us)));
                let values = published
                    .iter()
                    .map(|(_, idle_ms)| idle_ms(setting, disruption_us));
                row.extend(values.map(cell));
            }
            table.row(row);
        }
        all.push(table);
    }
    all
}

/// From the lowest.
fn rto_mins(manifest: &Manifest) -> Vec<u64> {
    let mut all: Vec<u64> = manifest
        .plan
        .settings
        .iter()
        .map(|s| s.rto_min_us)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// One setting: measured in every mechanism, computed, and published.
fn beside(manifest: &Manifest, medians: &Medians, setting: Setting) -> Table {
    let references = references(manifest);
    let mechanisms: Vec<Mechanism> = manifest.plan.mechanisms.clone();
    let names: Vec<String> = mechanisms.iter().map(Mechanism::to_string).collect();
    let mut columns = vec!["lost for, ms"];
    columns.extend(names.iter().map(String::as_str));
    columns.extend(references.iter().map(|(name, _)| *name));
    let name = setting.name().replace(' ', "-");
    let title = format!(
        "Idle, ms: {}, measured, computed and published",
        setting.name()
    );
    let mut table = Table::new(&name, &title, &columns);
    for &disruption_us in &manifest.plan.disruptions_us {
        let mut row = vec![number(ms(disruption_us))];
        for &mechanism in &mechanisms {
            let setting = if mechanism == Mechanism::Kernel {
                Setting::KERNEL
            } else {
                setting
            };
            row.push(cell(medians.get(mechanism, setting, disruption_us)));
        }
        for (_, idle_ms) in &references {
            row.push(cell(idle_ms(setting, disruption_us)));
        }
        table.row(row);
    }
    table
}

type Reference = (&'static str, Box<dyn Fn(Setting, u64) -> Option<f64>>);

/// What measured values are compared with.
fn references(manifest: &Manifest) -> Vec<Reference> {
    let hz = manifest.machine.hz;
    let published = |table: Published| {
        move |setting: Setting, disruption_us| table.idle_ms(setting.published(), disruption_us)
    };
    vec![
        (
            "theory",
            Box::new(|setting, disruption_us| Some(setting.theory_ms(disruption_us))),
        ),
        (
            "kernel model",
            Box::new(move |setting, disruption_us| {
                Some(setting.model_ms(hz, SRTT_US, disruption_us))
            }),
        ),
        ("Linux 6.5", Box::new(published(Published::linux_6_5()))),
        ("Linux 6.11", Box::new(published(Published::linux_6_11()))),
    ]
}

/// How near the measured medians are to everything else.
fn nearness(manifest: &Manifest, medians: &Medians) -> Table {
    let mut table = Table::new(
        "nearness",
        "Measured medians against others: share of the cells whose difference is at most so much, %",
        &[
            "against",
            "cells",
            "a jiffy",
            "1 %",
            "5 %",
            "10 %",
            "25 %",
            "median, %",
            "worst, %",
        ],
    );
    let mechanism = main_way(manifest);
    let mut others: Vec<Reference> = references(manifest);
    for other in [Mechanism::Route, Mechanism::Sysctl] {
        if manifest.plan.mechanisms.contains(&other) && other != mechanism {
            let medians = Medians(medians.0.clone());
            let name = if other == Mechanism::Route {
                "route"
            } else {
                "sysctl"
            };
            others.push((
                name,
                Box::new(move |setting, disruption_us| medians.get(other, setting, disruption_us)),
            ));
        }
    }
    for (name, idle_ms) in &others {
        let pairs = pairs(manifest, medians, mechanism, name, idle_ms);
        if pairs.is_empty() {
            continue;
        }
        let errors: Vec<f64> = pairs
            .iter()
            .map(|(m, o)| ((m - o) / o).abs() * 100.0)
            .collect();
        let jiffies = pairs
            .iter()
            .filter(|(m, o)| (m - o).abs() <= jiffy_ms(manifest));
        let share = |count: usize| format!("{}", count * 100 / pairs.len());
        let within = |limit: f64| share(errors.iter().filter(|e| **e <= limit).count());
        table.row([
            (*name).to_owned(),
            pairs.len().to_string(),
            share(jiffies.count()),
            within(1.0),
            within(5.0),
            within(10.0),
            within(25.0),
            format!("{:.1}", median(&errors).unwrap_or(0.0)),
            format!("{:.0}", quantile(&errors, 1.0).unwrap_or(0.0)),
        ]);
    }
    table
}

/// Measured and other, of the cells that both have; published ones of the same rto_min only.
fn pairs(
    manifest: &Manifest,
    medians: &Medians,
    mechanism: Mechanism,
    name: &str,
    other: &dyn Fn(Setting, u64) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let cells = manifest.plan.cells().into_iter();
    cells
        .filter(|cell| cell.mechanism == mechanism)
        .filter(|cell| cell.setting.is_published() || !name.starts_with(PUBLISHED))
        .filter_map(|cell| {
            let Cell {
                setting,
                disruption_us,
                ..
            } = cell;
            Some((
                medians.get(mechanism, setting, disruption_us)?,
                other(setting, disruption_us)?,
            ))
        })
        .collect()
}

/// How far the runs of a cell lie apart.
fn spread(manifest: &Manifest, done: &[RunRecord]) -> Table {
    let mut table = Table::new(
        "spread",
        "All runs of a setting over its disruptions: idle beyond the disruption, ms",
        &["setting", "by", "runs", "least", "median", "p90", "largest"],
    );
    for (mechanism, setting) in manifest.plan.testbeds() {
        let of_post = done.iter().filter(|done| {
            (done.run.cell.mechanism, done.run.cell.setting) == (mechanism, setting)
        });
        let beyond: Vec<f64> = of_post
            .map(|done| ms(done.idle_us) - ms(done.blackout_us))
            .collect();
        let at = |share| number(quantile(&beyond, share).unwrap_or(f64::NAN));
        table.row([
            setting.name(),
            mechanism.to_string(),
            beyond.len().to_string(),
            at(0.0),
            at(0.5),
            at(0.9),
            at(1.0),
        ]);
    }
    table
}

fn findings(manifest: &Manifest, medians: &Medians) -> Vec<String> {
    let mut findings = Vec::new();
    let mechanism = main_way(manifest);
    for &setting in &manifest.plan.settings {
        if setting == Setting::KERNEL {
            continue;
        }
        let both: Vec<(u64, f64, f64)> = manifest
            .plan
            .disruptions_us
            .iter()
            .filter_map(|&disruption_us| {
                let own = medians.get(mechanism, setting, disruption_us)?;
                Some((disruption_us, own, medians.kernel(disruption_us)?))
            })
            .collect();
        if both.is_empty() {
            continue;
        }
        let worse: Vec<_> = both
            .iter()
            .filter(|(_, own, kernel)| *own > kernel * (1.0 + SHARE) + jiffy_ms(manifest))
            .collect();
        let ratios: Vec<f64> = both.iter().map(|(_, own, kernel)| kernel / own).collect();
        let mut text = format!(
            "{}: over {} disruptions the kernel's own idle time divided by that with the setting is {:.2} in the \
             median, {:.2} at best, {:.2} at worst",
            setting.name(),
            both.len(),
            median(&ratios).unwrap_or(1.0),
            quantile(&ratios, 1.0).unwrap_or(1.0),
            quantile(&ratios, 0.0).unwrap_or(1.0)
        );
        if worse.is_empty() {
            text.push_str("; worse in none.");
        } else {
            let cells: Vec<String> = worse
                .iter()
                .map(|(disruption_us, own, kernel)| {
                    format!("{own:.0} for {kernel:.0} ms at {} ms", ms(*disruption_us))
                })
                .collect();
            text.push_str(&format!(
                "; worse in {}: {}.",
                worse.len(),
                cells.join(", ")
            ));
        }
        findings.push(text);
    }
    for (name, idle_ms) in references(manifest).iter().skip(1) {
        let pairs = pairs(manifest, medians, mechanism, name, idle_ms);
        let near = pairs
            .iter()
            .filter(|(m, o)| (m - o).abs() <= o * 0.05)
            .count();
        if !pairs.is_empty() {
            findings.push(format!(
                "{} of {} medians are within 5 % of {name}.",
                near,
                pairs.len()
            ));
        }
    }
    findings
}

/// For each setting: measured, computed and published; then the ratios.
fn charts(manifest: &Manifest, medians: &Medians) -> Vec<Chart> {
    let plan = &manifest.plan;
    let mechanism = main_way(manifest);
    let curve = |all: &[u64], idle_ms: &dyn Fn(u64) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = all.iter().filter_map(|&us| Some((ms(us), idle_ms(us)?)));
        points.collect()
    };
    // Timers make steps, which the measured disruptions alone would hide.
    let given: Vec<_> = plan
        .disruptions_us
        .iter()
        .copied()
        .map(Duration::from_micros)
        .collect();
    let dense: Vec<u64> = predict::between(&given).into_iter().map(us).collect();
    let mut charts = Vec::new();
    for &setting in &plan.settings {
        let mut series = vec![Series {
            name: format!("measured, by {mechanism}"),
            mark: Mark::Points,
            points: curve(&plan.disruptions_us, &|us| {
                medians.get(mechanism, setting, us)
            }),
        }];
        for (name, idle_ms) in references(manifest) {
            let computed = idle_ms(setting, dense.first().copied().unwrap_or(0) + 1).is_some();
            let at = if computed {
                &dense
            } else {
                &plan.disruptions_us
            };
            series.push(Series::line(name, curve(at, &|us| idle_ms(setting, us))));
        }
        charts.push(predict::idle_chart(&setting.name(), series));
    }
    let ratios = plan.settings.iter().map(|&setting| {
        let ratio = |us| Some(medians.get(mechanism, setting, us)? / medians.kernel(us)?);
        Series::line(&setting.name(), curve(&plan.disruptions_us, &ratio))
    });
    charts.push(predict::ratio_chart(ratios.collect()));
    for chart in &mut charts {
        chart.series.retain(|series| !series.points.is_empty());
    }
    // What was not measured cannot be drawn.
    charts.retain(|chart| chart.series.iter().any(|series| series.points.len() > 1));
    charts
}

#[expect(clippy::cast_precision_loss, reason = "some thousand at most")]
fn jiffy_ms(manifest: &Manifest) -> f64 {
    1000.0 / manifest.machine.hz as f64
}

fn cell(value: Option<f64>) -> String {
    value.map(number).unwrap_or_default()
}

/// To a tenth of a millisecond.
fn number(ms: f64) -> String {
    let text = format!("{ms:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}
