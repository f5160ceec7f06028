//! rto_restart lowers rto_min by the smoothed RTT while few segments are outstanding; on a link with a delay.

use rto_testbed::workload::conversation::REQUEST;

use super::statistics::Link;
use crate::prelude::*;

const ONE_WAY: Duration = Duration::from_millis(30);
const RTT: Duration = Duration::from_millis(60);
const RTO_MIN: Duration = Duration::from_millis(100);
/// A round-trip time longer than rto_min.
const FAR: Duration = Duration::from_millis(120);
/// Round trips after which an RTO has come down; each removes a quarter of the excess.
const MANY: usize = 30;

/// With rto_restart for IPv4, and without as a control for IPv6.
const POLICIES: &str = "[policy.with]\nrto_min = \"100ms\"\nrto_restart = true\n\
     cidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\n\
     [policy.without]\nrto_min = \"100ms\"\ncidrs = [\"fd89::/64\"]\n";

fn link(config: &str) -> anyhow::Result<Link> {
    Link::of(TestEnv::with(config)?, ONE_WAY)
}

struct Flow<'a> {
    env: &'a TestEnv,
    conversation: Conversation,
    port: u16,
    _server: Traffic,
}

impl<'a> Flow<'a> {
    fn begin(env: &'a TestEnv, address: &str, port: u16) -> anyhow::Result<Self> {
        let server = env.echo_server(to(address, port))?;
        let conversation = env.converse(to(address, port))?;
        Ok(Self {
            env,
            conversation,
            port,
            _server: server,
        })
    }

    fn rounds(&mut self, count: usize) -> anyhow::Result<()> {
        self.conversation.rounds(count)
    }

    fn rto(&self) -> anyhow::Result<Duration> {
        conversation::rto(&self.env.net.client, &format!("dport = :{}", self.port))
    }

    fn server_rto(&self) -> anyhow::Result<Duration> {
        conversation::rto(&self.env.net.server, &format!("sport = :{}", self.port))
    }

    /// The client's rto_min, which can be read since Linux 6.15; tests that use this need that feature.
    fn rto_min(&mut self) -> anyhow::Result<Duration> {
        let micros = self.conversation.option(option::RTO_MIN_US)?;
        Ok(Duration::from_micros(micros.try_into()?))
    }

    /// Asserts that the client's rto_min is lower than the policy's by a round-trip time.
    fn assert_lowered(&mut self) -> anyhow::Result<()> {
        // A round trip takes some milliseconds more than the link's delay.
        let range = RTO_MIN - RTT - 4 * jiffy()..=RTO_MIN - RTT;
        let rto_min = self.rto_min()?;
        assert!(range.contains(&rto_min), "{rto_min:?}");
        Ok(())
    }

    fn assert_rto_min(&mut self, expected: Duration) -> anyhow::Result<()> {
        assert_eq!(self.rto_min()?, expected);
        Ok(())
    }
}

