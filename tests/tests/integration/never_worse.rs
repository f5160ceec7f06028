//! Situations in which a shorter initial RTO could make a connection worse than the kernel's timers. Each has a control
//! without the agent, a test with the default configuration, and one with the setting that permits it, if there is one.

use rto_testbed::workload::traffic::Listen;

use super::doctor::{doctor_inside, finding};
use crate::prelude::*;

/// The value of `syn_ack_rto = "auto"` with an initial RTO of 100 ms and the 5 retransmissions of a new namespace: the
/// shortest that keeps a request for 31 s.
pub(super) const AUTO: Duration = Duration::from_nanos(31_000_000_000 / 63);

/// An environment, with an agent if there are settings for it.
fn env(settings: Option<&str>) -> anyhow::Result<TestEnv> {
    match settings {
        Some(settings) => TestEnv::with(&format!("{}{settings}", near("\"10.88.0.0/24\""))),
        None => TestEnv::new(),
    }
}

/// The fate of a request while the client's ACK and data are lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// The request still exists.
    Open,
    /// The request has expired: the client, which considers itself connected, gets a reset.
    Closed,
}

/// Longer than a request lives with a timer of 100 ms (6.3 s), and shorter than 31 s.
const OUTAGE: Duration = Duration::from_secs(10);

test!(a_half_open_request_without_the_agent, || half_open(
    None,
    OUTAGE,
    Half::Open
));
test!(a_half_open_request_by_default, || half_open(
    Some(""),
    OUTAGE,
    Half::Open
));
test!(a_half_open_request_that_was_asked_to_end_early, || {
    half_open(Some("syn_ack_rto = \"100ms\"\n"), OUTAGE, Half::Closed)
});
pub(super) fn half_open(
    settings: Option<&str>,
    outage: Duration,
    expected: Half,
) -> anyhow::Result<()> {
    let env = env(settings)?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    env.net.drop_final_acks(PORT)?;
    let mut conversation = env.converse(to(SERVER_V4, PORT))?;
    conversation.send(conversation::REQUEST)?;
    let begun = Instant::now();
    thread::sleep(outage);
    env.net.drop_nothing()?;
    let answered = conversation.rounds(1);
    eprintln!(
        "outage of {outage:?}, {settings:?}: {answered:?} after {:?}",
        begun.elapsed()
    );
    // Before Linux 5.17 only the first timer is the policy's, so a request lives nearly as long as without the agent.
    let is_open = expected == Half::Open || lacks("syn-ack-retransmission-timeout")?;
    match (is_open, answered) {
        (true, Ok(())) => Ok(()),
        (true, Err(e)) => Err(e.context("the request ended early")),
        (false, Err(_)) => Ok(()),
        (false, Ok(())) => {
            anyhow::bail!("the request outlived the {outage:?} that its policy does not allow")
        }
    }
}

test!(
    deferred_accept_is_as_long_as_without_the_agent,
    needs = [LISTENER]
);
fn deferred_accept_is_as_long_as_without_the_agent() -> anyhow::Result<()> {
    for settings in [None, Some(""), Some("syn_ack_rto = \"100ms\"\n")] {
        deferred(settings).with_context(|| format!("{settings:?}"))?;
    }
    Ok(())
}

/// A listener with a deferral of 5 s, which the kernel stores as a number of retransmissions: 1 + 2 + 4 s.
fn deferred(settings: Option<&str>) -> anyhow::Result<()> {
    const DEFERRED: Duration = Duration::from_secs(7);
    let env = env(settings)?;
    let (cgroup, server) = (Some(env.cgroup.path()), &env.net.server);
    let options = Listen {
        defer_accept_s: 5,
        ..Listen::default()
    };
    let mut listener = Traffic::serve_with(server, cgroup, to(SERVER_V4, PORT), options)?;
    let began = Instant::now();
    let _silent = env.connect(to(SERVER_V4, PORT))?;
    listener.accepted()?;
    let took = began.elapsed();
    // Three timers in a row, each late by its own step, and the latency of the processes.
    let timers = [1, 2, 4].map(|s| latest(Duration::from_secs(s)));
    let limit = timers.iter().sum::<Duration>() + Duration::from_secs(1);
    ensure!(
        (DEFERRED..limit).contains(&took),
        "accepted after {took:?}, not {DEFERRED:?}"
    );
    if settings == Some("") {
        // The control: another listener has the policy's timer.
        let _other = env.serve(to(SERVER_V4, PORT + 1))?;
        env.net.drop_final_acks(PORT + 1)?;
        env.assert_syn_ack_gap(to(SERVER_V4, PORT + 1), AUTO)?;
    }
    Ok(())
}

