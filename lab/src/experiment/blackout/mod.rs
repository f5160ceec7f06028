//! How long a request/response connection is idle when all its packets are lost for a while, by setting and by how the
//! setting is made; next to theory, the kernel's model and published tables.

mod design;

use std::{
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::{
    published::Table as Published,
    retransmit::{Ideal, LinuxTimers},
};
use rto_testbed::{
    agent::{self, Agent},
    channel::ControlChannel,
    link::{Link, rule::PacketFilter},
    machine::{Machine, jiffy},
    netns::sysctl,
    process::run,
    workload::{Role, idle::Command, rr::Options as Socket},
};
use serde::{Deserialize, Serialize};

use crate::{
    cli::{Common, LinkArg},
    commands::predict::duration,
    engine::{Design, Experiment, Record, seed_of},
    interrupt,
    summary::micros,
    topology::{LinkBackend, Topology},
};

/// Runs of one testbed at once.
const CLIENTS: usize = 4;
/// Transactions before the disruption: the estimator knows the path, and quick ACKs are over.
const BEFORE: u32 = 40;
/// The disruption begins at an unforeseeable moment of a transaction, within this time.
const PHASE: Duration = Duration::from_millis(2);
/// By how much the longest idle time may be shorter than the disruption: a response that was under way.
const UNDER_WAY: Duration = Duration::from_millis(1);
/// By how much more than a quarter a disruption may be longer than it should: a veth's ends when nft(8) has run.
const LINGERS: Duration = Duration::from_millis(20);
/// Attempts, if it was, if nothing was lost or the machine stood still before the disruption.
const ATTEMPTS: u32 = 10;
/// What connects and talks before and after a disruption.
const BESIDE: Duration = Duration::from_millis(30);
/// Smoothed RTT of the emulated link for the model, microseconds; it makes a difference of a jiffy at most.
const SRTT_US: u64 = 200;
/// The kernel's own rto_min, microseconds.
const KERNEL_US: u64 = 200_000;
/// The level of the kernel's own timers, set by nobody.
const KERNEL: &str = "kernel";

/// `rto-lab blackout`.
#[derive(Clone, Debug, Args)]
pub struct Blackout {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    link: LinkArg,
    /// By which mechanisms settings are made
    #[arg(long = "mechanism", alias = "ways", value_name = "MECHANISM")]
    #[arg(value_enum, value_delimiter = ',', default_values_t = [Mechanism::Agent, Mechanism::Route, Mechanism::Sysctl, Mechanism::Kernel])]
    mechanisms: Vec<Mechanism>,
    /// Lower bounds of the RTO [default: two jiffies, 50ms, 200ms]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    rto_min: Vec<Duration>,
    /// How long all is lost [default: those of the published tables, 10ms to 1.5s]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    disruption: Vec<Duration>,
    /// Runs of a cell, by the agent and of the kernel's own timers [default: 11; quick: 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: Option<u32>,
    /// Runs of a cell, by route and sysctl [default: 5; quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    control_runs: Option<u32>,
    /// Runs at once: all but one of them wait for their disruption to end
    #[arg(long, alias = "lanes", value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) jobs: u16,
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long, alias = "again")]
    pub(crate) fresh: bool,
}

/// How a setting is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mechanism {
    /// By the agent, at both ends
    Agent,
    /// By the metric of a route (rto_min) and by the application (thin), at both ends
    Route,
    /// By net.ipv4.tcp_rto_min_us and net.ipv4.tcp_thin_linear_timeouts, at both ends
    Sysctl,
    /// Not at all: the kernel's own timers, 200 ms and thick
    Kernel,
}

impl Mechanism {
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether this kernel has what it needs.
    fn is_possible(self) -> bool {
        self != Self::Sysctl || std::path::Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists()
    }
}

/// A setting of both ends, and how it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    by: Mechanism,
    thin: bool,
    rto_min_us: u64,
}

impl Setting {
    /// "thin 8 ms".
    fn name(self) -> String {
        if self.by == Mechanism::Kernel {
            return KERNEL.to_owned();
        }
        let kind = if self.thin { "thin" } else { "thick" };
        format!("{kind} {} ms", self.rto_min_us / 1000)
    }

