//! The time of a callback: the agent's program, one in C of the same kind, and an empty one, by turns and with the
//! same connections.
//!
//! In all by the kernel's own account (bpf_stats), which has its reading of the clock in it. By operation by
//! programs before and behind ([`Stopwatch`]), less what the empty program takes at the same operation.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    cgroup::Cgroup,
    env::TestEnv,
    foreign::{Foreign, count_runs, runs_of},
    stopwatch::{Before, REQUESTS, SLOTS, Stopwatch},
    workload::rate::Rate,
};

use super::{
    Sample,
    overhead::{Callbacks, by_turns, program_id},
    page::{Amount, Found, Goal, table},
};
use crate::{
    process::{apt_install, find, run as run_command},
    root,
};

/// Most that a callback may take, in those of the C program.
const GOAL: f64 = 1.25;

const WARM_UP: u32 = 500;
/// The first port of the listeners.
const PORT: u16 = 7100;

const POLICY: &str =
    "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n";
const ELSEWHERE: &str = "[policy.other]\ncidrs = [\"10.0.0.0/24\"]\ninitial_rto = \"100ms\"\n";

/// What is compared, in the table's order.
const NAMES: [&str; 7] = [
    "empty program",
    "classic C program",
    "C program that does the same work",
    "agent, statistics off",
    "agent, statistics on",
    "agent, statistics on, `syn_retries = \"keep\"`",
    "agent, no entry matches",
];
const N: usize = NAMES.len();
const EMPTY: usize = 0;
const CLASSIC: usize = 1;
const SAME_WORK: usize = 2;
const OFF: usize = 3;
const ON: usize = 4;