test!(a_listeners_own_retransmissions, needs = [LISTENER]);
/// TCP_SYNCNT of a listener is the number of SYN-ACK retransmissions.
fn a_listeners_own_retransmissions() -> anyhow::Result<()> {
    let env = env(Some(""))?;
    env.net.server_drops("tcp flags & (syn|ack) == ack")?;
    let (cgroup, server) = (Some(env.cgroup.path()), &env.net.server);
    // With 2 retransmissions only the kernel's timer keeps a request for 7 s; with 8, a timer of 100 ms keeps it for 51
    // s.
    for (port, syn_retries, timer) in [
        (PORT, Some(2), KERNEL_RTO),
        (PORT + 1, Some(8), POLICY_RTO),
        (PORT + 2, None, AUTO),
    ] {
        let options = Listen {
            syn_retries,
            ..Listen::default()
        };
        let _listener = Traffic::serve_with(server, cgroup, to(SERVER_V4, port), options)?;
        env.assert_syn_ack_gap(to(SERVER_V4, port), timer)?;
    }
    Ok(())
}

test!(a_namespaces_own_retransmissions, needs = [LISTENER]);
fn a_namespaces_own_retransmissions() -> anyhow::Result<()> {
    let env = env(Some(""))?;
    env.net.drop_final_acks(PORT)?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    env.assert_syn_ack_gap(to(SERVER_V4, PORT), AUTO)?;
    // The listener already exists: the sysctl counts when the request arrives.
    for (retries, timer) in [("8", POLICY_RTO), ("1", KERNEL_RTO)] {
        sysctl(&env.net.server, "net.ipv4.tcp_synack_retries", retries)?;
        env.assert_syn_ack_gap(to(SERVER_V4, PORT), timer)?;
    }
    Ok(())
}

/// Which SYNs are lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// All SYNs during [`SYN_OUTAGE`]; with the kernel's timer that is one.
    OfTime,
    /// The first three; with 100 ms these are sent within 300 ms. MPTCP falls back after two retransmissions, and if
    /// the next SYN, which is plain TCP, is answered at once, the kernel disables MPTCP for an hour
    /// (`mptcp_active_detect_blackhole()`, Linux 6.18).
    OfSyns,
}

const SYN_OUTAGE: Duration = Duration::from_millis(450);

test!(
    mptcp_survives_lost_syns_unless_asked,
    needs = [MPTCP_BLACKHOLE]
);
fn mptcp_survives_lost_syns_unless_asked() -> anyhow::Result<()> {
    mptcp(None, KERNEL_RTO, Loss::OfTime)?;
    mptcp(Some(""), KERNEL_RTO, Loss::OfTime)?;
    mptcp(Some("mptcp = \"apply\"\n"), POLICY_RTO, Loss::OfSyns)
}

fn mptcp(settings: Option<&str>, timer: Duration, loss: Loss) -> anyhow::Result<()> {
    let env = env(settings)?;
    env.net.sysctl("net.mptcp.enabled", "1")?;
    // A connection that is never established does not count as a fallback.
    let black_hole = to(SERVER_V4, PORT + 1);
    env.net.black_hole(black_hole.port())?;
    let connect = Connect::with(|c| c.mptcp = true);
    env.assert_syn_gap((black_hole, connect), timer)?;
    env.net.drop_nothing()?;
    let server = to(SERVER_V4, PORT);
    let _server = env.echo_server_mptcp(server)?;
    match loss {
        Loss::OfTime => env.net.server_loses_syns_for(SYN_OUTAGE)?,
        Loss::OfSyns => {
            let first_three = "tcp flags & (syn|ack) == syn limit rate 1/day burst 3 packets";
            env.net.server_drops(first_three)?;
        }
    }
    let options = Connect::with(|c| c.mptcp = true);
    let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
    let mut conversation = env.converse_with(server, options)?;
    conversation.rounds(1)?;
    capture.wait_for(TIMEOUT, |all| syns(all, server).len() > 1)?;
    drop(conversation);
    env.converse_with(server, options)?.rounds(1)?;
    let counted = |name| netstat(&env.net.client, "MPTcpExt: ", name);
    // MPTCP connections; fallbacks; sockets made while MPTCP was disabled.
    let seen = [
        counted("MPCapableSYNACKRX")?,
        counted("Blackhole")?,
        counted("MPCapableSYNTXDisabled")?,
    ];
    let expected = match loss {
        Loss::OfTime => [2, 0, 0],
        Loss::OfSyns => [0, 1, 1],
    };
    ensure!(seen == expected, "{seen:?}, not {expected:?}");
    Ok(())
}

