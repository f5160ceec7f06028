//! The surroundings of the runs: a pair of namespaces for each setting and mechanism to make it.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_testbed::{
    agent::Agent,
    channel::ControlChannel,
    link::{Link, rule::PacketFilter},
    netns::sysctl,
    process::run,
    workload::{Role, idle::Command, rr::Options},
};

use super::{
    log::RunRecord,
    plan::{Mechanism, Run, Setting, us},
};
use crate::{
    interrupt,
    topology::{LinkBackend, Topology},
};

/// Clients of each testbed: so many runs of one setting at once.
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

/// Namespaces, links and servers, one for each setting, and the agent that makes some of them.
pub(super) struct TestbedPool {
    all: Vec<Testbed>,
    _agent: Option<Agent>,
}

/// One of them.
struct Testbed {
    key: (Mechanism, Setting),
    // Before the namespaces that they are in.
    clients: Vec<ControlChannel>,
    _server: ControlChannel,
    topology: Topology,
}

impl TestbedPool {
    /// Makes them.
    pub(super) fn new(
        testbeds: &[(Mechanism, Setting)],
        backend: LinkBackend,
        seed: u64,
        agent: Option<Agent>,
    ) -> anyhow::Result<Self> {
        let mut all = Vec::new();
        for (number, &(mechanism, setting)) in testbeds.iter().enumerate() {
            interrupt::check()?;
            let number = u8::try_from(number).context("more settings than addresses")?;
            let cgroup = agent.as_ref().filter(|_| mechanism == Mechanism::Agent);
            let cgroup = cgroup.map(|agent| agent.cgroup.path());
            let topology = Topology::new(backend, number, seed ^ u64::from(number), cgroup)?;
            prepare(mechanism, setting, &topology)?;
            // What the agent or a route does not set, the application does.
            let options = Options {
                thin_linear: (mechanism == Mechanism::Route).then_some(setting.thin),
            };
            let on = topology.server_address();
            let server = topology.serve(&Role::RrServer { on, options })?;
            let role = Role::IdleClient { to: on, options };
            let mut clients = Vec::new();
            for _ in 0..CLIENTS {
                let mut client = topology.client(&role)?;
                client.recv::<()>()?;
                clients.push(client);
            }
            all.push(Testbed {
                key: (mechanism, setting),
                clients,
                _server: server,
                topology,
            });
        }
        Ok(Self { all, _agent: agent })
    }

    /// The same, for threads.
    pub(super) fn open(&mut self) -> SharedPool<'_> {
        let testbeds = self.all.iter_mut().map(|testbed| {
            let clients_of = Clients {
                link: &*testbed.topology.link,
                clients: std::mem::take(&mut testbed.clients),
            };
            (testbed.key, clients_of)
        });
        SharedPool {
            testbeds: Mutex::new(testbeds.collect()),
            free: Condvar::new(),
            gate: Mutex::new(()),
        }
    }
}

/// The policies of an agent that makes these settings.
pub(super) fn policies(testbeds: &[(Mechanism, Setting)]) -> String {
    let mut text = String::new();
    for (number, (mechanism, setting)) in testbeds.iter().enumerate() {
        if *mechanism == Mechanism::Agent {
            text.push_str(&format!(
                "[policy.c{number}]\ncidrs = [\"10.89.{number}.0/24\"]\nrto_min = \"{}us\"\nthin_linear = {}\n",
                setting.rto_min_us, setting.thin
            ));
        }
    }
    text
}

/// Whether this kernel has the sysctl that a mechanism needs.
pub(super) fn can(mechanism: Mechanism) -> bool {
    mechanism != Mechanism::Sysctl
        || std::path::Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists()
}

