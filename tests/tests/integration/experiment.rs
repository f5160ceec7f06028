//! Experiments on connections: a gain or a harm is proven in time, and a treatment that does harm ends.

use rto_tests::path::Path;

use crate::prelude::*;

/// The clients' timeout, longer than any connection takes.
const PATIENCE: Duration = Duration::from_secs(20);
const LATE: Duration = Duration::from_millis(500);

/// An environment with a policy for the link's addresses.
fn policy(settings: &str) -> anyhow::Result<TestEnv> {
    TestEnv::with(&format!(
        "[policy.near]\ncidrs = [\"10.89.0.0/24\"]\nforce = true\n{settings}"
    ))
}

/// The experiment as `experiment show` prints it.
fn shown(env: &TestEnv) -> anyhow::Result<Value> {
    let all = env.json(&["experiment", "show", "near"])?;
    let view = all["experiments"]["near"].clone();
    ensure!(view.is_object(), "{all:#}");
    Ok(view)
}

pub(super) fn count(of: &Value) -> anyhow::Result<u64> {
    of.as_u64().with_context(|| format!("{of} is no count"))
}

fn start(path: &Path, share: &str) -> anyhow::Result<()> {
    let started = path.env.json(&[
        "experiment",
        "start",
        "near",
        "--ramp",
        share,
        "--for",
        "1h",
    ])?;
    ensure!(started["experiment"]["state"] == "running", "{started:#}");
    Ok(())
}

/// A counter, for the treated and the control arm.
fn counts(view: &Value, name: &str) -> anyhow::Result<[u64; 2]> {
    let of = |arm: &str| count(&view["counts"][arm][name]);
    Ok([of("treated")?, of("control")?])
}

/// The bad attempts so far, for both arms.
fn bad(view: &Value) -> anyhow::Result<[u64; 2]> {
    let (attempts, good) = (counts(view, "attempts")?, counts(view, "good")?);
    Ok([0, 1].map(|arm| attempts[arm].saturating_sub(good[arm])))
}

test!(a_gain_is_proven);
/// One in a hundred connections loses its first SYN. Half of them send it again after 100 ms, the others after 1 s: 60
/// of 6,000 SYNs are lost, and 15 late connections in the control arm prove the gain.
fn a_gain_is_proven() -> anyhow::Result<()> {
    const CONNECTIONS: u32 = 6_000;
    const PER_S: u32 = 250;
    let path = Path::new(
        policy("initial_rto = \"100ms\"\n")?,
        Duration::from_millis(10),
    )?;
    start(&path, "50%")?;
    let first = PacketFilter::SYN.first_time();
    path.relay.add(Rule::new(first, DropPattern::Every(100)));
    let mut clients = path.clients(PER_S, 1, PATIENCE)?;
    clients.begin(CONNECTIONS)?;
    let proven = eventually("proven gain", 2 * TIMEOUT, || {
        let view = shown(&path.env)?;
        Ok((view["gain_proven"] == true).then_some(view))
    })?;
    let [treated, control] = bad(&proven)?;
    let attempts: u64 = counts(&proven, "attempts")?.iter().sum();
    ensure!(
        attempts <= CONNECTIONS.into(),
        "{treated} and {control} bad: {proven:#}"
    );
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
            let is_late = bad(view).is_ok_and(|bad| bad == [0, late]);
            attempts.iter().sum::<u64>() == u64::from(CONNECTIONS) && is_late
        },
    )?;
    // No treated connection is late: the true ratio is 0.
    let ratio = &last["result"]["ratio"];
    let (low, high) = (ratio["low"].as_f64(), ratio["high"].as_f64());
    ensure!(
        low == Some(0.0) && high.is_some_and(|high| high < 1.0),
        "{last:#}"
    );
    eprintln!(
        "proven with {attempts} connections, {control} bad in control; at the end {late} late, ratio {low:?} to {high:?}"
    );
    Ok(())
}

test!(impatient_clients_prove_a_gain);
/// Clients give up after 0.3, 0.9, 1 or 3 s, and one in twenty first SYNs is lost. A connection of the control arm may
/// be closed before or after it would be late, which makes no difference: it is neither harm nor a mismatch of the
/// arms.
fn impatient_clients_prove_a_gain() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const SECONDS: u32 = 50;
    let path = Path::new(
        policy("initial_rto = \"100ms\"\n")?,
        Duration::from_millis(10),
    )?;
    start(&path, "50%")?;
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
        |view| view["gain_proven"] == true || view["state"] != "running",
    )?;
    ensure!(view["state"] == "running", "{view:#}");
    eprintln!("{}", view["answer"]);
    Ok(())
}

test!(harm_is_stopped);
/// A timer of 8 ms on a path of 40 ms: each treated connection sends spurious SYNs.
fn harm_is_stopped() -> anyhow::Result<()> {
    const PER_S: u32 = 60;
    const MOST: u32 = 3_000;
    const JUDGED: u64 = 30;
    /// Enough rounds for a verdict on a slow path.
    const ROUNDS: u32 = 5;
    /// Longest time until new connections follow the decision that this process has seen.
    const LATEST: Duration = Duration::from_millis(300);
    let path = Path::new(
        policy("initial_rto = \"8ms\"\n")?,
        Duration::from_millis(40),
    )?;
    start(&path, "10%")?;
    let mut clients = path.clients(PER_S, ROUNDS, PATIENCE)?;
    clients.begin(MOST)?;
    let view = eventually_seen(
        "harm",
        TIMEOUT,
        || shown(&path.env),
        |view| view["state"] == "harm",
    )?;
    let stopped = Instant::now();
    let [treated, control] = counts(&view, "spurious")?;
    eprintln!(
        "stopped with {treated} and {control} spurious: {}",
        view["answer"]
    );
    ensure!(view["share"] == 0.0, "{view:#}");
    ensure!((1..=JUDGED).contains(&treated) && control == 0, "{view:#}");
    // As many connections again: none of them is treated.
    let before = path.handshakes().len();
    path.begun(2 * before + PER_S as usize)?;
    let all = path.handshakes();
    let later = all.iter().filter(|one| one.begun() > stopped + LATEST);
    let (mut count, mut copies) = (0, 0);
    for one in later {
        count += 1;
        copies += one.copies();
    }
    ensure!(count > PER_S && copies == 0, "{copies} copies of {count}");
    // The control: before the stop, some were treated.
    let treated = all.iter().filter(|one| one.copies() > 0).count() as u64;
    ensure!(
        (1..=2 * JUDGED).contains(&treated),
        "{treated} connections with copies"
    );
    Ok(())
}