test!(rto_max_leaves_mptcp_its_syn_timers, needs = [RTO_MAX]);
/// `rto_max` ends the doubling, which would end connect() earlier if the SYN has the kernel's initial RTO.
fn rto_max_leaves_mptcp_its_syn_timers() -> anyhow::Result<()> {
    let linear = |timer: Duration| [timer; 5].into_iter();
    for (settings, timers) in [
        (
            "rto_max = \"1s\"\n",
            linear(KERNEL_RTO).chain([2 * KERNEL_RTO]).collect(),
        ),
        (
            "rto_max = \"1s\"\nmptcp = \"apply\"\n",
            linear(POLICY_RTO).collect::<Vec<_>>(),
        ),
    ] {
        let env = env(Some(settings))?;
        sysctl(&env.net.client, "net.mptcp.enabled", "1")?;
        env.net.black_hole(PORT)?;
        let connect = Connect::with(|c| c.mptcp = true);
        env.assert_syn_gaps((to(SERVER_V4, PORT), connect), &timers)?;
    }
    Ok(())
}

test!(fast_open_that_could_be_switched_off, fast_open);
/// While the kernel watches for black holes of TCP Fast Open, such connections keep the kernel's timers.
fn fast_open() -> anyhow::Result<()> {
    let env = env(Some(""))?;
    let client = &env.net.client;
    // Data in the SYN without a cookie (Documentation/networking/ip-sysctl.rst).
    sysctl(client, "net.ipv4.tcp_fastopen", "1543")?;
    env.net.black_hole(PORT)?;
    let fast_open = Connect::with(|c| c.fast_open = true);
    for (timeout_s, timer) in [("3600", KERNEL_RTO), ("0", POLICY_RTO)] {
        sysctl(
            client,
            "net.ipv4.tcp_fastopen_blackhole_timeout_sec",
            timeout_s,
        )?;
        let capture = Capture::start(client, CLIENT_LINK)?;
        env.assert_syn_gap((to(SERVER_V4, PORT), fast_open), timer)?;
        let sent = capture.wait_for(TIMEOUT, |all| !syns(all, to(SERVER_V4, PORT)).is_empty())?;
        let first = &syns(&sent, to(SERVER_V4, PORT))[0];
        ensure!(
            first.length == conversation::REQUEST,
            "no data in the SYN: {first:?}"
        );
        // The control: other connections have the policy's timer.
        env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    }
    Ok(())
}

test!(the_hosts_retransmissions_are_followed);
/// A daemon in a separate network namespace, whose sysctl changes.
fn the_hosts_retransmissions_are_followed() -> anyhow::Result<()> {
    let mut env = configured(&near("\"10.88.0.0/24\""))?;
    let inside = format!("--net=/run/netns/{}", env.net.server);
    env.start_under(&["nsenter".to_owned(), inside])?;
    let lifetime = |env: &TestEnv| -> anyhow::Result<String> {
        let lookup = env.cli(&["lookup", SERVER_V4])?;
        let line = lookup.lines().find(|line| line.contains("syn_ack_rto"));
        Ok(line.context("no syn_ack_rto")?.to_owned())
    };
    ensure!(
        lifetime(&env)?.contains("with 5 retransmissions"),
        "{}",
        lifetime(&env)?
    );
    sysctl(&env.net.server, "net.ipv4.tcp_synack_retries", "3")?;
    let is_new = |line: &String| line.contains("auto -> 1s");
    let line = eventually_seen("auto -> 1s", TIMEOUT, || lifetime(&env), is_new)?;
    ensure!(line.contains("with 3 retransmissions"), "{line}");
    Ok(())
}

test!(doctor_says_what_limits_syn_acks);
/// In a separate network namespace, which has its own sysctls.
fn doctor_says_what_limits_syn_acks() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let netns = &env.net.client;
    let doctor = || anyhow::Ok(doctor_inside(&env)?.0);
    const FAST_OPEN: &str = "tcp_fastopen_blackhole_timeout_sec";
    let before = doctor()?;
    let retries = finding(&before, "tcp_synack_retries");
    ensure!(retries["severity"] == "note", "{retries:#}");
    assert_says(&retries["found"].to_string(), &["instead of 100ms"]);
    ensure!(finding(&before, FAST_OPEN).is_null(), "{before:#}");
    sysctl(netns, "net.ipv4.tcp_synack_retries", "8")?;
    sysctl(netns, "net.ipv4.tcp_fastopen_blackhole_timeout_sec", "3600")?;
    let after = doctor()?;
    let expected = if lacks("btf")? { "warning" } else { "ok" };
    ensure!(
        finding(&after, FAST_OPEN)["severity"] == expected,
        "{after:#}"
    );
    let fix = retries["fix"].to_string();
    let retries = finding(&after, "tcp_synack_retries");
    if lacks("reads-listener")? {
        // A program cannot see that a listener allows more.
        ensure!(retries["severity"] == "note", "{after:#}");
        ensure!(finding(&after, "listeners").is_object(), "{after:#}");
        return Ok(());
    }
    ensure!(retries["severity"] == "ok", "{after:#}");
    assert_says(
        &fix,
        &[
            "net.ipv4.tcp_synack_retries=8",
            "gives 100ms",
            "kept for 367s instead of 63s",
        ],
    );
    Ok(())
}
