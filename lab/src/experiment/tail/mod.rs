//! Flows that lose their last segments, where only a timer helps: tail loss probes, RTO restart as far as a
//! sock_ops program can do it, and a lower rto_min, by round-trip time and by how many segments are lost.

mod lane;
mod tables;

use std::{path::Path, thread, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use rto_testbed::{agent::Agent, machine::Machine};

use self::lane::{Lane, Outcome};
use crate::report::Report;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// What.
    pub plan: Plan,
    /// Of the jitter.
    pub seed: u64,
    /// The agent's binary.
    pub agent: &'a Path,
}

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Round-trip times.
    pub rtts: Vec<Duration>,
    /// How many of the last segments are lost.
    pub lost: Vec<u32>,
    /// Flows of a cell.
    pub runs: u32,
    /// Round-trip times of the flows that lose nothing.
    pub calm_rtts: Vec<Duration>,
    /// How long those go on, each.
    pub calm_for: Duration,
}

impl Plan {
    /// The whole experiment, or a part of it.
    #[must_use]
    pub fn new(quick: bool) -> Self {
        let ms = |all: &[u64]| all.iter().map(|ms| Duration::from_millis(*ms)).collect();
        if quick {
            return Self {
                rtts: ms(&[20, 80, 160]),
                lost: vec![1, 3, 5],
                runs: 3,
                calm_rtts: ms(&[20]),
                calm_for: Duration::from_secs(4),
            };
        }
        Self {
            rtts: ms(&[10, 20, 40, 80, 160, 320, 640]),
            lost: vec![1, 2, 3, 4, 5],
            runs: 5,
            calm_rtts: ms(&[10, 40, 160, 320]),
            calm_for: Duration::from_secs(10),
        }
    }
}

/// The sender's timers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variant {
    /// What is not the kernel's own.
    setting: &'static str,
    tlp: bool,
    /// Of the agent.
    policy: Option<&'static str>,
}

impl Variant {
    /// For tables.
    fn name(&self) -> String {
        format!(
            "{}, {}",
            self.setting,
            if self.tlp { "TLP" } else { "no TLP" }
        )
    }
}

/// The kernel's own timers.
const KERNEL: &str = "kernel";
/// RTO restart, as far as it can be done.
const RESTART: &str = "restart";

/// A lower rto_min alone.
const PLAIN: &str = "rto_min 100 ms";

/// Without tail loss probes first; the first of all is what others are compared with.
fn variants() -> Vec<Variant> {
    let settings = [
        (KERNEL, None),
        (RESTART, Some("rto_min = \"200ms\"\nrto_restart = true\n")),
        (PLAIN, Some("rto_min = \"100ms\"\n")),
        ("rto_min 20 ms", Some("rto_min = \"20ms\"\n")),
    ];
    let with = |tlp| {
        settings.map(|(setting, policy)| Variant {
            setting,
            tlp,
            policy,
        })
    };
    [with(false), with(true)].concat()
}

/// Measures, and reports.
///
/// # Errors
///
/// If something cannot be made or measured.
pub fn run(options: &Options<'_>) -> anyhow::Result<Report> {
    let variants = variants();
    let outcomes = measure(options, &variants)?;
    let all: Vec<_> = variants.into_iter().zip(outcomes).collect();
    Ok(tables::report(options, Machine::here()?, &all))
}

fn measure(options: &Options<'_>, variants: &[Variant]) -> anyhow::Result<Vec<Outcome>> {
    let mut agent = Agent::new(options.agent.to_owned())?;
    let policies = (0..)
        .zip(variants)
        .filter_map(|(number, variant): (u8, _)| {
            let policy = variant.policy?;
            Some(format!(
                "[policy.v{number}]\ncidrs = [\"10.89.{number}.0/24\"]\n{policy}"
            ))
        });
    agent.configure(&policies.collect::<String>())?;
    agent.start()?;
    let plan = &options.plan;
    let with_losses = plan.rtts.iter().map(|&rtt| lane::with_losses_ms(plan, rtt));
    let calm = plan.calm_rtts.iter().map(|&rtt| lane::calm_ms(plan, rtt));
    let bar = ProgressBar::new(with_losses.chain(calm).sum::<u64>() * variants.len() as u64);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent} %, {eta} left",
    )?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let outcomes = thread::scope(|scope| {
        let lanes: Vec<_> = (0u8..)
            .zip(variants)
            .map(|(number, variant)| {
                let (cgroup, bar) = (agent.cgroup.path(), &bar);
                scope.spawn(move || {
                    let lane = Lane {
                        variant,
                        number,
                        seed: options.seed,
                        cgroup,
                        plan,
                    };
                    lane.run(|ms| bar.inc(ms))
                })
            })
            .collect();
        // All of them are waited for, also after an error.
        let ended: Vec<_> = lanes
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        ended
            .into_iter()
            .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    bar.finish_and_clear();
    outcomes
}
