//! SYN-ACKs whose answers get lost.

use rto_tests::{
    agent::World,
    features::lacks,
    netns::{SERVER_V4, SERVER_V6},
    traffic::Connect,
};

use super::{KERNEL, NEAR, Test, never_worse::AUTO, to};

pub(super) const TESTS: &[Test] = &[
    ("without_any_agent_the_kernels_second", without_any_agent),
    ("by_default_as_half_open_requests_allow", by_default),
    ("ipv4_doubles_at_once", ipv4),
    ("ipv6", ipv6),
    ("ipv4_client_of_a_dual_stack_listener", dual_stack),
    ("an_unlisted_client", unlisted),
    ("counted_once_established", counted),
];

const PORT: u16 = 4100;

/// Of which SYN-ACKs have the timer of SYNs.
fn near(cidrs: &str) -> String {
    format!("{}syn_ack_rto = \"100ms\"\n", super::near(cidrs))
}

fn plain() -> Connect {
    Connect::default()
}

fn without_any_agent() -> anyhow::Result<()> {
    let world = World::new()?;
    let _server = world.serve(to(SERVER_V4, PORT))?;
    world.net.drop_final_acks(PORT)?;
    world.assert_syn_ack_gap(to(SERVER_V4, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn by_default() -> anyhow::Result<()> {
    let world = World::with(&super::near("\"10.88.0.0/24\""))?;
    let _server = world.serve(to(SERVER_V4, PORT))?;
    world.net.drop_final_acks(PORT)?;
    world.assert_syn_ack_gap(to(SERVER_V4, PORT), &plain(), AUTO)
}

fn ipv4() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let _server = world.serve(to(SERVER_V4, PORT))?;
    world.net.drop_final_acks(PORT)?;
    // Without this feature only the first is the policy's; then the kernel's own timer goes on, doubled.
    let timers = if lacks("syn-ack-retransmission-timeout")? {
        vec![NEAR, KERNEL * 2]
    } else {
        vec![NEAR, NEAR * 2, NEAR * 4]
    };
    world.assert_syn_ack_gaps(to(SERVER_V4, PORT), &plain(), &timers)?;
    Ok(())
}

fn ipv6() -> anyhow::Result<()> {
    let world = World::with(&near("\"fd88::/64\""))?;
    let _server = world.serve(to(SERVER_V6, PORT))?;
    world.net.drop_final_acks(PORT)?;
    world.assert_syn_ack_gap(to(SERVER_V6, PORT), &plain(), NEAR)?;
    Ok(())
}

/// The server's socket is IPv6, its client IPv4: the request says ::ffff:10.88.0.1.
fn dual_stack() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let _server = world.serve(to("::", PORT))?;
    world.net.drop_final_acks(PORT)?;
    world.assert_syn_ack_gap(to(SERVER_V4, PORT), &plain(), NEAR)?;
    world.assert_syn_ack_gap(to(SERVER_V6, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn unlisted() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.1.0/24\""))?;
    let _server = world.serve(to(SERVER_V4, PORT))?;
    world.net.drop_final_acks(PORT)?;
    world.assert_syn_ack_gap(to(SERVER_V4, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn counted() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let _server = world.serve(to(SERVER_V4, PORT))?;
    world.net.drop_final_acks(PORT)?;
    let capture =
        rto_tests::capture::Capture::start(&world.net.server, rto_tests::netns::SERVER_LINK)?;
    let _client = world.connect(to(SERVER_V4, PORT), &plain())?;
    let from = to(SERVER_V4, PORT);
    capture.wait_for(rto_tests::agent::SOON, |all| {
        rto_tests::capture::syn_acks(all, from).len() == 3
    })?;
    // The answer to the next one gets through.
    world.net.drop_nothing()?;
    let status = world.wait_status("the accepted connection", |status| {
        status["policies"]["near"]["established_passive"] == 1
    })?;
    let sent = rto_tests::capture::syn_acks(&capture.so_far()?, from).len() as u64;
    let policy = &status["policies"]["near"];
    assert_eq!(policy["syn_ack_retransmissions"], sent - 1, "{policy:#}");
    assert_eq!(policy["syn_ack_timeouts_set"], 1, "{policy:#}");
    Ok(())
}
