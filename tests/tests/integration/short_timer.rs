//! Situations in which a shorter SYN timer does harm, each with a control without the agent, on the client's clock. The
//! tuning guide lists them under "When not to shorten the timer".

use rto_testbed::{netns::nft, workload::traffic::Outcome};

use super::never_worse::{Half, half_open};
use crate::prelude::*;

/// How late a connection may be established after its timer on a busy machine.
const LATE: Duration = Duration::from_millis(800);

/// An environment with an agent for the client, or without an agent. The server has none.
fn env(with_agent: bool) -> anyhow::Result<TestEnv> {
    if with_agent {
        TestEnv::with(&near("\"10.88.0.0/24\""))
    } else {
        TestEnv::new()
    }
}

/// A listener outside of the agent's cgroup, so that its SYN-ACKs have the kernel's timer.
fn listener(env: &TestEnv) -> anyhow::Result<Traffic> {
    Traffic::serve(&env.net.server, None, to(SERVER_V4, PORT))
}

fn connected(env: &TestEnv) -> anyhow::Result<Outcome> {
    env.connect(to(SERVER_V4, PORT))?.outcome()
}

/// Asserts that the kernel's first retransmission of the SYN established the connection.
fn assert_first_copy(outcome: &Outcome) -> anyhow::Result<()> {
    let in_time = (KERNEL_RTO..KERNEL_RTO + LATE).contains(&outcome.took);
    ensure!(outcome.result == "connected" && in_time, "{outcome:?}");
    Ok(())
}

/// Adds a table at the server that precedes the losses, with a set of addresses that are banned for `ban`.
fn limits(env: &TestEnv, ban: Duration, rules: &str) -> anyhow::Result<()> {
    let millis = ban.as_millis();
    let text = format!(
        "table inet limits {{
            set seen {{ type ipv4_addr; flags dynamic; size 16; }}
            set banned {{ type ipv4_addr; flags dynamic,timeout; timeout {millis}ms; size 16; }}
            chain before {{ type filter hook prerouting priority 0; {rules} }}
        }}"
    );
    nft(&env.net.server, &["-f", "-"], &text).map(drop)
}

test!(syn_rate_limit_counts_retransmissions, needs = [LINEAR_SYNS]);
/// Six SYNs a minute per client, and 0.7 s of loss behind the limit.
fn syn_rate_limit_counts_retransmissions() -> anyhow::Result<()> {
    const LIMIT: &str = "tcp flags & (syn|ack) == syn \
                         update @seen { ip saddr limit rate over 6/minute burst 6 packets } drop;";
    /// When a token becomes available; until then every retransmission is dropped.
    const TOKEN: Duration = Duration::from_secs(10);
    for with_agent in [false, true] {
        let env = env(with_agent)?;
        let _listener = listener(&env)?;
        limits(&env, TOKEN, LIMIT)?;
        env.net.server_loses_syns_for(Duration::from_millis(700))?;
        let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
        let outcome = connected(&env)?;
        eprintln!("rate limit, agent {with_agent}: {outcome:?}");
        if with_agent {
            let sent = syns(&capture.so_far()?, to(SERVER_V4, PORT));
            let begun = sent.first().map(|first| first.time).unwrap_or_default();
            let first_second = |time: Duration| time.saturating_sub(begun) < KERNEL_RTO;
            let early = sent.iter().filter(|one| first_second(one.time)).count();
            // The limit is exhausted before the kernel alone would have retransmitted.
            ensure!(early >= 6, "{early} SYNs in the first second: {sent:#?}");
            ensure!(outcome.result == "connected", "{outcome:?}");
            let slow = TOKEN - KERNEL_RTO..2 * TOKEN;
            ensure!(slow.contains(&outcome.took), "{outcome:?}");
        } else {
            assert_first_copy(&outcome)?;
        }
    }
    Ok(())
}

test!(syn_ban_is_renewed_by_each_attempt, needs = [LINEAR_SYNS]);
/// As in `ufw limit`: a client that sends more than six SYNs in half a minute is banned, and each further SYN renews
/// the ban. A client that gives up after a second and tries again stays banned.
fn syn_ban_is_renewed_by_each_attempt() -> anyhow::Result<()> {
    const BAN: Duration = Duration::from_secs(8);
    /// SYNs of an attempt in its first 0.7 s, after which it is given up.
    const SYNS: usize = 7;
    const RULES: &str = "tcp flags & (syn|ack) == syn ip saddr @banned update @banned { ip saddr } drop; \
                         tcp flags & (syn|ack) == syn \
                         update @seen { ip saddr limit rate over 12/minute burst 6 packets } \
                         add @banned { ip saddr } drop;";
    for with_agent in [false, true] {
        let env = env(with_agent)?;
        let _listener = listener(&env)?;
        limits(&env, BAN, RULES)?;
        env.net.server_loses_syns_for(Duration::from_millis(700))?;
        if !with_agent {
            assert_first_copy(&connected(&env)?)?;
            continue;
        }
        let server = to(SERVER_V4, PORT);
        let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
        let (begun, mut sent) = (Instant::now(), 0);
        // Twice as long as a ban that is not renewed.
        while begun.elapsed() < 2 * BAN {
            let attempt = env.connect(server)?;
            sent += SYNS;
            capture.wait_for(TIMEOUT, |all| syns(all, server).len() >= sent)?;
            ensure!(!attempt.has_ended()?, "{:?}", attempt.outcome()?);
        }
        eprintln!("ban of {BAN:?}: not connected after {:?}", begun.elapsed());
    }
    Ok(())
}

