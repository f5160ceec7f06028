//! Prometheus metrics: status and statistics in the Prometheus text format 0.0.4.
//!
//! Names follow the Prometheus conventions (prefix, base units, `_total`, `_info`). Labels are
//! bounded: policies, directions, families, options, sources, verdicts, and never an address.

use std::fmt;

use prometheus_client::{encoding::prometheus_text::encode, registry::Registry};
use rto_agent_core::{
    policy::PolicyName,
    wire::{
        stats::{ArmStats, COUNTERS, Counter, DirectionStats, PolicyStats, Scope, StatsAnswer},
        tune::TuneAnswer,
        types::StatusAnswer,
    },
};
use rto_agent_kernel::kernel::bpf::Runs;

use self::family::{Labels, Metrics, number, seconds, state_set, with};

mod daemon;
mod family;
mod holdout;
mod tuning;

/// Prefix of every metric's name.
pub const PREFIX: &str = "rto_agent";

/// What is rendered.
#[derive(Clone, Copy, Debug)]
pub struct Scrape<'a> {
    /// The status.
    pub status: &'a StatusAnswer,
    /// The statistics.
    pub stats: &'a StatsAnswer,
    /// Learnt timers and holdouts.
    pub tuned: &'a TuneAnswer,
    /// How often the program ran, if the kernel counts that.
    pub runs: Option<Runs>,
    /// Whether policies have all counters and histograms (`metrics_detail`).
    pub in_detail: bool,
}

/// Renders the metrics.
pub fn render(scrape: Scrape<'_>) -> Result<String, fmt::Error> {
    let Scrape {
        status,
        stats,
        tuned,
        runs,
        in_detail,
    } = scrape;
    let mut metrics = Metrics(Registry::with_prefix(PREFIX));
    daemon::about(&mut metrics, status);
    daemon::health(&mut metrics, status);
    if stats.on {
        policies(&mut metrics, stats, in_detail);
    }
    if let Some(runs) = runs {
        metrics.counters(
            "program_runs",
            "Runs of the sock_ops program, counted while kernel.bpf_stats_enabled is set",
            [(Vec::new(), runs.count)],
        );
        metrics.amounts(
            "program_run_seconds",
            "Run time of the sock_ops program, measured while kernel.bpf_stats_enabled is set",
            [(Vec::new(), runs.time.as_secs_f64())],
        );
    }
    tuning::add(&mut metrics, tuned);
    holdout::add(&mut metrics, tuned, in_detail);
    // Names that all exporters share, without the prefix.
    let mut process = Metrics(Registry::default());
    daemon::process(&mut process);
    let mut text = String::new();
    encode(&mut text, &metrics.0)?;
    encode(&mut text, &process.0)?;
    Ok(text)
}

/// Directions with handshakes: sockets that were open before their policy (direction unknown) had
/// theirs uncounted.
const BEGUN: &[&str] = &["active", "passive"];
const ALL: &[&str] = &["active", "passive", "unknown"];

/// Each policy and direction, without control arms.
fn each<'a>(
    stats: &'a StatsAnswer,
    directions: &'a [&str],
) -> impl Iterator<Item = (Labels, &'a DirectionStats)> {
    let policies = stats.policies.iter();
    policies.flat_map(move |(policy, stats)| of_arm(policy, &stats.treated, directions))
}

/// Each direction of an arm.
fn of_arm<'a>(
    policy: &'a PolicyName,
    arm: &'a ArmStats,
    directions: &'a [&str],
) -> impl Iterator<Item = (Labels, &'a DirectionStats)> {
    let known = arm.directions().into_iter();
    known
        .filter(|(direction, _)| directions.contains(direction))
        .map(move |(direction, stats)| {
            let labels = vec![
                ("policy", policy.to_string()),
                ("direction", direction.to_owned()),
            ];
            (labels, stats)
        })
}

/// Counters that are exported by default: what shows gain and harm.
const BASIC: [&str; 7] = [
    "attempts",
    "good_attempts",
    "connections",
    "handshake_retransmissions",
    "spurious_connections",
    "handshake_time_saved",
    "handshake_time_lost",
];

/// Counters of each policy, by direction.
fn policies(metrics: &mut Metrics, stats: &StatsAnswer, in_detail: bool) {
    for one in COUNTERS {
        if in_detail || BASIC.contains(&one.metric) {
            counter(metrics, one, stats);
        }
    }
    metrics.gauge(
        "connections_per_sample",
        "1 in this many loss-free connections is sampled until it closes, and counts for all of \
         them in smoothed_rtt and aborted",
        stats.sampling.into(),
    );
    failures(metrics, stats, in_detail);
    arms(metrics, stats, in_detail);
    if in_detail {
        details(metrics, stats);
    }
}

