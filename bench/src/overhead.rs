//! `cargo xtask bench overhead`: the cost of the agent's statistics.
//!
//! Two agents have the same policy, each at its own cgroup: one counts everything, the other has `statistics = false`.
//! Connections over loopback are interleaved between the two, so that other load of the host affects both. The
//! callbacks of both ends of a connection are counted. Connections per second are compared with the agent only at the
//! connecting end, as on a host that connects, and at both ends, which costs twice as much. The kernel (bpf_stats)
//! measures the time of a callback, including its own reading of the clock (60 ns on a virtual machine).

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

use crate::{
    process::{agent, check_signals, helper},
    sample::Sample,
};

/// `cargo xtask bench overhead`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds of the comparison
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Connections of each side in a round
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    connections: u32,
    /// Fail if a goal is missed
    #[arg(long)]
    strict: bool,
}

/// A policy that covers the loopback addresses.
pub(crate) const POLICY: &str =
    "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n";
/// The same with the timers of established connections.
pub(crate) const TIMERS: &str = "rto_min = \"8ms\"\ndelack_max = \"8ms\"\n";
/// A policy that does not cover them.
pub(crate) const ELSEWHERE: &str =
    "[policy.other]\ncidrs = [\"10.0.0.0/24\"]\ninitial_rto = \"100ms\"\n";
/// Settings of `[agent]` that count everything.
pub(crate) const COUNT_ALL: &str =
    "statistics = true\ncount_unmatched = true\nsampling = 1\nrtt_sampling = \"1ms\"\n";
/// Settings of `[agent]` that count nothing.
pub(crate) const COUNT_NOTHING: &str = "statistics = false\n";

/// Maximum time of a callback, relative to one without statistics.
const CALLBACK_GOAL: f64 = 1.5;
/// Minimum of connections per second, relative to no statistics.
const RATE_GOAL: f64 = 0.98;

/// Consecutive connections on one side: few, so that other load of the host lasts longer than a batch.
pub(crate) const BATCH: u32 = 100;
/// Connections before anything is measured.
const WARM_UP: u32 = 1000;
/// The port before the first listener's.
const PORT: u16 = 7000;

const NONE: &str = "no agent";
const OFF: &str = "statistics off";
const ON: &str = "everything on";

/// Fails if the kernel measures the time of every BPF program.
pub(crate) fn ensure_untimed() -> anyhow::Result<()> {
    let counted = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled")?;
    ensure!(
        counted.trim() == "0",
        "the kernel times every BPF program, which distorts the measurement: sysctl kernel.bpf_stats_enabled=0"
    );
    Ok(())
}

pub(crate) fn run(args: &Args, programs: &Path) -> anyhow::Result<()> {
    ensure_untimed()?;
    let off = agent(programs, &format!("{COUNT_NOTHING}{POLICY}"))?;
    let on = agent(programs, &format!("{COUNT_ALL}{POLICY}"))?;
    let bare = Cgroup::new()?;
    let mut port = PORT;
    let mut traffic = |cgroup: &Path, accepts_in: Option<&Path>| {
        port += 1;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let program = helper(programs);
        // One namespace for all: only the agent differs.
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
        "{} rounds of {} connections each, a byte each way\n",
        args.rounds, args.connections
    );
    let programs = [program_id(&off)?, program_id(&on)?];
    let callback = callback_time(args, programs, [&mut without, &mut with])?;
    println!("the agent at both ends");
    rates(args, [&mut none, &mut without, &mut with])?;
    println!("the agent at the connecting end");
    let rate = rates(args, [&mut none, &mut without_one, &mut with_one])?;
    let met = [
        judge(
            "callback time",
            callback,
            CALLBACK_GOAL,
            callback <= CALLBACK_GOAL,
        ),
        judge("connects per second", rate, RATE_GOAL, rate >= RATE_GOAL),
    ];
    ensure!(!args.strict || met == [true; 2], "a goal is missed");
    Ok(())
}

pub(crate) fn program_id(env: &TestEnv) -> anyhow::Result<u64> {
    let status = env.json(&["status"])?;
    let id = status["attachment"]["program_id"].as_u64();
    id.context("`status` does not name the agent's program")
}

/// The callbacks of some connections.
#[derive(Clone, Copy)]
pub(crate) struct Callbacks {
    pub(crate) count: f64,
    pub(crate) nanos: f64,
}

impl Callbacks {
    pub(crate) fn between(before: Runs, after: Runs) -> Self {
        Self {
            count: (after.count - before.count) as f64,
            nanos: (after.time - before.time).as_secs_f64() * 1e9,
        }
    }

    pub(crate) fn mean(self) -> f64 {
        self.nanos / self.count
    }
}

/// The first goal: mean time of a callback with everything on, relative to statistics off.
fn callback_time(
    args: &Args,
    programs: [u64; 2],
    mut traffic: [&mut Rate; 2],
) -> anyhow::Result<f64> {
    let _counting = count_runs()?;
    let runs = || anyhow::Ok([runs_of(programs[0])?, runs_of(programs[1])?]);
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let before = runs()?;
        interleaved(args.connections, BATCH, &mut traffic)?;
        let after = runs()?;
        let round = [0, 1].map(|i| Callbacks::between(before[i], after[i]));
        ensure!(round.iter().all(|c| c.count > 0.0), "a program never ran");
        rounds.push(round);
    }
    let connections = f64::from(args.connections);
    println!(
        "{:16}{:>12}{:>24}{:>16}",
        "", "ns/callback", "callbacks/connection", "ns/connection"
    );
    for (i, name) in [OFF, ON].into_iter().enumerate() {
        let median =
            |of: fn(Callbacks) -> f64| Sample::of(rounds.iter().map(|round| of(round[i]))).median();
        println!(
            "{name:16}{:12.1}{:24.1}{:16.0}",
            median(Callbacks::mean),
            median(|c| c.count) / connections,
            median(|c| c.nanos) / connections,
        );
    }
    let ratio =
        |of: fn(Callbacks) -> f64| Sample::of(rounds.iter().map(|[off, on]| of(*on) / of(*off)));
    let callback = ratio(Callbacks::mean);
    println!("on/off: ns/callback    {callback}");
    println!("        ns/connection  {}\n", ratio(|c| c.nanos));
    Ok(callback.median())
}

/// The second goal: connections per second with everything on, relative to statistics off.
fn rates(args: &Args, mut traffic: [&mut Rate; 3]) -> anyhow::Result<f64> {
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        rounds.push(interleaved(args.connections, BATCH, &mut traffic)?);
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

/// Makes this many connections on each side, in batches that alternate between the sides; returns the connections per
/// second of each side. This is the median of the batches, so that a batch during which another process had the CPU
/// does not count.
pub(crate) fn interleaved<const N: usize>(
    connections: u32,
    batch: u32,
    traffic: &mut [&mut Rate; N],
) -> anyhow::Result<[f64; N]> {
    let mut rates = [const { Vec::new() }; N];
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    let mut left = connections;
    while left > 0 {
        check_signals()?;
        let count = left.min(batch);
        for i in order {
            let took = traffic[i].connections(count)?;
            rates[i].push(f64::from(count) / took.as_secs_f64());
        }
        order.reverse();
        left -= count;
    }
    Ok(rates.map(|rates| Sample::of(rates).median()))
}

fn judge(what: &str, ratio: f64, goal: f64, is_met: bool) -> bool {
    let verdict = if is_met { "met" } else { "MISSED" };
    println!("{what}: {ratio:.3}x (goal {goal}x) {verdict}");
    is_met
}
