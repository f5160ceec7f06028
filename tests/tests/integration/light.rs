//! Connections without socket storage: what they omit, what they still count, and that no loss affects them more.

use std::net::{Ipv4Addr, SocketAddr};

use rto_testbed::workload::{rate::Rate, traffic::Outcome};

use super::{
    established,
    statistics::{near as near_stats, stats_when},
};
use crate::prelude::*;

/// A connection must not give up earlier than without the agent, within 10 %.
const SHARE: f64 = 0.9;

test!(connections_are_sampled_one_in_n);
/// Every connection is counted, and the sampled ones represent all.
fn connections_are_sampled_one_in_n() -> anyhow::Result<()> {
    const SAMPLING: u64 = 8;
    const CONNECTIONS: u32 = 2000;
    let env = TestEnv::with(&format!(
        "sampling = {SAMPLING}\n[policy.near]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n"
    ))?;
    let on = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let program = beside("rto-workload")?;
    let mut rate = Rate::start(&program, &env.net.client, env.cgroup.path(), None, on)?;
    rate.connections(CONNECTIONS)?;
    let stats = env.json(&["stats"])?;
    ensure!(stats["sampling"] == SAMPLING, "{stats:#}");
    for direction in ["active", "passive"] {
        let one = &stats["policies"]["near"][direction];
        ensure!(one["connections"] == CONNECTIONS, "{direction}: {one:#}");
        ensure!(one["attempts"] == CONNECTIONS, "{direction}: {one:#}");
        ensure!(one["good_attempts"] == CONNECTIONS, "{direction}: {one:#}");
        for histogram in ["connect_time", "path_rtt"] {
            ensure!(
                one[histogram]["count"] == CONNECTIONS,
                "{direction}: {one:#}"
            );
        }
        ensure!(one["storage_failures"] == 0, "{direction}: {one:#}");
        let count = one["srtt"]["count"].as_u64().context("a count")?;
        ensure!(count % SAMPLING == 0, "{direction}: {one:#}");
        // 250 of 2,000 are expected, with a standard deviation of 15: five deviations are 600 connections.
        let off = count.abs_diff(CONNECTIONS.into());
        ensure!(off <= 600, "{direction}: {count}");
    }
    env.cli_says(&["stats"], "from 1 in 8 connections")?;
    let hits = env.json(&["list"])?["entries"][0]["hits"].as_u64();
    // Two hits per connection: exact up to 1,024, then one in 16 counts: 3,000 in 186 steps, give or take 14.
    let off = hits.context("hits")?.abs_diff(2 * u64::from(CONNECTIONS));
    ensure!(off <= 5 * 14 * 16, "{hits:?}");
    Ok(())
}

/// How long connect() takes to give up on a server that does not answer.
fn gives_up(env: &TestEnv, address: &str) -> anyhow::Result<Duration> {
    let outcome = env.connect(to(address, PORT))?.outcome()?;
    ensure!(outcome.result == "ETIMEDOUT", "{outcome:?}");
    Ok(outcome.took)
}

/// Limits the client's SYNs and drops all packets to the server; returns how long connect() takes without a policy.
fn silent_server(env: &TestEnv) -> anyhow::Result<Duration> {
    env.net.black_hole(PORT)?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_retries", "1")?;
    gives_up(env, SERVER_V4_OTHER)
}

test!(a_connection_outlasts_its_entry);
/// The entry is removed between the SYN and its timeout: the timer that fires determines what TCP_SYNCNT must be.
fn a_connection_outlasts_its_entry() -> anyhow::Result<()> {
    for (cidr, change) in [
        ("10.88.0.0/24", ["remove", "10.88.0.0/24"].as_slice()),
        (
            "10.88.0.0/24",
            &["add", "10.88.0.0/24", "--initial-rto", "3s"],
        ),
    ] {
        let env = TestEnv::with(&format!(
            "[policy.near]\ncidrs = [\"{cidr}\"]\ninitial_rto = \"300ms\"\n"
        ))?;
        let control = silent_server(&env)?;
        let connecting = env.connect(to(SERVER_V4, PORT))?;
        env.cli(change)?;
        let outcome = connecting.outcome()?;
        ensure!(outcome.result == "ETIMEDOUT", "{outcome:?}");
        ensure!(
            outcome.took >= control.mul_f64(SHARE),
            "{change:?}: {outcome:?} against {control:?}"
        );
    }
    Ok(())
}