/// Runs this many round trips in two conversations at the same time.
fn rounds(flows: [&mut Flow<'_>; 2], count: usize) -> anyhow::Result<()> {
    let [one, other] = flows.map(|flow| &mut flow.conversation);
    rto_tests::beside(|| one.rounds(count), || other.rounds(count)).map(drop)
}

/// Whether this is the RTO for this rto_min, with some milliseconds for the machine.
fn is_rto_of(rto: Duration, rto_min: Duration) -> bool {
    (RTT + rto_min - jiffy()..RTT + rto_min + 5 * jiffy()).contains(&rto)
}

/// Makes round trips until the RTO is that of this rto_min: a round trip that a busy machine delays makes it rise
/// again.
fn assert_sinks(flow: &mut Flow<'_>, rto_min: Duration) -> anyhow::Result<()> {
    let sunk = eventually_seen(
        "RTO of a round trip and rto_min",
        TIMEOUT,
        || {
            flow.rounds(MANY)?;
            flow.rto()
        },
        |rto| is_rto_of(*rto, rto_min),
    );
    sunk.map(drop)
        .with_context(|| format!("rto_min {rto_min:?}"))
}

/// The time until a lost request is retransmitted; asserts that the RTO determines it.
fn assert_retransmitted(link: &Link, flow: &mut Flow<'_>) -> anyhow::Result<Duration> {
    let rto = flow.rto()?;
    let gap = gap_of_a_lost_request(link, flow)?;
    assert!(
        (rto - jiffy()..latest(rto) + Duration::from_millis(10)).contains(&gap),
        "{gap:?} after an RTO of {rto:?}"
    );
    Ok(gap)
}

/// The time until a lost request is retransmitted.
fn gap_of_a_lost_request(link: &Link, flow: &mut Flow<'_>) -> anyhow::Result<Duration> {
    // Wait until no packet of the last round trip is in flight.
    thread::sleep(Duration::from_millis(100));
    let before = link.relay.log().len();
    link.relay.drop_next(PacketFilter::CLIENT_DATA, 1);
    flow.rounds(1)?;
    let log = link.relay.log();
    let mut sent = log[before..]
        .iter()
        .filter(|packet| packet.is(&PacketFilter::CLIENT_DATA));
    let lost = sent.next().filter(|packet| packet.dropped());
    let lost = lost.context("no request was lost")?;
    let again = sent.next().context("it was not retransmitted")?;
    Ok(again.time.saturating_sub(lost.time))
}

test!(a_thin_flow_is_a_round_trip_sooner);
fn a_thin_flow_is_a_round_trip_sooner() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    let mut with = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    let mut without = Flow::begin(&link.env, RELAY_SERVER_V6, PORT + 1)?;
    rounds([&mut with, &mut without], MANY)?;
    assert_sinks(&mut without, RTO_MIN)?;
    assert_sinks(&mut with, RTO_MIN - RTT)?;
    // The same for the accepted sockets, if no round trip was delayed by a busy machine for a while.
    let mut servers = Vec::new();
    for _ in 0..8 {
        servers.push([with.server_rto()?, without.server_rto()?]);
        if servers
            .last()
            .is_some_and(|[with, without]| *with + RTT / 2 < *without)
        {
            break;
        }
        rounds([&mut with, &mut without], MANY)?;
    }
    let [with_rto, without_rto] = servers[servers.len() - 1];
    assert!(with_rto + RTT / 2 < without_rto, "{servers:?}");
    // The same on the wire.
    let control = assert_retransmitted(&link, &mut without)?;
    let sooner = assert_retransmitted(&link, &mut with)?;
    assert!(sooner + RTT / 2 < control, "{sooner:?}, {control:?}");
    // Only lost segments were retransmitted, and no setting was refused.
    let stats = link.env.json(&["stats"])?;
    for name in ["with", "without"] {
        let side = &stats["policies"][name]["active"];
        assert_eq!(side["setsockopt_failures"], json!({}), "{side:#}");
    }
    Ok(())
}

test!(program_is_replaced_for_the_first_rto_restart);
/// The code of rto_restart is part of the program from the first policy that needs it until no daemon keeps it, because
/// connections keep the policy that they began with.
fn program_is_replaced_for_the_first_rto_restart() -> anyhow::Result<()> {
    const KEEP: &str = "on_exit = \"keep\"\n";
    let without = format!("{KEEP}{}", POLICIES.replace("rto_restart = true\n", ""));
    let mut link = link(&without)?;
    let program = |env: &TestEnv| -> anyhow::Result<Value> {
        Ok(env.status()?["attachment"]["program_id"].clone())
    };
    let small = program(&link.env)?;
    link.env.load(&format!("{KEEP}{POLICIES}"))?;
    let whole = program(&link.env)?;
    assert_ne!(small, whole);
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    assert_sinks(&mut flow, RTO_MIN - RTT)?;
    drop(flow);
    link.env.load(&without)?;
    assert_eq!(program(&link.env)?, whole);
    link.env.restart(Signal::SIGTERM)?;
    assert_eq!(program(&link.env)?, whole);
    Ok(())
}

