//! SIGKILL at random moments of start, reload, add, remove and stop, each followed by a start.

mod inspect;

use std::{
    os::unix::process::ExitStatusExt as _,
    time::{SystemTime, UNIX_EPOCH},
};

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng, seq::SliceRandom as _};
use rto_testbed::{
    emulated::is_emulated,
    workload::prober::{Prober, Seen},
};
use rto_tests::load::BusyLoops;

use super::{
    desired::{ALWAYS_MS, Desired, File, Request},
    is_long,
};
use crate::prelude::*;

const ROUNDS: u32 = 100;
const ROUNDS_LONG: u32 = 1000;
/// Each environment runs each operation three times: killed before it begins, after it is done, and at some moment.
const ROUNDS_EMULATED: u32 = 42;
/// Each operation twice: killed before it begins, and after it is done.
const ROUNDS_BUSY: u32 = 28;
/// Environments at once: a start mostly waits for the kernel, but needs CPU time on an emulated processor.
const ENVS: u32 = 4;
const ENVS_EMULATED: u32 = 2;

/// Fewest samples of the prober in each environment. A sample takes about 0.6 ms and a round 200 ms or more; the rest
/// allows for a busy machine.
const LOOKS_A_ROUND: u64 = 100;
/// Smallest part of the probing time that must be between samples at most 20 ms apart: when the whole machine stalls,
/// the daemon stalls too.
const COVERED: f64 = 0.5;
/// No test waits longer for anything.
const LONGEST_GAP: Duration = TIMEOUT;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Start,
    Reload,
    Add,
    Save,
    Unsave,
    Remove,
    Stop,
}

const OPERATIONS: [Operation; 7] = [
    Operation::Start,
    Operation::Reload,
    Operation::Add,
    Operation::Save,
    Operation::Unsave,
    Operation::Remove,
    Operation::Stop,
];

/// When SIGKILL is sent.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// The request was sent and not read: the daemon is stopped (SIGSTOP) during that time.
    Unheard,
    /// This long after the beginning.
    After(Duration),
    /// After the operation is done.
    Done,
}

/// The course of an operation.
struct Course {
    /// Whether the daemon had answered, or exited by itself, before SIGKILL.
    done: bool,
    /// How long it took, if its end was awaited.
    took: Duration,
}

/// The results of the rounds.
#[derive(Debug, Default)]
struct Tally {
    rounds: u32,
    /// By operation: the number killed before they were done, and after.
    cut_short: BTreeMap<Operation, u32>,
    done: BTreeMap<Operation, u32>,
    /// Requests that were cut short and yet active after the next start.
    taken: u32,
    probed: u64,
    longest_gap: Duration,
    covered: Duration,
    lasted: Duration,
}

impl Tally {
    /// Asserts that the prober sampled connections all the time.
    fn check_looks(&self) -> anyhow::Result<()> {
        let covered = self.covered.as_secs_f64() / self.lasted.as_secs_f64();
        ensure!(
            self.probed >= LOOKS_A_ROUND * u64::from(self.rounds)
                && covered >= COVERED
                && self.longest_gap < LONGEST_GAP,
            "the prober slept: {:.1} % of the time was covered by looks; {self:?}",
            covered * 100.0
        );
        Ok(())
    }
}

test!(killed_at_random_moments, rounds);
pub(super) fn rounds() -> anyhow::Result<()> {
    let seed = seed()?;
    let rounds = if is_long() {
        ROUNDS_LONG
    } else {
        scaled("kills", ROUNDS, ROUNDS_EMULATED)
    };
    let envs = if is_emulated() { ENVS_EMULATED } else { ENVS };
    let tallies = in_envs(seed, rounds, envs)?;
    check_tallies(&tallies, rounds)
        .and_then(|()| tallies.iter().try_for_each(Tally::check_looks))
        .with_context(|| format!("RTO_TESTS_SEED={seed}"))
}

test!(killed_while_all_processors_are_busy);
/// The same while every thread waits for a processor, so that the steps after a kill fall into operations that the killed
/// daemon had begun. The prober waits as well, so its samples prove less here.
fn killed_while_all_processors_are_busy() -> anyhow::Result<()> {
    const LOOPS: usize = 2;
    let seed = seed()?;
    let _busy = BusyLoops::per_processor(LOOPS);
    let tallies = in_envs(seed, ROUNDS_BUSY, ENVS_EMULATED)?;
    check_tallies(&tallies, ROUNDS_BUSY).with_context(|| format!("RTO_TESTS_SEED={seed}"))
}

