//! Performs the runs of a definition: an agent for each policy, testbeds for each kind of ends, a client for each run.

use std::{
    collections::BTreeMap,
    process::Command,
    sync::PoisonError,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::{
    agent::Agent,
    link::{Blackout, Link, nft, relay::Relay, retransmits::RetransmitCounts, rule::PacketFilter},
    netns::{CLIENT_LINK, SERVER_LINK, sysctl},
    process::{run as run_command, stdout_of},
    wait::{TIMEOUT, eventually},
    warm::Seen,
};
use serde::{Deserialize, Serialize};

use super::{
    Cell, Plan, named,
    settings::{Coverage, Dropped, Learnt, Settings, Time, Towards},
};
use crate::{
    engine::{Design, Experiment, Record, seed_of},
    interrupt,
    load::Load,
    policy::Policy,
    program::{self, Program},
    sampler::{MEASURES, readings},
    summary::{f, millis},
    topology::{ClientEnd, Topology},
    workload::Server,
};

/// The one policy of an agent.
const POLICY: &str = "lab";
/// An outage begins at a random moment of the measured transactions: within this time plus this multiple of a
/// transaction with its pause.
const PHASE: (Duration, u32) = (Duration::from_millis(2), 5);
/// An outage of a real program begins this long to twice as long after its first connection.
const PROGRAM_PHASE: Duration = Duration::from_millis(1000);
/// Tolerance by which the longest transaction may be shorter than the outage, in addition to a transaction with its
/// pause, in which the outage may begin.
const SHORTER: Duration = Duration::from_millis(2);
/// Maximum wait for a transaction that an outage hit: this time plus this multiple of the outage.
const PATIENCE: (Duration, u32) = (Duration::from_secs(10), 10);
/// Tolerance by which an outage may be too long, in addition to a quarter of its length: on a veth it ends when nft(8)
/// has run.
const LINGERS: Duration = Duration::from_millis(20);
/// Maximum number of attempts if an outage was too long, or hit no transaction.
const ATTEMPTS: u32 = 10;
/// Time that other traffic has to fill its bottleneck.
const SETTLES: Duration = Duration::from_millis(500);
/// Interval at which a wait checks for signals.
const TICK: Duration = Duration::from_millis(10);

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    cell: usize,
    number: u32,
}

/// The agent of a policy.
pub struct Covering {
    policy: toml::Table,
    learnt: Option<Learnt>,
    /// Programs have an agent each, so that the losses of one do not spend the budget of another.
    program: Option<Program>,
    agent: Agent,
}

/// A link and its server; each run starts a client.
pub struct Testbed {
    // Dropped before the namespaces that the server is in.
    server: Server,
    certificate: Vec<u8>,
    topology: Topology,
    client: ClientEnd,
    /// Queries the values of a learning agent.
    tune: Option<Command>,
}

impl Settings {
    /// Whether both can be measured in one testbed.
    pub(super) fn has_testbed_of(&self, other: &Self) -> bool {
        let key = |one: &Self| {
            (
                one.at.unwrap_or_default(),
                one.workload.unwrap_or_default().has_flows(),
                one.program(),
            )
        };
        let made = |one: &Self| {
            let route = (one.route_rto_min, one.quick_acks);
            (one.sysctls.clone(), route, one.thin)
        };
        let policy = |one: &Self| (one.policy.clone(), one.learnt.clone());
        key(self) == key(other) && made(self) == made(other) && policy(self) == policy(other)
    }
}

impl Plan {
    /// Starts an agent for this policy, which may already have learnt values.
    fn covering(&self, policy: &toml::Table, settings: &Settings) -> anyhow::Result<Covering> {
        let learnt = settings.learnt.as_ref();
        let mut agent = Agent::new(self.agent.clone())?;
        let text = toml::to_string(policy)?;
        agent.configure(&format!(
            "[policy.{POLICY}]\ncidrs = [\"10.88.0.0/16\", \"10.89.0.0/16\"]\n{text}"
        ))?;
        Policy::read(&self.agent, &agent.config(), POLICY).with_context(|| {
            format!("cannot start an agent with the policy: {}", text.trim_end())
        })?;
        let seen = |each_second| Seen {
            each_second,
            hz: self.hz,
        };
        match learnt {
            None => agent.start()?,
            Some(Learnt { initial_rto }) => {
                seen(initial_rto).start(&mut agent, POLICY)?;
            }
        }
        Ok(Covering {
            policy: policy.clone(),
            learnt: learnt.cloned(),
            program: settings.program(),
            agent,
        })
    }
}

