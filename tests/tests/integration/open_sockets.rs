//! Sockets that were open before a policy covered them, and restoring their options.

use std::sync::atomic::{AtomicBool, Ordering};

use rto_tests::locked_socket::LockedSocket;

use super::{established::policy, lifecycle::bounded};
use crate::prelude::*;

/// Round trips after which an RTO has fallen to its minimum.
const MANY: usize = 40;
const OTHERS: &str = "[policy.other]\ninitial_rto = \"100ms\"\ncidrs = [\"10.77.0.0/24\"]\n";

struct Pair {
    conversation: Conversation,
    _server: Traffic,
}

fn begin(env: &TestEnv, options: Connect) -> anyhow::Result<Pair> {
    env.net.reno()?;
    let server = env.echo_server(to(SERVER_V4, PORT))?;
    let mut conversation = env.converse_with(to(SERVER_V4, PORT), options)?;
    conversation.rounds(5)?;
    Ok(Pair {
        conversation,
        _server: server,
    })
}

/// The RTO of the client's and of the server's socket, after many round trips.
fn rtos(env: &TestEnv, pair: &mut Pair) -> anyhow::Result<[Duration; 2]> {
    pair.conversation.rounds(MANY)?;
    Ok([
        conversation::rto(&env.net.client, &format!("dport = :{PORT}"))?,
        conversation::rto(&env.net.server, &format!("sport = :{PORT}"))?,
    ])
}

fn are_short(rtos: [Duration; 2]) -> bool {
    rtos.iter().all(|rto| *rto <= 5 * jiffy())
}

fn are_kernels(rtos: [Duration; 2]) -> bool {
    rtos.iter().all(|rto| *rto >= Duration::from_millis(200))
}

fn plain() -> Connect {
    Connect::default()
}

