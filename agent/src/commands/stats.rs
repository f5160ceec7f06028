//! `rto-agent stats`.

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use rto_agent_core::{
    figures::{share, short_us, time},
    policy::{PolicyName, units::format_duration},
    printable::{counted, direction_text},
    wire::{
        histogram::HistogramView,
        stats::{Arm, ArmStats, COUNTERS, DirectionStats, PolicyStats, StatsAnswer},
    },
};

use super::{holdout, print_table, table, terminal};
use crate::{cli::Stats, client::Client};

/// Longest bar of a histogram, in characters.
const BAR: usize = 40;

pub(super) fn run(args: &Stats) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.daemon.socket);
    let policy = args.policy.as_deref().map(str::parse).transpose()?;
    let first = ask(&client, policy.as_ref())?;
    if !args.watch {
        return print_table(args.daemon.json, &first, args.table, |_| {
            text(&first, &Look::of(args))
        });
    }
    watch(args, &client, policy.as_ref(), first)
}

/// Requests statistics, and keeps the requested policies.
fn ask(client: &Client, policy: Option<&PolicyName>) -> anyhow::Result<StatsAnswer> {
    let mut answer: StatsAnswer = client.get("/v1/stats")?;
    if let Some(policy) = policy {
        let known: Vec<_> = answer.policies.keys().map(ToString::to_string).collect();
        let known = known.join(", ");
        let stats = answer
            .policies
            .remove(policy)
            .with_context(|| format!("no active policy {policy}; active policies: {known}"))?;
        answer.policies = [(policy.clone(), stats)].into();
    }
    Ok(answer)
}

fn watch(
    args: &Stats,
    client: &Client,
    policy: Option<&PolicyName>,
    mut before: StatsAnswer,
) -> anyhow::Result<ExitCode> {
    loop {
        std::thread::sleep(args.interval);
        let now = ask(client, policy)?;
        let mut out = io::stdout().lock();
        let since = since(&before, &now);
        if args.daemon.json {
            serde_json::to_writer(&mut out, &since).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            if out.is_terminal() {
                // Moves the cursor home and clears the screen.
                write!(out, "\x1b[H\x1b[2J")?;
            }
            let took = Duration::from_millis(now.at_ms.saturating_sub(before.at_ms));
            writeln!(out, "in {}:\n", format_duration(took))?;
            let look = Look::of(args);
            let text = terminal::wrapped_lines(text(&since, &look), look.columns);
            out.write_all(text.as_bytes())?;
            writeln!(out)?;
        }
        out.flush()?;
        before = now;
    }
}

/// The counts between two answers.
fn since(before: &StatsAnswer, now: &StatsAnswer) -> StatsAnswer {
    let none = PolicyStats::default();
    let policies = now.policies.iter().map(|(name, stats)| {
        let before = before.policies.get(name).unwrap_or(&none);
        (name.clone(), stats.since(before))
    });
    StatsAnswer {
        policies: policies.collect(),
        ..now.clone()
    }
}

/// What is shown of an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Whether histograms are shown.
    in_full: bool,
    /// Whether policies without counts are shown.
    idle: bool,
    /// Terminal width; `None`: all columns.
    columns: Option<usize>,
    /// `top`, which has no options for the width, shows it.
    in_top: bool,
}

impl Look {
    fn of(args: &Stats) -> Self {
        Self {
            in_full: args.policy.is_some(),
            idle: args.all || args.policy.is_some(),
            columns: terminal::columns(args.table),
            ..Self::default()
        }
    }
}

/// Statistics with histograms, for `top`.
pub(super) fn in_top(answer: &StatsAnswer, columns: Option<usize>) -> String {
    let look = Look {
        in_full: true,
        idle: true,
        columns,
        in_top: true,
    };
    text(answer, &look)
}

