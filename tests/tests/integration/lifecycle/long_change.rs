//! A long change: the watchdog is notified while it makes progress, and a stop does not wait for its end.
//!
//! The test chooses how long the change takes: the engine's thread is held and runs only for short periods.

use rto_testbed::{
    emulated::{is_emulated, slowed},
    wait::{self},
};
use rto_tests::{held_thread::HeldThread, locked_socket::LockedSocket};

use super::bounded;
use crate::{prelude::*, scale};

/// The longest time that a stop may take, and the allowance for a busy machine.
const STOP_LIMIT: Duration = Duration::from_secs(2);
const BUSY_MACHINE: Duration = Duration::from_secs(4);

const ENGINE: &str = "engine";
const ADD: &str = "/v1/entries";
const REMOVE: &str = "/v1/entries/remove";

fn many() -> u32 {
    scaled("entries", 100_000, 50_000)
}

fn kept() -> anyhow::Result<TestEnv> {
    let env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    env.configure(&format!("on_exit = \"keep\"\n{}", near("\"10.88.0.0/24\"")))?;
    Ok(env)
}

fn start_watched(env: &mut TestEnv, timeout: Duration) -> anyhow::Result<()> {
    let timeout = format!("WATCHDOG_USEC={}", timeout.as_micros());
    env.start_under(&["env".to_owned(), timeout])
}

fn entries(env: &TestEnv) -> anyhow::Result<u64> {
    env.status()?["entries"].as_u64().context("no entries")
}

test!(watchdog_is_notified_during_progress);
/// The change takes several times as long as WATCHDOG_USEC.
fn watchdog_is_notified_during_progress() -> anyhow::Result<()> {
    // The verifier restarts when it is interrupted, so it must complete within one of these periods.
    const MOMENT: Duration = Duration::from_millis(30);
    const PAUSE: Duration = Duration::from_millis(500);
    // An emulated processor works for up to 2 s from one notification to the next, after pauses of half the timeout.
    let timeout = Duration::from_secs(if is_emulated() { 6 } else { 2 });
    let mut env = kept()?;
    start_watched(&mut env, timeout)?;
    let engine = HeldThread::of(env.pid()?, ENGINE)?;
    // The change needs more than a second of CPU time, of which the engine gets about a third.
    let all = 3 * many();
    scale::list(&env, all)?;
    // Earlier notifications do not count.
    env.has_notified("WATCHDOG=1")?;
    // Time in which the engine ran or was held. The time that it waited for a processor, or for its helper threads,
    // shows nothing about the daemon.
    let (mut all_time, mut silent, mut longest) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let limit = Instant::now() + 10 * TIMEOUT;
    while all_time < 3 * timeout {
        ensure!(
            Instant::now() < limit,
            "nothing was received, nothing was done"
        );
        let mut passed = engine.advance(MOMENT)?;
        // Work without interruption takes as long as on a real machine.
        if silent < timeout / 2 {
            thread::sleep(PAUSE);
            passed += PAUSE;
        }
        all_time += passed;
        silent += passed;
        longest = longest.max(silent);
        if env.has_notified("WATCHDOG=1")? {
            silent = Duration::ZERO;
        }
    }
    ensure!(entries(&env)? == 1, "the change was over too soon");
    ensure!(longest < timeout, "nothing was received for {longest:?}");
    drop(engine);
    let all = u64::from(all) + 1;
    env.wait_status("the end of the change", |status| status["entries"] == all)?;
    expect(&env, POLICY_RTO)
}

test!(watchdog_is_not_notified_by_a_stuck_engine);
/// The engine is held for as long as the watchdog needs to notice, while other threads answer requests.
fn watchdog_is_not_notified_by_a_stuck_engine() -> anyhow::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let mut env = kept()?;
    start_watched(&mut env, TIMEOUT)?;
    let engine = HeldThread::of(env.pid()?, ENGINE)?;
    let limit = Instant::now() + wait::TIMEOUT;
    let (mut notified, mut times) = (Instant::now(), 0);
    while notified.elapsed() < TIMEOUT {
        ensure!(Instant::now() < limit, "it was answered for {times} times");
        // Threads other than the engine answer this.
        env.cli(&["list"])?;
        if env.has_notified("WATCHDOG=1")? {
            notified = Instant::now();
            times += 1;
        }
    }
    drop(engine);
    env.notified("WATCHDOG=1")?;
    Ok(())
}

/// Stops the daemon, whose engine may be held; returns how long that took.
fn stop(env: &mut TestEnv, engine: Option<HeldThread>) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    env.signal(Signal::SIGTERM)?;
    if let Some(engine) = engine {
        engine.ended()?;
    }
    let status = env.ended()?;
    let took = begin.elapsed();
    ensure!(status.success(), "{status}: {}", env.log());
    Ok(took)
}

fn ensure_prompt(took: Duration) -> anyhow::Result<()> {
    let most = slowed(STOP_LIMIT) + BUSY_MACHINE;
    ensure!(took < most, "it took {took:?} to stop");
    Ok(())
}

