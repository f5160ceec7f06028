//! `cargo xtask bench scale`: the agent with a million entries.
//!
//! The same prefixes, IPv4 and IPv6, go into plain tries by batch inserts, and into one or several files of an agent.
//! The former is the minimum that the kernel needs; the difference is the agent's cost. During this time another client
//! requests `status` every few milliseconds.

use std::{
    collections::HashSet,
    fmt::{Display, Write as _},
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    env::TestEnv,
    http,
    trie::{Keys, Tries},
};
use serde_json::{Value, json};

use crate::{
    process::{agent, check_signals},
    result::{BenchResult, Goal, elapsed_ms, table},
    sample::Sample,
    suite::SampleSizes,
};

/// Options of this benchmark only.
#[derive(Clone, Copy, clap::Args)]
#[group(id = "scale")]
pub(crate) struct Args {
    /// Prefixes of `scale`, half of them IPv6 [default: 1000000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1000..=4_000_000))]
    entries: Option<u32>,
    /// Lists of the prefixes of `scale` for each policy; a reload changes each of them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    files: u32,
}

/// Pause between two requests for `status`.
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of entries in a request of the API.
const MAX_CIDRS: usize = 524_288;
const SEED: u64 = 7;
const POLICIES: [&str; 2] = ["near", "far"];

type Prefix = (IpAddr, u8);

pub(crate) fn run(sizes: SampleSizes, args: &Args, programs: &Path) -> anyhow::Result<BenchResult> {
    let sizes = SampleSizes {
        entries: args.entries.unwrap_or(sizes.entries),
        ..sizes
    };
    let mut set = Set::new(sizes.entries as usize);
    let mut measured = Measured::default();
    for _ in 0..sizes.loads {
        check_signals()?;
        measured.control(&set)?;
        measured.agent(sizes, args.files, programs, &mut set)?;
        measured.requests(programs, &set)?;
    }
    let SampleSizes { entries, loads, .. } = sizes;
    let (files, tables) = (args.files, measured.tables());
    Ok(BenchResult {
        text: format!(
            "{entries} prefixes in {files} list(s) for each of two policies; {loads} starts with {loads} reloads each.\n\n{tables}"
        ),
        goals: measured.goals(),
    })
}

// Rows of the table of times.
const UNSORTED: &str = "raw batch insert, in the files' order";
const SORTED: &str = "raw batch insert, sorted";
const LOAD: &str = "start until ready";
const RELOAD: &str = "`reload`, 1 % changed";
const LIST: &str = "`list --json`";
const LOOKUP: &str = "`lookup`";
const DETACH: &str = "`detach`, and three seconds after it";
const RELOAD_MANY: &str = "`reload` of as many as a request may have";
const ADD_MANY: &str = "`add` of the same in one request";
const REMOVE_MANY: &str = "`remove` of them in one request";
// Rows of the table of memory.
const RESIDENT: &str = "daemon, resident";
const PEAK: &str = "daemon, peak resident";
const PEAK_MANY: &str = "the same with large requests";
const SLAB: &str = "kernel slab, for the tries";

