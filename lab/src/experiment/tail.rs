//! Flows that lose their last segments, where only a timer helps: tail loss probes, RTO restart as far as a
//! sock_ops program can do it, and a lower rto_min, by round-trip time and by how many segments are lost.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_testbed::{
    agent::{self, Agent},
    channel::ControlChannel,
    link::{
        Link, RuleId,
        config::LinkConfig,
        relay::Relay,
        retransmits::RetransmitCounts,
        rule::{DropPattern, PacketFilter, Rule},
    },
    netns::sysctl,
    workload::{
        Role,
        flow::{Command, Work},
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    cli::Common,
    engine::{
        ChartSpec, Column, Design, EffectSpec, Experiment, Only, Record, Stat, TableSpec, texts,
    },
    interrupt,
    policy::one_line,
    topology::Topology,
};

/// Segments of a flow: an initial window.
const SEGMENTS: u32 = 10;
/// Bytes of each, where the MTU is 1500 and timestamps are on.
const MSS: u32 = 1448;
/// Small transactions before a flow: a program that lowers rto_min once per round trip has its way by then.
const WARM: u32 = 30;
/// Between flows that begin at the same time otherwise: they do not wait for the processor.
const STAGGER: Duration = Duration::from_millis(3);
/// Segments of the flows without loss: also odd numbers, whose last ACK is delayed.
const LENGTHS: (u32, u32) = (8, 12);
/// After each of them.
const PAUSE: Duration = Duration::from_millis(60);
/// Packets a second of all flows without loss, about.
const RATE: f64 = 1500.0;
/// Connections at most.
const CONNECTIONS: u32 = 80;
/// Runs at once: each variant has a link of its own.
pub(crate) const JOBS: usize = 2 * TIMERS.len();
/// The level of the kernel's own timers.
const KERNEL: &str = "kernel";
/// The sender's timers, and what the agent's policy has.
const TIMERS: [(&str, Option<&str>); 4] = [
    (KERNEL, None),
    ("restart", Some("rto_min = \"200ms\"\nrto_restart = true\n")),
    ("rto_min 100 ms", Some("rto_min = \"100ms\"\n")),
    ("rto_min 20 ms", Some("rto_min = \"20ms\"\n")),
];
/// Levels of tail loss probes.
const PROBES: [&str; 2] = ["no TLP", "TLP"];
/// Published shares of segments that were retransmitted spuriously, percent, of other traffic.
const PUBLISHED: [(&str, &str, f64); 3] = [
    (KERNEL, PROBES[0], 4.8e-3),
    ("restart", PROBES[0], 5.9e-3),
    (KERNEL, PROBES[1], 0.18),
];

/// `rto-lab tail`.
#[derive(Clone, Debug, Args)]
pub struct Tail {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Flows of a cell [default: 5; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

/// One variant at one round-trip time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Of [`TIMERS`].
    timers: usize,
    tlp: bool,
    rtt_ms: u64,
    /// Nothing is lost, and there is jitter.
    lossless: bool,
}

/// The whole experiment.
#[derive(Debug)]
pub struct Plan {
    rtts_ms: Vec<u64>,
    lost: Vec<u32>,
    runs: u32,
    calm_rtts_ms: Vec<u64>,
    calm_for: Duration,
    seed: u64,
    agent: PathBuf,
}

/// A link, and both ends.
pub struct Testbed {
    // Before the namespaces that it is in.
    client: ControlChannel,
    _server: ControlChannel,
    topology: Topology,
}

impl Plan {
    /// What was asked for.
    ///
    /// # Errors
    ///
    /// If there is no agent.
    pub fn new(args: &Tail) -> anyhow::Result<Self> {
        let quick = args.common.quick;
        let list =
            |quick_list: &[u64], list: &[u64]| if quick { quick_list } else { list }.to_vec();
        Ok(Self {
            rtts_ms: list(&[20, 80, 160], &[10, 20, 40, 80, 160, 320, 640]),
            lost: if quick {
                vec![1, 3, 5]
            } else {
                vec![1, 2, 3, 4, 5]
            },
            runs: args.runs.unwrap_or(if quick { 3 } else { 5 }),
            calm_rtts_ms: list(&[20], &[10, 40, 160, 320]),
            calm_for: Duration::from_secs(if quick { 4 } else { 10 }),
            seed: args.common.seed,
            agent: agent::find(args.common.agent.as_deref())?,
        })
    }

