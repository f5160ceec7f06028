//! The statistics that `rto-agent stats` reports: handshakes and their retransmissions on a link that delays and drops,
//! histograms, connections that end badly, and traffic that no entry covers.

use rto_testbed::link::relay::Relay;
use rto_tests::{relay::BothEnds, watcher::Watcher};

use crate::prelude::*;

const INITIAL_RTO_MS: u64 = 100;
/// Less than half of the initial RTO, and of the part of it that a lost SYN adds.
const NEAR_ONE_WAY: Duration = Duration::from_millis(5);

/// A policy with the same timer for SYNs and SYN-ACKs.
fn policy(initial_rto_ms: u64) -> String {
    let syns = syn_policy(initial_rto_ms);
    format!("{syns}syn_ack_rto = \"{initial_rto_ms}ms\"\n")
}

/// Samples every connection until it closes.
const ALL: &str = "sampling = 1\n";

fn syn_policy(initial_rto_ms: u64) -> String {
    format!(
        "[policy.near]\n\
         cidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\", \"fd88::/64\", \"fd89::/64\"]\n\
         initial_rto = \"{initial_rto_ms}ms\"\n"
    )
}

/// An environment, a link with a delay, and a server at its far end.
pub(super) struct Link {
    pub(super) relay: Relay,
    pub(super) env: TestEnv,
}

impl Link {
    fn new(initial_rto_ms: u64, one_way: Duration, timestamps: bool) -> anyhow::Result<Self> {
        Self::with(&policy(initial_rto_ms), one_way, timestamps)
    }

    pub(super) fn with(
        policies: &str,
        one_way: Duration,
        timestamps: bool,
    ) -> anyhow::Result<Self> {
        let env = TestEnv::with(policies)?;
        let on = if timestamps { "1" } else { "0" };
        env.net.sysctl("net.ipv4.tcp_timestamps", on)?;
        Self::of(env, one_way)
    }

    pub(super) fn of(env: TestEnv, one_way: Duration) -> anyhow::Result<Self> {
        env.net.reno()?;
        let relay = relay(&env.net)?;
        relay.set_delay(one_way);
        Ok(Self { relay, env })
    }

    /// Makes a connection with some requests and answers; returns both sides' statistics when every retransmission has
    /// a verdict.
    pub(super) fn converse(&self, address: &str) -> anyhow::Result<Value> {
        self.converse_after(Duration::ZERO, address)
    }

