//! How long a request/response connection is idle when all its packets are lost for a while, by setting and by
//! how the setting is made; next to theory, the kernel's model and published tables.

mod log;
mod plan;
mod tables;
mod testbed;

use std::{fs, path::Path, sync::Mutex, thread};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_testbed::{agent::Agent, machine::Machine};

use self::{
    log::Log,
    testbed::{SharedPool, TestbedPool, lock},
};
pub use self::{
    log::{Manifest, RunRecord},
    plan::{Cell, Mechanism, Plan, Run, Setting},
};
use crate::{interrupt, report::Report, topology::LinkBackend};

/// Smoothed RTT of the emulated link for the model, microseconds; it makes a difference of a jiffy at most.
const SRTT_US: u64 = 200;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// What.
    pub plan: Plan,
    /// Over which link.
    pub backend: LinkBackend,
    /// Of the order and of when in a transaction a disruption begins.
    pub seed: u64,
    /// Runs at once.
    pub jobs: usize,
    /// Where the report and the runs go.
    pub out: &'a Path,
    /// Forget the runs that are there.
    pub fresh: bool,
    /// The agent's binary.
    pub agent: &'a Path,
}

/// Measures what is not measured yet, and reports.
///
/// # Errors
///
/// If something cannot be made or measured; the runs that are done are kept.
pub fn run(mut options: Options<'_>) -> anyhow::Result<Report> {
    let lacking: Vec<Mechanism> = options.plan.mechanisms.clone();
    let lacking: Vec<Mechanism> = lacking
        .into_iter()
        .filter(|mechanism| !testbed::can(*mechanism))
        .collect();
    options
        .plan
        .mechanisms
        .retain(|mechanism| testbed::can(*mechanism));
    let manifest = Manifest {
        machine: Machine::here()?,
        link: options.backend,
        seed: options.seed,
        plan: options.plan.clone(),
    };
    fs::create_dir_all(options.out).with_context(|| options.out.display().to_string())?;
    let path = options.out.join("blackout-runs.jsonl");
    if options.fresh && path.exists() {
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    let (log, mut done) = Log::open(&path, &manifest)?;
    let before = done.len();
    let mut left = manifest.plan.order(options.seed);
    left.retain(|run| !done.iter().any(|done| done.run == *run));
    if !left.is_empty() {
        done.extend(measure(&options, &manifest, left, log)?);
    }
    let mut report = tables::report(&manifest, &done);
    report.method.push((
        "runs measured now, and taken over from before".to_owned(),
        format!("{}, {before}", done.len() - before),
    ));
    for mechanism in lacking {
        report.findings.push(format!(
            "This kernel cannot make settings by {mechanism}: left out."
        ));
    }
    Ok(report)
}

fn measure(
    options: &Options<'_>,
    manifest: &Manifest,
    left: Vec<Run>,
    log: Log,
) -> anyhow::Result<Vec<RunRecord>> {
    let testbeds = manifest.plan.testbeds();
    let agent = if manifest.plan.mechanisms.contains(&Mechanism::Agent) {
        let mut agent = Agent::new(options.agent.to_owned())?;
        agent.configure(&testbed::policies(&testbeds))?;
        agent.start()?;
        Some(agent)
    } else {
        None
    };
    let mut testbeds = TestbedPool::new(&testbeds, options.backend, options.seed, agent)?;
    let open = testbeds.open();
    let bar = progress(manifest, &left)?;
    let (left, log, done) = (Mutex::new(left), Mutex::new(log), Mutex::new(Vec::new()));
    thread::scope(|scope| -> anyhow::Result<()> {
        let jobs: Vec<_> = (0..options.jobs.max(1))
            .map(|_| {
                scope.spawn(|| {
                    let _last = Last {
                        open: &open,
                        left: &left,
                    };
                    lane(&open, options.seed, &left, &log, &done, &bar)
                })
            })
            .collect();
        let ended = jobs.into_iter().map(|lane| {
            lane.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect()
    })?;
    bar.finish_and_clear();
    Ok(done.into_inner().unwrap_or_default())
}

/// When a lane ends there is nothing left, or it has failed: then the others end what they have begun.
struct Last<'a> {
    open: &'a SharedPool<'a>,
    left: &'a Mutex<Vec<Run>>,
}

impl Drop for Last<'_> {
    fn drop(&mut self) {
        lock(self.left).clear();
        self.open.wake();
    }
}

/// Run after run, until there are none left.
fn lane(
    open: &SharedPool<'_>,
    seed: u64,
    left: &Mutex<Vec<Run>>,
    log: &Mutex<Log>,
    done: &Mutex<Vec<RunRecord>>,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    while let Some((run, link, mut client)) = open.take(left) {
        interrupt::check()?;
        let measured = open.measure(run, link, &mut client, phase(seed, &run))?;
        open.give_back(&run, client);
        lock(log).add(&measured)?;
        lock(done).push(measured);
        bar.inc(expected_ms(&run));
    }
    Ok(())
}

/// From 0 to 1, of the seed and the run alone: it does not depend on which lane comes first.
fn phase(seed: u64, run: &Run) -> f64 {
    let Cell {
        mechanism,
        setting,
        disruption_us,
    } = run.cell;
    let parts = [
        mechanism as u64,
        u64::from(setting.thin),
        setting.rto_min_us,
        disruption_us,
        run.number.into(),
    ];
    let mixed = parts.iter().fold(seed, |mixed, part| {
        ChaCha8Rng::seed_from_u64(mixed ^ part).random()
    });
    ChaCha8Rng::seed_from_u64(mixed).random()
}

/// The bar goes by the time that runs are expected to take.
fn progress(manifest: &Manifest, left: &[Run]) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(left.iter().map(expected_ms).sum());
    let style =
        "{bar:40} {percent} %, {eta} left of {} runs".replace("{}", &left.len().to_string());
    bar.set_style(ProgressStyle::with_template(&style)?);
    bar.set_message(manifest.machine.kernel.clone());
    bar.enable_steady_tick(std::time::Duration::from_millis(500));
    Ok(bar)
}

fn expected_ms(run: &Run) -> u64 {
    // What connects and talks before and after.
    const BESIDE_MS: u64 = 30;
    let Cell {
        setting,
        disruption_us,
        ..
    } = run.cell;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "milliseconds of some seconds"
    )]
    let idle_ms = setting.theory_ms(disruption_us) as u64;
    idle_ms + BESIDE_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_belongs_to_its_run() {
        let plan = Plan {
            mechanisms: vec![Mechanism::Agent, Mechanism::Kernel],
            settings: vec![Setting::KERNEL],
            disruptions_us: vec![10_000, 20_000],
            runs: 50,
            control_runs: 1,
        };
        let phases: Vec<f64> = plan.order(1).iter().map(|run| phase(7, run)).collect();
        let again: Vec<f64> = plan.order(1).iter().map(|run| phase(7, run)).collect();
        assert_eq!(phases, again);
        let mean = phases.iter().sum::<f64>() / 200.0;
        assert!((mean - 0.5).abs() < 0.1, "{mean}");
        let mut sorted = phases;
        sorted.sort_by(f64::total_cmp);
        sorted.dedup();
        assert_eq!(sorted.len(), 200);
    }
}
