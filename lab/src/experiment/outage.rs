//! How long connect() takes when SYNs or SYN-ACKs are lost for a while: with the agent at the client, at the server, at
//! both, and without it.

use std::{
    net::{AddrParseError, IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    agent::{self, Agent},
    channel::ControlChannel,
    netns::{CLIENT_V4, Lost, Pair, SERVER_V4, lose_handshakes},
    workload::{
        Program, Role,
        attempts::{Attempts, Own},
        traffic::Listen,
    },
};
use serde::Deserialize;

use crate::{
    commands::outage::Outage,
    engine::{Design, Experiment, Record},
    interrupt,
    outage::{ARMS, LOSSES, Model, Version},
    policy::{Host, Policy},
    summary::millis,
    topology::{PORT, WORKLOAD, start},
};

/// The design of the report, and the outages.
const DEFINITION: &str = include_str!("../../experiments/outage.toml");
/// The one policy of the agent.
const POLICY: &str = "lab";
/// First port of the clients; each connection of an experiment has its own, below the range from which the kernel
/// chooses.
const FIRST_PORT: usize = 2_000;
const PORTS: usize = 30_000;
/// Interval at which a wait checks for signals.
const TICK: Duration = Duration::from_millis(10);

/// The file.
#[derive(Deserialize)]
struct Definition {
    initial_rto: String,
    runs: u16,
    quick_runs: u16,
    /// Ranges: from, to and step, milliseconds.
    outages: Vec<(u64, u64, usize)>,
    quick: Vec<(u64, u64, usize)>,
    #[serde(flatten)]
    design: Design,
}

/// The whole experiment.
#[derive(Debug)]
pub struct Plan {
    design: Design,
    config: String,
    outages: Vec<Duration>,
    runs: u16,
    agent: PathBuf,
    version: Version,
}

/// Two namespaces with a server that the agent covers, and one that it does not cover.
pub struct Testbed {
    // Dropped before the namespaces that they are in.
    _servers: [ControlChannel; 2],
    cgroup: PathBuf,
    model: Arc<Model>,
    net: Pair,
}

impl Plan {
    /// Number of testbeds: with more, simultaneous connections would delay each other.
    pub(crate) const TESTBEDS: usize = 2;

    /// Plans the experiment that the arguments describe.
    pub(crate) fn new(args: &Outage) -> anyhow::Result<Self> {
        let Definition {
            initial_rto,
            runs,
            quick_runs,
            outages,
            quick,
            mut design,
        } = toml::from_str(DEFINITION)?;
        let (runs, outages) = match args.common.quick {
            true => (quick_runs, quick),
            false => (runs, outages),
        };
        let each = |(from, to, step)| (from..=to).step_by(step).map(Duration::from_millis);
        let mut outages = match args.outage.is_empty() {
            true => outages.into_iter().flat_map(each).collect(),
            false => args.outage.clone(),
        };
        outages.sort_unstable();
        outages.dedup();
        let runs = args.runs.unwrap_or(runs);
        let initial_rto = args.initial_rto.map_or(initial_rto, |time| {
            humantime::format_duration(time).to_string()
        });
        let each = outages.len() * ARMS.len() * LOSSES.len();
        ensure!(
            each * usize::from(runs) <= PORTS,
            "--outage, --runs: {runs} x {each} connections; at most {PORTS} are possible"
        );
        let mut add = |name: &str, value: String| design.method.push((name.to_owned(), value));
        add("initial_rto", initial_rto.clone());
        add("runs of a cell", runs.to_string());
        Ok(Self {
            design,
            config: format!(
                "[policy.{POLICY}]\ncidrs = [\"10.88.0.0/16\"]\ninitial_rto = \"{initial_rto}\"\n"
            ),
            outages,
            runs,
            agent: agent::find(args.common.agent.as_deref())?,
            version: args.linux.map_or_else(Version::here, Ok)?,
        })
    }

    /// The losses that the connections of an arm meet.
    fn met(&self) -> impl Iterator<Item = (&'static str, Lost, Duration)> {
        let each = |(name, lost)| self.outages.iter().map(move |one| (name, lost, *one));
        LOSSES.into_iter().flat_map(each)
    }
}

impl Experiment for Plan {
    type Run = u16;
    type Shared = (Agent, Arc<Model>);
    type Testbed = Testbed;

    fn design(&self) -> Design {
        self.design.clone()
    }

    fn runs(&self) -> Vec<u16> {
        (0..self.runs).collect()
    }

    fn share(&self) -> anyhow::Result<Self::Shared> {
        let mut agent = Agent::new(self.agent.clone())?;
        agent.configure(&self.config)?;
        let policy = Policy::read(&self.agent, &agent.config(), POLICY).context("--initial-rto")?;
        let own = policy.handshake().context("a policy without timers")?;
        agent.start()?;
        // The namespaces' sysctls have the kernel's defaults.
        let kernel = Host::with_defaults(policy.host.hz).handshake();
        Ok((agent, Arc::new(Model::new(self.version, &kernel, &own))))
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![Self::TESTBEDS]
    }

    fn testbed(&self, (agent, model): &Self::Shared, _: usize, _: u8) -> anyhow::Result<Testbed> {
        let net = Pair::new()?;
        let cgroup = agent.cgroup.path();
        let serve = |is_covered| {
            let (on, options) = (server(is_covered)?, Listen::default());
            let cgroup = is_covered.then_some(cgroup);
            let mut server = start(&net.server, cgroup, &Role::Accept { on, options })?;
            server.recv::<()>()?;
            anyhow::Ok(server)
        };
        let servers = [serve(false)?, serve(true)?];
        // The very first packet would wait until the peer's link address is resolved.
        let ends = vec![vec![(None, server(false)?)]];
        let program = Program::own(WORKLOAD)?;
        let mut first = Attempts::load(&program, &net.client, None, ends, Own::new())?;
        first.start()?;
        first.outcomes()?;
        Ok(Testbed {
            _servers: servers,
            cgroup: cgroup.to_owned(),
            model: Arc::clone(model),
            net,
        })
    }

    fn measure(&self, testbed: &mut Testbed, run: &u16) -> anyhow::Result<Vec<Record>> {
        let Testbed {
            cgroup, model, net, ..
        } = testbed;
        let of_an_arm = self.met().count();
        let of_run = of_an_arm * ARMS.len();
        let ports = (FIRST_PORT + usize::from(*run) * of_run..).map(u16::try_from);
        let met = ARMS.iter().flat_map(|_| self.met());
        let each = ports
            .zip(met)
            .map(|(port, (_, lost, outage))| Ok((port?, lost, outage)));
        let each = each.collect::<anyhow::Result<Vec<_>>>()?;
        lose_handshakes(&net.client, &net.server, &each)?;
        let program = Program::own(WORKLOAD)?;
        let mut clients = Vec::new();
        for (each, (agent, client, to)) in each.chunks(of_an_arm).zip(ARMS) {
            let server = server(to)?;
            let ends = each
                .iter()
                .map(|(port, ..)| Ok((Some(address(CLIENT_V4, *port)?), server)));
            let ends = vec![ends.collect::<anyhow::Result<_>>()?];
            let cgroup = client.then_some(cgroup.as_path());
            let client = Attempts::load(&program, &net.client, cgroup, ends, Own::new())?;
            clients.push((agent, client));
        }
        // All programs are loaded first: loading one would delay the first timers of another.
        for (_, client) in &mut clients {
            client.start()?;
        }
        let (mut records, mut control) = (Vec::new(), Vec::new());
        for (agent, client) in clients {
            while !client.have_ended()? {
                interrupt::check()?;
                thread::sleep(TICK);
            }
            let outcomes = client.outcomes()?;
            for (number, (outcome, (lost, _, outage))) in
                outcomes.iter().zip(self.met()).enumerate()
            {
                let length = millis(outage).to_string();
                ensure!(
                    outcome.result == "connected",
                    "{lost} lost for {length} ms, agent at {agent}: {}",
                    outcome.result
                );
                let (outage, took) = (millis(outage), millis(outcome.took));
                let levels = [("lost", lost), ("agent", agent), ("outage", &length)];
                let distance = model.distance_ms((lost, agent), outage, took);
                let mut record = Record::new(levels, (*run).into())
                    .with("connect time", took)
                    .with("from the model", distance);
                if agent == ARMS[0].0 {
                    control.push(took);
                } else if let Some(control) = control.get(number) {
                    let difference = took - control;
                    let is_late = difference > (0.05 * outage).max(250.0);
                    record = record
                        .with("difference", difference)
                        .with("late", f64::from(u8::from(is_late)));
                }
                records.push(record);
            }
        }
        Ok(records)
    }

    fn expected(&self, _: &u16) -> Duration {
        self.outages.iter().max().copied().unwrap_or_default() * 3 / 2
    }
}

/// The address of the server that the agent covers, or of the other one.
fn server(is_covered: bool) -> Result<SocketAddr, AddrParseError> {
    address(SERVER_V4, PORT + u16::from(is_covered))
}

fn address(ip: &str, port: u16) -> Result<SocketAddr, AddrParseError> {
    Ok((ip.parse::<IpAddr>()?, port).into())
}
