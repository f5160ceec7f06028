//! What the estimators make of the samples.

use rto_model::{
    advice::upper_bound,
    chart::{Axis, Chart, Legend, Series},
    estimator::{Linux, Rfc6298, Weights},
    study::{Sampling, Shares, Study, weights_table},
};
use rto_testbed::machine::Machine;

use super::{Options, Source};
use crate::{
    report::{Method, Report, Table},
    summary::quantile,
};

/// Published, W1 with one sample a window: load in Mbit/s of a bottleneck of 100, within, exceeding, RTO > 1 s, %.
const PUBLISHED: [(&str, [u64; 3]); 3] = [
    ("load-75", [83, 17, 0]),
    ("load-100", [50, 0, 50]),
    ("load-125", [50, 0, 50]),
];

pub(super) fn report(
    sources: &[Source],
    options: &Options,
    mut method: Method,
    machine: Machine,
) -> Report {
    method.push((
        "judged".to_owned(),
        "each sample against the RTO before it; weights: what the estimator takes; Linux: every segment"
            .to_owned(),
    ));
    let mut tables = vec![samples(sources)];
    let mut findings = Vec::new();
    let mut charts = Vec::new();
    for source in sources {
        tables.push(weights(source, options));
        let linux = linux(source, options, &machine);
        findings.extend(finding(source, options, &linux));
        tables.push(linux_table(source, &linux));
        charts.push(chart(source, options, &linux));
    }
    if let Some(table) = published(sources) {
        tables.push(table);
    }
    charts.retain(|chart| chart.series.iter().all(|s| s.points.len() > 1));
    Report {
        name: "estimator".to_owned(),
        question: "How often would an RTO be too short, by estimator, sampling and minimum?"
            .to_owned(),
        machine,
        seed: options.seed,
        method,
        findings,
        tables,
        charts,
    }
}

fn samples(sources: &[Source]) -> Table {
    let mut table = Table::new(
        "samples",
        "RTT samples, ms",
        &[
            "of", "flows", "samples", "least", "p50", "p90", "p99", "largest", "remarks",
        ],
    );
    for source in sources {
        let rtts = rtts_ms(source);
        let at = |share| format!("{:.1}", quantile(&rtts, share).unwrap_or(f64::NAN));
        table.row([
            source.title.clone(),
            source.flows.len().to_string(),
            rtts.len().to_string(),
            at(0.0),
            at(0.5),
            at(0.9),
            at(0.99),
            at(1.0),
            source.remarks.join("; "),
        ]);
    }
    table
}

#[expect(clippy::cast_precision_loss, reason = "seconds")]
fn rtts_ms(source: &Source) -> Vec<f64> {
    let all = source.flows.iter().flatten();
    all.map(|sample| sample.rtt_us as f64 / 1000.0).collect()
}

/// W1 to W9, and one's own, by sampling.
fn weights(source: &Source, options: &Options) -> Table {
    let minimums = options.minimums_us.iter();
    let minimums: Vec<String> = minimums
        .map(|us| format!("avoid at {} ms", us / 1000))
        .collect();
    let mut columns = vec![
        "weights",
        "alpha",
        "beta",
        "sampling",
        "judged",
        "within",
        "exceeding",
        "RTO > 1 s",
    ];
    columns.extend(minimums.iter().map(String::as_str));
    let title = format!("RFC 6298 over {}: shares, %", source.title);
    let mut table = Table::new(&format!("weights-{}", source.name), &title, &columns);
    let mut row = |name: &str, weights: Weights, sampling: Sampling, shares: &Shares| {
        let mut cells = vec![
            name.to_owned(),
            weights.alpha.to_string(),
            weights.beta.to_string(),
            format!("{sampling:?}"),
            shares.judged.to_string(),
        ];
        let counts = [shares.within, shares.exceeding, shares.long];
        let avoided = shares.avoided.iter().map(|(_, count)| *count);
        cells.extend(
            counts
                .into_iter()
                .chain(avoided)
                .map(|count| percent(shares, count)),
        );
        table.row(cells);
    };
    for one in weights_table(&source.flows, &options.minimums_us) {
        row(one.name, one.weights, one.sampling, &one.shares);
    }
    if let Some(own) = &options.own {
        for sampling in Sampling::ALL {
            let shares = Study::published(sampling).run(own, &source.flows, &options.minimums_us);
            row("own", own.weights, sampling, &shares);
        }
    }
    table
}

/// Linux's estimator by rto_min: what it would retransmit spuriously.
fn linux(source: &Source, options: &Options, machine: &Machine) -> Shares {
    let hz = u32::try_from(machine.hz).unwrap_or(u32::MAX);
    Study::every(Sampling::All).run(&Linux::new(hz), &source.flows, &options.rto_mins_us)
}

