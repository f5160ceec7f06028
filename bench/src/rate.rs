//! Connections per second with the agent, with an empty program, and with none, interleaved.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use rto_testbed::{cgroup::Cgroup, foreign::Foreign, workload::rate::Rate};

use crate::{
    callback::compile,
    placement::{self, medians},
    process::{configured, helper},
    result::{BenchResult, Goal, table},
    suite::SampleSizes,
    traffic::{COUNT_ALL, COUNT_NOTHING, ELSEWHERE, POLICY, ensure_untimed, interleaved},
};

const WARM_UP: u32 = 500;
/// The port before the first listener's.
const PORT: u16 = 7200;

const NAMES: [&str; 7] = [
    "no program",
    "empty program",
    "classic C program",
    "agent, no entry matches",
    "agent, statistics off",
    "agent, default settings",
    "agent, everything counted",
];
const N: usize = NAMES.len();
const NONE: usize = 0;
const EMPTY: usize = 1;
const CLASSIC: usize = 2;
const UNMATCHED: usize = 3;
const OFF: usize = 4;
const ON: usize = 5;
const ALL: usize = 6;

/// The title of a comparison, whether a program is at the accepting end as well, and goals: a program, its minimum of
/// connections per second relative to the empty program, and the goal's name.
type Comparison = (&'static str, bool, [(usize, f64, &'static str); 2]);

const COMPARISONS: [Comparison; 2] = [
    (
        "The program at the connecting end",
        false,
        [
            (
                ON,
                0.99,
                "connections per second with the agent, relative to an empty program",
            ),
            (UNMATCHED, 0.995, "the same where no entry matches"),
        ],
    ),
    (
        "The program at both ends",
        true,
        [
            (ON, 0.985, "the same with the agent at both ends"),
            (
                UNMATCHED,
                0.995,
                "the same where no entry matches, with the agent at both ends",
            ),
        ],
    ),
];

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    ensure_untimed()?;
    let (bare, empty, classic) = (Cgroup::new()?, Cgroup::new()?, Cgroup::new()?);
    let dir = tempfile::tempdir()?;
    let object = compile(dir.path(), "-DCLASSIC")?;
    let configurations = [
        ELSEWHERE.to_owned(),
        format!("{COUNT_NOTHING}{POLICY}"),
        POLICY.to_owned(),
        format!("{COUNT_ALL}{POLICY}"),
    ];
    let mut worlds = configured(programs, &configurations)?;
    let netns = worlds[0].net.client.clone();
    let mut paths = [&bare, &empty, &classic]
        .map(|of| of.path().to_owned())
        .to_vec();
    paths.extend(worlds.iter().map(|env| env.cgroup.path().to_owned()));
    let mut ports = PORT + 1..;
    // [comparison][copy][round]
    let mut results = [const { Vec::new() }; COMPARISONS.len()];
    placement::each(&mut worlds, |copy, worlds| {
        let mut foreign = Vec::new();
        for program in placement::order(copy, N) {
            match program {
                NONE => {}
                EMPTY => foreign.push(Foreign::attach_empty(empty.path())?),
                CLASSIC => foreign.push(Foreign::attach_object(classic.path(), &object)?),
                agent => worlds[agent - UNMATCHED].start()?,
            }
        }
        for ((_, is_at_both_ends, _), result) in COMPARISONS.iter().zip(&mut results) {
            let accepts_in = (!is_at_both_ends).then(|| bare.path());
            let mut traffic = Vec::new();
            for (cgroup, port) in paths.iter().zip(&mut ports) {
                let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
                let mut rate = Rate::start(&helper(programs), &netns, cgroup, accepts_in, on)?;
                rate.connections(WARM_UP)?;
                traffic.push(rate);
            }
            let rounds = 0..placement::rounds(sizes.rounds);
            let rounds = rounds.map(|_| interleaved(sizes.connections, &mut traffic));
            result.push(rounds.collect::<anyhow::Result<Vec<_>>>()?);
        }
        drop(foreign);
        Ok(())
    })?;
    let mut text = String::new();
    let mut goals = Vec::new();
    for ((title, _, its_goals), copies) in COMPARISONS.iter().zip(&results) {
        let counting = medians(copies, |r| r[ALL] / r[OFF]).with_range(3);
        text.push_str(&format!(
            "{title}:\n\n{}\nEverything counted, relative to statistics off: {counting}.\n\n",
            rates(copies)
        ));
        for (of, least, what) in its_goals {
            let ratio = medians(copies, |r: &Vec<f64>| r[*of] / r[EMPTY]);
            goals.push(Goal::at_least(*least, what, &ratio));
        }
    }
    Ok(BenchResult { text, goals })
}

fn rates(copies: &[Vec<Vec<f64>>]) -> String {
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        [
            (*name).to_owned(),
            format!("{:.0}", medians(copies, |r| r[i]).median()),
            medians(copies, |r| r[i] / r[NONE]).with_range(3),
            medians(copies, |r| r[i] / r[EMPTY]).with_range(3),
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
