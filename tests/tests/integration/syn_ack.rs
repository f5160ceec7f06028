//! SYN-ACKs whose answers get lost.

use super::never_worse::AUTO;
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
