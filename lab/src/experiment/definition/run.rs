//! How a definition is run: an agent for each policy, testbeds for each kind of ends, a client for each run.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    process::Command,
    sync::PoisonError,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::{
    agent::Agent,
    channel::ControlChannel,
    link::{Blackout, Link, retransmits::RetransmitCounts, rule::PacketFilter},
    netns::{CLIENT_LINK, SERVER_LINK, sysctl},
    process::{run as run_command, stdout_of},
    warm::{self, Seen},
};
use serde::{Deserialize, Serialize};

use super::{
    Cell, Plan, named,
    settings::{Arm, Coverage, Dropped, Learnt, Settings, Time},
};
use crate::{
    engine::{Design, Experiment, Record, seed_of},
    interrupt,
    policy::Policy,
    summary::{f, millis},
    topology::{ClientEnd, Topology},
};

/// The one policy of an agent.
const POLICY: &str = "lab";
/// Numbers of links among which are clients of both arms, but for one case in 500,000.
const ARMS: std::ops::RangeInclusive<u8> = 210..=230;
/// An outage begins at an unforeseeable moment of the transactions that are measured: within this time, and some times
/// that of one with its pause.
const PHASE: (Duration, u32) = (Duration::from_millis(2), 5);
/// By how much more than that the longest transaction may be shorter than the outage, as it begins in it.
const SHORTER: Duration = Duration::from_millis(2);
/// For so long after an outage, and for so many times as long as it was, a transaction that was hit is waited for.
const PATIENCE: (Duration, u32) = (Duration::from_secs(10), 10);
/// By how much more than a quarter an outage may be longer than it should: a veth's ends when nft(8) has run.
const LINGERS: Duration = Duration::from_millis(20);
/// Attempts, if it was, or if nothing was lost.
const ATTEMPTS: u32 = 10;
/// How often a wait looks for signals.
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
    agent: Agent,
}

/// A link and its server; a client comes with each run.
pub struct Testbed {
    // Before the namespaces that it is in.
    server: ControlChannel,
    certificate: Vec<u8>,
    topology: Topology,
    client: ClientEnd,
    /// Asks an agent that learns for its values.
    tune: Option<Command>,
}

/// What a run has of it.
pub struct Seat<'a> {
    link: &'a dyn Link,
    to: SocketAddr,
    server: &'a mut ControlChannel,
    certificate: &'a [u8],
    client: &'a ClientEnd,
    tune: &'a mut Option<Command>,
}

impl Settings {
    /// Whether both can be measured in one testbed.
    pub(super) fn has_testbed_of(&self, other: &Self) -> bool {
        let key = |one: &Self| {
            (
                one.at.unwrap_or_default(),
                one.arm,
                one.workload.unwrap_or_default().has_flows(),
            )
        };
        let made = |one: &Self| (one.sysctls.clone(), one.route_rto_min, one.thin);
        let policy = |one: &Self| (one.policy.clone(), one.learnt.clone());
        key(self) == key(other) && made(self) == made(other) && policy(self) == policy(other)
    }
}

impl Plan {
    /// An agent of its own, which may have learnt something.
    fn covering(&self, policy: &toml::Table, learnt: Option<&Learnt>) -> anyhow::Result<Covering> {
        let mut agent = Agent::new(self.agent.clone())?;
        let text = toml::to_string(policy)?;
        agent.configure(&format!(
            "[policy.{POLICY}]\ncidrs = [\"10.88.0.0/16\", \"10.89.0.0/16\"]\n{text}"
        ))?;
        Policy::read(&self.agent, &agent.config(), POLICY)
            .with_context(|| format!("policy, as the agent reads it: {}", text.trim_end()))?;
        let seen = |each_second| Seen {
            each_second,
            hz: self.hz,
        };
        let learnt_by_daemon = match learnt {
            None => None,
            Some(Learnt::InitialRto(times)) => Some(warm::Learnt::InitialRto(seen(times))),
            Some(Learnt::RtoMin(times)) => Some(warm::Learnt::RtoMin(seen(times))),
        };
        match learnt_by_daemon {
            None => agent.start()?,
            Some(learnt) => drop(learnt.start(&mut agent, POLICY)?),
        }
        Ok(Covering {
            policy: policy.clone(),
            learnt: learnt.cloned(),
            agent,
        })
    }
}

