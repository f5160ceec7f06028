//! Many generated prefixes, each with a host of its own.

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::{
    history::HOUR_MS,
    law::Settings,
    tuner::{Cause, Phase},
};

use super::{
    host::{HZ, Host, Outcome},
    path::Path,
    scenarios::{auto, in_parallel},
};
use crate::{interrupt, summary::f};

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
    let numbers: Vec<usize> = (0..count).collect();
    let all = in_parallel(&numbers, |n| {
        (!interrupt::interrupted()).then(|| one(*n, seconds, seed))
    });
    all.into_iter().flatten().collect()
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
    let mut host = Host::new(path.clone(), auto(), own_seed, 0);
    host.run(seconds, true);
    let outcome = host.end();
    let mut rng = ChaCha8Rng::seed_from_u64(own_seed ^ 1);
    summary(&path, &outcome, seconds, &mut rng)
}

fn summary(path: &Path, outcome: &Outcome, seconds: u32, rng: &mut ChaCha8Rng) -> Prefix {
    let settings = Settings::new(HZ);
    let bounds = [settings.clamped(0), settings.largest()];
    let timer = outcome.timer.filter(|jiffies| !bounds.contains(jiffies));
    let ratio = timer.map(|jiffies| {
        let quantile_us = path.quantile_us(0.999, 0.0, seconds.into(), DRAWS, rng);
        f(settings.micros(jiffies)) / (2.0 * quantile_us)
    });
    let transitions = &outcome.transitions;
    let alarm = |cause| [Cause::Alarm, Cause::Fuse].contains(&cause);
    let steady = transitions.iter().find(|t| t.to == Phase::Steady);
    let changes_per_h = steady.and_then(|steady| {
        let settled_ms = steady.at_ms.max(HOUR_MS);
        let hours = (f64::from(seconds) - f(settled_ms) / 1e3) / 3_600.0;
        let changes = transitions
            .iter()
            .filter(|t| t.at_ms > settled_ms && t.is_change());
        (hours > 0.5).then_some(f(changes.count() as u64) / hours)
    });
    Prefix {
        shape: path.shape.name(),
        eventful: !path.events.is_empty(),
        connections: outcome.connections,
        spurious: outcome.spurious_share(),
        ratio,
        alarms: transitions.iter().filter(|t| alarm(t.cause)).count() as u64,
        changes_per_h,
        per_s: path.per_s,
        saved_ms: outcome.saved_ms(),
    }
}
