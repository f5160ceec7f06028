//! What the completion times say.

use std::time::Duration;

use rto_model::chart::{Axis, Chart, Legend, Mark, Series};
use rto_testbed::{machine::Machine, workload::http::TIMEOUT};

use super::{
    AUTO, INITIAL_RTO, Options, Outcomes, POLICY, SEEN,
    case::{Case, ConnectionReuse, Coverage},
    lane::{DELAY, Outcome},
    lanes, published,
};
use crate::{
    engine::Stat,
    policy::one_line,
    report::{Report, Table},
    summary::{mean, median, quantile},
    topology::LinkBackend,
};

/// A request that takes this much longer than without loss is disturbed, milliseconds.
const DISTURBED_MS: f64 = 15.0;
/// What is later by less than this and a tenth is the machine's own spread, milliseconds.
const LATER_MS: f64 = 2.0;
/// Bars of a histogram in a decade.
const BARS: i32 = 10;

pub(super) fn report(
    options: &Options<'_>,
    machine: Machine,
    cases: &[Case],
    outcomes: &Outcomes,
) -> Report {
    let all: Vec<Summary<'_>> = outcomes
        .iter()
        .map(|(&(case, coverage), outcome)| {
            let undisturbed = undisturbed(cases, outcomes, coverage, cases[case].reuse);
            Summary::of(&cases[case], coverage, outcome, undisturbed)
        })
        .collect();
    Report {
        name: "loss".to_owned(),
        question: "What does a lost packet cost a small HTTP/1.1 transfer, and what of it does the agent save?"
            .to_owned(),
        machine,
        seed: options.seed,
        method: method(options),
        findings: findings(cases, &all),
        tables: vec![summary_table(&all), published_table(options.backend, &all)],
        charts: charts(cases, &all),
    }
}

/// One case for one coverage, milliseconds.
struct Summary<'a> {
    case: &'a Case,
    coverage: Coverage,
    outcome: &'a Outcome,
    ms: Vec<f64>,
    disturbed: f64,
    mean: f64,
}

impl<'a> Summary<'a> {
    #[expect(clippy::cast_precision_loss, reason = "some seconds, some thousand")]
    fn of(case: &'a Case, coverage: Coverage, outcome: &'a Outcome, undisturbed: f64) -> Self {
        let ms: Vec<f64> = outcome
            .took
            .iter()
            .map(|took| took.us as f64 / 1000.0)
            .collect();
        let count = ms.len().max(1) as f64;
        let disturbed = ms.iter().filter(|&&ms| ms >= undisturbed + DISTURBED_MS);
        Self {
            case,
            coverage,
            outcome,
            disturbed: disturbed.count() as f64 / count,
            mean: mean(&ms).unwrap_or(0.0),
            ms,
        }
    }

    fn at(&self, share: f64) -> f64 {
        quantile(&self.ms, share).unwrap_or(0.0)
    }

    /// Nothing of a few, of which it would be the longest.
    fn p99(&self) -> String {
        let p99 = Stat::Quantile(0.99).of_values(&self.ms);
        p99.map_or_else(String::new, |ms| format!("{ms:.1}"))
    }

    fn timed_out(&self) -> usize {
        self.outcome
            .took
            .iter()
            .filter(|took| took.timed_out)
            .count()
    }
}

/// The median of a request without loss.
fn undisturbed(
    cases: &[Case],
    outcomes: &Outcomes,
    coverage: Coverage,
    reuse: ConnectionReuse,
) -> f64 {
    let of = |coverage: Coverage| {
        let same =
            |case: &Case| (case.reuse == ConnectionReuse::New) == (reuse == ConnectionReuse::New);
        let index = cases
            .iter()
            .position(|case| case.rule.is_none() && same(case))?;
        let took = &outcomes.get(&(index, coverage))?.took;
        #[expect(clippy::cast_precision_loss, reason = "some milliseconds")]
        let ms: Vec<f64> = took.iter().map(|took| took.us as f64 / 1000.0).collect();
        median(&ms)
    };
    of(coverage).or_else(|| of(Coverage::Kernel)).unwrap_or(0.0)
}

/// "95 of 4.1 ms and 5 of 8.2 ms a second".
fn seen() -> String {
    let times = SEEN.map(|(us, count)| {
        let ms = Duration::from_micros(us).as_secs_f64() * 1000.0;
        format!("{count} of {ms:.1} ms")
    });
    format!("{} a second", times.join(" and "))
}