impl Covering {
    fn is_of(&self, settings: &Settings) -> bool {
        settings.policy.as_ref() == Some(&self.policy)
            && settings.learnt == self.learnt
            && settings.program() == self.program
    }
}

/// The active value, milliseconds.
fn value_ms(tune: &mut Command) -> anyhow::Result<Option<f64>> {
    let tuned: serde_json::Value = serde_json::from_str(&stdout_of("tune", tune.output()?)?)?;
    let us = tuned["policies"][POLICY]["timers"][0]["value_us"].as_f64();
    Ok(us.map(|us| us / 1000.0))
}

impl Experiment for Plan {
    type Run = Run;
    type Shared = Vec<Covering>;
    type Testbed = Testbed;

    fn design(&self) -> Design {
        self.design.clone()
    }

    fn runs(&self) -> Vec<Run> {
        let cells = self.cells.iter().enumerate();
        let runs = cells.flat_map(|(cell, Cell { runs, .. })| {
            (0..*runs).map(move |number| Run { cell, number })
        });
        runs.collect()
    }

    fn share(&self) -> anyhow::Result<Vec<Covering>> {
        program::require(self.cells.iter().filter_map(|cell| cell.settings.workload))?;
        let mut all: Vec<Covering> = Vec::new();
        for (kind, (settings, _)) in self.kinds.iter().enumerate() {
            let Some(policy) = &settings.policy else {
                continue;
            };
            if all.iter().any(|one| one.is_of(settings)) {
                continue;
            }
            let cell = self
                .cells
                .iter()
                .zip(&self.kind_of)
                .find(|(_, of)| **of == kind);
            let at = || cell.map_or_else(String::new, |(cell, _)| named(&cell.levels));
            let covering = self.covering(policy, settings);
            all.push(covering.with_context(at)?);
        }
        Ok(all)
    }

    fn testbeds(&self) -> Vec<usize> {
        self.kinds.iter().map(|(_, links)| *links).collect()
    }

    fn testbed(&self, agents: &Vec<Covering>, kind: usize, number: u8) -> anyhow::Result<Testbed> {
        let settings = &self.kinds[kind].0;
        let agent = agents.iter().find(|one| one.is_of(settings));
        let cgroup = agent.map(|one| one.agent.cgroup.path());
        let seed = self.seed ^ u64::from(number);
        let topology = Topology::new(self.backend, number, seed, cgroup)?;
        let netns = [
            (&topology.net.client, CLIENT_LINK),
            (&topology.net.server, SERVER_LINK),
        ];
        for (netns, device) in netns {
            for (name, value) in settings.sysctls.iter().flatten() {
                sysctl(netns, name, value.to_string().trim_matches('"'))?;
            }
            if topology.relay().is_none() {
                // A veth would carry a response as a single packet, which real devices would segment.
                run_command(&format!("ip -n {netns} link set {device} gso_max_segs 1"))?;
            }
        }
        if let Some(Time(rto_min)) = settings.route_rto_min {
            topology.set_route_rto_min(rto_min)?;
        }
        if settings.quick_acks == Some(true) {
            topology.set_client_route("quickack 1")?;
        }
        let workload = settings.workload.unwrap_or_default();
        let (server, certificate) = workload.serve(&topology, settings.options())?;
        Ok(Testbed {
            server,
            certificate,
            client: topology.client_end(settings.at != Some(Coverage::Server)),
            topology,
            tune: agent
                .filter(|one| one.learnt.is_some())
                .map(|one| one.agent.command(&["tune", POLICY, "--json"])),
        })
    }

