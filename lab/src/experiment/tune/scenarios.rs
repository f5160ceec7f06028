//! Hosts with a single event, with a self-tuning timer and with fixed ones.

use std::{
    iter,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use rto_model::tune::law::Settings;

use super::{
    host::{Control, FellBack, HZ, Host, Outcome, Point},
    path::{Change, Path, Shape},
};
use crate::summary::share;

/// The last second before the step; an hour has ended by then.
pub const STEP_S: u32 = 4_000;
/// Time of the step, seconds: between two steps of the daemon, so that the next one sees part of
/// it.
const STEP_AT_S: f64 = 4_000.6;
/// Simulated time after the step, seconds.
const AFTER_STEP_S: u32 = 600;
/// The factor that turns a path of 10 ms into one of 150 ms.
const STEP: f64 = 15.0;

/// A value in milliseconds as jiffies.
pub fn fixed(ms: u64) -> Control {
    Control::Fixed(ms * u64::from(HZ) / 1000)
}

/// The timer of `initial_rto = "auto"`.
pub fn auto() -> Control {
    Control::Auto(Settings::new(HZ))
}

/// The results of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Course {
    /// Share of connections with a spurious copy, 0 to 1.
    pub spurious: f64,
    /// The share in the worst five minutes, 0 to 1.
    pub worst: f64,
    /// Time saved per connection, milliseconds.
    pub saved_ms: f64,
    /// Changes of the value.
    pub changes: usize,
    /// The timer at the end, milliseconds.
    pub timer_ms: f64,
}

/// Five minutes, seconds.
const POINT_S: u32 = 300;

/// Simulates a host for this time.
pub fn course(path: Path, control: Control, seconds: u32, seed: u64) -> Course {
    let mut host = Host::new(path, control, seed, POINT_S);
    host.run(seconds, true);
    let outcome = host.end();
    let shares = outcome.points.iter().map(Point::spurious_share);
    Course {
        spurious: outcome.spurious_share(),
        worst: shares.fold(0.0, f64::max),
        saved_ms: outcome.saved_ms(),
        changes: changes(&outcome, 0),
        timer_ms: outcome.points.last().map_or(0.0, |point| point.timer_ms),
    }
}

fn changes(outcome: &Outcome, after_ms: u64) -> usize {
    let after = outcome.transitions.iter().filter(|t| t.at_ms > after_ms);
    after.filter(|t| t.is_change()).count()
}

/// The results of a step from 10 to 150 ms.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Connections per second.
    pub per_s: f64,
    /// Connections with a spurious copy within ten minutes.
    pub spurious: u64,
    /// Share of connections with a spurious copy among those started three seconds after the step
    /// or later, 0 to 1.
    pub later: f64,
    /// The last second in which one connection in a hundred had a spurious copy.
    pub clean_after_s: f64,
    /// Changes of the value in ten minutes.
    pub changes: usize,
    /// The timer five seconds after the step, milliseconds.
    pub timer_ms: f64,
    /// The fallback (spurious), if any; its time is seconds after the step.
    pub fell_back: Option<FellBack>,
    /// The time series, with a point for each second.
    pub points: Vec<Point>,
}

/// A path whose round trips become 15 times as long after [`STEP_S`].
pub fn step_path(per_s: f64) -> Path {
    Path {
        events: vec![(STEP_AT_S..f64::INFINITY, Change::Factor(STEP))],
        ..Path::metro(per_s)
    }
}

/// Simulates a step; `daemon`: whether the daemon stays alive.
pub fn step(per_s: f64, control: Control, daemon: bool, seed: u64) -> Step {
    let mut host = Host::new(step_path(per_s), control, seed, 1);
    host.run(STEP_S, true);
    let spurious = host.outcome().spurious;
    host.run(5, daemon);
    let timer_ms = host
        .outcome()
        .points
        .last()
        .map_or(0.0, |point| point.timer_ms);
    host.run(AFTER_STEP_S - 5, daemon);
    let outcome = host.end();
    let begin_s = STEP_AT_S;
    let after: Vec<Point> = outcome
        .points
        .iter()
        .copied()
        .filter(|point| point.at_s > begin_s)
        .collect();
    let later = after.get(3..).unwrap_or_default();
    let sum = |count: fn(&Point) -> u64| later.iter().map(count).sum();
    let unclean = after.iter().rfind(|point| point.spurious_share() >= 0.01);
    Step {
        per_s,
        spurious: outcome.spurious - spurious,
        later: share(sum(|point| point.spurious), sum(|point| point.connections)),
        clean_after_s: unclean.map_or(0.0, |point| point.at_s - begin_s),
        changes: changes(&outcome, u64::from(STEP_S) * 1000),
        timer_ms,
        fell_back: outcome.fell_back.map(|fell_back| FellBack {
            at_s: fell_back.at_s - begin_s,
            ..fell_back
        }),
        points: after,
    }
}

/// A path that is 15 times as long every other ten minutes.
pub fn flapping(per_s: f64, hours: u32) -> Path {
    let events = (0..hours * 3).map(|n| {
        let from_s = f64::from(n) * 1_200.0 + 600.0;
        (from_s..from_s + 600.0, Change::Factor(STEP))
    });
    Path {
        events: events.collect(),
        ..Path::metro(per_s)
    }
}

/// A path with a queue each evening.
pub fn evening(per_s: f64) -> Path {
    Path {
        shape: Shape::Evening { wait: 2.6 },
        ..Path::metro(per_s)
    }
}

/// Calls `work` for each item, on all CPUs; returns the results in order.
pub(super) fn in_parallel<I: Sync, T: Send>(all: &[I], work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let worker = || {
        let numbers = iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let taken = numbers.map_while(|n| Some((n, work(all.get(n)?))));
        taken.collect::<Vec<_>>()
    };
    let mut done = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let done = workers.into_iter().filter_map(|worker| worker.join().ok());
        done.flatten().collect::<Vec<_>>()
    });
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, one)| one).collect()
}