test!(another_program_takes_the_callbacks_away);
/// TCP_SYNCNT is raised at the kernel's next TIMEOUT_INIT, because the program does not see the first timeout.
fn another_program_takes_the_callbacks_away() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let control = silent_server(&env)?;
    let foreign = Foreign::attach_setting_callbacks(env.cgroup.path(), 0)?;
    let took = gives_up(&env, SERVER_V4)?;
    ensure!(
        took >= control.mul_f64(SHARE),
        "{took:?} against {control:?}"
    );
    drop(foreign);
    let alone = gives_up(&env, SERVER_V4)?;
    ensure!(
        alone >= control.mul_f64(SHARE),
        "{alone:?} against {control:?}"
    );
    Ok(())
}

/// The values of a socket's timer options after the program has set them.
fn timers(conversation: &mut Conversation) -> anyhow::Result<[i32; 2]> {
    Ok([
        conversation.option(option::RTO_MIN_US)?,
        conversation.option(option::DELACK_MAX_US)?,
    ])
}

const TIMERS: &str = "rto_min = \"16ms\"\ndelack_max = \"8ms\"";

test!(
    options_set_without_storage_are_restored,
    needs = [TCP_ITERATOR]
);
/// The options are restored even if the policy has other values by then, or is gone. A value that an application has
/// set since is kept.
fn options_set_without_storage_are_restored() -> anyhow::Result<()> {
    if lacks("bpf-getsockopt-rto-min")? {
        // Such kernels use socket storage, which open_sockets tests.
        return Ok(());
    }
    for later in [TIMERS, "rto_min = \"100ms\"", "initial_rto = \"100ms\""] {
        let env = TestEnv::with(&established::policy(TIMERS))?;
        let _server = env.echo_server(to(SERVER_V4, PORT))?;
        let mut open = env.converse(to(SERVER_V4, PORT))?;
        ensure!(timers(&mut open)? == [16_000, 8_000]);
        env.load(&established::policy(later))?;
        // The connection keeps its original values.
        ensure!(timers(&mut open)? == [16_000, 8_000]);
        let answer = env.json(&["detach", "--restore"])?;
        let counts = &answer["restored"]["policies"]["near"];
        assert_has(counts, json!({"changed": 2, "refused": 0}));
        ensure!(timers(&mut open)? == [200_000, 200_000]);
    }
    Ok(())
}

test!(reconnected_socket_has_timers_of_its_new_peer);
/// Nothing is stored at the first connection: the second one has the values of a fresh socket.
fn reconnected_socket_has_timers_of_its_new_peer() -> anyhow::Result<()> {
    if lacks("bpf-getsockopt-rto-min")? {
        // The application cannot read the values either.
        return Ok(());
    }
    let near = established::policy(TIMERS);
    let loose = "[policy.loose]\ncidrs = [\"10.88.1.0/24\"]\nrto_min = \"100ms\"\n";
    for (policies, others) in [
        (near.clone(), [200_000, 200_000]),
        (format!("{near}{loose}"), [100_000, 200_000]),
    ] {
        let env = TestEnv::with(&policies)?;
        let _server = env.echo_server((Ipv4Addr::UNSPECIFIED, PORT).into())?;
        for (first, then, expected) in [
            (SERVER_V4, SERVER_V4_OTHER, others),
            (SERVER_V4_OTHER, SERVER_V4, [16_000, 8_000]),
        ] {
            let first_to = Connect::with(|c| c.first = Some(to(first, PORT)));
            let mut open = env.converse_with(to(then, PORT), first_to)?;
            let set = timers(&mut open)?;
            ensure!(set == expected, "{first}, then {then}: {set:?}");
        }
        let near = near_stats(&env)?;
        ensure!(near["active"]["connections"] == 2, "{near:#}");
    }
    Ok(())
}

