//! What the flow completion times say.

use std::time::Duration;

use rto_model::chart::{Axis, Chart, Legend, Mark, Series};
use rto_testbed::{link::retransmits::RetransmitCounts, machine::Machine};

use super::{
    KERNEL, Options, PLAIN, RESTART, Variant,
    lane::{LENGTHS, Outcome, PAUSE, SEGMENTS, WARM},
};
use crate::{
    report::{Report, Table},
    summary::median,
};

/// What is gained in less round trips than this is none.
const WORTH: f64 = 0.15;

type Measured = [(Variant, Outcome)];

pub(super) fn report(options: &Options<'_>, machine: Machine, all: &Measured) -> Report {
    Report {
        name: "tail".to_owned(),
        question: "What do tail loss probes, RTO restart by way of rto_min, and a lower rto_min gain a flow \
                   whose last segments are lost?"
            .to_owned(),
        machine,
        seed: options.seed,
        method: method(options, all),
        findings: findings(options, all),
        tables: vec![
            times_table(options, all),
            saved_table(options, all),
            spurious_table(options, all),
        ],
        charts: charts(options, all),
    }
}

fn method(options: &Options<'_>, all: &Measured) -> Vec<(String, String)> {
    let policies = all
        .iter()
        .filter_map(|(variant, _)| Some((variant.setting, variant.policy?)))
        .map(|(name, policy)| format!("{name}: {}", policy.trim_end().replace('\n', ", ")));
    let mut policies: Vec<String> = policies.collect();
    policies.sort();
    policies.dedup();
    let pairs = [
        (
            "flow",
            format!(
                "{SEGMENTS} full segments, sent at once, over a connection that has had {WARM} small transactions; \
                 the last 1 to 5 are dropped once"
            ),
        ),
        (
            "time",
            "from the client's request to its last byte of the response".to_owned(),
        ),
        ("flows of a cell", options.plan.runs.to_string()),
        (
            "policies",
            format!("{}; at the server, which sends", policies.join("; ")),
        ),
        (
            "no TLP",
            "net.ipv4.tcp_early_retrans = 0 at the server".to_owned(),
        ),
        (
            "flows without loss",
            format!(
                "{} to {} segments in turn, {} ms of pause after each, a quarter of the round trip is jitter; {} s",
                LENGTHS.0,
                LENGTHS.1,
                PAUSE.as_millis(),
                options.plan.calm_for.as_secs()
            ),
        ),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

impl Outcome {
    /// Median flow completion time, milliseconds.
    fn median(&self, rtt: Duration, lost: u32) -> Option<f64> {
        let cell = self
            .cells
            .iter()
            .find(|cell| cell.rtt == rtt && cell.lost == lost)?;
        median(&cell.took_ms)
    }

    fn spurious(&self) -> RetransmitCounts {
        self.calm.iter().map(|calm| calm.retransmits).sum()
    }
}

fn of<'a>(all: &'a Measured, setting: &str, tlp: bool) -> Option<&'a Outcome> {
    let found = all
        .iter()
        .find(|(variant, _)| variant.setting == setting && variant.tlp == tlp)?;
    Some(&found.1)
}

/// By how many round trips one is sooner than the other, by round-trip time.
fn sooner(options: &Options<'_>, one: &Outcome, other: &Outcome, lost: u32) -> Vec<f64> {
    let rtts = options.plan.rtts.iter();
    rtts.filter_map(|&rtt| {
        let ms = rtt.as_secs_f64() * 1000.0;
        Some((other.median(rtt, lost)? - one.median(rtt, lost)?) / ms)
    })
    .collect()
}

fn table(all: &Measured, name: &str, title: &str, begin: &[&str]) -> Table {
    let names: Vec<String> = all.iter().map(|(variant, _)| variant.name()).collect();
    let columns: Vec<&str> = begin
        .iter()
        .copied()
        .chain(names.iter().map(String::as_str))
        .collect();
    Table::new(name, title, &columns)
}