fn linux_table(source: &Source, shares: &Shares) -> Table {
    let title = format!(
        "Linux's estimator over {}: spurious retransmissions",
        source.title
    );
    let mut table = Table::new(
        &format!("linux-{}", source.name),
        &title,
        &["rto_min, ms", "segments", "spurious", "share, %"],
    );
    for (rto_min_us, avoided) in &shares.avoided {
        let spurious = shares.judged - avoided;
        table.row([
            (rto_min_us / 1000).to_string(),
            shares.judged.to_string(),
            spurious.to_string(),
            percent(shares, spurious),
        ]);
    }
    table
}

/// Measured beside published, where the loads are those.
fn published(sources: &[Source]) -> Option<Table> {
    let mut table = Table::new(
        "published",
        "W1, one sample a window, beside published shares of another bottleneck, %",
        &[
            "load",
            "within",
            "published",
            "exceeding",
            "published",
            "RTO > 1 s",
            "published",
        ],
    );
    for source in sources {
        let Some((_, [within, exceeding, long])) =
            PUBLISHED.iter().find(|(name, _)| *name == source.name)
        else {
            continue;
        };
        let shares =
            Study::published(Sampling::One).run(&Rfc6298::new(Weights::W1), &source.flows, &[]);
        table.row([
            source.title.clone(),
            percent(&shares, shares.within),
            within.to_string(),
            percent(&shares, shares.exceeding),
            exceeding.to_string(),
            percent(&shares, shares.long),
            long.to_string(),
        ]);
    }
    (!table.rows.is_empty()).then_some(table)
}

fn finding(source: &Source, options: &Options, linux: &Shares) -> Vec<String> {
    let table = weights_table(&source.flows, &options.minimums_us);
    let of = |sampling| table.iter().filter(move |row| row.sampling == sampling);
    let spurious = |shares: &Shares| shares.of(shares.spurious());
    let mut findings = Vec::new();
    for sampling in Sampling::ALL {
        let least = of(sampling).min_by(|a, b| spurious(&a.shares).total_cmp(&spurious(&b.shares)));
        let most = of(sampling).max_by(|a, b| spurious(&a.shares).total_cmp(&spurious(&b.shares)));
        if let (Some(least), Some(most)) = (least, most) {
            findings.push(format!(
                "{}, sampling {sampling:?}: of {} samples {} exceed the RTO of {} (least), {} that of {} (most){}.",
                source.title,
                least.shares.judged,
                least.shares.spurious(),
                least.name,
                most.shares.spurious(),
                most.name,
                if apart(&least.shares, &most.shares) {
                    ""
                } else {
                    ", which chance may have made"
                }
            ));
        }
    }
    let enough = linux
        .avoided
        .iter()
        .find(|(_, avoided)| *avoided == linux.judged);
    findings.push(match enough {
        Some((rto_min_us, _)) => format!(
            "{}: with Linux's estimator no segment of {} would be retransmitted spuriously at an rto_min of {} ms \
             or more.",
            source.title,
            linux.judged,
            rto_min_us / 1000
        ),
        None => format!(
            "{}: with Linux's estimator some segment of {} would be retransmitted spuriously at every rto_min that \
             was tried.",
            source.title, linux.judged
        ),
    });
    findings
}

/// Whether counts differ by more than chance makes likely: the bound at 95 % of the lower one is below the other.
fn apart(least: &Shares, most: &Shares) -> bool {
    upper_bound(least.spurious(), least.judged) < most.of(most.spurious())
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of a second")]
fn chart(source: &Source, options: &Options, linux: &Shares) -> Chart {
    let curve = |name: &str, shares: &Shares| {
        let points = shares.avoided.iter();
        let points = points.map(|(us, avoided)| {
            (
                *us as f64 / 1000.0,
                shares.of(shares.judged - avoided) * 100.0,
            )
        });
        Series::line(name, points.collect())
    };
    let all = |weights| {
        Study::every(Sampling::All).run(&Rfc6298::new(weights), &source.flows, &options.rto_mins_us)
    };
    Chart {
        title: format!("{}: spurious retransmissions", source.title),
        x: Axis::ms("minimum"),
        y: Axis::percent("spurious retransmissions"),
        log_x: true,
        log_y: false,
        legend: Legend::UpperRight,
        series: vec![
            curve("Linux", linux),
            curve("RFC 6298, W1", &all(Weights::W1)),
            curve("RFC 6298, W8", &all(Weights::W8)),
        ],
    }
}

fn percent(shares: &Shares, count: u64) -> String {
    format!("{:.2}", shares.of(count) * 100.0)
}
