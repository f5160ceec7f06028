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
    result::{BenchResult, Goal, table},
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
    /// Files of the prefixes of `scale`; a reload changes each of them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    files: u32,
}

/// Maximum time of the load, relative to a batch insert of the same keys.
const LOAD_GOAL: f64 = 1.3;
/// Maximum time of a reload with 1 % changed, seconds.
const RELOAD_GOAL: f64 = 0.3;
/// Maximum time of an `add` of many entries, relative to a reload of a file with the same entries.
const ADD_GOAL: f64 = 2.0;
/// Maximum memory of the daemon, MB.
const MEMORY_GOAL: f64 = 200.0;
/// Maximum time of `status`, seconds.
const STATUS_GOAL: f64 = 0.05;

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
        measured.requested.measure(programs, &set)?;
    }
    Ok(BenchResult {
        text: measured.tables(sizes, args.files),
        goals: measured.goals(),
    })
}

/// All measurements; seconds unless noted.
#[derive(Default)]
struct Measured {
    raw: Vec<f64>,
    raw_sorted: Vec<f64>,
    load: Vec<f64>,
    ratio: Vec<f64>,
    reload: Vec<f64>,
    list: Vec<f64>,
    lookup: Vec<f64>,
    detach: Vec<f64>,
    /// Times of the same entries from files and in one request.
    requested: Requested,
    /// MB.
    resident: Vec<f64>,
    peak: Vec<f64>,
    kernel: Vec<f64>,
    /// The slowest answer to `status` during each load.
    while_loading: Vec<f64>,
    while_reloading: Vec<f64>,
    while_listing: Vec<f64>,
    while_detaching: Vec<f64>,
}

impl Measured {
    fn control(&mut self, set: &Set) -> anyhow::Result<()> {
        let mut sorted: Vec<Prefix> = set.entries.iter().map(|(prefix, _)| *prefix).collect();
        let unsorted = fill(Keys::of(sorted.iter().copied()))?;
        sorted.sort_unstable();
        self.raw.push(unsorted);
        self.raw_sorted.push(fill(Keys::of(sorted.into_iter()))?);
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
        let client = StatusClient::start(env.socket());
        let begin = Instant::now();
        env.start()?;
        let load = begin.elapsed().as_secs_f64();
        self.while_loading.push(client.stop()?);
        self.load.push(load);
        let least = self.raw.last().copied().unwrap_or(f64::NAN);
        self.ratio.push(load / least);
        self.kernel.push(slab_mb()? - slab);
        self.resident.push(memory_mb(env.pid()?, "VmRSS")?);

        let address = set.entries[set.entries.len() / 2].0.0.to_string();
        self.lookup.push(cli(&env, &["lookup", &address])?);
        let client = StatusClient::start(env.socket());
        self.list.push(cli(&env, &["list", "--json"])?);
        self.while_listing.push(client.stop()?);

        for _ in 0..sizes.loads {
            check_signals()?;
            set.change(set.entries.len() / 100);
            set.write(&env.policies_dir(), files)?;
            let client = StatusClient::start(env.socket());
            self.reload.push(cli(&env, &["reload"])?);
            self.while_reloading.push(client.stop()?);
            let entries = env.json(&["status"])?["entries"].as_u64();
            ensure!(entries == Some(sizes.entries.into()), "{entries:?} entries");
        }
        self.resident.push(memory_mb(env.pid()?, "VmRSS")?);
        self.peak.push(memory_mb(env.pid()?, "VmHWM")?);

        let client = StatusClient::start(env.socket());
        self.detach.push(cli(&env, &["detach"])?);
        // The kernel frees the maps after the daemon has answered.
        std::thread::sleep(Duration::from_secs(3));
        self.while_detaching.push(client.stop()?);
        Ok(())
    }

    fn tables(&self, sizes: SampleSizes, files: u32) -> String {
        let rows = |rows: &[(&str, &[f64])]| {
            let rows = rows.iter().map(|(what, values)| row(what, values));
            rows.collect::<Vec<_>>()
        };
        let seconds = table(
            ["s", "median", "range", "slowest `status` during it, ms"],
            [
                ("raw batch insert, in the files' order", &self.raw, None),
                ("raw batch insert, sorted", &self.raw_sorted, None),
                ("start until ready", &self.load, Some(&self.while_loading)),
                (
                    "`reload`, 1 % changed",
                    &self.reload,
                    Some(&self.while_reloading),
                ),
                ("`list --json`", &self.list, Some(&self.while_listing)),
                ("`lookup`", &self.lookup, None),
                (
                    "`detach`, and three seconds after it",
                    &self.detach,
                    Some(&self.while_detaching),
                ),
                (
                    "`reload` of as many as a request may have",
                    &self.requested.reload,
                    None,
                ),
                (
                    "`add` of the same in one request",
                    &self.requested.add,
                    Some(&self.requested.status),
                ),
                (
                    "`remove` of them in one request",
                    &self.requested.remove,
                    None,
                ),
            ]
            .map(|(what, values, status)| {
                let [what, median, range] = row(what, values);
                let status = status.map_or_else(String::new, |s| format!("{:.1}", most(s) * 1e3));
                [what, median, range, status]
            }),
        );
        let memory = table(
            ["MB", "median", "range"],
            rows(&[
                ("daemon, resident", &self.resident),
                ("daemon, peak resident", &self.peak),
                ("the same with large requests", &self.requested.peak),
                ("kernel slab, for the tries", &self.kernel),
            ]),
        );
        let SampleSizes { entries, loads, .. } = sizes;
        format!(
            "{entries} prefixes in {files} file(s); {loads} starts with {loads} reloads each.\n\n{seconds}\n{memory}"
        )
    }

