//! Brakes on a short initial RTO: their effect on connections when the path changes, breaks or is overloaded, compared
//! with the kernel's own timers, and their effect without the daemon.

use rto_agent_common::direction::ACTIVE;
use rto_testbed::{
    link::Link as _,
    machine::{Machine, jiffy},
    warm::Seen,
    workload::arrivals::Done,
};
use rto_tests::{
    brakes::{InKernel, end_lease, is_budget_for, lease_ns, now_ns},
    handshakes::{Handshake, share_beyond, syns},
    path::Path,
};

use crate::prelude::*;

mod held;
mod overload;

const MS: Duration = Duration::from_millis(1);
/// The clients' timeout, longer than any connection takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Enough rounds for a verdict on a slow path, and one for the ACK of the last answer.
const ROUNDS: u32 = 5;
/// The path's round-trip time, before and after its step.
const RTT: Duration = Duration::from_millis(10);
const SLOW_RTT: Duration = Duration::from_millis(150);
/// A delay that an application notices.
const LATE: Duration = Duration::from_millis(500);

/// Observations that result in an automatic timer of 44 ms: round trips of 10 ms, and one in five of 20 ms.
fn seen(per_s: u64) -> [(u64, u64); 2] {
    [(10_240, per_s - per_s / 5), (20_480, per_s / 5)]
}

/// An environment with automatic timers that were learnt from `per_s` connections per second.
fn warmed_up(per_s: u64, policies: &str) -> anyhow::Result<TestEnv> {
    let mut env = TestEnv::new()?;
    let near =
        "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\ninitial_rto = \"auto\"\n";
    env.configure(&format!("{near}{policies}"))?;
    let seen = Seen {
        each_second: &seen(per_s),
        hz: u32::try_from(Machine::here()?.hz)?,
    };
    let learnt = seen.store(&env, "near")?;
    env.start()?;
    let value = InKernel::of(&env, "near")?.initial_rto();
    ensure!(
        value == Some(learnt),
        "{value:?}, not {learnt:?}: {}",
        env.log()
    );
    Ok(env)
}

test!(a_dead_daemon_leaves_the_brakes);
/// The path steps from 10 to 150 ms after the daemon is killed: 20 copies that are judged spurious blow the fuse.
fn a_dead_daemon_leaves_the_brakes() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const BEFORE: u32 = 50;
    const AFTER: u32 = 350;
    const TIMER: Duration = Duration::from_millis(24);
    /// Spurious copies of the connection whose verdict blows the fuse: one every 24 ms for 150 ms.
    const OF_THE_LAST: usize = 6;
    /// Longest time until the program has processed a packet of the link, on a busy machine.
    const LATEST: Duration = Duration::from_millis(50);
    let env = TestEnv::with(GUARDED)?;
    let mut path = Path::new(env, RTT)?;
    let mut clients = path.clients(PER_S, ROUNDS, PATIENCE)?;
    clients.begin(BEFORE + AFTER)?;
    path.begun(BEFORE as usize)?;
    path.env.end(Signal::SIGKILL)?;
    path.relay.set_delay(SLOW_RTT / 2);
    let step = Instant::now();
    let done = clients.done()?;
    ensure!(done.complete == BEFORE + AFTER, "{done:?}");
    let all = path.handshakes();
    let after: Vec<&Handshake> = all.iter().filter(|one| one.begun() > step).collect();
    // For each connection, the latest time of its verdict and its spurious copies.
    let mut judged: Vec<_> = after
        .iter()
        .filter(|one| one.spurious() > 0)
        .map(|one| Some((one.last_data?, one.spurious())))
        .collect::<Option<_>>()
        .context("a connection without data")?;
    judged.sort_unstable();
    let mut copies = 0;
    let blown = judged.iter().find(|(_, spurious)| {
        copies += spurious;
        copies >= 20 + OF_THE_LAST
    });
    let (blown, _) = *blown.with_context(|| format!("the fuse is not blown: {judged:?}"))?;
    let late: Vec<_> = after
        .iter()
        .filter(|one| one.begun() > blown + LATEST && one.copies() > 0)
        .collect();
    ensure!(late.is_empty(), "{late:?}");
    let later = after.iter().filter(|one| one.begun() > blown + LATEST);
    let later = later.count();
    ensure!(later >= PER_S as usize, "only {later} began later");
    // The control: before that, connections had the policy's timer.
    let timers: Vec<_> = after.iter().filter_map(|one| one.first_timer()).collect();
    let in_time = timers.iter().filter(|timer| **timer < 2 * TIMER).count();
    // A timer counts in jiffies, which lag behind the clock on a busy machine.
    ensure!(
        timers.iter().all(|timer| *timer >= TIMER - jiffy()) && 2 * in_time > timers.len(),
        "{timers:?}"
    );
    let policy = InKernel::of(&path.env, "near")?;
    let brake = policy.brake(&path.env, ACTIVE)?;
    ensure!(brake.is_blown(policy.epoch(ACTIVE)), "{brake:?}");
    eprintln!(
        "{} connections with {copies} spurious copies, {} judged; blown after {:?}; {brake:?}",
        judged.len(),
        brake.spurious,
        blown - step
    );
    // A loss now costs as much as with the kernel's own timers.
    path.env.net.black_hole(PORT)?;
    path.env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)
}

