//! Connections that are not the agent's are left alone, and those that are keep the options that the application set.

use rto_testbed::workload::attempts::{Attempt, Attempts};

use super::established::policy;
use crate::prelude::*;

/// Another program's reply: a tenth of a second at HZ 250.
const FOREIGN_JIFFIES: i32 = 25;
const RTO_CB: i32 = 1 << 0;
const RETRANS_CB: i32 = 1 << 1;
const STATE_CB: i32 = 1 << 2;
const RTT_CB: i32 = 1 << 3;

/// Ends of connect() to a black hole, with the number of SYNs of each.
fn fails(env: &TestEnv, address: &str, count: usize) -> anyhow::Result<(Vec<Attempt>, usize)> {
    let to = to(address, PORT);
    let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
    let own = vec![(option::SYNCNT, 2)];
    let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
    let all = Attempts::begin(netns, cgroup, &[to], count, own)?.outcomes()?;
    let sent = syns(&capture.so_far()?, to).len();
    Ok((all, sent))
}

/// Asserts that another program's connections end as they do without the agent.
fn assert_left_alone(config: &str, flags: i32, agent_first: bool) -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let attach = |env: &TestEnv| {
        Foreign::attach_with_own_connections(env.cgroup.path(), FOREIGN_JIFFIES, flags)
    };
    let foreign = attach(&env)?;
    let (control, syns) = fails(&env, SERVER_V4_OTHER, 1)?;
    if agent_first {
        drop(foreign);
        env.configure(config)?;
        env.start()?;
        let foreign = attach(&env)?;
        assert_ends_alike(&env, &control, syns)?;
        drop(foreign);
        return Ok(());
    }
    env.configure(config)?;
    env.start()?;
    assert_ends_alike(&env, &control, syns)?;
    drop(foreign);
    Ok(())
}

fn assert_ends_alike(env: &TestEnv, control: &[Attempt], syns: usize) -> anyhow::Result<()> {
    let (found, sent) = fails(env, SERVER_V4_OTHER, 1)?;
    let ([found], [control]) = (found.as_slice(), control) else {
        bail!("not one each");
    };
    ensure!(
        sent == syns && found.took.abs_diff(control.took) < control.took / 5,
        "{sent} SYNs and {:?} for {syns} and {:?}",
        found.took,
        control.took,
    );
    ensure!(found.before == found.after, "{found:?}");
    Ok(())
}

test!(foreign_connections_are_left_alone);
/// Peers without an entry, and peers that are only counted.
fn foreign_connections_are_left_alone() -> anyhow::Result<()> {
    let near = near("\"10.88.0.0/24\"");
    for config in [near.clone(), format!("count_unmatched = true\n{near}")] {
        for flags in [
            0,
            RTO_CB,
            RTO_CB | RETRANS_CB,
            RTO_CB | RETRANS_CB | STATE_CB,
            15,
        ] {
            for agent_first in [false, true] {
                assert_left_alone(&config, flags, agent_first)
                    .with_context(|| format!("{flags}, agent first: {agent_first}, {config}"))?;
            }
        }
    }
    Ok(())
}

test!(foreign_connections_of_control_arm_are_left_alone);
/// Nearly all of these connections are in the control arm, which the agent counts but does not treat.
fn foreign_connections_of_control_arm_are_left_alone() -> anyhow::Result<()> {
    const COUNT: usize = 40;
    let env = TestEnv::with(&policy("initial_rto = \"100ms\"\nholdout = \"95%\""))?;
    env.net.black_hole(PORT)?;
    let flags = RTO_CB | RETRANS_CB;
    let cgroup = env.cgroup.path();
    let _foreign = Foreign::attach_with_own_connections(cgroup, FOREIGN_JIFFIES, flags)?;
    let (ends, _) = fails(&env, SERVER_V4, COUNT)?;
    let soon = ends
        .iter()
        .filter(|end| end.took < Duration::from_secs(2))
        .count();
    ensure!(soon >= COUNT * 3 / 4, "{soon} of {COUNT}: {ends:?}");
    Ok(())
}

/// Connections that lose a segment after the handshake, while another program overwrites callbacks.
const LOSSY: u64 = 3;