fn method(options: &Options<'_>) -> Vec<(String, String)> {
    let link = match options.backend {
        LinkBackend::Relay => format!("emulated, {:.1} ms each way", DELAY.as_secs_f64() * 1000.0),
        LinkBackend::Nft => "a veth with nftables, no delay".to_owned(),
    };
    let pairs = [
        ("link", link),
        (
            "transfer",
            "HTTP/1.1 GET, 4217 bytes of response in segments of 1448, 1448 and 1321; \
             from the connect, or from the request where the connection is kept alive, to the last byte"
                .to_owned(),
        ),
        ("agent's policy", one_line(&format!("{INITIAL_RTO}{POLICY}"))),
        (
            "initial_rto auto",
            format!("{}; warmed up by two hours of path times: {}", one_line(&format!("{AUTO}{POLICY}")), seen())
        ),
        (
            "clients",
            format!(
                "one request at a time over a link of its own: {} links without the agent, {} with it",
                lanes(Coverage::Kernel, options.quick),
                lanes(Coverage::Agent, options.quick)
            ),
        ),
        (
            "disturbed",
            format!("{DISTURBED_MS} ms longer than the median where nothing is lost"),
        ),
        (
            "timed out",
            format!("after {} s without an answer; its time counts", TIMEOUT.as_secs()),
        ),
        (
            "spurious",
            "retransmitted although a copy of all it carried had been let through".to_owned(),
        ),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

fn summary_table(all: &[Summary<'_>]) -> Table {
    let mut table = Table::new(
        "times",
        "Completion times, ms",
        &[
            "dropped",
            "timers",
            "requests",
            "disturbed, %",
            "mean",
            "p50",
            "p90",
            "p99",
            "longest",
            "timed out",
            "packets dropped",
            "retransmitted",
            "of them spurious",
        ],
    );
    for one in all {
        let retransmits = one.outcome.retransmits;
        let or_none =
            |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
        table.row([
            one.case.title.clone(),
            one.coverage.name().to_owned(),
            one.ms.len().to_string(),
            format!("{:.1}", 100.0 * one.disturbed),
            format!("{:.1}", one.mean),
            format!("{:.1}", one.at(0.5)),
            format!("{:.1}", one.at(0.9)),
            one.p99(),
            format!("{:.1}", one.at(1.0)),
            one.timed_out().to_string(),
            one.outcome.dropped.to_string(),
            or_none(retransmits.map(|retransmits| retransmits.needed + retransmits.spurious)),
            or_none(retransmits.map(|retransmits| retransmits.spurious)),
        ]);
    }
    table
}

fn published_table(backend: LinkBackend, all: &[Summary<'_>]) -> Table {
    let figures = published::all().unwrap_or_default();
    let title = match backend {
        LinkBackend::Relay => {
            "Groups of completion times, ms, next to published ones (round trip near 3 ms)"
        }
        LinkBackend::Nft => {
            "Groups of completion times, ms, next to published ones (there with a round trip near 3 ms)"
        }
    };
    let mut table = Table::new(
        "groups",
        title,
        &["dropped", "timers", "measured", "published"],
    );
    for one in all {
        let us: Vec<u64> = one.outcome.took.iter().map(|took| took.us).collect();
        let published = published::text(&figures, &one.case.name, one.coverage);
        table.row([
            one.case.title.clone(),
            one.coverage.name().to_owned(),
            published::groups(&us),
            published.unwrap_or_default(),
        ]);
    }
    table
}

fn findings(cases: &[Case], all: &[Summary<'_>]) -> Vec<String> {
    let of = |case: &Case, coverage| {
        all.iter()
            .find(|one| one.case == case && one.coverage == coverage)
    };
    let mut findings = Vec::new();
    let (mut worse, mut spurious) = (Vec::new(), [(0, 0); 2]);
    for case in cases {
        let (Some(without), Some(with)) = (of(case, Coverage::Kernel), of(case, Coverage::Agent))
        else {
            continue;
        };
        for (sum, one) in spurious.iter_mut().zip([without, with]) {
            let retransmits = one.outcome.retransmits.unwrap_or_default();
            sum.0 += retransmits.spurious;
            sum.1 += retransmits.sent;
        }
        let median = |one: &Summary<'_>| one.at(0.5);
        let p90 = |one: &Summary<'_>| one.at(0.9);
        let title = &case.title;
        let later = |one: f64, other: f64| one > other * 1.1 + LATER_MS;
        // A median or a p90 alone may be chance.
        let at_one = later(median(with), median(without)) || later(p90(with), p90(without));
        if at_one && later(with.mean, without.mean) {
            worse.push(format!(
                "{title}: median {:.1} ms for {:.1} ms, p90 {:.1} ms for {:.1} ms",
                median(with),
                median(without),
                p90(with),
                p90(without)
            ));
        }
        if case.rule.is_none() {
            continue;
        }
        findings.push(format!(
            "Dropping {title}: {:.1} % of the requests disturbed without the agent, {:.1} % with it; \
             median {:.1} ms and {:.1} ms, p90 {:.1} ms and {:.1} ms; a request takes {:.1} ms {} with it on \
             average.",
            100.0 * without.disturbed,
            100.0 * with.disturbed,
            median(without),
            median(with),
            p90(without),
            p90(with),
            (without.mean - with.mean).abs(),
            if with.mean <= without.mean { "less" } else { "more" },
        ));
        findings.extend(twice(without));
        if let Some(auto) = of(case, Coverage::Auto) {
            findings.push(format!(
                "Dropping {title}, with initial_rto auto: median {:.1} ms, p99 {:.1} ms.",
                median(auto),
                auto.at(0.99)
            ));
        }
        for (coverage, settings) in [
            (Coverage::Server, ""),
            (Coverage::ServerShort, " and syn_ack_rto = \"100ms\""),
        ] {
            if let Some(server) = of(case, coverage) {
                findings.push(format!(
                    "Dropping {title}, with the agent at the server alone{settings}: median {:.1} ms, p90 {:.1} ms.",
                    median(server),
                    p90(server)
                ));
            }
        }
    }
    let [(without, sent_without), (with, sent_with)] = spurious;
    if sent_without > 0 && sent_with > 0 {
        findings.push(format!(
            "Spurious retransmissions, all cases together: {without} of {sent_without} packets without the \
             agent, {with} of {sent_with} with it."
        ));
    }
    if worse.is_empty() {
        findings.push("No case is worse with the agent by its mean, and median or p90.".to_owned());
    } else {
        findings.push(format!("Worse with the agent: {}.", worse.join("; ")));
    }
    findings
}

/// Why not every connection loses a SYN-ACK where one in two is dropped.
fn twice(without: &Summary<'_>) -> Option<String> {
    let spurious = without.outcome.retransmits?.spurious;
    (without.case.server_alone && spurious > 0).then(|| {
        format!(
            "Dropping {}: without the agent {spurious} SYN-ACKs were retransmitted spuriously in {} connections: \
             client and server time out at the same moment, each makes the server send one, and the count of one in two \
             goes on with the next connection.",
            without.case.title,
            without.ms.len()
        )
    })
}

fn charts(cases: &[Case], all: &[Summary<'_>]) -> Vec<Chart> {
    cases
        .iter()
        .map(|case| {
            let of_case = all.iter().filter(|one| one.case == case);
            Chart {
                title: format!("Dropped: {}", case.title),
                x: Axis::ms("time of a request"),
                y: Axis::percent("requests"),
                log_x: true,
                log_y: false,
                legend: Legend::UpperRight,
                series: of_case
                    .map(|one| Series {
                        name: one.coverage.name().to_owned(),
                        mark: Mark::Bars,
                        points: histogram(&one.ms),
                    })
                    .collect(),
            }
        })
        .filter(|chart| !chart.series.is_empty())
        .collect()
}

/// Percent of the times by where their bar begins, from 1 ms or below to the longest.
fn histogram(ms: &[f64]) -> Vec<(f64, f64)> {
    let begin = |bar: i32| 10f64.powf(f64::from(bar) / f64::from(BARS));
    let longest = ms.iter().copied().fold(1.0, f64::max);
    let least = ms.iter().copied().fold(1.0, f64::min).max(0.01);
    #[expect(clippy::cast_possible_truncation, reason = "some dozen")]
    let bar = |ms: f64| (ms.log10() * f64::from(BARS)).floor() as i32;
    (bar(least)..=bar(longest) + 1)
        .map(|number| {
            let within = ms
                .iter()
                .filter(|&&ms| begin(number) <= ms && ms < begin(number + 1));
            #[expect(clippy::cast_precision_loss, reason = "some thousand")]
            let percent = 100.0 * within.count() as f64 / ms.len().max(1) as f64;
            (begin(number), percent)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rto_testbed::workload::http::Took;

    use super::{super::case, *};

    #[test]
    fn a_histogram_has_all() {
        let bars = histogram(&[0.3, 3.0, 3.1, 1030.0]);
        let sum: f64 = bars.iter().map(|(_, percent)| percent).sum();
        assert!((sum - 100.0).abs() < 1e-9, "{bars:?}");
        assert!(bars.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(bars.last().unwrap().1, 0.0);
    }

    #[test]
    fn what_is_worse_is_said() {
        let cases = case::all(false, LinkBackend::Relay);
        let of = |us: &[u64]| Outcome {
            took: us
                .iter()
                .map(|&us| Took {
                    us,
                    timed_out: false,
                })
                .collect(),
            ..Outcome::default()
        };
        let syn = cases.iter().position(|case| case.name == "syn-2").unwrap();
        let report = |with: u64| {
            let outcomes = Outcomes::from([
                ((0, Coverage::Kernel), of(&[6_000; 4])),
                ((0, Coverage::Agent), of(&[6_000; 4])),
                ((syn, Coverage::Kernel), of(&[1_030_000; 4])),
                ((syn, Coverage::Agent), of(&[with; 4])),
            ]);
            let all: Vec<_> = outcomes
                .iter()
                .map(|(&(case, coverage), outcome)| {
                    Summary::of(&cases[case], coverage, outcome, 6.0)
                })
                .collect();
            findings(&cases, &all)
        };
        let good = report(110_000).join("\n");
        assert!(
            good.contains("920.0 ms less") && good.contains("No case is worse"),
            "{good}"
        );
        let bad = report(2_000_000).join("\n");
        assert!(
            bad.contains("970.0 ms more") && bad.contains("Worse with the agent: every second SYN"),
            "{bad}"
        );
    }
}