    fn with_losses(
        &self,
        relay: &Relay,
        client: &mut ControlChannel,
        run: &Run,
    ) -> anyhow::Result<Vec<Record>> {
        relay.set(LinkConfig {
            delay: Duration::from_millis(run.rtt_ms) / 2,
            ..LinkConfig::default()
        });
        let flows: Vec<(u32, u32)> = (0..self.runs)
            .flat_map(|number| self.lost.iter().map(move |lost| (*lost, number)))
            .collect();
        let mut records = Vec::new();
        for batch in flows.chunks(at_once(run.rtt_ms)) {
            interrupt::check()?;
            let lost: Vec<u32> = batch.iter().map(|(lost, _)| *lost).collect();
            let took_ms = batch_of(relay, client, &lost)?;
            for (&(lost, number), ms) in batch.iter().zip(took_ms) {
                let round_trips = ms / Duration::from_millis(run.rtt_ms).as_secs_f64() / 1e3;
                let record = record(run, number).with("time", ms);
                let mut record = record.with("round trips", round_trips);
                record.factors.insert("lost".to_owned(), lost.to_string());
                records.push(record);
            }
        }
        Ok(records)
    }

    /// Flows over a link with jitter that loses nothing.
    #[expect(clippy::cast_precision_loss, reason = "some hundred thousand packets")]
    fn lossless(
        &self,
        relay: &Relay,
        client: &mut ControlChannel,
        run: &Run,
    ) -> anyhow::Result<Vec<Record>> {
        let rtt = Duration::from_millis(run.rtt_ms);
        // A quarter of the round-trip time is jitter.
        relay.set(LinkConfig {
            delay: rtt / 2,
            jitter: rtt / 8,
            ..LinkConfig::default()
        });
        let each = rtt + rtt / 4 + PAUSE;
        let packets = f64::from(LENGTHS.0 + LENGTHS.1) / 2.0 * 1.5;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "some dozen"
        )]
        let connections = ((RATE * each.as_secs_f64() / packets) as u32).clamp(1, CONNECTIONS);
        let flows = u32::try_from(self.calm_for.as_micros() / each.as_micros().max(1))?;
        client.request::<Vec<u16>>(&Command::Connect(connections as usize))?;
        let _connecting = relay.take_log();
        client.request::<Vec<Duration>>(&Command::Run(Work {
            warm: WARM,
            bytes: (LENGTHS.0 * MSS, LENGTHS.1 * MSS, MSS),
            flows,
            pause: PAUSE,
            stagger: each / connections,
        }))?;
        // The log begins after the handshakes; what was retransmitted is known all the same.
        let counts = RetransmitCounts::of(&relay.take_log(), &PacketFilter::SERVER_DATA);
        ensure!(counts.dropped == 0, "the link lost something");
        Ok(vec![
            record(run, 0)
                .with("spurious", counts.spurious as f64)
                .with("sent", counts.sent as f64),
        ])
    }
}

fn record(run: &Run, number: u32) -> Record {
    let rtt = run.rtt_ms.to_string();
    let levels = [
        ("timers", TIMERS[run.timers].0),
        ("probes", PROBES[usize::from(run.tlp)]),
        ("round trip", &rtt),
    ];
    Record::new(levels, number)
}

impl Experiment for Plan {
    type Run = Run;
    type Shared = Agent;
    type Testbed = Testbed;
    type Seat<'a> = (&'a dyn Link, &'a mut ControlChannel);

