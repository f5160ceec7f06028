//! One client after another over one link: as the counters of rules need it.

use std::{path::Path, time::Duration};

use anyhow::Context as _;

use super::case::{Case, Side, Talk, Volume};
use crate::{
    experiment::Field,
    ground::{
        netns::{CLIENT_LINK, SERVER_LINK},
        process::{Dialogue, run},
    },
    interrupt,
    link::{Medium, repeats::Repeats, rule::Matching},
};

/// Of the emulated link, in each direction: a round trip near 3 ms.
pub(super) const DELAY: Duration = Duration::from_micros(1500);
/// After each connection: its last packets are through, and the machine is not busy with a few lanes.
const PAUSE: Duration = Duration::from_millis(20);

/// What a lane is given.
pub(super) struct Lane<'a> {
    pub(super) side: Side,
    pub(super) number: u8,
    pub(super) medium: Medium,
    pub(super) seed: u64,
    /// That the agent covers.
    pub(super) cgroup: &'a Path,
    /// Requests of a case.
    pub(super) requests: &'a (dyn Fn(Volume) -> u32 + Sync),
}

/// How long a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Took {
    pub(super) us: u64,
    /// It was not answered in that time.
    pub(super) given_up: bool,
}

/// What came of a case.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) took: Vec<Took>,
    /// Packets that the rule has dropped.
    pub(super) dropped: u64,
    /// By the emulated link.
    pub(super) repeats: Option<Repeats>,
}

impl Outcome {
    pub(super) fn add(&mut self, other: Self) {
        self.took.extend(other.took);
        self.dropped += other.dropped;
        if let Some(repeats) = other.repeats {
            self.repeats = Some(self.repeats.unwrap_or_default() + repeats);
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
        let cgroup = (self.side != Side::Kernel).then_some(self.cgroup);
        let seed = self.seed ^ u64::from(self.number);
        let field = Field::new(self.medium, self.number, seed, cgroup)?;
        match field.link.relay() {
            Some(relay) => relay.set_delay(DELAY),
            None => segments_one_by_one(&field)?,
        }
        let _server = field.serve("http-serve", &[])?;
        let mut client = match self.side {
            Side::Server | Side::ServerShort => field.uncovered_client("http-fetch", &[]),
            Side::Kernel | Side::Agent => field.client("http-fetch", &[]),
        }?;
        let mut outcomes = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            if !case.is_for(self.side) {
                continue;
            }
            interrupt::check()?;
            let outcome = measure(&field, &mut client, case, (self.requests)(case.volume));
            outcomes.push((index, outcome.with_context(|| case.title.clone())?));
            done(case);
        }
        Ok(outcomes)
    }
}

/// A veth would carry a response as one packet, which the devices' drivers would segment.
fn segments_one_by_one(field: &Field) -> anyhow::Result<()> {
    for (netns, device) in [
        (&field.net.client, CLIENT_LINK),
        (&field.net.server, SERVER_LINK),
    ] {
        run(&format!("ip -n {netns} link set {device} gso_max_segs 1"))?;
    }
    Ok(())
}

fn measure(
    field: &Field,
    client: &mut Dialogue,
    case: &Case,
    requests: u32,
) -> anyhow::Result<Outcome> {
    if let Some(relay) = field.link.relay() {
        let _before = relay.take_log();
    }
    let rule = case.rule.map(|rule| field.link.drops(rule)).transpose()?;
    let said = client.ask(&match case.talk {
        Talk::New => format!("fetch {requests} {}", PAUSE.as_micros()),
        Talk::Kept => format!("keep {requests}"),
        Talk::Pipelined => format!("pipeline {requests}"),
    })?;
    let dropped = rule.map_or(Ok(0), |rule| field.link.remove(rule))?;
    let repeats = field
        .link
        .relay()
        .map(|relay| Repeats::of(&relay.take_log(), &Matching::ALL));
    let took = said.split(' ').map(|one| {
        let (us, given_up) = one.strip_suffix('!').map_or((one, false), |us| (us, true));
        let us = us.parse().with_context(|| said.clone())?;
        Ok(Took { us, given_up })
    });
    Ok(Outcome {
        took: took.collect::<anyhow::Result<_>>()?,
        dropped,
        repeats,
    })
}
