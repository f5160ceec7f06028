//! SYN-ACKs whose answers get lost.

use super::never_worse::AUTO;
use rto_testbed::{netns, workload::attempts::Attempts};

use crate::prelude::*;

/// A policy with the same timer for SYN-ACKs as for SYNs.
fn near(cidrs: &str) -> String {
    format!("{}syn_ack_rto = \"100ms\"\n", super::near(cidrs))
}

test!(without_any_agent_the_kernels_second);
fn without_any_agent_the_kernels_second() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    env.net.drop_final_acks(PORT)?;
    env.assert_syn_ack_gap(to(SERVER_V4, PORT), KERNEL_RTO)
}

test!(client_has_the_syn_ack_timer_of_its_entry);
fn client_has_the_syn_ack_timer_of_its_entry() -> anyhow::Result<()> {
    for (policies, listener, gaps) in [
        // As half-open requests allow.
        (
            super::near("\"10.88.0.0/24\""),
            SERVER_V4,
            &[(SERVER_V4, AUTO)][..],
        ),
        (near("\"fd88::/64\""), SERVER_V6, &[(SERVER_V6, POLICY_RTO)]),
        (
            near("\"10.88.1.0/24\""),
            SERVER_V4,
            &[(SERVER_V4, KERNEL_RTO)],
        ),
        // The server's socket is IPv6 and its client IPv4, so the request has the address ::ffff:10.88.0.1.
        (
            near("\"10.88.0.0/24\""),
            "::",
            &[(SERVER_V4, POLICY_RTO), (SERVER_V6, KERNEL_RTO)],
        ),
    ] {
        let env = TestEnv::with(&policies)?;
        let _server = env.serve(to(listener, PORT))?;
        env.net.drop_final_acks(PORT)?;
        for (address, timer) in gaps {
            env.assert_syn_ack_gap(to(address, PORT), *timer)?;
        }
    }
    Ok(())
}

test!(ipv4_doubles_at_once);
fn ipv4_doubles_at_once() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    env.net.drop_final_acks(PORT)?;
    // Without this feature only the first timer is the policy's; the kernel's timer follows, doubled.
    let timers = if lacks("syn-ack-retransmission-timeout")? {
        vec![POLICY_RTO, KERNEL_RTO * 2]
    } else {
        vec![POLICY_RTO, POLICY_RTO * 2, POLICY_RTO * 4]
    };
    env.assert_syn_ack_gaps(to(SERVER_V4, PORT), &timers)
}

test!(counted_once_established);
fn counted_once_established() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    env.net.drop_final_acks(PORT)?;
    let capture = Capture::start(&env.net.server, SERVER_LINK)?;
    let _client = env.connect(to(SERVER_V4, PORT))?;
    let from = to(SERVER_V4, PORT);
    capture.wait_for(TIMEOUT, |all| {
        rto_testbed::capture::syn_acks(all, from).len() == 3
    })?;
    // The answer to the next SYN-ACK gets through.
    env.net.drop_nothing()?;
    let near = env.wait_counted("near", "the accepted connection", |near| {
        near["passive"]["connections"] == 1
    })?;
    let counted = &near["passive"];
    let sent = rto_testbed::capture::syn_acks(&capture.so_far()?, from).len() as u64;
    assert_has(
        counted,
        json!({"handshake_retransmissions": sent - 1, "attempts": 1}),
    );
    Ok(())
}

test!(
    window_of_accepted_is_ten_where_the_kernel_would_retransmit_once,
    needs = [TOTAL_RTO_TIME]
);
/// SYN-ACKs are lost for 0.25 s, in which the server's timer and the client's SYNs make it send several. Without an
/// entry, both retransmit after one second, and the kernel begins with one segment if the server's timer was the first.
fn window_of_accepted_is_ten_where_the_kernel_would_retransmit_once() -> anyhow::Result<()> {
    const COUNT: usize = 8;
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let windows = |outage_ms| -> anyhow::Result<[Vec<u32>; 2]> {
        env.net.drop_nothing()?;
        env.net
            .client_loses_each_syn_ack_for(Duration::from_millis(outage_ms))?;
        // Servers that read nothing, and keep their ends when the clients close theirs.
        let addresses = [SERVER_V4, SERVER_V4_OTHER];
        let _servers = addresses.map(|address| env.serve(to(address, PORT)));
        let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
        let both = addresses.map(|address| to(address, PORT));
        for attempt in Attempts::begin(netns, cgroup, &both, COUNT, vec![])?.outcomes()? {
            ensure!(attempt.result == "connected", "{attempt:?}");
        }
        let windows = addresses.map(|address| accepted_windows(&env, address));
        let [policy, control] = windows;
        Ok([policy?, control?])
    };
    let [policy, control] = windows(250)?;
    eprintln!("0.25 s: {policy:?}, without an entry {control:?}");
    ensure!(control.len() == COUNT, "{control:?}");
    ensure!(policy == vec![10; COUNT], "{policy:?}");
    // After several of its own retransmissions the kernel begins with one segment, too.
    let [policy, control] = windows(4500)?;
    eprintln!("4.5 s: {policy:?}, without an entry {control:?}");
    ensure!(policy == vec![1; COUNT], "{policy:?} against {control:?}");
    Ok(())
}

/// The congestion windows of the sockets accepted at an address, segments.
fn accepted_windows(env: &TestEnv, address: &str) -> anyhow::Result<Vec<u32>> {
    let filter = format!("src {address} sport = :{PORT}");
    let mut ss = Command::new("ss");
    ss.args(["-tinHO", "state", "connected"]);
    ss.args(filter.split(' '));
    let output = netns::inside(&env.net.server, || Ok(ss.output()?))?;
    let text = stdout_of("ss", output)?;
    let windows = text
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("cwnd:"));
    windows.map(|window| Ok(window.parse()?)).collect()
}