/// A row for each round-trip time and number of lost segments.
fn rows(
    options: &Options<'_>,
    all: &Measured,
    table: &mut Table,
    cell: impl Fn(&Outcome, Duration, u32) -> Option<f64>,
) {
    for &rtt in &options.plan.rtts {
        for &lost in &options.plan.lost {
            let cells = all.iter().map(|(_, outcome)| {
                cell(outcome, rtt, lost).map_or_else(String::new, |value| format!("{value:.1}"))
            });
            let begin = [rtt.as_millis().to_string(), lost.to_string()];
            table.row(begin.into_iter().chain(cells));
        }
    }
}

fn times_table(options: &Options<'_>, all: &Measured) -> Table {
    let title = "Flow completion time, ms, median";
    let mut table = table(all, "times", title, &["round trip, ms", "lost"]);
    rows(options, all, &mut table, Outcome::median);
    table
}

fn saved_table(options: &Options<'_>, all: &Measured) -> Table {
    let title = "Sooner than with the kernel's own timers without TLP, in round trips";
    let mut table = table(all, "saved", title, &["round trip, ms", "lost"]);
    let Some((_, base)) = all.first() else {
        return table;
    };
    rows(options, all, &mut table, |outcome, rtt, lost| {
        let ms = rtt.as_secs_f64() * 1000.0;
        let round_trips = (base.median(rtt, lost)? - outcome.median(rtt, lost)?) / ms;
        Some(rounded(round_trips))
    });
    table
}

fn spurious_table(options: &Options<'_>, all: &Measured) -> Table {
    let title = "Spurious retransmissions without loss, with jitter: segments, and of how many";
    let mut table = table(all, "spurious", title, &["round trip, ms"]);
    let text =
        |retransmits: RetransmitCounts| format!("{} of {}", retransmits.spurious, retransmits.sent);
    for &rtt in &options.plan.calm_rtts {
        let cells = all.iter().map(|(_, outcome)| {
            let calm = outcome.calm.iter().find(|calm| calm.rtt == rtt);
            calm.map_or_else(String::new, |calm| text(calm.retransmits))
        });
        table.row(std::iter::once(rtt.as_millis().to_string()).chain(cells));
    }
    let sums = all.iter().map(|(_, outcome)| text(outcome.spurious()));
    table.row(std::iter::once("all".to_owned()).chain(sums));
    let shares = all.iter().map(|(_, outcome)| share(outcome.spurious()));
    table.row(std::iter::once("share".to_owned()).chain(shares));
    table
}

/// "1.8e-3"; of none, what is above it with a probability of one in twenty.
#[expect(clippy::cast_precision_loss, reason = "some hundred thousand packets")]
fn share(retransmits: RetransmitCounts) -> String {
    if retransmits.sent == 0 {
        return String::new();
    }
    let sent = retransmits.sent as f64;
    match retransmits.spurious {
        0 => format!("< {:.1e}", 3.0 / sent),
        spurious => format!("{:.1e}", spurious as f64 / sent),
    }
}

fn findings(options: &Options<'_>, all: &Measured) -> Vec<String> {
    let (Some(base), Some(restart), Some(probes), Some(both)) = (
        of(all, KERNEL, false),
        of(all, RESTART, false),
        of(all, KERNEL, true),
        of(all, RESTART, true),
    ) else {
        return Vec::new();
    };
    let gain = |one: &Outcome, other: &Outcome, lost: u32| {
        rounded(median(&sooner(options, one, other, lost)).unwrap_or(0.0))
    };
    let mut findings = Vec::new();
    for &lost in &options.plan.lost {
        let published = if lost <= 3 {
            "; published: about 1 for restart"
        } else {
            ""
        };
        findings.push(format!(
            "The last {lost} lost: without TLP restart is {:.1} round trips sooner than the kernel's own timers, TLP \
             without restart {:.1} (medians over the round-trip times{published}).",
            gain(restart, base, lost),
            gain(probes, base, lost)
        ));
    }
    findings.push(format!(
        "TLP ahead of restart without TLP by more than {WORTH} round trips: {}. Restart ahead: {}. Published: TLP \
         ahead from 4 lost on.",
        ahead(options, probes, restart),
        ahead(options, restart, probes)
    ));
    let by_lost: Vec<String> = options
        .plan
        .lost
        .iter()
        .map(|&lost| format!("{:.1} with {lost} lost", gain(both, probes, lost)))
        .collect();
    findings.push(format!(
        "With TLP on, as it is by default, restart gains in round trips (medians over the round-trip times): {}.",
        by_lost.join(", ")
    ));
    if let Some(plain) = of(all, PLAIN, true) {
        findings.push(against_plain(options, both, plain));
    }
    findings.extend(worse(options, all));
    let shares = all
        .iter()
        .map(|(variant, outcome)| format!("{} {}", variant.name(), share(outcome.spurious())));
    findings.push(format!(
        "Share of segments retransmitted although nothing was lost: {}; published: 4.8e-5 without both, 5.9e-5 with \
         restart, 1.8e-3 with TLP.",
        shares.collect::<Vec<_>>().join("; ")
    ));
    findings
}