impl Covering {
    /// A number of a link whose client is in this arm.
    fn number_in(&self, arm: Arm) -> anyhow::Result<u8> {
        for number in ARMS {
            let lookup = self.agent.cli(&["lookup", &format!("10.89.{number}.1")])?;
            let is_control = lookup.contains("this peer is in its control arm");
            if is_control == (arm == Arm::Control) {
                return Ok(number);
            }
        }
        bail!("no address is in the arm {arm:?}: has the policy a `holdout`?")
    }

    fn is_of(&self, settings: &Settings) -> bool {
        settings.policy.as_ref() == Some(&self.policy) && settings.learnt == self.learnt
    }
}

/// The value in force, milliseconds.
fn value_ms(tune: &mut Command) -> anyhow::Result<Option<f64>> {
    let tuned: serde_json::Value = serde_json::from_str(&stdout_of("tune", tune.output()?)?)?;
    let us = tuned["policies"][POLICY]["timers"][0]["value_us"].as_f64();
    Ok(us.map(|us| us / 1000.0))
}

impl Experiment for Plan {
    type Run = Run;
    type Shared = Vec<Covering>;
    type Testbed = Testbed;
    type Seat<'a> = Seat<'a>;

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
            let covering = self.covering(policy, settings.learnt.as_ref());
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
        let address = match (&agent, settings.arm) {
            (Some(agent), Some(arm)) => agent.number_in(arm)?,
            _ => number,
        };
        let cgroup = agent.map(|one| one.agent.cgroup.path());
        let seed = self.seed ^ u64::from(number);
        let topology = Topology::new(self.backend, address, seed, cgroup)?;
        let netns = [
            (&topology.net.client, CLIENT_LINK),
            (&topology.net.server, SERVER_LINK),
        ];
        for (netns, device) in netns {
            for (name, value) in settings.sysctls.iter().flatten() {
                sysctl(netns, name, value.to_string().trim_matches('"'))?;
            }
            if topology.relay().is_none() {
                // A veth would carry a response as one packet, which the devices' drivers would segment.
                run_command(&format!("ip -n {netns} link set {device} gso_max_segs 1"))?;
            }
        }
        if let Some(Time(rto_min)) = settings.route_rto_min {
            topology.set_route_rto_min(rto_min)?;
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

    fn seat<'a>(&self, testbed: &'a mut Testbed) -> Seat<'a> {
        Seat {
            link: &*testbed.topology.link,
            to: testbed.topology.server_address(),
            server: &mut testbed.server,
            certificate: &testbed.certificate,
            client: &testbed.client,
            tune: &mut testbed.tune,
        }
    }

    fn kind(&self, run: &Run) -> usize {
        self.kind_of[run.cell]
    }

    fn measure(&self, seat: &mut Seat<'_>, run: &Run) -> anyhow::Result<Vec<Record>> {
        let cell = &self.cells[run.cell];
        let levels = cell
            .levels
            .iter()
            .map(|(factor, level)| (&**factor, &**level));
        let measured = first_of(ATTEMPTS, |attempt| self.attempt(seat, cell, run, attempt));
        let not_hit = || {
            format!(
                "outage: in {ATTEMPTS} attempts no transaction was hit, or it was too long: raise `count`, or lower `pause`"
            )
        };
        let values = measured.and_then(|values| values.with_context(not_hit));
        let values = values.with_context(|| named(&cell.levels))?;
        let record = Record::new(levels, run.number);
        Ok(vec![Record { values, ..record }])
    }

    fn expected(&self, run: &Run) -> Duration {
        let Cell { settings, runs, .. } = &self.cells[run.cell];
        let work = settings.work();
        let each = work.pause + 2 * settings.under_way() + Duration::from_millis(1);
        let outage = settings.outage(run.number, *runs).unwrap_or_default();
        each * (work.skip + work.count) + outage
    }

    fn load(&self, run: &Run) -> f64 {
        let settings = &self.cells[run.cell].settings;
        match settings.outage {
            // It waits, and the gate is between those that do not.
            Some(_) => 0.04,
            None => {
                let workload = settings.workload.unwrap_or_default();
                workload.load(settings.work(), settings.under_way())
            }
        }
    }
}