test!(
    apply_reaches_sockets_of_two_namespaces,
    needs = [TCP_ITERATOR]
);
fn apply_reaches_sockets_of_two_namespaces() -> anyhow::Result<()> {
    let env = TestEnv::with(OTHERS)?;
    let mut pair = begin(&env, plain())?;
    env.cli_line("add 10.88.0.0/24 --rto-min 8ms --user-timeout 30s")?;
    // The control: an entry alone does not affect them.
    let before = rtos(&env, &mut pair)?;
    assert!(are_kernels(before), "{before:?}");
    let walk = env.json(&["apply"])?;
    let (_, counts) = only_policy(&walk);
    assert_has(counts, json!({"seen": 2, "changed": 2, "refused": 0}));
    assert!(walk["namespaces_done"].as_u64() >= Some(2), "{walk:#}");
    assert!(
        walk["notes"].to_string().contains("about 20 round trips"),
        "{walk:#}"
    );
    let after = rtos(&env, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    assert_eq!(pair.conversation.option(option::USER_TIMEOUT)?, 30_000);
    // The sockets are counted, also in the counters of the RTO hook.
    let (name, _) = only_policy(&walk);
    let policy = env.counted(name)?;
    assert_eq!(policy["open_sockets"], 2, "{policy:#}");
    if lacks("rto-hook-on-open-sockets")? {
        assert!(walk["notes"].to_string().contains("Linux 6.12"), "{walk:#}");
        return Ok(());
    }
    env.net.black_hole(PORT)?;
    pair.conversation.send(conversation::REQUEST)?;
    env.wait_counted(name, "a timeout of the open socket", |policy| {
        policy["rtos"][1] == 1 && policy["tail_loss_probes"] == 1
    })?;
    Ok(())
}

fn only_policy(walk: &Value) -> (&str, &Value) {
    let policies = walk["policies"].as_object();
    let mut policies = policies.into_iter().flatten();
    match (policies.next(), policies.next()) {
        (Some((name, counts)), None) => (name, counts),
        _ => ("", &Value::Null),
    }
}

test!(apply_to_open_does_so_by_itself, needs = [TCP_ITERATOR]);
fn apply_to_open_does_so_by_itself() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let mut pair = begin(&env, plain())?;
    // At the start,
    env.configure(&format!(
        "apply_to_open = true\n{}",
        policy("rto_min = \"8ms\"")
    ))?;
    env.start()?;
    env.wait_counted("near", "the walk", |near| near["open_sockets"] == 2)?;
    env.wait_status("the end of the walk", |status| {
        status["open_sockets"]["running"] == false
    })?;
    let after = rtos(&env, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    // and when an entry covers other sockets.
    let _server = env.echo_server(to(SERVER_V4_OTHER, PORT + 1))?;
    let _other = env.converse(to(SERVER_V4_OTHER, PORT + 1))?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    env.wait_counted("near", "another walk", |near| near["open_sockets"] == 4)?;
    Ok(())
}

test!(
    each_change_that_covers_sockets_is_followed_by_a_walk,
    needs = [TCP_ITERATOR]
);
/// Also when an entry becomes active again, in whatever way.
fn each_change_that_covers_sockets_is_followed_by_a_walk() -> anyhow::Result<()> {
    const CIDR: &str = "10.88.0.0/24";
    let mut env = TestEnv::new()?;
    let near = policy("initial_rto = \"100ms\"\nrto_min = \"8ms\"");
    env.configure(&format!("apply_to_open = true\n{near}"))?;
    env.start()?;
    env.cli(&["remove", CIDR])?;
    let mut pair = begin(&env, plain())?;
    let before = rtos(&env, &mut pair)?;
    assert!(are_kernels(before), "{before:?}");
    env.cli(&["remove", "--undo", CIDR])?;
    env.wait_counted("near", "the walk after remove --undo", |near| {
        near["open_sockets"] == 2
    })?;
    let after = rtos(&env, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    env.cli(&["add", CIDR, "--rto-min", "50ms", "--ttl", "1s"])?;
    env.wait_status("the walk after the end of an entry", |status| {
        caused_by(status, "ttl")
    })?;
    Ok(())
}

test!(a_changed_sysctl_needs_no_walk, needs = [LINEAR_SYNS]);
/// The daemon's output follows it; the program reads the socket's own namespace, so no policy changes.
fn a_changed_sysctl_needs_no_walk() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let near = policy("initial_rto = \"100ms\"");
    env.configure(&format!("apply_to_open = true\n{near}"))?;
    // A namespace with its own sysctls.
    let namespace = format!("--net=/run/netns/{}", env.net.client);
    env.start_under(&["nsenter".to_owned(), namespace])?;
    env.wait_status("the walk at the start", |status| caused_by(status, "start"))?;
    let gives_up = |after: &str| -> anyhow::Result<()> {
        let text = env.cli(&["lookup", "10.88.0.1"])?;
        let expected = format!("connect() gives up after {after}, as without the agent");
        anyhow::ensure!(text.contains(&expected), "{text}");
        Ok(())
    };
    gives_up("131s")?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_linear_timeouts", "1")?;
    let status = env.wait_status("the changed sysctl", |status| {
        status["host"]["tcp_syn_linear_timeouts"] == 1
    })?;
    gives_up("128s")?;
    assert!(caused_by(&status, "start"), "{:#}", status["open_sockets"]);
    Ok(())
}

/// Whether a walk with this cause has ended.
fn caused_by(status: &Value, cause: &str) -> bool {
    let walk = &status["open_sockets"];
    walk["cause"] == cause && walk["running"] == false
}

test!(
    sockets_of_other_cgroups_are_left_alone,
    needs = [TCP_ITERATOR]
);
fn sockets_of_other_cgroups_are_left_alone() -> anyhow::Result<()> {
    let env = TestEnv::with(&policy("rto_min = \"8ms\""))?;
    env.net.reno()?;
    let other = rto_testbed::cgroup::Cgroup::new()?;
    let to = to(SERVER_V4, PORT);
    let server = Traffic::echo_server(&env.net.server, Some(other.path()), to, false)?;
    let mut pair = Pair {
        conversation: Conversation::start(&env.net.client, Some(other.path()), to, plain())?,
        _server: server,
    };
    let walk = env.json(&["apply"])?;
    assert_has(&walk, json!({"policies": {}, "uncovered": 0}));
    let after = rtos(&env, &mut pair)?;
    assert!(are_kernels(after), "{after:?}");
    Ok(())
}

test!(
    sockets_with_a_policy_are_kept_unless_asked,
    needs = [TCP_ITERATOR],
    kept
);
fn kept() -> anyhow::Result<()> {
    let env = TestEnv::with(&policy("rto_min = \"50ms\"\nuser_timeout = \"30s\""))?;
    let mut pair = begin(&env, plain())?;
    env.load(&policy("rto_min = \"8ms\"\nuser_timeout = \"40s\""))?;
    let walk = env.json(&["apply", "--new-only"])?;
    let (_, counts) = only_policy(&walk);
    assert_has(counts, json!({"kept": 2, "changed": 0}));
    assert_eq!(pair.conversation.option(option::USER_TIMEOUT)?, 30_000);
    let walk = env.json(&["apply"])?;
    let (_, counts) = only_policy(&walk);
    assert_has(counts, json!({"kept": 0, "changed": 2}));
    assert_eq!(pair.conversation.option(option::USER_TIMEOUT)?, 40_000);
    let after = rtos(&env, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    Ok(())
}

test!(
    a_larger_rto_min_is_not_claimed_to_raise_the_rto,
    needs = [TCP_ITERATOR]
);
/// The kernel accepts the value and leaves the RTO unchanged: `apply` must report that.
fn a_larger_rto_min_is_not_claimed_to_raise_the_rto() -> anyhow::Result<()> {
    let env = TestEnv::with(&policy("rto_min = \"8ms\""))?;
    let mut pair = begin(&env, plain())?;
    let before = rtos(&env, &mut pair)?;
    assert!(are_short(before), "{before:?}");
    env.load(&policy("rto_min = \"150ms\""))?;
    env.cli_says(&["apply"], "a higher minimum does not raise it")?;
    let after = rtos(&env, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    Ok(())
}

/// A value that the application sets itself, which no policy replaces.
const OWN_USER_TIMEOUT: (i32, i32) = (option::USER_TIMEOUT, 7_000);

const RESTORED: &str =
    "rto_min = \"8ms\"\ndelack_max = \"8ms\"\nthin_linear = true\nuser_timeout = \"30s\"";

fn begin_own(env: &TestEnv) -> anyhow::Result<Pair> {
    let own = Connect::with(|c| c.own = Some(OWN_USER_TIMEOUT));
    begin(env, own)
}

fn restore_env() -> anyhow::Result<(TestEnv, Pair)> {
    let env = TestEnv::with(&policy(RESTORED))?;
    let mut pair = begin_own(&env)?;
    assert_eq!(pair.conversation.option(option::USER_TIMEOUT)?, 7_000);
    assert_eq!(pair.conversation.option(option::THIN_LINEAR)?, 1);
    Ok((env, pair))
}

fn assert_restored(pair: &mut Pair) -> anyhow::Result<()> {
    assert_eq!(pair.conversation.option(option::USER_TIMEOUT)?, 7_000);
    assert_eq!(pair.conversation.option(option::THIN_LINEAR)?, 0);
    // Linux 6.15 reports these as well.
    if let Ok(rto_min) = pair.conversation.option(option::RTO_MIN_US) {
        assert_eq!(rto_min, 200_000);
        assert_eq!(pair.conversation.option(option::DELACK_MAX_US)?, 200_000);
    }
    Ok(())
}

test!(
    detach_restore_restores_former_options,
    needs = [TCP_ITERATOR]
);
fn detach_restore_restores_former_options() -> anyhow::Result<()> {
    let (env, mut pair) = restore_env()?;
    let answer = env.json(&["detach", "--restore"])?;
    let (name, counts) = only_policy(&answer["restored"]);
    assert_eq!(
        (name, &counts["changed"]),
        ("near", &2.into()),
        "{answer:#}"
    );
    assert_eq!(counts["refused"], 0, "{answer:#}");
    assert_eq!(answer["removed"]["links"], 1, "{answer:#}");
    assert_restored(&mut pair)?;
    // New connections have no policy, and attaching again works.
    env.cli(&["attach"])?;
    assert_eq!(env.status()?["healthy"], true);
    Ok(())
}

test!(detach_restore_without_a_daemon, needs = [TCP_ITERATOR]);
fn detach_restore_without_a_daemon() -> anyhow::Result<()> {
    let (mut env, mut pair) = restore_env()?;
    env.end(Signal::SIGKILL)?;
    let text = env.cli(&["detach", "--restore"])?;
    assert!(text.contains("restored on open sockets"), "{text}");
    assert!(text.contains("detached: 1 link and 1 set"), "{text}");
    assert_restored(&mut pair)?;
    assert!(!env.pin_dir().exists());
    Ok(())
}

test!(detach_restore_is_finished_by_root, needs = [TCP_ITERATOR]);
/// The daemon with the unit's capabilities does what it can and keeps the maps; the command run by root does the rest.
fn detach_restore_is_finished_by_root() -> anyhow::Result<()> {
    let mut env = configured(&policy(RESTORED))?;
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&env)?;
    let mut alone = env.socket_request("POST", "/v1/detach", "{\"restore\":true}")?;
    let kept = alone["kept"].take();
    assert_eq!(kept, env.pin_dir().display().to_string(), "{alone:#}");
    assert!(env.pin_dir().exists());
    assert_eq!(pair.conversation.option(option::THIN_LINEAR)?, 1);
    // The program is detached nevertheless; neither another request nor a stop makes the daemon forget.
    assert_eq!(env.status()?["attachment"]["attached"], false);
    let again = env.socket_request("POST", "/v1/detach", "{\"restore\":true}")?;
    assert!(again["kept"].is_string(), "{again:#}");
    env.end(Signal::SIGTERM)?;
    assert!(env.pin_dir().exists());
    // Another start does not either: the sockets are still known.
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    assert_eq!(env.status()?["found_at_start"], "maps-kept");
    env.end(Signal::SIGKILL)?;
    let answer = env.json(&["detach", "--restore"])?;
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    assert!(!env.pin_dir().exists());
    drop(pair);
    // The same with a single command.
    env.cli(&["attach"])?;
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&env)?;
    let answer = env.json(&["detach", "--restore"])?;
    let (_, counts) = only_policy(&answer["restored"]);
    assert_eq!(counts["changed"], 2, "{answer:#}");
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    assert!(!env.pin_dir().exists());
    Ok(())
}

test!(
    detach_restore_with_entries_added_during_it,
    needs = [TCP_ITERATOR]
);
/// The maps store the sockets' original options; entries for which there is no room must not replace them.
fn detach_restore_with_entries_added_during_it() -> anyhow::Result<()> {
    let mut env = configured(&format!("max_entries = 2\n{}", policy(RESTORED)))?;
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&env)?;
    assert_eq!(pair.conversation.option(option::THIN_LINEAR)?, 1);
    // This socket is in the daemon's own namespace, the only one that it can walk; the pair is not.
    let held = LockedSocket::new()?;
    let socket = env.socket();
    let is_done = AtomicBool::new(false);
    let detach = || {
        let stream = UnixStream::connect(socket)?;
        let answer = http::request(stream, "POST", "/v1/detach", "{\"restore\":true}")?;
        is_done.store(true, Ordering::Relaxed);
        Ok(serde_json::from_str::<Value>(&answer.body)?)
    };
    let (detached, _) = rto_tests::beside(detach, || {
        let _released = held;
        env.wait_status("the detachment", |s| s["attachment"]["attached"] == false)?;
        let add = ["add", "10.1.0.0/16", "10.2.0.0/16", "--policy", "near"];
        let added = env.cli(&add);
        ensure!(!is_done.load(Ordering::Relaxed), "the socket was not held");
        added
    })?;
    assert!(detached["kept"].is_string(), "{detached:#}");
    env.end(Signal::SIGKILL)?;
    let answer = env.json(&["detach", "--restore"])?;
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    drop(pair);
    // With the next start there is room for them.
    env.cli(&["attach"])?;
    env.start()?;
    env.status_has(json!({"entries": 4, "healthy": true}))?;
    Ok(())
}

