//! A kernel that refuses a change: a frozen map cannot be written by any process (Linux 5.2).

use rto_testbed::http::Answer;

use crate::prelude::*;

/// The entry at first.
const BEFORE: &str = "\"10.88.0.0/24\"";

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

fn entries(env: &TestEnv, map: &str) -> anyhow::Result<usize> {
    Ok(Map::open(&pin(env, map)?)?.dump()?.len())
}

test!(frozen_maps_are_replaced);
/// A change that the kernel refuses changes nothing. Then the map is replaced with the program that uses it, and no
/// moment is without a policy; a start does the same.
fn frozen_maps_are_replaced() -> anyhow::Result<()> {
    let mut refused = 0;
    for name in [maps::ENTRIES_V4, maps::ENTRIES_V6, maps::POLICIES] {
        let mut env = env_with(name)?;
        env.net.black_hole(PORT)?;
        let mut prober = env.prober(&[to(SERVER_V4, PORT)], &[POLICY_RTO])?;
        prober.begin()?;
        let body = "{\"cidrs\": [\"10.98.0.0/24\", \"fd98::/64\"], \"settings\": \
                    {\"initial_rto\": \"60ms\"}}";
        let answer = post(&env, "/v1/entries", body)?;
        // The map may have been replaced already.
        if answer.status == 500 {
            refused += 1;
            // A policy that cannot be written cannot be removed either.
            let is_undone = answer.body.contains("nothing was changed");
            let not_back = "the rollback failed as well";
            ensure!(is_undone || answer.body.contains(not_back), "{answer:?}");
            let status = env.status()?;
            let problems = status["problems"].to_string();
            let says = problems.contains("is frozen") || problems.contains(not_back);
            ensure!(status["entries"] == 1, "{status:#}");
            ensure!(says != (status["healthy"] == true), "{status:#}");
        }
        env.wait_status("the repair", |status| status["healthy"] == true)?;
        let answer = post(&env, "/v1/entries", body)?;
        ensure!(answer.status == 200, "{answer:?}");
        ensure!(entries(&env, maps::ENTRIES_V4)? == 2 && entries(&env, maps::ENTRIES_V6)? == 1);
        // Found at a start, after a kill.
        env.end(Signal::SIGKILL)?;
        run(&format!(
            "bpftool map freeze pinned {}",
            pin(&env, name)?.display()
        ))?;
        env.start()?;
        env.cli(&["remove", "10.98.0.0/24", "fd98::/64"])?;
        let status = env.status()?;
        ensure!(
            status["healthy"] == true && status["entries"] == 1,
            "{status:#}"
        );
        let seen = prober.end()?;
        ensure!(seen.wrong == 0 && seen.count > 0, "{name}: {seen:?}");
    }
    ensure!(
        refused > 0,
        "each map was replaced before the kernel could refuse a write"
    );
    Ok(())
}

test!(failed_rollback_is_reported_and_repaired);
/// An entry that no agent writes, and that no lookup finds, makes reading fail, and with it the rollback.
fn failed_rollback_is_reported_and_repaired() -> anyhow::Result<()> {
    // ::ffff:10.0.0.0/104
    const KEY: &str = "key 104 0 0 0  0 0 0 0 0 0 0 0 0 0 255 255 10 0 0 0";
    let env = TestEnv::with(&near("\"10.88.0.0/24\", \"fd99::/64\""))?;
    let map = pin(&env, maps::ENTRIES_V6)?;
    let map = map.display();
    run(&format!(
        "bpftool map update pinned {map} {KEY} value 0 0 0 0 0 0 0 0"
    ))?;
    run(&format!("bpftool map freeze pinned {map}"))?;
    // The first entry is removed, and the second cannot be.
    let body = "{\"cidrs\": [\"10.88.0.0/24\", \"fd99::/64\"]}";
    let answer = post(&env, "/v1/entries/remove", body)?;
    ensure!(
        answer.body.contains("the rollback failed as well"),
        "{answer:?}"
    );
    ensure!(answer.body.contains("the daemon retries"), "{answer:?}");
    let status = env.status()?;
    ensure!(status["in_sync"] == false, "{status:#}");
    // The control: the kernel does not hold the original entries.
    ensure!(entries(&env, maps::ENTRIES_V4)? == 0);
    // The frozen map is replaced, and the entry with it.
    env.wait_status("the repair", |status| status["in_sync"] == true)?;
    ensure!(entries(&env, maps::ENTRIES_V4)? == 1 && entries(&env, maps::ENTRIES_V6)? == 1);
    Ok(())
}
