//! Extracts a TCP segment from a frame.

use std::net::{IpAddr, SocketAddr};

use etherparse::{EtherType, IpNumber, LaxNetSlice, LaxSlicedPacket};

use super::file::Frame;

/// Link types, <https://www.tcpdump.org/linktypes.html>.
mod link {
    pub(super) const NULL: u32 = 0;
    pub(super) const ETHERNET: u32 = 1;
    /// Raw IP has this number in files of some systems.
    pub(super) const RAW_BSD: u32 = 12;
    pub(super) const RAW_OPENBSD: u32 = 14;
    pub(super) const RAW: u32 = 101;
    pub(super) const LOOP: u32 = 108;
    pub(super) const LINUX_SLL: u32 = 113;
    pub(super) const IPV4: u32 = 228;
    pub(super) const IPV6: u32 = 229;
    pub(super) const LINUX_SLL2: u32 = 276;
}

/// EtherTypes of headers before the IP header.
mod ether {
    pub(super) const VLAN: u16 = 0x8100;
    pub(super) const PROVIDER_VLAN: u16 = 0x88a8;
    pub(super) const OLD_PROVIDER_VLAN: u16 = 0x9100;
    pub(super) const MPLS: u16 = 0x8847;
    pub(super) const MPLS_MULTICAST: u16 = 0x8848;
    pub(super) const PPPOE: u16 = 0x8864;
    /// Smaller values are a length (IEEE 802.3), of protocols without IP.
    pub(super) const LEAST: u16 = 0x0600;
}

/// Destination ports of VXLAN (IANA's, and Linux's older one) and Geneve.
const TUNNEL_PORTS: [u16; 3] = [4789, 8472, 6081];
/// IP protocols that may contain TCP: IP in IP, IPv6 in IP, GRE and ESP.
const TUNNELS: [u8; 4] = [4, 41, 47, 50];
/// `PACKET_OUTGOING`, and `PACKET_MULTICAST`, the last of the types of received packets (linux/if_packet.h).
const OUTGOING: u8 = 4;
const MULTICAST: u8 = 2;

/// The part of a TCP header that is needed: ports, sequence numbers, data offset and flags.
const TCP_NEEDED: usize = 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// The interface in the file, or in the host if the link type shows it.
    pub(super) interface: u32,
    /// Whether the host sent it, if the file or the link type shows that.
    pub(super) outgoing: Option<bool>,
    pub(super) seq: u32,
    /// The acknowledgment number, if ACK is set.
    pub(super) ack: Option<u32>,
    /// TSval and TSecr (RFC 7323).
    pub(super) timestamps: Option<(u32, u32)>,
    pub(super) syn: bool,
    pub(super) fin: bool,
    pub(super) rst: bool,
    /// Bytes of data that were sent, even if fewer were captured.
    pub(super) data: u32,
}

impl Segment {
    /// The number of sequence numbers that it occupies.
    pub(super) fn length(&self) -> u32 {
        self.data + u32::from(self.syn) + u32::from(self.fin)
    }
}

/// Why a frame is not a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Skipped {
    OtherLink,
    OtherProtocol(u16),
    Tunnel,
    NotTcp,
    Fragment,
    CutShort,
}

pub(super) fn segment(frame: &Frame<'_>) -> Result<Segment, Skipped> {
    let data = frame.data;
    let mut interface = frame.interface;
    let mut outgoing = frame.outgoing;
    let sliced = match frame.link {
        link::ETHERNET => network(data, 12, 14)?,
        link::NULL | link::LOOP => from_ip(data.get(4..).ok_or(Skipped::CutShort)?)?,
        link::RAW | link::RAW_BSD | link::RAW_OPENBSD | link::IPV4 | link::IPV6 => from_ip(data)?,
        link::LINUX_SLL => {
            outgoing = outgoing.or_else(|| direction(data.get(1)));
            network(data, 14, 16)?
        }
        link::LINUX_SLL2 => {
            interface = data
                .get(4..8)
                .and_then(|b| b.try_into().ok())
                .map_or(interface, u32::from_be_bytes);
            outgoing = outgoing.or_else(|| direction(data.get(10)));
            network(data, 0, 20)?
        }
        _ => return Err(Skipped::OtherLink),
    };
    let Some(net) = &sliced.net else {
        let is_cut = sliced.stop_err.is_some() && data.len() < frame.length;
        return Err(if is_cut {
            Skipped::CutShort
        } else {
            Skipped::NotTcp
        });
    };
    // The length comes from the IP header. If that is 0 (TSO, more than 64 kB), it is the length of the frame.
    let (from, to, payload, told): (IpAddr, IpAddr, _, _) = match net {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let extensions = ip.extensions().auth.map_or(0, |auth| auth.slice().len());
            let headers = header.slice().len() + extensions;
            let told = usize::from(header.total_len());
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                ip.payload(),
                (told > 0).then(|| told.saturating_sub(headers)),
            )
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            let told = usize::from(header.payload_length());
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                ip.payload(),
                (told > 0).then(|| told.saturating_sub(ip.extensions().slice().len())),
            )
        }
        LaxNetSlice::Arp(_) => return Err(Skipped::NotTcp),
    };
    let tcp = payload.payload;
    let port = tcp
        .get(2..4)
        .and_then(|b| b.try_into().ok())
        .map(u16::from_be_bytes);
    let is_tunnel = TUNNELS.contains(&payload.ip_number.0)
        || (payload.ip_number == IpNumber::UDP && port.is_some_and(|p| TUNNEL_PORTS.contains(&p)));
    if is_tunnel {
        return Err(Skipped::Tunnel);
    }
    if payload.ip_number != IpNumber::TCP {
        return Err(Skipped::NotTcp);
    }
    if payload.fragmented {
        return Err(Skipped::Fragment);
    }
    let Some(header) = tcp
        .get(..TCP_NEEDED)
        .and_then(|b| <[u8; TCP_NEEDED]>::try_from(b).ok())
    else {
        return Err(Skipped::CutShort);
    };
    let [
        p0,
        p1,
        q0,
        q1,
        s0,
        s1,
        s2,
        s3,
        a0,
        a1,
        a2,
        a3,
        offset,
        flags,
    ] = header;
    let length = told.unwrap_or_else(|| {
        let before = data.len() - tcp.len().min(data.len());
        frame.length.saturating_sub(before)
    });
    let header_length = usize::from(offset >> 4) * 4;
    if header_length < 20 {
        return Err(Skipped::NotTcp);
    }
    let data = u32::try_from(length.saturating_sub(header_length)).unwrap_or(0);
    Ok(Segment {
        from: SocketAddr::new(from, u16::from_be_bytes([p0, p1])),
        to: SocketAddr::new(to, u16::from_be_bytes([q0, q1])),
        interface,
        outgoing,
        timestamps: timestamps(
            tcp.get(20..header_length.min(tcp.len()))
                .unwrap_or_default(),
        ),
        seq: u32::from_be_bytes([s0, s1, s2, s3]),
        ack: (flags & 0x10 != 0).then(|| u32::from_be_bytes([a0, a1, a2, a3])),
        syn: flags & 0x02 != 0,
        fin: flags & 0x01 != 0,
        rst: flags & 0x04 != 0,
        data,
    })
}

