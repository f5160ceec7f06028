//! Clocks: what ends, ends by CLOCK_BOOTTIME, which nobody sets.

use std::time::Duration;

use anyhow::ensure;
use nix::sys::signal::Signal;
use rto_tests::agent::World;

use super::super::near;

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
