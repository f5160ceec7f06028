//! `rto-agent watch`: retransmissions as they happen.

use rto_tests::watcher::{Sent, Watcher, sent};

use crate::prelude::*;

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

test!(syns);
fn syns() -> anyhow::Result<()> {
    let env = silent(POLICIES)?;
    let watcher = Watcher::start(&env, &[])?;
    // Since Linux 6.5.
    let is_linear = Path::new("/proc/sys/net/ipv4/tcp_syn_linear_timeouts").exists();
    for (address, mapped) in [(SERVER_V4, false), (SERVER_V4, true), (SERVER_V6, false)] {
        let options = Connect::with(|c| c.mapped = mapped);
        let client = env.connect((to(address, PORT), options))?;
        for attempt in 1..=3u64 {
            let event = watcher.next("SYN", |line| {
                is("syn")(line) && line["attempt"] == attempt && line["remote"] == address
            })?;
            let doublings = if is_linear { 0 } else { attempt - 1 };
            let expected = json!({
                "timer_us": 100_000 << doublings, "remote_port": PORT, "state": "SYN-SENT",
                "policy": "near", "direction": "active"
            });
            assert_has(&event, expected);
            let age_us = now_us().abs_diff(event["at_us"].as_u64().unwrap_or(0));
            assert!(Duration::from_micros(age_us) < TIMEOUT, "{event:#}");
            // Reported since Linux 6.16.
            if let Some(process) = event["process"].as_str() {
                assert_eq!(process, "rto-workload", "{event:#}");
                assert!(event["pid"].as_u64() > Some(0), "{event:#}");
            }
        }
        drop(client);
        // Discards events of this address before the next.
        thread::sleep(Duration::from_millis(50));
        let _rest = watcher.so_far();
    }
    Ok(())
}

test!(syn_acks);
/// Reported when they are sent, whether or not the connection is established later.
fn syn_acks() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    let _server = env.serve(to("::", PORT))?;
    // The control: a listener outside of the agent's cgroup has the kernel's timers.
    let _other = Traffic::serve(&env.net.server, None, to("::", PORT + 1))?;
    env.net.server_drops("tcp flags & (syn|ack) == ack")?;
    let watcher = Watcher::start(&env, &[])?;
    for address in [SERVER_V4, SERVER_V6] {
        let _outside = env.connect(to(address, PORT + 1))?;
        // With the kernel's timer: a retransmitted SYN would cause a SYN-ACK that no timer has sent.
        let outside =
            Traffic::connect(&env.net.client, None, to(address, PORT), Connect::default());
        let client = outside?;
        // Before Linux 5.17 a request does not keep its timer: the event shows the kernel's, which applies after the
        // first.
        let initial_us = if lacks("syn-ack-retransmission-timeout")? {
            1_000_000
        } else {
            100_000
        };
        for (attempt, timers) in [(1, 1), (2, 2), (3, 4)] {
            let event = watcher.next("SYN-ACK", |line| {
                assert_ne!(line["local_port"], PORT + 1, "{line:#}");
                is("syn-ack")(line) && line["local"] == address
            })?;
            let expected = json!({
                "attempt": attempt, "timer_us": timers * initial_us, "local_port": PORT,
                "state": "SYN-RECV", "policy": "near", "direction": "passive"
            });
            assert_has(&event, expected);
            assert!(event["remote_port"].as_u64() > Some(1024), "{event:#}");
        }
        drop(client);
    }
    Ok(())
}

test!(each_syn_ack_once);
/// No event is repeated when the connection is established.
fn each_syn_ack_once() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    let relay = relay(&env.net)?;
    let _server = env.serve(to(RELAY_SERVER_V4, PORT))?;
    let watcher = Watcher::start(&env, &[])?;
    relay.drop_next(PacketFilter::CLIENT_ACK, 1);
    let _client = env.connect(to(RELAY_SERVER_V4, PORT))?;
    watcher.next("SYN-ACK", is("syn-ack"))?;
    env.wait_counted("near", "the accepted connection", |near| {
        near["passive"]["connections"] == 1
    })?;
    // Longer than a line takes.
    thread::sleep(Duration::from_millis(300));
    let more = watcher.so_far();
    assert!(!more.iter().any(is("syn-ack")), "{more:#?}");
    Ok(())
}

