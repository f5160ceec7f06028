//! Prefixes without an entry: the program's record of their connections, and how long it is kept.

use rto_testbed::link::Link as _;
use rto_tests::path::Path;

use crate::prelude::*;

const ELSEWHERE: &str = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.88.1.0/24\"]\n";

test!(discover_lists_prefixes_without_entry);
fn discover_lists_prefixes_without_entry() -> anyhow::Result<()> {
    const CONNECTIONS: usize = 200;
    let mut env = TestEnv::with(ELSEWHERE)?;
    env.cli_refuses(&["discover"], "set count_unmatched = true")?;
    env.end(Signal::SIGTERM)?;

    env.configure(&format!("count_unmatched = true\n{ELSEWHERE}"))?;
    env.start()?;
    let server = env.serve(to(SERVER_V4, PORT))?;
    let cgroup = Some(env.cgroup.path());
    let all = Traffic::connect_many(&env.net.client, cgroup, to(SERVER_V4, PORT), CONNECTIONS)?;
    let found = discovered(&env, "10.88.0.0/24")?;
    let noted = found.prefix["connections"].as_u64().context("a count")?;
    ensure!(noted > 0 && noted % 16 == 0, "{:#}", found.prefix);
    ensure!(found.prefix["lost"] == 0, "{:#}", found.prefix);
    let samples = found.prefix["samples"].as_u64().context("a count")?;
    ensure!(samples * 16 == noted, "{:#}", found.prefix);
    drop((all, server));

    // Neither a killed daemon nor another program over the same maps resets the record.
    for config in [
        "count_unmatched = true",
        "count_unmatched = true\nsampling = 8",
    ] {
        env.end(Signal::SIGKILL)?;
        env.configure(&format!("{config}\n{ELSEWHERE}"))?;
        env.start()?;
        let now = discovered(&env, "10.88.0.0/24")?;
        ensure!(now.since_ms == found.since_ms, "{config}");
        ensure!(now.prefix == found.prefix, "{config}: {:#}", now.prefix);
    }

    // A prefix that has an entry is not listed.
    env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    let answer = env.json(&["discover"])?;
    let prefixes = answer["prefixes"].as_array().context("prefixes")?;
    ensure!(
        prefixes.iter().all(|one| one["cidr"] != "10.88.0.0/24"),
        "{answer:#}"
    );
    ensure!(answer["covered"].as_u64() >= Some(1), "{answer:#}");
    Ok(())
}

/// The pattern of the losses.
#[derive(Clone, Copy, Debug)]
enum Losses {
    /// Each SYN with the same probability.
    Independent,
    /// All packets for 1.7 s.
    Outage,
}

test!(saved_time_of_independent_losses_is_in_its_range, || {
    range_holds(Losses::Independent)
});
test!(saved_time_of_an_outage_is_in_its_range, || range_holds(
    Losses::Outage
));
/// Compares the time that the suggested timer saves with the printed range, by the link's record of connections with
/// and without the timer.
fn range_holds(losses: Losses) -> anyhow::Result<()> {
    /// The range is a 95 % interval: all of this many tries fail by chance once in 8,000 runs.
    const TRIES: u32 = 3;
    let mut all = Vec::new();
    for _ in 0..TRIES {
        let (saved_s, range) = saved(losses)?;
        eprintln!("{losses:?}: saved {saved_s:.1} s of {range:.1?}");
        ensure!(saved_s > 0.0, "{losses:?}: saved {saved_s} s");
        if (range[0]..=range[1]).contains(&saved_s) {
            return Ok(());
        }
        all.push((saved_s, range));
    }
    bail!("{losses:?}: {all:.1?}")
}

/// Seconds that the suggested timer saves, and the range that is printed for the same time.
fn saved(losses: Losses) -> anyhow::Result<(f64, [f64; 2])> {
    const RTT: Duration = Duration::from_millis(10);
    let env = TestEnv::with(&format!("count_unmatched = true\n{ELSEWHERE}"))?;
    let path = Path::new(env, RTT)?;
    let kernels_s = connect_s(&path, losses)?;
    let found = discovered(&path.env, "10.89.0.0/24")?;
    let us = found.prefix["initial_rto_us"].as_u64();
    let us = us.with_context(|| format!("{:#}", found.prefix))?;
    let days = found.took_ms / 86_400_000.0;
    let range = ["outages", "independent"].map(|end| {
        let a_day = found.prefix["saved_s_per_day"][end].as_f64();
        a_day.unwrap_or(f64::NAN) * days
    });
    path.env.load(&format!(
        "{ELSEWHERE}[policy.found]\ncidrs = [\"10.89.0.0/24\"]\ninitial_rto = \"{us}us\"\n"
    ))?;
    path.relay.forget();
    Ok((kernels_s - connect_s(&path, losses)?, range))
}

/// The sum of the connect times, seconds.
fn connect_s(path: &Path, losses: Losses) -> anyhow::Result<f64> {
    const PER_S: u32 = 400;
    /// One in 16 is sampled, which yields as many samples as a suggestion needs.
    const COUNT: u32 = 7_200;
    const OUTAGE: Duration = Duration::from_millis(1_700);
    let rule = Rule::new(PacketFilter::SYN, DropPattern::Share(0.1));
    let rule = matches!(losses, Losses::Independent).then(|| path.relay.add(rule));
    let mut clients = path.clients(PER_S, 0, TIMEOUT)?;
    clients.begin(COUNT)?;
    if matches!(losses, Losses::Outage) {
        path.begun(PER_S as usize)?;
        let outage = path.relay.start_outage(PacketFilter::ALL, OUTAGE)?;
        path.relay.end_outage(outage)?;
    }
    clients.done()?;
    if let Some(rule) = rule {
        path.relay.remove(rule)?;
    }
    let all = path.handshakes();
    let took = all.iter().map(|one| one.took().context("no answer"));
    let took = took.collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(took.len() == COUNT as usize, "{}", took.len());
    Ok(took.iter().map(Duration::as_secs_f64).sum())
}

struct Found {
    since_ms: Value,
    took_ms: f64,
    prefix: Value,
}

fn discovered(env: &TestEnv, cidr: &str) -> anyhow::Result<Found> {
    let answer = env.json(&["discover"])?;
    let prefixes = answer["prefixes"].as_array().context("prefixes")?;
    let prefix = prefixes.iter().find(|one| one["cidr"] == cidr);
    let ms = |key: &str| answer[key].as_f64().context("a time");
    Ok(Found {
        since_ms: answer["since_ms"].clone(),
        took_ms: ms("at_ms")? - ms("since_ms")?,
        prefix: prefix.with_context(|| format!("{answer:#}"))?.clone(),
    })
}