test!(a_step_of_the_path_raises_the_timer);
/// The same while the daemon runs, with a timer that it has learnt.
fn a_step_of_the_path_raises_the_timer() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const BEFORE: u32 = 100;
    const AFTER: u32 = 600;
    const RAISED: Duration = Duration::from_millis(300);
    /// The guaranteed 5 s, and the time until this process reads the map on a busy machine.
    const WITHIN: Duration = Duration::from_millis(5_200);
    const CLEAN_AFTER: Duration = Duration::from_secs(4);
    let path = Path::new(warmed_up(PER_S.into(), "")?, RTT)?;
    let before = InKernel::of(&path.env, "near")?.initial_rto();
    let mut clients = path.clients(PER_S, ROUNDS, PATIENCE)?;
    clients.begin(BEFORE + AFTER)?;
    path.begun(BEFORE as usize)?;
    path.relay.set_delay(SLOW_RTT / 2);
    let step = Instant::now();
    let mut values = vec![(Duration::ZERO, before)];
    eventually("end of the connections", 2 * TIMEOUT, || {
        let value = InKernel::of(&path.env, "near")?.initial_rto();
        if values.last().is_none_or(|(_, last)| *last != value) {
            values.push((step.elapsed(), value));
        }
        Ok(clients.are_done()?.then_some(()))
    })?;
    let is_raised = |value: &Option<Duration>| value.is_none_or(|value| value >= RAISED);
    let raised = values.iter().find(|(_, value)| is_raised(value));
    let (took, _) = *raised.with_context(|| format!("{values:?}"))?;
    let changes = values.len() - 1;
    let done = clients.done()?;
    ensure!(done.complete == BEFORE + AFTER, "{done:?}");
    let all = path.handshakes();
    let after: Vec<&Handshake> = all.iter().filter(|one| one.begun() > step).collect();
    let spurious = after.iter().filter(|one| one.spurious() > 0).count();
    let later: Vec<_> = after
        .iter()
        .filter(|one| one.begun() > step + CLEAN_AFTER)
        .collect();
    let later_spurious = later.iter().filter(|one| one.spurious() > 0).count();
    let report = format!(
        "raised after {took:?}; {spurious} spurious of {}, {later_spurious} of {} later; {values:?}",
        after.len(),
        later.len()
    );
    eprintln!("{report}");
    ensure!(took <= WITHIN, "{report}");
    ensure!((1..=200).contains(&spurious), "{report}");
    ensure!(
        later.len() >= 300 && later_spurious * 100 < later.len(),
        "{report}"
    );
    ensure!((1..=3).contains(&changes), "{report}");
    Ok(())
}

/// The SYN timers of an environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timers {
    Kernel,
    /// Learnt: 44 ms.
    Automatic,
    /// 24 ms and guard = "on".
    Guarded,
}

impl Timers {
    /// An environment with these timers, learnt from `per_s` connections per second.
    fn env(self, per_s: u32) -> anyhow::Result<TestEnv> {
        match self {
            Self::Kernel => TestEnv::new(),
            Self::Automatic => warmed_up(per_s.into(), ""),
            Self::Guarded => TestEnv::with(GUARDED),
        }
    }

    /// Makes connections until the daemon has raised the budget to their rate.
    fn warms_up(self, path: &Path, per_s: u32) -> anyhow::Result<()> {
        if self != Self::Guarded {
            return Ok(());
        }
        let budget = || anyhow::Ok(InKernel::of(&path.env, "near")?.budget(ACTIVE));
        let mut clients = path.clients(per_s, 1, PATIENCE)?;
        eventually("budget", TIMEOUT, || {
            clients.run(per_s)?;
            Ok(is_budget_for(budget()?, per_s).then_some(()))
        })?;
        path.relay.forget();
        Ok(())
    }
}

const GUARDED: &str = "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\n\
                       initial_rto = \"24ms\"\nguard = \"on\"\n";

/// The connections before, during and after an outage.
struct Outage {
    all: Vec<Handshake>,
    /// Connections that began during the outage.
    hit: Vec<Handshake>,
    done: Done,
}

/// Makes 100 connections per second, before, during and after an outage.
fn outage(timers: Timers, length: Duration, seconds: u32) -> anyhow::Result<Outage> {
    const PER_S: u32 = 100;
    let path = Path::new(timers.env(PER_S)?, RTT)?;
    timers.warms_up(&path, PER_S)?;
    let mut clients = path.clients(PER_S, 1, PATIENCE)?;
    clients.begin(PER_S * seconds)?;
    path.begun(PER_S as usize)?;
    let outage = path.relay.start_outage(PacketFilter::ALL, length)?;
    let outage = path.relay.end_outage(outage)?;
    let done = clients.done()?;
    let all = path.handshakes();
    let is_hit = |one: &&Handshake| (outage.from..outage.until).contains(&one.begun());
    let hit = all.iter().filter(is_hit).cloned().collect();
    Ok(Outage { all, hit, done })
}