test!(
    the_option_is_lower_by_a_round_trip_at_most,
    needs = [RTO_MIN_OPTION]
);
/// The rto_min that an application reads: with rto_restart, without it (the control), for a near peer, and for a peer
/// farther away than rto_min, for which the kernel's minimum remains.
fn the_option_is_lower_by_a_round_trip_at_most() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    let mut with = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    let mut without = Flow::begin(&link.env, RELAY_SERVER_V6, PORT + 1)?;
    assert_sinks(&mut with, RTO_MIN - RTT)?;
    with.assert_lowered()?;
    without.rounds(5)?;
    without.assert_rto_min(RTO_MIN)?;
    let mut near = Flow::begin(&link.env, SERVER_V4, PORT + 2)?;
    near.rounds(5)?;
    near.assert_rto_min(RTO_MIN)?;
    link.relay.set_delay(FAR / 2);
    let mut far = Flow::begin(&link.env, RELAY_SERVER_V4, PORT + 3)?;
    far.rounds(5)?;
    far.assert_rto_min(2 * jiffy())
}

test!(
    a_thick_flow_has_the_policys_own_rto_min,
    needs = [RTO_MIN_OPTION]
);
/// The option has the policy's value again, and the RTO stays: raising rto_min does not raise an RTO.
fn a_thick_flow_has_the_policys_own_rto_min() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    let mut seen = Vec::new();
    // Varying round-trip times on a busy machine raise it.
    let is_raised = |rto: Duration| rto > RTT + RTO_MIN - 3 * jiffy();
    while seen.iter().all(|rto| is_raised(*rto)) {
        assert!(seen.len() < 5, "{seen:?}");
        assert_sinks(&mut flow, RTO_MIN - RTT)?;
        flow.assert_lowered()?;
        for _ in 0..5 {
            flow.conversation.send(1000 * REQUEST)?;
        }
        // Some of the data is still in flight.
        seen.push(flow.rto()?);
        flow.assert_rto_min(RTO_MIN)?;
    }
    // Few segments again.
    flow.rounds(3)?;
    flow.assert_lowered()
}

test!(a_near_peer_has_the_policys_own_rto, near);
/// A round-trip time below a jiffy lowers nothing. (Nor do the longer ones of an emulated processor lower the RTO.)
fn near() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    let mut flow = Flow::begin(&env, SERVER_V4, PORT)?;
    flow.rounds(MANY)?;
    let rto = flow.rto()?;
    assert!((RTO_MIN..2 * RTO_MIN).contains(&rto), "{rto:?}");
    Ok(())
}

test!(a_path_that_was_slow_for_a_while);
/// A reduction cannot be undone. It is therefore at most the minimum RTT, so that the RTO of a path that was slow for a
/// while does not fall below the policy's rto_min.
fn a_path_that_was_slow_for_a_while() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    assert_sinks(&mut flow, RTO_MIN - RTT)?;
    let mut least = flow.rto()?;
    for one_way in (30..=60).chain((30..60).rev()) {
        link.relay.set_delay(Duration::from_millis(one_way));
        flow.rounds(2)?;
        least = least.min(flow.rto()?);
    }
    assert!(least >= RTO_MIN, "{least:?}");
    assert_sinks(&mut flow, RTO_MIN - RTT)
}

test!(rto_restart_keeps_the_kernels_minimum);
/// For a peer farther away than rto_min the kernel's minimum remains.
fn rto_restart_keeps_the_kernels_minimum() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    link.relay.set_delay(FAR / 2);
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    let mut seen = Vec::new();
    // The RTT plus 8 ms, or plus its variation on a busy machine; 100 ms more without rto_restart.
    while seen.iter().all(|rto| *rto > FAR + RTO_MIN / 2) {
        assert!(seen.len() < 8, "{seen:?}");
        flow.rounds(MANY / 2)?;
        seen.push(flow.rto()?);
    }
    let active = &link.env.json(&["stats"])?["policies"]["with"]["active"];
    assert_eq!(active["setsockopt_failures"], json!({}), "{active:#}");
    Ok(())
}