/// Measured values by row, in the order of the first ones.
#[derive(Default)]
struct Series(Vec<(&'static str, Vec<f64>)>);

impl Series {
    fn push(&mut self, row: &'static str, value: f64) {
        match self.0.iter_mut().find(|(name, _)| *name == row) {
            Some((_, values)) => values.push(value),
            None => self.0.push((row, vec![value])),
        }
    }

    fn of(&self, row: &str) -> Sample {
        let rows = self.0.iter().filter(|(name, _)| *name == row);
        Sample::of(rows.flat_map(|(_, values)| values).copied())
    }

    /// For each row its name, the median and the range.
    fn rows(&self) -> impl Iterator<Item = [String; 3]> {
        self.0.iter().map(|(name, _)| {
            let sample = self.of(name);
            let [median, min, max] =
                [sample.median(), sample.min(), sample.max()].map(|value| format!("{value:.3}"));
            [(*name).to_owned(), median, format!("{min} to {max}")]
        })
    }
}

#[derive(Default)]
struct Measured {
    /// Seconds.
    times: Series,
    /// The slowest answer to `status` during each, milliseconds.
    status: Series,
    /// MB.
    memory: Series,
}

impl Measured {
    /// Runs a function that returns its time, while another client requests `status`.
    fn observed(
        &mut self,
        row: &'static str,
        env: &mut TestEnv,
        run: impl FnOnce(&mut TestEnv) -> anyhow::Result<f64>,
    ) -> anyhow::Result<()> {
        let client = StatusClient::start(env.socket());
        let seconds = run(env)?;
        self.status.push(row, client.stop()? * 1e3);
        self.times.push(row, seconds);
        Ok(())
    }

    fn control(&mut self, set: &Set) -> anyhow::Result<()> {
        let mut sorted: Vec<Prefix> = set.entries.iter().map(|(prefix, _)| *prefix).collect();
        let unsorted = fill(Keys::of(sorted.iter().copied()))?;
        self.times.push(UNSORTED, unsorted);
        sorted.sort_unstable();
        let sorted = fill(Keys::of(sorted.into_iter()))?;
        self.times.push(SORTED, sorted);
        Ok(())
    }

    fn agent(
        &mut self,
        sizes: SampleSizes,
        files: u32,
        programs: &Path,
        set: &mut Set,
    ) -> anyhow::Result<()> {
        let mut env = TestEnv::of(programs.join("rto-agent"))?;
        env.configure(&format!("max_entries = {}\n{}", sizes.entries, policies()))?;
        set.write(&env.policies_dir(), files)?;
        let slab = slab_mb()?;
        self.observed(LOAD, &mut env, |env| Ok(elapsed_ms(|| env.start())? / 1e3))?;
        self.memory.push(RESIDENT, memory_mb(env.pid()?, "VmRSS")?);
        self.memory.push(SLAB, slab_mb()? - slab);
        for _ in 0..sizes.loads {
            check_signals()?;
            set.change(set.entries.len() / 100);
            set.write(&env.policies_dir(), files)?;
            self.observed(RELOAD, &mut env, |env| cli(env, &["reload"]))?;
            ensure_entries(&env, sizes.entries as usize)?;
        }
        self.memory.push(RESIDENT, memory_mb(env.pid()?, "VmRSS")?);
        self.observed(LIST, &mut env, |env| cli(env, &["list", "--json"]))?;
        self.memory.push(PEAK, memory_mb(env.pid()?, "VmHWM")?);
        let address = set.entries[set.entries.len() / 2].0.0.to_string();
        self.times.push(LOOKUP, cli(&env, &["lookup", &address])?);
        self.observed(DETACH, &mut env, |env| {
            let took = cli(env, &["detach"])?;
            // The kernel frees the maps after the daemon has answered.
            std::thread::sleep(Duration::from_secs(3));
            Ok(took)
        })
    }

    /// The maximum number of entries in a request: from a file, then in one request.
    fn requests(&mut self, programs: &Path, set: &Set) -> anyhow::Result<()> {
        let set = set.first(MAX_CIDRS);
        let configuration = format!("max_entries = {MAX_CIDRS}\n{}", policies());
        let mut env = agent(programs, &configuration)?;
        set.write(&env.policies_dir(), 1)?;
        self.times.push(RELOAD_MANY, cli(&env, &["reload"])?);
        ensure_entries(&env, set.entries.len())?;
        for file in fs::read_dir(env.policies_dir())? {
            fs::remove_file(file?.path())?;
        }
        cli(&env, &["reload"])?;
        ensure_entries(&env, 0)?;

        let cidrs = set.entries.iter();
        let cidrs: Vec<String> = cidrs
            .map(|((ip, length), _)| format!("{ip}/{length}"))
            .collect();
        let request = |env: &TestEnv, path: &str, body: Value| {
            let body = body.to_string();
            let sent = || env.socket_request("POST", path, &body).map(drop);
            Ok(elapsed_ms(sent)? / 1e3)
        };
        let body = json!({ "cidrs": cidrs, "policy": POLICIES[0] });
        self.observed(ADD_MANY, &mut env, |env| request(env, "/v1/entries", body))?;
        ensure_entries(&env, set.entries.len())?;
        let took = request(&env, "/v1/entries/remove", json!({ "cidrs": cidrs }))?;
        self.times.push(REMOVE_MANY, took);
        ensure_entries(&env, 0)?;
        self.memory.push(PEAK_MANY, memory_mb(env.pid()?, "VmHWM")?);
        Ok(())
    }

    fn tables(&self) -> String {
        let times = self.times.rows().map(|[row, median, range]| {
            let status = self.status.of(&row).max();
            let status = if status.is_nan() {
                String::new()
            } else {
                format!("{status:.1}")
            };
            [row, median, range, status]
        });
        let head = ["s", "median", "range", "slowest `status` during it, ms"];
        let memory = table(["MB", "median", "range"], self.memory.rows());
        format!("{}\n{memory}", table(head, times))
    }

    fn goals(&self) -> Vec<Goal> {
        let time = |row| self.times.of(row).median();
        let status = |what, row| Goal::at_most(50.0, " ms", what, self.status.of(row).max(), 1);
        let load = "load, relative to a batch insert of the same keys in the same order";
        let add = "a large `add`, relative to a reload of the same entries";
        let peak = self.memory.of(PEAK).max();
        vec![
            Goal::at_most(1.3, "x", load, time(LOAD) / time(UNSORTED), 2),
            Goal::at_most(0.3, " s", "reload with 1 % changed", time(RELOAD), 3),
            Goal::at_most(200.0, " MB", "the daemon's peak memory", peak, 0),
            status("slowest `status` during a load", LOAD),
            status("slowest `status` during a reload", RELOAD),
            status("slowest `status` during a list", LIST),
            status("slowest `status` during a detachment and after it", DETACH),
            Goal::at_most(2.0, "x", add, time(ADD_MANY) / time(RELOAD_MANY), 2),
            status("slowest `status` during a large `add`", ADD_MANY),
        ]
    }
}

fn ensure_entries(env: &TestEnv, expected: usize) -> anyhow::Result<()> {
    let found = env.json(&["status"])?["entries"].as_u64();
    ensure!(found == Some(expected as u64), "{found:?} entries");
    Ok(())
}

/// Seconds to insert these keys into new tries.
fn fill(keys: Keys) -> anyhow::Result<f64> {
    let tries = Tries::new(8 << 20).context("LPM tries")?;
    let begin = Instant::now();
    tries.fill(&keys)?;
    let took = begin.elapsed().as_secs_f64();
    tries.empty(&keys)?;
    Ok(took)
}

fn cli(env: &TestEnv, args: &[&str]) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let output = env.command(args).output()?;
    let took = begin.elapsed().as_secs_f64();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{args:?}: {error}");
    Ok(took)
}

/// A client that requests `status` in a loop.
struct StatusClient {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<f64>>,
}

impl StatusClient {
    fn start(socket: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut slowest = 0f64;
            while !stopped.load(Ordering::Relaxed) {
                let begin = Instant::now();
                // During a load the daemon has no socket yet.
                if let Ok(stream) = UnixStream::connect(&socket) {
                    let answer = http::request(stream, "GET", "/v1/status", "")?;
                    ensure!(answer.body.contains("\"healthy\""), "{}", answer.body);
                    slowest = slowest.max(begin.elapsed().as_secs_f64());
                }
                std::thread::sleep(PAUSE);
            }
            Ok(slowest)
        });
        Self { stop, thread }
    }

    /// The slowest answer, seconds.
    fn stop(self) -> anyhow::Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        let slowest = self.thread.join();
        slowest.map_err(|_| anyhow::anyhow!("the thread that asks for status panicked"))?
    }
}

