//! SYNs to a black hole: which addresses get the policy's timer, and which the kernel's.

use rto_agent_common::syn::least_initial_rto;
use rto_tests::features::syn_timers;

use crate::prelude::*;

test!(without_any_agent_the_kernels_second);
/// The control of every other test here: the same environment without an agent.
fn without_any_agent_the_kernels_second() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    for address in [SERVER_V4, SERVER_V6] {
        env.assert_syn_gap(to(address, PORT), KERNEL_RTO)?;
    }
    Ok(())
}

test!(prefix_covers_its_addresses_alone);
fn prefix_covers_its_addresses_alone() -> anyhow::Result<()> {
    for (cidr, covered, others) in [
        ("10.88.0.0/24", SERVER_V4, &[SERVER_V4_OTHER, SERVER_V6][..]),
        ("10.88.0.2/32", SERVER_V4, &[SERVER_V4_OTHER]),
        // All IPv4 addresses, and no IPv6 address.
        ("0.0.0.0/0", SERVER_V4, &[SERVER_V6]),
        ("fd88::/64", SERVER_V6, &[SERVER_V4]),
    ] {
        let env = silent(&near(&format!("{cidr:?}")))?;
        env.assert_syn_gaps(to(covered, PORT), &syn_timers(POLICY_RTO, 3)?)?;
        for other in others {
            env.assert_syn_gap(to(other, PORT), KERNEL_RTO)?;
        }
    }
    Ok(())
}

test!(nested_prefixes_the_longest_wins);
fn nested_prefixes_the_longest_wins() -> anyhow::Result<()> {
    let policies = "
[policy.wide]
initial_rto = \"300ms\"
cidrs = [\"10.88.0.0/16\"]
[policy.middle]
initial_rto = \"100ms\"
cidrs = [\"10.88.0.0/24\"]
[policy.host]
initial_rto = \"52ms\"
cidrs = [\"10.88.0.2/32\"]
";
    let env = silent(policies)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), Duration::from_millis(52))?;
    env.assert_syn_gap(to(SERVER_V4_OTHER, PORT), Duration::from_millis(300))?;
    env.cli(&["remove", "10.88.0.2/32"])?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)
}

test!(ipv4_mapped, mapped);
/// As Java and Go programs do: an AF_INET6 socket to ::ffff:a.b.c.d.
fn mapped() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\", \"::/0\""))?;
    let mapped = Connect::with(|c| c.mapped = true);
    env.assert_syn_gap((to(SERVER_V4, PORT), mapped), POLICY_RTO)?;
    // An IPv6 prefix does not match it, however wide.
    env.assert_syn_gap((to(SERVER_V4_OTHER, PORT), mapped), KERNEL_RTO)
}

test!(initial_rto_is_at_least_ten_milliseconds_and_may_exceed_a_second);
fn initial_rto_is_at_least_ten_milliseconds_and_may_exceed_a_second() -> anyhow::Result<()> {
    let policies = "
[policy.least]
initial_rto = \"250us\"
guard = \"off\"
cidrs = [\"10.88.0.0/24\"]
[policy.more]
initial_rto = \"2s\"
cidrs = [\"10.88.1.0/24\"]
";
    let env = silent(policies)?;
    // A timer of n jiffies fires n + 1 later. The ninth interval differs from that of one jiffy.
    let hz = u32::try_from(1_000_000_000 / jiffy().as_nanos())?;
    let least = syn_timers(least_initial_rto(hz) * jiffy(), 9)?;
    env.assert_syn_gaps(to(SERVER_V4, PORT), &least)?;
    env.assert_syn_gap(to(SERVER_V4_OTHER, PORT), Duration::from_secs(2))
}

test!(a_thousand_entries);
fn a_thousand_entries() -> anyhow::Result<()> {
    let many = (0..1000).map(|i| format!("\"10.{}.{}.0/24\"", 100 + i / 256, i % 256));
    let cidrs: Vec<String> = many.chain(["\"10.88.0.0/24\"".to_owned()]).collect();
    let env = TestEnv::with(&near(&cidrs.join(",\n")))?;
    assert_eq!(env.status()?["entries"], 1001);
    assert_eq!(
        env.json(&["list"])?["entries"].as_array().map(Vec::len),
        Some(1001)
    );
    assert_eq!(
        env.json(&["lookup", "10.103.231.9"])?["entry"]["cidr"],
        "10.103.231.0/24"
    );
    env.net.black_hole(PORT)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)
}

test!(counters_and_hits_are_exact);
/// Every retransmitted SYN is counted, whether or not the connection is established.
fn counters_and_hits_are_exact() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\", \"10.88.1.0/24\""))?;
    // A connection that is never established; all SYNs captured until it fails must be counted.
    let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
    let address = to(SERVER_V4, PORT);
    let traffic = env.connect(address)?;
    capture.wait_for(TIMEOUT, |all| syns(all, address).len() > 3)?;
    drop(traffic);
    let seen = syns(&capture.so_far()?, address).len() as u64 - 1;
    // A connection that is established.
    let _server = env.serve(to(SERVER_V4_OTHER, PORT + 1))?;
    env.connect_and_close(to(SERVER_V4_OTHER, PORT + 1))?;

    let policy = &env.json(&["stats"])?["policies"]["near"];
    // The server saw the client, whose prefix is listed as well.
    for (direction, attempts, sent) in [("active", 2, seen), ("passive", 1, 0)] {
        let counted = &policy[direction];
        assert_eq!(counted["attempts"], attempts, "{policy:#}");
        assert_eq!(counted["handshake_retransmissions"], sent, "{policy:#}");
        assert_eq!(counted["connections"], 1, "{policy:#}");
        assert_eq!(counted["storage_failures"], 0, "{policy:#}");
    }
    let list = env.json(&["list"])?;
    let hits = |i: usize| list["entries"][i]["hits"].as_u64();
    assert_eq!((hits(0), hits(1)), (Some(1), Some(2)), "{list:#}");
    Ok(())
}