    fn design(&self) -> Design {
        let policies = TIMERS
            .iter()
            .filter_map(|(name, policy)| Some((name, policy.as_ref()?)));
        let policies = policies.map(|(name, policy)| format!("{name}: {}", one_line(policy)));
        let table = |name: &str, title: &str, rows: &[&str], column| TableSpec {
            name: name.to_owned(),
            title: title.to_owned(),
            rows: texts(rows),
            across: texts(&["timers", "probes"]),
            columns: vec![column],
            only: Only::new(),
        };
        let effect = |across: &str, base: &str, other: &str| EffectSpec {
            measure: "time".to_owned(),
            stat: Stat::P50,
            across: across.to_owned(),
            base: base.to_owned(),
            rows: texts(&["round trip", "lost", other]),
            paired: false,
            only: Only::new(),
        };
        let cells = ["round trip", "lost"];
        let again = Column::new("spurious", Stat::PercentOf("sent".to_owned()), "");
        Design {
            name: "tail".to_owned(),
            question: "What do tail loss probes, RTO restart by way of rto_min, and a lower rto_min gain a flow \
                       whose last segments are lost?"
                .to_owned(),
            method: [
                (
                    "flow",
                    format!(
                        "{SEGMENTS} full segments, sent at once, over a connection that has had {WARM} small \
                         transactions; the last 1 to 5 are dropped once"
                    ),
                ),
                ("time", "from the client's request to its last byte of the response".to_owned()),
                ("flows of a cell", self.runs.to_string()),
                ("policies", format!("{}; at the server, which sends", policies.collect::<Vec<_>>().join("; "))),
                ("no TLP", "net.ipv4.tcp_early_retrans = 0 at the server".to_owned()),
                (
                    "flows without loss",
                    format!(
                        "{} to {} segments in turn, {} ms of pause after each, a quarter of the round trip is jitter; {} s",
                        LENGTHS.0,
                        LENGTHS.1,
                        PAUSE.as_millis(),
                        self.calm_for.as_secs()
                    ),
                ),
                (
                    "published",
                    "restart about a round trip sooner with 1 to 3 lost, TLP ahead from 4 on; shares of spurious \
                     retransmissions are of other traffic"
                        .to_owned(),
                ),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec(),
            levels: BTreeMap::from([
                ("timers".to_owned(), TIMERS.iter().map(|(name, _)| (*name).to_owned()).collect()),
                ("probes".to_owned(), texts(&PROBES)),
            ]),
            units: [("time", "ms"), ("round trip", "ms")]
                .map(|(name, unit)| (name.to_owned(), unit.to_owned()))
                .into(),
            effects: vec![effect("timers", KERNEL, "probes"), effect("probes", PROBES[0], "timers")],
            tables: vec![
                table("times", "Flow completion time, ms, median", &cells, Column::new("time", Stat::P50, "")),
                table("round-trips", "The same in round trips", &cells, Column::new("round trips", Stat::P50, "")),
                table("spurious", "Segments retransmitted without loss, with jitter, %", &["round trip"], again.clone()),
                table("all-spurious", "The same over all round trips, and published, %", &[], again),
            ],
            charts: vec![ChartSpec {
                title: format!("flow completion time, so many of the last of {SEGMENTS} lost"),
                per: texts(&["lost"]),
                across: texts(&["timers", "probes"]),
                x: Some("round trip".to_owned()),
                measure: "time".to_owned(),
                stat: Some(Stat::P50),
                log: true,
                only: Only::new(),
            }],
            references: PUBLISHED
                .iter()
                .map(|(timers, probes, percent)| {
                    let levels = [("timers", *timers), ("probes", *probes), ("round trip", "published")];
                    Record::new(levels, 0).with("spurious percent of sent", *percent)
                })
                .collect(),
            ..Design::default()
        }
    }

    fn runs(&self) -> Vec<Run> {
        let lossy = self.rtts_ms.iter().map(|rtt_ms| (*rtt_ms, false));
        let all: Vec<_> = lossy
            .chain(self.calm_rtts_ms.iter().map(|rtt_ms| (*rtt_ms, true)))
            .collect();
        let variants = (0..TIMERS.len()).flat_map(|timers| [(timers, false), (timers, true)]);
        let runs = variants.flat_map(|(timers, tlp)| {
            all.iter().map(move |&(rtt_ms, lossless)| Run {
                timers,
                tlp,
                rtt_ms,
                lossless,
            })
        });
        runs.collect()
    }

    fn share(&self) -> anyhow::Result<Agent> {
        let mut agent = Agent::new(self.agent.clone())?;
        let kinds = TIMERS.iter().enumerate().flat_map(|(timers, (_, policy))| {
            [2 * timers, 2 * timers + 1].map(|kind| (kind, policy))
        });
        let policies = kinds.filter_map(|(kind, policy)| {
            Some(format!(
                "[policy.v{kind}]\ncidrs = [\"10.89.{kind}.0/24\"]\n{}",
                policy.as_ref()?
            ))
        });
        agent.configure(&policies.collect::<String>())?;
        agent.start()?;
        Ok(agent)
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![1; JOBS]
    }

    fn testbed(&self, agent: &Agent, kind: usize, _: u8) -> anyhow::Result<Testbed> {
        let number = u8::try_from(kind)?;
        let cgroup = TIMERS[kind / 2].1.map(|_| agent.cgroup.path());
        let topology = Topology::new(
            Default::default(),
            number,
            self.seed ^ u64::from(number),
            cgroup,
        )?;
        for netns in [&topology.net.client, &topology.net.server] {
            // A connection would begin with what those before, of other round trips, have left.
            sysctl(netns, "net.ipv4.tcp_no_metrics_save", "1")?;
        }
        let probes = if kind % 2 == 1 { "3" } else { "0" };
        sysctl(&topology.net.server, "net.ipv4.tcp_early_retrans", probes)?;
        let to = topology.server_address();
        let server = topology.serve(&Role::FlowServer { on: to })?;
        // The sender's timers are what is measured: its peer keeps its own delayed ACKs.
        let mut client = topology.uncovered_client(&Role::FlowClient { to })?;
        client.recv::<()>()?;
        Ok(Testbed {
            client,
            _server: server,
            topology,
        })
    }

    fn seats<'a>(&self, testbed: &'a mut Testbed) -> Vec<Self::Seat<'a>> {
        vec![(&*testbed.topology.link, &mut testbed.client)]
    }

    fn kind(&self, run: &Run) -> usize {
        2 * run.timers + usize::from(run.tlp)
    }

    fn measure(
        &self,
        (link, client): &mut Self::Seat<'_>,
        run: &Run,
    ) -> anyhow::Result<Vec<Record>> {
        let relay = link.relay().context("not the emulated link")?;
        if run.lossless {
            self.lossless(relay, client, run)
        } else {
            self.with_losses(relay, client, run)
        }
    }

    fn expected(&self, run: &Run) -> Duration {
        let rtt = Duration::from_millis(run.rtt_ms);
        if run.lossless {
            return rtt * (WARM + 2) + self.calm_for;
        }
        let flows = self.lost.len() * self.runs as usize;
        let batches = u32::try_from(flows.div_ceil(at_once(run.rtt_ms))).unwrap_or(u32::MAX);
        (rtt * (WARM + 7) + Duration::from_millis(300)) * batches
    }
}

