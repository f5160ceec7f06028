//! A file from nginx and from Apache beside background load on a bottleneck, by rto_min; and, over the recorded queue,
//! from a simulated sender by the weights and the sampling of its estimator.
//!
//! The servers and the background load are at the client's end of the link, from where the bottleneck leads to the
//! server's end.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    panic,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_model::estimator::{Linux, Sample};
use rto_testbed::{
    channel::ControlChannel,
    link::{packet::Direction, relay::Relayed, retransmits::RetransmitCounts, rule::PacketFilter},
    machine::Machine,
    netns::{Pair, inside, sysctl},
    process::{KillOnDrop, require},
    wait::{TIMEOUT, eventually},
    workload::{Role, http},
};
use tempfile::TempDir;

use super::estimator::with_shares;
use crate::{
    commands::file::File,
    engine::{Design, Experiment, Record, seed_of},
    estimator::{Estimator, Rfc6298, Weights},
    interrupt,
    load::Load,
    program::nginx,
    published,
    sampler::round_trips,
    sender::{Control, Trace, Transfer, transfer},
    study::{MINIMUMS_US, Sampling, Study},
    summary::{f, millis, ms},
    topology::{ClientEnd, Topology},
};

/// The design of the report.
const DESIGN: &str = include_str!("../../experiments/file.toml");
/// The sysctl that sets rto_min.
const RTO_MIN: &str = "net.ipv4.tcp_rto_min_us";
/// Bytes of the file, and of data in a segment.
const BYTES: usize = 320_000;
const SEGMENT: usize = 1448;
/// The kernel's rto_min, milliseconds: the simulation uses the queue of its runs.
const KERNEL_MS: u64 = 200;
/// Simulated transfers of a run.
const TRANSFERS: u64 = 8;
/// Time that the background load has before the first transfer.
const SETTLES: Duration = Duration::from_millis(500);
/// Server, program and port.
type Server = (&'static str, &'static str, u16);
const SERVERS: [Server; 2] = [("nginx", "nginx", 8080), ("Apache", "apache2", 8081)];

/// Starts a server as a single process that serves a file of this directory.
fn start((_, program, port): Server, end: &ClientEnd, dir: &Path) -> anyhow::Result<KillOnDrop> {
    let at = dir.display().to_string();
    let server = format!("listen {port}; root {at}/www; index file;");
    let nginx = nginx(&at, &server);
    let mut apache = format!(
        "ServerName lab\nDefaultRuntimeDir {at}\nPidFile {at}/apache.pid\nListen {port}\nUser www-data\n\
         DocumentRoot {at}/www\nDirectoryIndex file\nErrorLog {at}/apache2.log\n"
    );
    for module in ["mpm_event", "authz_core", "dir"] {
        // Debian's directory.
        let path = format!("/usr/lib/apache2/modules/mod_{module}.so");
        apache.push_str(&format!("LoadModule {module}_module {path}\n"));
    }
    let (text, options) = match program {
        "nginx" => (nginx, format!("-e {at}/nginx.log -c")),
        _ => (apache, "-X -f".to_owned()),
    };
    fs::write(dir.join(program), text)?;
    let mut command = Command::new(program);
    command.args(options.split(' ')).arg(dir.join(program));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    inside(end.netns(), || {
        Ok(KillOnDrop(command.spawn().context(program)?))
    })
}

/// The whole experiment.
#[derive(Debug)]
pub struct Plan {
    design: Design,
    runs: Vec<(u16, u64, u32)>,
    length: Duration,
    seed: u64,
    hz: u32,
}

impl Plan {
    /// Plans what the arguments describe.
    pub fn new(args: &File) -> anyhow::Result<Self> {
        require(&["nginx", "apache2"]).context("apt install nginx-light apache2-bin")?;
        ensure!(
            Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists(),
            "{RTO_MIN}: this kernel does not have it (Linux 6.11 and later)"
        );
        let (rto_mins_ms, runs, length) = match args.common.quick {
            true => (&[8, KERNEL_MS, 1000][..], 2, 1500),
            false => (&[8, 50, 100, KERNEL_MS, 250, 500, 750, 1000][..], 5, 2500),
        };
        let runs = 0..args.runs.unwrap_or(runs);
        let cells = args
            .load
            .iter()
            .flat_map(|load| rto_mins_ms.iter().map(|ms| (*load, *ms)));
        let mut plan = Self {
            design: toml::from_str(DESIGN)?,
            runs: cells
                .flat_map(|(load, ms)| runs.clone().map(move |n| (load, ms, n)))
                .collect(),
            length: Duration::from_millis(length),
            seed: args.common.seed,
            hz: u32::try_from(Machine::here()?.hz)?,
        };
        let load = plan.load(100, 0);
        for (name, is) in [
            ("background", load.traffic()),
            ("bottleneck", load.bottleneck()),
        ] {
            plan.design.method.push((name.to_owned(), is));
        }
        plan.design.references = published::estimator();
        Ok(plan)
    }

