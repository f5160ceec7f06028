//! SYNs to a black hole: which addresses get the policy's timer, and which the kernel's.

use std::time::Duration;

use rto_tests::{
    agent::{SOON, World},
    capture::{Capture, syns},
    features::syn_timers,
    netns::{CLIENT_LINK, SERVER_V4, SERVER_V4_OTHER, SERVER_V6},
    timing::{jiffy, range},
    traffic::Connect,
};

use super::{KERNEL, NEAR, Test, near, to};

pub(super) const TESTS: &[Test] = &[
    ("without_any_agent_the_kernels_second", without_any_agent),
    ("prefix_24_and_an_unlisted_prefix", prefix_24),
    ("prefix_32", prefix_32),
    ("prefix_0", prefix_0),
    ("nested_prefixes_the_longest_wins", nested),
    ("ipv6", ipv6),
    ("ipv4_mapped", mapped),
    ("one_jiffy_and_beyond_a_second", extremes),
    ("a_thousand_entries", thousand),
    ("counters_and_hits_are_exact", counters),
];

const PORT: u16 = 4000;

fn plain() -> Connect {
    Connect::default()
}

/// The control of every other test here: the same world, no agent.
fn without_any_agent() -> anyhow::Result<()> {
    let world = World::new()?;
    world.net.black_hole(PORT)?;
    for address in [SERVER_V4, SERVER_V6] {
        world.assert_syn_gap(to(address, PORT), &plain(), KERNEL)?;
    }
    Ok(())
}

fn prefix_24() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    world.net.black_hole(PORT)?;
    world.assert_syn_gaps(to(SERVER_V4, PORT), &plain(), &syn_timers(NEAR, 4)?)?;
    world.assert_syn_gap(to(SERVER_V4_OTHER, PORT), &plain(), KERNEL)?;
    world.assert_syn_gap(to(SERVER_V6, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn prefix_32() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.2/32\""))?;
    world.net.black_hole(PORT)?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), NEAR)?;
    world.assert_syn_gap(to(SERVER_V4_OTHER, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn prefix_0() -> anyhow::Result<()> {
    let world = World::with(&near("\"0.0.0.0/0\""))?;
    world.net.black_hole(PORT)?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), NEAR)?;
    // All of IPv4, and nothing of IPv6.
    world.assert_syn_gap(to(SERVER_V6, PORT), &plain(), KERNEL)?;
    Ok(())
}

fn nested() -> anyhow::Result<()> {
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
    let world = World::with(policies)?;
    world.net.black_hole(PORT)?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), Duration::from_millis(52))?;
    world.assert_syn_gap(
        to(SERVER_V4_OTHER, PORT),
        &plain(),
        Duration::from_millis(300),
    )?;
    world.cli(&["remove", "10.88.0.2/32"])?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), NEAR)?;
    Ok(())
}

fn ipv6() -> anyhow::Result<()> {
    let world = World::with(&near("\"fd88::/64\""))?;
    world.net.black_hole(PORT)?;
    world.assert_syn_gap(to(SERVER_V6, PORT), &plain(), NEAR)?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), KERNEL)?;
    Ok(())
}

/// What Java and Go programs do: an AF_INET6 socket to ::ffff:a.b.c.d.
fn mapped() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\", \"::/0\""))?;
    world.net.black_hole(PORT)?;
    let mapped = Connect {
        mapped: true,
        ..Connect::default()
    };
    world.assert_syn_gap(to(SERVER_V4, PORT), &mapped, NEAR)?;
    // An IPv6 prefix does not catch it, however wide.
    world.assert_syn_gap(to(SERVER_V4_OTHER, PORT), &mapped, KERNEL)?;
    Ok(())
}

fn extremes() -> anyhow::Result<()> {
    let policies = "
[policy.least]
initial_rto = \"250us\"
cidrs = [\"10.88.0.0/24\"]
[policy.more]
initial_rto = \"2s\"
cidrs = [\"10.88.1.0/24\"]
";
    let world = World::with(policies)?;
    world.net.black_hole(PORT)?;
    // The first intervals of one and of two jiffies overlap, which is why it is followed to where they do not: the
    // ninth is 16 jiffies (before Linux 6.5, which doubles at once, 256) or twice as many.
    let (one, two) = (syn_timers(jiffy(), 9)?, syn_timers(2 * jiffy(), 9)?);
    assert!(
        range(one[8]).end() < range(two[8]).start(),
        "{one:?} {two:?}"
    );
    world.assert_syn_gaps(to(SERVER_V4, PORT), &plain(), &one)?;
    world.assert_syn_gap(to(SERVER_V4_OTHER, PORT), &plain(), Duration::from_secs(2))?;
    Ok(())
}

fn thousand() -> anyhow::Result<()> {
    let many = (0..1000).map(|i| format!("\"10.{}.{}.0/24\"", 100 + i / 256, i % 256));
    let cidrs: Vec<String> = many.chain(["\"10.88.0.0/24\"".to_owned()]).collect();
    let world = World::with(&near(&cidrs.join(",\n")))?;
    assert_eq!(world.json(&["status"])?["entries"], 1001);
    assert_eq!(
        world.json(&["list"])?["entries"].as_array().map(Vec::len),
        Some(1001)
    );
    assert_eq!(
        world.json(&["lookup", "10.103.231.9"])?["entry"]["cidr"],
        "10.103.231.0/24"
    );
    world.net.black_hole(PORT)?;
    world.assert_syn_gap(to(SERVER_V4, PORT), &plain(), NEAR)?;
    Ok(())
}

/// Every SYN sent again is counted, whether the connection comes about or not.
fn counters() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\", \"10.88.1.0/24\""))?;
    world.net.black_hole(PORT)?;
    // One that never comes about; what was captured until its end is what must be counted.
    let capture = Capture::start(&world.net.client, CLIENT_LINK)?;
    let address = to(SERVER_V4, PORT);
    let traffic = world.connect(address, &plain())?;
    capture.wait_for(SOON, |all| syns(all, address).len() > 3)?;
    drop(traffic);
    let seen = syns(&capture.so_far()?, address).len() as u64 - 1;
    // One that does.
    let _server = world.serve(to(SERVER_V4_OTHER, PORT + 1))?;
    let client = world.connect(to(SERVER_V4_OTHER, PORT + 1), &plain())?;
    assert_eq!(client.outcome()?.result, "connected");

    let policy = &world.json(&["status"])?["policies"]["near"];
    assert_eq!(policy["syn_timeouts_set"], 2, "{policy:#}");
    assert_eq!(policy["syn_retransmissions"], seen, "{policy:#}");
    assert_eq!(policy["established_active"], 1, "{policy:#}");
    // The server saw the client, whose prefix is listed as well.
    assert_eq!(policy["established_passive"], 1, "{policy:#}");
    assert_eq!(policy["syn_ack_timeouts_set"], 1, "{policy:#}");
    assert_eq!(policy["syn_ack_retransmissions"], 0, "{policy:#}");
    assert_eq!(policy["storage_failures"], 0, "{policy:#}");
    let list = world.json(&["list"])?;
    let hits = |i: usize| list["entries"][i]["hits"].as_u64();
    assert_eq!((hits(0), hits(1)), (Some(1), Some(2)), "{list:#}");
    Ok(())
}