fn seed() -> anyhow::Result<u64> {
    match std::env::var("RTO_TESTS_SEED") {
        Ok(seed) => seed.parse().context("RTO_TESTS_SEED"),
        Err(_) => Ok(SystemTime::now()
            .duration_since(UNIX_EPOCH)?
            .subsec_nanos()
            .into()),
    }
}

fn in_envs(seed: u64, rounds: u32, envs: u32) -> anyhow::Result<Vec<Tally>> {
    eprintln!("RTO_TESTS_SEED={seed}, {rounds} rounds");
    let tallies = thread::scope(|scope| {
        let envs: Vec<_> = (0..envs)
            .map(|number| {
                // Both values of on_exit.
                let on_exit = ["keep", "detach"][number as usize % 2];
                let rng = ChaCha8Rng::seed_from_u64(seed ^ (u64::from(number) << 32));
                scope.spawn(move || Run::new(rng, on_exit)?.rounds(rounds / envs))
            })
            .collect();
        let joined = envs.into_iter().map(|env| match env.join() {
            Ok(result) => result,
            Err(_) => bail!("an env panicked"),
        });
        // All are joined, so that the first failure does not leave one behind.
        let joined: Vec<_> = joined.collect();
        joined.into_iter().collect::<anyhow::Result<Vec<Tally>>>()
    });
    let tallies = tallies.with_context(|| format!("RTO_TESTS_SEED={seed}"))?;
    for tally in &tallies {
        eprintln!("{tally:?}");
    }
    Ok(tallies)
}

/// Asserts that the rounds covered the intended situations.
fn check_tallies(tallies: &[Tally], rounds: u32) -> anyhow::Result<()> {
    ensure!(tallies.iter().map(|t| t.rounds).sum::<u32>() == rounds);
    for operation in OPERATIONS {
        let sum = |of: fn(&Tally) -> &BTreeMap<Operation, u32>| -> u32 {
            tallies.iter().filter_map(|t| of(t).get(&operation)).sum()
        };
        let (cut_short, done) = (sum(|t| &t.cut_short), sum(|t| &t.done));
        ensure!(
            cut_short > 0 && done > 0,
            "{operation:?}: {cut_short} were cut short, {done} were done"
        );
    }
    // Some requests must be cut short in the middle, not only before they are read. About three of 100 rounds show
    // that, which may be none by chance.
    let taken: u32 = tallies.iter().map(|t| t.taken).sum();
    ensure!(taken > 0 || rounds < ROUNDS_LONG, "none was half done");
    Ok(())
}

test!(settings_last_seen_outlive_a_kill);
/// A policy that is removed from the files stays for its runtime entries, with its last settings, even if the daemon
/// that saw them was killed.
fn settings_last_seen_outlive_a_kill() -> anyhow::Result<()> {
    let policy = |ms: u32| format!("[policy.p]\ninitial_rto = \"{ms}ms\"\n");
    let mut env = TestEnv::with(&policy(140))?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "p"])?;
    let assert_settings = |env: &TestEnv, expected: &str| -> anyhow::Result<()> {
        let list = env.json(&["list"])?;
        let found = &list["policies"]["p"]["settings"]["initial_rto"];
        ensure!(found == expected, "{found}, not {expected}: {list:#}");
        Ok(())
    };
    let other = "[policy.other]\ninitial_rto = \"300ms\"\n";
    // Seen by a reload.
    env.configure(&policy(160))?;
    env.cli(&["reload"])?;
    env.end(Signal::SIGKILL)?;
    env.configure(other)?;
    env.start()?;
    assert_settings(&env, "160ms")?;
    // Seen at a start.
    env.end(Signal::SIGKILL)?;
    env.configure(&policy(180))?;
    env.start()?;
    env.end(Signal::SIGKILL)?;
    env.configure(other)?;
    env.start()?;
    assert_settings(&env, "180ms")
}

struct Run {
    /// Declared before `env`, as fields are dropped in order and it runs in that cgroup.
    prober: Prober,
    env: TestEnv,
    rng: ChaCha8Rng,
    on_exit: &'static str,
    desired: Desired,
    /// The longest duration of each operation whose end was awaited ([`Moment::Done`]).
    durations: BTreeMap<Operation, Duration>,
    tally: Tally,
}

impl Run {
    fn new(mut rng: ChaCha8Rng, on_exit: &'static str) -> anyhow::Result<Self> {
        let env = TestEnv::new()?;
        env.net.black_hole(PORT)?;
        let addresses = [to(SERVER_V4, PORT), to(SERVER_V6, PORT)];
        let expect = ALWAYS_MS.map(|ms| Duration::from_millis(ms.into()));
        let prober = env.prober(&addresses, &expect)?;
        let desired = Desired::default().with(&File::random(&mut rng, on_exit));
        Ok(Self {
            prober,
            env,
            rng,
            on_exit,
            desired,
            durations: BTreeMap::new(),
            tally: Tally::default(),
        })
    }

