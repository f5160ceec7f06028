//! Prefixes without an entry: what the program notes of their connections, and for how long it stays.

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use rto_testbed::{env::TestEnv, netns::SERVER_V4, workload::traffic::Traffic};
use serde_json::Value;

use super::to;

const PORT: u16 = 5300;
const ELSEWHERE: &str = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.88.1.0/24\"]\n";

test!(prefixes_without_an_entry_are_told_of);
fn prefixes_without_an_entry_are_told_of() -> anyhow::Result<()> {
    const CONNECTIONS: usize = 200;
    let mut env = TestEnv::new()?;
    env.configure(ELSEWHERE)?;
    env.start()?;
    let error = env.cli_fails(&["discover"])?;
    ensure!(error.contains("set count_unmatched = true"), "{error}");
    env.end(Signal::SIGTERM)?;

    env.configure(&format!("count_unmatched = true\n{ELSEWHERE}"))?;
    env.start()?;
    let server = env.serve(to(SERVER_V4, PORT))?;
    let cgroup = Some(env.cgroup.path());
    let all = Traffic::connect_many(&env.net.client, cgroup, to(SERVER_V4, PORT), CONNECTIONS)?;
    let found = discovered(&env)?;
    let noted = found.prefix["connections"].as_u64().context("a count")?;
    ensure!(noted > 0 && noted % 16 == 0, "{:#}", found.prefix);
    ensure!(found.prefix["lost"] == 0, "{:#}", found.prefix);
    let samples = found.prefix["samples"].as_u64().context("a count")?;
    ensure!(samples * 16 == noted, "{:#}", found.prefix);
    drop((all, server));

    // Neither a daemon that is killed, nor another program over the same maps begins anew.
    for config in [
        "count_unmatched = true",
        "count_unmatched = true\nsampling = 8",
    ] {
        env.end(Signal::SIGKILL)?;
        env.configure(&format!("{config}\n{ELSEWHERE}"))?;
        env.start()?;
        let now = discovered(&env)?;
        ensure!(now.since_ms == found.since_ms, "{config}");
        ensure!(now.prefix == found.prefix, "{config}: {:#}", now.prefix);
    }

    // What has an entry is left out.
    env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    let answer = env.json(&["discover", "--by", "prefix"])?;
    let prefixes = answer["prefixes"].as_array().context("prefixes")?;
    ensure!(
        prefixes.iter().all(|one| one["cidr"] != "10.88.0.0/24"),
        "{answer:#}"
    );
    ensure!(answer["covered"].as_u64() >= Some(1), "{answer:#}");
    Ok(())
}

struct Found {
    since_ms: Value,
    prefix: Value,
}

fn discovered(env: &TestEnv) -> anyhow::Result<Found> {
    let answer = env.json(&["discover", "--by", "prefix"])?;
    let prefixes = answer["prefixes"].as_array().context("prefixes")?;
    let prefix = prefixes.iter().find(|one| one["cidr"] == "10.88.0.0/24");
    Ok(Found {
        since_ms: answer["since_ms"].clone(),
        prefix: prefix.with_context(|| format!("{answer:#}"))?.clone(),
    })
}