    /// By the rule alone, milliseconds.
    fn theory_ms(self, disruption_us: u64) -> f64 {
        let ideal = if self.thin { Ideal::thin } else { Ideal::thick };
        ms(ideal(self.rto_min_us).idle_us(disruption_us))
    }

    /// As the kernel's timers make it, milliseconds; the median over when it begins.
    fn model_ms(self, hz: u64, disruption_us: u64) -> f64 {
        let near = LinuxTimers::near(hz, SRTT_US).with_rto_min(self.rto_min_us);
        let kernel = if self.thin { near.thin() } else { near };
        ms(kernel.median_idle_us(disruption_us))
    }
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    setting: Setting,
    disruption_us: u64,
    number: u32,
}

/// The whole experiment.
#[derive(Debug)]
pub struct Plan {
    settings: Vec<Setting>,
    disruptions_us: Vec<u64>,
    runs: u32,
    control_runs: u32,
    lacking: Vec<Mechanism>,
    backend: LinkBackend,
    seed: u64,
    hz: u64,
    agent: std::path::PathBuf,
    /// Only one connects and talks at a time; those that are idle disturb nobody.
    gate: Mutex<()>,
}

/// A server and clients on a link, with one setting.
pub struct Testbed {
    // Before the namespaces that they are in.
    clients: Vec<ControlChannel>,
    _server: ControlChannel,
    topology: Topology,
}

impl Plan {
    /// What was asked for.
    pub fn new(args: &Blackout) -> anyhow::Result<Self> {
        let quick = args.common.quick;
        let ms = Duration::from_millis;
        let two_jiffies = 2 * jiffy();
        let rto_mins = match (args.rto_min.is_empty(), quick) {
            (false, _) => args.rto_min.clone(),
            (true, false) => vec![two_jiffies, ms(50), ms(200)],
            (true, true) => vec![two_jiffies, ms(200)],
        };
        for rto_min in &rto_mins {
            ensure!(
                (two_jiffies..=ms(200)).contains(rto_min),
                "--rto-min {}: this kernel takes {} to 200ms",
                humantime::format_duration(*rto_min),
                humantime::format_duration(two_jiffies)
            );
        }
        let disruptions_us = match (args.disruption.is_empty(), quick) {
            (false, _) => args.disruption.iter().copied().map(micros).collect(),
            (true, false) => Published::theory().disruptions_us(),
            (true, true) => vec![10_000, 60_000, 200_000, 700_000],
        };
        ensure!(
            disruptions_us.iter().all(|us| *us >= 2_000),
            "--disruption: at least 2ms, which is longer than a transaction"
        );
        let (mechanisms, lacking): (Vec<_>, Vec<_>) =
            args.mechanisms.iter().partition(|by| by.is_possible());
        let settings = mechanisms.into_iter().flat_map(|&by| match by {
            Mechanism::Kernel => vec![Setting {
                by,
                thin: false,
                rto_min_us: KERNEL_US,
            }],
            _ => {
                let of = |rto_min: &Duration| {
                    [true, false].map(|thin| Setting {
                        by,
                        thin,
                        rto_min_us: micros(*rto_min),
                    })
                };
                rto_mins.iter().flat_map(of).collect()
            }
        });
        Ok(Self {
            settings: settings.collect(),
            disruptions_us,
            runs: args.runs.unwrap_or(if quick { 5 } else { 11 }),
            control_runs: args.control_runs.unwrap_or(if quick { 1 } else { 5 }),
            lacking: lacking.into_iter().copied().collect(),
            backend: args.link.link,
            seed: args.common.seed,
            hz: Machine::here()?.hz,
            agent: agent::find(args.common.agent.as_deref())?,
            gate: Mutex::new(()),
        })
    }
}

fn record(setting: &str, by: &str, lost_us: u64, run: u32) -> Record {
    Record::new(
        [
            ("setting", setting),
            ("by", by),
            ("lost", &ms(lost_us).to_string()),
        ],
        run,
    )
}

