//! Attempts, connect times and time saved, against the clock of a client.

use std::ops::Range;

use rto_testbed::{
    netns::CLIENT_V4,
    workload::{
        Program,
        arrivals::{Arrivals, Clients},
        attempts::{Attempts, Own},
    },
};

use crate::prelude::*;

const GOOD: Duration = Duration::from_millis(500);

/// An environment whose policy covers [`SERVER_V4`], but not [`SERVER_V4_OTHER`].
fn covered() -> anyhow::Result<TestEnv> {
    TestEnv::with(&near("\"10.88.0.0/24\""))
}

fn active(env: &TestEnv) -> anyhow::Result<Value> {
    Ok(env.json(&["stats"])?["policies"]["near"]["active"].clone())
}

fn count(active: &Value, name: &str) -> anyhow::Result<u64> {
    active[name]
        .as_u64()
        .with_context(|| format!("no {name}: {active:#}"))
}

/// Time that connections gained, seconds: by the agent's counters, and by the client's clock against connections
/// without the agent.
#[derive(Clone, Copy, Debug)]
struct Gain {
    counted: f64,
    truth: f64,
}

impl Gain {
    #[expect(clippy::cast_precision_loss, reason = "microseconds of an hour")]
    fn new(active: &Value, sums: [Duration; 2]) -> anyhow::Result<Self> {
        let saved_us = count(active, "time_saved_us")? as f64;
        let [policy, control] = sums.map(|sum| sum.as_secs_f64());
        Ok(Self {
            counted: (saved_us - count(active, "time_lost_us")? as f64) / 1e6,
            truth: control - policy,
        })
    }
}

test!(time_saved_in_outages_is_the_clients);
/// Compared with connections without the agent that begin at the same moments, throughout each outage.
fn time_saved_in_outages_is_the_clients() -> anyhow::Result<()> {
    let outages = [300, 1700, 4000, 8000].map(Duration::from_millis);
    let gains = thread::scope(|scope| {
        let runs = outages.map(|outage| scope.spawn(move || gain_in_outage(outage)));
        let ended = runs.map(|run| run.join().map_err(|_| anyhow::anyhow!("panicked"))?);
        ended.into_iter().collect::<anyhow::Result<Vec<_>>>()
    })?;
    for (outage, gain) in outages.into_iter().zip(gains) {
        eprintln!("{outage:?}: {gain:?}");
        // The counters assume that an outage ends at a random moment between two copies. That holds only on average: if
        // an outage ends just before one of the kernel's slots, they are a second off.
        let tolerance = gain.truth.abs() * 0.2 + 2.0;
        ensure!(
            (gain.counted - gain.truth).abs() <= tolerance,
            "{outage:?}: {gain:?}"
        );
    }
    Ok(())
}