/// A field of a process's status, megabytes.
pub(crate) fn memory_mb(pid: impl Display, field: &str) -> anyhow::Result<f64> {
    kilobytes(&format!("/proc/{pid}/status"), field)
}

pub(crate) fn slab_mb() -> anyhow::Result<f64> {
    kilobytes("/proc/meminfo", "SUnreclaim")
}

fn kilobytes(file: &str, field: &str) -> anyhow::Result<f64> {
    let text = fs::read_to_string(file)?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next());
    let kb: f64 = number
        .with_context(|| format!("{file} has no {field}"))?
        .parse()?;
    Ok(kb / 1024.0)
}

fn policies() -> String {
    POLICIES
        .iter()
        .zip([100, 300])
        .map(|(name, ms)| format!("[policy.{name}]\ninitial_rto = \"{ms}ms\"\n"))
        .collect()
}

/// Prefixes and their policies; the same in each run.
struct Set {
    entries: Vec<(Prefix, usize)>,
    known: HashSet<Prefix>,
    random: u64,
}

impl Set {
    fn new(count: usize) -> Self {
        let mut set = Self {
            entries: Vec::with_capacity(count),
            known: HashSet::with_capacity(count),
            random: SEED,
        };
        for i in 0..count {
            let prefix = set.new_prefix(i % 2 == 0);
            set.entries.push((prefix, i / 2 % POLICIES.len()));
        }
        set
    }