    fn rounds(mut self, count: u32) -> anyhow::Result<Tally> {
        self.configure(&self.desired.file.clone())?;
        self.env.start()?;
        // So that there is something to remove from the file.
        for _ in 0..3 {
            let (request, after) = self.desired.save(&mut self.rng);
            self.env
                .socket_request("POST", request.path, &request.body)?;
            self.desired = after;
        }
        self.check(std::slice::from_ref(&self.desired))?;
        self.prober.begin()?;
        // Each operation occurs equally often.
        let mut operations = Vec::new();
        let mut time = 0;
        for round in 0..count {
            if operations.is_empty() {
                operations.extend(OPERATIONS);
                operations.shuffle(&mut self.rng);
                time = round / u32::try_from(operations.len())?;
            }
            let Some(operation) = operations.pop() else {
                bail!("no operation");
            };
            let moment = self.moment(operation, time);
            let took = self.round(operation, moment).with_context(|| {
                format!(
                    "round {round}: {operation:?}, killed {moment:?}\n{}",
                    self.env.log()
                )
            })?;
            if matches!(moment, Moment::Done) {
                let longest = self.durations.entry(operation).or_default();
                *longest = took.max(*longest);
            }
        }
        self.look()?;
        self.finish()?;
        self.tally.rounds = count;
        Ok(self.tally)
    }

    /// Chooses when SIGKILL is sent. Mostly at any moment, including shortly after the end. The first time before the
    /// operation begins, and the second time and every sixth after it when it is done, so that even few rounds have
    /// some that are cut short and some that are not, and the duration of each operation is known.
    fn moment(&mut self, operation: Operation, time: u32) -> Moment {
        let share = self.rng.random_range(0.0..1.2);
        match time {
            0 => Moment::Unheard,
            _ if time % 6 == 1 => Moment::Done,
            _ => Moment::After(self.durations[&operation].mul_f64(share)),
        }
    }

    /// Runs an operation, SIGKILL, a start, and a check of the kernel. Returns how long the operation took if its end
    /// was awaited.
    fn round(&mut self, mut operation: Operation, moment: Moment) -> anyhow::Result<Duration> {
        let (course, after) = match operation {
            Operation::Start => {
                self.env.end(Signal::SIGKILL)?;
                let file = File::random(&mut self.rng, self.on_exit);
                self.configure(&file)?;
                self.desired = self.desired.with(&file);
                (self.start(moment)?, self.desired.clone())
            }
            Operation::Stop => {
                if self.on_exit == "detach" {
                    self.look()?;
                }
                (self.stop(moment)?, self.desired.clone())
            }
            Operation::Reload => {
                let file = File::random(&mut self.rng, self.on_exit);
                self.configure(&file)?;
                // Whatever happens to the request, the next start reads the file.
                self.desired = self.desired.with(&file);
                let request = Request {
                    path: "/v1/reload",
                    body: String::new(),
                };
                (self.ask(&request, moment)?, self.desired.clone())
            }
            Operation::Add | Operation::Save | Operation::Unsave | Operation::Remove => {
                let (request, after) = match operation {
                    Operation::Add => self.desired.add(&mut self.rng),
                    Operation::Save => self.desired.save(&mut self.rng),
                    Operation::Unsave => self.desired.unsave(&mut self.rng).unwrap_or_else(|| {
                        operation = Operation::Save;
                        self.desired.save(&mut self.rng)
                    }),
                    _ => self.desired.remove(&mut self.rng).unwrap_or_else(|| {
                        operation = Operation::Add;
                        self.desired.add(&mut self.rng)
                    }),
                };
                (self.ask(&request, moment)?, after)
            }
        };
        let tally = if course.done {
            &mut self.tally.done
        } else {
            &mut self.tally.cut_short
        };
        *tally.entry(operation).or_default() += 1;
        self.env.start()?;
        if course.done {
            self.desired = after;
            self.check(std::slice::from_ref(&self.desired))?;
        } else {
            let half = self.desired.half_saved(&after);
            let candidates = [self.desired.clone(), after, half];
            let which = self.check(&candidates)?;
            self.tally.taken += u32::from(which != 0);
            self.desired = candidates[which].clone();
        }
        if operation == Operation::Stop && self.on_exit == "detach" {
            self.prober.begin()?;
        }
        Ok(course.took)
    }

