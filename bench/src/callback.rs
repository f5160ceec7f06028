//! Time of a callback: the agent's program, two programs in C, and an empty one, interleaved on the same connections.
//!
//! The kernel (bpf_stats) measures the total, which includes its own reading of the clock. Programs before and after
//! the tested one ([`Stopwatch`]) measure each operation; the time of the empty program at the same operation is
//! subtracted.

use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    cgroup::Cgroup,
    foreign::{Foreign, count_runs, runs_of},
    stopwatch::{Before, REQUESTS, SLOTS, Stopwatch},
    workload::rate::Rate,
};

use crate::{
    placement::{self, medians},
    process::{configured, helper, root, run as run_command},
    result::{BenchResult, Goal, table},
    sample::Sample,
    suite::SampleSizes,
    traffic::{
        COUNT_ALL, COUNT_NOTHING, Callbacks, ELSEWHERE, POLICY, TIMERS, interleaved, program_id,
    },
};

/// Maximum time per connection, relative to the C program that does the same work; and the same with timers of
/// established connections, relative to the classic C program.
const GOAL: f64 = 1.35;
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
const OFF: usize = 3;
const ON: usize = 4;
const WITH_TIMERS: usize = 5;
const WITH_LEARNT: usize = 6;
const ALL: usize = 7;

/// The first agent in the table; the C programs come before it.
const AGENTS: usize = 3;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let dir = tempfile::tempdir()?;
    let objects = ["-DEMPTY", "-DCLASSIC", "-DSAME_WORK"]
        .map(|flag| compile(dir.path(), flag))
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    let cgroups = [Cgroup::new()?, Cgroup::new()?, Cgroup::new()?];
    let configurations = [
        format!("{COUNT_NOTHING}{POLICY}"),
        POLICY.to_owned(),
        format!("{POLICY}{TIMERS}"),
        LEARNT.to_owned(),
        format!("{COUNT_ALL}{POLICY}"),
        ELSEWHERE.to_owned(),
    ];
    let mut worlds = configured(programs, &configurations)?;
    let netns = worlds[0].net.client.clone();
    let cgroups = cgroups.iter().chain(worlds.iter().map(|env| &env.cgroup));
    let paths: Vec<PathBuf> = cgroups.map(|cgroup| cgroup.path().to_owned()).collect();
    let mut operations = String::new();
    let mut ports = PORT..;
    let copies = placement::each(&mut worlds, |copy, worlds| {
        let before = paths.iter().map(|path| Before::at(path));
        let before = before.collect::<io::Result<Vec<_>>>()?;
        let mut foreign = HashMap::new();
        for program in placement::order(copy, N) {
            match program.checked_sub(AGENTS) {
                Some(agent) => worlds[agent].start()?,
                None => {
                    let loaded = Foreign::attach_object(&paths[program], &objects[program])?;
                    foreign.insert(program, loaded);
                }
            }
        }
        let watches = before.into_iter().zip(&paths);
        let watches = watches
            .map(|(before, cgroup)| before.behind(cgroup))
            .collect::<io::Result<Vec<_>>>()?;
        // Listens after the C program is loaded, which makes its entry then.
        let mut traffic = Vec::new();
        for (cgroup, port) in paths.iter().zip(&mut ports) {
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            traffic.push(Rate::start(&helper(programs), &netns, cgroup, None, on)?);
        }
        interleaved(WARM_UP, &mut traffic)?;
        if copy == 0 {
            operations = by_operation(sizes, &watches, &mut traffic)?;
        }
        // The total must not include them.
        drop(watches);
        let foreign = (0..AGENTS).map(|program| foreign[&program].program_id());
        let ids = foreign.chain(worlds.iter().map(program_id));
        total(
            sizes,
            &ids.collect::<anyhow::Result<Vec<_>>>()?,
            &mut traffic,
        )
    })?;
    let (total, goals) = summary(sizes, &copies);
    Ok(BenchResult {
        text: format!("{total}\n{operations}"),
        goals,
    })
}

/// Compiles one of the C programs.
pub(crate) fn compile(dir: &Path, flag: &str) -> anyhow::Result<PathBuf> {
    let object = dir.join(format!("classic{flag}.o"));
    run_command(
        Command::new(clang()?)
            .args("-O2 -g -target bpf -mcpu=v3 -Wall -Werror".split(' '))
            .arg(format!(
                "-I/usr/include/{}-linux-gnu",
                std::env::consts::ARCH
            ))
            .args([flag, "-c"])
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

/// Time of all callbacks by the kernel's statistics, of each round and program.
fn total(
    sizes: SampleSizes,
    ids: &[u64],
    traffic: &mut [Rate],
) -> anyhow::Result<Vec<Vec<Callbacks>>> {
    let _counting = count_runs()?;
    let runs = || {
        ids.iter()
            .map(|id| runs_of(*id))
            .collect::<Result<Vec<_>, _>>()
    };
    let mut rounds: Vec<Vec<Callbacks>> = Vec::new();
    for _ in 0..placement::rounds(sizes.rounds) {
        let before = runs()?;
        interleaved(sizes.connections, traffic)?;
        let pairs = before.into_iter().zip(runs()?);
        let round: Vec<_> = pairs.map(|(a, b)| Callbacks::between(a, b)).collect();
        ensure!(round.iter().all(|c| c.count > 0.0), "a program never ran");
        rounds.push(round);
    }
    Ok(rounds)
}

/// The table of all callbacks, and the goals.
fn summary(sizes: SampleSizes, copies: &[Vec<Vec<Callbacks>>]) -> (String, Vec<Goal>) {
    let connections = f64::from(sizes.connections);
    let us = |i: usize| medians(copies, |r| r[i].nanos / connections / 1e3);
    let ratio = |i: usize, to: usize| medians(copies, |r| r[i].nanos / r[to].nanos);
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        [
            (*name).to_owned(),
            us(i).with_range(2),
            ratio(i, CLASSIC).with_range(2),
            ratio(i, SAME_WORK).with_range(2),
            format!(
                "{:.1}",
                medians(copies, |r| r[i].count / connections).median()
            ),
        ]
    });
    let text = table(
        [
            "",
            "us per connection, both ends",
            "relative to the classic program",
            "relative to the C program with the same work",
            "callbacks per connection",
        ],
        rows,
    );
    let counting = medians(copies, |r| r[ALL].mean() / r[OFF].mean()).with_range(2);
    let text = format!(
        "{text}\nA callback with everything counted, relative to statistics off: {counting}.\n"
    );
    let goals = [
        (
            "callbacks of a connection, both ends, relative to a C program that does the same work",
            us(ON),
            ratio(ON, SAME_WORK),
            GOAL,
        ),
        (
            "the same with rto_min and delack_max, relative to the classic C program",
            us(WITH_TIMERS),
            ratio(WITH_TIMERS, CLASSIC),
            TIMERS_GOAL,
        ),
        (
            "callbacks of a connection with a learnt initial RTO, guard and control arm, relative to a fixed one",
            us(WITH_LEARNT),
            ratio(WITH_LEARNT, ON),
            LEARNT_GOAL,
        ),
    ];
    let goals = goals.map(|(what, us, ratio, most)| Goal {
        what,
        limit: format!("at most {most:.2}x"),
        measured: format!("{:.2} us, {}x", us.median(), ratio.with_range(2)),
        met: ratio.median() <= most,
    });
    (text, goals.into())
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
    watches: &[Stopwatch],
    traffic: &mut [Rate],
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
        interleaved(sizes.connections, traffic)?;
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
