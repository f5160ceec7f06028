//! Simulation of `initial_rto = "auto"`: the effects of the control law, the budget and the fuse on connections.
//!
//! Nothing is measured: hosts, paths and losses are generated. The control law is `rto_model::tune`, which the daemon
//! also runs.

mod agenda;
mod brakes;
pub mod criteria;
pub mod fleet;
pub mod handshake;
pub mod host;
pub mod overload;
pub mod path;
pub mod scenarios;
mod tables;

use rto_agent_common::brake::Brake;
use rto_testbed::machine::Machine;

use self::{
    fleet::Prefix,
    host::Control,
    overload::{Sums, Timers, Trouble},
    path::Path,
    scenarios::{Course, Step, auto, course, evening, fixed, flapping, in_parallel, step},
};
use crate::{interrupt, report::Report};

/// Extent of the simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Generated prefixes.
    pub prefixes: usize,
    /// Duration, seconds.
    pub seconds: u32,
    /// Duration of the long scenarios, hours: a metropolitan path and a flapping path. The
    /// evening's queue takes four times as long.
    pub hours: u32,
    /// Connections per second of the steps.
    pub rates: &'static [f64],
    /// The largest server near its capacity, SYNs per second.
    pub server_per_s: f64,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Seeds of the metropolitan path.
const METRO_RUNS: u64 = 4;
/// Connections that pay for a copy, in the program.
const CONNECTIONS: u32 = Brake::BUDGET_COST.cast_unsigned();
/// The timer of the budget's scenarios, jiffies: 24 ms.
const SHORT: u64 = 6;

/// A scenario with several values of `initial_rto`, each with its name.
pub type Compared = Vec<(String, Course)>;

/// A disturbance with each kind of timer.
#[derive(Clone, Debug, PartialEq)]
pub struct Braked {
    /// Description.
    pub name: &'static str,
    /// The kernel's own timers.
    pub kernel: Sums,
    /// 24 ms.
    pub fixed: Sums,
    /// The same with a budget.
    pub budget: Sums,
}

/// A server near its capacity, with each kind of timer.
#[derive(Clone, Debug, PartialEq)]
pub struct Saturated {
    /// Its capacity, SYNs per second.
    pub per_s: f64,
    /// Duration of its stall, seconds.
    pub stall_s: f64,
    /// Attempts per second, as a share of its capacity.
    pub load: f64,
    /// The kernel's own timers.
    pub kernel: Sums,
    /// 24 ms.
    pub fixed: Sums,
    /// The same with a budget.
    pub budget: Sums,
    /// With a budget in which 2 connections pay for a copy.
    pub half: Sums,
    /// With a budget in which 5 connections pay for a copy.
    pub fifth: Sums,
}

/// Everything that was simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// The fleet.
    pub prefixes: Vec<Prefix>,
    /// A constant path.
    pub metro: Compared,
    /// A flapping path.
    pub flapping: Compared,
    /// A path with a queue each evening.
    pub evening: Compared,
    /// Steps by [`Options::rates`].
    pub steps: Vec<Step>,
    /// The same with 24 ms.
    pub fixed_steps: Vec<Step>,
    /// As [`Results::steps`], but the daemon dies at the step.
    pub orphans: Vec<Step>,
    /// Effects of the budget.
    pub braked: Vec<Braked>,
    /// Effects of the budget on servers near their capacity.
    pub saturated: Vec<Saturated>,
}