test!(tail_loss_probes_and_timeouts);
fn tail_loss_probes_and_timeouts() -> anyhow::Result<()> {
    let env = TestEnv::with(&format!(
        "{POLICIES}[policy.low]\nrto_min = \"50ms\"\ncidrs = [\"fd99::/64\"]\n"
    ))?;
    env.net.reno()?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let mut conversation = env.converse(to(SERVER_V4, PORT))?;
    conversation.rounds(3)?;
    let watcher = Watcher::start(&env, &[])?;
    env.net.black_hole(PORT)?;
    conversation.send(conversation::REQUEST)?;
    let of_talk = |kind: &'static str, port: u16| {
        move |line: &Value| is(kind)(line) && line["local_port"] == port
    };
    let probe = watcher.next("TLP", of_talk("tlp", conversation.port()))?;
    assert_eq!(probe["timer_us"], Value::Null, "{probe:#}");
    let first = watcher.next("RTO", of_talk("rto", conversation.port()))?;
    let second = watcher.next("RTO", of_talk("rto", conversation.port()))?;
    assert_eq!([&first["attempt"], &second["attempt"]], [1, 2]);
    // The kernel's minimum plus a jiffy, then twice that.
    let timer_us = first["timer_us"].as_u64().unwrap_or(0);
    assert!((200_000..230_000).contains(&timer_us), "{first:#}");
    assert_has(&second, json!({"timer_us": 2 * timer_us, "state": "ESTAB"}));
    Ok(())
}

test!(fast_retransmissions);
/// One of many segments is lost: later segments trigger its retransmission, and no timer fires.
fn fast_retransmissions() -> anyhow::Result<()> {
    const BYTES: usize = 200 * conversation::REQUEST;
    let env = TestEnv::with(POLICIES)?;
    env.net.reno()?;
    let relay = relay(&env.net)?;
    relay.set_delay(Duration::from_millis(10));
    let _server = env.echo_server(to(RELAY_SERVER_V4, PORT))?;
    let mut conversation = env.converse(to(RELAY_SERVER_V4, PORT))?;
    conversation.rounds(3)?;
    let watcher = Watcher::start(&env, &[])?;
    relay.drop_next(PacketFilter::CLIENT_DATA, 1);
    conversation.send(BYTES)?;
    let event = watcher.next("fast retransmission", is("fast"))?;
    assert_eq!(event["state"], "ESTAB", "{event:#}");
    assert_eq!(event["local_port"], conversation.port(), "{event:#}");
    Ok(())
}

test!(watch_filters_by_policy_and_cidr);
fn watch_filters_by_policy_and_cidr() -> anyhow::Result<()> {
    let env = silent(&format!("count_unmatched = true\n{POLICIES}"))?;
    let by_policy = Watcher::start(&env, &["--policy", "other"])?;
    let by_cidr = Watcher::start(&env, &["--cidr", "10.88.1.0/28"])?;
    let all = Watcher::start(&env, &[])?;
    let _near = env.connect(to(SERVER_V4, PORT))?;
    all.next("SYN to near", |line| line["policy"] == "near")?;
    let _other = env.connect(to(SERVER_V4_OTHER, PORT))?;
    for watcher in [&by_policy, &by_cidr] {
        watcher.next("SYN to other", |line| {
            assert_eq!(line["policy"], "other", "{line:#}");
            is("syn")(line)
        })?;
    }
    for (args, expected) in [
        (
            ["--policy", "unknown"],
            "no active policy unknown; active policies: near, other, unmatched",
        ),
        (["--cidr", "10.88.1.1/24"], "10.88.1.0/24"),
        (["--policy", "a b"], "invalid policy name"),
    ] {
        env.cli_refuses(&[&["watch"][..], &args].concat(), expected)?;
    }
    Ok(())
}

