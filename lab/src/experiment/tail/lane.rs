//! One variant, round-trip time after round-trip time, over a link of its own.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    channel::ControlChannel,
    link::{
        Link as _, RuleId,
        config::LinkConfig,
        relay::Relay,
        retransmits::RetransmitCounts,
        rule::{DropPattern, PacketFilter, Rule},
    },
    netns::sysctl,
    workload::{
        Role,
        flow::{Command, Work},
    },
};

use super::{Plan, Variant};
use crate::{interrupt, topology::Topology};

/// Segments of a flow: an initial window.
pub(super) const SEGMENTS: u32 = 10;
/// Bytes of each, where the MTU is 1500 and timestamps are on.
const MSS: u32 = 1448;
/// Small transactions before a flow: a program that lowers rto_min once per round trip has its way by then.
pub(super) const WARM: u32 = 30;
/// Between flows that begin at the same time otherwise: they do not wait for the processor.
const STAGGER: Duration = Duration::from_millis(3);
/// Segments of the flows without loss: also odd numbers, whose last ACK is delayed.
pub(super) const LENGTHS: (u32, u32) = (8, 12);
/// After each of them.
pub(super) const PAUSE: Duration = Duration::from_millis(60);
/// Packets a second of all flows without loss, about.
const RATE: f64 = 1500.0;
/// Connections at most.
const CONNECTIONS: u32 = 80;

/// Flow completion times with so many of the last segments lost.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) rtt: Duration,
    pub(super) lost: u32,
    pub(super) took_ms: Vec<f64>,
}

/// What was retransmitted without any loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LosslessRun {
    pub(super) rtt: Duration,
    /// Segments with data from the server.
    pub(super) retransmits: RetransmitCounts,
}

/// What came of a variant.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) cells: Vec<Cell>,
    pub(super) calm: Vec<LosslessRun>,
}

pub(super) struct Lane<'a> {
    pub(super) variant: &'a Variant,
    pub(super) number: u8,
    pub(super) seed: u64,
    /// That the agent covers.
    pub(super) cgroup: &'a Path,
    pub(super) plan: &'a Plan,
}

impl Lane<'_> {
    /// Everything; tells how much of the time it takes is over, in milliseconds, each time.
    pub(super) fn run(&self, done: impl Fn(u64)) -> anyhow::Result<Outcome> {
        interrupt::check()?;
        let cgroup = self.variant.policy.as_ref().map(|_| self.cgroup);
        let seed = self.seed ^ u64::from(self.number);
        let topology = Topology::new(Default::default(), self.number, seed, cgroup)?;
        let probes = if self.variant.tlp { "3" } else { "0" };
        sysctl(&topology.net.server, "net.ipv4.tcp_early_retrans", probes)?;
        let relay = topology.link.relay().context("not the emulated link")?;
        let to = topology.server_address();
        let _server = topology.serve(&Role::FlowServer { on: to })?;
        // The sender's timers are what is measured: its peer keeps its own delayed ACKs.
        let mut client = topology.uncovered_client(&Role::FlowClient { to })?;
        client.recv::<()>()?;
        let mut outcome = Outcome::default();
        for &rtt in &self.plan.rtts {
            relay.set_delay(rtt / 2);
            let mut cells: Vec<Cell> = self
                .plan
                .lost
                .iter()
                .map(|&lost| Cell {
                    rtt,
                    lost,
                    took_ms: Vec::new(),
                })
                .collect();
            let flows = (0..self.plan.runs).flat_map(|_| 0..cells.len());
            let flows: Vec<usize> = flows.collect();
            for batch in flows.chunks(at_once(rtt)) {
                interrupt::check()?;
                let lost: Vec<u32> = batch.iter().map(|&cell| cells[cell].lost).collect();
                let took = with_losses(relay, &mut client, &lost)?;
                for (&cell, ms) in batch.iter().zip(took) {
                    cells[cell].took_ms.push(ms);
                }
            }
            outcome.cells.extend(cells);
            done(with_losses_ms(self.plan, rtt));
        }
        for &rtt in &self.plan.calm_rtts {
            interrupt::check()?;
            outcome.calm.push(calm(relay, &mut client, self.plan, rtt)?);
            done(calm_ms(self.plan, rtt));
        }
        Ok(outcome)
    }
}