/// Runs all simulations.
pub fn simulate(options: &Options) -> Results {
    let Options { hours, seed, .. } = *options;
    let prefixes = fleet::run(options.prefixes, options.seconds, seed);
    let steps = |control: fn() -> Control, daemon: bool| {
        in_parallel(options.rates, |per_s| step(*per_s, control(), daemon, seed))
    };
    let compared = |path: &Path, seconds: u32, values: &[(Control, u64)]| {
        in_parallel(values, |(control, seed)| {
            let course = course(path.clone(), control.clone(), seconds, *seed);
            (control.name(), course)
        })
    };
    let long = hours * 3_600;
    let metro = (0..METRO_RUNS).map(|run| (auto(), seed + run));
    let metro: Vec<_> = metro.chain([24, 100].map(|ms| (fixed(ms), seed))).collect();
    let with = |ms: u64| [(auto(), seed), (fixed(ms), seed)];
    Results {
        prefixes,
        metro: compared(&Path::metro(20.0), long / 4, &metro),
        flapping: compared(&flapping(20.0, hours), long, &with(100)),
        evening: compared(&evening(20.0), long * 4, &with(52)),
        steps: steps(auto, true),
        fixed_steps: steps(|| fixed(24), true),
        orphans: steps(auto, false),
        braked: braked(seed),
        saturated: saturated(options.server_per_s, seed),
    }
}

/// Duration of a simulation near capacity, seconds.
const SATURATED_S: f64 = 60.0;
/// Servers near their capacity, SYNs per second, and the duration of their stall, seconds. The
/// first handles a short queue well within the timer, the second not always, and the queue of the
/// third takes longer than the timer even without a stall.
const SERVERS: [(f64, f64); 3] = [(10_000.0, 0.3), (1_000.0, 0.3), (100.0, 0.0)];

/// Effects of the budget on servers up to this capacity, SYNs per second, at 80 and 90 % load.
pub fn saturated(most_per_s: f64, seed: u64) -> Vec<Saturated> {
    let one = |&(per_s, stall_s, load): &(f64, f64, f64)| {
        let trouble = Trouble::Limit {
            per_s,
            queue: 0.4 * per_s,
            stall_s,
        };
        let run = |timers| overload::run(trouble, timers, load * per_s, SATURATED_S, seed);
        let priced = |connections| run(Timers::Budgeted(SHORT, connections));
        Saturated {
            per_s,
            stall_s,
            load,
            kernel: run(Timers::Kernel),
            fixed: run(Timers::Fixed(SHORT)),
            budget: priced(CONNECTIONS),
            half: priced(2),
            fifth: priced(5),
        }
    };
    let servers = SERVERS.iter().filter(|(per_s, _)| *per_s <= most_per_s);
    let loads: Vec<_> = servers
        .flat_map(|(per_s, stall_s)| [0.8, 0.9].map(|load| (*per_s, *stall_s, load)))
        .collect();
    in_parallel(&loads, one)
}

/// Effects of the budget in a short and a longer overload, and in a short and a long blackout.
pub fn braked(seed: u64) -> Vec<Braked> {
    let limit = Trouble::Limit {
        per_s: 100.0,
        queue: 40.0,
        stall_s: 0.0,
    };
    let blackout = |seconds: f64| Trouble::Blackout {
        from_s: 10.0,
        to_s: 10.0 + seconds,
    };
    let (short, long) = (blackout(0.3), blackout(10.0));
    let all = [
        (
            "overload: 120 attempts a second, 100 answered, for 20 s",
            limit,
            120.0,
            20.0,
        ),
        ("the same for 60 s", limit, 120.0, 60.0),
        (
            "blackout of 0.3 s in 40 s, 100 attempts a second",
            short,
            100.0,
            40.0,
        ),
        (
            "blackout of 10 s in 40 s, 100 attempts a second",
            long,
            100.0,
            40.0,
        ),
    ];
    let one = |(name, trouble, per_s, seconds)| {
        let run = |timers| overload::run(trouble, timers, per_s, seconds, seed);
        Braked {
            name,
            kernel: run(Timers::Kernel),
            fixed: run(Timers::Fixed(SHORT)),
            budget: run(Timers::Budgeted(SHORT, CONNECTIONS)),
        }
    };
    all.map(one).to_vec()
}

/// Runs all simulations and makes the report.
pub fn run(options: &Options) -> anyhow::Result<Report> {
    let results = simulate(options);
    interrupt::check()?;
    Ok(tables::report(&results, options, Machine::here()?))
}