test!(
    detach_restore_reaches_handshakes_and_former_policies,
    needs = [TCP_ITERATOR]
);
fn detach_restore_reaches_handshakes_and_former_policies() -> anyhow::Result<()> {
    let (env, mut pair) = restore_env()?;
    // The socket's policy is removed while the socket is open, and another connection is still in its handshake.
    env.load("[policy.later]\nrto_min = \"50ms\"\ncidrs = [\"10.88.1.0/24\"]\n")?;
    env.net.server_drops(&format!("tcp dport {}", PORT + 1))?;
    let connecting = env.connect(to(SERVER_V4_OTHER, PORT + 1))?;
    thread::sleep(Duration::from_millis(100));
    let answer = env.json(&["detach", "--restore"])?;
    // The policy that left the files is kept for a while.
    let changed = |policy: &str| &answer["restored"]["policies"][policy]["changed"];
    assert_eq!(
        (changed("near"), changed("later")),
        (&2.into(), &1.into()),
        "{answer:#}"
    );
    drop(connecting);
    env.net.drop_nothing()?;
    assert_restored(&mut pair)
}

test!(
    without_restore_sockets_keep_their_options,
    needs = [TCP_ITERATOR]
);
fn without_restore_sockets_keep_their_options() -> anyhow::Result<()> {
    let (env, mut pair) = restore_env()?;
    env.cli(&["detach"])?;
    assert_eq!(pair.conversation.option(option::THIN_LINEAR)?, 1);
    Ok(())
}