test!(a_short_outage_is_bridged, || short_outage(
    Timers::Automatic
));
test!(a_short_outage_is_bridged_by_a_guarded_timer, || {
    short_outage(Timers::Guarded)
});
/// No connection takes longer than half a second; the control's connections do if they begin during the outage.
fn short_outage(timers: Timers) -> anyhow::Result<()> {
    const LENGTH: Duration = Duration::from_millis(300);
    const SECONDS: u32 = 12;
    const SHARE: f64 = 0.001;
    let (control, agents) = rto_tests::beside(
        || outage(Timers::Kernel, LENGTH, 3),
        || outage(timers, LENGTH, SECONDS),
    )?;
    let [own, kernels] = [&agents, &control].map(|one| share_beyond(&one.all, LATE));
    let report = format!(
        "beyond 500 ms: {own} of {} ({} hit), kernel {kernels} of {} ({} hit)",
        agents.all.len(),
        agents.hit.len(),
        control.all.len(),
        control.hit.len()
    );
    eprintln!("{report}");
    ensure!(
        agents.hit.len() >= 20 && control.hit.len() >= 20,
        "{report}"
    );
    ensure!(own <= SHARE, "{report}");
    let hit = share_beyond(&control.hit, LATE);
    ensure!(hit > 0.9, "{hit}: {report}");
    Ok(())
}

test!(a_long_outage_is_not_flooded, || long_outage(
    Timers::Automatic
));
test!(a_long_outage_is_not_flooded_by_a_guarded_timer, || {
    long_outage(Timers::Guarded)
});
fn long_outage(timers: Timers) -> anyhow::Result<()> {
    const LENGTH: Duration = Duration::from_secs(10);
    const SECONDS: u32 = 12;
    const SYNS: f64 = 1.1;
    const TRIES: u32 = 4;
    let measured = || {
        let outage = |timers| outage(timers, LENGTH, SECONDS);
        rto_tests::beside(|| outage(timers), || outage(Timers::Kernel))
    };
    // A connection that begins near the end of an outage sends fewer SYNs. If the machine stalls during one of the two
    // outages, they are not comparable.
    let is_alike = |a: usize, b: usize| a.abs_diff(b) * 50 <= a.max(b);
    let (mut agents, mut control) = measured()?;
    for _ in 1..TRIES {
        if is_alike(agents.hit.len(), control.hit.len()) {
            break;
        }
        (agents, control) = measured()?;
    }
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let [own, kernels] =
        [&agents, &control].map(|one| syns(&one.hit) as f64 / one.hit.len() as f64);
    let report = format!(
        "{own:.2} SYNs a connection, kernel {kernels:.2}; {} and {} hit; {:?} and {:?}",
        agents.hit.len(),
        control.hit.len(),
        agents.done,
        control.done
    );
    eprintln!("{report}");
    ensure!(own <= SYNS * kernels, "{report}");
    // The control: the first connection of the outage had the short timer.
    let first = agents.hit.first().and_then(Handshake::first_timer);
    ensure!(
        first.is_some_and(|timer| timer < LATE),
        "{first:?}: {report}"
    );
    Ok(())
}

test!(an_automatic_timer_ends_with_its_lease);
/// A timer that the operator has configured stays.
fn an_automatic_timer_ends_with_its_lease() -> anyhow::Result<()> {
    /// The budget for this rate is so large that the connections to the black hole do not spend half of it.
    const PER_S: u64 = 1_000;
    let mut env = warmed_up(
        PER_S,
        "[policy.other]\ncidrs = [\"10.88.1.0/24\"]\ninitial_rto = \"100ms\"\n",
    )?;
    let value = InKernel::of(&env, "near")?.initial_rto();
    let value = value.context("no value")?;
    env.net.black_hole(PORT)?;
    let _server = env.serve(to("0.0.0.0", PORT + 1))?;
    let timers = |env: &TestEnv, automatic: Duration| -> anyhow::Result<()> {
        for (address, timer) in [(SERVER_V4, automatic), (SERVER_V4_OTHER, POLICY_RTO)] {
            env.assert_syn_gap(to(address, PORT), timer)
                .context(address)?;
        }
        Ok(())
    };
    timers(&env, value)?;
    env.end(Signal::SIGKILL)?;
    timers(&env, value).context("without the daemon")?;
    end_lease(&env)?;
    timers(&env, KERNEL_RTO).context("after the lease")?;
    env.start()?;
    let renewed = eventually("renewed lease", TIMEOUT, || {
        Ok((lease_ns(&env)? > now_ns()?).then_some(()))
    });
    renewed?;
    timers(&env, value).context("with the daemon back")
}
