//! Classifies the packets on a link and locates them in their flows.

use std::{collections::HashMap, net::SocketAddr};

use etherparse::LaxSlicedPacket;

use crate::capture::tcp;

/// The direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client's namespace to the server's.
    ToServer,
    /// From the server's to the client's.
    ToClient,
}

impl Direction {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::ToServer, Self::ToClient];
}

/// The kind of a TCP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A SYN, with or without data.
    Syn,
    /// A SYN-ACK.
    SynAck,
    /// A segment with data, whatever its other flags but RST.
    Data,
    /// An ACK alone; also a keepalive probe.
    Ack,
    /// A FIN without data.
    Fin,
    /// A reset.
    Rst,
}

/// A TCP packet that the link has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The direction.
    pub direction: Direction,
    /// The kind.
    pub kind: Kind,
    /// Port of the client's end.
    pub client_port: u16,
    /// Port of the server's end.
    pub server_port: u16,
    /// The packet's first sequence number.
    pub seq: u32,
    /// Acknowledgment number, if ACK is set.
    pub ack: Option<u32>,
    /// Bytes of data.
    pub payload: u32,
    /// Number of data bytes in its flow before its first byte; `None` if the link has not seen the SYN.
    pub offset: Option<u64>,
    /// Whether the link has seen all its sequence numbers before, dropped or not: it is a retransmission.
    pub repeated: bool,
}

/// The state of each flow, from the packets that the link has seen.
#[derive(Debug, Default)]
pub(super) struct Flows(HashMap<Flow, Seen>);

/// One direction of a connection: source and destination.
type Flow = (SocketAddr, SocketAddr);

#[derive(Debug)]
struct Seen {
    /// Sequence number of the first byte of data, if the SYN was seen.
    first: Option<u32>,
    /// The sequence number after the highest one seen.
    next: u32,
    /// Bytes of data before `next`.
    bytes: u64,
}

impl Flows {
    /// Classifies a packet; `None` if it is not TCP.
    pub(super) fn packet(&mut self, direction: Direction, bytes: &[u8]) -> Option<Packet> {
        let (from, to, tcp) = tcp(LaxSlicedPacket::from_ip(bytes).ok()?)?;
        let payload = u32::try_from(tcp.payload().len()).ok()?;
        let kind = match (tcp.syn(), tcp.ack()) {
            _ if tcp.rst() => Kind::Rst,
            (true, false) => Kind::Syn,
            (true, true) => Kind::SynAck,
            _ if payload > 0 => Kind::Data,
            _ if tcp.fin() => Kind::Fin,
            _ => Kind::Ack,
        };
        let (client_port, server_port) = match direction {
            Direction::ToServer => (from.port(), to.port()),
            Direction::ToClient => (to.port(), from.port()),
        };
        let seq = tcp.sequence_number();
        // SYN and FIN occupy a sequence number each (RFC 9293 section 3.4).
        let length = payload + u32::from(tcp.syn()) + u32::from(tcp.fin());
        let (offset, repeated) = if kind == Kind::Rst {
            (None, false)
        } else {
            self.place((from, to), seq, tcp.syn(), length, payload)
        };
        Some(Packet {
            direction,
            kind,
            client_port,
            server_port,
            seq,
            ack: tcp.ack().then(|| tcp.acknowledgment_number()),
            payload,
            offset,
            repeated,
        })
    }

