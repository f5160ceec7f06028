//! Control arms: a share of a policy's connections that keeps the kernel's own timers, and is counted apart.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rto_testbed::workload::rate::Rate;

use super::{
    established::policy,
    holdout::count,
    statistics::{near, stats_when},
};
use crate::prelude::*;

/// A counter of a direction, in the treated arm and in the control arm.
fn both(near: &Value, direction: &str, counter: &str) -> anyhow::Result<[u64; 2]> {
    Ok([
        count(&near[direction][counter])?,
        count(&near["control"][direction][counter])?,
    ])
}

test!(both_arms_have_their_share);
fn both_arms_have_their_share() -> anyhow::Result<()> {
    let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    shares(Ipv4Addr::LOCALHOST.into())?;
    shares(Ipv6Addr::LOCALHOST.into())?;
    shares(mapped.into())
}

/// Each arm has its share of the connections, and no connection changes its arm: in each arm, the number of attempts
/// equals the number of established connections.
fn shares(address: IpAddr) -> anyhow::Result<()> {
    const SHARE: f64 = 0.05;
    /// Each listener gets fewer connections than connect() tries ports, so that no pair of ports occurs twice. It would
    /// draw the same arm again, and the shares would vary more than with independent connections.
    const LISTENERS: u16 = 8;
    let connections = scaled("connections", 100_000, 3_000);
    let env = TestEnv::with(
        "[policy.near]\ncidrs = [\"127.0.0.0/8\", \"::1/128\"]\ninitial_rto = \"100ms\"\n\
         syn_ack_rto = \"100ms\"\nholdout = \"5%\"\nforce = true\n",
    )?;
    let program = beside("rto-workload")?;
    for port in PORT..PORT + LISTENERS {
        let on = SocketAddr::from((address, port));
        let mut rate = Rate::start(&program, &env.net.client, env.cgroup.path(), None, on)?;
        rate.connections(connections / u32::from(LISTENERS))?;
    }
    let near = near(&env)?;
    let n = f64::from(connections);
    let sigma = (n * SHARE * (1.0 - SHARE)).sqrt();
    for direction in ["active", "passive"] {
        let [treated, control] = both(&near, direction, "connections")?;
        ensure!(treated + control == u64::from(connections), "{near:#}");
        #[expect(clippy::cast_precision_loss, reason = "small")]
        let off = (control as f64 - n * SHARE).abs();
        // A correct draw fails once in a million runs.
        ensure!(off < 5.0 * sigma, "{direction}: {control} of {connections}");
        // No connect() takes 500 ms on the loopback device, so every attempt is good.
        for counter in ["attempts", "good_attempts"] {
            let counted = both(&near, direction, counter)?;
            ensure!(counted == [treated, control], "{direction}: {near:#}");
        }
    }
    Ok(())
}

test!(the_control_arm_keeps_the_kernels_timers);
/// The first SYN of each of many connections is lost: some are sent again by the policy's timer, the others after 1 s.
fn the_control_arm_keeps_the_kernels_timers() -> anyhow::Result<()> {
    // All are in the same arm with a probability of 1 in 2^23.
    const CONNECTIONS: usize = 24;
    let env = silent(&policy("initial_rto = \"100ms\"\nholdout = \"50%\""))?;
    let gaps = env.many_syn_gaps(to(SERVER_V4, PORT), CONNECTIONS, 1)?;
    let is = |timer: Duration| {
        // A busy machine delays a timer; 8 ms are tolerated in the other direction.
        let range = timer - Duration::from_millis(8)..timer + timer / 2;
        gaps.iter().filter(|gaps| range.contains(&gaps[0])).count()
    };
    let [short, long] = [Duration::from_millis(100), Duration::from_secs(1)].map(is);
    ensure!(short + long == CONNECTIONS, "{gaps:?}");
    ensure!(short > 0 && long > 0, "{gaps:?}");
    Ok(())
}

test!(outcomes_are_counted_by_arm);
/// The first SYN of each connection is lost: connections of the control arm take longer than half a second.
fn outcomes_are_counted_by_arm() -> anyhow::Result<()> {
    const CONNECTIONS: usize = 40;
    let env = TestEnv::with(&policy(
        "initial_rto = \"100ms\"\nsyn_retries = \"keep\"\nholdout = \"50%\"",
    ))?;
    let server = env.serve(to(SERVER_V4, PORT))?;
    env.net
        .server_loses_each_syn_for(Duration::from_millis(50))?;
    let cgroup = Some(env.cgroup.path());
    let clients = &env.net.client;
    let all = Traffic::connect_many(clients, cgroup, to(SERVER_V4, PORT), CONNECTIONS)?;
    let established =
        |near: &Value| -> Option<[u64; 2]> { both(near, "active", "connections").ok() };
    let total = |near: &Value| established(near).map_or(0, |arms| arms.iter().sum());
    let near = stats_when(&env, "all connections", |near| {
        total(near) == CONNECTIONS as u64
    })?;
    let [treated, control] = established(&near).context("counts")?;
    let counted = |near: &Value| -> anyhow::Result<[[u64; 2]; 2]> {
        let of = |what| both(near, "active", what);
        Ok([of("attempts")?, of("good_attempts")?])
    };
    ensure!(
        counted(&near)? == [[treated, control], [treated, 0]],
        "{near:#}"
    );
    drop((all, server));
    // Now the server answers no SYN. Each attempt is counted at once, as a bad one.
    env.net.drop_nothing()?;
    env.net.black_hole(PORT)?;
    sysctl(clients, "net.ipv4.tcp_syn_retries", "1")?;
    let _all = Traffic::connect_many(clients, cgroup, to(SERVER_V4, PORT), CONNECTIONS)?;
    let near = stats_when(&env, "all attempts", |near| {
        both(near, "active", "attempts")
            .is_ok_and(|arms| arms.iter().sum::<u64>() == 2 * CONNECTIONS as u64)
    })?;
    let [attempts, good] = counted(&near)?;
    ensure!(attempts[0] > treated && attempts[1] > control, "{near:#}");
    ensure!(good == [treated, 0], "{near:#}");
    ensure!(total(&near) == CONNECTIONS as u64, "{near:#}");
    Ok(())
}

