//! connect() in outages according to the model, by the packets of a handshake that are lost, and by
//! the ends that the agent covers.

use std::{ops::RangeInclusive, str::FromStr};

use rto_model::outage::{Comparison, Host, Timers, compare, first_from};
use rto_testbed::{machine::Machine, netns::Lost};
use serde::Serialize;

use crate::{
    chart::{Axis, Chart, Series},
    handshake::Handshake,
    report::Table,
    server::Server,
    summary::{f, median},
};

/// The ends that the agent covers: client and server. The first arm is the control.
pub(crate) const ARMS: [(&str, bool, bool); 4] = [
    ("none", false, false),
    ("client", true, false),
    ("server", false, true),
    ("both", true, true),
];
/// What an outage drops.
pub(crate) const LOSSES: [(&str, Lost); 2] = [("SYNs", Lost::Syns), ("SYN-ACKs", Lost::SynAcks)];
/// Consecutive jiffies in which connect() may be called: every position in the steps of the timer wheel's level for
/// timers up to 16 s (HZ 250).
const PHASES: u64 = 512;
/// Outages of a chart.
const POINTS: u32 = 400;

/// A version of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32, u32);

impl Version {
    /// The first version with `net.ipv4.tcp_syn_linear_timeouts`.
    const LINEAR: Self = Self(6, 5);

    /// The version of this kernel.
    pub(crate) fn here() -> anyhow::Result<Self> {
        let kernel = Machine::here()?.kernel;
        kernel.parse().map_err(anyhow::Error::msg)
    }
}

impl FromStr for Version {
    type Err = String;

    /// Also parses "6.18.44-amd64" as 6.18.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = text.split(['.', '-']).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Self(major, minor)),
            _ => Err(format!("{text}: not a Linux version, such as 6.12")),
        }
    }
}

/// The schedules of both ends.
#[derive(Debug)]
pub struct Model {
    pub(crate) hz: u64,
    /// When packets that arrive would complete a handshake, jiffies since the first SYN: by loss,
    /// arm, and the jiffy in which connect() was called.
    schedules: Vec<(&'static str, &'static str, Vec<Vec<u64>>)>,
}

/// How long connect() takes through an outage.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Prediction {
    pub(crate) outage_ms: f64,
    pub(crate) lost: &'static str,
    pub(crate) agent: &'static str,
    /// The median over the jiffies in which connect() is called; absent if it gives up.
    pub(crate) connect_ms: Option<f64>,
}

/// Comparison with the kernel's own timers.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Against {
    lost: &'static str,
    agent: &'static str,
    #[serde(flatten)]
    comparison: Comparison,
}

impl Model {
    /// The schedules of a version, with the kernel's own timers and with a policy.
    pub(crate) fn new(version: Version, kernel: &Handshake, own: &Handshake) -> Self {
        let host = Host {
            hz: kernel.hz,
            linear_timeouts: match version < Version::LINEAR {
                true => 0,
                false => kernel.syn.linear_timeouts,
            },
            syn_retries: kernel.syn.syn_retries,
        };
        Self::with(host, Timers::Scheduled(own.syn.initial_rto), kernel, own)
    }

    /// The same with these timers of covered clients.
    fn with(host: Host, covered: Timers, kernel: &Handshake, own: &Handshake) -> Self {
        let server = |one: &Handshake| Server {
            syn_ack_rto: one.syn_ack_rto,
            syn_ack_retries: one.syn_ack_retries,
            ..Server::kernel(one.hz)
        };
        let schedules = LOSSES.into_iter().flat_map(|(lost, which)| {
            ARMS.into_iter().map(move |(agent, client, at_server)| {
                let timers = if client { covered } else { Timers::Kernel };
                let server = server(if at_server { own } else { kernel });
                let schedule = |begin| {
                    let syns = host.syns(timers, begin).sent;
                    match which {
                        Lost::Syns => syns,
                        Lost::SynAcks => server.syn_acks(&syns, begin),
                    }
                };
                (lost, agent, (0..PHASES).map(schedule).collect())
            })
        });
        Self {
            hz: host.hz,
            schedules: schedules.collect(),
        }
    }

