//! Prometheus metrics: status and statistics as OpenMetrics text. [`super::exposition`] converts
//! it.
//!
//! Names follow the Prometheus conventions (prefix, base units, `_total`, `_info`). Labels are
//! bounded: policies, directions, families, options, sources, verdicts, and never an address.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};
use rto_agent_core::{
    policy::PolicyName,
    wire::{
        experiments::State,
        histogram::HistogramView,
        stats::{ArmStats, COUNTERS, Counter, DirectionStats, PolicyStats, Scope, StatsAnswer},
        tune::TuneAnswer,
        types::StatusAnswer,
    },
};
use rto_agent_kernel::kernel::bpf::Runs;

mod daemon;
mod tuning;

/// Prefix of every metric's name.
pub const PREFIX: &str = "rto_agent";

/// Renders a status, statistics and tuning. `runs`: how often the program ran, if the kernel counts
/// that.
pub fn render(
    status: &StatusAnswer,
    stats: &StatsAnswer,
    tuned: &TuneAnswer,
    runs: Option<Runs>,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    let mut all = families(status, stats, runs);
    all.extend(tuning::families(tuned));
    registry.register_collector(Box::new(Snapshot(all)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// One metric and its samples.
#[derive(Debug)]
struct Family {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    samples: Samples,
}

type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
enum Samples {
    Counter(Vec<(Labels, u64)>),
    /// A counter of a fractional quantity, like seconds.
    Amount(Vec<(Labels, f64)>),
    Gauge(Vec<(Labels, f64)>),
    Histogram(Vec<(Labels, Distribution)>),
    Info(Labels),
}

/// A histogram of times.
#[derive(Debug)]
struct Distribution {
    sum_s: f64,
    count: u64,
    /// Upper bound of each bucket in seconds, and the samples in it.
    buckets: Vec<(f64, u64)>,
}

impl From<&HistogramView> for Distribution {
    /// Merges the buckets to one per power of two: with four, as they are counted, a histogram
    /// would have some 90 series.
    #[expect(clippy::cast_precision_loss, reason = "seconds are a double")]
    fn from(view: &HistogramView) -> Self {
        let mut buckets = Vec::new();
        let mut before = 0;
        for (end_us, below) in view.cumulative() {
            if end_us.is_none_or(u64::is_power_of_two) {
                let end_s = end_us.map_or(f64::INFINITY, |us| us as f64 / 1e6);
                buckets.push((end_s, below - before));
                before = below;
            }
        }
        Self {
            sum_s: view.sum_us as f64 / 1e6,
            count: view.count,
            buckets,
        }
    }
}

impl EncodeMetric for Distribution {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.encode_histogram::<NoLabelSet>(self.sum_s, self.count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[derive(Debug)]
struct Snapshot(Vec<Family>);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let kind = match family.samples {
                Samples::Counter(_) | Samples::Amount(_) => MetricType::Counter,
                Samples::Gauge(_) => MetricType::Gauge,
                Samples::Histogram(_) => MetricType::Histogram,
                Samples::Info(_) => MetricType::Info,
            };
            let unit = family.unit.as_ref();
            let metric = encoder.encode_descriptor(family.name, family.help, unit, kind)?;
            match &family.samples {
                Samples::Counter(all) => {
                    samples(metric, all, |value| ConstCounter::new(*value))?;
                }
                Samples::Amount(all) => samples(metric, all, |value| ConstCounter::new(*value))?,
                Samples::Gauge(all) => samples(metric, all, |value| ConstGauge::new(*value))?,
                Samples::Histogram(all) => {
                    let mut metric = metric;
                    for (labels, value) in all {
                        let labels = labels.as_slice();
                        value.encode(metric.encode_family(&labels)?)?;
                    }
                }
                Samples::Info(labels) => {
                    let mut metric = metric;
                    metric.encode_info(&labels.as_slice())?;
                }
            }
        }
        Ok(())
    }
}

/// The samples of one metric. The sample of a metric without labels has no braces.
fn samples<V, M: EncodeMetric>(
    mut metric: MetricEncoder<'_>,
    all: &[(Labels, V)],
    value_of: impl Fn(&V) -> M,
) -> Result<(), fmt::Error> {
    if let [(labels, value)] = all
        && labels.is_empty()
    {
        return value_of(value).encode(metric);
    }
    for (labels, value) in all {
        let labels = labels.as_slice();
        value_of(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

fn families(status: &StatusAnswer, stats: &StatsAnswer, runs: Option<Runs>) -> Vec<Family> {
    let mut all = daemon::about(status);
    all.extend(daemon::health(status));
    if stats.on {
        all.extend(policies(stats));
    }
    all.extend(experiments(status));
    if let Some(runs) = runs {
        all.push(family(
            "program_runs",
            "Runs of the sock_ops program, counted while kernel.bpf_stats_enabled is set",
            Samples::Counter(vec![(Vec::new(), runs.count)]),
        ));
        all.push(family_in_seconds(
            "program_run",
            "Run time of the sock_ops program, measured while kernel.bpf_stats_enabled is \
                   set",
            Samples::Amount(vec![(Vec::new(), runs.time.as_secs_f64())]),
        ));
    }
    all
}

const fn family(name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family {
        name,
        help,
        unit: None,
        samples,
    }
}

fn family_in_seconds(name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family {
        unit: Some(Unit::Seconds),
        ..family(name, help, samples)
    }
}

fn gauge(name: &'static str, help: &'static str, value: f64) -> Family {
    family(name, help, Samples::Gauge(vec![(Vec::new(), value)]))
}

fn flag(name: &'static str, help: &'static str, value: bool) -> Family {
    gauge(name, help, f64::from(u8::from(value)))
}

/// For counts that stay below 2^53, so that a double holds them exactly.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
fn number(value: usize) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "seconds since 1970")]
fn seconds(name: &'static str, help: &'static str, at_s: u64) -> Family {
    family_in_seconds(name, help, Samples::Gauge(vec![(Vec::new(), at_s as f64)]))
}

/// Running experiments, and the last one of each policy.
fn experiments(status: &StatusAnswer) -> Vec<Family> {
    if status.experiments.is_empty() {
        return Vec::new();
    }
    let of = |policy: &PolicyName| ("policy", policy.to_string());
    let all = || status.experiments.iter();
    let states = all().flat_map(|(policy, experiment)| {
        State::ALL.into_iter().map(move |state| {
            let labels = vec![of(policy), ("state", state.name().to_owned())];
            (labels, f64::from(u8::from(state == experiment.state)))
        })
    });
    let e_values = all().flat_map(|(policy, experiment)| {
        let values = experiment.e_values.iter();
        values.map(move |(outcome, e)| (vec![of(policy), ("outcome", outcome.clone())], *e))
    });
    let shares = all().map(|(policy, experiment)| (vec![of(policy)], experiment.share));
    vec![
        family(
            "experiment_state",
            "State of a policy's experiment: 1 for the current state",
            Samples::Gauge(states.collect()),
        ),
        family(
            "experiment_share",
            "Share of a policy's connections, or peers, that its experiment treats, 0 to 1",
            Samples::Gauge(shares.collect()),
        ),
        family(
            "experiment_e_value",
            "E-values of an experiment: a gain is proven at 20, harm at 400, and the \
                   experiment is invalid at a mismatch of 1000",
            Samples::Gauge(e_values.collect()),
        ),
    ]
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

/// Counters of each policy, by direction.
fn policies(stats: &StatsAnswer) -> Vec<Family> {
    let mut all: Vec<_> = COUNTERS.iter().map(|one| counter(one, stats)).collect();
    all.push(gauge(
        "connections_per_sample",
        "1 in this many loss-free connections is sampled until it closes, and counts for all of \
         them in smoothed_rtt and aborted",
        stats.sampling.into(),
    ));
    all.push(times(
        "connect_time",
        "Connect times: from the first SYN to ESTABLISHED, losses included (of accepted \
         connections: the last round trip of the handshake)",
        by_arm(stats, |_| true).map(|(labels, stats)| (labels, &stats.connect_time)),
    ));
    all.push(times(
        "path_rtt",
        "Path RTTs: round-trip times of handshakes, without their losses",
        each(stats, BEGUN).map(|(labels, stats)| (labels, &stats.path_rtt)),
    ));
    if stats.rtt_sampling != "off" {
        // Sockets that were open before their policy are not counted on every host.
        let before = each(stats, &["unknown"]).filter(|(_, stats)| stats.srtt.count > 0);
        let samples = each(stats, BEGUN).chain(before);
        all.push(times(
            "smoothed_rtt",
            "Smoothed round-trip times of connections (RFC 6298), sampled as configured by \
             rtt_sampling",
            samples.map(|(labels, stats)| (labels, &stats.srtt)),
        ));
    }
    all.push(labelled(
        "retransmission_timeouts",
        "Retransmission timeouts of established connections, by the number of consecutive timeouts \
         before them without an answer (7: 7 or more)",
        stats,
        |s| {
            let steps = s.rtos.iter().enumerate();
            steps
                .map(|(step, count)| (("step", step.to_string()), *count))
                .collect()
        },
    ));
    all.push(labelled(
        "setsockopt_failures",
        "Socket options that the kernel refused",
        stats,
        |s| {
            let all = rto_agent_common::SockOpt::NAMES.into_iter();
            all.map(|(_, option)| {
                let count = s.setsockopt_failures.get(option).copied();
                (("option", option.to_owned()), count.unwrap_or(0))
            })
            .collect()
        },
    ));
    all.extend(arms(stats));
    all
}

/// Outcomes in each arm, for policies with a control arm.
fn arms(stats: &StatsAnswer) -> Vec<Family> {
    let (mut attempts, mut outcomes) = (Vec::new(), Vec::new());
    for (labels, stats) in by_arm(stats, |stats| stats.control.is_some()) {
        for (outcome, count) in outcomes_of(stats) {
            let labels = labels.iter().cloned();
            let labels = labels.chain([("outcome", outcome.to_owned())]);
            outcomes.push((labels.collect(), count));
        }
        attempts.push((labels, stats.attempts));
    }
    if attempts.is_empty() {
        return Vec::new();
    }
    let differences = stats.policies.iter().filter_map(|(policy, stats)| {
        let difference = stats.connect_time_difference()?;
        let [low, high] = difference.interval_us;
        let bounds = [("mean", difference.mean_us), ("low", low), ("high", high)];
        Some(bounds.map(|(bound, us)| {
            let labels = vec![("policy", policy.to_string()), ("bound", bound.to_owned())];
            (labels, us / 1e6)
        }))
    });
    vec![
        family_in_seconds(
            "connect_time_difference",
            "Mean connect time of the treated arm minus that of the control arm, since \
                   counting began, and its 95 % interval (established active connections)",
            Samples::Gauge(differences.flatten().collect()),
        ),
        family(
            "arm_attempts",
            "Attempts by arm, for policies with a control arm: connect() calls, and \
                   connection requests answered",
            Samples::Counter(attempts),
        ),
        family(
            "arm_outcomes",
            "Outcomes of an arm's attempts: established, established within 500 ms (good), \
                   with a spurious SYN or SYN-ACK, with a DSACK, aborted",
            Samples::Counter(outcomes),
        ),
    ]
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
            of_arm(policy, stats, BEGUN).map(move |(mut labels, stats)| {
                labels.push(("arm", arm.to_string()));
                (labels, stats)
            })
        })
    })
}

