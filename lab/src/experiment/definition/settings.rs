//! The settings of a level, as in the file.

use std::{collections::BTreeMap, time::Duration};

use anyhow::ensure;
use rto_testbed::{
    link::{
        config::LinkConfig,
        packet::{Direction, Kind},
        rule::{DropPattern, PacketFilter, Rule},
    },
    workload::rr::{LONGEST, Options},
};
use serde::{Deserialize, Serialize};

use crate::{
    commands::predict::duration,
    engine::Only,
    load::Load,
    program::Program,
    sampler,
    summary::millis,
    topology::LinkBackend,
    workload::{Work, Workload},
};

/// Most connections of a run, and segments of a flow.
const CONNECTIONS: u32 = 1000;
const SEGMENTS: u32 = 700;
/// Longest time of other traffic; it ends with the run.
const BACKGROUND: Duration = Duration::from_secs(600);
/// Shortest outage.
const SHORTEST: Duration = Duration::from_millis(2);

/// A setting whose values are a factor.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sweep {
    Pause,
    Delay,
    RoundTrip,
    Jitter,
    Outage,
}

/// The settings of a level; an absent one is inherited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    /// Name of the level.
    #[serde(skip_serializing)]
    pub(crate) name: Option<String>,
    /// Levels of other factors that this one is combined with.
    #[serde(skip_serializing)]
    pub(crate) only: Only,
    /// An agent's policy in the form of its configuration; absent: the kernel's own timers.
    pub(crate) policy: Option<toml::Table>,
    /// The end that the agent covers.
    pub(crate) at: Option<Coverage>,
    /// Observations that a daemon would have collected for hours.
    pub(crate) learnt: Option<Learnt>,
    /// Sysctls of both namespaces.
    pub(crate) sysctls: Option<BTreeMap<String, toml::Value>>,
    /// rto_min as the metric of a route to the other end.
    pub(crate) route_rto_min: Option<Time>,
    /// TCP_THIN_LINEAR_TIMEOUTS of a request/response application.
    pub(crate) thin: Option<bool>,
    pub(crate) delay: Option<Time>,
    pub(crate) jitter: Option<Time>,
    /// Jitter, as a percentage of the delay.
    pub(crate) jitter_percent: Option<u32>,
    pub(crate) rate_mbit: Option<u64>,
    /// Queue of the bottleneck, bytes.
    pub(crate) queue: Option<u64>,
    pub(crate) drop: Option<Dropped>,
    /// Duration for which all packets are lost, starting at a random moment.
    pub(crate) outage: Option<Time>,
    /// The host whose own firewall drops all packets, in INPUT and in OUTPUT; absent: the network drops them.
    pub(crate) outage_at: Option<Towards>,
    /// The longest outage: the outages of the runs are spread evenly up to it.
    pub(crate) outage_to: Option<Time>,
    pub(crate) workload: Option<Workload>,
    pub(crate) count: Option<u32>,
    #[serde(skip_serializing)]
    pub(crate) quick_count: Option<u32>,
    pub(crate) skip: Option<u32>,
    pub(crate) pause: Option<Time>,
    /// Bytes of a request, for request-response.
    pub(crate) request: Option<u32>,
    /// Connections at the same time, for request-response.
    pub(crate) connections: Option<u32>,
    /// Segments of a flow, for flows.
    pub(crate) segments: Option<u32>,
    /// The client acknowledges each segment at once, by the feature of a route.
    pub(crate) quick_acks: Option<bool>,
    /// Other traffic towards the client on a bottleneck, percent of `rate_mbit`: TCP flows with bursts, and UDP.
    pub(crate) background: Option<u16>,
    /// A packet sampler reads round-trip times from one packet in this many, beside ping(8).
    pub(crate) sample: Option<u64>,
    /// Number of testbeds, which is the number of simultaneous runs.
    #[serde(skip_serializing)]
    pub(crate) links: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Coverage {
    #[default]
    Both,
    Server,
}

