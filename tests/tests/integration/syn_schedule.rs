//! A connecting socket while its SYNs are lost, and after that: when it connects or gives up, its options, its congestion
//! window, and what happens to it when the program goes.

use rto_agent_common::schedules::SOCKETS;
use std::net::SocketAddr;

use rto_testbed::{
    emulated::record,
    machine::Machine,
    netns::{CLIENT_V4, Lost, lose_handshakes, nft},
    warm::Seen,
    workload::{
        Program,
        attempts::{Attempts, Own},
    },
};
use rto_tests::pinned;

use crate::prelude::*;

/// Largest difference of a deadline from the kernel's own, as a share of it.
const TOLERANCE: f64 = 0.02;
/// The same for deadlines below 3.5 s: two steps of the timer wheel's level for timers of a second, at HZ 250.
const STEPS: Duration = Duration::from_millis(70);
/// It begins with the first SYN and ends between two of the kernel's own.
const OUTAGE: Duration = Duration::from_millis(2300);
const MANY: usize = 200;
/// Few enough that each is read thousands of times a second.
const READ: usize = 40;
/// How much later than the kernel alone a connection may be: a step of the timer wheel, and the time to notice.
const LATE: Duration = Duration::from_millis(60);

fn covered() -> anyhow::Result<TestEnv> {
    TestEnv::with(&near("\"10.88.0.0/24\""))
}

fn begin(env: &TestEnv, address: &str, count: usize, own: Own) -> anyhow::Result<Attempts> {
    let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
    Attempts::begin(netns, cgroup, &[to(address, PORT)], count, own)
}

/// The servers with a policy and without.
fn both() -> [SocketAddr; 2] {
    [SERVER_V4, SERVER_V4_OTHER].map(|address| to(address, PORT))
}

/// Begins connections with the agent and as many without, in turn, at the same time.
fn begin_both(env: &TestEnv, count: usize, own: &Own) -> anyhow::Result<Attempts> {
    let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
    Attempts::begin(netns, cgroup, &both(), count, own.clone())
}

/// Waits for all; returns the longest with the agent and the longest without. Asserts that they end with this result and
/// with their original options.
fn end_both(begun: Attempts, result: &str) -> anyhow::Result<[Duration; 2]> {
    let mut longest = [Duration::ZERO; 2];
    for pair in begun.outcomes()?.as_chunks::<2>().0 {
        for (longest, attempt) in longest.iter_mut().zip(pair) {
            ensure!(attempt.result == result, "{attempt:?}");
            ensure!(attempt.before == attempt.after, "{attempt:?}");
            *longest = attempt.took.max(*longest);
        }
    }
    Ok(longest)
}

test!(connect_gives_up_when_the_kernel_would);
fn connect_gives_up_when_the_kernel_would() -> anyhow::Result<()> {
    let env = covered()?;
    env.net.black_hole(PORT)?;
    let syncnt = |n| vec![(option::SYNCNT, n)];
    let user_timeout = |ms| vec![(option::USER_TIMEOUT, ms)];
    let cases = [
        vec![],
        syncnt(1),
        syncnt(2),
        syncnt(3),
        syncnt(6),
        user_timeout(300),
        user_timeout(2500),
        user_timeout(8000),
        vec![(option::SYNCNT, 2), (option::USER_TIMEOUT, 30_000)],
    ];
    all_equal(&env, "100 ms", cases)?;
    let short = near("\"10.88.0.0/24\"").replace("100ms", "20ms");
    let env = silent(&short)?;
    let cases = [user_timeout(6000), user_timeout(20_000), syncnt(2)];
    all_equal(&env, "20 ms", cases)
}

test!(
    connect_gives_up_by_its_namespaces_linear_timeouts,
    needs = [LINEAR_SYNS]
);
/// The agent's own namespace has other sysctls.
fn connect_gives_up_by_its_namespaces_linear_timeouts() -> anyhow::Result<()> {
    for linear in ["0", "1"] {
        let env = covered()?;
        env.net.black_hole(PORT)?;
        sysctl(&env.net.client, "net.ipv4.tcp_syn_linear_timeouts", linear)?;
        sysctl(&env.net.client, "net.ipv4.tcp_syn_retries", "3")?;
        let cases = [vec![], vec![(option::SYNCNT, 1)], vec![(option::SYNCNT, 2)]];
        all_equal(&env, &format!("linear timeouts {linear}"), cases)?;
    }
    Ok(())
}