    fn kind(&self, run: &Run) -> usize {
        self.kind_of[run.cell]
    }

    fn measure(&self, testbed: &mut Testbed, run: &Run) -> anyhow::Result<Vec<Record>> {
        let cell = &self.cells[run.cell];
        let levels = cell
            .levels
            .iter()
            .map(|(factor, level)| (&**factor, &**level));
        let measured = first_of(ATTEMPTS, |attempt| {
            self.attempt(testbed, cell, run, attempt)
        });
        // A busy machine makes every outage too long; the other runs are not worth less because of that.
        let values = measured.with_context(|| named(&cell.levels))?;
        let record = Record::new(levels, run.number);
        Ok(Vec::from_iter(
            values.map(|values| Record { values, ..record }),
        ))
    }

    fn expected(&self, run: &Run) -> Duration {
        let Cell { settings, runs, .. } = &self.cells[run.cell];
        let work = settings.work();
        if settings.program().is_some() {
            return Duration::from_secs((work.count / program::RATE).into());
        }
        let each = work.pause + 2 * settings.under_way() + Duration::from_millis(1);
        let outage = settings.outage(run.number, *runs).unwrap_or_default();
        each * (work.skip + work.count) + outage
    }

    fn load(&self, run: &Run) -> f64 {
        let settings = &self.cells[run.cell].settings;
        match settings.outage.filter(|_| settings.program().is_none()) {
            // A run with an outage mostly waits, and the gate separates the active ones.
            Some(_) => 0.04,
            // Other traffic would disturb simultaneous runs.
            None if settings.background.is_some() => 1.0,
            None => {
                let workload = settings.workload.unwrap_or_default();
                workload.load(settings.work(), settings.under_way())
            }
        }
    }
}