    /// The offset of the first byte, and whether all sequence numbers were seen before.
    fn place(
        &mut self,
        flow: Flow,
        seq: u32,
        syn: bool,
        length: u32,
        payload: u32,
    ) -> (Option<u64>, bool) {
        let end = seq.wrapping_add(length);
        let first = syn.then(|| seq.wrapping_add(1));
        let fresh = Seen {
            first,
            next: end,
            bytes: payload.into(),
        };
        let Some(seen) = self.0.get_mut(&flow) else {
            self.0.insert(flow, fresh);
            return (first.map(|_| 0), false);
        };
        if syn && seen.first != first {
            // A new connection with the same ports.
            *seen = fresh;
            return (Some(0), false);
        }
        let ahead = end.wrapping_sub(seen.next);
        // Sequence numbers wrap: those up to half of the space ahead are new, the others old (RFC 9293 section 3.4).
        let new = length > 0 && ahead != 0 && ahead < 1 << 31;
        let before = seen.next.wrapping_sub(seq);
        let offset = seen.first.map(|_| {
            let data_before = if before < 1 << 31 {
                seen.bytes.saturating_sub(before.into())
            } else {
                // A gap: the bytes that the link has not seen count as data.
                seen.bytes + u64::from(seq.wrapping_sub(seen.next))
            };
            if syn { 0 } else { data_before }
        });
        if new {
            seen.bytes += u64::from(ahead);
            seen.next = end;
        }
        (offset, length > 0 && !new)
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    const CLIENT_PORT: u16 = 40_000;
    const SERVER_PORT: u16 = 80;

    fn bytes(direction: Direction, v6: bool, flags: &str, seq: u32, payload: &[u8]) -> Vec<u8> {
        let (source, destination) = match direction {
            Direction::ToServer => (CLIENT_PORT, SERVER_PORT),
            Direction::ToClient => (SERVER_PORT, CLIENT_PORT),
        };
        let builder = if v6 {
            PacketBuilder::ipv6([0; 16], [1; 16], 64)
        } else {
            PacketBuilder::ipv4([10, 89, 0, 1], [10, 89, 0, 2], 64)
        };
        let mut step = builder.tcp(source, destination, seq, 4);
        for flag in flags.chars() {
            step = match flag {
                'S' => step.syn(),
                'A' => step.ack(5),
                'F' => step.fin(),
                _ => step.rst(),
            };
        }
        let mut packet = Vec::new();
        step.write(&mut packet, payload).unwrap();
        packet
    }

    #[test]
    fn packet_kind_follows_flags_and_payload() {
        use Direction::{ToClient, ToServer};
        for v6 in [false, true] {
            for (direction, flags, data, kind) in [
                (ToServer, "S", "", Kind::Syn),
                (ToServer, "S", "fast open", Kind::Syn),
                (ToClient, "SA", "", Kind::SynAck),
                (ToServer, "A", "", Kind::Ack),
                (ToServer, "A", "x", Kind::Data),
                (ToServer, "AF", "x", Kind::Data),
                (ToClient, "AF", "", Kind::Fin),
                (ToServer, "AR", "", Kind::Rst),
                (ToServer, "R", "", Kind::Rst),
            ] {
                let packet = bytes(direction, v6, flags, 3, data.as_bytes());
                let packet = Flows::default().packet(direction, &packet).unwrap();
                assert_eq!((packet.kind, packet.direction), (kind, direction));
                assert_eq!(
                    (packet.client_port, packet.server_port),
                    (CLIENT_PORT, SERVER_PORT)
                );
                assert_eq!(packet.payload as usize, data.len());
                assert_eq!(packet.ack, flags.contains('A').then_some(5));
            }
        }
        assert_eq!(
            Flows::default().packet(ToServer, b"not a packet"),
            None,
            "bytes"
        );
    }

    /// (flags, relative seq, length) -> (offset, repeated), with an initial sequence number that wraps.
    #[test]
    fn offsets_are_relative_and_repetitions_detected() {
        let isn = u32::MAX - 100;
        let mut flows = Flows::default();
        for (flags, relative, length, offset, repeated) in [
            ("S", 0, 0, Some(0), false),
            ("S", 0, 0, Some(0), true),
            ("A", 1, 0, Some(0), false),
            ("A", 1, 90, Some(0), false),
            ("A", 91, 90, Some(90), false),
            ("A", 91, 90, Some(90), true),
            // The segment before it was lost before it reached the link.
            ("A", 271, 90, Some(270), false),
            ("A", 181, 90, Some(180), true),
            ("A", 361, 0, Some(360), false),
            ("AF", 361, 0, Some(360), false),
            ("AF", 361, 0, Some(360), true),
        ] {
            let data = vec![0; length];
            let seq = isn.wrapping_add(relative);
            let packet = bytes(Direction::ToServer, false, flags, seq, &data);
            let packet = flows.packet(Direction::ToServer, &packet).unwrap();
            assert_eq!(
                (packet.offset, packet.repeated),
                (offset, repeated),
                "{flags} {relative} {length}"
            );
        }
        // A new connection with the same ports.
        let packet = bytes(Direction::ToServer, false, "S", 77, b"");
        let packet = flows.packet(Direction::ToServer, &packet).unwrap();
        assert_eq!((packet.offset, packet.repeated), (Some(0), false));
        // A connection that is older than the link.
        let packet = bytes(Direction::ToClient, false, "A", 77, b"x");
        let packet = flows.packet(Direction::ToClient, &packet).unwrap();
        assert_eq!((packet.offset, packet.repeated), (None, false));
    }
}