/// A duration as text, "8ms".
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Time(pub(crate) Duration);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        duration(&text).map(Self)
    }
}

impl From<Time> for String {
    fn from(time: Time) -> Self {
        humantime::format_duration(time.0).to_string()
    }
}

/// What `initial_rto = "auto"` has learnt from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Learnt {
    /// Path RTTs, microseconds, and the number of each per second.
    pub(crate) initial_rto: Vec<(u64, u64)>,
}

/// The packets that the link drops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dropped {
    #[serde(default)]
    pub(crate) packets: Packets,
    pub(crate) towards: Option<Towards>,
    /// Bytes of data in the packet.
    pub(crate) bytes: Option<u32>,
    #[serde(default)]
    pub(crate) first_copy: bool,
    /// Data of a flow starting with this byte.
    pub(crate) from_byte: Option<u64>,
    /// One packet in this many.
    pub(crate) every: Option<u64>,
    /// Percentage, at random.
    pub(crate) percent: Option<f64>,
    /// How random losses follow each other; absent: they are independent.
    pub(crate) model: Option<LossModel>,
    /// Mean number of packets lost in a row, with a model.
    pub(crate) run: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LossModel {
    GilbertElliott,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Packets {
    #[default]
    All,
    Syn,
    SynAck,
    Data,
    ClientData,
    ServerData,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Towards {
    Client,
    Server,
}

impl Dropped {
    pub(crate) fn rule(&self) -> anyhow::Result<Rule> {
        let mut filter = match self.packets {
            Packets::All => PacketFilter::ALL,
            Packets::Syn => PacketFilter::SYN,
            Packets::SynAck => PacketFilter::SYN_ACK,
            Packets::Data => PacketFilter::kind(Kind::Data),
            Packets::ClientData => PacketFilter::CLIENT_DATA,
            Packets::ServerData => PacketFilter::SERVER_DATA,
        };
        match self.towards {
            Some(Towards::Client) => filter = filter.towards(Direction::ToClient),
            Some(Towards::Server) => filter = filter.towards(Direction::ToServer),
            None => {}
        }
        filter.payload = self.bytes.map(|bytes| (bytes, bytes));
        filter.first_time = self.first_copy;
        filter.from_byte = self.from_byte;
        let share = self.percent.unwrap_or(0.0) / 100.0;
        let pattern = match (self.every, self.percent, self.model, self.run) {
            (None, None, None, None) => DropPattern::All,
            (Some(n), None, None, None) if n > 0 => DropPattern::Every(n),
            (None, Some(_), None, None) if (0.0..=1.0).contains(&share) => {
                DropPattern::Share(share)
            }
            (None, Some(_), Some(LossModel::GilbertElliott), Some(length))
                if (0.0..=0.5).contains(&share) && length >= 1.0 =>
            {
                DropPattern::Runs { share, length }
            }
            _ => anyhow::bail!(
                "drop: give `every` (1 or more), or `percent` (0 to 100), or `model`, `percent` (0 to 50) and `run` (1 or more)"
            ),
        };
        Ok(Rule::new(filter, pattern))
    }
}

impl Settings {
    /// These settings, with absent ones taken from `below`.
    pub(crate) fn over(&self, below: &Self) -> Self {
        macro_rules! over {
            ($($field:ident),*) => {
                Self {
                    name: None,
                    only: Only::new(),
                    $($field: self.$field.clone().or_else(|| below.$field.clone())),*
                }
            };
        }
        over!(
            policy,
            at,
            learnt,
            sysctls,
            route_rto_min,
            thin,
            delay,
            jitter,
            jitter_percent,
            rate_mbit,
            queue,
            drop,
            outage,
            outage_at,
            outage_to,
            workload,
            count,
            quick_count,
            skip,
            pause,
            request,
            connections,
            segments,
            quick_acks,
            background,
            sample,
            links
        )
    }

    /// A value of a setting as a level.
    pub(crate) fn of_sweep(sets: Sweep, value: &str) -> anyhow::Result<Self> {
        let time = duration(value).map_err(anyhow::Error::msg)?;
        let mut settings = Self {
            name: Some(millis(time).to_string()),
            ..Self::default()
        };
        let time = Some(Time(time));
        match sets {
            Sweep::Pause => settings.pause = time,
            Sweep::Delay => settings.delay = time,
            Sweep::RoundTrip => settings.delay = time.map(|time| Time(time.0 / 2)),
            Sweep::Jitter => settings.jitter = time,
            Sweep::Outage => settings.outage = time,
        }
        Ok(settings)
    }

    /// Options of the sockets.
    pub(crate) const fn options(&self) -> Options {
        Options {
            thin_linear: self.thin,
        }
    }

    pub(crate) fn work(&self) -> Work {
        Work {
            skip: self.skip.unwrap_or(0),
            count: self.count.unwrap_or(20),
            pause: self.pause.map_or(Duration::ZERO, |time| time.0),
            request: self.request.unwrap_or(1),
            connections: self.connections.unwrap_or(1),
            segments: self.segments.unwrap_or(10),
        }
    }

    /// The real program that is measured.
    pub(crate) fn program(&self) -> Option<Program> {
        self.workload?.program()
    }

    /// Duration of the outage of a run.
    pub(crate) fn outage(&self, number: u32, runs: u32) -> Option<Duration> {
        let least = self.outage?.0;
        let most = self.outage_to.map_or(least, |time| time.0);
        let share = (f64::from(number) + 0.5) / f64::from(runs.max(1));
        Some(least + most.saturating_sub(least).mul_f64(share))
    }

    /// Duration of a transaction, without the time of the server.
    pub(crate) fn under_way(&self) -> Duration {
        let link = self.link();
        2 * (link.delay + link.jitter)
    }

    /// The other traffic of a run.
    pub(crate) fn background(&self, seed: u64, number: u32) -> Option<Load> {
        let load = f64::from(self.background?) / 100.0;
        let link = self.link();
        let rate = link.rate?;
        Some(Load {
            rate,
            delay: link.delay,
            queue: Duration::from_secs_f64(link.queue as f64 * 8.0 / rate as f64),
            load,
            tcp: 0.9 * load,
            length: BACKGROUND,
            seed: seed ^ u64::from(number),
        })
    }

    pub(crate) fn link(&self) -> LinkConfig {
        let default = LinkConfig::default();
        let time = |time: Option<Time>| time.map_or(Duration::ZERO, |time| time.0);
        let delay = time(self.delay);
        LinkConfig {
            delay,
            jitter: time(self.jitter) + delay * self.jitter_percent.unwrap_or(0) / 100,
            rate: self.rate_mbit.map(|mbit| mbit * 1_000_000),
            queue: self.queue.unwrap_or(default.queue),
        }
    }

    /// Checks the combination of keys that are valid by themselves.
    pub(crate) fn check(&self, backend: LinkBackend) -> anyhow::Result<()> {
        ensure!(
            backend == LinkBackend::Relay || self.link() == LinkConfig::default(),
            "delay, jitter, rate_mbit and queue: a veth does not support them: leave them out, or use --link relay"
        );
        if let Some(dropped) = &self.drop {
            dropped.rule()?;
        }
        let workload = self.workload.unwrap_or_default();
        ensure!(self.work().count > 0, "count: at least 1");
        ensure!(
            self.work().pause.is_zero() || !workload.has_own_pace(),
            "pause: http-pipelined, grpc, pages and programs have their own timing: leave it out, or set `pause = \"0ms\"`"
        );
        ensure!(
            self.thin.is_none() || workload == Workload::RequestResponse,
            "thin: only for request-response: leave it out, or use that workload"
        );
        ensure!(
            self.request
                .is_none_or(|bytes| (1..=LONGEST).contains(&bytes)),
            "request: 1 to {LONGEST} bytes"
        );
        let is_single = self.connections.is_none_or(|count| count == 1);
        ensure!(
            is_single || (workload == Workload::RequestResponse && self.outage.is_none()),
            "connections: only for request-response without an outage"
        );
        ensure!(
            self.connections
                .is_none_or(|count| (1..=CONNECTIONS).contains(&count)),
            "connections: 1 to {CONNECTIONS}"
        );
        ensure!(
            self.segments
                .is_none_or(|count| (1..=SEGMENTS).contains(&count)),
            "segments: 1 to {SEGMENTS}"
        );
        ensure!(
            self.background.is_none() || self.rate_mbit.is_some(),
            "background: a percentage of `rate_mbit`, which is required"
        );
        ensure!(
            self.sample != Some(0) && (self.sample.is_none() || backend == LinkBackend::Relay),
            "sample: at least 1, and only with --link relay"
        );
        if let Some(Time(outage)) = self.outage {
            ensure!(
                outage >= SHORTEST,
                "outage: must be at least 2ms, which is longer than a transaction; leave it out for no outage"
            );
            ensure!(
                !workload.has_flows(),
                "outage: flows start at once and may end before it: use another workload"
            );
        }
        ensure!(
            self.outage_to
                .is_none_or(|most| self.outage.is_some_and(|least| least.0 < most.0)),
            "outage_to: must be longer than `outage`, which is required"
        );
        ensure!(
            self.outage_at.is_none() || self.outage.is_some(),
            "outage_at: the host whose firewall makes the `outage`, which is required"
        );
        ensure!(self.links != Some(0), "links: at least 1");
        ensure!(self.rate_mbit != Some(0), "rate_mbit: at least 1");
        ensure!(
            self.policy.is_some() || self.learnt.is_none(),
            "`learnt` needs a policy: add `policy = {{ initial_rto = \"auto\" }}`"
        );
        Ok(())
    }

    /// The measures of a run.
    pub(crate) fn measures(&self) -> Vec<&'static str> {
        let mut measures = self.workload.unwrap_or_default().measures().to_vec();
        measures.extend(["sent", "retransmitted", "spurious"]);
        measures.extend(self.outage.map(|_| "lasted"));
        if self.sample.is_some() {
            measures.extend(sampler::MEASURES);
            measures.push("ping");
        }
        measures.extend(self.drop.as_ref().map(|_| "packets dropped"));
        measures.extend(self.learnt.as_ref().map(|_| "value that was learnt"));
        measures
    }

    /// The rto_min that is set, as text; `None`: the kernel's own.
    pub(crate) fn rto_min(&self) -> Option<String> {
        let sysctls = self.sysctls.as_ref();
        let by_sysctl = sysctls.and_then(|all| all.get("net.ipv4.tcp_rto_min_us")?.as_integer());
        let by_policy = self.policy.as_ref().and_then(|all| all.get("rto_min"));
        let text_of = |time: Duration| format!("{} ms", millis(time));
        let by_route = self.route_rto_min.map(|Time(time)| text_of(time));
        let of_policy = by_policy.and_then(toml::Value::as_str).map(|text| {
            let time = duration(text);
            // "auto" is not a duration.
            time.map_or_else(|_| text.to_owned(), text_of)
        });
        let by_sysctl = by_sysctl.and_then(|us| u64::try_from(us).ok());
        let of_sysctl = by_sysctl.map(|us| text_of(Duration::from_micros(us)));
        of_policy.or(by_route).or(of_sysctl)
    }

    /// A line for a report; empty if nothing is set.
    pub(crate) fn describe(&self) -> String {
        let table = toml::Table::try_from(self).unwrap_or_default();
        let all = table.iter().map(|(key, value)| format!("{key} = {value}"));
        all.collect::<Vec<_>>().join(", ")
    }
}