impl Plan {
    /// The measurements; `None` if an outage was too long, or hit no transaction.
    fn attempt(
        &self,
        testbed: &mut Testbed,
        Cell { settings, runs, .. }: &Cell,
        run: &Run,
        attempt: u32,
    ) -> anyhow::Result<Option<BTreeMap<String, Vec<f64>>>> {
        let Testbed {
            server,
            certificate,
            topology,
            client: end,
            tune,
        } = testbed;
        let (link, to) = (&*topology.link, topology.server_address());
        let (workload, work) = (settings.workload.unwrap_or_default(), settings.work());
        let outage = settings.outage(run.number, *runs);
        if let Some(relay) = link.relay() {
            relay.set(settings.link());
            let _ = relay.take_log();
        }
        // A program makes all its requests in any case.
        let only_longest = outage.filter(|_| settings.program().is_none());
        let gate = only_longest.map(|_| self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        let with = (work, settings.options());
        let mut client = workload.connect(end, to, certificate, with)?;
        let other = settings.background(self.seed, run.number);
        let _background = match other {
            Some(load) => {
                let load = load.towards_client(topology)?;
                thread::sleep(SETTLES);
                Some(load)
            }
            None => None,
        };
        let rule = settings.drop.as_ref().map(Dropped::rule).transpose()?;
        let rule = rule.map(|rule| link.drops(rule)).transpose()?;
        let cycle = work.pause + workload.interval() + settings.under_way();
        let at_least = only_longest.map(|length| length.saturating_sub(SHORTER + cycle));
        let mut pinged = None;
        if let Some(relay) = link.relay().filter(|_| settings.sample.is_some()) {
            pinged = Some(end.ping(to.ip())?);
            relay.forget();
        }
        workload.begin(&mut client, work, at_least)?;
        let mut lasted = None;
        if let Some(length) = outage {
            // The seed depends only on the numbers, so that it is the same for all levels.
            let seed = seed_of(self.seed, &(run.number, attempt));
            let later: f64 = ChaCha8Rng::seed_from_u64(seed).random();
            if settings.program().is_some() {
                until_connected(link)?;
                thread::sleep(PROGRAM_PHASE.mul_f64(1.0 + later));
            } else {
                thread::sleep((PHASE.0 + PHASE.1 * cycle).mul_f64(later));
            }
            let own = settings.outage_at.map(|host| match host {
                Towards::Client => &*topology.net.client,
                Towards::Server => &*topology.net.server,
            });
            let outage = match own {
                Some(netns) => nft::start_own_outage(netns, length)?,
                None => link.start_outage(PacketFilter::ALL, length)?,
            };
            drop(gate);
            let blackout = match own {
                Some(netns) => nft::end_own_outage(netns, outage)?,
                None => link.end_outage(outage)?,
            };
            lasted = self::lasted(&blackout, length);
        }
        // A blocking wait for the reply would not notice a signal.
        let begun = Instant::now();
        let patience = only_longest.map(|length| PATIENCE.0 + PATIENCE.1 * length);
        while !client.has_reply()? {
            interrupt::check()?;
            if patience.is_some_and(|most| begun.elapsed() > most) {
                // No transaction was hit, so the client would continue forever.
                rule.map(|rule| link.remove(rule)).transpose()?;
                return Ok(None);
            }
            thread::sleep(TICK);
        }
        let mut measured: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut add = |measure: &str, values| measured.insert(measure.to_owned(), values);
        let log = link.relay().map_or_else(Vec::new, Relay::take_log);
        for (mut measure, mut values) in workload.end(&mut client, server, work, &log)? {
            if let ("time", Some(at_least)) = (measure, at_least) {
                // The longest transaction is the cost of the outage.
                let longest = values.iter().copied().fold(0.0, f64::max);
                if longest < millis(at_least) {
                    lasted = None;
                }
                values = vec![longest];
                measure = self.outages_are;
            }
            add(measure, values);
        }
        if let Some(times) = pinged {
            add("ping", times);
        }
        if let Some(rule) = rule {
            add("packets dropped", vec![f(link.remove(rule)?)]);
        }
        if link.relay().is_some() {
            if let Some(every) = settings.sample {
                let seed = seed_of(self.seed, &(run.cell, run.number));
                for (measure, read) in MEASURES.iter().zip(readings(&log, every, seed)) {
                    add(measure, read);
                }
            }
            let own: Vec<_> = log
                .into_iter()
                .filter(|one| !Load::is_background(one))
                .collect();
            let counts = RetransmitCounts::of(&own, &PacketFilter::ALL);
            add("sent", vec![f(counts.sent)]);
            add("retransmitted", vec![f(counts.needed + counts.spurious)]);
            add("spurious", vec![f(counts.spurious)]);
        }
        if let Some(Some(ms)) = tune.as_mut().map(value_ms).transpose()? {
            add("value that was learnt", vec![ms]);
        }
        match (outage, lasted) {
            (Some(_), None) => return Ok(None),
            (_, Some(lasted)) => drop(add("lasted", vec![millis(lasted)])),
            (None, None) => {}
        }
        Ok(Some(measured))
    }
}

/// Waits for the first SYN of a program, which may take long to start.
fn until_connected(link: &dyn Link) -> anyhow::Result<()> {
    let relay = link.relay().context("programs need --link relay")?;
    eventually("connection of the program", TIMEOUT, || {
        let is_there = relay
            .log()
            .iter()
            .any(|packet| packet.is(&PacketFilter::SYN));
        Ok(is_there.then_some(()))
    })
}

/// The result of the first attempt that has one; `None` if none has.
pub(super) fn first_of<T>(
    attempts: u32,
    mut attempt: impl FnMut(u32) -> anyhow::Result<Option<T>>,
) -> anyhow::Result<Option<T>> {
    for number in 0..attempts {
        interrupt::check()?;
        if let Some(given) = attempt(number)? {
            return Ok(Some(given));
        }
    }
    Ok(None)
}

/// The duration of an outage; `None` if it hit no packet, or was too long.
pub(super) fn lasted(blackout: &Blackout, asked: Duration) -> Option<Duration> {
    let lasted = blackout.until - blackout.from;
    (blackout.dropped > 0 && lasted <= asked + asked / 4 + LINGERS).then_some(lasted)
}