impl Plan {
    /// What was measured; `None` if there was an outage that did not come as it should.
    fn attempt(
        &self,
        seat: &mut Seat<'_>,
        Cell { settings, runs, .. }: &Cell,
        run: &Run,
        attempt: u32,
    ) -> anyhow::Result<Option<BTreeMap<String, Vec<f64>>>> {
        let (workload, work) = (settings.workload.unwrap_or_default(), settings.work());
        let outage = settings.outage(run.number, *runs);
        if let Some(relay) = seat.link.relay() {
            relay.set(settings.link());
            let _before = relay.take_log();
        }
        let gate = outage.map(|_| self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        let with = (work, settings.options());
        let mut client = workload.connect(seat.client, seat.to, seat.certificate, with)?;
        let rule = settings.drop.as_ref().map(Dropped::rule).transpose()?;
        let rule = rule.map(|rule| seat.link.drops(rule)).transpose()?;
        let cycle = work.pause + workload.interval() + settings.under_way();
        let at_least = outage.map(|length| length.saturating_sub(SHORTER + cycle));
        workload.begin(&mut client, work, at_least)?;
        let mut lasted = None;
        if let Some(length) = outage {
            // Of the numbers alone: the same for all levels.
            let seed = seed_of(self.seed, &(run.number, attempt));
            let later: f64 = ChaCha8Rng::seed_from_u64(seed).random();
            thread::sleep((PHASE.0 + PHASE.1 * cycle).mul_f64(later));
            let outage = seat.link.start_outage(PacketFilter::ALL, length)?;
            drop(gate);
            let blackout = seat.link.end_outage(outage)?;
            lasted = self::lasted(&blackout, length);
        }
        // Who only waits for an answer hears no signal.
        let begun = Instant::now();
        let patience = outage.map(|length| PATIENCE.0 + PATIENCE.1 * length);
        while !client.has_reply()? {
            interrupt::check()?;
            if patience.is_some_and(|most| begun.elapsed() > most) {
                // None was hit, so that it goes on for ever.
                rule.map(|rule| seat.link.remove(rule)).transpose()?;
                return Ok(None);
            }
            thread::sleep(TICK);
        }
        let mut measured: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut add = |measure: &str, values| measured.insert(measure.to_owned(), values);
        for (mut measure, mut values) in workload.end(&mut client, seat.server, work)? {
            if let ("time", Some(at_least)) = (measure, at_least) {
                // What an outage costs is the longest wait.
                let longest = values.iter().copied().fold(0.0, f64::max);
                if longest < millis(at_least) {
                    lasted = None;
                }
                values = vec![longest];
                measure = self.outages_are;
            }
            add(measure, values);
        }
        if let Some(rule) = rule {
            add("packets dropped", vec![f(seat.link.remove(rule)?)]);
        }
        if let Some(relay) = seat.link.relay() {
            let counts = RetransmitCounts::of(&relay.take_log(), &PacketFilter::ALL);
            add("sent", vec![f(counts.sent)]);
            add("retransmitted", vec![f(counts.needed + counts.spurious)]);
            add("spurious", vec![f(counts.spurious)]);
        }
        if let Some(Some(ms)) = seat.tune.as_mut().map(value_ms).transpose()? {
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

/// What the first of some attempts gives that gives anything; `None` if none does.
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

/// How long an outage lasted; `None` if it hit nothing, or lasted longer than it should.
pub(super) fn lasted(blackout: &Blackout, asked: Duration) -> Option<Duration> {
    let lasted = blackout.until - blackout.from;
    (blackout.dropped > 0 && lasted <= asked + asked / 4 + LINGERS).then_some(lasted)
}