/// What restart gains beside a lower rto_min that is easier to understand, both with tail loss probes.
fn against_plain(options: &Options<'_>, restart: &Outcome, plain: &Outcome) -> String {
    let mut all = Vec::new();
    let by_rtt = options.plan.rtts.iter().map(|&rtt| {
        let ms = rtt.as_secs_f64() * 1000.0;
        let lost = options.plan.lost.iter();
        let gains: Vec<f64> = lost
            .filter_map(|&lost| Some((plain.median(rtt, lost)? - restart.median(rtt, lost)?) / ms))
            .collect();
        all.extend_from_slice(&gains);
        let gain = rounded(median(&gains).unwrap_or(0.0));
        format!("{gain:.1} at {ms:.0} ms")
    });
    let by_rtt: Vec<String> = by_rtt.collect();
    let gain = median(&all).unwrap_or(0.0);
    let (own, other) = (restart.spurious(), plain.spurious());
    let verdict = if gain <= WORTH && own.spurious >= other.spurious {
        "it does not pay: an experimental setting"
    } else if gain <= WORTH {
        "it gains no more, for fewer spurious retransmissions"
    } else {
        "it gains more"
    };
    format!(
        "Against {PLAIN} alone, both with TLP, restart is sooner by {:.1} round trips (median of all cells; {}), with \
         {} spurious retransmissions of {} for {} of {}: {verdict}.",
        rounded(gain),
        by_rtt.join(", "),
        own.spurious,
        own.sent,
        other.spurious,
        other.sent
    )
}

/// To a tenth, and no negative zero.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0 + 0.0
}

/// "at 20 ms with 1, 3 lost; at 80 ms with 3 lost".
fn ahead(options: &Options<'_>, one: &Outcome, other: &Outcome) -> String {
    let at = options.plan.rtts.iter().filter_map(|&rtt| {
        let ms = rtt.as_secs_f64() * 1000.0;
        let is_ahead = |&&lost: &&u32| {
            let (own, others) = (one.median(rtt, lost), other.median(rtt, lost));
            own.zip(others)
                .is_some_and(|(own, others)| (others - own) / ms > WORTH)
        };
        let lost = options.plan.lost.iter().filter(is_ahead);
        let lost: Vec<String> = lost.map(u32::to_string).collect();
        (!lost.is_empty()).then(|| format!("at {ms:.0} ms with {} lost", lost.join(", ")))
    });
    let at: Vec<String> = at.collect();
    if at.is_empty() {
        "nowhere".to_owned()
    } else {
        at.join("; ")
    }
}

/// Variants that are later than the kernel's own timers with the same tail loss probes, and where most.
fn worse(options: &Options<'_>, all: &Measured) -> Vec<String> {
    let mut findings = Vec::new();
    for (variant, outcome) in all.iter().filter(|(variant, _)| variant.policy.is_some()) {
        let Some(kernel) = of(all, KERNEL, variant.tlp) else {
            continue;
        };
        let mut worst: Option<(f64, Duration, u32)> = None;
        for &lost in &options.plan.lost {
            for &rtt in &options.plan.rtts {
                let (Some(ms), Some(own)) = (outcome.median(rtt, lost), kernel.median(rtt, lost))
                else {
                    continue;
                };
                let later = ms - own;
                // Two jiffies of HZ 250 and a tenth are the machine's own spread.
                let is_worse = later > 8.0 + own / 10.0;
                if is_worse && worst.is_none_or(|(most, ..)| later > most) {
                    worst = Some((later, rtt, lost));
                }
            }
        }
        if let Some((later, rtt, lost)) = worst {
            findings.push(format!(
                "{} is later than the kernel's own timers in some cells, most at a round trip of {} ms with {lost} \
                 lost: by {later:.0} ms.",
                variant.name(),
                rtt.as_millis()
            ));
        }
    }
    findings
}