/// The number of connections with each outcome.
fn outcomes_of(stats: &DirectionStats) -> [(&'static str, u64); 5] {
    [
        ("established", stats.connections),
        ("good", stats.good_attempts),
        ("spurious", stats.spurious_connections),
        ("dsack", stats.dsack_connections),
        ("aborted", stats.aborted),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "seconds are a double")]
fn counter(counter: &Counter, stats: &StatsAnswer) -> Family {
    let directions = match counter.scope {
        Scope::Handshakes => BEGUN,
        Scope::Connections => ALL,
    };
    let samples = each(stats, directions).map(|(labels, stats)| (labels, (counter.value)(stats)));
    if counter.is_time {
        let seconds = samples.map(|(labels, us)| (labels, us as f64 / 1e6));
        let seconds = Samples::Amount(seconds.collect());
        return family_in_seconds(counter.metric, counter.help, seconds);
    }
    let samples = Samples::Counter(samples.collect());
    family(counter.metric, counter.help, samples)
}

/// A counter with an additional label.
fn labelled(
    name: &'static str,
    help: &'static str,
    stats: &StatsAnswer,
    values: impl Fn(&DirectionStats) -> Vec<((&'static str, String), u64)>,
) -> Family {
    let samples = each(stats, ALL).flat_map(|(labels, stats)| {
        let values = values(stats).into_iter();
        values.map(move |(more, value)| (labels.iter().cloned().chain([more]).collect(), value))
    });
    family(name, help, Samples::Counter(samples.collect()))
}

fn times<'a>(
    name: &'static str,
    help: &'static str,
    samples: impl Iterator<Item = (Labels, &'a HistogramView)>,
) -> Family {
    let samples = samples.map(|(labels, view)| (labels, view.into()));
    family_in_seconds(name, help, Samples::Histogram(samples.collect()))
}

#[cfg(test)]
mod tests;
