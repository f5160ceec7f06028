//! A kernel that does not take a change: a map that is frozen cannot be written by anybody (Linux 5.2).

use std::{
    fs,
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_agent_common::maps;
use rto_tests::{
    agent::{SOON, World},
    http::{self, Answer},
    kernel::Map,
    process::run,
};

use super::super::near;

/// In force at first; then two more, of which the kernel takes the first only.
const BEFORE: &str = "\"10.88.0.0/24\"";
const AFTER: &str = "\"10.88.0.0/24\", \"10.99.0.0/24\", \"fd99::/64\"";
const KEPT: &str = "the last good configuration stays in force";

fn world() -> anyhow::Result<World> {
    let world = World::with(&near(BEFORE))?;
    let frozen = pin(&world, maps::ENTRIES_V6)?;
    run(&format!("bpftool map freeze pinned {}", frozen.display()))?;
    Ok(world)
}

fn pin(world: &World, map: &str) -> anyhow::Result<PathBuf> {
    let dir = fs::read_dir(world.pin_dir())?.flatten().next();
    Ok(dir.context("no pins")?.path().join(map))
}

fn post(world: &World, path: &str, body: &str) -> anyhow::Result<Answer> {
    http::request(UnixStream::connect(world.socket())?, "POST", path, body)
}

/// Puts the file in place of which the kernel takes a part, by a reload. The file's watcher may be first: it is
/// refused in the same way.
fn reload(world: &World) -> anyhow::Result<Answer> {
    world.configure(&near(AFTER))?;
    let answer = post(world, "/v1/reload", "{}")?;
    ensure!(answer.status == 500, "{answer:?}");
    let status = world.json(&["status"])?;
    ensure!(status["last_reload"]["ok"] == false, "{status:#}");
    ensure!(status["entries"] == 1, "{status:#}");
    Ok(answer)
}

fn entries(world: &World) -> anyhow::Result<usize> {
    Ok(Map::open(&pin(world, maps::ENTRIES_V4)?)?.dump()?.len())
}

/// What was written before is undone, and the answer says that it is.
pub(super) fn undone() -> anyhow::Result<()> {
    let world = world()?;
    let answer = reload(&world)?;
    ensure!(answer.body.contains("fd99::/64"), "{answer:?}");
    ensure!(answer.body.contains("nothing was changed"), "{answer:?}");
    ensure!(answer.body.contains(KEPT), "{answer:?}");
    ensure!(entries(&world)? == 1);
    let status = world.json(&["status"])?;
    ensure!(status["in_sync"] == true, "{status:#}");
    let body = "{\"cidrs\": [\"fd98::/64\"], \"policy\": \"near\"}";
    let answer = post(&world, "/v1/entries", body)?;
    ensure!(answer.status == 500, "{answer:?}");
    // A file that is wrong is another matter.
    world.configure("[policy.x]\n")?;
    let answer = post(&world, "/v1/reload", "{}")?;
    ensure!(answer.status == 422, "{answer:?}");
    ensure!(answer.body.contains(KEPT), "{answer:?}");
    Ok(())
}

/// An entry that no agent writes stands in the way of reading, and so of going back.
pub(super) fn not_undone() -> anyhow::Result<()> {
    const KEY: &str = "key 24 0 0 0 10 77 0 5";
    let world = world()?;
    let map = pin(&world, maps::ENTRIES_V4)?;
    let map = map.display();
    run(&format!(
        "bpftool map update pinned {map} {KEY} value 0 0 0 0 0 0 0 0"
    ))?;
    let answer = reload(&world)?;
    ensure!(
        answer.body.contains("going back failed as well"),
        "{answer:?}"
    );
    ensure!(answer.body.contains("tried again"), "{answer:?}");
    ensure!(!answer.body.contains(KEPT), "{answer:?}");
    let status = world.json(&["status"])?;
    ensure!(status["in_sync"] == false, "{status:#}");
    // The control: what the kernel holds is not what it was.
    ensure!(entries(&world)? == 3);
    run(&format!("bpftool map delete pinned {map} {KEY}"))?;
    world.wait_status("the repair", |status| status["in_sync"] == true)?;
    let end = Instant::now() + SOON;
    while entries(&world)? != 1 {
        ensure!(Instant::now() < end, "{} entries", entries(&world)?);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
