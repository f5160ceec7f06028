//! What one lost packet costs a small HTTP/1.1 transfer, with and without the agent, next to published
//! measurements.

mod case;
mod lane;
mod published;
mod tables;

use std::{collections::BTreeMap, path::Path, thread, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use rto_testbed::{
    agent::Agent,
    machine::Machine,
    warm::{Learnt, Seen},
};

pub use self::case::{Case, ConnectionReuse, Coverage, SampleSize};
use self::lane::{Lane, Outcome};
use crate::{report::Report, topology::LinkBackend};

/// Timers for a near peer, beside those of the handshake.
const POLICY: &str = "rto_min = \"10ms\"\ndelack_max = \"5ms\"\nthin_linear = true\n";

/// The handshake's timer.
const INITIAL_RTO: &str = "initial_rto = \"100ms\"\n";

/// What [`Coverage::Auto`] has instead.
const AUTO: &str = "initial_rto = \"auto\"\n";

/// What a daemon would have seen for hours on these links: path times, microseconds, of so many connections a second.
const SEEN: [(u64, u64); 2] = [(4_096, 95), (8_192, 5)];

/// What [`Coverage::ServerShort`] has beside it. The default is as short as half-open requests allow, which is some
/// 500 ms with the kernel's 5 retransmissions.
const SHORT_SYN_ACKS: &str = "syn_ack_rto = \"100ms\"\n";

/// What to measure, and how.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Fewer cases and requests.
    pub quick: bool,
    /// Over which link.
    pub backend: LinkBackend,
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

/// Links coverage by coverage, for each coverage: where the timers are longer there are more.
const fn lanes(coverage: Coverage, quick: bool) -> u8 {
    match (coverage, quick) {
        (Coverage::Kernel, false) => 10,
        (Coverage::Agent | Coverage::Auto, false) => 4,
        (Coverage::Server | Coverage::ServerShort, false) => 2,
        (Coverage::Kernel, true) => 5,
        (_, true) => 2,
    }
}

/// By case and coverage.
type Outcomes = BTreeMap<(usize, Coverage), Outcome>;

/// Measures, and reports.
///
/// # Errors
///
/// If something cannot be made or measured.
pub fn run(options: Options<'_>) -> anyhow::Result<Report> {
    let cases = case::all(options.quick, options.backend);
    let outcomes = measure(&options, &cases)?;
    Ok(tables::report(
        &options,
        Machine::here()?,
        &cases,
        &outcomes,
    ))
}

fn measure(options: &Options<'_>, cases: &[Case]) -> anyhow::Result<Outcomes> {
    let seen = Seen {
        each_second: &SEEN,
        hz: u32::try_from(Machine::here()?.hz)?,
    };
    let short = format!("{INITIAL_RTO}{SHORT_SYN_ACKS}");
    let agent = covering(options.agent, INITIAL_RTO, None)?;
    let short = covering(options.agent, &short, None)?;
    let auto = covering(options.agent, AUTO, Some(Learnt::InitialRto(seen)))?;
    let coverages: Vec<Coverage> = Coverage::ALL
        .iter()
        .flat_map(|&coverage| vec![coverage; lanes(coverage, options.quick).into()])
        .collect();
    let parts = coverages.iter().flat_map(|&coverage| {
        let of_side = cases.iter().filter(move |case| case.is_for(coverage));
        of_side.map(move |case| weight(case, coverage))
    });
    let bar = ProgressBar::new(parts.sum());
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent} %, {eta} left",
    )?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let mut outcomes = Outcomes::new();
    thread::scope(|scope| -> anyhow::Result<()> {
        let lanes: Vec<_> = (0u8..)
            .zip(&coverages)
            .map(|(number, &coverage)| {
                let covered = match coverage {
                    Coverage::ServerShort => &short,
                    Coverage::Auto => &auto,
                    Coverage::Kernel | Coverage::Agent | Coverage::Server => &agent,
                };
                let (cgroup, bar) = (covered.cgroup.path(), &bar);
                scope.spawn(move || {
                    let requests = |sample_size| a_lane_has(options, coverage, sample_size);
                    let lane = Lane {
                        coverage,
                        number,
                        backend: options.backend,
                        seed: options.seed,
                        cgroup,
                        requests: &requests,
                    };
                    lane.run(cases, |case| bar.inc(weight(case, coverage)))
                })
            })
            .collect();
        // All of them are waited for, also after an error.
        let ended: Vec<_> = lanes
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        for (ended, coverage) in ended.into_iter().zip(&coverages) {
            let parts = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            for (case, outcome) in parts {
                outcomes.entry((case, *coverage)).or_default().add(outcome);
            }
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    Ok(outcomes)
}

/// An agent of its own for every lane that has these settings beside [`POLICY`], which may have learnt something.
fn covering(binary: &Path, settings: &str, learnt: Option<Learnt<'_>>) -> anyhow::Result<Agent> {
    const NEAR: &str = "near";
    let mut agent = Agent::new(binary.to_owned())?;
    agent.configure(&format!(
        "[policy.{NEAR}]\ncidrs = [\"10.88.0.0/16\", \"10.89.0.0/16\"]\n{POLICY}{settings}"
    ))?;
    if let Some(learnt) = learnt {
        learnt.start(&mut agent, NEAR)?;
    } else {
        agent.start()?;
    }
    Ok(agent)
}

/// Its part of the requests of a case: an even number, as counters that drop one in two or three need it.
fn a_lane_has(options: &Options<'_>, coverage: Coverage, sample_size: SampleSize) -> u32 {
    let all = match sample_size {
        SampleSize::Exact => options.requests,
        SampleSize::Rare => options.random,
        SampleSize::Heavy => options.heavy,
    };
    all.div_ceil(u32::from(lanes(coverage, options.quick)))
        .next_multiple_of(2)
}

/// For the bar: how long a case takes, about.
fn weight(case: &Case, coverage: Coverage) -> u64 {
    match (coverage, case.sample_size, &case.rule) {
        (_, _, None) => 1,
        (Coverage::Kernel, SampleSize::Exact, _) if case.name.starts_with("syn") => 10,
        (Coverage::Kernel, SampleSize::Rare, _) => 15,
        (_, SampleSize::Rare, _) => 30,
        (Coverage::Kernel, SampleSize::Heavy, _) => 12,
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
                backend: LinkBackend::Relay,
                seed: 1,
                requests: 100,
                random: 2000,
                heavy: 40,
                agent: Path::new(""),
            };
            for coverage in Coverage::ALL {
                for (sample_size, least) in [
                    (SampleSize::Exact, 100),
                    (SampleSize::Rare, 2000),
                    (SampleSize::Heavy, 40),
                ] {
                    let each = a_lane_has(&options, coverage, sample_size);
                    assert_eq!(each % 2, 0);
                    assert!(each * u32::from(lanes(coverage, quick)) >= least);
                }
            }
        }
    }
}