test!(no_event_is_sent_without_a_client);
fn no_event_is_sent_without_a_client() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    assert!(sent(&env)? == Sent::Nothing);
    let watcher = Watcher::start(&env, &[])?;
    let other = Watcher::start(&env, &[])?;
    drop(watcher);
    // The other watcher may have started only now.
    thread::sleep(Duration::from_millis(300));
    becomes(&env, Sent::Live)?;
    thread::sleep(Duration::from_millis(300));
    assert_eq!(sent(&env)?, Sent::Live, "one of two has gone");
    drop(other);
    becomes(&env, Sent::Nothing)
}

test!(no_event_is_sent_after_killed_daemon);
/// The next daemon switches off the events that the killed one had switched on.
fn no_event_is_sent_after_killed_daemon() -> anyhow::Result<()> {
    let mut env = TestEnv::with(POLICIES)?;
    let _watcher = Watcher::start(&env, &[])?;
    env.end(Signal::SIGKILL)?;
    assert_ne!(sent(&env)?, Sent::Nothing, "the control");
    env.start()?;
    assert_eq!(sent(&env)?, Sent::Nothing);
    Ok(())
}

test!(detaching_while_the_watch_begins);
/// The reading thread also loads a program, while a detach removes its pins.
fn detaching_while_the_watch_begins() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    for pause_ms in [0, 2, 5, 10, 20, 40] {
        let _watcher = Watcher::of(&env, &["watch", "--json"])?;
        thread::sleep(Duration::from_millis(pause_ms));
        env.cli(&["detach"])?;
        assert!(
            programs_at(env.cgroup.path(), SOCK_OPS)?.is_empty(),
            "after {pause_ms} ms"
        );
        env.cli(&["attach"])?;
    }
    Ok(())
}

fn becomes(env: &TestEnv, what: Sent) -> anyhow::Result<()> {
    let name = format!("{what:?}");
    eventually_seen(&name, TIMEOUT, || sent(env), |sent| *sent == what).map(drop)
}

test!(lost_events_are_counted);
/// More events than fit into the ring, while the daemon does not read.
fn lost_events_are_counted() -> anyhow::Result<()> {
    let jiffy_ms = jiffy().as_millis();
    let env = silent(&format!(
        "[policy.near]\ninitial_rto = \"{jiffy_ms}ms\"\nguard = \"off\"\ncidrs = [\"10.88.0.0/24\"]\n"
    ))?;
    let watcher = Watcher::start(&env, &[])?;
    env.signal(Signal::SIGSTOP)?;
    let _many = Traffic::connect_many(
        &env.net.client,
        Some(env.cgroup.path()),
        to(SERVER_V4, PORT),
        CONNECTIONS,
    )?;
    // The first eight SYNs of each connection: five equal intervals, then 2, 4 and 8 times as long.
    thread::sleep(Duration::from_secs(2));
    env.signal(Signal::SIGCONT)?;
    let line = watcher.next("count of lost events", |line| line["lost"].is_u64())?;
    assert!(line["lost"].as_u64() > Some(0), "{line:#}");
    Ok(())
}

/// Each makes at least eight events; the ring has room for about 2,300.
const CONNECTIONS: usize = 600;

test!(watching_outlasts_a_detachment);
fn watching_outlasts_a_detachment() -> anyhow::Result<()> {
    let env = silent(POLICIES)?;
    let watcher = Watcher::start(&env, &[])?;
    env.cli(&["detach"])?;
    env.cli(&["attach"])?;
    let _client = env.connect(to(SERVER_V4, PORT))?;
    watcher.next("SYN", is("syn"))?;
    Ok(())
}

test!(watch_reports_end_of_daemon, end);
fn end() -> anyhow::Result<()> {
    let mut env = TestEnv::with(POLICIES)?;
    let watcher = Watcher::start(&env, &[])?;
    env.end(Signal::SIGTERM)?;
    let ended = watcher.next("line", |_| true);
    assert!(
        ended.is_err_and(|e| e.to_string().contains("it ended")),
        "the command continues without a daemon"
    );
    Ok(())
}
