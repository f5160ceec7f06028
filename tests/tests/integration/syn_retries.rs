//! A shorter initial RTO must not make connect() give up earlier.

use rto_agent_common::HostDefaults;
use rto_tests::pinned;

use crate::prelude::*;

fn timed_out(env: &TestEnv, address: &str, options: Connect) -> anyhow::Result<Duration> {
    let outcome = env.connect((to(address, PORT), options))?.outcome()?;
    assert_eq!(outcome.result, "ETIMEDOUT");
    Ok(outcome.took)
}

test!(keep_and_a_number);
fn keep_and_a_number() -> anyhow::Result<()> {
    let policies = "
[policy.keep]
initial_rto = \"20ms\"
syn_retries = \"keep\"
cidrs = [\"10.88.0.0/24\"]
[policy.number]
initial_rto = \"100ms\"
syn_retries = 1
cidrs = [\"10.88.1.0/24\"]
";
    let env = silent(policies)?;
    // Measured on Linux 6.18 at HZ 250: 2.7 s with 20 ms (5 jiffies), 0.31 s with 100 ms and 1.
    let keep = timed_out(&env, SERVER_V4, Connect::default())?;
    assert!((2.4..3.2).contains(&keep.as_secs_f64()), "{keep:?}");
    let number = timed_out(&env, SERVER_V4_OTHER, Connect::default())?;
    assert!((0.29..0.5).contains(&number.as_secs_f64()), "{number:?}");
    Ok(())
}

test!(reconnected_socket_has_its_own_value_again);
/// The same socket connects first to an address with a policy, then to one without. It must give up when a fresh socket
/// would, not when the policy's value would make it. (The first attempt lost no packet.)
fn reconnected_socket_has_its_own_value_again() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_retries", "1")?;
    let fresh = timed_out(&env, SERVER_V4_OTHER, Connect::default())?;
    let first = Some(to(SERVER_V4, PORT));
    let again = timed_out(
        &env,
        SERVER_V4_OTHER,
        Connect::with(|c| c.first_unanswered = first),
    )?;
    assert!(
        again.abs_diff(fresh) < fresh / 5,
        "{again:?} against {fresh:?}"
    );
    Ok(())
}

test!(the_hosts_defaults_follow_the_host);
/// The defaults for a program that cannot query the socket (before Linux 6.1, and 6.2), and may have been loaded long
/// ago.
fn the_hosts_defaults_follow_the_host() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let host = env.net.client.clone();
    let set = |retries: u8, syn_ack_retries: u8| -> anyhow::Result<()> {
        sysctl(&host, "net.ipv4.tcp_syn_retries", &retries.to_string())?;
        sysctl(
            &host,
            "net.ipv4.tcp_synack_retries",
            &syn_ack_retries.to_string(),
        )
    };
    let within = ["nsenter".to_owned(), format!("--net=/run/netns/{host}")];
    env.configure(&format!("on_exit = \"keep\"\n{}", near("\"10.88.0.0/24\"")))?;
    set(3, 2)?;
    env.start_under(&within)?;
    ensure!(defaults_in(&env)? == (3, 2));
    // For a namespace that may not be the host's, at most the kernel's default is assumed.
    set(4, 9)?;
    let defaults = || defaults_in(&env);
    eventually_seen("(4, 5)", TIMEOUT, defaults, |seen| *seen == (4, 5))?;
    env.end(Signal::SIGTERM)?;
    set(5, 1)?;
    env.start_under(&within)?;
    let status = env.status()?;
    assert_eq!(status["found_at_start"], "adopted", "{status:#}");
    assert_eq!(defaults_in(&env)?, (5, 1));
    Ok(())
}

fn defaults_in(env: &TestEnv) -> anyhow::Result<(u32, u32)> {
    let defaults: HostDefaults = pinned::get(env, maps::HOST_DEFAULTS, 0)?;
    Ok((defaults.syn_retries, defaults.syn_ack_retries))
}