test!(the_probe_is_in_no_control_arm);
/// Each probe has a different port: without an exception for probes, half of them would get the kernel's own timer.
fn the_probe_is_in_no_control_arm() -> anyhow::Result<()> {
    const PROBES: usize = 10;
    let env = TestEnv::with(&policy("initial_rto = \"100ms\"\nholdout = \"50%\""))?;
    for _ in 0..PROBES {
        let output = env.try_cli(&["doctor", "--verbose"])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(text.contains("started with 100ms"), "{text}");
    }
    Ok(())
}

test!(a_restart_keeps_what_both_arms_have_counted);
/// After SIGKILL and after SIGTERM, the next daemon continues the counters of both arms, and draws the arms as before.
fn a_restart_keeps_what_both_arms_have_counted() -> anyhow::Result<()> {
    const CONNECTIONS: u32 = 400;
    let mut env = TestEnv::with(
        "on_exit = \"keep\"\n[policy.near]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\n\
         holdout = \"50%\"\nforce = true\n",
    )?;
    let program = beside("rto-workload")?;
    let on = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let mut rate = Rate::start(&program, &env.net.client, env.cgroup.path(), None, on)?;
    let mut total = 0;
    let mut last = [0; 2];
    for signal in [None, Some(Signal::SIGKILL), Some(Signal::SIGTERM)] {
        if let Some(signal) = signal {
            env.restart(signal)?;
            let both = both(&near(&env)?, "active", "connections")?;
            ensure!(both == last, "{signal:?}: {both:?}, not {last:?}");
        }
        rate.connections(CONNECTIONS)?;
        total += u64::from(CONNECTIONS);
        let near = near(&env)?;
        for direction in ["active", "passive"] {
            let [treated, control] = both(&near, direction, "connections")?;
            ensure!(treated + control == total, "{signal:?}: {near:#}");
            let attempts = both(&near, direction, "attempts")?;
            ensure!(attempts == [treated, control], "{signal:?}: {near:#}");
        }
        last = both(&near, "active", "connections")?;
        ensure!(last.iter().all(|arm| *arm > total / 4), "{last:?}");
    }
    Ok(())
}

test!(
    apply_leaves_sockets_of_the_control_arm_alone,
    needs = [TCP_ITERATOR, RTO_MIN_OPTION]
);
fn apply_leaves_sockets_of_the_control_arm_alone() -> anyhow::Result<()> {
    const PEERS: u8 = 12;
    const KERNEL_US: i32 = 200_000;
    const OWN_US: i32 = 100_000;
    let env = TestEnv::with("[policy.far]\ncidrs = [\"10.77.0.0/24\"]\ninitial_rto = \"100ms\"\n")?;
    let netns = &env.net.client;
    let cgroup = Some(env.cgroup.path());
    let on = (Ipv4Addr::UNSPECIFIED, PORT).into();
    let _server = Traffic::echo_server(netns, cgroup, on, false)?;
    let connect = |peer: Ipv4Addr| {
        let to = (peer, PORT).into();
        Conversation::start(netns, cgroup, to, Connect::default())
    };
    let peers = (1..=PEERS).map(|host| Ipv4Addr::new(127, 0, 0, host));
    let mut open = Vec::new();
    for peer in peers {
        open.push((peer, connect(peer)?));
    }
    env.load(
        "[policy.near]\ncidrs = [\"127.0.0.0/8\"]\nrto_min = \"100ms\"\nholdout = \"50%\"\nforce = true\n",
    )?;
    for (peer, conversation) in &mut open {
        // The control: an entry alone does not change open sockets.
        let us = conversation.option(option::RTO_MIN_US)?;
        ensure!(us == KERNEL_US, "{peer}: {us}");
    }
    env.cli(&["apply"])?;
    let mut controls = 0;
    for (peer, conversation) in &mut open {
        let us = conversation.option(option::RTO_MIN_US)?;
        ensure!([KERNEL_US, OWN_US].contains(&us), "{peer}: {us}");
        controls += u8::from(us == KERNEL_US);
    }
    // All are in the same arm with a probability of 1 in 2,048.
    ensure!((1..PEERS).contains(&controls), "{controls} of {PEERS}");
    Ok(())
}