/// Connects two addresses of the server's namespace to each other and drops some packets of the first.
fn cross_syns(
    env: &TestEnv,
    cgroup: Option<&Path>,
    port: u16,
    lost: &str,
) -> anyhow::Result<Outcome> {
    let [one, other] = [port, port + 1].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let netns = &env.net.server;
    sysctl(netns, "net.ipv4.tcp_syn_retries", "1")?;
    env.net
        .server_drops(&format!("tcp sport {} {lost}", one.port()))?;
    let outcome = Traffic::cross_syns(netns, cgroup, one, other)?.outcome()?;
    env.net.drop_nothing()?;
    Ok(outcome)
}

test!(crossed_syns);
/// A connecting socket that receives a SYN instead of a SYN-ACK continues to connect, and gives up no earlier.
fn crossed_syns() -> anyhow::Result<()> {
    const LOOPBACK: &str =
        "[policy.near]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"300ms\"\nforce = true\n";
    let env = TestEnv::with(LOOPBACK)?;
    let cgroup = Some(env.cgroup.path());
    let outcome = cross_syns(&env, cgroup, PORT, "tcp flags & (syn|ack) == syn")?;
    ensure!(outcome.result == "connected", "{outcome:?}");
    let near = near_stats(&env)?;
    ensure!(near["active"]["connections"] == 2, "{near:#}");
    ensure!(near["passive"]["connections"] == 0, "{near:#}");
    let control = cross_syns(&env, None, PORT + 2, "")?;
    let outcome = cross_syns(&env, cgroup, PORT + 4, "")?;
    for outcome in [&control, &outcome] {
        ensure!(outcome.result == "ETIMEDOUT", "{outcome:?}");
    }
    ensure!(
        outcome.took >= control.took.mul_f64(SHARE),
        "{outcome:?} against {control:?}"
    );
    let near = near_stats(&env)?;
    ensure!(near["active"]["connections"] == 2, "{near:#}");
    Ok(())
}

test!(each_end_counts_its_own_losses);
/// The callbacks show on which side a connection without storage is.
fn each_end_counts_its_own_losses() -> anyhow::Result<()> {
    let policies =
        "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\ninitial_rto = \"100ms\"\n";
    let env = TestEnv::with(policies)?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let mut conversation = env.converse(to(SERVER_V4, PORT))?;
    conversation.rounds(5)?;
    let counted = |direction: &Value| {
        let count = |of: &Value| of.as_u64().unwrap_or(0);
        (
            count(&direction["rtos"][0]),
            count(&direction["tail_loss_probes"]),
        )
    };
    let before = near_stats(&env)?;
    for direction in ["active", "passive"] {
        ensure!(counted(&before[direction]) == (0, 0), "{before:#}");
        ensure!(before[direction]["connections"] == 1, "{before:#}");
    }
    // Longer than the ACK of the last answer is delayed; the server would miss that ACK.
    thread::sleep(Duration::from_millis(200));
    env.net.black_hole(PORT)?;
    conversation.send(conversation::REQUEST)?;
    let after = stats_when(&env, "the client's timeouts", |near| {
        near["active"]["rtos"][1] == 1
    })?;
    ensure!(counted(&after["active"]) == (1, 1), "{after:#}");
    ensure!(after["active"]["connections"] == 1, "{after:#}");
    Ok(())
}

test!(an_accepted_connections_first_timeout_is_counted);
/// The program does not see the timeout itself, only retransmissions; without tail loss probes it is the first of them.
fn an_accepted_connections_first_timeout_is_counted() -> anyhow::Result<()> {
    for (probes, expected) in [("0", 0), ("3", 1)] {
        let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
        sysctl(&env.net.server, "net.ipv4.tcp_early_retrans", probes)?;
        let _server = env.echo_server(to(SERVER_V4, PORT))?;
        let mut conversation = env.converse(to(SERVER_V4, PORT))?;
        conversation.rounds(5)?;
        // The request arrives, and the ACK of its answer is lost.
        let acks = format!("tcp dport {PORT} ip length < 100");
        env.net.server_drops(&acks)?;
        conversation.rounds(1)?;
        let after = stats_when(&env, "the server's timeouts", |near| {
            near["passive"]["rtos"][2] == 1
        })?;
        let passive = &after["passive"];
        ensure!(
            passive["rtos"][0] == 1 && passive["rtos"][1] == 1,
            "{after:#}"
        );
        ensure!(passive["tail_loss_probes"] == expected, "{after:#}");
        ensure!(after["active"]["rtos"][0] == 0, "{after:#}");
    }
    Ok(())
}
