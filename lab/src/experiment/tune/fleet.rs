//! Many generated prefixes, each with a host of its own.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::{
    history::HOUR_MS,
    law::Settings,
    tuner::{Cause, Phase},
};

use super::{
    host::{Control, HZ, Host, Outcome},
    path::Path,
};
use crate::interrupt;

/// Draws for a path's own quantile.
const DRAWS: usize = 100_000;

/// What came of one prefix.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    /// Its shape.
    pub shape: &'static str,
    /// Whether something happens to it.
    pub eventful: bool,
    /// Connections.
    pub connections: u64,
    /// Those with a spurious copy, 0 to 1.
    pub spurious: f64,
    /// The timer at the end, by twice the quantile that one in a thousand exceeds; `None` where it is the kernel's own,
    /// or a bound of the settings.
    pub ratio: Option<f64>,
    /// Alarms and blown fuses.
    pub alarms: u64,
    /// Changes of the value an hour since it was steady, and the first hour was over; `None` if that was less than half
    /// an hour.
    pub changes_per_h: Option<f64>,
    /// Connections a second.
    pub per_s: f64,
    /// Saved by connection, milliseconds.
    pub saved_ms: f64,
}

/// Simulates so many prefixes for so long, on all processors. An interrupted one has fewer.
#[must_use]
pub fn run(count: usize, seconds: u32, seed: u64) -> Vec<Prefix> {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let mut done = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count || interrupt::interrupted() {
                return done;
            }
            done.push((n, one(n, seconds, seed)));
        }
    };
    let mut all = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let done = workers.into_iter().filter_map(|worker| worker.join().ok());
        done.flatten().collect::<Vec<_>>()
    });
    all.sort_by_key(|(n, _)| *n);
    all.into_iter().map(|(_, prefix)| prefix).collect()
}

/// The path of the n-th prefix, and a seed of its own.
#[must_use]
pub fn path(n: usize, seconds: u32, seed: u64) -> (Path, u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(n as u64);
    let path = Path::generated(n, seconds.into(), &mut rng);
    (path, rng.random())
}

fn one(n: usize, seconds: u32, seed: u64) -> Prefix {
    let (path, own_seed) = path(n, seconds, seed);
    let mut host = Host::new(path.clone(), Control::Auto(Settings::new(HZ)), own_seed, 0);
    host.run(seconds, true);
    let outcome = host.end();
    let mut rng = ChaCha8Rng::seed_from_u64(own_seed ^ 1);
    summary(&path, &outcome, seconds, &mut rng)
}

#[expect(clippy::cast_precision_loss, reason = "counts of some hours")]
fn summary(path: &Path, outcome: &Outcome, seconds: u32, rng: &mut ChaCha8Rng) -> Prefix {
    let settings = Settings::new(HZ);
    let bounds = [settings.clamped(0), settings.largest()];
    let timer = outcome.timer.filter(|jiffies| !bounds.contains(jiffies));
    let ratio = timer.map(|jiffies| {
        let quantile_us = path.quantile_us(0.999, 0.0, seconds.into(), DRAWS, rng);
        settings.micros(jiffies) as f64 / (2.0 * quantile_us)
    });
    let transitions = &outcome.transitions;
    let alarm = |cause| [Cause::Alarm, Cause::Fuse].contains(&cause);
    let steady = transitions.iter().find(|t| t.to == Phase::Steady);
    let changes_per_h = steady.and_then(|steady| {
        let settled_ms = steady.at_ms.max(HOUR_MS);
        let hours = (f64::from(seconds) - settled_ms as f64 / 1e3) / 3_600.0;
        let changes = transitions
            .iter()
            .filter(|t| t.at_ms > settled_ms && t.is_change());
        (hours > 0.5).then_some(changes.count() as f64 / hours)
    });
    let connections = outcome.connections.max(1) as f64;
    Prefix {
        shape: path.shape.name(),
        eventful: !path.events.is_empty(),
        connections: outcome.connections,
        spurious: outcome.spurious as f64 / connections,
        ratio,
        alarms: transitions.iter().filter(|t| alarm(t.cause)).count() as u64,
        changes_per_h,
        per_s: path.per_s,
        saved_ms: outcome.saved_us / 1e3 / connections,
    }
}