    fn load(&self, percent: u16, number: u32) -> Load {
        let load = f64::from(percent) / 100.0;
        Load {
            rate: 100_000_000,
            delay: Duration::from_micros(500),
            queue: Duration::from_millis(100),
            load,
            tcp: 0.9 * load,
            length: 2 * self.length + TIMEOUT,
            seed: seed_of(self.seed, &(percent, number)),
        }
    }

    /// The shares and the simulated transfers of each estimator.
    fn simulated(&self, load: &Load, number: u32, log: &[Relayed]) -> Vec<Record> {
        let (trace, flows, name) = (Trace::of(log, &load.link()), flows(log), load.name());
        let mut records = Vec::new();
        for (sender, control) in [("Reno, SACK", Control::Reno), ("bare", Control::Bare)] {
            let levels = [("load", &*name), ("estimator", "Linux"), ("sender", sender)];
            let with = (Linux::new(self.hz), Sampling::All);
            let linux = Record::new(levels, number);
            records.push(with_transfers(linux, &trace, control, &with));
            for ((weights, pair), sampling) in Weights::ALL
                .into_iter()
                .flat_map(|one| Sampling::ALL.map(|by| (one, by)))
            {
                let (estimator, by) = (Rfc6298::new(pair), format!("{sampling:?}"));
                let both = format!("{weights}, {by}");
                let levels = [
                    ("load", &*name),
                    ("weights", weights),
                    ("sampling", &by),
                    ("estimator", &both),
                    ("sender", sender),
                ];
                let mut record = Record::new(levels, number);
                // The samples are those of the background, whatever the simulated sender.
                if control == Control::Reno {
                    let shares = Study::Published(sampling).run(&estimator, &flows, &MINIMUMS_US);
                    record = with_shares(record, &shares);
                }
                records.push(with_transfers(
                    record,
                    &trace,
                    control,
                    &(estimator, sampling),
                ));
            }
        }
        records
    }
}

/// The link, and the directory of the servers.
pub struct Testbed {
    // Dropped before the namespaces that it is in.
    _sink: ControlChannel,
    topology: Topology,
    dir: TempDir,
}

impl Experiment for Plan {
    /// Load in percent, rto_min in milliseconds, number.
    type Run = (u16, u64, u32);
    type Shared = ();
    type Testbed = Testbed;

    fn design(&self) -> Design {
        self.design.clone()
    }

    fn runs(&self) -> Vec<Self::Run> {
        self.runs.clone()
    }

    fn share(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![1]
    }

    fn testbed(&self, (): &(), _: usize, number: u8) -> anyhow::Result<Testbed> {
        let net = Pair::new()?;
        let relay = self.load(100, 0).relay(&net, number)?;
        let topology = Topology::over(net, Box::new(relay), None)?;
        let on = topology.server_address();
        let _sink = topology.serve(&Role::Sink { on })?;
        let dir = tempfile::tempdir()?;
        // Apache's process is another user's.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
        fs::create_dir(dir.path().join("www"))?;
        fs::write(dir.path().join("www/file"), vec![b'.'; BYTES])?;
        Ok(Testbed {
            _sink,
            topology,
            dir,
        })
    }

    fn measure(&self, testbed: &mut Testbed, run: &Self::Run) -> anyhow::Result<Vec<Record>> {
        let Testbed { topology, dir, .. } = testbed;
        let (servers_end, client) = (topology.client_end(true), topology.server_end());
        let (percent, rto_min, number) = *run;
        // A connection has the value that its listener began with.
        sysctl(servers_end.netns(), RTO_MIN, &(rto_min * 1000).to_string())?;
        // Neither server always comes first.
        let mut servers = SERVERS;
        servers.rotate_left(number as usize % 2);
        let start = |server| start(server, &servers_end, dir.path());
        let started = [start(servers[0])?, start(servers[1])?];
        let address = topology.link.client(false);
        let fetch = |port: u16| http::Client::connect((address, port).into())?.transact();
        inside(client.netns(), || {
            for (name, program, port) in servers {
                let log = dir.path().join(format!("{program}.log"));
                eventually(name, TIMEOUT, || Ok(fetch(port).ok()))
                    .with_context(|| fs::read_to_string(log).unwrap_or_default())?;
            }
            Ok(())
        })?;
        let load = self.load(percent, number);
        let relay = topology.relay().context("no relay")?;
        relay.forget();
        let senders = load.senders(&servers_end, topology.server_address())?;
        thread::sleep(SETTLES);
        let (name, rto_min_ms) = (load.name(), rto_min.to_string());
        let mut records = Vec::new();
        // Both at once only with the kernel's own value: it would double the time.
        let together: &[bool] = if rto_min == KERNEL_MS {
            &[false, true]
        } else {
            &[false]
        };
        let mut in_turn = Vec::new();
        for at_once in together {
            let times = inside(client.netns(), || {
                transfers(
                    servers.map(|(.., port)| port),
                    *at_once,
                    self.length,
                    &fetch,
                )
            })?;
            let log = relay.take_log();
            for ((server, _, port), times) in servers.into_iter().zip(times) {
                let filter = PacketFilter::ALL
                    .towards(Direction::ToServer)
                    .of_client(port);
                let counts = RetransmitCounts::of(&log, &filter);
                let levels = [
                    ("load", &*name),
                    ("rto_min", &rto_min_ms),
                    ("server", server),
                    ("servers", if *at_once { "at once" } else { "in turn" }),
                ];
                let record = Record::new(levels, number)
                    .with_all("goodput", times.iter().copied().map(goodput))
                    .with_all("delay", times)
                    .with("sent", f(counts.sent))
                    .with("dropped", f(counts.dropped))
                    .with("retransmitted", f(counts.needed + counts.spurious))
                    .with("spurious", f(counts.spurious));
                records.push(record);
            }
            if !at_once {
                in_turn = log;
            }
        }
        drop((senders, started));
        if rto_min == KERNEL_MS {
            records.extend(self.simulated(&load, number, &in_turn));
        }
        Ok(records)
    }

