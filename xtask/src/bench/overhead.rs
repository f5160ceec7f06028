//! `cargo xtask bench overhead`: what the agent's statistics cost.
//!
//! Two agents with the same policy, each at a cgroup of its own, one with everything counted that it
//! can count and one with `statistics = false`. Connections over loopback, by turns in the one and the
//! other: what else happens on the host falls on both. Callbacks are those of both ends. Connects per
//! second are compared with the agent at the connecting end alone, as the host has it that connects,
//! and at both, which costs twice as much. The time of a callback is the kernel's, which has its
//! reading of the clock in it (60 ns on a virtual machine).

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    cgroup::Cgroup,
    env::TestEnv,
    foreign::{Runs, count_runs, runs_of},
    workload::rate::Rate,
};

use super::{Sample, go_on};

/// `cargo xtask bench overhead`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often each is compared with the other
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Connections of each in a comparison
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    connections: u32,
    /// Fail if a goal is missed
    #[arg(long)]
    strict: bool,
}

const POLICY: &str =
    "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n";
const COUNTING: &str = "statistics = true\ncount_unlisted = true\nrtt_sampling = \"1ms\"\n";
const NOT_COUNTING: &str = "statistics = false\n";

/// Most that a callback may take, in callbacks without statistics.
const CALLBACK_GOAL: f64 = 1.5;
/// Least connections per second, in those without statistics.
const RATE_GOAL: f64 = 0.98;

/// Connections before it is another's turn: few, so that what disturbs lasts longer than a turn.
const TURN: u32 = 100;
/// Connections before anything is measured.
const WARM_UP: u32 = 1000;
/// The first port of the listeners is the one after it.
const PORT: u16 = 7000;

const NONE: &str = "no agent";
const OFF: &str = "statistics off";
const ON: &str = "everything on";

/// Refuses to measure while the kernel does.
pub(super) fn ensure_untimed() -> anyhow::Result<()> {
    let counted = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled")?;
    ensure!(
        counted.trim() == "0",
        "the kernel times every BPF program, which costs time itself: sysctl kernel.bpf_stats_enabled=0"
    );
    Ok(())
}

pub(crate) fn run(args: &Args, programs: &Path) -> anyhow::Result<()> {
    ensure_untimed()?;
    let (off, on) = (world(programs, NOT_COUNTING)?, world(programs, COUNTING)?);
    let bare = Cgroup::new()?;
    let mut port = PORT;
    let mut traffic = |cgroup: &Path, accepts_in: Option<&Path>| {
        port += 1;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let program = programs.join("rto-workload");
        // All in one namespace: what is not the agent is the same for all.
        let mut rate = Rate::start(&program, &off.net.client, cgroup, accepts_in, address)?;
        rate.connections(WARM_UP)?;
        anyhow::Ok(rate)
    };
    let outside = Some(bare.path());
    let mut without_one = traffic(off.cgroup.path(), outside)?;
    let mut with_one = traffic(on.cgroup.path(), outside)?;
    let mut none = traffic(bare.path(), None)?;
    let mut without = traffic(off.cgroup.path(), None)?;
    let mut with = traffic(on.cgroup.path(), None)?;
    println!(
        "{} pairs of {} connections each: a byte each way\n",
        args.pairs, args.connections
    );
    let programs = [program_id(&off)?, program_id(&on)?];
    let callback = callback_time(args, programs, [&mut without, &mut with])?;
    println!("the agent at both ends");
    rates(args, [&mut none, &mut without, &mut with])?;
    println!("the agent at the connecting end");
    let rate = rates(args, [&mut none, &mut without_one, &mut with_one])?;
    let good = [
        judge(
            "callback time",
            callback,
            CALLBACK_GOAL,
            callback <= CALLBACK_GOAL,
        ),
        judge("connects per second", rate, RATE_GOAL, rate >= RATE_GOAL),
    ];
    ensure!(!args.strict || good == [true; 2], "a goal is missed");
    Ok(())
}

/// An agent with the policy and these settings.
fn world(programs: &Path, settings: &str) -> anyhow::Result<TestEnv> {
    let mut world = TestEnv::of(programs.join("rto-agent"))?;
    world.configure(&format!("{settings}{POLICY}"))?;
    world.start()?;
    Ok(world)
}