/// How long that takes, for the bar.
pub(super) fn with_losses_ms(plan: &Plan, rtt: Duration) -> u64 {
    let flows = plan.lost.len() * plan.runs as usize;
    let batches = u32::try_from(flows.div_ceil(at_once(rtt))).unwrap_or(u32::MAX);
    let each = rtt * (WARM + 7) + Duration::from_millis(300);
    u64::try_from((each * batches).as_millis()).unwrap_or(u64::MAX)
}

/// How long that takes, for the bar.
pub(super) fn calm_ms(plan: &Plan, rtt: Duration) -> u64 {
    u64::try_from((rtt * (WARM + 2) + plan.calm_for).as_millis()).unwrap_or(u64::MAX)
}

/// Flows at once: more where they wait longer.
fn at_once(rtt: Duration) -> usize {
    usize::try_from(rtt.as_millis() / 4).map_or(25, |flows| flows.clamp(2, 25))
}

/// A flow over a connection of its own for each of these, which loses so many of its last segments, once;
/// milliseconds each.
fn with_losses(
    relay: &Relay,
    client: &mut ControlChannel,
    lost: &[u32],
) -> anyhow::Result<Vec<f64>> {
    let ports: Vec<u16> = client.request(&Command::Connect(lost.len()))?;
    let mut rules: Vec<(RuleId, u32)> = Vec::new();
    for (port, &lost) in ports.into_iter().zip(lost) {
        // A byte for each transaction before.
        let first = u64::from(WARM) + u64::from((SEGMENTS - lost) * MSS);
        let matching = PacketFilter::SERVER_DATA.of_client(port).from_byte(first);
        let rule = relay.add(Rule::new(matching.first_time(), DropPattern::All));
        rules.push((rule, lost));
    }
    let length = SEGMENTS * MSS;
    let took: Vec<Duration> = client.request(&Command::Run(Work {
        warm: WARM,
        bytes: (length, length, 1),
        flows: 1,
        pause: Duration::ZERO,
        stagger: STAGGER,
    }))?;
    let _recorded = relay.take_log();
    for (rule, lost) in rules {
        let dropped = relay.remove(rule)?;
        ensure!(
            dropped == u64::from(lost),
            "{dropped} segments were dropped where {lost} should have been: not one of {MSS} bytes each"
        );
    }
    Ok(took.iter().map(|took| took.as_secs_f64() * 1e3).collect())
}

/// Flows over a link with jitter that loses nothing.
fn calm(
    relay: &Relay,
    client: &mut ControlChannel,
    plan: &Plan,
    rtt: Duration,
) -> anyhow::Result<LosslessRun> {
    relay.set(jittery(rtt));
    let each = rtt + rtt / 4 + PAUSE;
    let packets = f64::from(LENGTHS.0 + LENGTHS.1) / 2.0 * 1.5;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "some dozen"
    )]
    let connections = ((RATE * each.as_secs_f64() / packets) as u32).clamp(1, CONNECTIONS);
    let flows = u32::try_from(plan.calm_for.as_micros() / each.as_micros().max(1))?;
    let (from, to) = (LENGTHS.0 * MSS, LENGTHS.1 * MSS);
    client.request::<Vec<u16>>(&Command::Connect(connections as usize))?;
    let _connecting = relay.take_log();
    client.request::<Vec<Duration>>(&Command::Run(Work {
        warm: WARM,
        bytes: (from, to, MSS),
        flows,
        pause: PAUSE,
        stagger: each / connections,
    }))?;
    // The log begins after the handshakes; what was retransmitted is known all the same.
    let retransmits = RetransmitCounts::of(&relay.take_log(), &PacketFilter::SERVER_DATA);
    ensure!(retransmits.dropped == 0, "the link lost something");
    Ok(LosslessRun { rtt, retransmits })
}

/// A quarter of the round-trip time is jitter.
fn jittery(rtt: Duration) -> LinkConfig {
    LinkConfig {
        delay: rtt / 2,
        jitter: rtt / 8,
        ..LinkConfig::default()
    }
}
