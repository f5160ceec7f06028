//! Extracts a TCP segment from a frame.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    EtherType, IpNumber, LaxNetSlice, LaxSlicedPacket, TcpOptionElement, TransportSlice,
    err::packet::SliceError,
};

use super::file::Frame;

/// Link types, <https://www.tcpdump.org/linktypes.html>.
mod link {
    pub(super) const ETHERNET: u32 = 1;
    pub(super) const RAW: u32 = 101;
    /// `DLT_RAW` of most systems and of OpenBSD, in files that do not use LINKTYPE_RAW.
    pub(super) const DLT_RAW: u32 = 12;
    pub(super) const DLT_RAW_OPENBSD: u32 = 14;
    pub(super) const LINUX_SLL: u32 = 113;
    pub(super) const IPV4: u32 = 228;
    pub(super) const IPV6: u32 = 229;
    pub(super) const LINUX_SLL2: u32 = 276;
}

/// The least EtherType; smaller values are a length (IEEE 802.3), of protocols without IP.
const LEAST_ETHER_TYPE: u16 = 0x0600;
/// Destination ports of VXLAN (IANA's, and Linux's older one) and Geneve.
const TUNNEL_PORTS: [u16; 3] = [4789, 8472, 6081];
/// IP protocols that may contain TCP: IP in IP, IPv6 in IP, GRE and ESP.
const TUNNELS: [u8; 4] = [4, 41, 47, 50];
/// `PACKET_OUTGOING`, and `PACKET_MULTICAST`, the last of the types of received packets (linux/if_packet.h).
const OUTGOING: u8 = 4;
const MULTICAST: u8 = 2;

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
        link::RAW | link::DLT_RAW | link::DLT_RAW_OPENBSD | link::IPV4 | link::IPV6 => {
            from_ip(data)?
        }
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
    let is_cut = matches!(&sliced.stop_err, Some((SliceError::Len(_), _)));
    let (Some(net), Some(payload)) = (&sliced.net, sliced.ip_payload()) else {
        let known = [EtherType::IPV4, EtherType::IPV6, EtherType::ARP];
        return Err(match sliced.ether_payload().map(|it| it.ether_type) {
            _ if is_cut && data.len() < frame.length => Skipped::CutShort,
            Some(EtherType(kind))
                if kind >= LEAST_ETHER_TYPE && !known.contains(&EtherType(kind)) =>
            {
                Skipped::OtherProtocol(kind)
            }
            _ => Skipped::NotTcp,
        });
    };
    let tcp = match &sliced.transport {
        Some(TransportSlice::Tcp(tcp)) => tcp,
        Some(TransportSlice::Udp(udp)) if TUNNEL_PORTS.contains(&udp.destination_port()) => {
            return Err(Skipped::Tunnel);
        }
        _ if TUNNELS.contains(&payload.ip_number.0) => return Err(Skipped::Tunnel),
        _ if payload.ip_number != IpNumber::TCP => return Err(Skipped::NotTcp),
        _ if payload.fragmented => return Err(Skipped::Fragment),
        _ if is_cut => return Err(Skipped::CutShort),
        _ => return Err(Skipped::NotTcp),
    };
    // Where the packet ends, by the IP header. If that has no length (TSO, more than 64 kB), it is the end of the frame.
    let at = |part: &[u8]| part.as_ptr().addr() - data.as_ptr().addr();
    let (from, to, header, length): (IpAddr, IpAddr, _, _) = match net {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let (from, to) = (header.source_addr(), header.destination_addr());
            (from.into(), to.into(), header.slice(), header.total_len())
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            let (from, to) = (header.source_addr(), header.destination_addr());
            (
                from.into(),
                to.into(),
                header.slice(),
                header.payload_length(),
            )
        }
        LaxNetSlice::Arp(_) => return Err(Skipped::NotTcp),
    };
    let end = match (net, usize::from(length)) {
        (_, 0) => frame.length,
        (LaxNetSlice::Ipv6(_), length) => at(header) + header.len() + length,
        (_, length) => at(header) + length,
    };
    let headers = at(tcp.slice()) + tcp.header_slice().len();
    let stamps = tcp.options_iterator().find_map(|option| match option {
        Ok(TcpOptionElement::Timestamp(value, echo)) => Some((value, echo)),
        _ => None,
    });
    Ok(Segment {
        from: SocketAddr::new(from, tcp.source_port()),
        to: SocketAddr::new(to, tcp.destination_port()),
        interface,
        outgoing,
        timestamps: stamps,
        seq: tcp.sequence_number(),
        ack: tcp.ack().then(|| tcp.acknowledgment_number()),
        syn: tcp.syn(),
        fin: tcp.fin(),
        rst: tcp.rst(),
        data: u32::try_from(end.saturating_sub(headers)).unwrap_or(0),
    })
}

fn from_ip(data: &[u8]) -> Result<LaxSlicedPacket<'_>, Skipped> {
    LaxSlicedPacket::from_ip(data).map_err(|_| match data.first().map(|first| first >> 4) {
        Some(4 | 6) | None => Skipped::CutShort,
        Some(_) => Skipped::NotTcp,
    })
}

/// The direction, from the packet type in a Linux cooked header.
const fn direction(kind: Option<&u8>) -> Option<bool> {
    match kind {
        Some(&OUTGOING) => Some(true),
        Some(0..=MULTICAST) => Some(false),
        _ => None,
    }
}

/// The IP packet of a frame whose header has this length and its EtherType at this offset. VLAN tags are removed.
fn network(data: &[u8], at: usize, length: usize) -> Result<LaxSlicedPacket<'_>, Skipped> {
    let kind = data.get(at..at + 2).and_then(|b| b.try_into().ok());
    let kind = kind.map(u16::from_be_bytes).ok_or(Skipped::CutShort)?;
    let rest = data.get(length..).ok_or(Skipped::CutShort)?;
    Ok(LaxSlicedPacket::from_ether_type(EtherType(kind), rest))
}
