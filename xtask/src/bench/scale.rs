//! `cargo xtask bench scale`: the agent with a million entries.
//!
//! The same prefixes, IPv4 and IPv6, once into tries of the bench's own by batches and nothing else, and
//! once into a file or several for an agent. The one thing is what the kernel takes at the least; the rest is the
//! agent's. Meanwhile another client asks for `status` every few milliseconds.

use std::{
    collections::HashSet,
    fmt::Write as _,
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
use rto_tests::{
    agent::World,
    http,
    trie::{Keys, Tries},
};

use super::{Sample, go_on};

/// `cargo xtask bench scale`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prefixes, half of them IPv6
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1000..=4_000_000))]
    entries: u32,
    /// Files they are in, each of which has changes in it before a reload
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    files: u32,
    /// How often each is done
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Fail if a goal is missed
    #[arg(long)]
    strict: bool,
}

/// Most that the load may take, in batch inserts of the same keys.
const LOAD_GOAL: f64 = 1.3;
/// Most that a reload with one in a hundred changed may take, seconds.
const RELOAD_GOAL: f64 = 0.3;
/// Most memory of the daemon, MB.
const MEMORY_GOAL: f64 = 200.0;
/// Longest that `status` may take, seconds.
const STATUS_GOAL: f64 = 0.05;

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(5);
const SEED: u64 = 7;
const POLICIES: [&str; 2] = ["near", "far"];

type Prefix = (IpAddr, u8);

pub(crate) fn run(args: &Args, programs: &Path) -> anyhow::Result<()> {
    let mut set = Set::new(args.entries as usize);
    println!(
        "{} prefixes in {} file(s), {} rounds\n",
        args.entries, args.files, args.rounds
    );
    let mut measured = Measured::default();
    for _ in 0..args.rounds {
        go_on()?;
        measured.control(&set)?;
        measured.agent(args, programs, &mut set)?;
    }
    let good = measured.tell();
    ensure!(!args.strict || good, "a goal is missed");
    Ok(())
}

/// Seconds, unless it says otherwise.
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
    /// MB.
    resident: Vec<f64>,
    peak: Vec<f64>,
    kernel: Vec<f64>,
    /// The slowest answer in each.
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

    fn agent(&mut self, args: &Args, programs: &Path, set: &mut Set) -> anyhow::Result<()> {
        let mut world = World::of(programs.join("rto-agent"))?;
        world.configure(&format!("max_entries = {}\n{}", args.entries, policies()))?;
        set.write(&world.policies_dir(), args.files)?;
        let slab = slab_mb()?;
        let asking = Asking::begin(world.socket());
        let begin = Instant::now();
        world.start()?;
        let load = begin.elapsed().as_secs_f64();
        self.while_loading.push(asking.end()?);
        self.load.push(load);
        let least = self.raw.last().copied().unwrap_or(f64::NAN);
        self.ratio.push(load / least);
        self.kernel.push(slab_mb()? - slab);
        self.resident.push(memory_mb(&world, "VmRSS")?);

        let address = set.entries[set.entries.len() / 2].0.0.to_string();
        self.lookup.push(cli(&world, &["lookup", &address])?);
        let asking = Asking::begin(world.socket());
        self.list.push(cli(&world, &["list", "--json"])?);
        self.while_listing.push(asking.end()?);

        for _ in 0..args.rounds {
            go_on()?;
            set.change(set.entries.len() / 100);
            set.write(&world.policies_dir(), args.files)?;
            let asking = Asking::begin(world.socket());
            self.reload.push(cli(&world, &["reload"])?);
            self.while_reloading.push(asking.end()?);
            let entries = world.json(&["status"])?["entries"].as_u64();
            ensure!(entries == Some(args.entries.into()), "{entries:?} entries");
        }
        self.resident.push(memory_mb(&world, "VmRSS")?);
        self.peak.push(memory_mb(&world, "VmHWM")?);

        let asking = Asking::begin(world.socket());
        self.detach.push(cli(&world, &["detach"])?);
        // What the kernel does then it does after the answer.
        std::thread::sleep(Duration::from_secs(3));
        self.while_detaching.push(asking.end()?);
        Ok(())
    }

    fn tell(&self) -> bool {
        let sample = |values: &[f64]| Sample::of(values.iter().copied());
        for (what, values) in [
            ("batch insert, as they come, s", &self.raw),
            ("batch insert, sorted, s", &self.raw_sorted),
            ("start until ready, s", &self.load),
            ("reload with 1 % changed, s", &self.reload),
            ("list --json, s", &self.list),
            ("lookup, s", &self.lookup),
            ("detach, s", &self.detach),
            ("resident, MB", &self.resident),
            ("resident at the most, MB", &self.peak),
            ("kernel's slab, MB", &self.kernel),
            ("slowest status, list, s", &self.while_listing),
            ("slowest status, detach, s", &self.while_detaching),
        ] {
            println!("{what:32}{}", sample(values));
        }
        println!();
        let worst = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let median = |values: &[f64]| sample(values).median();
        [
            judge("load / batch insert", median(&self.ratio), LOAD_GOAL, "x"),
            judge(
                "reload, 1 % changed",
                median(&self.reload),
                RELOAD_GOAL,
                " s",
            ),
            judge("resident", worst(&self.resident), MEMORY_GOAL, " MB"),
            judge(
                "resident at the most",
                worst(&self.peak),
                MEMORY_GOAL,
                " MB",
            ),
            judge(
                "slowest status, load",
                worst(&self.while_loading),
                STATUS_GOAL,
                " s",
            ),
            judge(
                "slowest status, reload",
                worst(&self.while_reloading),
                STATUS_GOAL,
                " s",
            ),
        ]
        .iter()
        .all(|good| *good)
    }
}

fn judge(what: &str, value: f64, goal: f64, unit: &str) -> bool {
    let good = value <= goal;
    let verdict = if good { "good" } else { "MISSED" };
    println!("{what}: {value:.3}{unit} (goal {goal}{unit}) {verdict}");
    good
}

/// How long new tries take to hold these keys.
fn fill(keys: Keys) -> anyhow::Result<f64> {
    let tries = Tries::new(8 << 20).context("LPM tries")?;
    let begin = Instant::now();
    tries.fill(&keys)?;
    let took = begin.elapsed().as_secs_f64();
    tries.empty(&keys)?;
    Ok(took)
}

fn cli(world: &World, args: &[&str]) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let output = world.command(args).output()?;
    let took = begin.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{args:?}: {said}");
    Ok(took)
}

/// Asks for `status` again and again.
struct Asking {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<f64>>,
}

impl Asking {
    fn begin(socket: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut slowest = 0f64;
            while !told.load(Ordering::Relaxed) {
                let begin = Instant::now();
                // Before there is a socket there is nobody to answer.
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
    fn end(self) -> anyhow::Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        let slowest = self.thread.join();
        slowest.map_err(|_| anyhow::anyhow!("who asks for status died"))?
    }
}

fn memory_mb(world: &World, field: &str) -> anyhow::Result<f64> {
    kilobytes(&format!("/proc/{}/status", world.pid()?), field)
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

/// Prefixes and their policies, the same in each run.
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

    /// Half of so many get another policy, and half go for others that come.
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
            // Renamed over the former one, so that nobody reads half a file.
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