pub(super) fn program_id(world: &TestEnv) -> anyhow::Result<u64> {
    let status = world.json(&["status"])?;
    let id = status["attachment"]["program_id"].as_u64();
    id.context("the agent does not say which program is its own")
}

/// What the callbacks of some connections took.
#[derive(Clone, Copy)]
pub(super) struct Callbacks {
    pub(super) count: f64,
    pub(super) nanos: f64,
}

impl Callbacks {
    pub(super) fn between(before: Runs, after: Runs) -> Self {
        Self {
            count: (after.count - before.count) as f64,
            nanos: (after.time - before.time).as_secs_f64() * 1e9,
        }
    }

    pub(super) fn mean(self) -> f64 {
        self.nanos / self.count
    }
}

/// The first goal: a callback's mean time with everything on, by that with statistics off.
fn callback_time(
    args: &Args,
    programs: [u64; 2],
    mut traffic: [&mut Rate; 2],
) -> anyhow::Result<f64> {
    let _counting = count_runs()?;
    let runs = || anyhow::Ok([runs_of(programs[0])?, runs_of(programs[1])?]);
    let mut pairs = Vec::new();
    for _ in 0..args.pairs {
        let before = runs()?;
        by_turns(args.connections, &mut traffic)?;
        let after = runs()?;
        let pair = [0, 1].map(|i| Callbacks::between(before[i], after[i]));
        ensure!(pair.iter().all(|c| c.count > 0.0), "a program never ran");
        pairs.push(pair);
    }
    let connections = f64::from(args.connections);
    println!(
        "{:16}{:>12}{:>24}{:>16}",
        "", "ns/callback", "callbacks/connection", "ns/connection"
    );
    for (i, name) in [OFF, ON].into_iter().enumerate() {
        let median =
            |of: fn(Callbacks) -> f64| Sample::of(pairs.iter().map(|pair| of(pair[i]))).median();
        println!(
            "{name:16}{:12.1}{:24.1}{:16.0}",
            median(Callbacks::mean),
            median(|c| c.count) / connections,
            median(|c| c.nanos) / connections,
        );
    }
    let ratio =
        |of: fn(Callbacks) -> f64| Sample::of(pairs.iter().map(|[off, on]| of(*on) / of(*off)));
    let callback = ratio(Callbacks::mean);
    println!("on/off: ns/callback    {callback}");
    println!("        ns/connection  {}\n", ratio(|c| c.nanos));
    Ok(callback.median())
}

/// The second goal: connections per second with everything on, by those with statistics off.
fn rates(args: &Args, mut traffic: [&mut Rate; 3]) -> anyhow::Result<f64> {
    let mut rounds = Vec::new();
    for _ in 0..args.pairs {
        rounds.push(by_turns(args.connections, &mut traffic)?);
    }
    println!("{:16}{:>24}", "", "connections/second");
    for (i, name) in [NONE, OFF, ON].into_iter().enumerate() {
        let median = Sample::of(rounds.iter().map(|round| round[i])).median();
        println!("{name:16}{median:24.0}");
    }
    let ratio = Sample::of(rounds.iter().map(|[_, off, on]| on / off));
    println!("on/off:   {ratio}");
    let agent = Sample::of(rounds.iter().map(|[none, off, _]| off / none));
    println!("off/none: {agent}\n");
    Ok(ratio.median())
}

/// So many connections of each, some of the one and then some of the other, each time in the opposite
/// order; how many a second each made. The median of the turns, as one in which another process of the
/// host had the CPU says nothing.
pub(super) fn by_turns<const N: usize>(
    connections: u32,
    traffic: &mut [&mut Rate; N],
) -> anyhow::Result<[f64; N]> {
    let mut rates = [const { Vec::new() }; N];
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    let mut left = connections;
    while left > 0 {
        go_on()?;
        let count = left.min(TURN);
        for i in order {
            let took = traffic[i].connections(count)?;
            rates[i].push(f64::from(count) / took.as_secs_f64());
        }
        order.reverse();
        left -= count;
    }
    Ok(rates.map(|rates| Sample::of(rates.into_iter()).median()))
}

fn judge(what: &str, ratio: f64, goal: f64, good: bool) -> bool {
    let verdict = if good { "good" } else { "MISSED" };
    println!("{what}: {ratio:.3}x (goal {goal}x) {verdict}");
    good
}
