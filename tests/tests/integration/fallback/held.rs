//! Connections that begin in a fallback: they have the kernel's initial RTO, and all other settings of their policy.

use rto_agent_common::direction::PASSIVE;

use super::*;
use crate::{
    established::{assert_schedule, schedule},
    statistics::{Link, outcome},
};

/// A guarded policy with an initial RTO of 100 ms and these additional settings.
fn guarded(settings: &str) -> String {
    format!(
        "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\n\
         initial_rto = \"100ms\"\nsyn_ack_rto = \"100ms\"\n{settings}"
    )
}

/// Begins fallback (spurious) of a direction. The daemon is stopped, as it would otherwise set another timer.
fn fall_back(env: &TestEnv, direction: u32) -> anyhow::Result<()> {
    env.signal(Signal::SIGSTOP)?;
    InKernel::of(env, "near")?.begin_fallback(env, direction)
}

test!(rto_max_comes_after_the_handshake, needs = [RTO_MAX]);
/// SYN timers double as the kernel's do, which a maximum would end; data has the policy's maximum.
fn rto_max_comes_after_the_handshake() -> anyhow::Result<()> {
    let env = TestEnv::with(&guarded("rto_min = \"200ms\"\nrto_max = \"1s\"\n"))?;
    env.net.reno()?;
    fall_back(&env, ACTIVE)?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_linear_timeouts", "0")?;
    env.net.black_hole(PORT)?;
    let doubled = [KERNEL_RTO, 2 * KERNEL_RTO];
    env.assert_syn_gaps(to(SERVER_V4, PORT), &doubled)?;
    env.net.drop_nothing()?;
    assert_schedule(&env, SERVER_V4, Duration::from_millis(200), |rto| {
        let mut timers = schedule(rto, 1, 2);
        timers.extend([Duration::from_secs(1); 2]);
        timers
    })
}

test!(a_fixed_number_of_syns_stands);
/// One retransmission instead of the host's five, so 3 s instead of 63 s.
fn a_fixed_number_of_syns_stands() -> anyhow::Result<()> {
    let env = TestEnv::with(&guarded("syn_retries = 1\n"))?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_linear_timeouts", "0").ok();
    fall_back(&env, ACTIVE)?;
    env.net.black_hole(PORT)?;
    let connecting = env.connect(to(SERVER_V4, PORT))?;
    let outcome = connecting.outcome()?;
    let range = Duration::from_millis(2_900)..Duration::from_secs(20);
    ensure!(
        outcome.result == "ETIMEDOUT" && range.contains(&outcome.took),
        "{outcome:?}"
    );
    Ok(())
}

test!(a_request_of_either_timer_is_undecided);
/// The request's SYN-ACK is sent more than once. On this path the policy's timer retransmits it spuriously, and the
/// kernel's timer does not retransmit it.
fn a_request_of_either_timer_is_undecided() -> anyhow::Result<()> {
    for (held, expected) in [(false, [1, 0, 0]), (true, [0, 1, 0])] {
        let link = Link::with(&guarded(""), Duration::from_millis(60), true)?;
        if held {
            fall_back(&link.env, PASSIVE)?;
        }
        link.talk(Duration::ZERO, RELAY_SERVER_V4)?;
        link.env.signal(Signal::SIGCONT)?;
        let near = link.judged()?;
        let [again, spurious, undecided, recovered] = outcome(&near["passive"]);
        ensure!((1..=2).contains(&again), "{near:#}");
        let verdicts = [spurious, undecided, recovered];
        ensure!(verdicts == expected.map(|one| one * again), "{near:#}");
    }
    Ok(())
}