/// Asserts that connections with and without the agent give up at the same time. All cases run in parallel, because the
/// longest takes minutes.
fn all_equal<const N: usize>(env: &TestEnv, what: &str, cases: [Own; N]) -> anyhow::Result<()> {
    let begun = cases.map(|own| (begin_both(env, 1, &own), own));
    let mut differences = Vec::new();
    for (both, own) in begun {
        let [policy, control] = end_both(both?, "ETIMEDOUT")?;
        let mut tolerance = control.mul_f64(TOLERANCE).max(STEPS);
        if control > Duration::from_secs(3) {
            // The kernel's last timer can be 2 s or more, and late by up to 64 jiffies, a step of its level.
            tolerance += 64 * jiffy();
        }
        ensure!(
            policy.abs_diff(control) <= tolerance,
            "{what} {own:?}: {policy:?} against {control:?}"
        );
        differences.push(policy.as_secs_f64() - control.as_secs_f64());
    }
    let earliest = differences.iter().copied().fold(f64::INFINITY, f64::min);
    let latest = differences.into_iter().fold(f64::NEG_INFINITY, f64::max);
    record(
        &format!("connect() that fails, against the kernel alone, {what}"),
        &format!("{earliest:+.2} to {latest:+.2} s"),
    );
    Ok(())
}

/// The number of connecting sockets with a schedule.
fn schedules(env: &TestEnv) -> anyhow::Result<u64> {
    pinned::get(env, maps::SCHEDULES, SOCKETS)
}

/// Connects sockets that have options of the application, through an outage during which something happens to the agent.
fn options_come_back(
    on_exit: &str,
    event: fn(&mut TestEnv) -> anyhow::Result<Option<Foreign>>,
) -> anyhow::Result<()> {
    let near = near("\"10.88.0.0/24\"");
    let mut env = TestEnv::with(&format!("on_exit = \"{on_exit}\"\n{near}"))?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    env.net.server_loses_syns_for(OUTAGE)?;
    // A deadline that is not the schedule's.
    let mut own = vec![(option::USER_TIMEOUT, 200_000), (option::SYNCNT, 9)];
    if !lacks("tcp-rto-max")? {
        own.push((option::RTO_MAX_MS, 60_000));
    }
    let attempts = begin(&env, SERVER_V4, MANY, own)?;
    let schedules = || schedules(&env);
    eventually_seen("a schedule of each", TIMEOUT, schedules, |sockets| {
        *sockets == MANY as u64
    })?;
    let _foreign = event(&mut env)?;
    for attempt in attempts.outcomes()? {
        ensure!(attempt.result == "connected", "{attempt:?}");
        ensure!(attempt.before == attempt.after, "{attempt:?}");
    }
    Ok(())
}

fn run(env: &TestEnv, args: &[&str]) -> anyhow::Result<Option<Foreign>> {
    env.cli(args).map(|_| None)
}

fn end(env: &mut TestEnv, signal: Signal) -> anyhow::Result<Option<Foreign>> {
    env.end(signal).map(|_| None)
}

fn set_callbacks(env: &TestEnv, flags: i32) -> anyhow::Result<Option<Foreign>> {
    let foreign = Foreign::attach_setting_callbacks(env.cgroup.path(), flags)?;
    Ok(Some(foreign))
}

test!(options_come_back_after_an_outage, || {
    options_come_back("detach", |_| Ok(None))
});
test!(options_come_back_after_detach, || {
    options_come_back("detach", |env| run(env, &["detach"]))
});
test!(options_come_back_after_detach_without_a_daemon, || {
    options_come_back("detach", |env| {
        end(env, Signal::SIGKILL)?;
        run(env, &["detach"])
    })
});
test!(options_come_back_after_kill, || {
    options_come_back("detach", |env| end(env, Signal::SIGKILL))
});
test!(options_come_back_after_stop, || {
    options_come_back("detach", |env| end(env, Signal::SIGTERM))
});
test!(options_come_back_after_stop_that_keeps, || {
    options_come_back("keep", |env| end(env, Signal::SIGTERM))
});
test!(options_come_back_after_restart, || {
    options_come_back("detach", |env| env.restart(Signal::SIGKILL).map(|()| None))
});
test!(options_come_back_after_removed_entry, || {
    options_come_back("detach", |env| run(env, &["remove", "10.88.0.0/24"]))
});
test!(options_come_back_without_callbacks, || {
    options_come_back("detach", |env| set_callbacks(env, 0))
});
test!(options_come_back_with_other_callbacks, || {
    const RTO_AND_RETRANS: i32 = 3;
    options_come_back("detach", |env| set_callbacks(env, RTO_AND_RETRANS))
});