/// Counters of failures, which are exported once there was one.
fn failures(metrics: &mut Metrics, stats: &StatsAnswer, in_detail: bool) {
    metrics.counters(
        "setsockopt_failures",
        "Socket options that the kernel refused",
        stats.policies.iter().flat_map(|(policy, stats)| {
            let total = stats.treated.total();
            let all = total.setsockopt_failures.into_iter();
            all.filter(|(_, count)| *count > 0).map(|(option, count)| {
                let labels = vec![("policy", policy.to_string()), ("option", option)];
                (labels, count)
            })
        }),
    );
    if !in_detail {
        let name = "storage_failures";
        let counter = COUNTERS.iter().find(|counter| counter.metric == name);
        let of = each(stats, ALL).filter(|(_, stats)| stats.storage_failures > 0);
        metrics.counters(
            name,
            counter.map_or("", |counter| counter.help),
            of.map(|(labels, stats)| (labels, stats.storage_failures)),
        );
    }
}

/// Histograms, and counters by step.
fn details(metrics: &mut Metrics, stats: &StatsAnswer) {
    metrics.times(
        "connect_time_seconds",
        "Connect times: from the first SYN to ESTABLISHED, losses included (of accepted \
         connections: the last round trip of the handshake)",
        by_arm(stats, |_| true).map(|(labels, stats)| (labels, &stats.connect_time)),
    );
    metrics.times(
        "path_rtt_seconds",
        "Path RTTs: round-trip times of handshakes, without their losses",
        each(stats, BEGUN).map(|(labels, stats)| (labels, &stats.path_rtt)),
    );
    if stats.rtt_sampling != "off" {
        // Sockets that were open before their policy are not counted on every host.
        let before = each(stats, &["unknown"]).filter(|(_, stats)| stats.srtt.count > 0);
        let samples = each(stats, BEGUN).chain(before);
        metrics.times(
            "smoothed_rtt_seconds",
            "Smoothed round-trip times of connections (RFC 6298), sampled as configured by \
             rtt_sampling",
            samples.map(|(labels, stats)| (labels, &stats.srtt)),
        );
    }
    metrics.counters(
        "retransmission_timeouts",
        "Retransmission timeouts of established connections, by the number of consecutive timeouts \
         before them without an answer (7: 7 or more)",
        each(stats, ALL).flat_map(|(labels, stats)| {
            let steps = stats.rtos.iter().enumerate();
            steps.map(move |(step, count)| (with(&labels, "step", &step.to_string()), *count))
        }),
    );
}

/// Outcomes in each arm, for policies with a control arm. By default only what compares connects.
fn arms(metrics: &mut Metrics, stats: &StatsAnswer, in_detail: bool) {
    let with_control = || {
        let arms = by_arm(stats, |stats| stats.control.is_some());
        let active = ("direction", "active".to_owned());
        arms.filter(move |(labels, _)| in_detail || labels.contains(&active))
    };
    metrics.counters(
        "arm_attempts",
        "Attempts by arm, for policies with a control arm: connect() calls, and connection \
         requests answered",
        with_control().map(|(labels, stats)| (labels, stats.attempts)),
    );
    metrics.counters(
        "arm_outcomes",
        "Outcomes of an arm's attempts: established, established within 500 ms (good), with a \
         spurious SYN or SYN-ACK, with a DSACK, aborted",
        with_control().flat_map(|(labels, stats)| {
            let outcomes = [
                ("established", stats.connections),
                ("good", stats.good_attempts),
                ("spurious", stats.spurious_connections),
                ("dsack", stats.dsack_connections),
                ("aborted", stats.aborted),
            ];
            let shown = if in_detail { outcomes.len() } else { 2 };
            let outcomes = outcomes.into_iter().take(shown);
            outcomes.map(move |(outcome, count)| (with(&labels, "outcome", outcome), count))
        }),
    );
    metrics.amounts(
        "arm_connect_seconds",
        "Sum of the connect times of an arm's established connections",
        with_control().map(|(labels, stats)| (labels, seconds(stats.connect_time.sum_us))),
    );
}

/// Each policy, direction and arm, without sockets that were open before their policy: these began
/// uncounted.
fn by_arm(
    stats: &StatsAnswer,
    is_wanted: fn(&PolicyStats) -> bool,
) -> impl Iterator<Item = (Labels, &DirectionStats)> {
    let policies = stats.policies.iter();
    let wanted = policies.filter(move |(_, stats)| is_wanted(stats));
    wanted.flat_map(|(policy, stats)| {
        stats.arms().flat_map(move |(arm, stats)| {
            let directions = of_arm(policy, stats, BEGUN);
            directions.map(move |(labels, stats)| (with(&labels, "arm", &arm.to_string()), stats))
        })
    })
}

fn counter(metrics: &mut Metrics, counter: &Counter, stats: &StatsAnswer) {
    let directions = match counter.scope {
        Scope::Handshakes => BEGUN,
        Scope::Connections => ALL,
    };
    let samples = each(stats, directions).map(|(labels, stats)| (labels, (counter.value)(stats)));
    if counter.is_time {
        let name = format!("{}_seconds", counter.metric);
        let samples = samples.map(|(labels, us)| (labels, seconds(us)));
        metrics.amounts(name, counter.help, samples);
    } else {
        metrics.counters(counter.metric, counter.help, samples);
    }
}

#[cfg(test)]
mod tests;