    /// The first packets on the link: when each was read and when it was due to leave, in milliseconds.
    fn first_packets(&self) -> String {
        let log = self.relay.log();
        let Some(begin) = log.first().map(|first| first.at) else {
            return "nothing".to_owned();
        };
        let ms = |at: Instant| at.duration_since(begin).as_secs_f64() * 1e3;
        let lines = log.iter().take(20).map(|one| {
            let leaves = one.leaves.map_or(f64::NAN, ms);
            format!("{:.1} to {leaves:.1}: {:?}", ms(one.at), one.packet)
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The same with a pause before the first request.
    fn converse_after(&self, pause: Duration, address: &str) -> anyhow::Result<Value> {
        self.talk(pause, address)?;
        self.judged()
    }

    /// Makes a connection with some requests and answers, the first after a pause.
    pub(super) fn talk(&self, pause: Duration, address: &str) -> anyhow::Result<()> {
        let _server = self.env.echo_server(to(address, PORT))?;
        let mut conversation = self.env.converse(to(address, PORT))?;
        thread::sleep(pause);
        conversation.rounds(ROUNDS)
    }

    /// Both sides' statistics, when every retransmission has a verdict.
    pub(super) fn judged(&self) -> anyhow::Result<Value> {
        stats_when(&self.env, "a verdict", |near| {
            ["active", "passive"].into_iter().all(|direction| {
                let side = &near[direction];
                let [again, verdicts @ ..] = outcome(side);
                side["connections"] == 1 && (again == 0 || verdicts.iter().sum::<u64>() > 0)
            })
        })
    }
}

/// The rounds that a verdict needs, and one for the ACK of the last answer.
const ROUNDS: usize = 5;

pub(super) fn near(env: &TestEnv) -> anyhow::Result<Value> {
    Ok(env.json(&["stats", "--policy", "near"])?["policies"]["near"].clone())
}

pub(super) fn stats_when(
    env: &TestEnv,
    what: &str,
    is: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    eventually_seen(what, TIMEOUT, || near(env), is)
}

/// Retransmissions, spurious and undecided ones, and recovered connections of a side.
pub(super) fn outcome(side: &Value) -> [u64; 4] {
    [
        "handshake_retransmissions",
        "spurious",
        "undecided",
        "recovered",
    ]
    .map(|name| side[name].as_u64().unwrap_or(u64::MAX))
}

test!(lost_handshake_packet_is_recovered, || lost(true));
test!(lost_handshake_packet_without_timestamps, || lost(false));
fn lost(timestamps: bool) -> anyhow::Result<()> {
    for (what, direction) in [
        (PacketFilter::SYN, "active"),
        (PacketFilter::SYN_ACK, "active"),
        (PacketFilter::CLIENT_ACK, "passive"),
    ] {
        lost_once(what, direction, timestamps).with_context(|| format!("{what:?}"))?;
    }
    Ok(())
}

fn lost_once(what: PacketFilter, direction: &str, timestamps: bool) -> anyhow::Result<()> {
    let link = Link::new(INITIAL_RTO_MS, NEAR_ONE_WAY, timestamps)?;
    link.relay.drop_next(what, 1);
    // A request would replace the lost ACK.
    let pause = match what {
        PacketFilter::CLIENT_ACK => Duration::from_millis(2 * INITIAL_RTO_MS),
        _ => Duration::ZERO,
    };
    let near = link.converse_after(pause, RELAY_SERVER_V4)?;
    assert_eq!(link.relay.log().iter().filter(|r| r.dropped()).count(), 1);
    let side = &near[direction];
    assert_eq!(outcome(side), [1, 0, 0, 1], "{near:#}");
    if direction == "active" {
        assert_saved(side, 1);
    } else {
        // The client's own SYN would have caused another SYN-ACK, at a time that this host does not know.
        assert_eq!(side["time_saved_us"], 0, "{near:#}");
    }
    assert_eq!(side["time_lost_us"], 0, "{near:#}");
    if what == PacketFilter::SYN_ACK {
        // The listener's own timer fired, and it answered the second SYN: one loss, whichever was first.
        let passive = &near["passive"];
        assert_has(passive, json!({"spurious": 0, "time_saved_us": 0}));
    }
    assert_path(&side["path_rtt"])
}

test!(a_lost_syn_and_a_lost_syn_ack_are_not_spurious);
/// The RTT counts from the SYN whose answer was lost, so it is longer than an initial RTO although the path is not.
fn a_lost_syn_and_a_lost_syn_ack_are_not_spurious() -> anyhow::Result<()> {
    // The third SYN causes the retransmission of the SYN-ACK, whose own timer does not expire before. If the first
    // intervals are equal, that SYN is sent after two timers, otherwise after three.
    let timers = if lacks("tcp-syn-linear-timeouts")? {
        3
    } else {
        2
    };
    assert_recovered(&converse_with_losses(&lossy("keep")?)?, 2, timers)?;
    // The SYN-ACK's own timer expires 155 ms before the third SYN, whose interval is doubled. If the kernel's timers
    // are later than that, because the processor was taken away, the third SYN is seen first.
    const ATTEMPTS: usize = 5;
    for _ in 0..ATTEMPTS {
        let link = lossy("40ms")?;
        if !lacks("tcp-syn-linear-timeouts")? {
            let client = &link.env.net.client;
            sysctl(client, "net.ipv4.tcp_syn_linear_timeouts", "0")?;
        }
        let near = converse_with_losses(&link)?;
        let packets = link.relay.log().into_iter().filter_map(|r| r.packet);
        if packets.filter(|p| PacketFilter::SYN.matches(p)).count() == 2 {
            return assert_recovered(&near, 1, 1);
        }
    }
    bail!("a third SYN in each of {ATTEMPTS} attempts")
}

fn lossy(syn_ack_rto: &str) -> anyhow::Result<Link> {
    let syns = syn_policy(INITIAL_RTO_MS);
    let policies = format!("{syns}syn_ack_rto = \"{syn_ack_rto}\"\n");
    Link::with(&policies, NEAR_ONE_WAY, true)
}

/// The policy's statistics of a connection whose first SYN and first SYN-ACK are lost.
fn converse_with_losses(link: &Link) -> anyhow::Result<Value> {
    link.relay.drop_next(PacketFilter::SYN, 1);
    link.relay.drop_next(PacketFilter::SYN_ACK, 1);
    let near = link.converse(RELAY_SERVER_V4)?;
    assert_eq!(link.relay.log().iter().filter(|r| r.dropped()).count(), 2);
    Ok(near)
}

fn assert_recovered(near: &Value, retransmitted: u64, timers: u64) -> anyhow::Result<()> {
    let active = &near["active"];
    assert_eq!(outcome(active), [retransmitted, 0, 0, 1], "{near:#}");
    assert_saved(active, timers);
    assert_path(&active["path_rtt"])
}

/// Asserts the time saved: the answered copy was sent after this number of timers, each at most two jiffies late; the
/// kernel's own timer of a second is late by up to a step of eight jiffies.
fn assert_saved(side: &Value, timers: u64) {
    let jiffy_us = u64::try_from(jiffy().as_micros()).unwrap_or(u64::MAX);
    let most = 1_000_000 + 8 * jiffy_us - timers * INITIAL_RTO_MS * 1000;
    let late = (2 * timers + 10) * jiffy_us;
    let saved = side["time_saved_us"].as_u64().unwrap_or_default();
    assert!((most - late..=most).contains(&saved), "{most}: {side:#}");
}

/// Asserts that there is one handshake, as long as the path's RTT, whatever was retransmitted.
fn assert_path(handshake: &Value) -> anyhow::Result<()> {
    let us = |duration: Duration| u64::try_from(duration.as_micros());
    let sum_us = handshake["sum_us"].as_u64().unwrap_or_default();
    assert_eq!(handshake["count"], 1, "{handshake:#}");
    let path = us(2 * NEAR_ONE_WAY)?..INITIAL_RTO_MS * 1000;
    assert!(path.contains(&sum_us), "{handshake:#}");
    Ok(())
}

test!(an_rtt_just_below_the_initial_rto);
/// The control for longer RTTs.
fn an_rtt_just_below_the_initial_rto() -> anyhow::Result<()> {
    // A core that is taken away for 64 ms makes the RTT exceed the RTO, so one success in several attempts is enough.
    const ATTEMPTS: usize = 10;
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS {
        let link = Link::new(4 * INITIAL_RTO_MS, Duration::from_millis(4 * 42), true)?;
        let near = link.converse(RELAY_SERVER_V4)?;
        let sides = ["active", "passive"].map(|direction| outcome(&near[direction]));
        if sides == [[0; 4]; 2] {
            return Ok(());
        }
        assert_eq!([sides[0][1], sides[1][1]], [0, 0], "{near:#}");
        seen.push(sides);
    }
    panic!("segments were retransmitted each time: {seen:?}");
}

test!(rtt_beyond_initial_rto_is_spurious, || beyond(
    RELAY_SERVER_V4,
    true
));
test!(rtt_beyond_initial_rto_over_ipv6, || beyond(
    RELAY_SERVER_V6,
    true
));
test!(rtt_beyond_initial_rto_without_timestamps, || {
    beyond(RELAY_SERVER_V4, false)
});
fn beyond(server: &str, timestamps: bool) -> anyhow::Result<()> {
    let link = Link::new(INITIAL_RTO_MS, Duration::from_millis(60), timestamps)?;
    let near = link.converse(server)?;
    assert_eq!(link.relay.log().iter().filter(|r| r.dropped()).count(), 0);
    assert_eq!(outcome(&near["active"]), [1, 1, 0, 0], "{near:#}");
    assert_eq!(near["active"]["time_saved_us"], 0, "{near:#}");
    // The listener's own timer, and the second SYN, which it answers: both spurious.
    let [again, spurious, undecided, recovered] = outcome(&near["passive"]);
    assert!((1..=2).contains(&again), "{near:#}");
    assert_eq!([spurious, undecided, recovered], [again, 0, 0], "{near:#}");
    Ok(())
}

test!(late_answer_makes_retransmissions_spurious, || measured(
    || slow_syns(true)
));
test!(late_answer_without_timestamps, || measured(|| slow_syns(
    false
)));
/// The handshake takes 150 ms and later round trips take no time: only SYNs are slow, as in a firewall or a SYN queue.
fn slow_syns(timestamps: bool) -> anyhow::Result<()> {
    let link = Link::new(52, Duration::from_millis(75), timestamps)?;
    let _server = link.env.echo_server(to(RELAY_SERVER_V4, PORT))?;
    let mut conversation = link.env.converse(to(RELAY_SERVER_V4, PORT))?;
    link.relay.set_delay(Duration::ZERO);
    // Wait for retransmissions that are still in flight.
    thread::sleep(Duration::from_millis(100));
    conversation.rounds(ROUNDS)?;
    let near = link.judged()?;
    let [again, spurious, undecided, recovered] = outcome(&near["active"]);
    ensure!(again >= 1, "{near:#}");
    ensure!(
        [spurious, undecided, recovered] == [again, 0, 0],
        "{near:#}"
    );
    ensure!(near["active"]["time_saved_us"] == 0, "{near:#}");
    Ok(())
}

test!(an_rtt_of_several_initial_rtos);
fn an_rtt_of_several_initial_rtos() -> anyhow::Result<()> {
    // Number of intervals in 90 ms.
    const COPIES: u64 = 3;
    let rto_ms = u64::try_from((6 * jiffy()).as_millis())?;
    let mut late = String::new();
    for _ in 0..10 {
        let link = Link::new(rto_ms, Duration::from_millis(45), true)?;
        let near = link.converse(RELAY_SERVER_V4)?;
        let [again, spurious, undecided, recovered] = outcome(&near["active"]);
        let packets = link.first_packets();
        assert!(again >= COPIES - 1, "{packets}\n{near:#}");
        if again <= COPIES {
            let verdicts = [spurious, undecided, recovered];
            assert_eq!(verdicts, [again, 0, 0], "{packets}\n{near:#}");
            return Ok(());
        }
        // On a busy machine the link was late only for the first SYN: more retransmissions than fit into its minimum
        // RTT.
        late = format!("{packets}\n{near:#}");
    }
    bail!("the link was always late: {late}")
}

test!(a_lost_syn_on_a_slow_path);
/// The first SYN is lost and the second is answered after an initial RTO: the second was needed, the third was not.
fn a_lost_syn_on_a_slow_path() -> anyhow::Result<()> {
    let link = Link::new(INITIAL_RTO_MS, Duration::from_millis(65), true)?;
    link.relay.drop_next(PacketFilter::SYN, 1);
    let near = link.converse(RELAY_SERVER_V4)?;
    // Before Linux 6.5 the second interval is twice the first, and the answer arrives before its end.
    let is_linear = Path::new("/proc/sys/net/ipv4/tcp_syn_linear_timeouts").exists();
    let expected = if is_linear {
        [2, 1, 0, 1]
    } else {
        [1, 0, 0, 1]
    };
    assert_eq!(outcome(&near["active"]), expected, "{near:#}");
    Ok(())
}

test!(longer_timers_lose_time);
fn longer_timers_lose_time() -> anyhow::Result<()> {
    let link = Link::new(1200, NEAR_ONE_WAY, true)?;
    link.relay.drop_next(PacketFilter::SYN, 1);
    let near = link.converse(RELAY_SERVER_V4)?;
    assert_eq!(outcome(&near["active"]), [1, 0, 0, 1], "{near:#}");
    // The kernel's own first timeout was after a second and up to 32 ms, the policy's after 1.2 s and as much.
    let [lost, saved] = ["time_lost_us", "time_saved_us"].map(|name| near["active"][name].as_u64());
    assert!((150_000..250_000).contains(&lost.unwrap_or(0)), "{near:#}");
    assert_eq!(saved, Some(0), "{near:#}");
    Ok(())
}

test!(histograms_match_times_on_the_wire);
/// Times agree with the wire of each end (20 ms there and back, plus the machine's delays), to a jiffy and in the right
/// bucket.
fn histograms_match_times_on_the_wire() -> anyhow::Result<()> {
    let one_way = Duration::from_millis(10);
    let link = Link::with(&format!("{ALL}{}", policy(INITIAL_RTO_MS)), one_way, true)?;
    let captures = BothEnds::of(&link.env.net, &link.relay)?;
    link.converse(RELAY_SERVER_V4)?;
    let near = stats_when(&link.env, "both ends", |near| {
        ["active", "passive"]
            .into_iter()
            .all(|direction| near[direction]["srtt"]["count"] == 1)
    })?;
    let wires = captures.round_trips(1, ROUNDS)?;
    for (direction, wire) in ["active", "passive"].into_iter().zip(wires) {
        let wire = &wire[0];
        let least = wire.iter().min().copied().unwrap_or_default();
        let longest = wire.iter().max().copied().unwrap_or_default();
        assert!(least >= 2 * one_way, "{direction}: {wire:?}");
        // A smoothed RTT is between the shortest and the longest; a delayed ACK is part of its wire's times.
        for (what, from, to) in [("path_rtt", wire[0], wire[0]), ("srtt", least, longest)] {
            let histogram = &near[direction][what];
            assert_eq!(histogram["count"], 1, "{direction} {what}: {near:#}");
            let sum_us = histogram["sum_us"].as_u64().unwrap_or(0);
            let sum = Duration::from_micros(sum_us);
            assert!(
                (from.saturating_sub(jiffy())..=to + jiffy()).contains(&sum),
                "{direction} {what}: {sum:?}, on the wire {wire:?}: {near:#}"
            );
            let bucket = &histogram["buckets"][0];
            let range = bucket["from_us"].as_u64()..bucket["below_us"].as_u64();
            assert!(range.contains(&Some(sum_us)), "{direction}: {near:#}");
        }
    }
    let text = link.env.cli(&["stats", "--policy", "near"])?;
    assert_says(&text, &["connect time: 1 sample, mean ", "####"]);
    Ok(())
}

test!(rtt_sampling_off_and_by_interval);
fn rtt_sampling_off_and_by_interval() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&format!("{ALL}rtt_sampling = \"off\"\n{}", policy(100)))?;
    let served = |env: &TestEnv, rounds: usize, pause_ms: u64| -> anyhow::Result<()> {
        let _server = env.echo_server(to(SERVER_V4, PORT))?;
        let mut conversation = env.converse(to(SERVER_V4, PORT))?;
        conversation.paced(rounds, Duration::from_millis(pause_ms))
    };
    served(&env, 3, 0)?;
    let near = near(&env)?;
    assert_eq!(near["active"]["srtt"]["count"], 0, "{near:#}");
    assert_eq!(near["active"]["path_rtt"]["count"], 1, "{near:#}");
    env.end(Signal::SIGTERM)?;
    // At most every 50 ms, while the connection lasts.
    env.configure(&format!("{ALL}rtt_sampling = \"50ms\"\n{}", policy(100)))?;
    env.start()?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let mut conversation = env.converse(to(SERVER_V4, PORT))?;
    conversation.paced(20, Duration::from_millis(20))?;
    let before_its_end = stats_when(&env, "samples", |near| {
        near["active"]["srtt"]["count"].as_u64() > Some(1)
    })?;
    let count = before_its_end["active"]["srtt"]["count"].as_u64();
    assert!(count < Some(20), "{before_its_end:#}");
    Ok(())
}

test!(a_reset_connection_is_aborted, || aborted(None));
test!(a_reset_connection_is_aborted_whatever_reply_is, || aborted(
    Some(-1)
));
/// Reset by an administrator. A foreign program's `reply` at every operation is in the union with the former state.
fn aborted(reply: Option<i32>) -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let cgroup = env.cgroup.path();
    let _foreign = reply
        .map(|reply| Foreign::attach_replying_always(cgroup, reply))
        .transpose()?;
    env.configure(&format!("{ALL}{}", policy(100)))?;
    env.start()?;
    let begin = || -> anyhow::Result<(Traffic, Conversation)> {
        let server = env.echo_server(to(SERVER_V4, PORT))?;
        let mut conversation = env.converse(to(SERVER_V4, PORT))?;
        conversation.rounds(2)?;
        Ok((server, conversation))
    };
    let (server, conversation) = begin()?;
    drop(conversation);
    // The control: closed by both ends.
    thread::sleep(Duration::from_millis(100));
    drop(server);
    let finished = near(&env)?;
    assert_eq!(finished["active"]["aborted"], 0, "{finished:#}");
    assert_eq!(finished["passive"]["aborted"], 0, "{finished:#}");
    let (_server, conversation) = begin()?;
    // The way in which an administrator ends a connection.
    run(&format!(
        "ip netns exec {} ss -K dport = :{PORT}",
        env.net.client
    ))?;
    let near = stats_when(&env, "the end", |near| near["active"]["aborted"] == 1)?;
    assert_eq!(near["active"]["expired"], 0, "{near:#}");
    stats_when(&env, "the other end", |near| {
        near["passive"]["aborted"] == 1
    })?;
    drop(conversation);
    Ok(())
}

