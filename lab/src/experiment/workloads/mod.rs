//! Which workloads gain from which timer of a policy, and how much: each of them on its own and all together, where a
//! handshake loses a packet, where data is lost by chance, and where the link is out for a while.

mod design;

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::{
    agent::{self, Agent},
    channel::ControlChannel,
    link::{
        Link,
        packet::{Direction, Kind as PacketKind},
        relay::Relay,
        rule::{DropPattern, PacketFilter, Rule},
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    cli::Common,
    engine::{Design, Experiment, Record, seed_of},
    interrupt,
    protocol::{Command, Kind, Role},
    topology::Topology,
};

/// The level of the kernel's own timers.
const KERNEL: &str = "kernel";
/// The level of all timers together.
const ALL: &str = "all";
/// Timers of a policy for near peers: name and value.
const TIMERS: [(&str, &str); 4] = [
    ("initial_rto", "\"100ms\""),
    ("rto_min", "\"10ms\""),
    ("delack_max", "\"5ms\""),
    ("thin_linear", "true"),
];
/// Of the link in each direction: a round trip near 3 ms, as within a region.
const DELAY: Duration = Duration::from_micros(1500);
/// Of the data segments, in each direction.
const SHARE: f64 = 0.03;
/// How long the link is out, at least and at most; runs are spread evenly between them, as which retransmission comes
/// through depends on it.
const OUTAGES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// An outage begins at an unforeseeable moment, within this time.
const PHASE: Duration = Duration::from_millis(15);
/// By how much the longest request may be shorter than the outage: its part before.
const UNDER_WAY: Duration = Duration::from_millis(20);
/// By how much longer an outage may be than it should.
const LINGERS: Duration = Duration::from_millis(50);
/// Attempts, if it was, or if nothing was lost.
const ATTEMPTS: u32 = 5;
/// Testbeds of each setting: those with the kernel's timers wait longest.
const TESTBEDS: (usize, usize) = (4, 3);
/// Runs at once: most of them wait for a timer.
pub(crate) const JOBS: usize = 16;

/// `rto-lab workloads`.
#[derive(Clone, Debug, Args)]
pub struct Workloads {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Which workloads [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    workload: Vec<Kind>,
    /// Which timers, beside the kernel's own: initial_rto, rto_min, delack_max, thin_linear, all [default: each of them]
    #[arg(long, value_name = "TIMER", value_delimiter = ',', value_parser = timer)]
    timers: Vec<String>,
    /// What is lost [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    lost: Vec<Lost>,
    /// Runs of a cell [default: 17; quick: 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

fn timer(text: &str) -> Result<String, String> {
    let mut names = TIMERS.iter().map(|(name, _)| *name).chain([ALL]);
    if names.any(|name| name == text) {
        return Ok(text.to_owned());
    }
    let known: Vec<&str> = TIMERS.iter().map(|(name, _)| *name).collect();
    Err(format!("{text}: {} or {ALL}", known.join(", ")))
}

/// What is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Lost {
    /// Nothing
    Nothing,
    /// The first SYN of each connection
    Syn,
    /// The first SYN-ACK of each connection
    SynAck,
    /// 3 % of the data segments in each direction, by chance
    Data,
    /// Everything for 50 to 500 ms
    Outage,
}

impl Lost {
    const ALL: [Self; 5] = [
        Self::Nothing,
        Self::Syn,
        Self::SynAck,
        Self::Data,
        Self::Outage,
    ];

    /// For tables.
    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Syn => "first SYN",
            Self::SynAck => "first SYN-ACK",
            Self::Data => "3 % of data",
            Self::Outage => "50-500 ms of all",
        }
    }

    /// What is dropped by packets; an outage is one of time.
    fn rule(self) -> Option<Rule> {
        let first = |filter: PacketFilter| Rule::new(filter.first_time(), DropPattern::All);
        match self {
            Self::Nothing | Self::Outage => None,
            Self::Syn => Some(first(PacketFilter::SYN.towards(Direction::ToServer))),
            Self::SynAck => Some(first(PacketFilter::SYN_ACK.towards(Direction::ToClient))),
            Self::Data => Some(Rule::new(
                PacketFilter::kind(PacketKind::Data),
                DropPattern::Share(SHARE),
            )),
        }
    }

    /// Requests of a run.
    const fn requests(self) -> u32 {
        match self {
            Self::Nothing => 20,
            Self::Syn | Self::SynAck => 3,
            Self::Data => 60,
            Self::Outage => 1,
        }
    }

    /// Whether it can happen to a workload.
    const fn concerns(self, workload: Kind) -> bool {
        match self {
            Self::Syn | Self::SynAck => workload.connects(),
            Self::Nothing | Self::Data | Self::Outage => true,
        }
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    workload: Kind,
    timers: String,
    lost: Lost,
    number: u32,
}

/// The whole experiment.
#[derive(Debug)]
pub struct Plan {
    workloads: Vec<Kind>,
    /// [`KERNEL`] first.
    timers: Vec<String>,
    lost: Vec<Lost>,
    runs: u32,
    seed: u64,
    agent: PathBuf,
}

/// A link, a client and a server.
pub struct Testbed {
    // Before the namespaces that it is in.
    client: ControlChannel,
    _server: ControlChannel,
    topology: Topology,
}

/// Settings of a policy that has this timer, or all.
fn settings(timers: &str) -> String {
    let is_meant = |(name, _): &&(&str, &str)| timers == ALL || timers == *name;
    let lines = TIMERS.iter().filter(is_meant);
    lines
        .map(|(name, value)| format!("{name} = {value}\n"))
        .collect()
}

impl Plan {
    /// What was asked for.
    ///
    /// # Errors
    ///
    /// If there is no agent.
    pub fn new(args: &Workloads) -> anyhow::Result<Self> {
        fn or_all<T: Clone>(given: &[T], all: impl IntoIterator<Item = T>) -> Vec<T> {
            match given {
                [] => all.into_iter().collect(),
                some => some.to_vec(),
            }
        }
        let all = TIMERS.iter().map(|(name, _)| *name).chain([ALL]);
        let timers = or_all(&args.timers, all.map(str::to_owned));
        Ok(Self {
            workloads: or_all(&args.workload, Kind::value_variants().iter().copied()),
            timers: [vec![KERNEL.to_owned()], timers].concat(),
            lost: or_all(&args.lost, Lost::ALL),
            runs: args.runs.unwrap_or(if args.common.quick { 5 } else { 17 }),
            seed: args.common.seed,
            agent: agent::find(args.common.agent.as_deref())?,
        })
    }

    /// How long the link is out in a run.
    fn length(&self, number: u32) -> Duration {
        let (least, most) = OUTAGES;
        least + (most - least).mul_f64((f64::from(number) + 0.5) / f64::from(self.runs))
    }

    /// The longest request of those around an outage, microseconds.
    fn outage(&self, relay: &Relay, client: &mut ControlChannel, run: &Run) -> anyhow::Result<u64> {
        // Of workload and number alone: the same for all timers.
        let seed = seed_of(self.seed, &(run.workload, run.number));
        let length = self.length(run.number);
        let phase = PHASE.mul_f64(ChaCha8Rng::seed_from_u64(seed).random());
        for _ in 0..ATTEMPTS {
            interrupt::check()?;
            client.request::<()>(&Command::Open(run.workload))?;
            client.send(&Command::Longest {
                at_least: length - UNDER_WAY,
            })?;
            thread::sleep(phase);
            let begun = Instant::now();
            let outage = relay.start_outage(PacketFilter::ALL, length)?;
            let blackout = relay.end_outage(outage)?;
            let longest: Option<u64> = client.recv()?;
            // A machine that stood still made the client believe that it was over.
            let over = begun.elapsed() >= length;
            let as_asked = blackout.until - blackout.from <= length + LINGERS;
            if let Some(us) = longest.filter(|_| blackout.dropped > 0 && over && as_asked) {
                return Ok(us);
            }
        }
        bail!("{run:?}: {ATTEMPTS} attempts failed: nothing was lost, or outages were too long")
    }
}

impl Experiment for Plan {
    type Run = Run;
    /// In the order of the timers.
    type Shared = Vec<Option<Agent>>;
    type Testbed = Testbed;
    type Seat<'a> = (&'a dyn Link, &'a mut ControlChannel);

    fn design(&self) -> Design {
        self.shown()
    }

    fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        for &workload in &self.workloads {
            for &lost in self.lost.iter().filter(|lost| lost.concerns(workload)) {
                for timers in &self.timers {
                    runs.extend((0..self.runs).map(|number| Run {
                        workload,
                        timers: timers.clone(),
                        lost,
                        number,
                    }));
                }
            }
        }
        runs
    }

    fn share(&self) -> anyhow::Result<Self::Shared> {
        let agents = self.timers.iter().map(|timers| {
            if timers == KERNEL {
                return Ok(None);
            }
            let mut agent = Agent::new(self.agent.clone())?;
            agent.configure(&format!(
                "[policy.near]\ncidrs = [\"10.89.0.0/16\"]\n{}",
                settings(timers)
            ))?;
            agent.start()?;
            Ok(Some(agent))
        });
        agents.collect()
    }

    fn testbeds(&self) -> Vec<usize> {
        let (of_kernel, of_others) = TESTBEDS;
        let count = |timers: &String| {
            if timers == KERNEL {
                of_kernel
            } else {
                of_others
            }
        };
        self.timers.iter().map(count).collect()
    }

    fn testbed(&self, shared: &Self::Shared, kind: usize, number: u8) -> anyhow::Result<Testbed> {
        let cgroup = shared[kind].as_ref().map(|agent| agent.cgroup.path());
        let seed = self.seed ^ u64::from(number);
        let topology = Topology::new(Default::default(), number, seed, cgroup)?;
        let relay = topology.relay().context("not the emulated link")?;
        relay.set_delay(DELAY);
        let on = topology.link.server(false);
        let (server, certificate) = topology.server(&Role::WorkloadServer { on })?;
        let to = Role::WorkloadClient {
            to: on,
            certificate,
        };
        let mut client = topology.client(&to)?;
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
        let place = self.timers.iter().position(|timers| *timers == run.timers);
        place.unwrap_or(0)
    }

    fn measure(
        &self,
        (link, client): &mut Self::Seat<'_>,
        run: &Run,
    ) -> anyhow::Result<Vec<Record>> {
        let relay = link.relay().context("not the emulated link")?;
        let us = if run.lost == Lost::Outage {
            vec![self.outage(relay, client, run)?]
        } else {
            client.request::<()>(&Command::Open(run.workload))?;
            let rule = run.lost.rule().map(|rule| relay.add(rule));
            let us = client.request::<Vec<u64>>(&Command::Requests(run.lost.requests()))?;
            if let Some(rule) = rule {
                let dropped = relay.remove(rule)?;
                let least = match run.lost {
                    Lost::Syn | Lost::SynAck => u64::from(run.lost.requests()),
                    // By chance it may be none.
                    _ => 0,
                };
                ensure!(dropped >= least, "{run:?}: {dropped} packets were dropped");
            }
            us
        };
        // Nobody reads it, and there are millions of packets.
        let _log = relay.take_log();
        let levels = [
            ("workload", run.workload.name()),
            ("timers", &run.timers),
            ("lost", run.lost.name()),
        ];
        let ms = us
            .into_iter()
            .map(|us| Duration::from_micros(us).as_secs_f64() * 1e3);
        Ok(vec![Record::new(levels, run.number).with_all("time", ms)])
    }

    fn expected(&self, run: &Run) -> Duration {
        // As it was measured: a request with nothing lost takes 3 to 10 ms.
        let request = match (run.lost, run.timers.as_str()) {
            (Lost::Nothing, _) => 6,
            (Lost::Syn | Lost::SynAck, "initial_rto" | ALL) => 250,
            (Lost::Syn | Lost::SynAck, _) => 1020,
            (Lost::Data, "rto_min" | ALL) => 8,
            (Lost::Data, _) => 18,
            (Lost::Outage, _) => 600,
        };
        Duration::from_millis(200 + request * u64::from(run.lost.requests()))
    }

    /// Those that hardly wait take part of a processor.
    fn load(&self, run: &Run) -> f64 {
        match run.lost {
            Lost::Nothing | Lost::Data => 0.12,
            Lost::Syn | Lost::SynAck | Lost::Outage => 0.04,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn plan() -> Plan {
        let names = [KERNEL, "initial_rto", "rto_min", ALL];
        Plan {
            workloads: vec![Kind::Http2, Kind::Tls],
            timers: names.map(str::to_owned).to_vec(),
            lost: Lost::ALL.to_vec(),
            runs: 3,
            seed: 1,
            agent: PathBuf::new(),
        }
    }

    #[test]
    fn every_run_has_its_testbed() {
        let plan = plan();
        let runs = plan.runs();
        // A connection that is there loses no SYN.
        assert_eq!(runs.len(), (3 + 5) * 4 * 3);
        let kinds: BTreeSet<usize> = runs.iter().map(|run| plan.kind(run)).collect();
        assert_eq!(kinds.len(), plan.testbeds().len());
        for run in &runs {
            assert_eq!(plan.timers[plan.kind(run)], run.timers);
        }
    }

    #[test]
    fn outages_are_spread_evenly() {
        let ms = |number| plan().length(number).as_millis();
        assert_eq!([0, 1, 2].map(ms), [125, 275, 425]);
    }

    #[test]
    fn a_policy_has_one_timer_or_all() {
        assert_eq!(settings("rto_min"), "rto_min = \"10ms\"\n");
        assert_eq!(settings(ALL).lines().count(), TIMERS.len());
        assert_eq!(settings(KERNEL), "");
        let parsed = |line: &str| {
            let words = ["rto-lab", "workloads"].into_iter().chain(line.split(' '));
            Cli::try_parse_from(words).map(|cli| match cli.verb {
                Verb::Workloads(args) => args,
                _ => unreachable!(),
            })
        };
        let some = parsed("--timers rto_min,all --workload http2,tls --lost syn,outage").unwrap();
        assert_eq!(
            (some.timers.len(), some.workload.len(), some.lost.len()),
            (2, 2, 2)
        );
        let refused = parsed("--timers rto_max").unwrap_err().to_string();
        assert!(refused.contains("delack_max"), "{refused}");
    }

    #[test]
    fn the_page_has_what_was_measured() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/research/workloads.md");
        let page = fs::read_to_string(page).unwrap();
        let (_, rest) = page
            .split_once("<!-- workloads: differences -->\n")
            .unwrap();
        let (part, _) = rest.split_once("<!-- end: differences -->").unwrap();
        for workload in Kind::value_variants() {
            let lines = part.lines().filter(|line| line.contains(workload.name()));
            assert!(lines.count() >= 3, "{workload:?} was never measured");
        }
    }
}
