//! Time from `add` until its effect in the kernel, and until it returns.

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    bpf::{lookup, pinned},
    env::TestEnv,
    wait::TIMEOUT,
};

use crate::{
    process::check_signals,
    result::{BenchResult, Goal, elapsed_ms, millis, times_table},
    sample::Sample,
    start::no_op,
    suite::SampleSizes,
    traffic::NEAR,
};

/// In production `state_dir` is below /run, which is in memory; this directory is in memory on every host.
const IN_MEMORY: &str = "/dev/shm";
/// Maximum time of `add`.
const GOAL_MS: f64 = 5.0;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let binary = programs.join("rto-agent");
    let (env, map) = env(&binary, Path::new(IN_MEMORY))?;
    let (on_disk, map_on_disk) = self::env(&binary, &std::env::temp_dir())?;
    let (mut process, mut status, mut requests) = (vec![], vec![], vec![]);
    let (mut effects, mut returns, mut removals, mut disk) = (vec![], vec![], vec![], vec![]);
    for n in 0..u8::try_from(sizes.starts)? {
        check_signals()?;
        process.push(elapsed_ms(|| no_op(&binary))?);
        status.push(elapsed_ms(|| env.cli(&["status"]).map(drop))?);
        let cidr = format!("10.99.{n}.0/24");
        let (effect, returned) = add(&env, &map, n, &cidr)?;
        effects.push(effect);
        returns.push(returned);
        removals.push(elapsed_ms(|| env.cli(&["remove", &cidr]).map(drop))?);
        let body = serde_json::json!({"cidrs": [&cidr], "policy": "near"}).to_string();
        requests.push(elapsed_ms(|| {
            let answer = env.socket_request("POST", "/v1/entries", &body)?;
            ensure!(answer["changed"]["added"] == 1, "{answer}");
            Ok(())
        })?);
        env.cli(&["remove", &cidr])?;
        disk.push(add(&on_disk, &map_on_disk, n, &cidr)?.0);
    }
    let samples = [
        ("`--version`, from exec to exit", process),
        ("`status`, from exec to exit", status),
        ("`add`, from exec to the entry in the kernel", effects),
        ("`add`, from exec to exit", returns),
        ("`remove`, from exec to exit", removals),
        ("the same addition as a request to the socket", requests),
        (
            "`add`, from exec to the entry in the kernel, `state_dir` on this host's temporary file system",
            disk,
        ),
    ];
    let samples = samples.map(|(name, times)| (name, Sample::of(times)));
    let (what, effect) = &samples[2];
    Ok(BenchResult {
        text: times_table(&samples),
        goals: vec![Goal::at_most(GOAL_MS, " ms", what, effect.median(), 1)],
    })
}

/// An agent with its state below this directory, and its map of IPv4 entries.
fn env(binary: &Path, parent: &Path) -> anyhow::Result<(TestEnv, OwnedFd)> {
    let mut env = TestEnv::of_in(binary.to_owned(), parent)?;
    env.configure(NEAR)?;
    env.start()?;
    let map = find(&env.pin_dir(), "ENTRIES_V4").context("no ENTRIES_V4 is pinned")?;
    Ok((env, pinned(&map)?))
}

/// Adds an entry while another thread polls the map; returns the milliseconds until the entry appears, and until the
/// command ends.
fn add(env: &TestEnv, map: &OwnedFd, n: u8, cidr: &str) -> anyhow::Result<(f64, f64)> {
    // struct bpf_lpm_trie_key: prefix length, address.
    let mut key = 32u32.to_ne_bytes().to_vec();
    key.extend([10, 99, n, 1]);
    ensure!(!lookup(map, &key, &mut [0])?, "{cidr} is already listed");
    let is_polling = AtomicBool::new(false);
    let mut command = env.command(&["add", cidr, "--policy", "near"]);
    thread::scope(|scope| {
        let poller = scope.spawn(|| {
            is_polling.store(true, Ordering::Release);
            let end = Instant::now() + TIMEOUT;
            while !lookup(map, &key, &mut [0])? {
                ensure!(Instant::now() < end, "{cidr} did not appear");
            }
            Ok(Instant::now())
        });
        while !is_polling.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let begin = Instant::now();
        let output = command.output()?;
        let returned = begin.elapsed();
        ensure!(output.status.success(), "add: {}", output.status);
        let seen = poller
            .join()
            .map_err(|_| anyhow::anyhow!("the polling thread panicked"))??;
        Ok((millis(seen - begin), millis(returned)))
    })
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(dir).ok()?.flatten().find_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            find(&path, name)
        } else {
            (entry.file_name() == name).then_some(path)
        }
    })
}
