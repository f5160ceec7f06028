//! Fallback to the kernel's own timers when the path changes or breaks or the server is overloaded, with and without
//! the daemon.

use rto_agent_common::{direction::ACTIVE, fallback::Fallback};
use rto_testbed::{
    link::Link as _,
    machine::{Machine, jiffy},
    warm::Seen,
    workload::arrivals::Done,
};
use rto_tests::{
    handshakes::{Handshake, share_beyond, syns},
    in_kernel::InKernel,
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

test!(fallback_spurious_begins_without_daemon, || measured(
    fallback_spurious_begins_without_daemon
));
/// The path steps from 10 to 150 ms after the daemon is killed: 20 connections that are judged spurious begin it.
fn fallback_spurious_begins_without_daemon() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const BEFORE: u32 = 50;
    const AFTER: u32 = 350;
    const TIMER: Duration = Duration::from_millis(24);
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
    // For each connection with a spurious copy, the latest time of its verdict.
    let mut judged: Vec<_> = after
        .iter()
        .filter(|one| one.spurious() > 0)
        .map(|one| one.last_data)
        .collect::<Option<_>>()
        .context("a connection without data")?;
    judged.sort_unstable();
    // Connections without one, before the step, count for a hundredth.
    let begin = judged.get(usize::try_from(Fallback::SPURIOUS)?);
    let begin = *begin.with_context(|| format!("no fallback: {judged:?}"))?;
    let late: Vec<_> = after
        .iter()
        .filter(|one| one.begun() > begin + LATEST && one.copies() > 0)
        .collect();
    ensure!(late.is_empty(), "{late:?}");
    let later = after.iter().filter(|one| one.begun() > begin + LATEST);
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
    let fallback = policy.fallback(&path.env, ACTIVE)?;
    ensure!(fallback.is_spurious(policy.epoch(ACTIVE)), "{fallback:?}");
    eprintln!(
        "{} connections with a spurious copy; fallback after {:?}; {fallback:?}",
        judged.len(),
        begin - step
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
    /// 24 ms.
    Guarded,
    /// 24 ms and guard = "off".
    Bare,
}

impl Timers {
    /// An environment with these timers, learnt from `per_s` connections per second.
    fn env(self, per_s: u32) -> anyhow::Result<TestEnv> {
        match self {
            Self::Kernel => TestEnv::new(),
            Self::Automatic => warmed_up(per_s.into(), ""),
            Self::Guarded => TestEnv::with(GUARDED),
            Self::Bare => TestEnv::with(&format!("{GUARDED}guard = \"off\"\n")),
        }
    }
}

const GUARDED: &str = "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\n\
                       initial_rto = \"24ms\"\n";

/// The connections before, during and after an outage.
struct Outage {
    all: Vec<Handshake>,
    /// Connections that began during the outage.
    hit: Vec<Handshake>,
    done: Done,
}

/// Makes connections before, during and after an outage.
fn outage(timers: Timers, per_s: u32, length: Duration, seconds: u32) -> anyhow::Result<Outage> {
    let path = Path::new(timers.env(per_s)?, RTT)?;
    let mut clients = path.clients(per_s, 1, PATIENCE)?;
    clients.begin(per_s * seconds)?;
    path.begun(per_s as usize)?;
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
        || outage(Timers::Kernel, 100, LENGTH, 3),
        || outage(timers, 100, LENGTH, SECONDS),
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
    const LENGTH: Duration = Duration::from_secs(12);
    const SECONDS: u32 = 14;
    const PER_S: u32 = 50;
    const SYNS: f64 = 1.4;
    const TRIES: u32 = 4;
    let measured = || {
        let outage = |timers| outage(timers, PER_S, LENGTH, SECONDS);
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

test!(guarded_and_learnt_timers_keep_gain_of_outages);
/// Mean connect times of connections that begin in repeated outages. The longer ones begin the fallback (outage).
fn guarded_and_learnt_timers_keep_gain_of_outages() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    const OUTAGES: usize = 2;
    /// Of the gain of a timer without fallbacks, in outages of up to a second. That gains 200 ms and more.
    const SHARE: f64 = 0.85;
    /// The largest mean loss in longer ones, milliseconds.
    const LOSS_MS: f64 = 50.0;
    let mean_ms = |timers, length: Duration| -> anyhow::Result<f64> {
        let mut took = Vec::new();
        for _ in 0..OUTAGES {
            let seconds = 2 + u32::try_from(length.as_secs())?;
            let hit = outage(timers, PER_S, length, seconds)?.hit;
            took.extend(hit.iter().filter_map(Handshake::took));
        }
        let (count, sum) = (took.len(), took.iter().sum::<Duration>());
        let begun = length.as_secs_f64() * f64::from(PER_S) * OUTAGES as f64;
        ensure!(count as f64 > 0.8 * begun, "{count} connections");
        Ok(sum.as_secs_f64() * 1e3 / count as f64)
    };
    let mut reports = Vec::new();
    let mut are_kept = true;
    for length in [300, 1000, 1700, 4000].map(Duration::from_millis) {
        let mean_ms = |timers| move || mean_ms(timers, length);
        let both = |one, other| move || rto_tests::beside(mean_ms(one), mean_ms(other));
        let ((kernel, bare), (guarded, learnt)) = rto_tests::beside(
            both(Timers::Kernel, Timers::Bare),
            both(Timers::Guarded, Timers::Automatic),
        )?;
        let [bare, guarded, learnt] = [bare, guarded, learnt].map(|mean_ms| kernel - mean_ms);
        reports.push(format!(
            "outage of {length:?}: kernel {kernel:.0} ms; gain bare {bare:.0}, guarded {guarded:.0}, learnt {learnt:.0}"
        ));
        let least = match length <= Duration::from_secs(1) {
            true => SHARE * bare.max(200.0),
            false => -LOSS_MS,
        };
        are_kept &= guarded.min(learnt) >= least;
    }
    let report = reports.join("\n");
    eprintln!("{report}");
    ensure!(are_kept, "{report}");
    Ok(())
}

test!(dead_host_leaves_timer_to_others);
/// One of the policy's hosts answers no SYN. Every tenth SYN to another host is lost.
fn dead_host_leaves_timer_to_others() -> anyhow::Result<()> {
    const PER_S: u32 = 20;
    const SECONDS: u32 = 12;
    const DEAD: u16 = PORT + 9;
    let path = Path::new(TestEnv::with(GUARDED)?, RTT)?;
    path.env.net.black_hole(DEAD)?;
    path.relay
        .add(Rule::new(PacketFilter::SYN, DropPattern::Every(10)));
    let mut clients = path.clients(PER_S, 1, PATIENCE)?;
    clients.begin(PER_S * SECONDS)?;
    let mut dead = Vec::new();
    for second in 1..=SECONDS {
        dead.push(path.env.connect(to(SERVER_V4, DEAD))?);
        path.begun((PER_S * second) as usize)?;
    }
    clients.done()?;
    let all = path.handshakes();
    let timers: Vec<_> = all.iter().filter_map(Handshake::first_timer).collect();
    eprintln!("{} connections, first timers {timers:?}", all.len());
    ensure!(timers.len() >= 15, "{timers:?}");
    ensure!(timers.iter().all(|timer| *timer < LATE), "{timers:?}");
    Ok(())
}

test!(learning_ignores_handshakes_with_lost_syn_acks, || measured(
    learning_ignores_handshakes_with_lost_syn_acks
));
/// One SYN-ACK in 33 is lost at an RTT of 3 ms: such a handshake takes until the other end's timer, which is no path RTT.
fn learning_ignores_handshakes_with_lost_syn_acks() -> anyhow::Result<()> {
    const NEAR_RTT: Duration = Duration::from_millis(3);
    const RANGE: std::ops::RangeInclusive<Duration> =
        Duration::from_millis(60)..=Duration::from_millis(100);
    let env = TestEnv::with(
        "[policy.near]\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\ninitial_rto = \"auto\"\n",
    )?;
    let path = Path::new(env, NEAR_RTT)?;
    let lossy = DropPattern::Every(33);
    path.relay.add(Rule::new(PacketFilter::SYN_ACK, lossy));
    let value = || anyhow::Ok(InKernel::of(&path.env, "near")?.initial_rto());
    let mut clients = path.clients(100, ROUNDS, PATIENCE)?;
    // The first 300 samples give a value, and later ones do not change it for the worse.
    for _ in 0..2 {
        let done = clients.run(400)?;
        ensure!(done.complete == 400, "{done:?}");
        eventually("learnt value", TIMEOUT, || {
            Ok(value()?.is_some().then_some(()))
        })
        .with_context(|| path.env.log())?;
        let learnt = value()?;
        eprintln!("learnt {learnt:?}");
        ensure!(learnt.is_some_and(|us| RANGE.contains(&us)), "{learnt:?}");
    }
    let lost = path
        .handshakes()
        .iter()
        .filter(|one| one.copies() > 0)
        .count();
    ensure!(lost >= 10, "only {lost} connections retransmitted a SYN");
    Ok(())
}

test!(syn_ack_outage_is_no_fallback_spurious);
/// SYN-ACKs are lost for a second: the copies of that time are needed, however late the answer is.
fn syn_ack_outage_is_no_fallback_spurious() -> anyhow::Result<()> {
    const PER_S: u32 = 50;
    let env = TestEnv::with(&GUARDED.replace("24ms", "100ms"))?;
    let path = Path::with(env, RTT, rto_tests::path::Server::Inside)?;
    let mut clients = path.clients(PER_S, ROUNDS, PATIENCE)?;
    clients.begin(PER_S * 6)?;
    path.begun(PER_S as usize)?;
    let outage = path
        .relay
        .start_outage(PacketFilter::SYN_ACK, Duration::from_secs(1))?;
    path.relay.end_outage(outage)?;
    let done = clients.done()?;
    ensure!(done.complete == PER_S * 6, "{done:?}");
    let fallback = InKernel::of(&path.env, "near")?.fallback(&path.env, ACTIVE)?;
    let near = path.env.json(&["stats"])?["policies"]["near"]["active"].clone();
    let count = |name: &str| near[name].as_u64().unwrap_or_default();
    eprintln!("{fallback:?} {near:#}");
    ensure!(fallback.spurious == 0, "{fallback:?}");
    ensure!(count("retransmitted_handshakes") >= 30, "{near:#}");
    ensure!(
        count("spurious") * 50 <= count("handshake_retransmissions"),
        "{near:#}"
    );
    Ok(())
}
