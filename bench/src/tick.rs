//! CPU time of a daemon that makes decisions about 1,000 policies every second.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_testbed::cgroup;

use crate::{
    idle::cpu,
    process::{agent, check_signals},
    result::{BenchResult, Goal, table},
    suite::SampleSizes,
};

const POLICIES: u32 = 1000;
/// Maximum time of a tick, relative to one reading of all statistics.
const GOAL: f64 = 0.25;
/// Maximum CPU time of `GET /v1/stats` and `GET /v1/status`, milliseconds.
const STATS_MS: f64 = 10.0;
const STATUS_MS: f64 = 2.0;
/// Time for work of the start that continues after READY=1, and for the first reading of all policies.
const SETTLE: Duration = Duration::from_secs(12);
/// After reading the statistics, the daemon waits at least nine times as long as the reading took.
const BETWEEN_READINGS: Duration = Duration::from_secs(1);

const NAMES: [&str; 3] = [
    "fixed values, no guard",
    "automatic values, no connections",
    "automatic values, a connection of each policy a second",
];
const N: usize = NAMES.len();
const NONE: usize = 0;
const IDLE: usize = 1;
const BUSY: usize = 2;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let settings = [
        "initial_rto = \"100ms\"\nguard = \"off\"\n",
        "initial_rto = \"auto\"\n",
        "initial_rto = \"auto\"\n",
    ];
    let mut worlds = Vec::new();
    for settings in settings {
        worlds.push(agent(programs, &policies(settings))?);
    }
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let _joined = Joined::new(worlds[BUSY].cgroup.path())?;
    connect_for(SETTLE.min(sizes.idle), &listener)?;
    let read = || worlds.iter().map(cpu).collect::<anyhow::Result<Vec<_>>>();
    let (before, begin) = (read()?, Instant::now());
    connect_for(sizes.idle, &listener)?;
    let (after, took) = (read()?, begin.elapsed());
    let readings = u32::try_from(sizes.idle.as_secs() / 4)
        .unwrap_or(u32::MAX)
        .clamp(1, 15);
    let ticks: [f64; N] =
        std::array::from_fn(|i| (after[i].run - before[i].run).as_secs_f64() / took.as_secs_f64());
    // CPU time of a request, without that of the ticks during it.
    let request = |path| -> anyhow::Result<f64> {
        let (before, begin) = (cpu(&worlds[NONE])?, Instant::now());
        for _ in 0..readings {
            check_signals()?;
            worlds[NONE].socket_request("GET", path, "")?;
            thread::sleep(BETWEEN_READINGS);
        }
        let run = (cpu(&worlds[NONE])?.run - before.run).as_secs_f64();
        Ok((run - ticks[NONE] * begin.elapsed().as_secs_f64()) / f64::from(readings))
    };
    let (reading, status) = (request("/v1/stats")?, request("/v1/status")?);
    let of_cpu = |most, what, s: f64| Goal::at_most(most, " ms of a CPU", what, s * 1e3, 1);
    let rows = NAMES.iter().zip(ticks).map(|(name, tick)| {
        [
            (*name).to_owned(),
            format!("{:.2}", tick * 1e3),
            format!("{:.3}", tick / reading),
        ]
    });
    Ok(BenchResult {
        text: format!(
            "1,000 policies, over {:.0} s. Reading all their statistics once (`GET /v1/stats`) takes {:.1} ms of a CPU, `GET /v1/status` {:.1} ms.\n\n{}",
            took.as_secs_f64(),
            reading * 1e3,
            status * 1e3,
            table(
                ["", "ms on a CPU a second", "relative to reading all once"],
                rows
            )
        ),
        goals: vec![
            of_cpu(STATS_MS, "`GET /v1/stats` with 1,000 policies", reading),
            of_cpu(STATUS_MS, "`GET /v1/status` with 1,000 policies", status),
            Goal::at_most(
                GOAL,
                "",
                "a tick with 1,000 automatic policies without connections, relative to reading all their statistics",
                ticks[IDLE] / reading,
                3,
            ),
        ],
    })
}

/// Policies for one loopback address each.
fn policies(settings: &str) -> String {
    let policy = |number| {
        let address = address(number);
        format!("[policy.p{number}]\ncidrs = [\"{address}/32\"]\n{settings}\n")
    };
    (0..POLICIES).map(policy).collect()
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 88, 0, 0)) + number)
}

/// Makes one connection per policy and second, for this time.
fn connect_for(time: Duration, listener: &TcpListener) -> anyhow::Result<()> {
    let port = listener.local_addr()?.port();
    let begin = Instant::now();
    let mut next = begin;
    while begin.elapsed() < time {
        for number in 0..POLICIES {
            let client = TcpStream::connect((address(number), port))?;
            let (server, _) = listener.accept()?;
            drop((client, server));
        }
        check_signals()?;
        next += Duration::from_secs(1);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Moves this process into a cgroup, until dropped.
struct Joined {
    former: PathBuf,
}

impl Joined {
    fn new(cgroup: &Path) -> anyhow::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let former = cgroup::root()?.join(own.context("no cgroup2")?);
        ensure!(former.exists(), "{} does not exist", former.display());
        fs::write(cgroup.join("cgroup.procs"), "0")?;
        Ok(Self { former })
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        // If this fails, the cgroup remains: its own drop reports that, and the next sweep removes it.
        let _left = fs::write(self.former.join("cgroup.procs"), "0");
    }
}