/// Flows at once: more where they wait longer.
fn at_once(rtt_ms: u64) -> usize {
    usize::try_from(rtt_ms / 4).map_or(25, |flows| flows.clamp(2, 25))
}

/// A flow over a connection of its own for each of these, which loses so many of its last segments, once;
/// milliseconds each.
fn batch_of(relay: &Relay, client: &mut ControlChannel, lost: &[u32]) -> anyhow::Result<Vec<f64>> {
    let ports: Vec<u16> = client.request(&Command::Connect(lost.len()))?;
    let mut rules: Vec<(RuleId, u32)> = Vec::new();
    for (port, &lost) in ports.into_iter().zip(lost) {
        // A byte for each transaction before.
        let first = u64::from(WARM) + u64::from((SEGMENTS - lost) * MSS);
        let matching = PacketFilter::SERVER_DATA.of_client(port).from_byte(first);
        rules.push((
            relay.add(Rule::new(matching.first_time(), DropPattern::All)),
            lost,
        ));
    }
    let length = SEGMENTS * MSS;
    let took: Vec<Duration> = client.request(&Command::Run(Work {
        warm: WARM,
        bytes: (length, length, 1),
        flows: 1,
        pause: Duration::ZERO,
        stagger: STAGGER,
    }))?;
    let _recorded = relay.take_log();
    for (rule, lost) in rules {
        let dropped = relay.remove(rule)?;
        ensure!(
            dropped == u64::from(lost),
            "{dropped} segments were dropped where {lost} should have been: not one of {MSS} bytes each"
        );
    }
    Ok(took.iter().map(|took| took.as_secs_f64() * 1e3).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_its_testbed() {
        let plan = Plan {
            rtts_ms: vec![20, 80],
            lost: vec![1, 3],
            runs: 3,
            calm_rtts_ms: vec![20],
            calm_for: Duration::from_secs(1),
            seed: 1,
            agent: PathBuf::new(),
        };
        let runs = plan.runs();
        assert_eq!(runs.len(), JOBS * 3);
        let kinds: std::collections::BTreeSet<usize> =
            runs.iter().map(|run| plan.kind(run)).collect();
        assert_eq!(kinds.len(), plan.testbeds().len());
        let names = |kind: usize| {
            let run = runs.iter().find(|run| plan.kind(run) == kind).unwrap();
            let record = record(run, 0);
            [record.level("timers"), record.level("probes")].map(str::to_owned)
        };
        assert_eq!(names(0), ["kernel", "no TLP"]);
        assert_eq!(names(7), ["rto_min 20 ms", "TLP"]);
    }
}
