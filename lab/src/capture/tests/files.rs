//! Builds packets and capture files.

use std::net::Ipv6Addr;

use etherparse::PacketBuilder;

pub(super) const CLIENT: [u8; 4] = [10, 0, 0, 1];
pub(super) const SERVER: [u8; 4] = [10, 0, 0, 2];

/// A segment from the client or the server, with flags in tcpdump's notation.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) at_us: u64,
    pub(super) from_client: bool,
    pub(super) flags: &'static str,
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) data: usize,
}

pub(super) fn client(at_us: u64, flags: &'static str, seq: u32, ack: u32, data: usize) -> Packet {
    Packet {
        at_us,
        from_client: true,
        flags,
        seq,
        ack,
        data,
    }
}

pub(super) fn server(at_us: u64, flags: &'static str, seq: u32, ack: u32, data: usize) -> Packet {
    Packet {
        from_client: false,
        ..client(at_us, flags, seq, ack, data)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Ethernet,
    Vlan,
    Raw,
    Sll,
    Sll2,
}

pub(super) const LINKS: [Link; 5] = [Link::Ethernet, Link::Vlan, Link::Raw, Link::Sll, Link::Sll2];

impl Link {
    const fn number(self) -> u32 {
        match self {
            Self::Ethernet | Self::Vlan => 1,
            Self::Raw => 101,
            Self::Sll => 113,
            Self::Sll2 => 276,
        }
    }

    pub(super) fn frame(self, packet: &Packet, v6: bool) -> Vec<u8> {
        let (from, to) = if packet.from_client {
            (CLIENT, SERVER)
        } else {
            (SERVER, CLIENT)
        };
        let (from_port, to_port) = if packet.from_client {
            (40_000, 80)
        } else {
            (80, 40_000)
        };
        let mapped = |a: [u8; 4]| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, a[3].into()).octets();
        let ethertype: u16 = if v6 { 0x86dd } else { 0x0800 };
        let mut bytes = Vec::new();
        let data = vec![0; packet.data];
        let tcp = {
            let mut tcp = etherparse::TcpHeader::new(from_port, to_port, packet.seq, 1000);
            tcp.acknowledgment_number = packet.ack;
            for flag in packet.flags.chars() {
                match flag {
                    'S' => tcp.syn = true,
                    '.' => tcp.ack = true,
                    'F' => tcp.fin = true,
                    'R' => tcp.rst = true,
                    other => panic!("{other}"),
                }
            }
            // Longer than a bare header, as with timestamps.
            tcp.set_options_raw(&[1; 12]).unwrap();
            tcp
        };
        match self {
            Self::Ethernet => bytes.extend([0; 12]),
            Self::Vlan => {
                bytes.extend([0; 12]);
                bytes.extend([0x81, 0x00, 0x00, 0x07]);
            }
            Self::Raw => {}
            Self::Sll => bytes.extend([0; 14]),
            Self::Sll2 => {
                bytes.extend(ethertype.to_be_bytes());
                bytes.extend([0, 0, 0, 0, 0, 3]);
                bytes.extend([0; 12]);
            }
        }
        if matches!(self, Self::Ethernet | Self::Vlan | Self::Sll) {
            bytes.extend(ethertype.to_be_bytes());
        }
        if v6 {
            PacketBuilder::ipv6(mapped(from), mapped(to), 64)
                .tcp_header(tcp)
                .write(&mut bytes, &data)
                .unwrap();
        } else {
            PacketBuilder::ipv4(from, to, 64)
                .tcp_header(tcp)
                .write(&mut bytes, &data)
                .unwrap();
        }
        bytes
    }
}

/// The format of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) link: Link,
    pub(super) v6: bool,
    pub(super) ng: bool,
    pub(super) big: bool,
    pub(super) nanos: bool,
    /// Captured bytes per packet.
    pub(super) snap: usize,
}

pub(super) const FORM: Form = Form {
    link: Link::Ethernet,
    v6: false,
    ng: false,
    big: false,
    nanos: false,
    snap: 262_144,
};

/// Begin of the capture, seconds since the epoch.
pub(super) const BEGAN_S: u64 = 1_700_000_000;

impl Form {
    fn u16(self, n: u16) -> [u8; 2] {
        if self.big {
            n.to_be_bytes()
        } else {
            n.to_le_bytes()
        }
    }

    fn u32(self, n: u32) -> [u8; 4] {
        if self.big {
            n.to_be_bytes()
        } else {
            n.to_le_bytes()
        }
    }

    pub(super) fn file(self, packets: &[Packet]) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.ng {
            self.block(
                &mut bytes,
                0x0a0d_0d0a,
                &[
                    &self.u32(0x1a2b_3c4d)[..],
                    &self.u16(1),
                    &self.u16(0),
                    &[0xff; 8],
                ]
                .concat(),
            );
            // if_tsresol 9: nanoseconds.
            let option = [&self.u16(9)[..], &self.u16(1), &[9, 0, 0, 0], &[0; 4]].concat();
            let options: &[u8] = if self.nanos { &option } else { &[] };
            let link = u16::try_from(self.link.number()).unwrap();
            self.block(
                &mut bytes,
                1,
                &[&self.u16(link)[..], &[0, 0], &self.u32(0), options].concat(),
            );
        } else {
            let magic = if self.nanos { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
            bytes.extend(self.u32(magic));
            bytes.extend(self.u16(2));
            bytes.extend(self.u16(4));
            bytes.extend([0; 8]);
            bytes.extend(self.u32(262_144));
            bytes.extend(self.u32(self.link.number()));
        }
        for packet in packets {
            let frame = self.link.frame(packet, self.v6);
            let kept = &frame[..frame.len().min(self.snap)];
            let lengths = [kept.len(), frame.len()].map(|n| self.u32(u32::try_from(n).unwrap()));
            let unit = if self.nanos { 1000 } else { 1 };
            if self.ng {
                let time = (BEGAN_S * 1_000_000 + packet.at_us) * unit;
                let padding = vec![0; kept.len().next_multiple_of(4) - kept.len()];
                self.block(
                    &mut bytes,
                    6,
                    &[
                        &self.u32(0)[..],
                        &self.u32((time >> 32) as u32),
                        &self.u32(time as u32),
                        &lengths[0],
                        &lengths[1],
                        kept,
                        &padding,
                    ]
                    .concat(),
                );
            } else {
                bytes.extend(self.u32((BEGAN_S + packet.at_us / 1_000_000) as u32));
                bytes.extend(self.u32((packet.at_us % 1_000_000 * unit) as u32));
                bytes.extend(lengths.concat());
                bytes.extend(kept);
            }
        }
        bytes
    }

    pub(super) fn block(self, bytes: &mut Vec<u8>, kind: u32, content: &[u8]) {
        let length = self.u32(u32::try_from(content.len() + 12).unwrap());
        bytes.extend(self.u32(kind));
        bytes.extend(length);
        bytes.extend(content);
        bytes.extend(length);
    }
}

/// A connection: handshake of 10 ms, a request answered in 20 ms, FINs.
pub(super) fn connection() -> Vec<Packet> {
    vec![
        client(0, "S", 100, 0, 0),
        server(10_000, "S.", 500, 101, 0),
        client(10_100, ".", 101, 501, 0),
        client(11_000, ".", 101, 501, 300),
        server(31_000, ".", 501, 401, 1000),
        client(31_200, ".", 401, 1501, 0),
        client(40_000, "F.", 401, 1501, 0),
        server(52_000, "F.", 1501, 402, 0),
        client(52_300, ".", 402, 1502, 0),
    ]
}
