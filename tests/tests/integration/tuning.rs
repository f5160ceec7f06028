//! Learnt values outlive a daemon that is killed; `rto_min` is learnt from the control arm.

use std::{net::IpAddr, time::SystemTime};

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_agent_common::direction::ACTIVE;
use rto_testbed::{
    machine::Machine,
    warm::{Learnt, Seen, stored},
    workload::arrivals::{Arrivals, Clients},
};
use rto_tests::{
    brakes::{InKernel, lease_ns, now_ns},
    path::{Path, Server},
};

use super::statistics::stats_when;
use crate::prelude::*;

const RTT: Duration = Duration::from_millis(10);

fn hz() -> anyhow::Result<u32> {
    Ok(u32::try_from(Machine::here()?.hz)?)
}

/// Connections of both arms that an experiment has counted.
fn attempts(view: &Value) -> u64 {
    let of = |arm: &str| view["counts"][arm]["attempts"].as_u64().unwrap_or(0);
    of("treated") + of("control")
}

fn experiment(env: &TestEnv) -> anyhow::Result<Value> {
    let all = env.json(&["experiment", "show", "other"])?;
    Ok(all["experiments"]["other"].clone())
}

test!(killed_at_random_moments_with_what_it_has_learnt, killed);
/// A learnt value and an experiment, under traffic: both stay active all the time and continue after each start; no
/// connection is counted twice or lost.
fn killed() -> anyhow::Result<()> {
    const KILLS: u32 = 20;
    const PER_S: u32 = 100;
    /// Latest moment of a kill: a start takes about 0.2 s, and the first ticks follow.
    const LATEST_MS: u64 = 1_500;
    let mut env = configured(
        "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"auto\"\n\
         [policy.other]\ncidrs = [\"10.89.0.0/24\"]\ninitial_rto = \"100ms\"\n",
    )?;
    let seen = Seen {
        each_second: &[(10_240, 80), (20_480, 20)],
        hz: hz()?,
    };
    let learnt = Learnt::InitialRto(seen).store(&env, "near")?;
    env.start()?;
    let mut path = Path::new(env, RTT)?;
    path.env
        .cli_line("experiment start other --ramp 50% --for 1h")?;
    let value = |env: &TestEnv| anyhow::Ok(InKernel::of(env, "near")?.initial_rto());
    let epoch = InKernel::of(&path.env, "near")?.epoch(ACTIVE);
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let seed = u64::from(since_epoch.subsec_nanos());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut clients = path.clients(PER_S, 1, TIMEOUT)?;
    let mut begun = 0;
    let check = |env: &TestEnv, when: &str| -> anyhow::Result<()> {
        let policy = InKernel::of(env, "near")?;
        let now = policy.initial_rto();
        ensure!(
            now == Some(learnt),
            "{when}: {now:?}, not {learnt:?}: {}",
            env.log()
        );
        ensure!(
            policy.epoch(0) == epoch,
            "{when}: another epoch: {policy:?}"
        );
        let held = InKernel::of(env, "other")?.policy.control_below;
        ensure!(
            held.abs_diff(1 << 31) < 1 << 16,
            "{when}: control arm below {held}"
        );
        Ok(())
    };
    for round in 0..KILLS {
        let when = format!("seed {seed}, kill {round}");
        clients.begin(PER_S)?;
        begun += PER_S;
        let before = attempts(&experiment(&path.env)?);
        let moment = Duration::from_millis(rng.random_range(0..LATEST_MS));
        // A random moment, not a wait for a state.
        thread::sleep(moment);
        path.env.end(Signal::SIGKILL)?;
        check(&path.env, &when)?;
        clients.done()?;
        if rng.random_bool(0.3) {
            // In the middle of a start.
            path.env.spawn_under(&[])?;
            thread::sleep(Duration::from_millis(rng.random_range(0..200)));
            path.env.end(Signal::SIGKILL)?;
            check(&path.env, &when)?;
        }
        path.env.start().with_context(|| when.clone())?;
        check(&path.env, &when)?;
        let tuned = path.env.json(&["tune", "near"])?;
        let timers = &tuned["policies"]["near"]["timers"];
        ensure!(timers[0]["state"] == "active", "{when}: {tuned:#}");
        let counted = eventually_seen(
            "experiment with all connections",
            TIMEOUT,
            || experiment(&path.env),
            |view| attempts(view) >= begun.into(),
        );
        let view = counted.with_context(|| when.clone())?;
        ensure!(
            attempts(&view) == u64::from(begun) && before <= u64::from(begun),
            "{when}: {view:#}"
        );
        assert_has(&view, json!({"state": "running", "share": 0.5}));
    }
    ensure!(value(&path.env)? == Some(learnt));
    ensure!(lease_ns(&path.env)? > now_ns()?);
    path.env.end(Signal::SIGTERM)?;
    let tuner = stored(&path.env, "near")?["timers"]["active"]["tuner"].clone();
    ensure!(tuner["state"] == "active", "{tuner:#}");
    eprintln!("{KILLS} kills, {begun} connections");
    Ok(())
}