test!(count_unmatched_counts_connections_without_entry, unmatched);
fn unmatched() -> anyhow::Result<()> {
    let elsewhere = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.88.1.0/24\"]\n";
    let mut env = TestEnv::with(elsewhere)?;
    let connect = |env: &TestEnv, address: &str| -> anyhow::Result<()> {
        let _server = env.serve(to(address, PORT))?;
        env.connect_and_close(to(address, PORT))
    };
    connect(&env, SERVER_V4)?;
    let stats = env.json(&["stats"])?;
    assert!(stats["policies"]["unmatched"].is_null(), "{stats:#}");
    env.configure(&format!("count_unmatched = true\n{elsewhere}"))?;
    env.restart(Signal::SIGTERM)?;
    connect(&env, SERVER_V4)?;
    connect(&env, SERVER_V6)?;
    // Counted, and otherwise unaffected: the kernel's 1 s.
    env.net.black_hole(PORT)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)?;
    let stats = env.json(&["stats"])?;
    let unmatched = &stats["policies"]["unmatched"];
    assert_eq!(unmatched["active"]["connections"], 2, "{stats:#}");
    assert_eq!(unmatched["passive"]["connections"], 2, "{stats:#}");
    // Both, and the connections to the black hole.
    assert!(
        unmatched["active"]["attempts"].as_u64() >= Some(3),
        "{stats:#}"
    );
    assert!(
        unmatched["active"]["handshake_retransmissions"].as_u64() >= Some(1),
        "{stats:#}"
    );
    assert_eq!(stats["policies"]["near"]["active"]["connections"], 0);
    // "unmatched" is not a policy: it is neither listed nor looked up.
    assert_eq!(env.status()?["policies"], json!(["near"]));
    let looked_up = env.json(&["lookup", SERVER_V4])?;
    assert!(looked_up["entry"].is_null(), "{looked_up:#}");
    Ok(())
}

