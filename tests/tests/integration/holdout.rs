//! Verdicts about a policy's timers: a gain or a harm is proven in time, and proven harm gives new connections the
//! kernel's own timers.

use std::net::Ipv4Addr;

use rto_agent_common::{address::Peer, arm::draws_control};
use rto_testbed::netns::{Lost, lose_handshakes};
use rto_tests::{
    handshakes::Handshake,
    in_kernel::InKernel,
    path::{self, Path},
};

use crate::prelude::*;

/// The clients' timeout, longer than any connection takes.
const PATIENCE: Duration = Duration::from_secs(20);
const LATE: Duration = Duration::from_millis(500);

/// A path with this round-trip time, and an agent that leaves half of its connections to the kernel's timers. Returns
/// once connects are counted.
fn path(settings: &str, round_trip_ms: u64) -> anyhow::Result<Path> {
    let env = TestEnv::with(&format!(
        "on_exit = \"keep\"\n[policy.near]\ncidrs = [\"10.89.0.0/24\"]\nholdout = \"50%\"\nforce = true\n{settings}"
    ))?;
    let path = Path::new(env, Duration::from_millis(round_trip_ms))?;
    eventually_seen(
        "counting",
        TIMEOUT,
        || shown(&path.env),
        |view| view["since_ms"].is_u64(),
    )?;
    Ok(path)
}

/// The comparison as `status` has it.
fn shown(env: &TestEnv) -> anyhow::Result<Value> {
    let status = env.json(&["status"])?;
    let view = status["holdouts"]["near"].clone();
    ensure!(view.is_object(), "{status:#}");
    Ok(view)
}

pub(super) fn count(of: &Value) -> anyhow::Result<u64> {
    of.as_u64().with_context(|| format!("{of} is no count"))
}

/// A count, for the treated and the control arm.
fn counts(view: &Value, name: &str) -> anyhow::Result<[u64; 2]> {
    let of = |arm: &str| count(&view[arm][name]);
    Ok([of("treated")?, of("control")?])
}

fn verdict(path: &Path, verdict: &str) -> anyhow::Result<Value> {
    eventually_seen(
        verdict,
        2 * TIMEOUT,
        || shown(&path.env),
        |view| view["verdict"] == verdict,
    )
}

test!(a_gain_is_proven);
/// One in a hundred connections loses its first SYN. Half of them send it again after 100 ms, the others after 1 s: 60
/// of 6,000 SYNs are lost, and 15 late connections in the control arm prove the gain.
fn a_gain_is_proven() -> anyhow::Result<()> {
    const CONNECTIONS: u32 = 6_000;
    const PER_S: u32 = 250;
    let path = path("initial_rto = \"100ms\"\n", 10)?;
    let first = PacketFilter::SYN.first_time();
    path.relay.add(Rule::new(first, DropPattern::Every(100)));
    let mut clients = path.clients(PER_S, 1, PATIENCE)?;
    clients.begin(CONNECTIONS)?;
    let proven = verdict(&path, "gain")?;
    let attempts: u64 = counts(&proven, "attempts")?.iter().sum();
    ensure!(attempts <= CONNECTIONS.into(), "{proven:#}");
    let done = clients.done()?;
    ensure!(done.complete == CONNECTIONS, "{done:?}");
    // The true number of late connections, from the link's log.
    let all = path.handshakes();
    let late = all.iter().filter(|one| one.is_beyond(LATE)).count() as u64;
    let last = eventually_seen(
        "all connections",
        TIMEOUT,
        || shown(&path.env),
        |view| {
            let attempts = counts(view, "attempts").unwrap_or_default();
            let is_late = counts(view, "bad").is_ok_and(|bad| bad == [0, late]);
            attempts.iter().sum::<u64>() == u64::from(CONNECTIONS) && is_late
        },
    )?;
    // No treated connection is late: the true ratio is 0.
    let ratio = &last["ratio"];
    let (low, high) = (ratio["low"].as_f64(), ratio["high"].as_f64());
    ensure!(
        low == Some(0.0) && high.is_some_and(|high| high < 1.0),
        "{last:#}"
    );
    // Mean connect times differ by the second that one in a hundred waits, less 100 ms.
    let mean_us = last["connect_time_difference"]["mean_us"].as_f64();
    ensure!(
        mean_us.is_some_and(|us| (-30_000.0..-1_000.0).contains(&us)),
        "{last:#}"
    );
    let text = path.env.cli(&["stats"])?;
    ensure!(text.contains("gain: fewer bad connects"), "{text}");
    eprintln!("proven with {attempts} connections; at the end {late} late, ratio {ratio}");
    Ok(())
}

