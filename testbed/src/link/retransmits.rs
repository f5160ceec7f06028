//! Counts retransmissions in the log of the emulated link, and which of them were needed.

use std::{collections::HashMap, iter::Sum, ops::Add};

use serde::Serialize;

use super::{
    packet::{Direction, Kind, Packet},
    relay::Relayed,
    rule::PacketFilter,
};

/// SYNs, SYN-ACKs and segments with data, and how many of them were retransmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RetransmitCounts {
    /// Packets sent, including retransmissions.
    pub sent: u64,
    /// Packets that were dropped.
    pub dropped: u64,
    /// Needed retransmissions: some of their data had never got through before.
    pub needed: u64,
    /// Spurious retransmissions: all their data had got through before, and only the ACK was lost or late.
    pub spurious: u64,
}

impl RetransmitCounts {
    /// Counts the packets that match. Whether an earlier copy got through is decided from the whole log.
    #[must_use]
    pub fn of(log: &[Relayed], filter: &PacketFilter) -> Self {
        let mut through: HashMap<Flow, Ranges> = HashMap::new();
        let mut counts = Self::default();
        for relayed in log {
            let Some((packet, range)) = relayed
                .packet
                .and_then(|packet| Some((packet, range(&packet)?)))
            else {
                continue;
            };
            let flow = through.entry(flow(&packet)).or_default();
            if !packet.repeated && packet.kind != Kind::Data {
                // A new connection, which may have the same ports.
                *flow = Ranges::default();
            }
            if relayed.is(filter) {
                counts.sent += 1;
                counts.dropped += u64::from(relayed.dropped());
                let spurious = packet.repeated && flow.cover(range);
                counts.spurious += u64::from(spurious);
                counts.needed += u64::from(packet.repeated && !spurious);
            }
            if !relayed.dropped() {
                flow.add(range);
            }
        }
        counts
    }
}

impl Add for RetransmitCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            dropped: self.dropped + other.dropped,
            needed: self.needed + other.needed,
            spurious: self.spurious + other.spurious,
        }
    }
}

impl Sum for RetransmitCounts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

type Flow = (Direction, u16, u16);

fn flow(packet: &Packet) -> Flow {
    (packet.direction, packet.client_port, packet.server_port)
}

/// The range of sequence numbers of a packet, relative to its SYN: the SYN has 0, the first byte of data 1.
fn range(packet: &Packet) -> Option<(u64, u64)> {
    match packet.kind {
        Kind::Syn | Kind::SynAck => Some((0, 1)),
        Kind::Data => {
            let from = packet.offset? + 1;
            Some((from, from + u64::from(packet.payload)))
        }
        Kind::Ack | Kind::Fin | Kind::Rst => None,
    }
}

/// Disjoint ranges, no two of them adjacent.
#[derive(Debug, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn add(&mut self, (mut from, mut to): (u64, u64)) {
        self.0.retain(|&(begin, end)| {
            let apart = end < from || to < begin;
            if !apart {
                from = from.min(begin);
                to = to.max(end);
            }
            apart
        });
        self.0.push((from, to));
    }

    fn cover(&self, (from, to): (u64, u64)) -> bool {
        self.0
            .iter()
            .any(|&(begin, end)| begin <= from && to <= end)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    /// (kind, offset, bytes, retransmitted, dropped)
    fn log(all: &[(Kind, u64, u32, bool, bool)]) -> Vec<Relayed> {
        let at = Instant::now();
        all.iter()
            .map(|&(kind, offset, payload, repeated, dropped)| Relayed {
                at,
                time: Duration::ZERO,
                packet: Some(Packet {
                    direction: Direction::ToServer,
                    kind,
                    client_port: 1,
                    server_port: 2,
                    seq: 0,
                    ack: None,
                    payload,
                    offset: Some(offset),
                    repeated,
                }),
                bytes: 0,
                leaves: (!dropped).then_some(at),
            })
            .collect()
    }

    #[test]
    fn retransmissions_are_needed_or_spurious() {
        let all = log(&[
            (Kind::Syn, 0, 0, false, true),
            (Kind::Syn, 0, 0, true, false),
            (Kind::Syn, 0, 0, true, false),
            (Kind::Ack, 0, 0, false, true),
            (Kind::Data, 0, 100, false, false),
            (Kind::Data, 100, 100, false, true),
            // Half of it is needed.
            (Kind::Data, 0, 200, true, true),
            (Kind::Data, 100, 100, true, false),
            (Kind::Data, 0, 200, true, false),
            // A new connection with the same ports.
            (Kind::Syn, 0, 0, false, false),
            (Kind::Data, 0, 100, false, true),
            (Kind::Data, 0, 100, true, false),
        ]);
        let expected = RetransmitCounts {
            sent: 11,
            dropped: 4,
            needed: 4,
            spurious: 2,
        };
        assert_eq!(RetransmitCounts::of(&all, &PacketFilter::ALL), expected);
        let syns = RetransmitCounts::of(&all, &PacketFilter::SYN);
        assert_eq!((syns.needed, syns.spurious), (1, 1));
        assert_eq!(
            RetransmitCounts::of(&all, &PacketFilter::SERVER_DATA).sent,
            0
        );
    }

    proptest! {
        #[test]
        fn ranges_equal_sets(
            all in proptest::collection::vec((0u8..40, 1u8..12), 0..12),
            asked in (0u8..40, 1u8..12),
        ) {
            let range = |(from, length): (u8, u8)| (u64::from(from), u64::from(from + length));
            let indices = |(from, length): (u8, u8)| from.into()..usize::from(from + length);
            let mut ranges = Ranges::default();
            let mut set = [false; 64];
            for one in all {
                ranges.add(range(one));
                set[indices(one)].fill(true);
            }
            let all_in = set[indices(asked)].iter().all(|&is_in| is_in);
            prop_assert_eq!(ranges.cover(range(asked)), all_in);
        }
    }
}