test!(
    rto_min_is_learnt_from_the_control_arm,
    needs = [RTT_SAMPLES]
);
/// Clients whose ACKs wait for their next request, 20 to 36 ms. The learnt rto_min covers that delay, so few responses
/// are retransmitted spuriously. Only the server has the agent.
fn rto_min_is_learnt_from_the_control_arm() -> anyhow::Result<()> {
    const FLOOR: Duration = Duration::from_millis(48);
    /// Largest share, from 10,000 requests in the lab. There are at least 1,500 here: with a true share of 1 %, one run
    /// in 60 would stay below it.
    const SPURIOUS: f64 = 0.005;
    const ROUNDS: u32 = 300;
    const CLOSE: Duration = Duration::from_millis(4);
    let mut env = configured(
        "[policy.near]\ncidrs = [\"10.89.0.0/24\"]\nrto_min = \"auto\"\nholdout = \"50%\"\nforce = true\n",
    )?;
    let seen = Seen {
        each_second: &[(20_480, 50), (36_864, 50)],
        hz: hz()?,
    };
    let learnt = Learnt::RtoMin(seen).store(&env, "near")?;
    env.start()?;
    let value = |env: &TestEnv| anyhow::Ok(InKernel::of(env, "near")?.rto_min());
    let begins = value(&env)?;
    ensure!(
        begins == Some(learnt) && learnt >= FLOOR,
        "{begins:?}, {learnt:?}: {}",
        env.log()
    );
    let path = Path::with(env, CLOSE, Server::Inside)?;
    let is_long_enough = |env: &TestEnv| {
        let now = value(env)?.context("no value")?;
        ensure!(now >= FLOOR, "{now:?}");
        Ok(())
    };
    let (treated, [all, again]) = requests(&path, ROUNDS, is_long_enough)?;
    let share = again / all;
    eprintln!("{learnt:?}: {again} of {all} of {treated} peers, {share:.4}");
    ensure!(all >= 1_000.0 && share < SPURIOUS, "{again} of {all}");
    // The control arm continues to provide samples.
    let delays = |near: &Value| near["control"]["passive"]["ack_excess"]["count"].as_u64();
    stats_when(&path.env, "delays of ACKs", |near| delays(near) > Some(100))?;
    is_long_enough(&path.env)?;
    // The control: a short rto_min causes many spurious retransmissions.
    let env = TestEnv::with(
        "[policy.near]\ncidrs = [\"10.89.0.0/24\"]\nrto_min = \"8ms\"\nholdout = \"50%\"\nforce = true\n",
    )?;
    let path = Path::with(env, CLOSE, Server::Inside)?;
    let (_, [all, again]) = requests(&path, ROUNDS / 3, |_| Ok(()))?;
    eprintln!("8 ms: {again} of {all}");
    ensure!(again / all > 4.0 * SPURIOUS, "{again} of {all}");
    Ok(())
}

/// Makes requests from many peers, with pauses. Returns the number of treated peers, and the numbers of their responses
/// and of the responses that were retransmitted although none was lost.
pub(super) fn requests(
    path: &Path,
    rounds: u32,
    check: impl Fn(&TestEnv) -> anyhow::Result<()>,
) -> anyhow::Result<(usize, [f64; 2])> {
    const PEERS: u8 = 20;
    const PAUSES_MS: [u64; 5] = [20, 24, 28, 32, 36];
    let (client, device) = (&path.env.net.client, path.relay.client_device());
    let mut from = Vec::new();
    for host in 100..100 + PEERS {
        run(&format!(
            "ip -n {client} addr add 10.89.0.{host}/24 dev {device}"
        ))?;
        from.push(IpAddr::from([10, 89, 0, host]));
    }
    let mut treated = Vec::new();
    for peer in &from {
        let lookup = path.env.cli(&["lookup", &peer.to_string()])?;
        if !lookup.contains("this peer is in its control arm") {
            treated.push(*peer);
        }
    }
    ensure!((5..=15).contains(&treated.len()), "{treated:?}");
    let clients = |from: Vec<IpAddr>| {
        let peers = Clients {
            interval: Duration::from_millis(7),
            rounds,
            pauses: PAUSES_MS.map(Duration::from_millis).into(),
            from,
            ..path.peers()?
        };
        Arrivals::start(client, None, &peers)
    };
    let others: Vec<_> = from
        .iter()
        .filter(|peer| !treated.contains(peer))
        .copied()
        .collect();
    let count = u32::try_from(treated.len())?;
    // The treated peers come first and the others later, because the link's log has no addresses.
    let mut of_treated = clients(treated.clone())?;
    of_treated.begin(count)?;
    eventually("end of the treated peers' requests", 2 * TIMEOUT, || {
        check(&path.env)?;
        Ok(of_treated.are_done()?.then_some(()))
    })?;
    let done = of_treated.done()?;
    ensure!(done.complete == count, "{done:?}");
    let log = path.relay.log();
    let data = log.iter().filter(|one| one.is(&PacketFilter::SERVER_DATA));
    let again = data
        .clone()
        .filter(|one| one.packet.is_some_and(|packet| packet.repeated));
    let again = again.count();
    let all = data.count();
    let count = u32::try_from(others.len())?;
    let done = clients(others)?.run(count)?;
    ensure!(done.complete == count, "{done:?}");
    check(&path.env)?;
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    Ok((treated.len(), [(all - again) as f64, again as f64]))
}