test!(rto_restart_works_without_statistics);
/// rto_restart needs the callback, whatever is counted.
fn rto_restart_works_without_statistics() -> anyhow::Result<()> {
    for (agent, counts) in [
        ("rtt_sampling = \"off\"\n", true),
        ("statistics = false\n", false),
    ] {
        let env = TestEnv::with(&format!("{agent}{POLICIES}"))?;
        let link = Link::of(env, ONE_WAY)?;
        let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
        assert_sinks(&mut flow, RTO_MIN - RTT)?;
        drop(flow);
        // The counters that are read may be some moments old.
        let is_counted =
            |stats: &Value| is_zero(&stats["policies"]["with"]["active"]["connections"]) != counts;
        let stats = || link.env.json(&["stats"]);
        let stats = eventually_seen("counts", TIMEOUT, stats, is_counted)?;
        for direction in ["active", "passive"] {
            let side = &stats["policies"]["with"][direction];
            assert!(is_zero(&side["srtt"]["count"]), "{stats:#}");
            assert_eq!(is_zero(&side["connections"]), !counts, "{stats:#}");
        }
    }
    Ok(())
}

fn is_zero(number: &Value) -> bool {
    number.as_u64().is_none_or(|n| n == 0)
}

/// A conversation that began before there was a policy, with an RTO by the kernel's minimum.
fn open_before(link: &Link) -> anyhow::Result<Flow<'_>> {
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    assert_sinks(&mut flow, KERNEL_RTO_MIN)?;
    link.env.load(POLICIES)?;
    Ok(flow)
}

/// A policy for other peers.
const OTHERS: &str = "[policy.other]\nrto_min = \"100ms\"\ncidrs = [\"10.77.0.0/24\"]\n";

test!(sockets_that_are_open_already);
fn sockets_that_are_open_already() -> anyhow::Result<()> {
    let link = link(OTHERS)?;
    let mut flow = open_before(&link)?;
    if lacks("iter-tcp")? {
        link.env.cli_refuses(&["apply"], "Linux 5.15")?;
        return Ok(());
    }
    let walk = link.env.json(&["apply"])?;
    assert_eq!(walk["policies"]["with"]["changed"], 2, "{walk:#}");
    if lacks("rto-hook-on-open-sockets")? {
        let notes = walk["notes"].to_string();
        assert!(notes.contains("rto_restart"), "{walk:#}");
        return assert_sinks(&mut flow, RTO_MIN);
    }
    // The tail loss probe of a single segment uses the new minimum before the RTO does.
    flow.rounds(2)?;
    let (rto, probe) = (flow.rto()?, gap_of_a_lost_request(&link, &mut flow)?);
    let due = 2 * RTT + (RTO_MIN - RTT);
    assert!(due - jiffy() <= probe && probe < rto, "{probe:?}, {rto:?}");
    assert_sinks(&mut flow, RTO_MIN - RTT)
}

test!(
    the_option_of_sockets_that_are_open_already,
    needs = [RTO_MIN_OPTION]
);
fn the_option_of_sockets_that_are_open_already() -> anyhow::Result<()> {
    let link = link(OTHERS)?;
    let mut flow = open_before(&link)?;
    flow.assert_rto_min(KERNEL_RTO_MIN)?;
    link.env.cli(&["apply"])?;
    assert_sinks(&mut flow, RTO_MIN - RTT)?;
    flow.assert_lowered()?;
    // A policy without rto_restart, and then the kernel's own value.
    link.env
        .load(&POLICIES.replace("rto_restart = true", "rto_restart = false"))?;
    link.env.cli(&["apply"])?;
    flow.rounds(5)?;
    flow.assert_rto_min(RTO_MIN)?;
    link.env.load(POLICIES)?;
    link.env.cli(&["apply"])?;
    flow.rounds(5)?;
    flow.assert_lowered()?;
    link.env.cli(&["detach", "--restore"])?;
    flow.rounds(5)?;
    flow.assert_rto_min(KERNEL_RTO_MIN)
}

test!(applications_own_options_are_kept, needs = [RTO_MIN_OPTION]);
fn applications_own_options_are_kept() -> anyhow::Result<()> {
    let link = link(POLICIES)?;
    let mut flow = Flow::begin(&link.env, RELAY_SERVER_V4, PORT)?;
    flow.rounds(5)?;
    flow.assert_lowered()?;
    flow.conversation.set_option(option::RTO_MIN_US, 152_000)?;
    // Few segments, many, and few again.
    flow.rounds(3)?;
    for _ in 0..5 {
        flow.conversation.send(1000 * REQUEST)?;
    }
    flow.rounds(3)?;
    flow.assert_rto_min(Duration::from_millis(152))
}
