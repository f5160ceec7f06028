//! Connections per second with the agent, with an empty program, and with none, interleaved.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use rto_testbed::{cgroup::Cgroup, env::TestEnv, foreign::Foreign, workload::rate::Rate};

use crate::{
    overhead::{COUNT_ALL, COUNT_NOTHING, ELSEWHERE, POLICY, ensure_untimed, interleaved},
    process::helper,
    result::{BenchResult, Goal, table},
    sample::Sample,
    suite::SampleSizes,
};

/// Least where no entry matches, relative to an empty program.
const UNMATCHED_GOAL: f64 = 0.995;

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
        let mut env = TestEnv::of(programs.join("rto-agent"))?;
        env.configure(configuration)?;
        env.start()?;
        worlds.push(env);
    }
    let without_agent = [bare.path(), empty.path()].into_iter();
    let paths: Vec<&Path> = without_agent
        .chain(worlds.iter().map(|env| env.cgroup.path()))
        .collect();
    let mut port = PORT;
    let mut text = String::new();
    let mut goals = Vec::new();
    for (ends, accepts_in, whats, goal) in [
        (
            "the connecting end",
            Some(bare.path()),
            [
                "connections per second with the agent, relative to an empty program",
                "the same where no entry matches",
            ],
            0.99,
        ),
        (
            "both ends",
            None,
            [
                "the same with the agent at both ends",
                "the same where no entry matches, with the agent at both ends",
            ],
            0.98,
        ),
    ] {
        let mut traffic = Vec::new();
        for cgroup in &paths {
            port += 1;
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let program = helper(programs);
            let netns = &worlds[0].net.client;
            let mut rate = Rate::start(&program, netns, cgroup, accepts_in, on)?;
            rate.connections(WARM_UP)?;
            traffic.push(rate);
        }
        let mut all: Vec<&mut Rate> = traffic.iter_mut().collect();
        let all: &mut [&mut Rate; N] = all.as_mut_slice().try_into()?;
        let mut rounds = Vec::new();
        for _ in 0..sizes.rounds {
            rounds.push(interleaved(sizes.connections, all)?);
        }
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
        text.push_str(&format!(
            "The program at {ends}:\n\n{}\n",
            table(head, rows)
        ));
        for ((what, of), least) in whats
            .into_iter()
            .zip([ON, UNMATCHED])
            .zip([goal, UNMATCHED_GOAL])
        {
            let ratio = sample(&|r| r[of] / r[EMPTY]);
            goals.push(Goal {
                what,
                limit: if least == 0.98 {
                    "at least 0.98"
                } else if least == 0.99 {
                    "at least 0.99"
                } else {
                    "at least 0.995"
                },
                measured: ratio.with_quartiles(3),
                met: ratio.median() >= least,
            });
        }
    }
    Ok(BenchResult { text, goals })
}