/// What is done without the agent.
fn prepare(mechanism: Mechanism, setting: Setting, topology: &Topology) -> anyhow::Result<()> {
    let ends = [
        (&topology.net.client, topology.link.server(false)),
        (&topology.net.server, topology.link.client(false)),
    ];
    for (netns, peer) in ends {
        match mechanism {
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
                let rto_min_us = setting.rto_min_us.to_string();
                sysctl(netns, "net.ipv4.tcp_rto_min_us", &rto_min_us)?;
                let thin = u8::from(setting.thin).to_string();
                sysctl(netns, "net.ipv4.tcp_thin_linear_timeouts", &thin)?;
            }
        }
    }
    Ok(())
}

struct Clients<'a> {
    link: &'a dyn Link,
    clients: Vec<ControlChannel>,
}

/// TestbedPool that threads take clients from.
pub(super) struct SharedPool<'a> {
    testbeds: Mutex<BTreeMap<(Mechanism, Setting), Clients<'a>>>,
    free: Condvar,
    /// Only one connects and talks at a time; those that are idle disturb nobody.
    gate: Mutex<()>,
}

impl<'a> SharedPool<'a> {
    /// Takes one of the runs that can be begun, waiting for one if need be; `None` if there are none left.
    pub(super) fn take(
        &self,
        left: &Mutex<Vec<Run>>,
    ) -> Option<(Run, &'a dyn Link, ControlChannel)> {
        let mut testbeds = lock(&self.testbeds);
        loop {
            let mut left = lock(left);
            if left.is_empty() {
                return None;
            }
            let ready = left.iter().rposition(|run| {
                let key = (run.cell.mechanism, run.cell.setting);
                testbeds
                    .get(&key)
                    .is_some_and(|clients_of| !clients_of.clients.is_empty())
            });
            if let Some(index) = ready {
                let run = left.remove(index);
                let clients_of = testbeds.get_mut(&(run.cell.mechanism, run.cell.setting))?;
                return Some((run, clients_of.link, clients_of.clients.pop()?));
            }
            drop(left);
            testbeds = self
                .free
                .wait(testbeds)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has those that wait look again.
    pub(super) fn wake(&self) {
        // Not between a look of theirs and their wait.
        let _held = lock(&self.testbeds);
        self.free.notify_all();
    }

    /// Gives a client back.
    pub(super) fn give_back(&self, run: &Run, client: ControlChannel) {
        let key = (run.cell.mechanism, run.cell.setting);
        if let Some(clients_of) = lock(&self.testbeds).get_mut(&key) {
            clients_of.clients.push(client);
        }
        self.free.notify_all();
    }

    /// Measures one run; the phase is from 0 to 1.
    pub(super) fn measure(
        &self,
        run: Run,
        link: &dyn Link,
        client: &mut ControlChannel,
        phase: f64,
    ) -> anyhow::Result<RunRecord> {
        let disruption = Duration::from_micros(run.cell.disruption_us);
        for repeated in 0..ATTEMPTS {
            interrupt::check()?;
            let gate = lock(&self.gate);
            let port: u16 = client.request(&Command::Connect {
                transactions: BEFORE,
            })?;
            let at_least = disruption.saturating_sub(UNDER_WAY);
            let at_least = at_least.max(Duration::from_micros(1));
            client.send(&Command::Idle { at_least })?;
            thread::sleep(PHASE.mul_f64(phase));
            let begun = Instant::now();
            let outage = link.start_outage(PacketFilter::ALL.of_client(port), disruption)?;
            drop(gate);
            let blackout = link.end_outage(outage)?;
            let idle: Duration = client.recv()?;
            // A machine that stood still before the disruption made the client believe that it was over.
            let over = begun.elapsed() >= disruption;
            let as_asked = blackout.until - blackout.from <= disruption + disruption / 4 + LINGERS;
            if blackout.dropped > 0 && over && idle >= at_least && as_asked {
                return Ok(RunRecord {
                    run,
                    idle_us: us(idle),
                    blackout_us: us(blackout.until - blackout.from),
                    dropped: blackout.dropped,
                    repeated,
                });
            }
        }
        bail!(
            "{:?}: {ATTEMPTS} attempts failed: nothing was lost, or disruptions were too long",
            run.cell
        )
    }
}

/// What others hold is whole also after a panic of theirs.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