fn gain_in_outage(outage: Duration) -> anyhow::Result<Gain> {
    const BATCHES: u32 = 100;
    let env = covered()?;
    let _servers = [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
    env.net.server_loses_syns_for(outage)?;
    let (program, cgroup) = (Program::built()?, env.cgroup.path());
    let ends = [SERVER_V4, SERVER_V4_OTHER].map(|address| (None, to(address, PORT)));
    let (begun, mut attempts) = (Instant::now(), Vec::new());
    for batch in 0..BATCHES {
        let (netns, ends) = (&env.net.client, vec![ends.to_vec()]);
        let mut both = Attempts::load(&program, netns, Some(cgroup), ends, Own::new())?;
        thread::sleep((outage * batch / BATCHES).saturating_sub(begun.elapsed()));
        both.start()?;
        attempts.push(both);
    }
    let mut sums = [Duration::ZERO; 2];
    for both in attempts {
        for (sum, attempt) in sums.iter_mut().zip(both.outcomes()?) {
            ensure!(attempt.result == "connected", "{attempt:?}");
            *sum += attempt.took;
        }
    }
    Gain::new(&active(&env)?, sums)
}

test!(one_percent_loss_is_counted_as_the_client_sees_it, || {
    independent_losses(100, &[0.995, 0.999])
});
test!(five_percent_loss_is_counted_as_the_client_sees_it, || {
    independent_losses(20, &[0.97, 0.99, 0.999])
});
/// One SYN in `one_in` is lost. Compares attempts, good attempts, quantiles of the connect time, and the time gained.
fn independent_losses(one_in: u32, shares: &[f64]) -> anyhow::Result<()> {
    const CONNECTS: u32 = 3000;
    let env = covered()?;
    let addresses = [SERVER_V4, SERVER_V4_OTHER];
    let _servers = addresses.map(|address| env.echo_server(to(address, PORT)));
    let rules = addresses.map(|address| {
        format!("ip daddr {address} tcp flags & (syn|ack) == syn numgen inc mod {one_in} == 0")
    });
    env.net
        .server_drops(&rules.join(" drop\nadd rule inet t in "))?;
    // Both at once, so that a busy machine slows both.
    let mut begun = Vec::new();
    for address in addresses {
        let clients = Clients::new(to(address, PORT), Duration::from_millis(2));
        let cgroup = Some(env.cgroup.path());
        let mut clients = Arrivals::start(&env.net.client, cgroup, &clients)?;
        clients.begin(CONNECTS)?;
        begun.push(clients);
    }
    let mut ended = Vec::new();
    for mut clients in begun {
        let done = clients.done()?;
        ensure!(done.complete == CONNECTS, "{done:?}");
        ended.push(done.connects);
    }
    let sums = [0, 1].map(|arm| ended[arm].iter().sum());
    let mut connects = ended.swap_remove(0);
    connects.sort();

    let active = active(&env)?;
    ensure!(
        count(&active, "attempts")? == u64::from(CONNECTS),
        "{active:#}"
    );
    let good = connects.iter().filter(|took| **took <= GOOD).count();
    ensure!(
        count(&active, "good_attempts")? == good as u64,
        "{good}: {active:#}"
    );
    for share in shares {
        let (shown, rank) = bucket_of(&active["connect_time"], *share)?;
        let seen = u64::try_from(connects[rank].as_micros())?;
        // A bucket is at most a quarter longer than the one before.
        let range = shown.start * 4 / 5..shown.end * 5 / 4;
        ensure!(
            range.contains(&seen),
            "{share}: {shown:?} us, the client {seen} us: {active:#}"
        );
    }
    let gain = Gain::new(&active, sums)?;
    eprintln!("one in {one_in}: {gain:?}");
    let share = gain.counted / gain.truth;
    ensure!(
        (0.8..=1.0).contains(&share),
        "{share}: {gain:?}: {active:#}"
    );
    Ok(())
}

/// The bucket of the quantile `share`, microseconds, and the quantile's index among the sorted times.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "thousands"
)]
fn bucket_of(histogram: &Value, share: f64) -> anyhow::Result<(Range<u64>, usize)> {
    let rank = (count(histogram, "count")? as f64 * share) as u64;
    let buckets = histogram["buckets"].as_array().context("no buckets")?;
    let mut below = 0;
    for bucket in buckets {
        below += count(bucket, "count")?;
        if below > rank {
            let range = count(bucket, "from_us")?..count(bucket, "below_us")?;
            return Ok((range, usize::try_from(rank)?));
        }
    }
    anyhow::bail!("{below} times: {histogram:#}")
}

test!(syn_flood_is_no_attempt_of_the_hosts);
/// The SYN-ACKs of a listener in the agent's cgroup are not answered, as in a flood from spoofed addresses.
fn syn_flood_is_no_attempt_of_the_hosts() -> anyhow::Result<()> {
    const FLOOD: usize = 1000;
    const CONNECTS: u32 = 200;
    let env = covered()?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let _listener = Traffic::serve(
        &env.net.client,
        Some(env.cgroup.path()),
        to(CLIENT_V4, PORT),
    )?;
    env.net.server_drops(&format!(
        "tcp sport {PORT} tcp flags & (syn|ack) == (syn|ack)"
    ))?;
    let clients = Clients::new(to(SERVER_V4, PORT), Duration::from_millis(5));
    let mut clients = Arrivals::start(&env.net.client, Some(env.cgroup.path()), &clients)?;
    clients.begin(CONNECTS)?;
    let _flood = Traffic::connect_many(&env.net.server, None, to(CLIENT_V4, PORT), FLOOD)?;
    let done = clients.done()?;
    ensure!(done.complete == CONNECTS, "{done:?}");
    let near = env.json(&["stats"])?["policies"]["near"].clone();
    let active = &near["active"];
    for name in ["attempts", "good_attempts", "connections"] {
        ensure!(count(active, name)? == u64::from(CONNECTS), "{near:#}");
    }
    ensure!(count(&active["connect_time"], "count")? == u64::from(CONNECTS));
    // The control: the flood's requests were counted, as many as the listener's backlog takes, in addition to the echo
    // server's.
    let passive = &near["passive"];
    ensure!(
        count(passive, "attempts")? >= u64::from(CONNECTS) + 100,
        "{near:#}"
    );
    ensure!(
        count(passive, "connections")? == u64::from(CONNECTS),
        "{near:#}"
    );
    Ok(())
}