test!(impatient_clients_prove_a_gain);
/// Clients give up after 0.3, 0.9, 1 or 3 s, and one in twenty first SYNs is lost. A connection of the control arm may
/// be closed before or after it would be late, which makes no difference: it is neither harm nor a mismatch of the
/// arms.
fn impatient_clients_prove_a_gain() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const SECONDS: u32 = 50;
    let path = path("initial_rto = \"100ms\"\n", 10)?;
    let first = PacketFilter::SYN.first_time();
    path.relay.add(Rule::new(first, DropPattern::Every(20)));
    let mut all = Vec::new();
    for patience_ms in [300, 900, 1000, 3000] {
        let mut clients = path.clients(PER_S, 1, Duration::from_millis(patience_ms))?;
        clients.begin(PER_S * SECONDS)?;
        all.push(clients);
    }
    let view = eventually_seen(
        "verdict",
        2 * TIMEOUT,
        || shown(&path.env),
        |view| view["verdict"] != "not-yet",
    )?;
    ensure!(view["verdict"] == "gain", "{view:#}");
    Ok(())
}

/// Of connections of the treated arm, some lose their SYN-ACKs for longer than a good attempt takes.
fn treated_lose_syn_acks(path: &Path) -> anyhow::Result<()> {
    let policy = InKernel::of(&path.env, "near")?.policy;
    let server = Peer::V4(RELAY_SERVER_V4.parse::<Ipv4Addr>()?.octets());
    let remote = u32::from(path::PORT.to_be()) << 16;
    let ports = (32_768..61_000_u16).step_by(10);
    let treated = ports.filter(|port| !draws_control(&policy, &server, remote | u32::from(*port)));
    let each = treated.map(|port| (port, Lost::SynAcks, LATE * 6 / 5));
    let (client, server) = (&path.env.net.client, &path.env.net.server);
    lose_handshakes(client, server, &each.collect::<Vec<_>>())
}

test!(proven_harm_gives_new_connections_the_kernels_timers);
/// When connects of the treated arm alone are bad, new connections get the kernel's own timers, also after the daemon was
/// killed, until an operator resumes the policy.
fn proven_harm_gives_new_connections_the_kernels_timers() -> anyhow::Result<()> {
    const PER_S: u32 = 60;
    const MOST: u32 = 6_000;
    /// Evidence must hold for 10 s.
    const UNPROVEN: u64 = 20 * PER_S as u64;
    /// Longest time until new connections follow the decision that this process has seen.
    const LATEST: Duration = Duration::from_millis(300);
    let mut path = path("initial_rto = \"100ms\"\n", 40)?;
    let mut clients = path.clients(PER_S, 1, PATIENCE)?;
    clients.begin(MOST)?;
    let view = eventually_seen(
        "connections",
        2 * TIMEOUT,
        || shown(&path.env),
        |view| {
            let attempts = counts(view, "attempts").unwrap_or_default();
            attempts.iter().sum::<u64>() >= UNPROVEN
        },
    )?;
    ensure!(view["verdict"] == "not-yet", "{view:#}");
    treated_lose_syn_acks(&path)?;
    let view = verdict(&path, "harm")?;
    lose_handshakes(&path.env.net.client, &path.env.net.server, &[])?;
    let stopped = Instant::now();
    ensure!(view["fallback"] == true, "{view:#}");
    let [treated, control] = counts(&view, "bad")?;
    ensure!(treated >= 10 && control * 4 < treated, "{view:#}");
    // As many connections again: none of them is treated.
    let before = path.handshakes().len();
    path.begun(before + 2 * PER_S as usize)?;
    let all = path.handshakes();
    let later = all.iter().filter(|one| one.begun() > stopped + LATEST);
    let copies: Vec<_> = later.map(Handshake::copies).collect();
    ensure!(
        copies.len() > PER_S as usize && copies.iter().all(|copies| *copies == 0),
        "{copies:?}"
    );
    let is_held_back = |env: &TestEnv| {
        let policy = InKernel::of(env, "near")?.policy;
        anyhow::Ok(policy.control_below == u32::MAX)
    };
    ensure!(is_held_back(&path.env)?);
    path.env.end(Signal::SIGKILL)?;
    ensure!(is_held_back(&path.env)?);
    path.env.start()?;
    ensure!(is_held_back(&path.env)?);
    let status = path.env.json(&["status"])?;
    let warnings = status["warnings"].to_string();
    let text = "policy near: fallback (harm): new connections get the kernel's own timers";
    ensure!(warnings.contains(text), "{warnings}");
    path.env.cli(&["tune", "resume", "near"])?;
    ensure!(!is_held_back(&path.env)?);
    let view = shown(&path.env)?;
    ensure!(
        view["verdict"] == "not-yet" && view["fallback"] == false,
        "{view:#}"
    );
    Ok(())
}
