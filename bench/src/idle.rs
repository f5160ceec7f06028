//! CPU time of an idle daemon.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{env::TestEnv, http};

use crate::{
    process::{agent, check_signals},
    result::{BenchResult, Goal, millis, table},
    suite::SampleSizes,
    traffic::NEAR,
};

/// Maximum share of a CPU, %.
const GOAL: f64 = 0.1;

/// Interval between scrapes; Prometheus' default is one minute.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(15);
/// Time for work of the start that continues after READY=1.
const SETTLE: Duration = Duration::from_secs(3);

const NAMES: [&str; 3] = [
    "statistics off",
    "statistics on",
    "statistics on, metrics scraped every 15 s",
];

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let settings = [
        "statistics = false\n".to_owned(),
        String::new(),
        format!("metrics = \"{address}\"\n"),
    ];
    let worlds = settings.map(|settings| agent(programs, &format!("{settings}{NEAR}")));
    let worlds = worlds.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    thread::sleep(SETTLE.min(sizes.idle));
    let read = || worlds.iter().map(cpu).collect::<anyhow::Result<Vec<_>>>();
    let (before, begin) = (read()?, Instant::now());
    let mut scrapes = 0;
    while begin.elapsed() < sizes.idle {
        check_signals()?;
        if begin.elapsed() >= SCRAPE_INTERVAL * scrapes {
            let answer = http::request(TcpStream::connect(address)?, "GET", "/metrics", "")?;
            ensure!(answer.status == 200, "metrics: {}", answer.status);
            scrapes += 1;
        }
        thread::sleep(Duration::from_millis(100));
    }
    let (after, took) = (read()?, begin.elapsed());
    let pairs = before.iter().zip(&after);
    let mut worst = 0.0_f64;
    let rows = NAMES.iter().zip(pairs).map(|(name, (a, b))| {
        let share = (b.run - a.run).as_secs_f64() / took.as_secs_f64() * 100.0;
        worst = worst.max(share);
        [
            (*name).to_owned(),
            format!("{:.2}", millis(b.run - a.run)),
            format!("{}", b.ticks - a.ticks),
            format!("{}", b.slices - a.slices),
            format!("{share:.4} %"),
        ]
    });
    let head = [
        "",
        "ms on a CPU",
        "ticks of 10 ms (utime + stime)",
        "times scheduled",
        "share of a CPU",
    ];
    let table = table(head, rows);
    Ok(BenchResult {
        text: format!("Over {:.0} s:\n\n{table}", took.as_secs_f64()),
        goals: vec![Goal::at_most(
            GOAL,
            " %",
            "CPU of an idle daemon, metrics scraped every 15 s or not",
            worst,
            3,
        )],
    })
}

/// CPU time that a process has used so far.
pub(crate) struct Cpu {
    pub(crate) run: Duration,
    ticks: u64,
    slices: u64,
}

/// CPU time of a daemon: in nanoseconds (schedstat, summed over its threads) and in ticks (stat).
pub(crate) fn cpu(env: &TestEnv) -> anyhow::Result<Cpu> {
    let proc = format!("/proc/{}", env.pid()?);
    let mut cpu = Cpu {
        run: Duration::ZERO,
        ticks: 0,
        slices: 0,
    };
    for task in fs::read_dir(format!("{proc}/task"))?.flatten() {
        // Fields: time on a CPU, time waiting for one, number of timeslices.
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
    // Fields after the name, which may contain spaces: state is field 3, utime 14, stime 15 (proc(5)).
    let (_, fields) = stat.rsplit_once(") ").context("stat")?;
    let fields = fields.split(' ').skip(14 - 3).take(2);
    cpu.ticks = fields.map(str::parse::<u64>).sum::<Result<_, _>>()?;
    Ok(cpu)
}