    /// A start that SIGKILL ends.
    fn start(&mut self, moment: Moment) -> anyhow::Result<Course> {
        const READY: &str = "READY=1";
        let begin = Instant::now();
        self.env.spawn_under(&[])?;
        let awaited = match moment {
            Moment::Unheard => false,
            Moment::After(delay) => {
                thread::sleep(delay);
                false
            }
            Moment::Done => self.env.notified(READY).map(|_| true)?,
        };
        let took = begin.elapsed();
        self.killed()?;
        let done = awaited || self.env.has_notified(READY)?;
        Ok(Course { done, took })
    }

    /// A stop; it is done unless SIGKILL ended the daemon.
    fn stop(&mut self, moment: Moment) -> anyhow::Result<Course> {
        let begin = Instant::now();
        let status = match moment {
            Moment::Unheard => {
                self.env.signal(Signal::SIGSTOP)?;
                self.env.signal(Signal::SIGTERM)?;
                self.env.end(Signal::SIGKILL)?
            }
            Moment::After(delay) => {
                self.env.signal(Signal::SIGTERM)?;
                thread::sleep(delay);
                self.env.end(Signal::SIGKILL)?
            }
            Moment::Done => self.env.end(Signal::SIGTERM)?,
        };
        let took = begin.elapsed();
        let done = status.success();
        ensure!(done || is_sigkill(status), "{status}");
        let is_left = self.env.pin_dir().exists();
        ensure!(!done || is_left == (self.on_exit == "keep"), "{is_left}");
        Ok(Course { done, took })
    }

    /// Sends SIGKILL to a daemon that does not exit by itself.
    fn killed(&mut self) -> anyhow::Result<()> {
        let status = self.env.end(Signal::SIGKILL)?;
        ensure!(is_sigkill(status), "it ended by itself: {status}");
        Ok(())
    }

    /// Replaces the file by renaming, as editors do.
    fn configure(&self, file: &File) -> anyhow::Result<()> {
        let new = self.env.dir().join("etc/.new");
        fs::write(&new, self.env.config_text(&file.text()))?;
        Ok(fs::rename(new, self.env.config())?)
    }

    /// Sends a request to a daemon that SIGKILL ends; it is done if it was answered before. The whole request is in the
    /// daemon's socket before the time starts.
    fn ask(&mut self, request: &Request, moment: Moment) -> anyhow::Result<Course> {
        let mut stream = UnixStream::connect(self.env.socket())?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        if matches!(moment, Moment::Unheard) {
            self.env.signal(Signal::SIGSTOP)?;
        }
        let begin = Instant::now();
        http::send(&mut stream, "POST", request.path, &request.body)?;
        let answer = match moment {
            Moment::Unheard => {
                self.killed()?;
                http::receive(stream).ok()
            }
            Moment::After(delay) => {
                thread::sleep(delay);
                self.killed()?;
                http::receive(stream).ok()
            }
            Moment::Done => Some(http::receive(stream)?),
        };
        let took = begin.elapsed();
        if matches!(moment, Moment::Done) {
            self.killed()?;
        }
        if let Some(answer) = &answer {
            ensure!(answer.status == 200, "{request:?}: {answer:?}");
        }
        let done = answer.is_some();
        Ok(Course { done, took })
    }

    /// Ends probing, and asserts that there was no moment without a policy.
    fn look(&mut self) -> anyhow::Result<()> {
        let seen: Seen = self.prober.end()?;
        ensure!(
            seen.wrong == 0,
            "a moment without policy: {seen:?}\n{}",
            self.env.log()
        );
        self.tally.probed += seen.count;
        self.tally.longest_gap = self.tally.longest_gap.max(seen.longest_gap);
        self.tally.covered += seen.covered;
        self.tally.lasted += seen.lasted;
        Ok(())
    }

    /// Waits for the cleanup that takes longer than a start: the cgroup of a killed probe.
    fn finish(&mut self) -> anyhow::Result<()> {
        self.env
            .wait_status("the probe", |status| status["probe"].is_object())?;
        let below = || {
            let all = fs::read_dir(self.env.cgroup.path()).into_iter().flatten();
            let dirs = all.flatten().filter(|entry| entry.path().is_dir());
            Ok(dirs.map(|entry| entry.path()).collect::<Vec<_>>())
        };
        eventually_seen("end of cgroups below", TIMEOUT, below, Vec::is_empty)?;
        self.env.end(Signal::SIGKILL)?;
        self.env.cli(&["detach"])?;
        ensure!(!self.env.pin_dir().exists());
        Ok(())
    }
}

fn is_sigkill(status: std::process::ExitStatus) -> bool {
    status.signal() == Some(Signal::SIGKILL as i32)
}