/// What the agent counts by direction ("active", "passive" and "unknown") of connections that this host opens or accepts,
/// and the number of connections with lost callbacks.
fn losses(foreign: Option<(i32, bool)>, incoming: bool) -> anyhow::Result<([u64; 3], u64)> {
    let mut env = TestEnv::new()?;
    env.net.reno()?;
    env.configure(&policy("rto_min = \"48ms\""))?;
    let attach =
        |env: &TestEnv, flags| Foreign::attach_overwriting_established(env.cgroup.path(), flags);
    let mut programs = Vec::new();
    if let Some((flags, false)) = foreign {
        programs.push(attach(&env, flags)?);
    }
    env.start()?;
    if let Some((flags, true)) = foreign {
        programs.push(attach(&env, flags)?);
    }
    let server = to(SERVER_V4, PORT);
    // Only one end is in the agent's cgroup.
    let (here, elsewhere) = (Some(env.cgroup.path()), None);
    let (of_client, of_server) = match incoming {
        true => (elsewhere, here),
        false => (here, elsewhere),
    };
    let _server = Traffic::echo_server(&env.net.server, of_server, server, false)?;
    for _ in 0..LOSSY {
        let mut open = Conversation::start(&env.net.client, of_client, server, Connect::default())?;
        open.rounds(3)?;
        match incoming {
            true => env.net.client_drops(&format!("tcp sport {PORT}"))?,
            false => env.net.server_drops(&format!("tcp dport {PORT}"))?,
        }
        rto_tests::beside(
            || open.rounds(1),
            || {
                thread::sleep(Duration::from_millis(400));
                env.net.drop_nothing()
            },
        )?;
    }
    let of = |near: &Value, direction: &str| {
        ["segments_retransmitted", "tail_loss_probes"]
            .iter()
            .filter_map(|name| near[direction][name].as_u64())
            .sum::<u64>()
    };
    let lost = |near: &Value| {
        ["active", "passive", "unknown"]
            .iter()
            .filter_map(|direction| near[direction]["callbacks_lost"].as_u64())
            .sum::<u64>()
    };
    let stats = eventually_seen(
        "the losses",
        TIMEOUT,
        || Ok(env.json(&["stats", "--policy", "near"])?["policies"]["near"].clone()),
        |near| of(near, "active") + of(near, "passive") + lost(near) >= LOSSY,
    )?;
    let counted = ["active", "passive", "unknown"].map(|direction| of(&stats, direction));
    Ok((counted, lost(&stats)))
}

test!(losses_keep_their_direction_beside_other_programs);
fn losses_keep_their_direction_beside_other_programs() -> anyhow::Result<()> {
    const BPFTUNE: i32 = STATE_CB | RETRANS_CB;
    for (flags, agent_first) in [
        (None, false),
        (Some(BPFTUNE), false),
        (Some(BPFTUNE), true),
        (Some(STATE_CB), false),
        (Some(STATE_CB), true),
        (Some(RTO_CB | RETRANS_CB | RTT_CB), true),
    ] {
        for incoming in [false, true] {
            let foreign = flags.map(|flags| (flags, agent_first));
            let (counted, lost) = losses(foreign, incoming)?;
            eprintln!("{foreign:?}, incoming {incoming}: {counted:?}, lost {lost}");
            let [own, other] = match incoming {
                true => [1, 0],
                false => [0, 1],
            };
            ensure!(counted[other] == 0, "{foreign:?} {incoming}: {counted:?}");
            let is_seen = counted[own] >= LOSSY;
            ensure!(is_seen || lost != 0, "{foreign:?} {incoming}: {counted:?}");
            ensure!(
                (is_seen && lost == 0) || agent_first,
                "{foreign:?} {incoming}: {counted:?}, lost {lost}"
            );
        }
    }
    Ok(())
}

test!(rto_max_is_lifted_from_closed_socket, needs = [RTO_MAX]);
/// The kernel gives a closed socket up soon after its interval has reached the maximum.
fn rto_max_is_lifted_from_closed_socket() -> anyhow::Result<()> {
    for own in [None, Some((option::RTO_MAX_MS, 90_000))] {
        let env = TestEnv::with(&policy("rto_max = \"2s\""))?;
        let _server = env.echo_server(to(SERVER_V4, PORT))?;
        let mut open = env.converse_with(to(SERVER_V4, PORT), Connect::with(|c| c.own = own))?;
        ensure!(open.option(option::RTO_MAX_MS)? == 2_000);
        open.shutdown()?;
        let after = open.option(option::RTO_MAX_MS)?;
        ensure!(
            after == own.map_or(120_000, |(_, own)| own),
            "{own:?}: {after}"
        );
    }
    Ok(())
}

