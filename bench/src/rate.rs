//! Connections per second with the agent, with an empty program, and with none, interleaved.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use rto_testbed::{cgroup::Cgroup, foreign::Foreign, workload::rate::Rate};

use crate::{
    overhead::{BATCH, COUNT_ALL, COUNT_NOTHING, ELSEWHERE, POLICY, ensure_untimed, interleaved},
    process::{agent, helper},
    result::{BenchResult, Goal, table},
    sample::Sample,
    suite::SampleSizes,
};

const WARM_UP: u32 = 500;
/// The port before the first listener's.
const PORT: u16 = 7200;

const NAMES: [&str; 6] = [
    "no program",
    "empty program",
    "agent, no entry matches",
    "agent, statistics off",
    "agent, default settings",
    "agent, everything counted",
];
const N: usize = NAMES.len();
const NONE: usize = 0;
const EMPTY: usize = 1;
const UNMATCHED: usize = 2;
const ON: usize = 4;

/// A comparison of all programs.
struct Comparison {
    title: &'static str,
    /// Whether a program is at the accepting end as well.
    is_at_both_ends: bool,
    /// Connections that are open at the same time.
    at_once: usize,
    /// Consecutive connections with one program.
    batch: u32,
    /// A program, its minimum of connections per second relative to the empty program, and the name of this goal.
    goals: &'static [(usize, f64, &'static str)],
}

const COMPARISONS: [Comparison; 3] = [
    Comparison {
        title: "The program at the connecting end, one connection after the other",
        is_at_both_ends: false,
        at_once: 1,
        batch: BATCH,
        goals: &[
            (
                ON,
                0.99,
                "connections per second with the agent, relative to an empty program",
            ),
            (UNMATCHED, 0.995, "the same where no entry matches"),
        ],
    },
    Comparison {
        title: "The program at both ends, one connection after the other",
        is_at_both_ends: true,
        at_once: 1,
        batch: BATCH,
        goals: &[
            (ON, 0.98, "the same with the agent at both ends"),
            (
                UNMATCHED,
                0.995,
                "the same where no entry matches, with the agent at both ends",
            ),
        ],
    },
    Comparison {
        title: "The program at both ends, 64 connections at a time on all processors",
        is_at_both_ends: true,
        at_once: 64,
        // Five times 64: long enough for the start of the threads not to matter.
        batch: 320,
        goals: &[(
            ON,
            0.98,
            "the same with the agent at both ends, 64 connections at a time on all processors",
        )],
    },
];

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    ensure_untimed()?;
    let bare = Cgroup::new()?;
    let empty = Cgroup::new()?;
    let _program = Foreign::attach_empty(empty.path())?;
    let configurations = [
        ELSEWHERE.to_owned(),
        format!("{COUNT_NOTHING}{POLICY}"),
        POLICY.to_owned(),
        format!("{COUNT_ALL}{POLICY}"),
    ];
    let mut worlds = Vec::new();
    for configuration in &configurations {
        worlds.push(agent(programs, configuration)?);
    }
    let without_agent = [bare.path(), empty.path()].into_iter();
    let paths: Vec<&Path> = without_agent
        .chain(worlds.iter().map(|env| env.cgroup.path()))
        .collect();
    let program = helper(programs);
    let netns = &worlds[0].net.client;
    let mut ports = PORT + 1..;
    let mut text = String::new();
    let mut goals = Vec::new();
    for comparison in COMPARISONS {
        let accepts_in = (!comparison.is_at_both_ends).then(|| bare.path());
        let mut traffic = Vec::new();
        for (cgroup, port) in paths.iter().zip(&mut ports) {
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let at_once = comparison.at_once;
            let mut rate = Rate::start_parallel(&program, netns, cgroup, accepts_in, on, at_once)?;
            rate.connections(WARM_UP)?;
            traffic.push(rate);
        }
        let rounds = measure(sizes, comparison.batch, &mut traffic)?;
        text.push_str(&format!("{}:\n\n{}\n", comparison.title, rates(&rounds)));
        for (of, least, what) in comparison.goals {
            let ratio = Sample::of(rounds.iter().map(|r| r[*of] / r[EMPTY]));
            goals.push(Goal::at_least(*least, what, &ratio));
        }
    }
    Ok(BenchResult { text, goals })
}

/// Connections per second of each program in each round.
fn measure(sizes: SampleSizes, batch: u32, traffic: &mut [Rate]) -> anyhow::Result<Vec<[f64; N]>> {
    let mut all: Vec<&mut Rate> = traffic.iter_mut().collect();
    let all: &mut [&mut Rate; N] = all.as_mut_slice().try_into()?;
    (0..sizes.rounds)
        .map(|_| interleaved(sizes.connections, batch, all))
        .collect()
}

fn rates(rounds: &[[f64; N]]) -> String {
    let sample = |of: &dyn Fn(&[f64; N]) -> f64| Sample::of(rounds.iter().map(of));
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        [
            (*name).to_owned(),
            format!("{:.0}", sample(&|r| r[i]).median()),
            sample(&|r| r[i] / r[NONE]).with_quartiles(3),
            sample(&|r| r[i] / r[EMPTY]).with_quartiles(3),
        ]
    });
    let head = [
        "",
        "connections per second",
        "relative to no program",
        "relative to the empty program",
    ];
    table(head, rows)
}