fn charts(options: &Options<'_>, all: &Measured) -> Vec<Chart> {
    let Some(((first, base), others)) = all.split_first() else {
        return Vec::new();
    };
    let one = |&lost: &u32| Chart {
        title: format!(
            "The last {lost} of {SEGMENTS} lost: flow completion time, relative to \"{}\"",
            first.name()
        ),
        x: Axis::ms("round trip"),
        y: Axis::percent("flow completion time"),
        log_x: true,
        log_y: false,
        legend: Legend::LowerRight,
        series: others
            .iter()
            .map(|(variant, outcome)| Series {
                name: variant.name(),
                mark: Mark::Line,
                points: options
                    .plan
                    .rtts
                    .iter()
                    .filter_map(|&rtt| {
                        let share = outcome.median(rtt, lost)? / base.median(rtt, lost)?;
                        Some((rtt.as_secs_f64() * 1000.0, 100.0 * share))
                    })
                    .collect(),
            })
            .collect(),
    };
    options.plan.lost.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        super::{
            Plan,
            lane::{Cell, LosslessRun},
            variants,
        },
        *,
    };

    /// Restart saves so many round trips of the kernel's three and 200 ms, TLP all but half a one of those.
    fn measured(restart: f64) -> Vec<(Variant, Outcome)> {
        let plan = Plan::new(true);
        let outcome = |variant: &Variant| {
            let cells = plan.rtts.iter().flat_map(|&rtt| {
                plan.lost.iter().map(move |&lost| {
                    let ms = rtt.as_secs_f64() * 1000.0;
                    let saved = if variant.setting == RESTART && !variant.tlp {
                        restart
                    } else {
                        0.0
                    };
                    let timer = if variant.tlp { ms / 2.0 } else { 200.0 };
                    Cell {
                        rtt,
                        lost,
                        took_ms: vec![timer + (3.0 - saved) * ms; 3],
                    }
                })
            });
            let retransmits = RetransmitCounts {
                sent: 10_000,
                spurious: if variant.tlp { 18 } else { 0 },
                ..RetransmitCounts::default()
            };
            Outcome {
                cells: cells.collect(),
                calm: vec![LosslessRun {
                    rtt: plan.calm_rtts[0],
                    retransmits,
                }],
            }
        };
        variants()
            .into_iter()
            .map(|variant| {
                let outcome = outcome(&variant);
                (variant, outcome)
            })
            .collect()
    }

    fn said(restart: f64) -> String {
        let options = Options {
            plan: Plan::new(true),
            seed: 1,
            agent: Path::new(""),
        };
        let machine = Machine {
            kernel: "6.18".to_owned(),
            hz: 250,
            architecture: "x86_64".to_owned(),
            processor: "one".to_owned(),
            cores: 2,
        };
        let report = report(&options, machine, &measured(restart));
        assert_eq!(report.tables[0].rows.len(), 9);
        assert!(report.write(tempfile::tempdir().unwrap().path()).is_ok());
        report.findings.join("\n")
    }

    #[test]
    fn findings_are_of_the_numbers() {
        let text = said(1.0);
        assert!(
            text.contains("The last 3 lost: without TLP restart is 1.0 round trips sooner"),
            "{text}"
        );
        assert!(
            text.contains("TLP ahead of restart without TLP by more than 0.15 round trips: at 20 ms with 1, 3, 5 lost;"),
            "{text}"
        );
        assert!(text.contains("Restart ahead: at 160 ms with"), "{text}");
        assert!(text.contains("0.0 with 1 lost, 0.0 with 3 lost"), "{text}");
        assert!(
            text.contains("it does not pay: an experimental setting"),
            "{text}"
        );
        assert!(
            text.contains("no TLP < 3.0e-4; ") && text.contains("TLP 1.8e-3"),
            "{text}"
        );
        assert!(!text.contains("later than"), "{text}");
        let text = said(-0.5);
        assert!(
            text.contains("restart, no TLP is later than the kernel's own timers"),
            "{text}"
        );
        assert!(text.contains("160 ms with 1 lost: by 80 ms"), "{text}");
    }
}
