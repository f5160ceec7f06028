//! Prometheus metrics: a status in OpenMetrics text.
//!
//! Names follow the Prometheus conventions (prefix, base units, `_total`, `_info`). Labels are
//! bounded: policies, directions, options, sources, verdicts, and never an address.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text::encode},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};

use crate::{
    api::types::{CountersView, StatusAnswer},
    kernel::{bpf::Runs, features::Presence, interference::Verdict},
};

/// Every metric's name begins so.
pub const PREFIX: &str = "rto_agent";

/// The media type of [`render`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a status. `runs`: how often the program ran, where the kernel counts that.
///
/// # Errors
///
/// Never for want of anything outside: writing to a string does not fail.
pub fn render(status: &StatusAnswer, runs: Option<Runs>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Snapshot(families(status, runs))));
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
    /// A counter of a quantity that has fractions, like seconds.
    Amount(Vec<(Labels, f64)>),
    Gauge(Vec<(Labels, f64)>),
    Info(Labels),
}

#[derive(Debug)]
struct Snapshot(Vec<Family>);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let kind = match family.samples {
                Samples::Counter(_) | Samples::Amount(_) => MetricType::Counter,
                Samples::Gauge(_) => MetricType::Gauge,
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
                Samples::Info(labels) => {
                    let mut metric = metric;
                    metric.encode_info(&labels.as_slice())?;
                }
            }
        }
        Ok(())
    }
}

/// The samples of one metric; the only one of a metric without labels has no braces.
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

fn families(status: &StatusAnswer, runs: Option<Runs>) -> Vec<Family> {
    let mut all = about(status);
    all.extend(health(status));
    all.extend(policies(status));
    if let Some(runs) = runs {
        all.push(Family {
            name: "program_runs",
            help: "Runs of the sock_ops program while the kernel counted them \
                   (kernel.bpf_stats_enabled)",
            unit: None,
            samples: Samples::Counter(vec![(Vec::new(), runs.count)]),
        });
        all.push(Family {
            name: "program_run",
            help: "Time the sock_ops program ran while the kernel measured it",
            unit: Some(Unit::Seconds),
            samples: Samples::Amount(vec![(Vec::new(), runs.time.as_secs_f64())]),
        });
    }
    all
}

fn gauge(name: &'static str, help: &'static str, value: f64) -> Family {
    Family {
        name,
        help,
        unit: None,
        samples: Samples::Gauge(vec![(Vec::new(), value)]),
    }
}

fn flag(name: &'static str, help: &'static str, value: bool) -> Family {
    gauge(name, help, f64::from(u8::from(value)))
}

/// Counts of things of which a host has fewer than 2^53.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
fn number(value: usize) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "seconds since 1970")]
fn seconds(name: &'static str, help: &'static str, at_s: u64) -> Family {
    Family {
        unit: Some(Unit::Seconds),
        ..gauge(name, help, at_s as f64)
    }
}

fn about(status: &StatusAnswer) -> Vec<Family> {
    vec![
        Family {
            name: "build",
            help: "The running version",
            unit: None,
            samples: Samples::Info(vec![("version", status.version.clone())]),
        },
        Family {
            name: "kernel",
            help: "The kernel it runs on",
            unit: None,
            samples: Samples::Info(vec![("release", status.kernel.clone())]),
        },
        gauge(
            "kernel_hz",
            "Jiffies a second (CONFIG_HZ), measured",
            status.host.hz.into(),
        ),
        Family {
            name: "feature_present",
            help: "Whether the kernel has a feature: 1 present, 0 absent, refused or unknown",
            unit: None,
            samples: Samples::Gauge(
                status
                    .features
                    .iter()
                    .map(|f| {
                        let present = f.presence == Presence::Present;
                        let labels = vec![("feature", f.name.clone())];
                        (labels, f64::from(u8::from(present)))
                    })
                    .collect(),
            ),
        },
    ]
}

