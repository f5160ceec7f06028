//! Time of a callback: the agent's program, two programs in C, and an empty one, interleaved on the same connections.
//!
//! The kernel (bpf_stats) measures the total, which includes its own reading of the clock. Programs before and after
//! the tested one ([`Stopwatch`]) measure each operation; the time of the empty program at the same operation is
//! subtracted.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    cgroup::Cgroup,
    env::TestEnv,
    foreign::{Foreign, count_runs, runs_of},
    stopwatch::{Before, REQUESTS, SLOTS, Stopwatch},
    workload::rate::Rate,
};

use crate::{
    overhead::{
        BATCH, COUNT_ALL, COUNT_NOTHING, Callbacks, ELSEWHERE, POLICY, TIMERS, interleaved,
        program_id,
    },
    process::{helper, root, run as run_command},
    result::{BenchResult, Goal, table},
    sample::Sample,
    suite::SampleSizes,
};

/// Maximum time per connection, relative to the classic C program: with a policy of an initial RTO, and with one that
/// also sets timers of established connections.
const GOAL: f64 = 2.0;
const TIMERS_GOAL: f64 = 2.5;
/// Maximum time per connection with a learnt initial RTO, relative to a fixed one.
const LEARNT_GOAL: f64 = 1.25;
/// As [`POLICY`], with everything that controls a learnt value.
const LEARNT: &str = "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"auto\"\nguard = \"on\"\n\
                      holdout = \"5%\"\nforce = true\n";

const WARM_UP: u32 = 500;
/// The first port of the listeners.
const PORT: u16 = 7100;

