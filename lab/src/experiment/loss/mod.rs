//! What one lost packet costs a small HTTP/1.1 transfer, with and without the agent, next to published
//! measurements.

mod case;
mod lane;
mod published;
mod tables;

use std::{collections::BTreeMap, path::Path, thread, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};

pub use self::case::{Case, Side, Talk, Volume};
use self::lane::{Lane, Outcome};
use crate::{ground::agent::Agent, link::Medium, machine::Machine, report::Report};

/// Timers for a near peer.
const POLICY: &str =
    "initial_rto = \"100ms\"\nrto_min = \"10ms\"\ndelack_max = \"5ms\"\nthin_linear = true\n";

/// What [`Side::ServerShort`] has beside it. The default is as short as half-open requests allow, which is some
/// 500 ms with the kernel's 5 retransmissions.
const SHORT_SYN_ACKS: &str = "syn_ack_rto = \"100ms\"\n";

/// What to measure, and how.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Fewer cases and requests.
    pub quick: bool,
    /// Over which link.
    pub medium: Medium,
    /// Of what is lost by chance.
    pub seed: u64,
    /// Requests where an exact loss happens.
    pub requests: u32,
    /// Requests where few packets are lost by chance.
    pub random: u32,
    /// Requests where half of the packets are lost by chance.
    pub heavy: u32,
    /// The agent's binary.
    pub agent: &'a Path,
}

/// Links side by side, for each side: where the timers are longer there are more.
const fn lanes(side: Side, quick: bool) -> u8 {
    match (side, quick) {
        (Side::Kernel, false) => 10,
        (Side::Agent, false) => 4,
        (Side::Server | Side::ServerShort, false) => 2,
        (Side::Kernel, true) => 5,
        (Side::Agent | Side::Server | Side::ServerShort, true) => 2,
    }
}

/// By case and side.
type Outcomes = BTreeMap<(usize, Side), Outcome>;

/// Measures, and reports.
///
/// # Errors
///
/// If something cannot be made or measured.
pub fn run(options: Options<'_>) -> anyhow::Result<Report> {
    let cases = case::all(options.quick, options.medium);
    let outcomes = measure(&options, &cases)?;
    Ok(tables::report(
        &options,
        Machine::here()?,
        &cases,
        &outcomes,
    ))
}

fn measure(options: &Options<'_>, cases: &[Case]) -> anyhow::Result<Outcomes> {
    let (agent, short) = (
        covering(options.agent, "")?,
        covering(options.agent, SHORT_SYN_ACKS)?,
    );
    let sides: Vec<Side> = Side::ALL
        .iter()
        .flat_map(|&side| vec![side; lanes(side, options.quick).into()])
        .collect();
    let parts = sides.iter().flat_map(|&side| {
        let of_side = cases.iter().filter(move |case| case.is_for(side));
        of_side.map(move |case| weight(case, side))
    });
    let bar = ProgressBar::new(parts.sum());
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent} %, {eta} left",
    )?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let mut outcomes = Outcomes::new();
    thread::scope(|scope| -> anyhow::Result<()> {
        let lanes: Vec<_> = (0u8..)
            .zip(&sides)
            .map(|(number, &side)| {
                let covered = if side == Side::ServerShort {
                    &short
                } else {
                    &agent
                };
                let (cgroup, bar) = (covered.cgroup.path(), &bar);
                scope.spawn(move || {
                    let requests = |volume| a_lane_has(options, side, volume);
                    let lane = Lane {
                        side,
                        number,
                        medium: options.medium,
                        seed: options.seed,
                        cgroup,
                        requests: &requests,
                    };
                    lane.run(cases, |case| bar.inc(weight(case, side)))
                })
            })
            .collect();
        // All of them are waited for, also after an error.
        let ended: Vec<_> = lanes
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        for (ended, side) in ended.into_iter().zip(&sides) {
            let parts = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            for (case, outcome) in parts {
                outcomes.entry((case, *side)).or_default().add(outcome);
            }
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    Ok(outcomes)
}

/// An agent of its own for every lane that has these settings beside [`POLICY`].
fn covering(binary: &Path, settings: &str) -> anyhow::Result<Agent> {
    let mut agent = Agent::new(binary.to_owned())?;
    agent.configure(&format!(
        "[policy.near]\ncidrs = [\"10.88.0.0/16\", \"10.89.0.0/16\"]\n{POLICY}{settings}"
    ))?;
    agent.start()?;
    Ok(agent)
}

/// Its part of the requests of a case: an even number, as counters that drop one in two or three need it.
fn a_lane_has(options: &Options<'_>, side: Side, volume: Volume) -> u32 {
    let all = match volume {
        Volume::Exact => options.requests,
        Volume::Rare => options.random,
        Volume::Heavy => options.heavy,
    };
    all.div_ceil(u32::from(lanes(side, options.quick)))
        .next_multiple_of(2)
}

/// For the bar: how long a case takes, about.
fn weight(case: &Case, side: Side) -> u64 {
    match (side, case.volume, &case.rule) {
        (_, _, None) => 1,
        (Side::Kernel, Volume::Exact, _) if case.name.starts_with("syn") => 10,
        (Side::Kernel, Volume::Rare, _) => 15,
        (_, Volume::Rare, _) => 30,
        (Side::Kernel, Volume::Heavy, _) => 12,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_all_requests_between_them() {
        for quick in [false, true] {
            let options = Options {
                quick,
                medium: Medium::Relay,
                seed: 1,
                requests: 100,
                random: 2000,
                heavy: 40,
                agent: Path::new(""),
            };
            for side in Side::ALL {
                for (volume, least) in [
                    (Volume::Exact, 100),
                    (Volume::Rare, 2000),
                    (Volume::Heavy, 40),
                ] {
                    let each = a_lane_has(&options, side, volume);
                    assert_eq!(each % 2, 0);
                    assert!(each * u32::from(lanes(side, quick)) >= least);
                }
            }
        }
    }
}