test!(socket_connected_again_has_no_schedule_of_before);
/// Another program has cleared all callbacks, so the agent's program does not see the first attempt end.
fn socket_connected_again_has_no_schedule_of_before() -> anyhow::Result<()> {
    let policy = near("\"10.88.0.0/24\"").replace("100ms", "8ms");
    for then in [SERVER_V4, SERVER_V4_OTHER] {
        let env = TestEnv::with(&policy)?;
        let _server = env.echo_server(to(then, PORT + 1))?;
        env.net.black_hole(PORT)?;
        let _foreign = Foreign::attach_setting_callbacks(env.cgroup.path(), 0)?;
        let options = Connect::with(|c| c.first_unanswered = Some(to(SERVER_V4, PORT)));
        let mut open = env.converse_with(to(then, PORT + 1), options)?;
        let found = [
            open.option(option::USER_TIMEOUT)?,
            open.option(option::SYNCNT)?,
        ];
        ensure!(found == [0, 6], "{then}: {found:?}");
        ensure!(schedules(&env)? == 0, "{then}");
    }
    Ok(())
}

/// The number of programs at the cgroup.
fn programs(env: &TestEnv) -> anyhow::Result<usize> {
    Ok(programs_at(env.cgroup.path(), SOCK_OPS)?.len())
}

/// Waits until each of these attempts has a schedule.
fn await_schedules(env: &TestEnv, count: usize) -> anyhow::Result<()> {
    let all = count as u64;
    eventually_seen(
        "a schedule of each",
        TIMEOUT,
        || schedules(env),
        |sockets| *sockets == all,
    )?;
    Ok(())
}

/// Asserts that attempts connect no later than those without the agent, which began at the same time, and with their
/// original options.
fn assert_not_late(begun: Attempts, when: &str) -> anyhow::Result<()> {
    let [policy, control] = end_both(begun, "connected").with_context(|| when.to_owned())?;
    let tolerance = LATE.max(control.mul_f64(0.05));
    ensure!(
        policy <= control + tolerance,
        "{when}: {policy:?} against {control:?}"
    );
    Ok(())
}

test!(detach_leaves_program_for_connecting_sockets);
/// The outage outlasts the detachment: attempts under way keep their schedule, new ones have the kernel's own timer, and
/// the program goes when the last attempt has ended.
fn detach_leaves_program_for_connecting_sockets() -> anyhow::Result<()> {
    let env = covered()?;
    let _servers = [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
    env.net.black_hole(PORT)?;
    let begun = begin_both(&env, 20, &vec![])?;
    await_schedules(&env, 20)?;
    let answer = env.cli(&["detach"])?;
    ensure!(
        answer.contains("20 connections still connecting"),
        "{answer}"
    );
    let status = env.status()?;
    let problem = status["attachment"]["problem"].as_str().unwrap_or_default();
    ensure!(problem.contains("still connecting"), "{status}");
    env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)?;
    env.net.drop_nothing()?;
    assert_not_late(begun, "detached")?;
    eventually_seen(
        "no program",
        TIMEOUT,
        || programs(&env),
        |programs| *programs == 0,
    )?;
    env.cli(&["attach"])?;
    env.net.black_hole(PORT)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)
}

test!(attach_treats_again_while_sockets_connect);
fn attach_treats_again_while_sockets_connect() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    let attempts = begin(&env, SERVER_V4, 5, vec![])?;
    await_schedules(&env, 5)?;
    env.cli(&["detach"])?;
    env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)?;
    env.cli(&["attach"])?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    drop(attempts);
    Ok(())
}