    fn goals(&self) -> Vec<Goal> {
        let goal = |what, limit: &str, value: f64, most: f64, measured: String| Goal {
            what,
            limit: limit.to_owned(),
            measured,
            met: value <= most,
        };
        let (ratio, reload) = (median(&self.ratio), median(&self.reload));
        let sorted = median(&self.load) / median(&self.raw_sorted);
        let memory = most(&self.peak);
        let requested = median(&self.requested.ratio);
        let status = |what, times: &[f64]| {
            let slowest = most(times);
            let measured = format!("{:.1} ms", slowest * 1e3);
            goal(what, "at most 50 ms", slowest, STATUS_GOAL, measured)
        };
        vec![
            goal(
                "load, relative to a batch insert of the same keys in the same order",
                "at most 1.3x",
                ratio,
                LOAD_GOAL,
                format!("{ratio:.2}x ({sorted:.2}x of one in sorted order)"),
            ),
            goal(
                "reload with 1 % changed",
                "at most 0.3 s",
                reload,
                RELOAD_GOAL,
                format!("{reload:.3} s"),
            ),
            goal(
                "the daemon's peak memory",
                "at most 200 MB",
                memory,
                MEMORY_GOAL,
                format!("{memory:.0} MB"),
            ),
            status("slowest `status` during a load", &self.while_loading),
            status("slowest `status` during a reload", &self.while_reloading),
            status("slowest `status` during a list", &self.while_listing),
            status(
                "slowest `status` during a detachment and after it",
                &self.while_detaching,
            ),
            goal(
                "a large `add`, relative to a reload of the same entries",
                "at most 2x",
                requested,
                ADD_GOAL,
                format!("{requested:.2}x"),
            ),
            status(
                "slowest `status` during a large `add`",
                &self.requested.status,
            ),
        ]
    }
}

/// The maximum number of entries in a request: from a file, then in one request. Seconds unless noted.
#[derive(Default)]
struct Requested {
    reload: Vec<f64>,
    add: Vec<f64>,
    remove: Vec<f64>,
    ratio: Vec<f64>,
    /// The slowest answer to `status` during the `add`.
    status: Vec<f64>,
    /// MB.
    peak: Vec<f64>,
}

impl Requested {
    fn measure(&mut self, programs: &Path, set: &Set) -> anyhow::Result<()> {
        let set = set.first(MAX_CIDRS);
        let configuration = format!("max_entries = {MAX_CIDRS}\n{}", policies());
        let env = agent(programs, &configuration)?;
        let entries = |expected: usize| -> anyhow::Result<()> {
            let found = env.json(&["status"])?["entries"].as_u64();
            ensure!(found == Some(expected as u64), "{found:?} entries");
            Ok(())
        };
        set.write(&env.policies_dir(), 1)?;
        let reload = cli(&env, &["reload"])?;
        entries(set.entries.len())?;
        for file in fs::read_dir(env.policies_dir())? {
            fs::remove_file(file?.path())?;
        }
        cli(&env, &["reload"])?;
        entries(0)?;

        let cidrs = set.entries.iter();
        let cidrs: Vec<String> = cidrs
            .map(|((ip, length), _)| format!("{ip}/{length}"))
            .collect();
        let request = |path: &str, body: Value| -> anyhow::Result<f64> {
            let body = body.to_string();
            let begin = Instant::now();
            env.socket_request("POST", path, &body)?;
            Ok(begin.elapsed().as_secs_f64())
        };
        let client = StatusClient::start(env.socket());
        let add = request(
            "/v1/entries",
            json!({ "cidrs": cidrs, "policy": POLICIES[0] }),
        )?;
        self.status.push(client.stop()?);
        entries(set.entries.len())?;
        self.remove
            .push(request("/v1/entries/remove", json!({ "cidrs": cidrs }))?);
        entries(0)?;
        self.reload.push(reload);
        self.add.push(add);
        self.ratio.push(add / reload);
        self.peak.push(memory_mb(env.pid()?, "VmHWM")?);
        Ok(())
    }
}

fn row(what: &str, values: &[f64]) -> [String; 3] {
    let sample = Sample::of(values.iter().copied());
    [
        what.to_owned(),
        format!("{:.3}", sample.median()),
        format!("{:.3} to {:.3}", sample.min(), sample.max()),
    ]
}

fn median(values: &[f64]) -> f64 {
    Sample::of(values.iter().copied()).median()
}

fn most(values: &[f64]) -> f64 {
    Sample::of(values.iter().copied()).max()
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
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{args:?}: {said}");
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

fn slab_mb() -> anyhow::Result<f64> {
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
            let mut text = String::new();
            for (number, name) in POLICIES.iter().enumerate() {
                writeln!(text, "[policy.{name}]\ncidrs = [")?;
                for ((address, length), _) in entries.iter().filter(|(_, p)| *p == number) {
                    writeln!(text, "  \"{address}/{length}\",")?;
                }
                text.push_str("]\n");
            }
            // Renamed over the old file, so that no reader sees a partial file.
            let path = dir.join(format!("{i:03}.toml"));
            let temporary = dir.join(".new");
            fs::write(&temporary, text)?;
            fs::rename(temporary, path)?;
        }
        Ok(())
    }
}

/// A number below `limit`.
fn part(random: u64, limit: u8) -> u8 {
    u8::try_from(random % u64::from(limit)).unwrap_or_default()
}