impl Experiment for Plan {
    type Run = Run;
    type Shared = Option<Agent>;
    type Testbed = Testbed;
    type Seat<'a> = (&'a dyn Link, &'a mut ControlChannel);

    fn design(&self) -> Design {
        self.shown()
    }

    fn runs(&self) -> Vec<Run> {
        let cells = self
            .settings
            .iter()
            .flat_map(|setting| self.disruptions_us.iter().map(move |us| (*setting, *us)));
        let runs = cells.flat_map(|(setting, disruption_us)| {
            let runs = match setting.by {
                Mechanism::Agent | Mechanism::Kernel => self.runs,
                Mechanism::Route | Mechanism::Sysctl => self.control_runs,
            };
            (0..runs).map(move |number| Run {
                setting,
                disruption_us,
                number,
            })
        });
        runs.collect()
    }

    fn share(&self) -> anyhow::Result<Option<Agent>> {
        let mut policies = String::new();
        for (number, setting) in self.settings.iter().enumerate() {
            if setting.by == Mechanism::Agent {
                policies.push_str(&format!(
                    "[policy.c{number}]\ncidrs = [\"10.89.{number}.0/24\"]\nrto_min = \"{}us\"\nthin_linear = {}\n",
                    setting.rto_min_us, setting.thin
                ));
            }
        }
        if policies.is_empty() {
            return Ok(None);
        }
        let mut agent = Agent::new(self.agent.clone())?;
        agent.configure(&policies)?;
        agent.start()?;
        Ok(Some(agent))
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![1; self.settings.len()]
    }

    fn seats<'a>(&self, testbed: &'a mut Testbed) -> Vec<Self::Seat<'a>> {
        let link = &*testbed.topology.link;
        let clients = testbed.clients.iter_mut();
        clients.map(|client| (link, client)).collect()
    }

    fn testbed(&self, agent: &Option<Agent>, kind: usize, _: u8) -> anyhow::Result<Testbed> {
        let setting = self.settings[kind];
        let number = u8::try_from(kind).context("more settings than addresses")?;
        let cgroup = agent.as_ref().filter(|_| setting.by == Mechanism::Agent);
        let cgroup = cgroup.map(|agent| agent.cgroup.path());
        let topology = Topology::new(self.backend, number, self.seed ^ u64::from(number), cgroup)?;
        prepare(setting, &topology)?;
        // What the agent or a route does not set, the application does.
        let options = Socket {
            thin_linear: (setting.by == Mechanism::Route).then_some(setting.thin),
        };
        let on = topology.server_address();
        let server = topology.serve(&Role::RrServer { on, options })?;
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut client = topology.client(&Role::IdleClient { to: on, options })?;
            client.recv::<()>()?;
            clients.push(client);
        }
        Ok(Testbed {
            clients,
            _server: server,
            topology,
        })
    }

    fn kind(&self, run: &Run) -> usize {
        self.settings
            .iter()
            .position(|setting| *setting == run.setting)
            .unwrap_or(0)
    }

    fn measure(
        &self,
        (link, client): &mut Self::Seat<'_>,
        run: &Run,
    ) -> anyhow::Result<Vec<Record>> {
        let disruption = Duration::from_micros(run.disruption_us);
        // Of the disruption and the number alone: the same for all settings.
        let seed = seed_of(self.seed, &(run.disruption_us, run.number));
        let phase = PHASE.mul_f64(ChaCha8Rng::seed_from_u64(seed).random());
        for _ in 0..ATTEMPTS {
            interrupt::check()?;
            let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            let port: u16 = client.request(&Command::Connect {
                transactions: BEFORE,
            })?;
            let at_least = disruption
                .saturating_sub(UNDER_WAY)
                .max(Duration::from_micros(1));
            client.send(&Command::Idle { at_least })?;
            thread::sleep(phase);
            let begun = Instant::now();
            let outage = link.start_outage(PacketFilter::ALL.of_client(port), disruption)?;
            drop(gate);
            let blackout = link.end_outage(outage)?;
            let idle: Duration = client.recv()?;
            // A machine that stood still before the disruption made the client believe that it was over.
            let over = begun.elapsed() >= disruption;
            let lasted = blackout.until - blackout.from;
            let as_asked = lasted <= disruption + disruption / 4 + LINGERS;
            if blackout.dropped > 0 && over && idle >= at_least && as_asked {
                let record = record(
                    &run.setting.name(),
                    &run.setting.by.name(),
                    run.disruption_us,
                    run.number,
                );
                return Ok(vec![
                    record
                        .with("idle", ms(micros(idle)))
                        .with("lasted", ms(micros(lasted))),
                ]);
            }
        }
        bail!("{run:?}: {ATTEMPTS} attempts failed: nothing was lost, or disruptions were too long")
    }

    fn expected(&self, run: &Run) -> Duration {
        BESIDE + Duration::from_secs_f64(run.setting.theory_ms(run.disruption_us) / 1e3)
    }
}

