//! The test bed itself: the link that delays and drops packets. No agent runs.

use std::{
    io::PipeReader,
    os::unix::process::CommandExt as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use rto_testbed::{
    link::{
        Link as _,
        config::LinkConfig,
        relay::{Relay, Relayed},
    },
    netns::Pair,
    timing::{Sample, assert_one_by_one, range},
};

use crate::prelude::*;

const ONE_WAY: Duration = Duration::from_millis(20);
const RTT: Duration = ONE_WAY.saturating_mul(2);

/// Runs connect() over a new link that drops the first packet of a kind; returns its duration, and the link's log.
fn connect(server: &str, lost: Option<PacketFilter>) -> anyhow::Result<(Duration, Vec<Relayed>)> {
    let pair = Pair::new()?;
    let relay = relay(&pair)?;
    relay.set_delay(ONE_WAY);
    if let Some(kind) = lost {
        relay.drop_next(kind, 1);
    }
    let _server = Traffic::serve(&pair.server, None, to(server, PORT))?;
    let client = Traffic::connect(&pair.client, None, to(server, PORT), Connect::default())?;
    let outcome = client.outcome()?;
    assert_eq!(outcome.result, "connected");
    // Delays may vary, but nothing is faster than the link.
    assert!(outcome.took >= RTT, "{outcome:?} over {RTT:?}");
    Ok((outcome.took, relay.log()))
}

/// The numbers of dropped and of forwarded packets of a kind.
fn count(log: &[Relayed], kind: PacketFilter) -> (usize, usize) {
    let of_kind = || log.iter().filter(|packet| packet.is(&kind));
    let dropped = of_kind().filter(|packet| packet.dropped()).count();
    (dropped, of_kind().count() - dropped)
}

/// Time that the link, which is a process, and the client add to a round trip: each of four steps may wait for a
/// processor.
const PROCESSES: Duration = Duration::from_millis(12);

/// Asserts that it takes a round trip, after a timer of this length or at once.
fn assert_took(
    timer: Duration,
    mut measure: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<()> {
    let (first, last) = match timer {
        Duration::ZERO => (timer, timer),
        timer => range(timer).into_inner(),
    };
    assert_one_by_one(|| {
        Ok(Sample {
            expected: vec![first + RTT..=last + RTT + PROCESSES],
            gaps: vec![measure()?],
        })
    })
}

test!(delays_both_directions);
fn delays_both_directions() -> anyhow::Result<()> {
    for server in [RELAY_SERVER_V4, RELAY_SERVER_V6] {
        assert_took(Duration::ZERO, || {
            let (took, log) = connect(server, None)?;
            assert!(log.iter().all(|packet| !packet.dropped()), "{log:#?}");
            assert_eq!(count(&log, PacketFilter::SYN), (0, 1), "{log:#?}");
            assert_eq!(count(&log, PacketFilter::SYN_ACK), (0, 1), "{log:#?}");
            Ok(took)
        })?;
    }
    Ok(())
}

test!(a_lost_syn);
fn a_lost_syn() -> anyhow::Result<()> {
    assert_took(KERNEL_RTO, || {
        let (took, log) = connect(RELAY_SERVER_V4, Some(PacketFilter::SYN))?;
        assert_eq!(count(&log, PacketFilter::SYN), (1, 1), "{log:#?}");
        assert_eq!(count(&log, PacketFilter::SYN_ACK), (0, 1), "{log:#?}");
        Ok(took)
    })
}

test!(a_lost_syn_ack);
/// Either side's timer repairs the loss, whichever expires first.
fn a_lost_syn_ack() -> anyhow::Result<()> {
    assert_took(KERNEL_RTO, || {
        let (took, log) = connect(RELAY_SERVER_V4, Some(PacketFilter::SYN_ACK))?;
        let (dropped, passed) = count(&log, PacketFilter::SYN_ACK);
        assert_eq!(dropped, 1, "{log:#?}");
        assert!(passed >= 1, "{log:#?}");
        let lost = log.iter().filter(|packet| packet.dropped()).count();
        assert_eq!(lost, 1, "{log:#?}");
        Ok(took)
    })
}

test!(lost_segments_of_a_conversation);
fn lost_segments_of_a_conversation() -> anyhow::Result<()> {
    let (_pair, relay, _server, mut conversation) = converse(ONE_WAY)?;
    for (kind, lost) in [
        (PacketFilter::CLIENT_DATA, 1),
        (PacketFilter::SERVER_DATA, 2),
        (PacketFilter::CLIENT_ACK, 1),
    ] {
        let before = relay.log().len();
        relay.drop_next(kind, u64::try_from(lost)?);
        // The conversation continues nevertheless.
        conversation.paced(3, ONE_WAY * 4)?;
        let log = relay.log().split_off(before);
        let (dropped, passed) = count(&log, kind);
        assert_eq!(dropped, lost, "{kind:?} {log:#?}");
        assert!(passed >= 1, "{kind:?} {log:#?}");
        let all_dropped = log.iter().filter(|packet| packet.dropped()).count();
        assert_eq!(all_dropped, lost, "{kind:?} {log:#?}");
    }
    Ok(())
}

/// A conversation over a new link with this delay, and its server.
fn converse(delay: Duration) -> anyhow::Result<(Pair, Relay, Traffic, Conversation)> {
    let pair = Pair::new()?;
    let link = relay(&pair)?;
    link.set_delay(delay);
    let server = to(RELAY_SERVER_V4, PORT);
    let echo = Traffic::echo_server(&pair.server, None, server, false)?;
    let conversation = Conversation::start(&pair.client, None, server, Connect::default())?;
    Ok((pair, link, echo, conversation))
}

/// Bytes of a full segment over these links, with timestamps.
const SEGMENT: u64 = 1448;

test!(the_last_segments_of_a_flow_once);
fn the_last_segments_of_a_flow_once() -> anyhow::Result<()> {
    const SEGMENTS: u64 = 10;
    const LOST: u64 = 3;
    let (_pair, link, _server, mut conversation) = converse(ONE_WAY)?;
    let last = PacketFilter::CLIENT_DATA.from_byte((SEGMENTS - LOST) * SEGMENT);
    let rule = link.add(Rule::new(last.first_time(), DropPattern::All));
    conversation.send(usize::try_from(SEGMENTS * SEGMENT)?)?;
    // A round trip, and the timers that repair the loss.
    let came_through = |log: &Vec<Relayed>| {
        let through = log
            .iter()
            .filter(|r| r.is(&PacketFilter::CLIENT_DATA) && !r.dropped());
        let bytes = through.filter_map(|r| r.packet.map(|packet| u64::from(packet.payload)));
        bytes.sum::<u64>() >= SEGMENTS * SEGMENT
    };
    let log = eventually_seen("whole flow", TIMEOUT, || Ok(link.log()), came_through)?;
    let data: Vec<_> = log
        .iter()
        .filter(|r| r.is(&PacketFilter::CLIENT_DATA))
        .collect();
    let bytes = |dropped: bool, repeated: bool| -> u64 {
        data.iter()
            .filter(|r| r.dropped() == dropped)
            .filter_map(|r| r.packet.filter(|p| p.repeated == repeated))
            .map(|packet| u64::from(packet.payload))
            .sum()
    };
    assert_eq!(link.dropped(rule)?, LOST, "{log:#?}");
    assert_eq!(bytes(true, false), LOST * SEGMENT, "{log:#?}");
    assert_eq!(bytes(false, false), (SEGMENTS - LOST) * SEGMENT, "{log:#?}");
    // Lost data got through when it was retransmitted.
    assert_eq!(bytes(true, true), 0, "{log:#?}");
    assert!(bytes(false, true) >= LOST * SEGMENT, "{log:#?}");
    Ok(())
}

test!(a_blackout_loses_all_of_its_time_and_nothing_else, blackout);
fn blackout() -> anyhow::Result<()> {
    // The other connection's rounds take a fraction of it, on a busy machine too.
    const LENGTH: Duration = Duration::from_millis(500);
    let (pair, link, _server, mut conversation) = converse(Duration::ZERO)?;
    let server = to(RELAY_SERVER_V4, PORT);
    let mut other = Conversation::start(&pair.client, None, server, Connect::default())?;
    let outage = link.start_outage(PacketFilter::ALL.of_client(conversation.port()), LENGTH)?;
    // The other connection is not affected.
    other.paced(10, Duration::from_millis(10))?;
    conversation.paced(10, Duration::from_millis(10))?;
    let blackout = link.end_outage(outage)?;
    assert_eq!(blackout.until - blackout.from, LENGTH);
    let log = link.log();
    let mut lost = 0;
    for relayed in &log {
        let Some(packet) = relayed.packet else {
            continue;
        };
        let within = (blackout.from..blackout.until).contains(&relayed.at);
        let concerned = packet.client_port == conversation.port();
        assert_eq!(
            relayed.dropped(),
            within && concerned,
            "{relayed:?} {blackout:?}"
        );
        lost += u64::from(relayed.dropped());
    }
    assert!(lost > 0 && lost == blackout.dropped, "{blackout:?}");
    Ok(())
}

test!(a_rate_is_kept, rate);
/// No more than the rate allows; and not much less, for which the machine must be fast enough.
fn rate() -> anyhow::Result<()> {
    const BYTES: usize = 250_000;
    const BITS_A_SECOND: u64 = 10_000_000;
    let (_pair, link, _server, mut conversation) = converse(Duration::ZERO)?;
    link.set(LinkConfig {
        rate: Some(BITS_A_SECOND),
        ..LinkConfig::default()
    });
    conversation.send(BYTES)?;
    // The answer comes after all data has arrived.
    conversation.rounds(1)?;
    let log = link.log();
    let data = || log.iter().filter(|r| r.is(&PacketFilter::CLIENT_DATA));
    let first = data().next().context("no data")?.at;
    let last = data()
        .filter_map(|r| r.leaves)
        .max()
        .context("all was lost")?;
    let bits = data()
        .filter(|r| !r.dropped())
        .map(|r| r.bytes as u64 * 8)
        .sum::<u64>();
    let least = Duration::from_micros(bits * 1_000_000 / BITS_A_SECOND);
    let took = last - first;
    assert!(took >= least, "{took:?} for {bits} bits");
    assert!(took < least * 2, "{took:?} for {bits} bits");
    Ok(())
}

test!(leaves_no_device_also_on_panic);
fn leaves_no_device_also_on_panic() -> anyhow::Result<()> {
    let pair = Pair::new()?;
    let there = |(netns, link): (&String, &String)| {
        run(&format!("ip -n {netns} -brief link")).map(|links| links.contains(link.as_str()))
    };
    let link = relay(&pair)?;
    let (client, server) = (link.client_device(), link.server_device());
    let ends = [(&pair.client, &client), (&pair.server, &server)];
    for end in ends {
        assert!(there(end)?, "{end:?}");
    }
    thread::scope(|scope| {
        let (mut forked, mut child) = slow_child()?;
        let child = scope.spawn(move || child.status());
        forked.read_exact(&mut [0])?;
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _link = link;
            resume_unwind(Box::new("a test failed"));
        }));
        assert!(panicked.is_err());
        for end in ends {
            assert!(!there(end)?, "{end:?}");
        }
        let _again = relay(&pair)?;
        child.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(())
    })
}

/// A child that writes to the pipe when it is forked and calls exec later: until then it holds every descriptor of this
/// process, as any child of a concurrent test may.
fn slow_child() -> anyhow::Result<(PipeReader, Command)> {
    let (forked, in_child) = io::pipe()?;
    let mut command = Command::new("true");
    // SAFETY: between fork and exec only system calls are made; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::write(&in_child, b"f")?;
            thread::sleep(Duration::from_millis(250));
            Ok(())
        });
    }
    Ok((forked, command))
}