test!(server_that_refuses_during_a_restart_fails_connect);
fn server_that_refuses_during_a_restart_fails_connect() -> anyhow::Result<()> {
    refused("tcp reset", "ECONNREFUSED")?;
    refused("icmp type port-unreachable", "ECONNREFUSED")?;
    refused("icmp type host-unreachable", "EHOSTUNREACH")
}

/// The first SYN is lost, and for 0.6 s after it the server refuses connections.
fn refused(how: &str, error: &str) -> anyhow::Result<()> {
    let refuses = format!(
        "table inet restart {{
            set begun {{ type ipv4_addr; flags dynamic; size 16; }}
            set down {{ type ipv4_addr; flags dynamic,timeout; timeout 600ms; size 16; }}
            chain in {{
                type filter hook input priority 0;
                tcp flags & (syn|ack) == syn ip saddr @down reject with {how}
                tcp flags & (syn|ack) == syn ip saddr != @begun add @begun {{ ip saddr }} add @down {{ ip saddr }} drop
            }}
        }}"
    );
    for with_agent in [false, true] {
        let env = env(with_agent)?;
        let _listener = listener(&env)?;
        nft(&env.net.server, &["-f", "-"], &refuses)?;
        let outcome = connected(&env)?;
        eprintln!("{how}, agent {with_agent}: {outcome:?}");
        if with_agent {
            let early = outcome.took < KERNEL_RTO;
            ensure!(outcome.result == error && early, "{outcome:?}");
        } else {
            assert_first_copy(&outcome)?;
        }
    }
    Ok(())
}

/// Longer than a request lives with `syn_ack_rto = "auto"` (31 s), and shorter than without the agent (63 s).
const LONG_OUTAGE: Duration = Duration::from_secs(40);

test!(half_open_request_without_the_agent_survives_40s, || {
    half_open(None, LONG_OUTAGE, Half::Open)
});
test!(half_open_request_by_default_ends_within_40s, || half_open(
    Some(""),
    LONG_OUTAGE,
    Half::Closed
));

test!(
    lost_syn_acks_delay_by_a_quarter_second_at_most,
    needs = [LINEAR_SYNS]
);
/// SYN-ACKs are lost for 0.9 s. When the server answers a retransmitted SYN it restarts its own timer, with or without
/// an agent.
fn lost_syn_acks_delay_by_a_quarter_second_at_most() -> anyhow::Result<()> {
    const LOST: &str = "table inet loss {
        set begun { type ipv4_addr; flags dynamic; size 16; }
        set lasting { type ipv4_addr; flags dynamic,timeout; timeout 900ms; size 16; }
        chain in {
            type filter hook input priority 0;
            tcp flags & (syn|ack) == (syn|ack) ip saddr @lasting drop
            tcp flags & (syn|ack) == (syn|ack) ip saddr != @begun add @begun { ip saddr } add @lasting { ip saddr } drop
        }
    }";
    let measured = |with_agent, server_too, limit_ms: &str| {
        let env = env(with_agent)?;
        sysctl(&env.net.server, "net.ipv4.tcp_invalid_ratelimit", limit_ms)?;
        let _listener = if server_too {
            env.serve(to(SERVER_V4, PORT))?
        } else {
            listener(&env)?
        };
        // Not at the server: a SYN-ACK that its own rules drop counts as not sent, and does not restart the timer.
        nft(&env.net.client, &["-f", "-"], LOST)?;
        let outcome = connected(&env)?;
        eprintln!("agent {with_agent}, at the server {server_too}, {limit_ms} ms: {outcome:?}");
        ensure!(outcome.result == "connected", "{outcome:?}");
        Ok(outcome)
    };
    assert_first_copy(&measured(false, false, "500")?)?;
    for server_too in [false, true] {
        for limit_ms in ["500", "100"] {
            let outcome = measured(true, server_too, limit_ms)?;
            ensure!(outcome.took < KERNEL_RTO + LATE, "{outcome:?}");
        }
    }
    Ok(())
}
