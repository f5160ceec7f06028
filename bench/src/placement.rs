//! Repeats a measurement over several copies of the programs. Equal programs at different addresses differ by up to 1.4
//! times, so one copy of each says little about the program.

use nix::sys::signal::Signal;
use rto_testbed::{cgroup::Cgroup, env::TestEnv, foreign::Foreign};

use crate::{process::check_signals, sample::Sample};

/// Copies of each program.
const PLACEMENTS: usize = 6;

/// Small programs loaded before each copy. They move all later programs; at most 64 fit into a cgroup.
const SPACERS: usize = 7;

/// Measures each copy of the programs. `measure` starts the agents, whose order it takes from the copy's number, and
/// this function stops them.
pub(crate) fn each<T>(
    worlds: &mut [TestEnv],
    mut measure: impl FnMut(usize, &mut [TestEnv]) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<T>> {
    let spare = Cgroup::new()?;
    let mut spacers = Vec::new();
    let mut results = Vec::new();
    for copy in 0..PLACEMENTS {
        check_signals()?;
        for _ in 0..SPACERS {
            spacers.push(Foreign::attach_empty(spare.path())?);
        }
        results.push(measure(copy, worlds)?);
        for env in &mut *worlds {
            env.end(Signal::SIGTERM)?;
        }
    }
    Ok(results)
}

/// The order in which the programs of a copy are loaded.
pub(crate) fn order(copy: usize, programs: usize) -> impl Iterator<Item = usize> {
    (0..programs).map(move |i| (i + copy) % programs)
}

/// The medians of the copies' rounds.
pub(crate) fn medians<R>(copies: &[Vec<R>], of: impl Fn(&R) -> f64) -> Sample {
    let median = |rounds: &Vec<R>| Sample::of(rounds.iter().map(&of)).median();
    Sample::of(copies.iter().map(median))
}

/// The rounds of each copy.
pub(crate) fn rounds(all: u32) -> u32 {
    all.div_ceil(4)
}