test!(unreachable_namespaces_are_reported, needs = [TCP_ITERATOR]);
/// With the capabilities of the unit only its own namespace can be walked, which the daemon reports.
fn unreachable_namespaces_are_reported() -> anyhow::Result<()> {
    let mut env = configured(&policy("initial_rto = \"100ms\"\nrto_min = \"8ms\""))?;
    env.start_under(&bounded(&["rto-agent.service"])?)?;
    let _pair = begin(&env, plain())?;
    let output = env.try_cli(&["apply"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("CAP_SYS_ADMIN"), "{text}");
    // The daemon cannot probe either, which it reports as well.
    let status = env.wait_status("the probe", |status| status["probe"].is_object())?;
    assert_eq!(status["probe"]["verdict"], "not-probed", "{status:#}");
    assert_eq!(status["healthy"], true, "{status:#}");
    Ok(())
}

test!(
    with_the_drop_in_all_namespaces_are_reached,
    needs = [TCP_ITERATOR]
);
/// With the drop-in's capabilities as well, the daemon reaches all namespaces.
fn with_the_drop_in_all_namespaces_are_reached() -> anyhow::Result<()> {
    let mut env = configured(&policy("initial_rto = \"100ms\"\nrto_min = \"8ms\""))?;
    env.start_under(&bounded(&["rto-agent.service", "open-sockets.conf"])?)?;
    let _pair = begin(&env, plain())?;
    let walk = env.json(&["apply"])?;
    assert_has(&walk, json!({"skipped": [], "problems": []}));
    let (_, counts) = only_policy(&walk);
    assert_eq!(counts["seen"], 2, "{walk:#}");
    let status = env.wait_status("the probe", |status| status["probe"].is_object())?;
    assert_eq!(status["probe"]["verdict"], "good", "{status:#}");
    Ok(())
}
