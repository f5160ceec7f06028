//! `rto-agent watch`: retransmissions as they happen.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::ensure;
use nix::sys::signal::Signal;
use rto_tests::{
    agent::{SOON, World},
    features::lacks,
    netns::{SERVER_V4, SERVER_V4_OTHER, SERVER_V6},
    relay::{Matching, RELAY_SERVER_V4, relay},
    talk,
    traffic::{Connect, Traffic},
    watcher::{Told, Watcher, told},
};
use serde_json::Value;

use super::{Test, established, to};

pub(super) const TESTS: &[Test] = &[
    ("syns", syns),
    ("syn_acks", syn_acks),
    ("each_syn_ack_once", each_syn_ack_once),
    ("tail_loss_probes_and_timeouts", timeouts),
    ("fast_retransmissions", fast),
    ("only_what_was_asked_for", filters),
    ("nothing_is_told_while_nobody_listens", quiet),
    ("nothing_is_told_after_a_killed_daemon", killed),
    ("detaching_while_the_watch_begins", detached_at_once),
    ("lost_events_are_counted", lost),
    ("watching_outlasts_a_detachment", detached),
    ("the_end_of_the_daemon_is_said", end),
];

const PORT: u16 = 5000;
const POLICIES: &str = "[policy.near]\ninitial_rto = \"100ms\"\nsyn_ack_rto = \"100ms\"\n\
    cidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\", \"fd88::/64\"]\n\
    [policy.other]\ninitial_rto = \"50ms\"\ncidrs = [\"10.88.1.0/24\"]\n";

fn is(kind: &'static str) -> impl Fn(&Value) -> bool {
    move |line| line["kind"] == kind
}

fn now_us() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn syns() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    world.net.black_hole(PORT)?;
    let watcher = Watcher::start(&world, &[])?;
    // Linux 6.5.
    let is_linear = Path::new("/proc/sys/net/ipv4/tcp_syn_linear_timeouts").exists();
    for (address, mapped) in [(SERVER_V4, false), (SERVER_V4, true), (SERVER_V6, false)] {
        let options = Connect {
            mapped,
            ..Connect::default()
        };
        let client = world.connect(to(address, PORT), &options)?;
        for attempt in 1..=3u64 {
            let event = watcher.next("SYN", |line| {
                is("syn")(line) && line["attempt"] == attempt && line["remote"] == address
            })?;
            let doublings = if is_linear { 0 } else { attempt - 1 };
            assert_eq!(event["timer_us"], 100_000 << doublings, "{event:#}");
            assert_eq!(event["remote_port"], PORT, "{event:#}");
            assert_eq!(event["state"], "SYN-SENT", "{event:#}");
            assert_eq!(event["policy"], "near", "{event:#}");
            assert_eq!(event["direction"], "active", "{event:#}");
            let age_us = now_us().abs_diff(event["at_us"].as_u64().unwrap_or(0));
            assert!(Duration::from_micros(age_us) < SOON, "{event:#}");
            // Since Linux 6.16; before, nothing is said.
            if let Some(process) = event["process"].as_str() {
                assert_eq!(process, "rto-traffic", "{event:#}");
                assert!(event["pid"].as_u64() > Some(0), "{event:#}");
            }
        }
        drop(client);
        // Not those of the next.
        std::thread::sleep(Duration::from_millis(50));
        let _rest = watcher.so_far();
    }
    Ok(())
}

/// As they are sent, whether the connection ever comes about or not.
fn syn_acks() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    let _server = world.serve(to("::", PORT))?;
    // The control: a listener outside of the agent's cgroup has the kernel's own timers.
    let _other = Traffic::serve(&world.net.server, None, to("::", PORT + 1))?;
    world.net.server_drops("tcp flags & (syn|ack) == ack")?;
    let watcher = Watcher::start(&world, &[])?;
    for address in [SERVER_V4, SERVER_V6] {
        let _outside = world.connect(to(address, PORT + 1), &Connect::default())?;
        let client = world.connect(to(address, PORT), &Connect::default())?;
        // Before Linux 5.17 a request does not keep its timer: the kernel's own is told, which it is after the first.
        let initial_us = if lacks("syn-ack-retransmission-timeout")? {
            1_000_000
        } else {
            100_000
        };
        for (attempt, timers) in [(1, 1), (2, 2), (3, 4)] {
            let timer_us = timers * initial_us;
            let event = watcher.next("SYN-ACK", |line| {
                assert_ne!(line["local_port"], PORT + 1, "{line:#}");
                is("syn-ack")(line) && line["local"] == address
            })?;
            assert_eq!(event["attempt"], attempt, "{event:#}");
            assert_eq!(event["timer_us"], timer_us, "{event:#}");
            assert_eq!(event["local_port"], PORT, "{event:#}");
            assert!(event["remote_port"].as_u64() > Some(1024), "{event:#}");
            assert_eq!(event["direction"], "passive", "{event:#}");
            assert_eq!(event["state"], "SYN-RECV", "{event:#}");
            assert_eq!(event["policy"], "near", "{event:#}");
        }
        drop(client);
    }
    Ok(())
}