    fn of(&self, lost: &str, agent: &str) -> &[Vec<u64>] {
        let mut all = self.schedules.iter();
        let found = all.find(|(which, end, _)| *which == lost && *end == agent);
        found.map_or(&[], |(.., schedules)| schedules)
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an hour at most"
    )]
    fn jiffies(&self, ms: f64) -> u64 {
        (ms * f(self.hz) / 1000.0).ceil() as u64
    }

    fn ms(&self, jiffies: u64) -> f64 {
        f(jiffies) * 1000.0 / f(self.hz)
    }

    /// The connect time by outage, loss and arm.
    pub(crate) fn predict(&self, outages_ms: &[f64]) -> Vec<Prediction> {
        let each = outages_ms.iter().flat_map(|outage_ms| {
            self.schedules.iter().map(|(lost, agent, schedules)| {
                let outage = self.jiffies(*outage_ms);
                let times = schedules.iter().map(|times| first_from(times, outage));
                let times: Option<Vec<f64>> = times.map(|time| Some(self.ms(time?))).collect();
                Prediction {
                    outage_ms: *outage_ms,
                    lost,
                    agent,
                    connect_ms: times.and_then(|times| median(&times)),
                }
            })
        });
        each.collect()
    }

    /// Each arm against the control, over outages up to this one.
    pub(crate) fn against(&self, longest_ms: f64) -> Vec<Against> {
        let arms = self
            .schedules
            .iter()
            .filter(|(_, agent, _)| *agent != ARMS[0].0);
        let one = |(lost, agent, schedules): &(&'static str, &'static str, Vec<Vec<u64>>)| {
            let kernel = self.of(lost, ARMS[0].0).iter().cloned();
            let pairs: Vec<_> = kernel.zip(schedules.iter().cloned()).collect();
            Against {
                lost,
                agent,
                comparison: compare(&pairs, 0..self.jiffies(longest_ms), self.hz),
            }
        };
        arms.map(one).collect()
    }

    /// How far a measured time is outside the range of the model, milliseconds: 0 between the results of two calls of
    /// connect() that are a jiffy apart. The end of an outage timed by the kernel may be off by a jiffy.
    pub(crate) fn distance_ms(
        &self,
        (lost, agent): (&str, &str),
        outage_ms: f64,
        took_ms: f64,
    ) -> f64 {
        let outage = self.jiffies(outage_ms);
        let ends: RangeInclusive<u64> = outage.saturating_sub(1)..=outage + 1;
        let times = self
            .of(lost, agent)
            .iter()
            .flat_map(|times| ends.clone().filter_map(|end| first_from(times, end)));
        let distances = times.map(|time| (took_ms - self.ms(time)).abs());
        distances.fold(f64::INFINITY, f64::min)
    }
}

/// Whether the combination is worth a column: if SYNs are lost, the server has nothing to retransmit.
fn is_shown(lost: &str, agent: &str) -> bool {
    let at_server = ARMS
        .iter()
        .any(|(name, _, at_server)| *name == agent && *at_server);
    lost != LOSSES[0].0 || !at_server
}

/// Outages of a chart up to the longest, evenly spread.
pub(crate) fn evenly(longest_ms: f64) -> Vec<f64> {
    let points = 1..=POINTS;
    points
        .map(|n| longest_ms * f64::from(n) / f64::from(POINTS))
        .collect()
}

/// A line for each outage, and a column for each loss and arm.
pub(crate) fn table(predictions: &[Prediction]) -> Table {
    let mut table = Table::new("outage", "", &["outage, ms"]);
    for all in predictions.chunk_by(|a, b| a.outage_ms == b.outage_ms) {
        let shown = all.iter().filter(|one| is_shown(one.lost, one.agent));
        if table.rows.is_empty() {
            let names = shown
                .clone()
                .map(|one| format!("{}, {}", one.lost, one.agent));
            table.columns.extend(names);
        }
        let cells = shown.map(|one| match one.connect_ms {
            Some(ms) => format!("{ms:.0}"),
            None => "never".to_owned(),
        });
        table.row([all[0].outage_ms.to_string()].into_iter().chain(cells));
    }
    table
}

/// A line for each arm but the control.
pub(crate) fn against_table(all: &[Against]) -> Table {
    let columns = [
        "lost",
        "agent",
        "mean, ms",
        "worst, ms",
        "in outages of, ms",
        "late, %",
        "copies",
    ];
    let mut table = Table::new("against", "", &columns);
    for Against {
        lost,
        agent,
        comparison,
    } in all
    {
        let worst = comparison.worst;
        if is_shown(lost, agent) {
            table.row([
                (*lost).to_owned(),
                (*agent).to_owned(),
                format!("{:+.0}", comparison.mean_ms),
                format!("+{}", worst.later_ms),
                format!("{} to {}", worst.from_ms, worst.to_ms),
                format!("{:.1}", comparison.late * 100.0),
                format!("x {:.1}", comparison.copies),
            ]);
        }
    }
    table
}

/// A chart for each loss.
pub(crate) fn charts(predictions: &[Prediction]) -> Vec<Chart> {
    let chart = |(lost, _)| {
        let arms = ARMS.into_iter().filter(|(agent, ..)| is_shown(lost, agent));
        let series = arms.map(|(agent, ..)| {
            let own = predictions
                .iter()
                .filter(|one| one.lost == lost && one.agent == agent);
            let points = own.filter_map(|one| Some((one.outage_ms, one.connect_ms?)));
            let name = if agent == ARMS[0].0 { "kernel" } else { agent };
            Series::steps(name, points.collect())
        });
        Chart {
            title: format!("connect() while {lost} are lost, by which end has the agent"),
            x: Axis::ms("outage"),
            y: Axis::ms("connect time"),
            log_x: false,
            log_y: false,
            series: series.collect(),
        }
    };
    LOSSES.into_iter().map(chart).collect()
}

#[cfg(test)]
mod tests {
    use rto_model::syn::SynTimers;

    use super::*;

    const HZ: u64 = 250;

