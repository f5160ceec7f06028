//! Determines which side of each connection is the host that captured it.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use super::{Capture, Flow};

/// An address is the host's (or a peer's) if at least this many connections confirm it for each one that contradicts.
const AGREE: u64 = 19;

/// The result of [`Capture::retain_sent_by_host`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// Addresses that are taken for the host's, because their packets are answered later than the peers'.
    pub measured: BTreeSet<IpAddr>,
    /// Number of connections that are left out, because neither side can be identified as the host.
    pub undecided: usize,
    /// Number of flows that an option selects although the peer's packets are answered later: the option may name the
    /// wrong side.
    pub reversed: usize,
    /// Number of handshakes that this side answered within a millisecond, as a host does.
    pub prompt: usize,
    /// Number of handshakes that this side answered later.
    pub late: usize,
}

/// A host answers a SYN and a SYN-ACK within this time, microseconds.
const PROMPT_US: u64 = 1_000;

/// Number of connections in which an address's packets are answered later than the other side's, and earlier.
#[derive(Clone, Copy, Debug, Default)]
struct Votes {
    late: u64,
    soon: u64,
}

impl Votes {
    /// Whether the address is the host's; `None` if that is unclear.
    const fn is_host(self) -> Option<bool> {
        if self.late > self.soon.saturating_mul(AGREE) {
            Some(true)
        } else if self.soon > self.late.saturating_mul(AGREE) {
            Some(false)
        } else {
            None
        }
    }
}

/// The shortest time until an answer: delayed ACKs make others longer than the path's round trip.
fn least_us(flow: &Flow) -> Option<u64> {
    let samples = flow.handshake.iter().chain(&flow.data);
    let sampled = samples.map(|sample| sample.rtt_us);
    sampled.chain(flow.unsampled_us.iter().copied()).min()
}

/// Whether the host sent a flow, according to marks in the capture.
fn marked(flow: &Flow, other: Option<&Flow>) -> Option<bool> {
    match (
        flow.sent_by_host,
        other.and_then(|other| other.sent_by_host),
    ) {
        // Both directions have the same mark: loopback, or forwarded.
        (Some(own), Some(other)) if own == other => None,
        (Some(own), _) => Some(own),
        (None, other) => other.map(|is_host| !is_host),
    }
}

impl Capture {
    /// Keeps the flows that the host sent to a selected peer. Only they measure the path: packets of a peer are
    /// answered by the host itself.
    ///
    /// The host's side is the first of these:
    ///
    /// 1. the side with an address in `hosts`, if any are given;
    /// 2. the side that `is_peer` does not accept, if it accepts the other;
    /// 3. the side that the capture marks as the sender;
    /// 4. the side with an address whose packets are answered later than its peers', in all but a few connections.
    ///
    /// Connections whose host is unknown are left out and counted.
    pub fn retain_sent_by_host(
        &mut self,
        hosts: &[IpAddr],
        is_peer: Option<&dyn Fn(IpAddr) -> bool>,
    ) -> Sides {
        let by_key: HashMap<_, _> = self
            .flows
            .iter()
            .enumerate()
            .map(|(index, flow)| ((flow.from, flow.to), index))
            .collect();
        let reverse = |flow: &Flow| {
            let index = by_key.get(&(flow.to, flow.from))?;
            self.flows.get(*index)
        };
        let mut votes: HashMap<IpAddr, Votes> = HashMap::new();
        for flow in &self.flows {
            let own = least_us(flow);
            let other = reverse(flow).and_then(least_us);
            if let (Some(own), Some(other)) = (own, other) {
                let votes = votes.entry(flow.from.ip()).or_default();
                votes.late += u64::from(own > other);
                votes.soon += u64::from(own < other);
            }
        }
        let measured = |flow: &Flow| {
            let of = |ip| votes.get(&ip).and_then(|votes| votes.is_host());
            match (of(flow.from.ip()), of(flow.to.ip())) {
                (Some(true), Some(true)) | (Some(false), Some(false)) | (None, None) => None,
                (Some(own), _) => Some(own),
                (None, other) => other.map(|is_host| !is_host),
            }
        };
        let mut sides = Sides::default();
        let mut keep = |flow: &Flow| {
            let [from, to] = [flow.from, flow.to].map(|end| end.ip().to_canonical());
            let other = reverse(flow);
            let is_own = |ip| hosts.contains(&ip);
            let marked = marked(flow, other);
            let is_wanted = is_peer.is_none_or(|is_peer| is_peer(to));
            let side = if !is_wanted {
                Some(false)
            } else if from == to || (is_own(from) && is_own(to)) {
                // Within the host: keep one of the two directions, the longer one.
                let (own, other) = (least_us(flow), other.and_then(least_us));
                Some(own > other || (own == other && flow.from < flow.to))
            } else if !hosts.is_empty() {
                let is_host = is_own(from);
                sides.reversed += usize::from(is_host && measured(flow) == Some(false));
                Some(is_host)
            } else if is_peer.is_some_and(|is_peer| !is_peer(from)) {
                let is_host = marked != Some(false);
                sides.reversed += usize::from(is_host && measured(flow) == Some(false));
                Some(is_host)
            } else {
                let by_time = marked.is_none().then(|| measured(flow)).flatten();
                if by_time == Some(true) {
                    sides.measured.insert(from);
                }
                marked.or(by_time)
            };
            let is_counted = other.is_none() || flow.from < flow.to;
            sides.undecided += usize::from(side.is_none() && is_counted);
            if side == Some(true) {
                for sample in other.into_iter().flat_map(|other| &other.handshake) {
                    sides.prompt += usize::from(sample.rtt_us <= PROMPT_US);
                    sides.late += usize::from(sample.rtt_us > PROMPT_US);
                }
            }
            side == Some(true)
        };
        let kept: Vec<bool> = self.flows.iter().map(&mut keep).collect();
        let mut kept = kept.into_iter();
        self.flows.retain(|_| kept.next().unwrap_or_default());
        sides
    }
}