test!(stop_leaves_program_that_start_and_detach_remove);
/// A daemon that has to stop waits for five seconds. What is left treats no new connection.
fn stop_leaves_program_that_start_and_detach_remove() -> anyhow::Result<()> {
    for start in [true, false] {
        let mut env = silent(&format!(
            "on_exit = \"detach\"\n{}",
            near("\"10.88.0.0/24\"")
        ))?;
        let attempts = begin(&env, SERVER_V4, 5, vec![])?;
        await_schedules(&env, 5)?;
        env.end(Signal::SIGTERM)?;
        ensure!(programs(&env)? == 1, "the program is gone");
        env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)?;
        if start {
            env.start()?;
            env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
            drop(attempts);
            continue;
        }
        // Its sockets are closed, so nothing is connecting.
        drop(attempts);
        env.cli(&["detach"])?;
        ensure!(programs(&env)? == 0, "detach leaves the program");
    }
    Ok(())
}

test!(replaced_programs_keep_schedules);
/// Each start replaces the program of the one before, over the same maps.
fn replaced_programs_keep_schedules() -> anyhow::Result<()> {
    let mut env = covered()?;
    let _servers = [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
    env.net.server_loses_syns_for(Duration::from_millis(5600))?;
    let begun = begin_both(&env, MANY, &vec![])?;
    await_schedules(&env, MANY)?;
    for _ in 0..8 {
        env.restart(Signal::SIGKILL)?;
    }
    assert_not_late(begun, "replaced")
}

test!(sockets_that_are_read_keep_schedules);
/// A timer that expires while a thread holds the lock of its socket runs when the lock is released
/// (`tcp_release_cb()`, Linux 6.18).
fn sockets_that_are_read_keep_schedules() -> anyhow::Result<()> {
    let env = covered()?;
    let _servers = [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
    env.net.server_loses_syns_for(Duration::from_millis(5600))?;
    let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
    let begun = Attempts::begin_read(netns, cgroup, &both(), READ)?;
    await_schedules(&env, READ)?;
    assert_not_late(begun, "read")
}

test!(sockets_whose_syns_the_host_drops_keep_schedules, || {
    // A firewall rule: sending fails with EPERM.
    let drops = "add table inet t\nadd chain inet t out { type filter hook output priority 0; }\n\
                 add rule inet t out tcp flags & (syn|ack) == syn drop\n";
    drops_of_the_host(
        LATE,
        |env| nft(&env.net.client, &["-f", "-"], drops).map(drop),
        |env| nft(&env.net.client, &["flush", "ruleset"], "").map(drop),
    )
});
test!(sockets_whose_syns_the_queue_drops_keep_schedules, || {
    // A full queue: the kernel arms a timer of half a second (TCP_RESOURCE_PROBE_INTERVAL), and does not run TIMEOUT_INIT.
    // Its probes are in step with the first SYN that is dropped, so either connection may be later by that time.
    let tc = |env: &TestEnv, verb: &str, kind: &str| {
        let client = &env.net.client;
        let line = format!("tc -n {client} qdisc {verb} dev {CLIENT_LINK} root {kind}");
        rto_testbed::process::run(&line).map(drop)
    };
    drops_of_the_host(
        Duration::from_millis(500),
        |env| tc(env, "add", "bfifo limit 1"),
        |env| tc(env, "del", ""),
    )
});
/// The client's own host drops the SYNs for a while. Neither connection may fail, and the policy's is not later than that.
fn drops_of_the_host(
    late: Duration,
    begin: impl Fn(&TestEnv) -> anyhow::Result<()>,
    end: impl Fn(&TestEnv) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let env = covered()?;
    let addresses = [SERVER_V4, SERVER_V4_OTHER];
    let _servers = addresses.map(|address| env.echo_server(to(address, PORT)));
    for address in addresses {
        env.connect_and_close(to(address, PORT))?;
    }
    let ends = addresses.map(|address| (None, to(address, PORT))).to_vec();
    let (program, cgroup) = (Program::built()?, Some(env.cgroup.path()));
    let mut both = Attempts::load(&program, &env.net.client, cgroup, vec![ends], Own::new())?;
    begin(&env)?;
    both.start()?;
    thread::sleep(OUTAGE);
    ensure!(!both.have_ended()?, "nothing was dropped");
    end(&env)?;
    let ended = both.outcomes()?;
    for attempt in &ended {
        ensure!(attempt.result == "connected", "{ended:?}");
        ensure!(attempt.before == attempt.after, "{ended:?}");
        ensure!(attempt.took > OUTAGE, "{ended:?}");
    }
    ensure!(ended[0].took <= ended[1].took + late, "{ended:?}");
    Ok(())
}

test!(flow_label_is_kept_for_a_second, needs = [TXREHASH]);
/// Behind a router that hashes the label, another one leads to another server. The kernel alone changes it with the first
/// retransmission, after a second.
fn flow_label_is_kept_for_a_second() -> anyhow::Result<()> {
    let second = Duration::from_secs(1);
    let env = TestEnv::with(&near("\"fd88::/64\""))?;
    let syns = labels_in_black_hole(&env, 2 * second)?;
    let (_, label) = syns[0];
    ensure!(label != 0, "{syns:?}");
    let (early, late): (Vec<_>, Vec<_>) = syns.iter().partition(|(after, _)| *after < second);
    ensure!(early.len() >= 5, "{syns:?}");
    ensure!(early.iter().all(|(_, of)| *of == label), "{syns:?}");
    // Each has another of 2^20 labels.
    ensure!(late.iter().all(|(_, of)| *of != label), "{syns:?}");
    Ok(())
}

test!(learnt_timer_changes_flow_label_at_once, needs = [TXREHASH]);
/// An answer would have arrived before the learnt timer, so the path may be dead.
fn learnt_timer_changes_flow_label_at_once() -> anyhow::Result<()> {
    let policy = "[policy.near]\ncidrs = [\"fd88::/64\"]\ninitial_rto = \"auto\"\n";
    let mut env = configured(policy)?;
    let seen = Seen {
        each_second: &[(10_240, 100)],
        hz: u32::try_from(Machine::here()?.hz)?,
    };
    seen.store(&env, "near")?;
    env.start()?;
    let syns = labels_in_black_hole(&env, Duration::from_millis(500))?;
    ensure!(syns[1].0 < Duration::from_millis(200), "{syns:?}");
    ensure!(syns[1].1 != syns[0].1, "{syns:?}");
    Ok(())
}

/// The SYNs of a connection over IPv6 whose packets are lost, until one is sent later than `until`: the time since the
/// first, and the flow label.
fn labels_in_black_hole(env: &TestEnv, until: Duration) -> anyhow::Result<Vec<(Duration, u32)>> {
    env.net.black_hole(PORT)?;
    let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
    let _client = begin(env, SERVER_V6, 1, vec![])?;
    let labels = |all: &[Segment]| {
        let syns = syns(all, to(SERVER_V6, PORT));
        let first = syns.first().map_or(Duration::ZERO, |syn| syn.time);
        let label = |syn: &Segment| (syn.time.saturating_sub(first), syn.flow_label);
        syns.iter().map(label).collect::<Vec<_>>()
    };
    let is_late = |all: &[Segment]| labels(all).last().is_some_and(|(after, _)| *after > until);
    Ok(labels(&capture.wait_for(TIMEOUT, is_late)?))
}

test!(window_is_ten_where_the_kernel_would_retransmit_once);
/// Four SYNs are lost within 0.45 s: the kernel alone would send its second SYN after 1 s.
fn window_is_ten_where_the_kernel_would_retransmit_once() -> anyhow::Result<()> {
    let env = covered()?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let windows = |outage_ms| -> anyhow::Result<Vec<u32>> {
        env.net.drop_nothing()?;
        env.net
            .server_loses_syns_for(Duration::from_millis(outage_ms))?;
        let all = begin(&env, SERVER_V4, 5, vec![])?.outcomes()?;
        Ok(all.iter().map(|attempt| attempt.cwnd).collect())
    };
    let short = windows(450)?;
    ensure!(short.iter().all(|cwnd| *cwnd == 10), "{short:?}");
    // After three of its own retransmissions the kernel begins with one segment, too.
    let long = windows(4500)?;
    ensure!(long.iter().all(|cwnd| *cwnd == 1), "{long:?}");
    Ok(())
}

test!(connect_is_not_later_than_without_the_agent);
/// Outages that end just before a SYN of the kernel's own, and between two.
fn connect_is_not_later_than_without_the_agent() -> anyhow::Result<()> {
    let mut begun = Vec::new();
    for outage_ms in [850, 970, 1500, 1970, 3700, 4970, 5500, 6970, 7400, 10_970] {
        let env = covered()?;
        let servers =
            [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
        env.net
            .server_loses_syns_for(Duration::from_millis(outage_ms))?;
        let both = begin_both(&env, 1, &vec![])?;
        begun.push((env, servers, both, outage_ms));
    }
    for (_env, _servers, both, outage_ms) in begun {
        let [policy, control] = end_both(both, "connected")?;
        let tolerance = if outage_ms < 5000 { LATE } else { 5 * LATE };
        ensure!(
            policy <= control + tolerance,
            "{outage_ms} ms: {policy:?} against {control:?}"
        );
    }
    Ok(())
}

test!(
    outages_are_shorter_with_linear_timeouts,
    needs = [LINEAR_SYNS],
    || shortens_outages("4", &[1, 2, 3, 4, 5, 7, 11, 19], -1.5)
);
test!(outages_are_shorter_without_linear_timeouts, || {
    shortens_outages("0", &[1, 3, 7, 15], -3.5)
});
/// Begins connections with the agent and without in the same moment, at the beginning of outages of up to 20 s, in which
/// SYNs or SYN-ACKs are lost. `slots`: the kernel's own SYNs, seconds; `limit`: of the mean difference from the kernel
/// alone where the client is covered, seconds.
fn shortens_outages(linear: &str, slots: &[u64], limit: f64) -> anyhow::Result<()> {
    let evenly = scaled("outages in each direction", 60, 30);
    let even = (0..evenly).map(|i| Duration::from_millis(50) + OUTAGES * i / (evenly - 1));
    let before = slots
        .iter()
        .map(|slot| Duration::from_secs(*slot) - Duration::from_millis(30));
    let outages: Vec<Duration> = even.chain(before).collect();
    let client = [20, 60, 100, 200, 500].map(|timer| (timer, Covered::Client));
    let both = [20, 100, 500].map(|timer| (timer, Covered::BothEnds));
    let cases = Vec::from_iter(client.into_iter().chain(both));
    thread::scope(|scope| {
        let run = |(timer, covered)| {
            let outages = &outages;
            scope.spawn(move || Sweep::run((linear, timer), covered, outages))
        };
        let runs: Vec<_> = cases.iter().copied().map(run).collect();
        for ((timer, covered), run) in cases.iter().zip(runs) {
            let sweep = run.join().map_err(|_| anyhow::anyhow!("panicked"))??;
            for lost in [Lost::Syns, Lost::SynAcks] {
                let mean = sweep.mean(lost, evenly as usize);
                let worst = sweep.worst(lost);
                let what = format!(
                    "{timer} ms, linear timeouts {linear}, {covered:?} covered, {lost:?} lost"
                );
                eprintln!("{what}: mean {mean:+.2} s, most {worst:+.2} s");
                if *timer == 100 {
                    let what = format!("connect() in outages, against the kernel alone, {what}");
                    record(&what, &format!("{mean:+.2} s, at most {worst:+.2} s"));
                }
                let luck = if lost == Lost::SynAcks { LUCK_S } else { 0.0 };
                ensure!(
                    *covered == Covered::BothEnds || mean <= limit + luck,
                    "{what}: {mean}"
                );
                // Whether the kernel alone is lucky depends on a race between the server's timer and a SYN, so what is late
                // is repeated.
                let late = sweep.late(lost);
                if !late.is_empty() {
                    let again = Sweep::run((linear, *timer), *covered, &late)?;
                    let (late, pairs) = (again.late(lost), Vec::from_iter(again.pairs(lost)));
                    ensure!(late.is_empty(), "{what}: {late:?} in {pairs:?}");
                }
            }
        }
        Ok(())
    })
}

/// What the policy's timers apply to; the kernel's own apply to both ends of the other connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Covered {
    Client,
    BothEnds,
}

/// How much shorter the mean gain may be where SYN-ACKs are lost, seconds: on a busy machine the server's timer often loses
/// the race against a SYN, which also starts it again, and the kernel alone connects up to 4 s earlier.
const LUCK_S: f64 = 0.75;
/// The longest outage of a sweep but 50 ms.
const OUTAGES: Duration = Duration::from_millis(19_950);

/// Durations of connections with the agent and without, by what was lost and by outage.
struct Sweep(Vec<(Lost, Duration, [Duration; 2])>);

impl Sweep {
    fn run(
        (linear, initial_rto_ms): (&str, u64),
        covered: Covered,
        outages: &[Duration],
    ) -> anyhow::Result<Self> {
        const FIRST_PORT: u16 = 20_000;
        let policy = near("\"10.88.0.0/24\"").replace("100ms", &format!("{initial_rto_ms}ms"));
        // On a busy machine the connections begin over more than 1.5 s: a fallback (outage) to the kernel's own schedule.
        let env = TestEnv::with(&format!("{policy}guard = \"off\"\n"))?;
        if !LINEAR_SYNS.is_missing() {
            sysctl(&env.net.client, "net.ipv4.tcp_syn_linear_timeouts", linear)?;
        }
        let addresses = [SERVER_V4, SERVER_V4_OTHER];
        let own = (covered == Covered::BothEnds).then(|| env.cgroup.path());
        let serve = |cgroup, address| {
            Traffic::echo_server(&env.net.server, cgroup, to(address, PORT), false)
        };
        let _servers = [serve(own, SERVER_V4)?, serve(None, SERVER_V4_OTHER)?];
        // Without a neighbour entry, the first packets wait for its address.
        for address in addresses {
            env.connect_and_close(to(address, PORT))?;
        }
        let both = [Lost::Syns, Lost::SynAcks].into_iter();
        let each: Vec<_> = both
            .flat_map(|lost| outages.iter().map(move |outage| (lost, *outage)))
            .zip(FIRST_PORT..)
            .map(|((lost, outage), port)| (port, lost, outage))
            .collect();
        lose_handshakes(&env.net.client, &env.net.server, &each)?;
        let ends = each.iter().map(|(port, ..)| {
            let from = Some(to(CLIENT_V4, *port));
            addresses.map(|address| (from, to(address, PORT))).to_vec()
        });
        let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
        let program = Program::built()?;
        let mut attempts = Attempts::load(&program, netns, cgroup, ends.collect(), Own::new())?;
        attempts.start()?;
        let ended = attempts.outcomes()?;
        let mut durations = Vec::new();
        for ((_, lost, outage), pair) in each.into_iter().zip(ended.chunks(2)) {
            for attempt in pair {
                ensure!(
                    attempt.result == "connected",
                    "{lost:?} {outage:?}: {attempt:?}"
                );
                ensure!(
                    attempt.before == attempt.after,
                    "{lost:?} {outage:?}: {attempt:?}"
                );
            }
            durations.push((lost, outage, [pair[0].took, pair[1].took]));
        }
        Ok(Self(durations))
    }

    /// Outages with both durations, seconds.
    fn pairs(&self, lost: Lost) -> impl Iterator<Item = (f64, f64, f64)> {
        let own = self.0.iter().filter(move |(which, ..)| *which == lost);
        own.map(|(_, outage, [policy, control])| {
            (
                outage.as_secs_f64(),
                policy.as_secs_f64(),
                control.as_secs_f64(),
            )
        })
    }

    /// The mean difference over the first `count` outages, which are evenly spread.
    #[expect(clippy::cast_precision_loss, reason = "tens")]
    fn mean(&self, lost: Lost, count: usize) -> f64 {
        let evenly = self.pairs(lost).take(count);
        evenly
            .map(|(_, policy, control)| policy - control)
            .sum::<f64>()
            / count as f64
    }

    /// The largest difference.
    fn worst(&self, lost: Lost) -> f64 {
        self.pairs(lost)
            .map(|(_, policy, control)| policy - control)
            .fold(f64::NEG_INFINITY, f64::max)
    }

    /// The outages after which it was later than the kernel alone by more than the tolerances of the schedule: a step of
    /// the timer wheel for lost SYNs; for lost SYN-ACKs the server's limit of answers (`tcp_invalid_ratelimit`) and its own
    /// timer besides.
    fn late(&self, lost: Lost) -> Vec<Duration> {
        let is_late = |(outage, policy, control): &(f64, f64, f64)| {
            let tolerance = match lost {
                Lost::Syns if *outage < 5.0 => LATE.as_secs_f64(),
                Lost::Syns => 0.3,
                Lost::SynAcks => (outage / 20.0).max(0.3),
            };
            policy - control > tolerance
        };
        let late = self.pairs(lost).filter(is_late);
        late.map(|(outage, ..)| Duration::from_secs_f64(outage))
            .collect()
    }
}

test!(short_user_timeout_keeps_the_kernels_timer);
/// An attempt with shorter intervals would end before the kernel's own first timeout.
fn short_user_timeout_keeps_the_kernels_timer() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    let own = vec![(option::USER_TIMEOUT, 400)];
    let [policy, control] = end_both(begin_both(&env, 1, &own)?, "ETIMEDOUT")?;
    ensure!(
        policy.abs_diff(control) <= STEPS,
        "{policy:?} against {control:?}"
    );
    Ok(())
}