/// What is done without the agent.
fn prepare(setting: Setting, topology: &Topology) -> anyhow::Result<()> {
    let ends = [
        (&topology.net.client, topology.link.server(false)),
        (&topology.net.server, topology.link.client(false)),
    ];
    for (netns, peer) in ends {
        match setting.by {
            Mechanism::Agent | Mechanism::Kernel => {}
            Mechanism::Route => {
                let route = run(&format!("ip -n {netns} route get {peer}"))?;
                let mut device = route.split_whitespace().skip_while(|word| *word != "dev");
                let device = device.nth(1).context("no device to the peer")?;
                // It has a resolution of milliseconds in the tool.
                let rto_min_ms = setting.rto_min_us / 1000;
                run(&format!(
                    "ip -n {netns} route add {peer}/32 dev {device} rto_min {rto_min_ms}ms"
                ))?;
            }
            Mechanism::Sysctl => {
                sysctl(
                    netns,
                    "net.ipv4.tcp_rto_min_us",
                    &setting.rto_min_us.to_string(),
                )?;
                let thin = u8::from(setting.thin).to_string();
                sysctl(netns, "net.ipv4.tcp_thin_linear_timeouts", &thin)?;
            }
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "minutes at most")]
fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let setting = |by, thin, rto_min_us| Setting {
            by,
            thin,
            rto_min_us,
        };
        Plan {
            settings: vec![
                setting(Mechanism::Agent, true, 8_000),
                setting(Mechanism::Agent, false, 200_000),
                setting(Mechanism::Route, true, 8_000),
                setting(Mechanism::Kernel, false, KERNEL_US),
            ],
            disruptions_us: vec![10_000, 20_000],
            runs: 5,
            control_runs: 2,
            lacking: Vec::new(),
            backend: LinkBackend::Relay,
            seed: 1,
            hz: 250,
            agent: "".into(),
            gate: Mutex::new(()),
        }
    }

    #[test]
    fn every_run_has_its_testbed() {
        let plan = plan();
        let runs = plan.runs();
        assert_eq!(runs.len(), (3 * 5 + 2) * 2);
        for run in &runs {
            assert_eq!(plan.settings[plan.kind(run)], run.setting);
        }
    }

    #[test]
    fn settings_are_named_and_computed_once() {
        let plan = plan();
        assert_eq!(plan.names(), ["thin 8 ms", "thick 200 ms"]);
        let (low, kernel) = (plan.settings[0], plan.settings[3]);
        assert_eq!(
            (low.name(), kernel.name()),
            ("thin 8 ms".into(), KERNEL.into())
        );
        assert_eq!(low.theory_ms(20_000), 24.0);
        assert_eq!(low.model_ms(250, 10_000), 16.0);
        let by = |by: &str| {
            plan.references()
                .iter()
                .filter(|one| one.level("by") == by)
                .count()
        };
        assert_eq!((by("theory"), by("kernel model")), (4, 4));
        // 8 ms is next to what was published of 5 ms, and not the same.
        assert_eq!(
            (
                by("Linux 6.11 (5 ms)"),
                by("Linux 6.11"),
                by("Linux 6.5 (5 ms)")
            ),
            (2, 2, 0)
        );
    }
}
