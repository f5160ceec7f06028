//! From a frame to what matters of a TCP segment.

use std::net::{IpAddr, SocketAddr};

use etherparse::{EtherType, IpNumber, LaxNetSlice, LaxSlicedPacket};

use super::file::Frame;

/// Link types, <https://www.tcpdump.org/linktypes.html>.
mod link {
    pub(super) const NULL: u32 = 0;
    pub(super) const ETHERNET: u32 = 1;
    /// What raw IP is called in files of some systems.
    pub(super) const RAW_BSD: u32 = 12;
    pub(super) const RAW_OPENBSD: u32 = 14;
    pub(super) const RAW: u32 = 101;
    pub(super) const LOOP: u32 = 108;
    pub(super) const LINUX_SLL: u32 = 113;
    pub(super) const IPV4: u32 = 228;
    pub(super) const IPV6: u32 = 229;
    pub(super) const LINUX_SLL2: u32 = 276;
}

/// What of a TCP header is needed: ports, sequence numbers, data offset and flags.
const TCP_NEEDED: usize = 14;

/// A TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// Of the file, or of the host where the link tells.
    pub(super) interface: u32,
    pub(super) seq: u32,
    /// The acknowledgment number, with ACK.
    pub(super) ack: Option<u32>,
    pub(super) syn: bool,
    pub(super) fin: bool,
    pub(super) rst: bool,
    /// Bytes of data as they were sent, not as they were captured.
    pub(super) data: u32,
}

/// Why a frame is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Skipped {
    OtherLink,
    NotTcp,
    Fragment,
    CutShort,
}

pub(super) fn segment(frame: &Frame<'_>) -> Result<Segment, Skipped> {
    let data = frame.data;
    let mut interface = frame.interface;
    let sliced = match frame.link {
        link::ETHERNET => LaxSlicedPacket::from_ethernet(data).map_err(|_| Skipped::CutShort)?,
        link::NULL | link::LOOP => from_ip(data.get(4..).ok_or(Skipped::CutShort)?)?,
        link::RAW | link::RAW_BSD | link::RAW_OPENBSD | link::IPV4 | link::IPV6 => from_ip(data)?,
        link::LINUX_SLL => cooked(data, 14, 16)?,
        link::LINUX_SLL2 => {
            interface = data
                .get(4..8)
                .and_then(|b| b.try_into().ok())
                .map_or(interface, u32::from_be_bytes);
            cooked(data, 0, 20)?
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
    // The IP header tells how much there was; where it does not (0: segmentation is left to the card, and
    // it was more than 64 kB), the length of the frame.
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
    if payload.ip_number != IpNumber::TCP {
        return Err(Skipped::NotTcp);
    }
    if payload.fragmented {
        return Err(Skipped::Fragment);
    }
    let tcp = payload.payload;
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

/// Linux cooked: the EtherType at some place of a header of some length.
fn cooked(data: &[u8], at: usize, length: usize) -> Result<LaxSlicedPacket<'_>, Skipped> {
    let kind = data.get(at..at + 2).and_then(|b| b.try_into().ok());
    match (kind, data.get(length..)) {
        (Some(kind), Some(rest)) => {
            let kind = EtherType(u16::from_be_bytes(kind));
            Ok(LaxSlicedPacket::from_ether_type(kind, rest))
        }
        _ => Err(Skipped::CutShort),
    }
}