    fn expected(&self, _: &Self::Run) -> Duration {
        self.length + 2 * SETTLES
    }
}

/// Times of transfers from each of two servers, milliseconds: in turn, or from both at once.
fn transfers(
    ports: [u16; 2],
    at_once: bool,
    length: Duration,
    fetch: &(impl Fn(u16) -> anyhow::Result<()> + Sync),
) -> anyhow::Result<[Vec<f64>; 2]> {
    let begun = Instant::now();
    let one = |port: u16| {
        interrupt::check()?;
        let begun = Instant::now();
        match fetch(port) {
            Err(error) if !http::is_timeout(&error) => Err(error),
            _ => Ok(millis(begun.elapsed())),
        }
    };
    let mut times = [Vec::new(), Vec::new()];
    if at_once {
        thread::scope(|scope| {
            let each = ports.map(|port| {
                scope.spawn(move || {
                    let mut times = Vec::new();
                    while begun.elapsed() < length {
                        times.push(one(port)?);
                    }
                    anyhow::Ok(times)
                })
            });
            for (times, each) in times.iter_mut().zip(each) {
                *times = each
                    .join()
                    .unwrap_or_else(|panic| panic::resume_unwind(panic))?;
            }
            anyhow::Ok(())
        })?;
    }
    while !at_once && begun.elapsed() < length {
        for (port, times) in ports.into_iter().zip(&mut times) {
            times.push(one(port)?);
        }
    }
    Ok(times)
}

/// Mbit/s of a transfer that took this long, milliseconds.
fn goodput(ms: f64) -> f64 {
    f(BYTES as u64) * 8.0 / 1000.0 / ms
}

/// The round trips of segments that were sent once, by connection, in the order of their ACKs.
fn flows(log: &[Relayed]) -> Vec<Vec<Sample>> {
    let is_new = |number: usize| log[number].packet.is_some_and(|packet| !packet.repeated);
    let mut flows = BTreeMap::<_, Vec<Sample>>::new();
    for (number, sample) in round_trips(log, Direction::ToServer, is_new, |_| true) {
        let ports = log[number]
            .packet
            .map(|it| (it.client_port, it.server_port));
        flows.entry(ports).or_default().push(sample);
    }
    let mut flows: Vec<_> = flows.into_values().collect();
    flows
        .iter_mut()
        .for_each(|flow| flow.sort_by_key(|sample| sample.acked_us()));
    flows
}

/// Adds transfers that begin evenly over the trace: means, as the transfers of a run are alike.
fn with_transfers<E: Estimator>(
    record: Record,
    trace: &Trace,
    control: Control,
    with: &(E, Sampling),
) -> Record {
    let begins = (0..TRANSFERS).map(|n| n * trace.length_us() / TRANSFERS);
    let segments = BYTES.div_ceil(SEGMENT);
    let all: Vec<_> = begins
        .map(|at_us| transfer(trace, at_us, segments, control, with.clone()))
        .collect();
    let sum = |of: &dyn Fn(&Transfer) -> f64| all.iter().map(of).sum::<f64>();
    record
        .with("simulated delay", sum(&|one| ms(one.us)) / f(TRANSFERS))
        .with("simulated segments", sum(&|one| f(one.sent)))
        .with("simulated retransmissions", sum(&|one| f(one.again)))
        .with("simulated spurious", sum(&|one| f(one.spurious)))
}
