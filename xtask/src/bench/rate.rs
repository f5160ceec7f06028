//! Connections a second: with the agent, with an empty program, and with none, by turns.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use rto_testbed::{cgroup::Cgroup, env::TestEnv, foreign::Foreign, workload::rate::Rate};

use super::{
    Sample,
    overhead::{by_turns, ensure_untimed},
    page::{Amount, Found, Goal, table},
};

/// Least with the agent, in those with an empty program.
const GOAL: f64 = 0.99;

const WARM_UP: u32 = 500;
/// The first port of the listeners is the one after it.
const PORT: u16 = 7200;

const NAMES: [&str; 4] = [
    "no program",
    "empty program",
    "agent, no entry matches",
    "agent, a policy matches",
];
const NONE: usize = 0;
const EMPTY: usize = 1;
const MATCHES: usize = 3;

pub(super) fn run(amount: Amount, programs: &Path) -> anyhow::Result<Found> {
    ensure_untimed()?;
    let bare = Cgroup::new()?;
    let empty = Cgroup::new()?;
    let _program = Foreign::attach_empty(empty.path())?;
    let mut worlds = [
        TestEnv::of(programs.join("rto-agent"))?,
        TestEnv::of(programs.join("rto-agent"))?,
    ];
    worlds[0].configure("[policy.other]\ncidrs = [\"10.0.0.0/24\"]\ninitial_rto = \"100ms\"\n")?;
    worlds[1].configure(
        "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n",
    )?;
    for world in &mut worlds {
        world.start()?;
    }
    let paths = [
        bare.path(),
        empty.path(),
        worlds[0].cgroup.path(),
        worlds[1].cgroup.path(),
    ];
    let mut port = PORT;
    let mut text = String::new();
    let mut goals = Vec::new();
    for (ends, accepts_in, what) in [
        (
            "the connecting end",
            Some(bare.path()),
            "connections a second with the agent, of those with an empty program",
        ),
        ("both ends", None, "the same, with the agent at both ends"),
    ] {
        let mut traffic = Vec::new();
        for cgroup in paths {
            port += 1;
            let on = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let program = programs.join("rto-workload");
            let netns = &worlds[0].net.client;
            let mut rate = Rate::start(&program, netns, cgroup, accepts_in, on)?;
            rate.connections(WARM_UP)?;
            traffic.push(rate);
        }
        let mut all: Vec<&mut Rate> = traffic.iter_mut().collect();
        let all: &mut [&mut Rate; 4] = all.as_mut_slice().try_into()?;
        let mut rounds = Vec::new();
        for _ in 0..amount.pairs {
            rounds.push(by_turns(amount.connections, all)?);
        }
        let sample = |of: &dyn Fn(&[f64; 4]) -> f64| Sample::of(rounds.iter().map(of));
        let spread = |sample: &Sample| {
            let [low, median, high] = [1, 2, 3].map(|quarter| sample.quarter(quarter));
            format!("{median:.3} ({low:.3} to {high:.3})")
        };
        let rows = NAMES.iter().enumerate().map(|(i, name)| {
            [
                (*name).to_owned(),
                format!("{:.0}", sample(&|r| r[i]).median()),
                spread(&sample(&|r| r[i] / r[NONE])),
                spread(&sample(&|r| r[i] / r[EMPTY])),
            ]
        });
        let head = ["", "connections a second", "of none", "of the empty one"];
        text.push_str(&format!(
            "The program at {ends}:\n\n{}\n",
            table(head, rows)
        ));
        let ratio = sample(&|r| r[MATCHES] / r[EMPTY]);
        goals.push(Goal {
            what,
            wanted: "at least 0.99",
            measured: spread(&ratio),
            met: ratio.median() >= GOAL,
        });
    }
    Ok(Found { text, goals })
}
