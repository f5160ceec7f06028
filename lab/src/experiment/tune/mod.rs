//! Simulation of `initial_rto = "auto"`: the effects of the control law and the fallbacks on connections.
//!
//! Nothing is measured: hosts, paths and losses are generated. The control law is `rto_model::tune`, which the daemon
//! also runs.

mod agenda;
pub mod criteria;
mod fallbacks;
pub mod fleet;
pub mod handshake;
pub mod host;
pub mod overload;
pub mod path;
pub mod scenarios;
mod tables;

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
/// The timer of outages and of servers near their capacity, jiffies: 100 ms.
const SHORT: u64 = 25;

/// A scenario with several values of `initial_rto`, each with its name.
pub type Compared = Vec<(String, Course)>;

/// The same trouble with each kind of timer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// The kernel's own.
    pub kernel: Sums,
    /// 100 ms, without fallbacks.
    pub bare: Sums,
    /// The same with fallbacks.
    pub guarded: Sums,
}

impl Timed {
    fn run(trouble: Trouble, per_s: f64, seconds: f64, seed: u64) -> Self {
        let run = |timers| overload::run(trouble, timers, per_s, seconds, seed);
        Self {
            kernel: run(Timers::Kernel),
            bare: run(Timers::Bare(SHORT)),
            guarded: run(Timers::Guarded(SHORT)),
        }
    }

    /// How much earlier attempts that began in the outage are established than with the kernel's own timers: without
    /// and with fallbacks, milliseconds.
    pub fn gains_ms(&self) -> [f64; 2] {
        [self.bare, self.guarded].map(|sums| self.kernel.outage_ms() - sums.outage_ms())
    }
}

/// An outage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outage {
    /// Its duration, seconds.
    pub seconds: f64,
    /// Attempts per second.
    pub per_s: f64,
    /// The results.
    pub timed: Timed,
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
    /// The results.
    pub timed: Timed,
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
    /// Outages.
    pub outages: Vec<Outage>,
    /// Servers near and above their capacity.
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
        outages: outages(seed),
        saturated: saturated(options.server_per_s, seed),
    }
}

/// Outages of each kind; ten times as many at a low rate.
const OUTAGE_RUNS: u64 = 20;
/// Duration of a simulation near capacity, seconds.
const SATURATED_S: f64 = 60.0;
/// Servers near their capacity, SYNs per second, and the duration of their stall, seconds. The
/// first handles a short queue well within the timer, the second not always, and the queue of the
/// third takes longer than the timer even without a stall.
const SERVERS: [(f64, f64); 3] = [(10_000.0, 0.3), (1_000.0, 0.3), (100.0, 0.0)];

/// Servers up to this capacity, SYNs per second, at 80, 90 and 120 % load.
pub fn saturated(most_per_s: f64, seed: u64) -> Vec<Saturated> {
    let one = |&(per_s, stall_s, load): &(f64, f64, f64)| {
        let trouble = Trouble::Limit {
            per_s,
            queue: 0.4 * per_s,
            stall_s,
        };
        Saturated {
            per_s,
            stall_s,
            load,
            timed: Timed::run(trouble, load * per_s, SATURATED_S, seed),
        }
    };
    let servers = SERVERS.iter().filter(|(per_s, _)| *per_s <= most_per_s);
    let loads: Vec<_> = servers
        .flat_map(|(per_s, stall_s)| [0.8, 0.9, 1.2].map(|load| (*per_s, *stall_s, load)))
        .collect();
    in_parallel(&loads, one)
}

/// Outages of the durations and rates by which the fallbacks are judged, and a black hole of 12 s.
pub fn outages(seed: u64) -> Vec<Outage> {
    const BEGIN_S: f64 = 10.0;
    let durations = [0.3, 1.0, 1.7, 4.0];
    let all = durations.map(|seconds| [2.0, 20.0, 200.0].map(|per_s| (seconds, per_s)));
    let all: Vec<_> = all.into_iter().flatten().chain([(12.0, 50.0)]).collect();
    in_parallel(&all, |&(seconds, per_s)| {
        let trouble = Trouble::Blackout {
            from_s: BEGIN_S,
            to_s: BEGIN_S + seconds,
        };
        let runs = OUTAGE_RUNS * if per_s < 10.0 { 10 } else { 1 };
        let mut sum: Option<Timed> = None;
        for run in 0..runs {
            let one = Timed::run(trouble, per_s, BEGIN_S + seconds + 40.0, seed + run);
            sum = Some(sum.map_or(one, |sum| Timed {
                kernel: sum.kernel.plus(&one.kernel),
                bare: sum.bare.plus(&one.bare),
                guarded: sum.guarded.plus(&one.guarded),
            }));
        }
        Outage {
            seconds,
            per_s,
            timed: sum.unwrap_or_else(|| Timed::run(trouble, per_s, 1.0, seed)),
        }
    })
}

/// Runs all simulations and makes the report.
pub fn run(options: &Options) -> anyhow::Result<Report> {
    let results = simulate(options);
    interrupt::check()?;
    Ok(tables::report(&results, options, Machine::here()?))
}