fn text(answer: &StatsAnswer, look: &Look) -> String {
    if !answer.on {
        return "no statistics: statistics = false in [agent]\n".to_owned();
    }
    if answer.policies.is_empty() {
        return "no policy is active\n".to_owned();
    }
    let mut text = overview(answer, look);
    if answer.sampling > 1 && !answer.policies.values().all(PolicyStats::is_empty) {
        text.push_str(&format!(
            "RTT and ABORTED are estimates from 1 in {} connections (sampling)\n",
            answer.sampling
        ));
    }
    let verdicts = answer.policies.iter().filter_map(|(name, stats)| {
        Some(holdout::text(name, stats.verdict.as_ref()?, look.columns))
    });
    text.extend(verdicts);
    if look.in_full {
        for (name, stats) in &answer.policies {
            if let Some(description) = &stats.description {
                text.push_str(&format!("\npolicy {name}: {description}\n"));
            }
            for (title, stats) in titled(name, stats) {
                for (direction, stats) in stats.directions() {
                    text.push_str(&details(&title, direction, stats));
                }
            }
        }
        if answer.rtt_sampling == "off" {
            text.push_str("\nsmoothed RTTs are not sampled (rtt_sampling = \"off\" in [agent])\n");
        }
    }
    text
}

const COLUMNS: usize = 20;
const HEADER: [&str; COLUMNS] = [
    "POLICY",
    "DIRECTION",
    "CONNECTS",
    ">500MS",
    "P50",
    "P99",
    "P99.9",
    "RETRANS",
    "SPUR%",
    "UNDECIDED",
    "RECOVERED",
    "SAVED",
    "DATA RETRANS",
    "RTOS",
    "TLPS",
    "DATA SAVED",
    "PATH P99",
    "RTT P50",
    "RTT P99",
    "ABORTED",
];
/// Columns by importance, for a terminal without room for all of them. Harm comes before what is gained.
const IMPORTANCE: [usize; COLUMNS] = [
    0, 1, 2, 3, 8, 5, 6, 4, 11, 7, 12, 13, 14, 15, 16, 18, 19, 17, 10, 9,
];

fn overview(answer: &StatsAnswer, look: &Look) -> String {
    let mut rows = Vec::new();
    let mut idle = Vec::new();
    for (name, stats) in &answer.policies {
        if !look.idle && stats.is_empty() {
            idle.push(name.to_string());
            continue;
        }
        for (title, stats) in titled(name, stats) {
            let directions = stats.directions().into_iter();
            // Sockets that were open before their policy are shown only if they have counts.
            let is_wanted = |direction: &str| look.idle && direction != "unknown";
            rows.extend(
                directions
                    .filter(|(direction, stats)| {
                        is_wanted(direction) || **stats != DirectionStats::default()
                    })
                    .map(|(direction, stats)| row(title.clone(), direction, stats)),
            );
        }
    }
    let mut text = match rows.is_empty() {
        true => String::new(),
        false => {
            let (text, dropped) = table::fitted(HEADER, &rows, IMPORTANCE, look.columns);
            let how = match look.in_top {
                true => " on a wider terminal",
                false => ": --wide",
            };
            text + &table::more(dropped, how)
        }
    };
    if !idle.is_empty() {
        text.push_str(&format!(
            "without any counts: {} (--all shows them)\n",
            idle.join(", ")
        ));
    }
    text
}

/// A policy's arms with their titles: "near", and "near, control (5%)".
fn titled<'a>(
    name: &PolicyName,
    stats: &'a PolicyStats,
) -> impl Iterator<Item = (String, &'a ArmStats)> {
    let control = stats.control_title().unwrap_or_default();
    stats.arms().map(move |(arm, stats)| {
        let title = match arm {
            Arm::Treated => name.to_string(),
            Arm::Control => format!("{name}, {control}"),
        };
        (title, stats)
    })
}