/// Not once more when the connection is established.
fn each_syn_ack_once() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    let relay = relay(&world.net)?;
    let _server = world.serve(to(RELAY_SERVER_V4, PORT))?;
    let watcher = Watcher::start(&world, &[])?;
    relay.drop_next(Matching::CLIENT_ACK, 1);
    let _client = world.connect(to(RELAY_SERVER_V4, PORT), &Connect::default())?;
    watcher.next("SYN-ACK", is("syn-ack"))?;
    world.wait_status("the accepted connection", |status| {
        status["policies"]["near"]["established_passive"] == 1
    })?;
    // Longer than a line takes.
    std::thread::sleep(Duration::from_millis(300));
    let more = watcher.so_far();
    assert!(!more.iter().any(is("syn-ack")), "{more:#?}");
    Ok(())
}

fn timeouts() -> anyhow::Result<()> {
    let world = World::with(&format!(
        "{POLICIES}[policy.low]\nrto_min = \"50ms\"\ncidrs = [\"fd99::/64\"]\n"
    ))?;
    established::reno(&world)?;
    let _server = world.answer(to(SERVER_V4, PORT))?;
    let mut talk = world.talk(to(SERVER_V4, PORT), talk::Options::default())?;
    talk.rounds(3, Duration::ZERO)?;
    let watcher = Watcher::start(&world, &[])?;
    world.net.black_hole(PORT)?;
    talk.send(talk::REQUEST)?;
    let of_talk = |kind: &'static str, port: u16| {
        move |line: &Value| is(kind)(line) && line["local_port"] == port
    };
    let probe = watcher.next("TLP", of_talk("tlp", talk.port()))?;
    assert_eq!(probe["timer_us"], Value::Null, "{probe:#}");
    let first = watcher.next("RTO", of_talk("rto", talk.port()))?;
    let second = watcher.next("RTO", of_talk("rto", talk.port()))?;
    assert_eq!([&first["attempt"], &second["attempt"]], [1, 2]);
    // The kernel's own minimum and a jiffy, then twice that.
    let timer_us = first["timer_us"].as_u64().unwrap_or(0);
    assert!((200_000..230_000).contains(&timer_us), "{first:#}");
    assert_eq!(second["timer_us"], 2 * timer_us, "{second:#}");
    assert_eq!(second["state"], "ESTAB", "{second:#}");
    Ok(())
}

/// One of many segments lost: those behind it make it be sent again, and no timer fires.
fn fast() -> anyhow::Result<()> {
    const BYTES: usize = 200 * talk::REQUEST;
    let world = World::with(POLICIES)?;
    established::reno(&world)?;
    let relay = relay(&world.net)?;
    relay.set_delay(Duration::from_millis(10));
    let _server = world.answer(to(RELAY_SERVER_V4, PORT))?;
    let mut talk = world.talk(to(RELAY_SERVER_V4, PORT), talk::Options::default())?;
    talk.rounds(3, Duration::ZERO)?;
    let watcher = Watcher::start(&world, &[])?;
    relay.drop_next(Matching::CLIENT_DATA, 1);
    talk.send(BYTES)?;
    let event = watcher.next("fast retransmission", is("fast"))?;
    assert_eq!(event["state"], "ESTAB", "{event:#}");
    assert_eq!(event["local_port"], talk.port(), "{event:#}");
    Ok(())
}