test!(stricter_options_of_application_stay, needs = [RTO_MAX]);
fn stricter_options_of_application_stay() -> anyhow::Result<()> {
    let settings = "rto_min = \"100ms\"\ndelack_max = \"60ms\"\nrto_max = \"10s\"\n\
                    user_timeout = \"20s\"\nthin_linear = false";
    let env = TestEnv::with(&policy(settings))?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    for (number, own, expected) in [
        (option::RTO_MIN_US, 40_000, 40_000),
        (option::RTO_MIN_US, 160_000, 100_000),
        (option::DELACK_MAX_US, 40_000, 40_000),
        (option::DELACK_MAX_US, 160_000, 60_000),
        (option::RTO_MAX_MS, 2_000, 2_000),
        (option::RTO_MAX_MS, 60_000, 10_000),
        (option::USER_TIMEOUT, 5_000, 5_000),
        (option::USER_TIMEOUT, 60_000, 60_000),
        (option::THIN_LINEAR, 1, 1),
    ] {
        let own = Connect::with(|c| c.own = Some((number, own)));
        let mut open = env.converse_with(to(SERVER_V4, PORT), own)?;
        let set = open.option(number)?;
        ensure!(set == expected, "option {number}, {own:?}: {set}");
        // A value set later stays as well, and is the one that is restored.
        open.set_option(number, expected)?;
        open.rounds(2)?;
        ensure!(open.option(number)? == expected, "option {number}");
    }
    Ok(())
}

test!(
    connect_without_memory_gives_up_when_the_kernel_would,
    needs = [RTO_MAX]
);
/// Socket storage is charged to the socket's option memory, which the namespace limits (Linux 6.9).
fn connect_without_memory_gives_up_when_the_kernel_would() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    sysctl(&env.net.client, "net.core.optmem_max", "100")?;
    sysctl(&env.net.client, "net.ipv4.tcp_syn_retries", "1")?;
    for own in [
        vec![],
        vec![(option::SYNCNT, 1)],
        vec![(option::USER_TIMEOUT, 3_000)],
    ] {
        let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
        let both = [SERVER_V4, SERVER_V4_OTHER].map(|address| to(address, PORT));
        let ends = Attempts::begin(netns, cgroup, &both, 1, own.clone())?.outcomes()?;
        let [policy, control] = ends.as_slice() else {
            bail!("{ends:?}");
        };
        ensure!(
            policy.took.abs_diff(control.took) < control.took / 20 + 64 * jiffy(),
            "{own:?}: {policy:?} against {control:?}"
        );
        ensure!(policy.before == policy.after, "{own:?}: {policy:?}");
    }
    let near = env.counted("near")?;
    ensure!(near["storage_failures"].as_u64() > Some(0), "{near:#}");
    Ok(())
}

test!(options_are_restored_after_failed_connect, needs = [RTO_MAX]);
/// Refused, and without an answer.
fn options_are_restored_after_failed_connect() -> anyhow::Result<()> {
    let settings = "initial_rto = \"100ms\"\nthin_linear = true\nrto_max = \"2s\"\n\
                    user_timeout = \"20s\"";
    let env = TestEnv::with(&policy(settings))?;
    env.net.black_hole(PORT)?;
    for (port, result) in [(PORT, "ETIMEDOUT"), (PORT + 1, "ECONNREFUSED")] {
        for own in [
            vec![(option::SYNCNT, 1)],
            vec![(option::SYNCNT, 1), (option::RTO_MAX_MS, 60_000)],
        ] {
            let (netns, cgroup) = (&env.net.client, Some(env.cgroup.path()));
            let to = to(SERVER_V4, port);
            for attempt in Attempts::begin(netns, cgroup, &[to], 1, own)?.outcomes()? {
                ensure!(attempt.result == result, "{attempt:?}");
                ensure!(attempt.before == attempt.after, "{attempt:?}");
            }
        }
    }
    Ok(())
}

test!(doctor_names_program_that_sets_callbacks);
fn doctor_names_program_that_sets_callbacks() -> anyhow::Result<()> {
    let env = TestEnv::with(&policy("initial_rto = \"100ms\""))?;
    let found = |env: &TestEnv| {
        let text = env.try_cli(&["doctor", "--verbose"])?.stdout;
        anyhow::Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let harmless = Foreign::attach_empty(env.cgroup.path())?;
    let text = found(&env)?;
    ensure!(!text.contains("sets callback flags"), "{text}");
    let setter = Foreign::attach_overwriting_established(env.cgroup.path(), STATE_CB)?;
    let text = found(&env)?
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    let named = format!("(id {}, sets callback flags)", setter.program_id()?);
    let other = format!("(id {})", harmless.program_id()?);
    ensure!(text.contains(&named) && text.contains(&other), "{text}");
    Ok(())
}