test!(counting_nothing_still_sets_timers);
fn counting_nothing_still_sets_timers() -> anyhow::Result<()> {
    let env = silent(&format!("statistics = false\n{}", policy(100)))?;
    env.assert_syn_gap(to(SERVER_V4, PORT), Duration::from_millis(100))?;
    let near = near(&env)?;
    assert_eq!(outcome(&near["active"]), [0; 4], "{near:#}");
    for verb in ["stats", "status"] {
        env.cli_says(&[verb], "statistics = false")?;
    }
    Ok(())
}

test!(statistics_options_change_with_a_restart);
/// Another choice loads another program over the same maps: entries and counters stay.
fn statistics_options_change_with_a_restart() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&format!("on_exit = \"keep\"\n{}", policy(100)))?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    let connect = |env: &TestEnv| env.connect_and_close(to(SERVER_V4, PORT));
    connect(&env)?;
    env.configure(&format!(
        "on_exit = \"keep\"\nrtt_sampling = \"1s\"\n{}",
        policy(100)
    ))?;
    env.cli_says(&["reload"], "rtt_sampling changed")?;
    env.end(Signal::SIGTERM)?;
    env.notified("STOPPING=1")?;
    env.start()?;
    // The new program replaces the former one: no connection is counted by both.
    assert_eq!(programs_at(env.cgroup.path(), SOCK_OPS)?.len(), 1);
    connect(&env)?;
    let status = env.status()?;
    assert_eq!(status["found_at_start"], "maps-kept", "{status:#}");
    let near = near(&env)?;
    assert_eq!(near["active"]["connections"], 2, "{near:#}");
    Ok(())
}

test!(watching_prints_counts_since_the_last_line);
fn watching_prints_counts_since_the_last_line() -> anyhow::Result<()> {
    let env = TestEnv::with(&policy(100))?;
    env.cli_refuses(&["stats", "--policy", "unknown"], "active policies: near")?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    let connect = || env.connect_and_close(to(SERVER_V4, PORT));
    // Earlier connections are not printed.
    connect()?;
    let watcher = Watcher::of(&env, &["stats", "--watch", "--interval", "200ms", "--json"])?;
    watcher.next("a look at nothing", |line| {
        line["policies"]["near"]["active"]["connections"] == 0
    })?;
    connect()?;
    watcher.next("the connection", |line| {
        line["policies"]["near"]["active"]["connections"] == 1
    })?;
    watcher.next("nothing again", |line| {
        line["policies"]["near"]["active"]["connections"] == 0
    })?;
    Ok(())
}