fn filters() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    world.net.black_hole(PORT)?;
    let by_policy = Watcher::start(&world, &["--policy", "other"])?;
    let by_cidr = Watcher::start(&world, &["--cidr", "10.88.1.0/28"])?;
    let all = Watcher::start(&world, &[])?;
    let _near = world.connect(to(SERVER_V4, PORT), &Connect::default())?;
    all.next("SYN to near", |line| line["policy"] == "near")?;
    let _other = world.connect(to(SERVER_V4_OTHER, PORT), &Connect::default())?;
    for watcher in [&by_policy, &by_cidr] {
        watcher.next("SYN to other", |line| {
            assert_eq!(line["policy"], "other", "{line:#}");
            is("syn")(line)
        })?;
    }
    for (args, said) in [
        (["--policy", "nobody"], "there is: near, other"),
        (["--cidr", "10.88.1.1/24"], "10.88.1.0/24"),
        (["--policy", "a b"], "invalid policy name"),
    ] {
        let refused = world.cli_fails(&[&["watch"][..], &args].concat())?;
        assert!(refused.contains(said), "{refused}");
    }
    Ok(())
}

fn quiet() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    assert!(told(&world)? == Told::Nothing);
    let watcher = Watcher::start(&world, &[])?;
    let other = Watcher::start(&world, &[])?;
    drop(watcher);
    // The other may have come only now.
    std::thread::sleep(Duration::from_millis(300));
    becomes(&world, Told::Live)?;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(told(&world)?, Told::Live, "one of two has gone");
    drop(other);
    becomes(&world, Told::Nothing)
}

/// What it left on is switched off by the next.
fn killed() -> anyhow::Result<()> {
    let mut world = World::with(POLICIES)?;
    let _watcher = Watcher::start(&world, &[])?;
    world.end(Signal::SIGKILL)?;
    assert_ne!(told(&world)?, Told::Nothing, "the control");
    world.start()?;
    assert_eq!(told(&world)?, Told::Nothing);
    Ok(())
}

/// The thread that reads also loads a program, over the pins that a detachment removes.
fn detached_at_once() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    for pause_ms in [0, 2, 5, 10, 20, 40] {
        let _watcher = Watcher::of(&world, &["watch", "--json"])?;
        std::thread::sleep(Duration::from_millis(pause_ms));
        world.cli(&["detach"])?;
        assert!(!world.pin_dir().exists(), "after {pause_ms} ms");
        world.cli(&["reload"])?;
    }
    Ok(())
}

fn becomes(world: &World, what: Told) -> anyhow::Result<()> {
    let end = Instant::now() + SOON;
    while told(world)? != what {
        ensure!(Instant::now() < end, "{:?}, not {what:?}", told(world)?);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// More than there is room for, while the daemon does not read.
fn lost() -> anyhow::Result<()> {
    let jiffy_ms = rto_tests::timing::jiffy().as_millis();
    let mut world = World::new()?;
    world.configure(&format!(
        "[policy.near]\ninitial_rto = \"{jiffy_ms}ms\"\ncidrs = [\"10.88.0.0/24\"]\n"
    ))?;
    world.start()?;
    world.net.black_hole(PORT)?;
    let watcher = Watcher::start(&world, &[])?;
    world.signal(Signal::SIGSTOP)?;
    let _many = Traffic::knock(
        &world.net.client,
        Some(world.cgroup.path()),
        to(SERVER_V4, PORT),
        CONNECTIONS,
    )?;
    // The first eight SYNs of each: five intervals, then 2, 4 and 8 times as long.
    std::thread::sleep(Duration::from_secs(2));
    world.signal(Signal::SIGCONT)?;
    let line = watcher.next("count of what was lost", |line| line["lost"].is_u64())?;
    assert!(line["lost"].as_u64() > Some(0), "{line:#}");
    Ok(())
}

/// Each makes eight events and more; the ring has room for some 2,300.
const CONNECTIONS: usize = 600;

fn detached() -> anyhow::Result<()> {
    let world = World::with(POLICIES)?;
    world.net.black_hole(PORT)?;
    let watcher = Watcher::start(&world, &[])?;
    world.cli(&["detach"])?;
    world.cli(&["reload"])?;
    let _client = world.connect(to(SERVER_V4, PORT), &Connect::default())?;
    watcher.next("SYN", is("syn"))?;
    Ok(())
}

fn end() -> anyhow::Result<()> {
    let mut world = World::with(POLICIES)?;
    let watcher = Watcher::start(&world, &[])?;
    world.end(Signal::SIGTERM)?;
    let ended = watcher.next("line", |_| true);
    assert!(
        ended.is_err_and(|e| e.to_string().contains("it ended")),
        "the verb goes on without a daemon"
    );
    Ok(())
}