fn row(title: String, direction: &str, stats: &DirectionStats) -> [String; COLUMNS] {
    [
        title,
        direction_text(direction).to_owned(),
        stats.connects(direction).to_string(),
        share(stats.bad(direction), stats.connects(direction)),
        quantile(&stats.connect_time, 0.5),
        quantile(&stats.connect_time, 0.99),
        quantile(&stats.connect_time, 0.999),
        stats.handshake_retransmissions.to_string(),
        share(stats.spurious_connections, stats.connections),
        stats.undecided.to_string(),
        stats.recovered.to_string(),
        saved(direction, stats),
        stats.segments_retransmitted.to_string(),
        stats.rtos.iter().sum::<u64>().to_string(),
        stats.tail_loss_probes.to_string(),
        data_saved(stats),
        quantile(&stats.path_rtt, 0.99),
        quantile(&stats.srtt, 0.5),
        quantile(&stats.srtt, 0.99),
        stats.aborted.to_string(),
    ]
}

/// Unknown for accepted connections: the peer's own SYNs also cause SYN-ACKs.
fn saved(direction: &str, stats: &DirectionStats) -> String {
    if direction == "passive" {
        return "-".to_owned();
    }
    if stats.time_lost_us > stats.time_saved_us {
        return format!("-{}", time(stats.time_lost_us - stats.time_saved_us));
    }
    time(stats.time_saved_us - stats.time_lost_us)
}

/// Unknown if what was lost at most is more than what was saved: the truth may be on either side of 0.
fn data_saved(stats: &DirectionStats) -> String {
    match stats
        .data_time_saved_us
        .saturating_sub(stats.data_time_lost_us)
    {
        0 => "-".to_owned(),
        us => time(us),
    }
}

pub(super) fn quantile(histogram: &HistogramView, share: f64) -> String {
    histogram
        .quantile_us(share)
        .map_or_else(|| "-".to_owned(), short_us)
}

fn details(title: &str, direction: &str, stats: &DirectionStats) -> String {
    if *stats == DirectionStats::default() {
        return String::new();
    }
    let mut text = format!("\n{title}, {}\n", direction_text(direction));
    let rtos: Vec<_> = stats.rtos.iter().map(ToString::to_string).collect();
    let failures: Vec<_> = stats
        .setsockopt_failures
        .iter()
        .map(|(option, count)| format!("{option} {count}"))
        .collect();
    let failures = if failures.is_empty() {
        "none".to_owned()
    } else {
        failures.join(", ")
    };
    let counters = COUNTERS.iter().filter_map(|counter| {
        let title = counter.title?;
        Some((title, (counter.value)(stats).to_string()))
    });
    let others = [
        ("RTOs, 1st to 8th and later in a row", rtos.join(" ")),
        ("options refused", failures),
    ];
    for (what, value) in counters.chain(others) {
        text.push_str(&format!("  {what:38} {value}\n"));
    }
    for (what, histogram) in [
        ("connect time", &stats.connect_time),
        ("path RTT", &stats.path_rtt),
        ("smoothed RTT", &stats.srtt),
    ] {
        text.push_str(&drawn(what, histogram));
    }
    text
}