    fn handshakes() -> [Handshake; 2] {
        let kernel = Handshake::kernel(HZ, 6, 4, 5);
        let own = Handshake {
            syn: SynTimers {
                initial_rto: 25,
                ..kernel.syn
            },
            syn_ack_rto: 124,
            ..kernel
        };
        [kernel, own]
    }

    fn model(version: &str) -> Model {
        let [kernel, own] = handshakes();
        Model::new(version.parse().unwrap(), &kernel, &own)
    }

    fn connect_ms(model: &Model, lost: &str, outage_ms: f64) -> [f64; 4] {
        let all = model.predict(&[outage_ms]);
        let of = |agent| {
            all.iter()
                .find(|one| one.lost == lost && one.agent == agent)
        };
        ARMS.map(|(agent, ..)| of(agent).unwrap().connect_ms.unwrap())
    }

    /// Medians of 5 connections each on Linux 6.18, HZ 250, with 100 ms that doubles: none, client,
    /// server, both.
    #[test]
    fn predictions_match_medians_measured_on_linux_6_18() {
        let host = Host {
            hz: HZ,
            linear_timeouts: 4,
            syn_retries: 6,
        };
        let [kernel, own] = handshakes();
        let doubling = Model::with(host, Timers::Doubling(25), &kernel, &own);
        for (lost, outage_ms, measured) in [
            ("SYNs", 900.0, [1011.4, 1148.9, 1012.9, 1138.2]),
            ("SYNs", 3900.0, [4081.9, 6851.1, 4082.0, 6850.9]),
            ("SYN-ACKs", 300.0, [1008.5, 723.3, 522.9, 609.3]),
            ("SYN-ACKs", 900.0, [1008.1, 1736.4, 1012.2, 1730.8]),
            ("SYN-ACKs", 3900.0, [4081.1, 5634.6, 4081.7, 5633.3]),
        ] {
            let predicted = connect_ms(&doubling, lost, outage_ms);
            for ((agent, ..), (own, measured)) in ARMS.iter().zip(predicted.iter().zip(measured)) {
                let distance = doubling.distance_ms((lost, agent), outage_ms, measured);
                assert!(distance < 8.0, "{lost} {outage_ms} {agent}: {distance}");
                // A measured median covers different jiffies, and a timer of seconds fires up to
                // 256 ms late.
                assert!(
                    (own - measured).abs() < 130.0,
                    "{lost} {outage_ms} {agent}: {own}"
                );
            }
        }
    }

    #[test]
    fn version_decides_over_linear_timeouts() {
        // 1.4 s: the kernel's second slot is 3 s before Linux 6.5.
        for (version, none) in [("6.4", 3020.0..3090.0), ("6.5", 2020.0..2060.0)] {
            let [own, with, ..] = connect_ms(&model(version), "SYNs", 1400.0);
            assert!(
                none.contains(&own) && with <= own + 40.0,
                "{version}: {own} {with}"
            );
        }
        for bad in ["", "6", "six.1"] {
            assert!(bad.parse::<Version>().unwrap_err().contains("such as 6.12"));
        }
        assert_eq!("6.18.44-fc".parse(), Ok(Version(6, 18)));
        assert_eq!("6.1-rc2".parse(), Ok(Version(6, 1)));
    }

    /// Measured on Linux 6.18 over 84 outages each way: later by 0.04 s at most with SYNs lost, by 0.22 s with
    /// SYN-ACKs.
    #[test]
    fn covered_client_is_hardly_ever_later() {
        for version in ["6.4", "6.18"] {
            for Against {
                lost,
                agent,
                comparison,
            } in model(version).against(20_000.0)
            {
                let limit = if lost == "SYNs" { 40 } else { 250 };
                let worst = comparison.worst;
                assert!(
                    worst.later_ms <= limit,
                    "{version} {lost} {agent}: {worst:?}"
                );
                let gains = agent == "server" || comparison.mean_ms < -1_500.0;
                assert!(gains, "{version} {lost} {agent}: {comparison:?}");
            }
        }
    }

    #[test]
    fn pictures_in_docs_are_current() {
        for (seconds, name) in [(3, "outage-3s.svg"), (20, "outage.svg")] {
            let charts = charts(&model("6.18").predict(&evenly(f64::from(seconds) * 1000.0)));
            let picture = crate::chart::svg(&charts);
            let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
            let path = format!("docs/research/{name}");
            let kept = std::fs::read_to_string(format!("{root}/{path}"));
            assert!(
                kept.is_ok_and(|kept| kept == picture),
                "run rto-lab predict --outage {seconds}s --initial-rto 100ms --hz 250 --linux 6.18 --chart {path}"
            );
        }
    }

    #[test]
    fn tables_have_a_cell_for_each_outage_and_arm() {
        let model = model("6.18");
        let predictions = model.predict(&[300.0, 500_000.0]);
        let table = table(&predictions);
        assert_eq!(table.columns[1..3], ["SYNs, none", "SYNs, client"]);
        assert_eq!((table.columns.len(), table.rows.len()), (7, 2));
        assert!(
            table.rows[1][1..].iter().all(|cell| cell == "never"),
            "{table:?}"
        );
        let against = against_table(&model.against(6_000.0));
        assert_eq!(against.rows.len(), 4);
    }
}
