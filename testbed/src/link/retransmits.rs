//! What was retransmitted, and whether it had to be: from the log of the emulated link.

use std::{collections::HashMap, iter::Sum, ops::Add};

use serde::Serialize;

use super::{
    packet::{Direction, Kind, Packet},
    relay::Relayed,
    rule::PacketFilter,
};

/// SYNs, SYN-ACKs and segments with data, and which of them were retransmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RetransmitCounts {
    /// How many were sent, retransmissions among them.
    pub sent: u64,
    /// How many of them were dropped.
    pub dropped: u64,
    /// Retransmitted, and of what they carry something had been dropped each time.
    pub needed: u64,
    /// Retransmitted, although a copy of all they carry had been let through: only its ACK was lost or late.
    pub spurious: u64,
}

impl RetransmitCounts {
    /// Of the packets that match; whether a copy was let through is looked for in the whole log.
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
                // A new connection, perhaps of the same ports.
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

/// Of sequence numbers: 0 is the SYN's, the first byte of data has 1.
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

/// Disjoint, none touching another.
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
    fn needed_or_not() {
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
            // The same ports again.
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
        fn ranges_are_sets(
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
