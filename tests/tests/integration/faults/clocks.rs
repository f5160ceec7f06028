//! Clocks: expiry uses CLOCK_BOOTTIME, which cannot be set.

use nix::time::{ClockId, clock_gettime, clock_settime};

use crate::prelude::*;

test!(time_namespace_is_refused);
/// Clocks in a time namespace differ from the program's, so a lease or a `--ttl` would end at another time.
fn time_namespace_is_refused() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.cli(&["add", "10.2.0.0/24", "--policy", "near", "--ttl", "2h"])?;
    env.end(Signal::SIGKILL)?;
    let ahead = Duration::from_secs(3 * 3600).as_secs().to_string();
    // The daemon is a child of unshare(1); each ends with the other.
    let wrapper = [
        "unshare",
        "--time",
        "--boottime",
        &ahead,
        "--fork",
        "--kill-child",
    ];
    let refused = env.start_under(&wrapper.map(str::to_owned));
    let why = format!("{:#}", refused.err().context("it has started")?);
    ensure!(why.contains("in a time namespace"), "{why}");
    // The refused daemon has changed nothing.
    env.start()?;
    let left = left(&env, "10.2.0.0/24")?;
    ensure!(left.is_some_and(|s| (7000..=7200).contains(&s)), "{left:?}");
    ensure!(env.status()?["healthy"] == true);
    Ok(())
}

/// The time until an entry expires, seconds.
fn left(env: &TestEnv, cidr: &str) -> anyhow::Result<Option<u64>> {
    let list = env.json(&["list"])?;
    let mut entries = list["entries"].as_array().into_iter().flatten();
    let entry = entries.find(|entry| entry["cidr"] == cidr);
    Ok(entry.and_then(|entry| entry["source"]["expires_in_s"].as_u64()))
}

/// The wall clock; corrected when dropped.
struct WallClock {
    right: Duration,
    begin: Instant,
}

impl WallClock {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            right: clock_gettime(ClockId::CLOCK_REALTIME)?.into(),
            begin: Instant::now(),
        })
    }

    /// The right time.
    fn right(&self) -> Duration {
        self.right + self.begin.elapsed()
    }

    fn set(&self, to: Duration) -> anyhow::Result<()> {
        clock_settime(ClockId::CLOCK_REALTIME, to.into())?;
        let now = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME)?);
        ensure!(now >= to && now - to < TIMEOUT, "{now:?} instead of {to:?}");
        Ok(())
    }
}

impl Drop for WallClock {
    fn drop(&mut self) {
        let _as_it_is = clock_settime(ClockId::CLOCK_REALTIME, self.right().into());
    }
}

test!(the_wall_clock_is_set, needs = [WHOLE_MACHINE]);
/// Set forwards and backwards by days, under a running daemon and before a start: an entry with a TTL expires when that
/// time has passed, neither earlier nor later, and everything else continues.
fn the_wall_clock_is_set() -> anyhow::Result<()> {
    const DAYS: Duration = Duration::from_secs(3 * 24 * 3600);
    const SHORT: Duration = Duration::from_secs(30);
    const LONG: Duration = Duration::from_secs(3600);
    let mut env = silent(&near("\"10.88.0.0/24\""))?;
    let begin = Instant::now();
    env.cli(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "1h"])?;
    let clock = WallClock::new()?;
    for (index, is_ahead) in [true, false].into_iter().enumerate() {
        let added = Instant::now();
        env.cli(&["add", "10.2.0.0/24", "--policy", "near", "--ttl", "30s"])?;
        let there = Instant::now();
        let now = clock.right();
        clock.set(if is_ahead { now + DAYS } else { now - DAYS })?;
        ensure!(left(&env, "10.2.0.0/24")?.is_some(), "it ended at once");
        env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
        // A change of the files is noticed whatever their timestamps are.
        let entries = index + 2;
        let more: Vec<_> = (0..entries)
            .map(|i| format!("\"10.88.{i}.0/24\""))
            .collect();
        env.configure(&near(&more.join(", ")))?;
        env.wait_status("the file", |s| s["entries"] == entries + 2)?;
        // A start ignores timestamps as well.
        env.restart(Signal::SIGKILL)?;
        let is_there = left(&env, "10.2.0.0/24")?.is_some();
        ensure!(is_there || added.elapsed() > SHORT, "it ended too soon");
        thread::sleep(SHORT.saturating_sub(added.elapsed()));
        let rest = (SHORT + TIMEOUT).saturating_sub(there.elapsed());
        let seconds = || left(&env, "10.2.0.0/24");
        eventually_seen("end of the entry", rest, seconds, Option::is_none)?;
        ensure!(added.elapsed() >= SHORT, "{:?}", added.elapsed());
        let long = left(&env, "10.1.0.0/24")?.unwrap_or(0);
        // In whole seconds, rounded up.
        let (most, least) = (LONG.as_secs(), (LONG - begin.elapsed()).as_secs());
        ensure!((least..=most).contains(&long), "{long} s left of an hour");
        ensure!(env.status()?["healthy"] == true);
    }
    Ok(())
}
