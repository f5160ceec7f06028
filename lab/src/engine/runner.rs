//! Performs the unfinished runs: several at once, each in a testbed of its kind.

use std::{
    path::Path,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use rand::{SeedableRng as _, rngs::ChaCha8Rng, seq::SliceRandom as _};
use rto_testbed::machine::Machine;
use serde::{Serialize, de::DeserializeOwned};

use super::{Design, Log, Manifest, Record, render};
use crate::{interrupt, report::Report, summary::micros};

/// An experiment: what varies, where it is measured, and how.
pub trait Experiment: Sync {
    /// A run: levels of the factors, and its number.
    type Run: Clone + PartialEq + Serialize + DeserializeOwned + Send + Sync;
    /// Resources that all testbeds share: agents.
    type Shared;
    /// A testbed: namespaces, a link, a server.
    type Testbed: Send;

    /// The question, and how records are shown.
    fn design(&self) -> Design;

    /// All runs.
    fn runs(&self) -> Vec<Self::Run>;

    /// Creates the shared resources.
    fn share(&self) -> anyhow::Result<Self::Shared>;

    /// The number of testbeds of each kind.
    fn testbeds(&self) -> Vec<usize>;

    /// Makes a testbed of a kind. Its number distinguishes its link from others.
    fn testbed(
        &self,
        shared: &Self::Shared,
        kind: usize,
        number: u8,
    ) -> anyhow::Result<Self::Testbed>;

    /// The kind of testbed that a run needs.
    fn kind(&self, _run: &Self::Run) -> usize {
        0
    }

    /// Measures a run; nothing if it did not succeed, so that a later call repeats it.
    fn measure(&self, testbed: &mut Self::Testbed, run: &Self::Run) -> anyhow::Result<Vec<Record>>;

    /// The approximate duration of a run.
    fn expected(&self, run: &Self::Run) -> Duration;

    /// The share of the machine that a run needs, 0 to 1: a run that would disturb others is not started next to them.
    fn load(&self, _run: &Self::Run) -> f64 {
        0.0
    }
}

/// Options of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Seed of the order.
    pub seed: u64,
    /// Runs at once.
    pub jobs: usize,
    /// Directory of the log.
    pub out: &'a Path,
    /// Discard existing runs.
    pub fresh: bool,
}

/// Derives the seed of all random choices in a run, or in a part of it: the same value gives the same seed.
pub fn seed_of(seed: u64, value: &impl Serialize) -> u64 {
    // FNV-1a.
    const PRIME: u64 = 0x0100_0000_01b3;
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
    text.iter().fold(seed ^ 0xcbf2_9ce4_8422_2325, mix)
}

/// Performs the unfinished runs, and makes the report.
pub fn run<E: Experiment>(experiment: &E, options: &Options<'_>) -> anyhow::Result<Report> {
    let design = experiment.design();
    let mut left = experiment.runs();
    let manifest = Manifest {
        machine: Machine::here()?,
        seed: options.seed,
        plan: seed_of(0, &left),
        design,
        hosts: Vec::new(),
    };
    let (mut log, done) = Log::open::<E::Run>(options.out, &manifest, options.fresh)?;
    left.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    left.retain(|run| !done.iter().any(|(done, _)| done == run));
    let (now, before) = (left.len(), done.len());
    let mut records: Vec<Record> = done.into_iter().flat_map(|(_, records)| records).collect();
    let mut missed = 0;
    if !left.is_empty() {
        let measured = measure(experiment, options, left, &mut log)?;
        records.extend(measured.0);
        missed = measured.1;
    }
    let mut report = render::report(&manifest, &records);
    let counts = format!("{now}, {before}");
    report.method.push((
        "runs measured now, and reused from before".to_owned(),
        counts,
    ));
    if missed > 0 {
        report.findings.push(format!(
            "{missed} of {now} runs have no result: the machine was too busy for their outages. Run the same command \
             again: it repeats only these."
        ));
    }
    Ok(report)
}

/// State that the threads share.
struct State<'a, R> {
    left: Vec<R>,
    running: usize,
    load: f64,
    log: &'a mut Log,
    records: Vec<Record>,
    missed: usize,
}

