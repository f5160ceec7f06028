//! Learnt values outlive a daemon that is killed.

use std::time::SystemTime;

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_agent_common::direction::ACTIVE;
use rto_testbed::{
    machine::Machine,
    warm::{Seen, stored},
};
use rto_tests::{in_kernel::InKernel, path::Path};

use crate::prelude::*;

const RTT: Duration = Duration::from_millis(10);

fn hz() -> anyhow::Result<u32> {
    Ok(u32::try_from(Machine::here()?.hz)?)
}

test!(learnt_values_survive_kills_at_random, killed);
/// A learnt value and a control arm, under traffic: both stay active all the time and continue after each start.
fn killed() -> anyhow::Result<()> {
    const KILLS: u32 = 20;
    const PER_S: u32 = 100;
    /// Latest moment of a kill: a start takes about 0.2 s, and the first ticks follow.
    const LATEST_MS: u64 = 1_500;
    let mut env = configured(
        "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"auto\"\n\
         [policy.other]\ncidrs = [\"10.89.0.0/24\"]\ninitial_rto = \"100ms\"\nholdout = \"50%\"\n",
    )?;
    let seen = Seen {
        each_second: &[(10_240, 80), (20_480, 20)],
        hz: hz()?,
    };
    let learnt = seen.store(&env, "near")?;
    env.start()?;
    let mut path = Path::new(env, RTT)?;
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
    }
    ensure!(value(&path.env)? == Some(learnt));
    path.env.end(Signal::SIGTERM)?;
    let tuner = stored(&path.env, "near")?["timers"]["active"]["tuner"].clone();
    ensure!(tuner["state"] == "active", "{tuner:#}");
    eprintln!("{KILLS} kills, {begun} connections");
    Ok(())
}
