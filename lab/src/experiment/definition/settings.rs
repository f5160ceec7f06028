//! What a level of a factor sets, as a file has it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::ensure;
use rto_testbed::link::{
    config::LinkConfig,
    packet::Direction,
    rule::{DropPattern, PacketFilter, Rule},
};
use serde::{Deserialize, Serialize};

use crate::{
    commands::predict::duration,
    engine::Only,
    topology::LinkBackend,
    workload::{Work, Workload},
};

/// A setting whose values are a factor.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sweep {
    Pause,
    Delay,
    RoundTrip,
    Jitter,
    Outage,
}

/// What a level sets; what is not there is as it was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    /// Of the level.
    #[serde(skip_serializing)]
    pub(super) name: Option<String>,
    /// Levels of other factors that this one is measured with.
    #[serde(skip_serializing)]
    pub(super) only: Only,
    /// An agent's policy, as its configuration has it; none: the kernel's own timers.
    pub(super) policy: Option<toml::Table>,
    /// Which end the agent covers.
    pub(super) at: Option<Coverage>,
    /// What a daemon would have seen for hours.
    pub(super) learnt: Option<Learnt>,
    /// The arm of a policy with a holdout that the client is in.
    pub(super) arm: Option<Arm>,
    /// In both namespaces.
    pub(super) sysctls: Option<BTreeMap<String, toml::Value>>,
    pub(super) delay: Option<Time>,
    pub(super) jitter: Option<Time>,
    /// The same, of the delay.
    pub(super) jitter_percent: Option<u32>,
    pub(super) rate_mbit: Option<u64>,
    /// Bytes that wait at the bottleneck.
    pub(super) queue: Option<u64>,
    pub(super) drop: Option<Dropped>,
    /// All packets are lost for so long, from a random moment on.
    pub(super) outage: Option<Time>,
    pub(super) workload: Option<Workload>,
    pub(super) count: Option<u32>,
    #[serde(skip_serializing)]
    pub(super) quick_count: Option<u32>,
    pub(super) skip: Option<u32>,
    pub(super) pause: Option<Time>,
    /// Testbeds: so many runs at once.
    #[serde(skip_serializing)]
    pub(super) links: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Coverage {
    #[default]
    Both,
    Server,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Arm {
    Treated,
    Control,
}

/// A duration as text, "8ms".
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Time(pub(super) Duration);

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

/// Path times or delays of ACKs, microseconds, and how many of each a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Learnt {
    InitialRto(Vec<(u64, u64)>),
    RtoMin(Vec<(u64, u64)>),
}

/// Which packets the link drops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Dropped {
    #[serde(default)]
    pub(super) packets: Packets,
    pub(super) towards: Option<Towards>,
    /// Of data in the packet.
    pub(super) bytes: Option<u32>,
    #[serde(default)]
    pub(super) first_copy: bool,
    /// Data of a flow from this byte on.
    pub(super) from_byte: Option<u64>,
    /// One in so many.
    pub(super) every: Option<u64>,
    /// By chance.
    pub(super) percent: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Packets {
    #[default]
    All,
    Syn,
    SynAck,
    ClientData,
    ServerData,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Towards {
    Client,
    Server,
}

impl Dropped {
    pub(super) fn rule(&self) -> anyhow::Result<Rule> {
        let mut filter = match self.packets {
            Packets::All => PacketFilter::ALL,
            Packets::Syn => PacketFilter::SYN,
            Packets::SynAck => PacketFilter::SYN_ACK,
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
        let pattern = match (self.every, self.percent) {
            (None, None) => DropPattern::All,
            (Some(n), None) if n > 0 => DropPattern::Every(n),
            (None, Some(percent)) if (0.0..=100.0).contains(&percent) => {
                DropPattern::Share(percent / 100.0)
            }
            _ => anyhow::bail!("drop: give `every` (1 or more) or `percent` (0 to 100), not both"),
        };
        Ok(Rule::new(filter, pattern))
    }
}

impl Settings {
    /// These, where they are set, over others.
    pub(super) fn over(&self, below: &Self) -> Self {
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
            arm,
            sysctls,
            delay,
            jitter,
            jitter_percent,
            rate_mbit,
            queue,
            drop,
            outage,
            workload,
            count,
            quick_count,
            skip,
            pause,
            links
        )
    }

    /// The values of a setting as a level.
    pub(super) fn of_sweep(sets: Sweep, value: &str) -> anyhow::Result<Self> {
        let time = duration(value).map_err(anyhow::Error::msg)?;
        let mut settings = Self {
            name: Some((time.as_secs_f64() * 1e3).to_string()),
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

    pub(super) fn work(&self) -> Work {
        Work {
            skip: self.skip.unwrap_or(0),
            count: self.count.unwrap_or(20),
            pause: self.pause.map_or(Duration::ZERO, |time| time.0),
        }
    }

    pub(super) fn link(&self) -> LinkConfig {
        let default = LinkConfig::default();
        let time = |time: Option<Time>| time.map_or(Duration::ZERO, |time| time.0);
        let delay = time(self.delay);
        LinkConfig {
            delay,
            jitter: time(self.jitter) + delay * self.jitter_percent.unwrap_or(0) / 100,
            rate: self.rate_mbit.map(|mbit| mbit * 1_000_000),
            queue: self.queue.unwrap_or(default.queue),
            ..default
        }
    }

    /// What can be wrong although each key is right by itself.
    pub(super) fn check(&self, backend: LinkBackend) -> anyhow::Result<()> {
        ensure!(
            backend == LinkBackend::Relay || self.link() == LinkConfig::default(),
            "delay, jitter, rate_mbit and queue: a veth has none of them: leave them out, or take --link relay"
        );
        if let Some(dropped) = &self.drop {
            dropped.rule()?;
        }
        ensure!(self.work().count > 0, "count: at least 1");
        ensure!(self.links != Some(0), "links: at least 1");
        ensure!(self.rate_mbit != Some(0), "rate_mbit: at least 1");
        ensure!(
            self.policy.is_some() || (self.learnt.is_none() && self.arm.is_none()),
            "`learnt` and `arm` are of a policy: add `policy = {{ rto_min = \"10ms\" }}`"
        );
        ensure!(
            self.at == Some(Coverage::Server) || self.arm.is_none(),
            "`arm` is the client's at the server: add `at = \"server\"`"
        );
        Ok(())
    }

    /// What a run of it measures.
    pub(super) fn measures(&self) -> Vec<&'static str> {
        let mut measures = self.workload.unwrap_or_default().measures().to_vec();
        measures.extend(["longest", "sent", "retransmitted", "spurious"]);
        measures.extend(self.drop.as_ref().map(|_| "packets dropped"));
        measures.extend(self.learnt.as_ref().map(|_| "value that was learnt"));
        measures
    }

    /// In one line of a report; nothing where nothing is set.
    pub(super) fn describe(&self) -> String {
        let table = toml::Table::try_from(self).unwrap_or_default();
        let all = table.iter().map(|(key, value)| format!("{key} = {value}"));
        all.collect::<Vec<_>>().join(", ")
    }
}
