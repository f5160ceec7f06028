//! Clocks: what ends, ends by CLOCK_BOOTTIME, which nobody sets.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use nix::{
    sys::signal::Signal,
    time::{ClockId, clock_gettime, clock_settime},
};
use rto_tests::{
    agent::{SOON, World},
    netns::SERVER_V4,
    traffic::Connect,
};

use super::super::{NEAR, near, to};

const PORT: u16 = 4470;

/// A daemon in a time namespace, whose CLOCK_BOOTTIME is ahead as after a long suspend: the entry whose
/// time has come meanwhile is gone at its start, the other one is not.
pub(super) fn boottime() -> anyhow::Result<()> {
    let mut world = World::with(&near("\"10.88.0.0/24\""))?;
    world.cli(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "1h"])?;
    world.cli(&["add", "10.2.0.0/24", "--policy", "near", "--ttl", "4h"])?;
    world.end(Signal::SIGKILL)?;
    let ahead = Duration::from_secs(2 * 3600).as_secs().to_string();
    // The daemon is a child of unshare(1), which dies with it and it with that one.
    let wrapper = [
        "unshare",
        "--time",
        "--boottime",
        &ahead,
        "--fork",
        "--kill-child",
    ];
    world.start_under(&wrapper.map(str::to_owned))?;
    let list = world.json(&["list"])?;
    let entries = list["entries"].as_array().cloned().unwrap_or_default();
    let cidrs: Vec<_> = entries.iter().filter_map(|e| e["cidr"].as_str()).collect();
    ensure!(cidrs == ["10.2.0.0/24", "10.88.0.0/24"], "{list:#}");
    let left = entries[0]["source"]["expires_in_s"].as_u64().unwrap_or(0);
    ensure!((7000..=7200).contains(&left), "{left} s");
    ensure!(world.json(&["status"])?["healthy"] == true);
    Ok(())
}

/// The wall clock, set right again when dropped.
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

    /// What it would show.
    fn right(&self) -> Duration {
        self.right + self.begin.elapsed()
    }

    fn set(&self, to: Duration) -> anyhow::Result<()> {
        clock_settime(ClockId::CLOCK_REALTIME, to.into())?;
        let now = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME)?);
        ensure!(now >= to && now - to < SOON, "{now:?} instead of {to:?}");
        Ok(())
    }
}

impl Drop for WallClock {
    fn drop(&mut self) {
        let _as_it_is = clock_settime(ClockId::CLOCK_REALTIME, self.right().into());
    }
}

/// Set by days, ahead and back, under a daemon that runs and before one that starts: an entry with a time ends
/// when that time has passed, neither sooner nor later, and everything else goes on.
pub(super) fn wall_clock() -> anyhow::Result<()> {
    const DAYS: Duration = Duration::from_secs(3 * 24 * 3600);
    const SHORT: Duration = Duration::from_secs(30);
    const LONG: Duration = Duration::from_secs(3600);
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    world.start()?;
    let begin = Instant::now();
    world.cli(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "1h"])?;
    let left = |world: &World, cidr: &str| -> anyhow::Result<Option<u64>> {
        let list = world.json(&["list"])?;
        let entries = list["entries"].as_array().cloned().unwrap_or_default();
        let entry = entries.iter().find(|entry| entry["cidr"] == cidr);
        Ok(entry.and_then(|entry| entry["source"]["expires_in_s"].as_u64()))
    };
    let clock = WallClock::new()?;
    for (index, is_ahead) in [true, false].into_iter().enumerate() {
        let added = Instant::now();
        world.cli(&["add", "10.2.0.0/24", "--policy", "near", "--ttl", "30s"])?;
        let there = Instant::now();
        let now = clock.right();
        clock.set(if is_ahead { now + DAYS } else { now - DAYS })?;
        ensure!(left(&world, "10.2.0.0/24")?.is_some(), "it ended at once");
        world.assert_syn_gap(to(SERVER_V4, PORT), &Connect::default(), NEAR)?;
        // A change of the files is seen, whatever their times say.
        let entries = index + 2;
        let more: Vec<_> = (0..entries)
            .map(|i| format!("\"10.88.{i}.0/24\""))
            .collect();
        world.configure(&near(&more.join(", ")))?;
        world.wait_status("the file", |s| s["entries"] == entries + 2)?;
        // So is a start.
        world.end(Signal::SIGKILL)?;
        world.start()?;
        let is_there = left(&world, "10.2.0.0/24")?.is_some();
        ensure!(is_there || added.elapsed() > SHORT, "it ended too soon");
        thread::sleep(SHORT.saturating_sub(added.elapsed()));
        while left(&world, "10.2.0.0/24")?.is_some() {
            ensure!(there.elapsed() < SHORT + SOON, "it did not end");
            thread::sleep(Duration::from_millis(200));
        }
        ensure!(added.elapsed() >= SHORT, "{:?}", added.elapsed());
        let long = left(&world, "10.1.0.0/24")?.unwrap_or(0);
        // In whole seconds, the last of them counted.
        let (most, least) = (LONG.as_secs(), (LONG - begin.elapsed()).as_secs());
        ensure!((least..=most).contains(&long), "{long} s left of an hour");
        ensure!(world.json(&["status"])?["healthy"] == true);
    }
    Ok(())
}
