//! CPU time of a daemon that nobody asks for anything.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{env::TestEnv, http};

use super::{
    go_on,
    page::{Amount, Found, Goal, table},
};

/// Largest share of a CPU.
const GOAL: f64 = 0.001;

const POLICY: &str = "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";
/// Prometheus' own default is a minute.
const SCRAPES: Duration = Duration::from_secs(15);
/// What the start leaves to be done.
const SETTLE: Duration = Duration::from_secs(3);

const NAMES: [&str; 3] = [
    "statistics off",
    "statistics on",
    "statistics on, metrics read every 15 s",
];

pub(super) fn run(amount: Amount, programs: &Path) -> anyhow::Result<Found> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let settings = [
        "statistics = false\n".to_owned(),
        String::new(),
        format!("metrics = \"{address}\"\n"),
    ];
    let worlds = settings
        .iter()
        .map(|settings| {
            let mut world = TestEnv::of(programs.join("rto-agent"))?;
            world.configure(&format!("{settings}{POLICY}"))?;
            world.start()?;
            Ok(world)
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    thread::sleep(SETTLE.min(amount.idle));
    let read = || worlds.iter().map(cpu).collect::<anyhow::Result<Vec<_>>>();
    let (before, begin) = (read()?, Instant::now());
    let mut scrapes = 0;
    while begin.elapsed() < amount.idle {
        go_on()?;
        if begin.elapsed() >= SCRAPES * scrapes {
            let answer = http::request(TcpStream::connect(address)?, "GET", "/metrics", "")?;
            ensure!(answer.status == 200, "metrics: {}", answer.status);
            scrapes += 1;
        }
        thread::sleep(Duration::from_millis(100));
    }
    let (after, took) = (read()?, begin.elapsed());
    let pairs = before.iter().zip(&after);
    let shares: Vec<f64> = pairs
        .clone()
        .map(|(a, b)| (b.run - a.run).as_secs_f64() / took.as_secs_f64())
        .collect();
    let rows = NAMES
        .iter()
        .zip(pairs)
        .zip(&shares)
        .map(|((name, (a, b)), share)| {
            [
                (*name).to_owned(),
                format!("{:.2}", (b.run - a.run).as_secs_f64() * 1e3),
                format!("{}", b.ticks - a.ticks),
                format!("{}", b.slices - a.slices),
                format!("{:.4} %", share * 100.0),
            ]
        });
    let worst = shares.iter().copied().fold(0.0, f64::max);
    Ok(Found {
        text: format!(
            "Over {:.0} s:\n\n{}",
            took.as_secs_f64(),
            table(
                [
                    "",
                    "ms on a CPU",
                    "ticks of 10 ms (utime + stime)",
                    "times it ran",
                    "of a CPU"
                ],
                rows
            )
        ),
        goals: vec![Goal {
            what: "CPU of an idle daemon, metrics read every 15 s or not",
            wanted: "below 0.1 %",
            measured: format!("at most {:.3} %", worst * 100.0),
            met: worst < GOAL,
        }],
    })
}

/// What a process has used so far.
pub(super) struct Cpu {
    pub(super) run: Duration,
    ticks: u64,
    slices: u64,
}

/// All threads of a daemon: the scheduler's account in nanoseconds (schedstat), and the one in ticks (stat).
pub(super) fn cpu(world: &TestEnv) -> anyhow::Result<Cpu> {
    let proc = format!("/proc/{}", world.pid()?);
    let mut cpu = Cpu {
        run: Duration::ZERO,
        ticks: 0,
        slices: 0,
    };
    for task in fs::read_dir(format!("{proc}/task"))?.flatten() {
        // Time on a CPU, time waiting for one, how often it ran.
        let text = fs::read_to_string(task.path().join("schedstat"))?;
        let words: Vec<u64> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let [run, _, slices] = words[..] else {
            anyhow::bail!("schedstat: {text}");
        };
        cpu.run += Duration::from_nanos(run);
        cpu.slices += slices;
    }
    let stat = fs::read_to_string(format!("{proc}/stat"))?;
    // After the name, which may have blanks: state is field 3, utime 14, stime 15 (proc(5)).
    let (_, fields) = stat.rsplit_once(") ").context("stat")?;
    let fields = fields.split(' ').skip(14 - 3).take(2);
    cpu.ticks = fields.map(str::parse::<u64>).sum::<Result<_, _>>()?;
    Ok(cpu)
}