/// The compared programs, in the table's order.
const NAMES: [&str; 9] = [
    "empty program",
    "classic C program",
    "C program that does the same work",
    "agent, statistics off",
    "agent, default settings",
    "agent, default settings, `rto_min` and `delack_max`",
    "agent, default settings, learnt initial RTO, guard and control arm",
    "agent, everything counted",
    "agent, no entry matches",
];
const N: usize = NAMES.len();
const EMPTY: usize = 0;
const CLASSIC: usize = 1;
const SAME_WORK: usize = 2;
const ON: usize = 4;
const WITH_TIMERS: usize = 5;
const WITH_LEARNT: usize = 6;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let dir = tempfile::tempdir()?;
    let cgroups = [Cgroup::new()?, Cgroup::new()?, Cgroup::new()?];
    let mut worlds = Vec::new();
    for _ in cgroups.len()..N {
        worlds.push(TestEnv::of(programs.join("rto-agent"))?);
    }
    let before = cgroups.iter().map(Cgroup::path);
    let before = before
        .chain(worlds.iter().map(|env| env.cgroup.path()))
        .map(Before::at)
        .collect::<io::Result<Vec<_>>>()?;
    let foreign = cgroups
        .iter()
        .zip(["-DEMPTY", "-DCLASSIC", "-DSAME_WORK"])
        .map(|(cgroup, flag)| Foreign::attach_object(cgroup.path(), &compile(dir.path(), flag)?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let configurations = [
        format!("{COUNT_NOTHING}{POLICY}"),
        POLICY.to_owned(),
        format!("{POLICY}{TIMERS}"),
        LEARNT.to_owned(),
        format!("{COUNT_ALL}{POLICY}"),
        ELSEWHERE.to_owned(),
    ];
    for (env, configuration) in worlds.iter_mut().zip(&configurations) {
        env.configure(configuration)?;
        env.start()?;
    }
    let paths = cgroups.iter().map(Cgroup::path);
    let paths: Vec<&Path> = paths
        .chain(worlds.iter().map(|env| env.cgroup.path()))
        .collect();
    let watches = before.into_iter().zip(&paths);
    let watches = watches
        .map(|(before, cgroup)| before.behind(cgroup))
        .collect::<io::Result<Vec<_>>>()?;
    let mut traffic = (PORT..)
        .zip(&paths)
        .map(|(port, cgroup)| {
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let program = helper(programs);
            let mut rate = Rate::start(&program, &worlds[0].net.client, cgroup, None, on)?;
            rate.connections(WARM_UP)?;
            Ok(rate)
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let ids = foreign
        .iter()
        .map(Foreign::program_id)
        .chain(worlds.iter().map(program_id))
        .collect::<anyhow::Result<Vec<_>>>()?;
    // Detaches the stopwatches, which the total must not include.
    let by_operation = by_operation(sizes, watches, &mut traffic)?;
    let rounds = total(sizes, &ids, &mut traffic)?;
    // Even with the same settings, results differ by a few percent between cgroups, ports and daemons. Here the two
    // configurations swap places.
    for (at, configuration) in [(ON, LEARNT), (WITH_LEARNT, POLICY)] {
        let env = &worlds[at - cgroups.len()];
        env.configure(configuration)?;
        env.cli(&["reload"])?;
    }
    run_traffic(WARM_UP, &mut traffic)?;
    let exchanged = total(sizes, &ids, &mut traffic)?;
    let learnt = Sample::of(rounds.iter().zip(&exchanged).map(|(own, exchanged)| {
        let ratio = |round: &[Callbacks], a: usize, b: usize| round[a].nanos / round[b].nanos;
        (ratio(own, WITH_LEARNT, ON) * ratio(exchanged, ON, WITH_LEARNT)).sqrt()
    }));
    let (total, goals) = summary(sizes, &rounds, &learnt);
    Ok(BenchResult {
        text: format!("{total}\n{by_operation}"),
        goals,
    })
}

/// Compiles one of the C programs.
fn compile(dir: &Path, flag: &str) -> anyhow::Result<PathBuf> {
    let object = dir.join(format!("classic{flag}.o"));
    run_command(
        Command::new(clang()?)
            .args([
                "-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Werror",
            ])
            .arg(format!(
                "-I/usr/include/{}-linux-gnu",
                std::env::consts::ARCH
            ))
            .arg(flag)
            .arg("-c")
            .arg(root().join("bench/src/classic.bpf.c"))
            .arg("-o")
            .arg(&object),
    )?;
    Ok(object)
}

/// The compiler of the C programs.
fn clang() -> anyhow::Result<&'static str> {
    let is_there = |name: &&str| {
        let mut version = Command::new(name);
        version.arg("--version").stdout(Stdio::null());
        version.status().is_ok_and(|status| status.success())
    };
    ["clang-19", "clang"]
        .into_iter()
        .find(is_there)
        .context("clang is not installed; cargo xtask bench installs it")
}

type Traffic = [Rate];

fn run_traffic(connections: u32, traffic: &mut Traffic) -> anyhow::Result<()> {
    let mut all: Vec<&mut Rate> = traffic.iter_mut().collect();
    let all: &mut [&mut Rate; N] = all.as_mut_slice().try_into()?;
    interleaved(connections, BATCH, all).map(drop)
}

/// Time of all callbacks by the kernel's statistics, of each round and program.
fn total(
    sizes: SampleSizes,
    ids: &[u64],
    traffic: &mut Traffic,
) -> anyhow::Result<Vec<Vec<Callbacks>>> {
    let _counting = count_runs()?;
    let runs = || {
        ids.iter()
            .map(|id| runs_of(*id))
            .collect::<anyhow::Result<Vec<_>>>()
    };
    let mut rounds: Vec<Vec<Callbacks>> = Vec::new();
    for _ in 0..sizes.rounds {
        let before = runs()?;
        run_traffic(sizes.connections, traffic)?;
        let pairs = before.into_iter().zip(runs()?);
        let round: Vec<_> = pairs.map(|(a, b)| Callbacks::between(a, b)).collect();
        ensure!(round.iter().all(|c| c.count > 0.0), "a program never ran");
        rounds.push(round);
    }
    Ok(rounds)
}

/// The table of all callbacks, and the goals; `learnt`: the time with a learnt initial RTO, relative to a fixed one.
fn summary(sizes: SampleSizes, rounds: &[Vec<Callbacks>], learnt: &Sample) -> (String, Vec<Goal>) {
    let sample = |of: &dyn Fn(&[Callbacks]) -> f64| Sample::of(rounds.iter().map(|r| of(r)));
    let connections = f64::from(sizes.connections);
    let us = |i: usize| sample(&|r| r[i].nanos / connections / 1e3);
    let ratio = |i: usize, to: usize| sample(&|r| r[i].nanos / r[to].nanos);
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        [
            (*name).to_owned(),
            us(i).with_quartiles(2),
            ratio(i, CLASSIC).with_quartiles(2),
            format!("{:.1}", sample(&|r| r[i].count / connections).median()),
            sample(&|r| r[i].mean()).with_quartiles(0),
        ]
    });
    let text = table(
        [
            "",
            "us per connection, both ends",
            "relative to the classic program",
            "callbacks per connection",
            "ns per callback",
        ],
        rows,
    );
    let goal = |what, of: usize, most: f64| {
        let to_classic = ratio(of, CLASSIC);
        Goal {
            what,
            limit: format!("at most {most:.1}x"),
            measured: format!(
                "{}x; relative to a C program that does the same work: {:.2}x",
                to_classic.with_quartiles(2),
                ratio(of, SAME_WORK).median()
            ),
            met: to_classic.median() <= most,
        }
    };
    let goals = vec![
        goal(
            "callbacks of a connection, both ends, relative to the classic C program",
            ON,
            GOAL,
        ),
        goal(
            "the same with rto_min and delack_max",
            WITH_TIMERS,
            TIMERS_GOAL,
        ),
        Goal {
            what: "callbacks of a connection with a learnt initial RTO, guard and control arm, relative to a fixed one",
            limit: format!("at most {LEARNT_GOAL:.2}x"),
            measured: format!("{}x", learnt.with_quartiles(2)),
            met: learnt.median() <= LEARNT_GOAL,
        },
    ];
    (text, goals)
}

