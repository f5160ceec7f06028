//! One client after another over one link: as the counters of rules need it.

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use rto_testbed::{
    channel::ControlChannel,
    link::{retransmits::RetransmitCounts, rule::PacketFilter},
    netns::{CLIENT_LINK, SERVER_LINK},
    process::run,
    workload::{
        Role,
        http::{Command, Took},
    },
};

use super::case::{Case, ConnectionReuse, Coverage, SampleSize};
use crate::{
    interrupt,
    topology::{LinkBackend, Topology},
};

/// Of the emulated link, in each direction: a round trip near 3 ms.
pub(super) const DELAY: Duration = Duration::from_micros(1500);
/// After each connection: its last packets are through, and the machine is not busy with a few lanes.
const PAUSE: Duration = Duration::from_millis(20);

/// What a lane is given.
pub(super) struct Lane<'a> {
    pub(super) coverage: Coverage,
    pub(super) number: u8,
    pub(super) backend: LinkBackend,
    pub(super) seed: u64,
    /// That the agent covers.
    pub(super) cgroup: &'a Path,
    /// Requests of a case.
    pub(super) requests: &'a (dyn Fn(SampleSize) -> u32 + Sync),
}

/// What came of a case.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) took: Vec<Took>,
    /// Packets that the rule has dropped.
    pub(super) dropped: u64,
    /// By the emulated link.
    pub(super) retransmits: Option<RetransmitCounts>,
}

impl Outcome {
    pub(super) fn add(&mut self, other: Self) {
        self.took.extend(other.took);
        self.dropped += other.dropped;
        if let Some(retransmits) = other.retransmits {
            self.retransmits = Some(self.retransmits.unwrap_or_default() + retransmits);
        }
    }
}

impl Lane<'_> {
    /// All cases, one after the other; what came of each.
    pub(super) fn run(
        &self,
        cases: &[Case],
        done: impl Fn(&Case),
    ) -> anyhow::Result<Vec<(usize, Outcome)>> {
        interrupt::check()?;
        let cgroup = (self.coverage != Coverage::Kernel).then_some(self.cgroup);
        let seed = self.seed ^ u64::from(self.number);
        let topology = Topology::new(self.backend, self.number, seed, cgroup)?;
        match topology.link.relay() {
            Some(relay) => relay.set_delay(DELAY),
            None => segments_one_by_one(&topology)?,
        }
        let to = topology.server_address();
        let _server = topology.serve(&Role::HttpServer { on: to })?;
        let role = Role::HttpClient { to };
        let mut client = match self.coverage {
            Coverage::Server | Coverage::ServerShort => topology.uncovered_client(&role),
            Coverage::Kernel | Coverage::Agent | Coverage::Auto => topology.client(&role),
        }?;
        client.recv::<()>()?;
        let mut outcomes = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            if !case.is_for(self.coverage) {
                continue;
            }
            interrupt::check()?;
            let outcome = measure(
                &topology,
                &mut client,
                case,
                (self.requests)(case.sample_size),
            );
            outcomes.push((index, outcome.with_context(|| case.title.clone())?));
            done(case);
        }
        Ok(outcomes)
    }
}

/// A veth would carry a response as one packet, which the devices' drivers would segment.
fn segments_one_by_one(topology: &Topology) -> anyhow::Result<()> {
    for (netns, device) in [
        (&topology.net.client, CLIENT_LINK),
        (&topology.net.server, SERVER_LINK),
    ] {
        run(&format!("ip -n {netns} link set {device} gso_max_segs 1"))?;
    }
    Ok(())
}

fn measure(
    topology: &Topology,
    client: &mut ControlChannel,
    case: &Case,
    requests: u32,
) -> anyhow::Result<Outcome> {
    if let Some(relay) = topology.link.relay() {
        let _before = relay.take_log();
    }
    let rule = case
        .rule
        .map(|rule| topology.link.drops(rule))
        .transpose()?;
    let took: Vec<Took> = client.request(&match case.reuse {
        ConnectionReuse::New => Command::NewConnections {
            count: requests,
            pause: PAUSE,
        },
        ConnectionReuse::Kept => Command::KeepAlive(requests),
        ConnectionReuse::Pipelined => Command::Pipelined(requests),
    })?;
    let dropped = rule.map_or(Ok(0), |rule| topology.link.remove(rule))?;
    let retransmits = topology
        .link
        .relay()
        .map(|relay| RetransmitCounts::of(&relay.take_log(), &PacketFilter::ALL));
    Ok(Outcome {
        took,
        dropped,
        retransmits,
    })
}