fn health(status: &StatusAnswer) -> Vec<Family> {
    let by_files = status.entries.saturating_sub(status.entries_by_hand);
    let mut all = vec![
        flag(
            "attached",
            "Whether the program is in force at its cgroup",
            status.attachment.attached,
        ),
        flag(
            "in_sync",
            "Whether the kernel's maps hold what files and hand-made entries say",
            status.in_sync,
        ),
        flag(
            "last_reload_successful",
            "Whether the files were taken over when they were last read",
            status.last_reload.ok,
        ),
        seconds(
            "last_reload_timestamp",
            "When the files were last read, Unix time",
            status.last_reload.at_s,
        ),
        Family {
            name: "entries",
            help: "Entries in force, by where they come from",
            unit: None,
            samples: Samples::Gauge(vec![
                (vec![("source", "file".to_owned())], number(by_files)),
                (
                    vec![("source", "manual".to_owned())],
                    number(status.entries_by_hand),
                ),
            ]),
        },
        gauge(
            "entries_max",
            "Entries there is room for",
            status.max_entries.into(),
        ),
        gauge(
            "policies",
            "Policies in force",
            number(status.policies.len()),
        ),
        gauge(
            "foreign_programs",
            "sock_ops programs of others between the hierarchy's root and the attached cgroup",
            number(status.foreign_programs),
        ),
    ];
    if let Some(probe) = &status.probe {
        let verdict = match probe.verdict {
            Verdict::Good { .. } => "good",
            Verdict::Interference { .. } => "interference",
            Verdict::NotProbed { .. } => "not-probed",
        };
        let verdicts = ["good", "interference", "not-probed"];
        all.push(Family {
            name: "probe_verdict",
            help: "What the last probe of the timers in force found: 1 for its verdict",
            unit: None,
            samples: Samples::Gauge(
                verdicts
                    .into_iter()
                    .map(|one| {
                        let labels = vec![("verdict", one.to_owned())];
                        (labels, f64::from(u8::from(one == verdict)))
                    })
                    .collect(),
            ),
        });
        all.push(seconds(
            "probe_timestamp",
            "When it was last probed, Unix time",
            probe.at_s,
        ));
    }
    all
}

/// Counters by policy.
fn policies(status: &StatusAnswer) -> Vec<Family> {
    const ACTIVE: &str = "active";
    const PASSIVE: &str = "passive";
    let by = |name, help, samples: &dyn Fn(&CountersView) -> Vec<(Labels, u64)>| Family {
        name,
        help,
        unit: None,
        samples: Samples::Counter(
            status
                .policies
                .iter()
                .flat_map(|(policy, counters)| {
                    samples(counters).into_iter().map(move |(more, value)| {
                        let mut labels = vec![("policy", policy.to_string())];
                        labels.extend(more);
                        (labels, value)
                    })
                })
                .collect(),
        ),
    };
    let plain = |value: u64| vec![(Vec::new(), value)];
    let directions = |active: u64, passive: u64| {
        let label = |direction: &str| vec![("direction", direction.to_owned())];
        vec![(label(ACTIVE), active), (label(PASSIVE), passive)]
    };
    vec![
        by(
            "initial_rto_set",
            "Initial RTOs set, on connecting sockets (active) and on connection requests (passive)",
            &|c| directions(c.syn_timeouts_set, c.syn_ack_timeouts_set),
        ),
        by(
            "connections",
            "Connections established, by connect() (active) and accept() (passive)",
            &|c| directions(c.established_active, c.established_passive),
        ),
        by(
            "handshake_retransmissions",
            "SYNs (active) and SYN-ACKs (passive) sent again",
            &|c| directions(c.syn_retransmissions, c.syn_ack_retransmissions),
        ),
        by(
            "retransmission_timeouts",
            "Retransmission timeouts of established connections, by how many came right before \
             without an answer (7: or more)",
            &|c| {
                let steps = c.rtos.iter().enumerate();
                steps
                    .map(|(step, count)| (vec![("step", step.to_string())], *count))
                    .collect()
            },
        ),
        by(
            "tail_loss_probes",
            "Tail loss probes that sent a segment again",
            &|c| plain(c.tail_loss_probes),
        ),
        by(
            "retransmitted_segments",
            "Segments sent again by established connections, other than by a tail loss probe",
            &|c| plain(c.segments_retransmitted),
        ),
        by(
            "expired_connections",
            "Connections given up at a retransmission timeout",
            &|c| plain(c.expired),
        ),
        by(
            "linear_mode_ended",
            "Times linear mode was ended by linear_retries",
            &|c| plain(c.linear_ended),
        ),
        by(
            "open_sockets",
            "Sockets that were open already and got the policy",
            &|c| plain(c.open_sockets),
        ),
        by(
            "setsockopt_failures",
            "Socket options the kernel refused",
            &|c| {
                let all = rto_agent_common::SockOpt::NAMES.into_iter();
                all.map(|(_, option)| {
                    let count = c.setsockopt_failures.get(option).copied();
                    (vec![("option", option.to_owned())], count.unwrap_or(0))
                })
                .collect()
            },
        ),
        by(
            "storage_failures",
            "Connections left alone for want of memory",
            &|c| plain(c.storage_failures),
        ),
    ]
}