/// Draws a histogram as text.
fn drawn(what: &str, histogram: &HistogramView) -> String {
    let Some(mean) = histogram.mean_us() else {
        return String::new();
    };
    let mut text = format!(
        "\n  {what}: {}, mean {}\n    p50 {}, p90 {}, p99 {}, p99.9 {}\n",
        counted(histogram.count, "sample", "samples"),
        short_us(mean),
        quantile(histogram, 0.5),
        quantile(histogram, 0.9),
        quantile(histogram, 0.99),
        quantile(histogram, 0.999),
    );
    let most = histogram.buckets.iter().map(|b| b.count).max().unwrap_or(1);
    for bucket in &histogram.buckets {
        let end = bucket.below_us.map_or_else(String::new, time);
        let length =
            usize::try_from((u128::from(bucket.count) * BAR as u128).div_ceil(u128::from(most)))
                .unwrap_or(BAR);
        text.push_str(&format!(
            "  {:>8} to {end:>8}  {:BAR$}  {}\n",
            time(bucket.from_us),
            "#".repeat(length),
            bucket.count
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{Statistics, histogram::bucket_of};
    use rto_agent_core::wire::holdout::Verdict;

    use super::*;

    fn sample() -> StatsAnswer {
        let mut active = Statistics::default();
        active.counters.attempts = 1011;
        active.counters.late = 2;
        active.counters.handshake_retransmissions = 12;
        active.counters.spurious = 2;
        active.counters.recovered = 8;
        active.counters.time_saved_us = 7_200_000;
        active.counters.rtos = [5, 2, 1, 0, 0, 0, 0, 0];
        active.counters.setsockopt_failures[1] = 3;
        for us in (0..1000).map(|n| 90 + n / 2) {
            active.path_rtt.sum_us += us;
            active.path_rtt.buckets[bucket_of(us)] += 1;
        }
        active.lossy.buckets[bucket_of(100_300)] += 8;
        active.lossy.sum_us += 8 * 100_300;
        let none = Statistics::default();
        let stats = PolicyStats::from(ArmStats::from(&[active, none, none]));
        StatsAnswer {
            at_ms: 0,
            on: true,
            sampling: 1,
            rtt_sampling: "end".to_owned(),
            policies: [("near".parse().unwrap(), stats)].into(),
        }
    }

    #[test]
    fn stats_in_full() {
        insta::assert_snapshot!(in_top(&sample(), None));
    }

    #[test]
    fn table_fits_a_terminal_and_names_idle_policies() {
        let mut answer = sample();
        let idle = ["quiet", "still"].map(|name| (name.parse().unwrap(), PolicyStats::default()));
        answer.policies.extend(idle);
        let look = Look {
            columns: Some(80),
            ..Look::default()
        };
        let text = text(&answer, &look);
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        insta::assert_snapshot!(text);
    }

    /// Statistics with a control arm of 5 %, in which two connections waited for the kernel's own
    /// timer.
    fn with_control() -> StatsAnswer {
        let mut answer = sample();
        let mut active = Statistics::default();
        active.counters.attempts = 52;
        active.counters.handshake_retransmissions = 2;
        active.counters.late = 2;
        active.path_rtt.buckets[bucket_of(100)] += 50;
        active.path_rtt.sum_us += 50 * 100;
        active.lossy.buckets[bucket_of(1_020_000)] += 2;
        active.lossy.sum_us += 2 * 1_020_000;
        let none = Statistics::default();
        for stats in answer.policies.values_mut() {
            stats.holdout = "5%".parse().ok();
            stats.control = Some(ArmStats::from(&[active, none, none]));
            stats.verdict = Some(rto_agent_core::testing::holdout(Verdict::NotYet));
        }
        answer
    }

    #[test]
    fn control_arm_is_listed_after_its_policy() {
        let look = Look {
            in_full: true,
            ..Look::default()
        };
        insta::assert_snapshot!(text(&with_control(), &look));
    }

    #[test]
    fn control_arm_counts_from_its_start() {
        let (before, now) = (sample(), with_control());
        let came = since(&before, &now);
        let stats = came.policies.values().next().unwrap();
        assert_eq!(stats.treated, ArmStats::default());
        assert_eq!(stats.control.as_ref().unwrap().active.connections, 52);
        let idle = since(&now, &now);
        assert!(idle.policies.values().all(PolicyStats::is_empty));
        let text = text(&idle, &Look::default());
        assert!(text.starts_with("without any counts: near (--all shows them)"));
        let gone = since(&now, &before);
        assert!(gone.policies.values().all(|stats| stats.control.is_none()));
    }

    #[test]
    fn difference_from_empty_stats_is_all() {
        let nothing = StatsAnswer {
            on: true,
            ..StatsAnswer::default()
        };
        let now = sample();
        assert_eq!(since(&nothing, &now), now);
        let none = since(&now, &now);
        assert_eq!(none.policies.values().next(), Some(&PolicyStats::default()));
    }
}