    /// The first prefixes, at most this many.
    fn first(&self, most: usize) -> Self {
        let entries = self.entries.iter().take(most).copied().collect();
        Self {
            entries,
            known: HashSet::new(),
            random: SEED,
        }
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn new_prefix(&mut self, v4: bool) -> Prefix {
        loop {
            let (high, low, length) = (self.next(), self.next(), self.next());
            let prefix = if v4 {
                let length = 16 + part(length, 17);
                let bits = u32::try_from(high >> 32).unwrap_or_default();
                let bits = bits & (u32::MAX << (32 - length));
                (Ipv4Addr::from_bits(bits).into(), length)
            } else {
                let length = 32 + part(length, 97);
                // Global unicast, 2000::/3.
                let bits = (u128::from(high) << 64 | u128::from(low)) >> 3 | 1 << 125;
                let bits = bits & (u128::MAX << (128 - length));
                (Ipv6Addr::from_bits(bits).into(), length)
            };
            if self.known.insert(prefix) {
                return prefix;
            }
        }
    }

    /// Changes this many entries: half get the other policy, half are replaced by new prefixes.
    fn change(&mut self, count: usize) {
        for i in 0..count {
            let index = usize::try_from(self.next()).unwrap_or_default() % self.entries.len();
            if i % 2 == 0 {
                self.entries[index].1 = (self.entries[index].1 + 1) % POLICIES.len();
            } else {
                let former = self.entries[index].0;
                let new = self.new_prefix(former.0.is_ipv4());
                self.known.remove(&former);
                self.entries[index].0 = new;
            }
        }
    }

    fn write(&self, dir: &Path, files: u32) -> anyhow::Result<()> {
        let size = self.entries.len().div_ceil(files as usize);
        for (i, entries) in self.entries.chunks(size).enumerate() {
            let mut toml = String::new();
            for (number, name) in POLICIES.iter().enumerate() {
                let file = format!("{i:03}-{name}.txt");
                let mut list = String::new();
                for ((address, length), _) in entries.iter().filter(|(_, p)| *p == number) {
                    writeln!(list, "{address}/{length}")?;
                }
                replace(&dir.join(&file), &list)?;
                writeln!(toml, "[policy.{name}]\ncidrs_file = \"{file}\"")?;
            }
            replace(&dir.join(format!("{i:03}.toml")), &toml)?;
        }
        Ok(())
    }
}

/// Renames a new file over the old one, so that no reader sees a partial file.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let temporary = path.with_extension("new");
    fs::write(&temporary, text)?;
    Ok(fs::rename(temporary, path)?)
}

/// A number below `limit`.
fn part(random: u64, limit: u8) -> u8 {
    u8::try_from(random % u64::from(limit)).unwrap_or_default()
}