test!(a_stop_does_not_wait_for_a_stuck_one);
/// Entries that are already written stay active, and the next start completes the change.
fn a_stop_does_not_wait_for_a_stuck_one() -> anyhow::Result<()> {
    let mut env = kept()?;
    env.start()?;
    let engine = HeldThread::of(env.pid()?, ENGINE)?;
    scale::file(&env, many(), many())?;
    engine.advance(Duration::from_millis(100))?;
    ensure_prompt(stop(&mut env, Some(engine))?)?;
    expect(&env, POLICY_RTO)?;
    env.start()?;
    ensure!(entries(&env)? == u64::from(many()) + 1);
    Ok(())
}

test!(a_stop_of_a_stuck_one_detaches);
/// With `on_exit = "detach"`.
fn a_stop_of_a_stuck_one_detaches() -> anyhow::Result<()> {
    let mut env = super::env()?;
    expect(&env, POLICY_RTO)?;
    let engine = HeldThread::of(env.pid()?, ENGINE)?;
    ensure_prompt(stop(&mut env, Some(engine))?)?;
    ensure!(env.pins().is_err(), "pins are left");
    expect(&env, KERNEL_RTO)
}

test!(a_stop_does_not_wait_for_a_walk, needs = [TCP_ITERATOR]);
/// A socket that is in use blocks the walk over open sockets; the daemon abandons it in time to do what `on_exit` says.
fn a_stop_does_not_wait_for_a_walk() -> anyhow::Result<()> {
    let mut env = configured(&format!(
        "apply_to_open = true\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    let held = LockedSocket::new()?;
    // The walk covers the daemon's own namespace, which is this one, and no other.
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    env.wait_status("the walk", |status| {
        status["open_sockets"]["running"] == true
    })?;
    // Before that the walk would stop by itself.
    let waits = || is_held_up(env.pid()?.as_raw());
    eventually_seen("the walk at the socket", TIMEOUT, waits, |waits| *waits)?;
    env.signal(Signal::SIGTERM)?;
    // The kernel cannot kill a thread that waits for the socket lock.
    let log = env.wait_log("detached")?;
    drop(held);
    ensure!(
        log.contains("the walk over open sockets is blocked")
            && !log.contains("exits without waiting for it"),
        "{log}"
    );
    let status = env.ended()?;
    ensure!(status.success(), "{status}: {}", env.log());
    Ok(())
}

/// Whether a thread of a process waits for a socket lock. (Uninterruptible sleep has other reasons as well.)
fn is_held_up(pid: i32) -> anyhow::Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may have ended since.
        let at = fs::read_to_string(task?.path().join("wchan")).unwrap_or_default();
        // In lock_sock_nested(), or a function that it calls.
        if at.contains("lock_sock") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Requests a change of this many runtime entries; returns whether it was made, and not abandoned because of a stop.
fn change_many(socket: &Path, path: &str, count: u32) -> anyhow::Result<bool> {
    let mut body = json!({ "cidrs": scale::hosts(count) });
    if path == ADD {
        body["policy"] = "near".into();
    }
    let asked = UnixStream::connect(socket)
        .map_err(anyhow::Error::from)
        .and_then(|stream| http::request(stream, "POST", path, &body.to_string()));
    // The daemon may have stopped before the request, or in the middle of it.
    let Ok(answer) = asked else {
        return Ok(false);
    };
    match answer.status {
        200 => Ok(true),
        503 => Ok(false),
        other => bail!("{other}: {}", answer.body),
    }
}

test!(a_stop_in_the_middle_of_a_large_add);
/// Stops at several moments. Entries that were acknowledged exist after the next start, and in any case all are added
/// or none, in the kernel as in the answers.
fn a_stop_in_the_middle_of_a_large_add() -> anyhow::Result<()> {
    let count = scaled("entries", 200_000, 20_000);
    let all = u64::from(count) + 1;
    let mut env = kept()?;
    let socket = env.socket();
    let mut outcomes = Vec::new();
    for used in [0, 20, 60, 150, 400, 1_000, 4_000].map(Duration::from_millis) {
        env.start()?;
        let engine = HeldThread::of(env.pid()?, ENGINE)?;
        let add = || change_many(&socket, ADD, count);
        let (answered, begin) = rto_tests::beside(add, || {
            let engine = engine;
            engine.advance(used)?;
            let begin = Instant::now();
            env.signal(Signal::SIGTERM)?;
            Ok(begin)
        })?;
        let status = env.ended()?;
        ensure!(status.success(), "{status}: {}", env.log());
        ensure_prompt(begin.elapsed())?;
        env.start()?;
        let status = env.status()?;
        ensure!(status["healthy"] == true, "{status:#}");
        let after = entries(&env)?;
        outcomes.push((used, answered, after));
        ensure!(after == 1 || after == all, "{outcomes:?}");
        ensure!(!answered || after == all, "{outcomes:?}");
        if after == all {
            ensure!(change_many(&socket, REMOVE, count)?);
        }
        stop(&mut env, None)?;
    }
    // Both outcomes occurred.
    ensure!(
        outcomes.iter().any(|(.., after)| *after == 1),
        "{outcomes:?}"
    );
    eprintln!("{outcomes:?}");
    Ok(())
}
