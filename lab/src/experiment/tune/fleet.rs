//! Many generated prefixes, each with its own host.

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::{
    history::HOUR_MS,
    law::Settings,
    tuner::{Cause, State},
};

use super::{
    host::{HZ, Host, Outcome},
    path::Path,
    scenarios::{auto, in_parallel},
};
use crate::{interrupt, summary::f};

/// Draws for a path's true quantile.
const DRAWS: usize = 100_000;

/// The results of one prefix.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    /// Its shape.
    pub shape: &'static str,
    /// Whether it has events.
    pub eventful: bool,
    /// Number of connections.
    pub connections: u64,
    /// Share of connections with a spurious copy, 0 to 1.
    pub spurious: f64,
    /// The timer at the end, divided by twice the true quantile that one in a thousand exceeds;
    /// `None` if the timer is the kernel's own, or at a limit of the settings.
    pub ratio: Option<f64>,
    /// Fallbacks (spurious).
    pub alarms: u64,
    /// Changes of the value per hour, from the first value and the end of the first hour on; `None`
    /// if that was less than half an hour.
    pub changes_per_h: Option<f64>,
    /// Connections per second.
    pub per_s: f64,
    /// Time saved per connection, milliseconds.
    pub saved_ms: f64,
}

/// Simulates this number of prefixes for this time, on all CPUs. If interrupted, it returns fewer.
pub fn run(count: usize, seconds: u32, seed: u64) -> Vec<Prefix> {
    let numbers: Vec<usize> = (0..count).collect();
    let all = in_parallel(&numbers, |n| {
        (!interrupt::interrupted()).then(|| one(*n, seconds, seed))
    });
    all.into_iter().flatten().collect()
}

/// The path of the n-th prefix, and its seed.
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
    let active = transitions.iter().find(|t| t.to == State::Active);
    let changes_per_h = active.and_then(|active| {
        let settled_ms = active.at_ms.max(HOUR_MS);
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
        alarms: transitions
            .iter()
            .filter(|t| t.cause == Cause::Spurious)
            .count() as u64,
        changes_per_h,
        per_s: path.per_s,
        saved_ms: outcome.saved_ms(),
    }
}