pub(super) fn run(amount: Amount, programs: &Path) -> anyhow::Result<Found> {
    let dir = tempfile::tempdir()?;
    let cgroups = [Cgroup::new()?, Cgroup::new()?, Cgroup::new()?];
    let mut worlds = Vec::new();
    for _ in cgroups.len()..N {
        worlds.push(TestEnv::of(programs.join("rto-agent"))?);
    }
    let before = cgroups.iter().map(Cgroup::path);
    let before = before
        .chain(worlds.iter().map(|world| world.cgroup.path()))
        .map(Before::at)
        .collect::<io::Result<Vec<_>>>()?;
    let foreign = cgroups
        .iter()
        .zip(["-DEMPTY", "-DCLASSIC", "-DSAME_WORK"])
        .map(|(cgroup, flag)| Foreign::attach_object(cgroup.path(), &compile(dir.path(), flag)?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let configurations = [
        format!("statistics = false\n{POLICY}"),
        POLICY.to_owned(),
        format!("{POLICY}syn_retries = \"keep\"\n"),
        ELSEWHERE.to_owned(),
    ];
    for (world, configuration) in worlds.iter_mut().zip(&configurations) {
        world.configure(configuration)?;
        world.start()?;
    }
    let paths = cgroups.iter().map(Cgroup::path);
    let paths: Vec<&Path> = paths
        .chain(worlds.iter().map(|world| world.cgroup.path()))
        .collect();
    let watches = before.into_iter().zip(&paths);
    let watches = watches
        .map(|(before, cgroup)| before.behind(cgroup))
        .collect::<io::Result<Vec<_>>>()?;
    let mut traffic = (PORT..)
        .zip(&paths)
        .map(|(port, cgroup)| {
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let program = programs.join("rto-workload");
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
    // Then the other programs are gone.
    let by_operation = by_operation(amount, watches, &mut traffic)?;
    let (in_all, goal) = in_all(amount, &ids, &mut traffic)?;
    Ok(Found {
        text: format!("{in_all}\n{by_operation}"),
        goals: vec![goal],
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
            .arg(root().join("xtask/src/bench/classic.bpf.c"))
            .arg("-o")
            .arg(&object),
    )?;
    Ok(object)
}

/// The compiler of the C program; nothing else needs one.
fn clang() -> anyhow::Result<PathBuf> {
    let installed = || ["clang-19", "clang"].into_iter().find_map(find);
    if let Some(clang) = installed() {
        return Ok(clang);
    }
    apt_install(
        &["clang-19"],
        "the C program that the agent is compared with",
    )?;
    installed().context("clang was not installed")
}

type Traffic = [Rate];

fn turns(connections: u32, traffic: &mut Traffic) -> anyhow::Result<()> {
    let mut all: Vec<&mut Rate> = traffic.iter_mut().collect();
    let all: &mut [&mut Rate; N] = all.as_mut_slice().try_into()?;
    by_turns(connections, all).map(drop)
}

/// The kernel's account.
fn in_all(amount: Amount, ids: &[u64], traffic: &mut Traffic) -> anyhow::Result<(String, Goal)> {
    let _counting = count_runs()?;
    let runs = || {
        ids.iter()
            .map(|id| runs_of(*id))
            .collect::<anyhow::Result<Vec<_>>>()
    };
    let mut rounds: Vec<Vec<Callbacks>> = Vec::new();
    for _ in 0..amount.pairs {
        let before = runs()?;
        turns(amount.connections, traffic)?;
        let pairs = before.into_iter().zip(runs()?);
        let round: Vec<_> = pairs.map(|(a, b)| Callbacks::between(a, b)).collect();
        ensure!(round.iter().all(|c| c.count > 0.0), "a program never ran");
        rounds.push(round);
    }
    let sample = |of: &dyn Fn(&[Callbacks]) -> f64| Sample::of(rounds.iter().map(|r| of(r)));
    let connections = f64::from(amount.connections);
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        let mean = sample(&|r| r[i].mean());
        let ratio = sample(&|r| r[i].mean() / r[CLASSIC].mean());
        let net = sample(&|r| r[i].mean() - r[EMPTY].mean());
        [
            (*name).to_owned(),
            format!(
                "{:.0} ({:.0} to {:.0})",
                mean.median(),
                mean.quarter(1),
                mean.quarter(3)
            ),
            format!("{:.0}", net.median()),
            format!(
                "{:.2} ({:.2} to {:.2})",
                ratio.median(),
                ratio.quarter(1),
                ratio.quarter(3)
            ),
            format!("{:.1}", sample(&|r| r[i].count / connections).median()),
            format!(
                "{:.2}",
                sample(&|r| r[i].nanos / connections / 1e3).median()
            ),
        ]
    });
    let text = table(
        [
            "",
            "ns a callback",
            "less the empty one",
            "of the classic's",
            "callbacks a connection, both ends",
            "us a connection, both ends",
        ],
        rows,
    );
    let ratio = sample(&|r| r[ON].mean() / r[CLASSIC].mean()).median();
    // With statistics there are more callbacks a connection: of what differs so, the whole is compared.
    let off = sample(&|r| r[OFF].mean() / r[SAME_WORK].mean()).median();
    let on = sample(&|r| r[ON].nanos / r[SAME_WORK].nanos).median();
    Ok((
        text,
        Goal {
            what: "a callback with statistics on, by the classic C program's",
            wanted: "at most 1.25x",
            measured: format!(
                "{ratio:.2}x; of a C program that does the same work {off:.2}x with statistics off, and \
                 with them {on:.2}x in all a connection, of which they see more"
            ),
            met: ratio <= GOAL,
        },
    ))
}

/// The names of operations, by slot of the stopwatch.
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

/// The stopwatch's account.
fn by_operation(
    amount: Amount,
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
    for _ in 0..amount.pairs {
        let before = read()?;
        turns(amount.connections, traffic)?;
        let programs = before.into_iter().zip(read()?);
        let round = programs.map(|(before, after)| {
            let slots = before.into_iter().zip(after);
            slots.map(|(a, b)| Callbacks::between(a, b)).collect()
        });
        rounds.push(round.collect());
    }
    let connections = f64::from(amount.connections);
    let connects = Sample::of(rounds.iter().map(|round| round[ON][3].count)).median();
    ensure!(
        (connects / connections - 1.0).abs() < 0.01,
        "{connects} connects of {connections}: this kernel's context is another"
    );
    // Of operations that only some are called for the empty program knows no time: its mean, then.
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
            // In the empty program's place the operation.
            let mut row: [String; N] = std::array::from_fn(|program| net(program, slot));
            row[EMPTY] = operation(slot);
            row
        })
        .filter(|row| row[1..].iter().any(|cell| !cell.is_empty()));
    let mut head = NAMES;
    head[EMPTY] = "ns";
    let base = Sample::of(rounds.iter().map(|round| mean(&round[EMPTY]))).median();
    Ok(format!(
        "{}\nThe empty program's own, subtracted: {base:.0} ns.\n",
        table(head, rows)
    ))
}