fn from_ip(data: &[u8]) -> Result<LaxSlicedPacket<'_>, Skipped> {
    LaxSlicedPacket::from_ip(data).map_err(|_| match data.first().map(|first| first >> 4) {
        Some(4 | 6) | None => Skipped::CutShort,
        Some(_) => Skipped::NotTcp,
    })
}

/// The timestamps in a segment's options; `None` if it has none, or they were not captured.
fn timestamps(mut options: &[u8]) -> Option<(u32, u32)> {
    loop {
        options = match options {
            // End of option list; no operation.
            [] | [0, ..] => return None,
            [1, rest @ ..] => rest,
            [8, 10, v0, v1, v2, v3, e0, e1, e2, e3, ..] => {
                let number = |b: [&u8; 4]| u32::from_be_bytes(b.map(|b| *b));
                return Some((number([v0, v1, v2, v3]), number([e0, e1, e2, e3])));
            }
            [_, length, ..] if *length >= 2 => options.get(usize::from(*length)..)?,
            _ => return None,
        };
    }
}

/// The direction, from the packet type in a Linux cooked header.
const fn direction(kind: Option<&u8>) -> Option<bool> {
    match kind {
        Some(&OUTGOING) => Some(true),
        Some(0..=MULTICAST) => Some(false),
        _ => None,
    }
}

/// The IP packet of a frame whose header has this length and its EtherType at this offset. VLAN tags, MPLS labels and
/// PPPoE are removed.
fn network(data: &[u8], at: usize, length: usize) -> Result<LaxSlicedPacket<'_>, Skipped> {
    let word = |data: &[u8], at: usize| {
        let bytes = data.get(at..at + 2).and_then(|b| b.try_into().ok());
        bytes.map(u16::from_be_bytes).ok_or(Skipped::CutShort)
    };
    let after = |data, length| <[u8]>::get(data, length..).ok_or(Skipped::CutShort);
    let mut kind = word(data, at)?;
    let mut rest = after(data, length)?;
    loop {
        match kind {
            ether::VLAN | ether::PROVIDER_VLAN | ether::OLD_PROVIDER_VLAN => {
                kind = word(rest, 2)?;
                rest = after(rest, 4)?;
            }
            ether::MPLS | ether::MPLS_MULTICAST => {
                // The last bit of the third byte marks the bottom of the stack (RFC 3032).
                let is_bottom = word(rest, 2)? & 0x100 != 0;
                rest = after(rest, 4)?;
                if is_bottom {
                    // MPLS has no type for what follows.
                    return from_ip(rest);
                }
            }
            ether::PPPOE => {
                // The protocols of PPP (RFC 2516, RFC 1332, RFC 5072) that carry IP.
                let protocol = word(rest, 6)?;
                rest = after(rest, 8)?;
                return match protocol {
                    0x0021 | 0x0057 => from_ip(rest),
                    _ => Err(Skipped::NotTcp),
                };
            }
            _ => break,
        }
    }
    let sliced = LaxSlicedPacket::from_ether_type(EtherType(kind), rest);
    let is_known = [EtherType::IPV4, EtherType::IPV6, EtherType::ARP].contains(&EtherType(kind))
        || kind < ether::LEAST;
    match sliced.net {
        None if !is_known => Err(Skipped::OtherProtocol(kind)),
        _ => Ok(sliced),
    }
}