struct Pool<'a, E: Experiment> {
    experiment: &'a E,
    jobs: usize,
    state: Mutex<State<'a, E::Run>>,
    changed: Condvar,
    bar: ProgressBar,
}

fn measure<E: Experiment>(
    experiment: &E,
    options: &Options<'_>,
    left: Vec<E::Run>,
    log: &mut Log,
) -> anyhow::Result<(Vec<Record>, usize)> {
    let shared = experiment.share()?;
    let mut testbeds = Vec::new();
    for (kind, count) in experiment.testbeds().into_iter().enumerate() {
        let runs = left
            .iter()
            .filter(|run| experiment.kind(run) == kind)
            .count();
        for _ in 0..count.min(runs) {
            interrupt::check()?;
            let number = u8::try_from(testbeds.len()).context("more testbeds than addresses")?;
            testbeds.push((kind, experiment.testbed(&shared, kind, number)?));
        }
    }
    // The bar measures the expected duration of the runs.
    let bar = ProgressBar::new(
        left.iter()
            .map(|run| micros(experiment.expected(run)))
            .sum(),
    );
    let style = format!(
        "{{bar:40}} {{percent}} %, {{eta}} left of {} runs",
        left.len()
    );
    bar.set_style(ProgressStyle::with_template(&style)?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let state = State {
        left,
        running: 0,
        load: 0.0,
        log,
        records: Vec::new(),
        missed: 0,
    };
    let pool = Pool {
        experiment,
        jobs: options.jobs.max(1),
        state: Mutex::new(state),
        changed: Condvar::new(),
        bar,
    };
    thread::scope(|scope| -> anyhow::Result<()> {
        let pool = &pool;
        let workers: Vec<_> = testbeds
            .iter_mut()
            .map(|(kind, testbed)| scope.spawn(|| pool.work(*kind, testbed)))
            .collect();
        // Waits for all threads, even after an error.
        let ended: Vec<_> = workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        let mut ended = ended.into_iter();
        ended.try_for_each(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    pool.bar.finish_and_clear();
    let state = pool
        .state
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    Ok((state.records, state.missed))
}

impl<'a, E: Experiment> Pool<'a, E> {
    /// Performs runs until none is left for this kind.
    fn work(&self, kind: usize, testbed: &mut E::Testbed) -> anyhow::Result<()> {
        // If one run fails, the others finish.
        let unfinished = Unfinished(self);
        while let Some(run) = self.take(kind) {
            interrupt::check()?;
            let measured = self.experiment.measure(testbed, &run)?;
            let mut state = self.lock();
            state.running -= 1;
            state.load -= self.experiment.load(&run);
            if measured.is_empty() {
                state.missed += 1;
            } else {
                state.log.add(&run, &measured)?;
                state.records.extend(measured);
            }
            drop(state);
            self.changed.notify_all();
            self.bar.inc(micros(self.experiment.expected(&run)));
        }
        std::mem::forget(unfinished);
        Ok(())
    }

    /// The next run of a kind, when it may start; `None` if none is left.
    fn take(&self, kind: usize) -> Option<E::Run> {
        let mut state = self.lock();
        loop {
            let is_ready = |run: &E::Run| {
                let load = self.experiment.load(run);
                let is_room = state.running < self.jobs && state.load + load <= 1.0;
                self.experiment.kind(run) == kind && (is_room || state.running == 0)
            };
            if let Some(next) = state.left.iter().position(is_ready) {
                let run = state.left.remove(next);
                state.running += 1;
                state.load += self.experiment.load(&run);
                return Some(run);
            }
            if !state
                .left
                .iter()
                .any(|run| self.experiment.kind(run) == kind)
            {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a, E::Run>> {
        // The state is consistent even after a panic of another thread.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Unfinished<'a, 'b, E: Experiment>(&'a Pool<'b, E>);

impl<E: Experiment> Drop for Unfinished<'_, '_, E> {
    fn drop(&mut self) {
        self.0.lock().left.clear();
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::ensure;

    use super::*;

    /// Counts simultaneous runs; fails at a chosen run.
    struct Trial {
        fails_at: Option<u32>,
        misses: Option<u32>,
        running: AtomicUsize,
        most: AtomicUsize,
        load: f64,
    }

    impl Experiment for Trial {
        type Run = (usize, u32);
        type Shared = ();
        type Testbed = usize;

        fn design(&self) -> Design {
            Design {
                name: "trial".to_owned(),
                ..Design::default()
            }
        }

        fn runs(&self) -> Vec<Self::Run> {
            (0..40)
                .map(|number| (usize::from(number % 4 == 0), number))
                .collect()
        }

        fn share(&self) -> anyhow::Result<()> {
            Ok(())
        }

        fn testbeds(&self) -> Vec<usize> {
            vec![6, 1]
        }

        fn testbed(&self, (): &(), kind: usize, _: u8) -> anyhow::Result<usize> {
            Ok(kind)
        }

        fn kind(&self, run: &Self::Run) -> usize {
            run.0
        }

        fn measure(&self, testbed: &mut usize, run: &Self::Run) -> anyhow::Result<Vec<Record>> {
            ensure!(self.fails_at != Some(run.1), "it fails");
            assert_eq!(*testbed, run.0);
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(running, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(1));
            self.running.fetch_sub(1, Ordering::SeqCst);
            if self.misses == Some(run.1) {
                return Ok(Vec::new());
            }
            Ok(vec![Record::new([], run.1).with("n", f64::from(run.1))])
        }

        fn expected(&self, _: &Self::Run) -> Duration {
            Duration::from_millis(1)
        }

        fn load(&self, _: &Self::Run) -> f64 {
            self.load
        }
    }

    fn trial(fails_at: Option<u32>, load: f64) -> Trial {
        Trial {
            fails_at,
            misses: None,
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            load,
        }
    }

    fn options(out: &Path) -> Options<'_> {
        Options {
            seed: 1,
            jobs: 4,
            out,
            fresh: false,
        }
    }

    #[test]
    fn resumed_study_runs_each_run_once() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let error = run(&trial(Some(7), 0.0), &options).unwrap_err();
        assert_eq!(error.to_string(), "it fails");
        let path = Log::path(dir.path(), "trial");
        let kept = Log::read(&path).unwrap().1.len();
        assert!(kept < 40, "{kept}");
        let whole = trial(None, 0.0);
        let report = run(&whole, &options).unwrap();
        assert_eq!(report.method[0].1, format!("{}, {kept}", 40 - kept));
        assert!(whole.most.load(Ordering::SeqCst) <= 4);
        let mut numbers: Vec<u32> = Log::read(&path)
            .unwrap()
            .1
            .iter()
            .map(|record| record.run)
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..40).collect::<Vec<u32>>());
        // A different seed makes it a different experiment, unless it starts afresh.
        let other = Options { seed: 2, ..options };
        assert!(run(&trial(None, 0.0), &other).is_err());
        let fresh = run(
            &trial(None, 0.0),
            &Options {
                fresh: true,
                ..other
            },
        )
        .unwrap();
        assert_eq!(fresh.method[0].1, "40, 0");
    }

    #[test]
    fn missed_run_is_reported_and_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let mut once = trial(None, 0.0);
        once.misses = Some(7);
        let report = run(&once, &options).unwrap();
        let last = report.findings.last().unwrap();
        assert!(last.starts_with("1 of 40 runs have no result"), "{last}");
        let again = run(&trial(None, 0.0), &options).unwrap();
        assert_eq!(again.method.last().unwrap().1, "1, 39");
    }

    #[test]
    fn run_that_needs_the_machine_runs_alone() {
        let dir = tempfile::tempdir().unwrap();
        let alone = trial(None, 0.6);
        run(&alone, &options(dir.path())).unwrap();
        assert_eq!(alone.most.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn seeds_belong_to_values() {
        assert_eq!(seed_of(1, &"a"), seed_of(1, &"a"));
        assert_ne!(seed_of(1, &"a"), seed_of(2, &"a"));
        assert_ne!(seed_of(1, &"a"), seed_of(1, &"b"));
    }
}
