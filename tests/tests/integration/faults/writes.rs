//! A kernel that refuses a change: a frozen map cannot be written by any process (Linux 5.2).

use rto_testbed::http::Answer;

use crate::prelude::*;

/// The entry at first; then two more, of which the kernel accepts only the first.
const BEFORE: &str = "\"10.88.0.0/24\"";
const AFTER: &str = "\"10.88.0.0/24\", \"10.99.0.0/24\", \"fd99::/64\"";
const KEPT: &str = "the last good configuration stays active";

/// An agent with one frozen map.
fn env_with(map: &str) -> anyhow::Result<TestEnv> {
    let env = TestEnv::with(&near(BEFORE))?;
    let frozen = pin(&env, map)?;
    run(&format!("bpftool map freeze pinned {}", frozen.display()))?;
    Ok(env)
}

fn pin(env: &TestEnv, map: &str) -> anyhow::Result<PathBuf> {
    Ok(env.pins()?.join(map))
}

fn post(env: &TestEnv, path: &str, body: &str) -> anyhow::Result<Answer> {
    http::request(UnixStream::connect(env.socket())?, "POST", path, body)
}

/// Writes a file of which the kernel accepts only a part, and reloads it. If the file watcher is faster, it is refused
/// in the same way.
fn reload(env: &TestEnv, after: &str) -> anyhow::Result<Answer> {
    env.configure(&near(after))?;
    let answer = post(env, "/v1/reload", "{}")?;
    ensure!(answer.status == 500, "{answer:?}");
    env.status_has(json!({"last_reload": {"ok": false}, "entries": 1}))?;
    Ok(answer)
}

fn entries(env: &TestEnv, map: &str) -> anyhow::Result<usize> {
    Ok(Map::open(&pin(env, map)?)?.dump()?.len())
}

test!(the_kernel_refuses_a_write);
/// Earlier writes are rolled back, and the answer reports that.
fn the_kernel_refuses_a_write() -> anyhow::Result<()> {
    let env = env_with(maps::ENTRIES_V6)?;
    let answer = reload(&env, AFTER)?;
    ensure!(answer.body.contains("fd99::/64"), "{answer:?}");
    ensure!(answer.body.contains("nothing was changed"), "{answer:?}");
    ensure!(answer.body.contains(KEPT), "{answer:?}");
    ensure!(entries(&env, maps::ENTRIES_V4)? == 1);
    let status = env.status()?;
    ensure!(status["in_sync"] == true, "{status:#}");
    let body = "{\"cidrs\": [\"fd98::/64\"], \"policy\": \"near\"}";
    let answer = post(&env, "/v1/entries", body)?;
    ensure!(answer.status == 500, "{answer:?}");
    // An invalid file is a different error.
    env.configure("[policy.x]\n")?;
    let answer = post(&env, "/v1/reload", "{}")?;
    ensure!(answer.status == 422, "{answer:?}");
    ensure!(answer.body.contains(KEPT), "{answer:?}");
    Ok(())
}

test!(the_kernel_cannot_go_back);
/// An entry that no agent writes, and that no lookup finds, makes reading fail, and with it the rollback.
fn the_kernel_cannot_go_back() -> anyhow::Result<()> {
    // ::ffff:10.0.0.0/104
    const KEY: &str = "key 104 0 0 0  0 0 0 0 0 0 0 0 0 0 255 255 10 0 0 0";
    let env = env_with(maps::ENTRIES_V4)?;
    let map = pin(&env, maps::ENTRIES_V6)?;
    let map = map.display();
    run(&format!(
        "bpftool map update pinned {map} {KEY} value 0 0 0 0 0 0 0 0"
    ))?;
    // New entries are written, and old ones cannot be removed.
    let answer = reload(&env, "\"fd99::/64\"")?;
    ensure!(
        answer.body.contains("the rollback failed as well"),
        "{answer:?}"
    );
    ensure!(answer.body.contains("the daemon retries"), "{answer:?}");
    ensure!(!answer.body.contains(KEPT), "{answer:?}");
    let status = env.status()?;
    ensure!(status["in_sync"] == false, "{status:#}");
    // The control: the kernel does not hold the original entries.
    ensure!(entries(&env, maps::ENTRIES_V6)? == 2);
    run(&format!("bpftool map delete pinned {map} {KEY}"))?;
    env.wait_status("the repair", |status| status["in_sync"] == true)?;
    let left = || entries(&env, maps::ENTRIES_V6);
    eventually_seen("no entry", TIMEOUT, left, |n| *n == 0).map(drop)
}
