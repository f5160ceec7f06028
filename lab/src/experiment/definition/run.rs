//! How a definition is run: an agent for each policy, testbeds for each kind of ends, a client for each run.

use std::{net::SocketAddr, process::Command, thread, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::{
    agent::Agent,
    channel::ControlChannel,
    link::{Link, retransmits::RetransmitCounts, rule::PacketFilter},
    netns::{CLIENT_LINK, SERVER_LINK, sysctl},
    process::{run as run_command, stdout_of},
    warm::{self, Seen},
};
use serde::{Deserialize, Serialize};

use super::{
    Plan, named,
    settings::{Arm, Coverage, Dropped, Learnt, Settings, Time},
};
use crate::{
    engine::{Design, Experiment, Record, seed_of},
    interrupt,
    policy::Policy,
    topology::{ClientEnd, Topology},
};

/// The one policy of an agent.
const POLICY: &str = "lab";
/// Numbers of links among which are clients of both arms, but for one case in 500,000.
const ARMS: std::ops::RangeInclusive<u8> = 210..=230;
/// An outage begins so long after the client, and up to as much later.
const BEFORE: Duration = Duration::from_millis(100);
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
    client: &'a ClientEnd,
    tune: &'a mut Option<Command>,
}

impl Settings {
    /// Whether both can be measured in one testbed.
    pub(super) fn has_testbed_of(&self, other: &Self) -> bool {
        let key = |one: &Self| {
            let on = ([0, 0, 0, 0], 0).into();
            (
                one.at.unwrap_or_default(),
                one.arm,
                one.workload.unwrap_or_default().server(on),
            )
        };
        let policy = |one: &Self| (one.policy.clone(), one.learnt.clone(), one.sysctls.clone());
        key(self) == key(other) && policy(self) == policy(other)
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
        self.shown()
    }

    fn runs(&self) -> Vec<Run> {
        let cells = 0..self.cells.len();
        let runs = cells.flat_map(|cell| (0..self.runs).map(move |number| Run { cell, number }));
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
            let cell = self.cells.iter().find(|cell| cell.kind == kind);
            let at = || cell.map_or_else(String::new, |cell| named(&cell.levels));
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
        let on = topology.server_address();
        let server = topology.serve(&settings.workload.unwrap_or_default().server(on))?;
        Ok(Testbed {
            server,
            client: topology.client_end(settings.at != Some(Coverage::Server)),
            topology,
            tune: agent
                .filter(|one| one.learnt.is_some())
                .map(|one| one.agent.command(&["tune", POLICY, "--json"])),
        })
    }

    fn seats<'a>(&self, testbed: &'a mut Testbed) -> Vec<Seat<'a>> {
        vec![Seat {
            link: &*testbed.topology.link,
            to: testbed.topology.server_address(),
            server: &mut testbed.server,
            client: &testbed.client,
            tune: &mut testbed.tune,
        }]
    }

    fn kind(&self, run: &Run) -> usize {
        self.cells[run.cell].kind
    }

    fn measure(&self, seat: &mut Seat<'_>, run: &Run) -> anyhow::Result<Vec<Record>> {
        let cell = &self.cells[run.cell];
        let record = self.one(seat, &cell.settings, run);
        let record = record.with_context(|| named(&cell.levels))?;
        let levels = cell
            .levels
            .iter()
            .map(|(factor, level)| (&**factor, &**level));
        Ok(vec![Record {
            values: record.values,
            ..Record::new(levels, run.number)
        }])
    }

    fn expected(&self, run: &Run) -> Duration {
        let settings = &self.cells[run.cell].settings;
        let work = settings.work();
        let each = work.pause + 4 * settings.link().delay + Duration::from_millis(1);
        let outage = settings.outage.map_or(Duration::ZERO, |time| time.0);
        each * (work.skip + work.count) + outage
    }

    fn load(&self, run: &Run) -> f64 {
        let settings = &self.cells[run.cell].settings;
        settings.workload.unwrap_or_default().load(settings.work())
    }
}

impl Plan {
    fn one(&self, seat: &mut Seat<'_>, settings: &Settings, run: &Run) -> anyhow::Result<Record> {
        let (workload, work) = (settings.workload.unwrap_or_default(), settings.work());
        if let Some(relay) = seat.link.relay() {
            relay.set(settings.link());
            let _before = relay.take_log();
        }
        let rule = settings.drop.as_ref().map(Dropped::rule).transpose()?;
        let rule = rule.map(|rule| seat.link.drops(rule)).transpose()?;
        let mut client = seat.client.start(&workload.client(seat.to, work))?;
        workload.begin(&mut client, work)?;
        if let Some(Time(length)) = settings.outage {
            // Of the number alone: the same for all levels.
            let seed = seed_of(self.seed, &run.number);
            let later: f64 = ChaCha8Rng::seed_from_u64(seed).random();
            thread::sleep(BEFORE + BEFORE.mul_f64(later));
            let outage = seat.link.start_outage(PacketFilter::ALL, length)?;
            ensure!(
                seat.link.end_outage(outage)?.dropped > 0,
                "outage: nothing was lost: raise `count` or `pause`, so that the work takes longer than {BEFORE:?} and \
                 as much again"
            );
        }
        // Who only waits for an answer hears no signal.
        while !client.has_reply()? {
            interrupt::check()?;
            thread::sleep(TICK);
        }
        let mut record = Record::default();
        for (measure, values) in workload.end(&mut client, seat.server, work)? {
            if measure == "time" {
                let longest = values.iter().copied().fold(0.0, f64::max);
                record = record.with("longest", longest);
            }
            record = record.with_all(measure, values);
        }
        if let Some(rule) = rule {
            record = record.with("packets dropped", f(seat.link.remove(rule)?));
        }
        if let Some(relay) = seat.link.relay() {
            let counts = RetransmitCounts::of(&relay.take_log(), &PacketFilter::ALL);
            record = record
                .with("sent", f(counts.sent))
                .with("retransmitted", f(counts.needed + counts.spurious))
                .with("spurious", f(counts.spurious));
        }
        match seat.tune.as_mut().map(value_ms).transpose()? {
            Some(Some(ms)) => Ok(record.with("value that was learnt", ms)),
            _ => Ok(record),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "some thousand packets")]
fn f(count: u64) -> f64 {
    count as f64
}