/// The operation that belongs to a slot of the stopwatch.
fn operation(slot: usize) -> String {
    let name = match slot % REQUESTS {
        1 => "TIMEOUT_INIT",
        2 => "RWND_INIT",
        3 => "TCP_CONNECT_CB",
        4 => "ACTIVE_ESTABLISHED_CB",
        5 => "PASSIVE_ESTABLISHED_CB",
        6 => "NEEDS_ECN",
        7 => "BASE_RTT",
        8 => "RTO_CB",
        9 => "RETRANS_CB",
        10 => "STATE_CB",
        11 => "TCP_LISTEN_CB",
        12 => "RTT_CB",
        other => return format!("operation {other}"),
    };
    let whose = if slot >= REQUESTS { " (SYN-ACK)" } else { "" };
    format!("{name}{whose}")
}

/// Time of each operation by the stopwatches.
fn by_operation(
    sizes: SampleSizes,
    watches: Vec<Stopwatch>,
    traffic: &mut Traffic,
) -> anyhow::Result<String> {
    let read = || {
        watches
            .iter()
            .map(Stopwatch::so_far)
            .collect::<anyhow::Result<Vec<_>>>()
    };
    // [round][program][slot]
    let mut rounds: Vec<Vec<Vec<Callbacks>>> = Vec::new();
    for _ in 0..sizes.rounds {
        let before = read()?;
        run_traffic(sizes.connections, traffic)?;
        let programs = before.into_iter().zip(read()?);
        let round = programs.map(|(before, after)| {
            let slots = before.into_iter().zip(after);
            slots.map(|(a, b)| Callbacks::between(a, b)).collect()
        });
        rounds.push(round.collect());
    }
    let connections = f64::from(sizes.connections);
    let connects = Sample::of(rounds.iter().map(|round| round[ON][3].count)).median();
    ensure!(
        (connects / connections - 1.0).abs() < 0.01,
        "{connects} connects of {connections}: this kernel has another layout of the context"
    );
    // The empty program is not called for some operations; for those its mean is subtracted.
    let mean = |callbacks: &[Callbacks]| {
        let sum = |of: fn(&Callbacks) -> f64| callbacks.iter().map(of).sum::<f64>();
        sum(|c| c.nanos) / sum(|c| c.count)
    };
    let net = |program: usize, slot: usize| {
        let values = rounds
            .iter()
            .filter(|round| round[program][slot].count > connections / 2.0);
        let sample = Sample::of(values.map(|round| {
            let empty = round[EMPTY][slot];
            let empty = if empty.count > 0.0 {
                empty.mean()
            } else {
                mean(&round[EMPTY])
            };
            round[program][slot].mean() - empty
        }));
        match sample.median() {
            none if none.is_nan() => String::new(),
            median => format!("{median:.0}"),
        }
    };
    let rows = (0..SLOTS)
        .map(|slot| {
            // The operation's name takes the empty program's column.
            let mut row: [String; N] = std::array::from_fn(|program| net(program, slot));
            row[EMPTY] = operation(slot);
            row
        })
        .filter(|row| row[1..].iter().any(|cell| !cell.is_empty()));
    let mut head = NAMES;
    head[EMPTY] = "ns";
    let base = Sample::of(rounds.iter().map(|round| mean(&round[EMPTY]))).median();
    Ok(format!(
        "{}\nThe empty program's time, which is subtracted: {base:.0} ns.\n",
        table(head, rows)
    ))
}
