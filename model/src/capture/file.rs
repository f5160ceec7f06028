//! The two file formats: what packets there are, when and of which link.

use pcap_parser::{
    PcapError, PcapHeader, parse_pcap_frame, parse_pcap_frame_be, parse_pcap_frame_modified,
    parse_pcap_header,
    pcapng::{
        InterfaceDescriptionBlock, parse_enhancedpacketblock_be, parse_enhancedpacketblock_le,
        parse_interfacedescriptionblock_be, parse_interfacedescriptionblock_le,
        parse_sectionheaderblock,
    },
    traits::PcapNGPacketBlock as _,
};

use super::CaptureError;

/// Longest packet: libpcap's MAXIMUM_SNAPLEN.
const LONGEST: u32 = 262_144;
/// Longest block of pcapng: a packet, and options.
const LONGEST_BLOCK: usize = 16 << 20;
/// Interfaces of a section.
const MOST_INTERFACES: usize = 65_536;
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
/// Bits of pcap's link field beside the type: the length of the frame check sequence.
const LINK_MASK: u32 = 0x0fff_ffff;
const NANOS: u128 = 1_000_000_000;

/// A packet as it was captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    /// Since the epoch.
    pub(super) time_ns: Option<u64>,
    /// Its link type.
    pub(super) link: u32,
    /// The interface of the file.
    pub(super) interface: u32,
    /// Its length before the capture cut it off.
    pub(super) length: usize,
    /// What was captured.
    pub(super) data: &'a [u8],
}

/// Gives each packet, and the byte at which the last one is cut off, if it is.
pub(super) fn frames<'a>(
    bytes: &'a [u8],
    give: impl FnMut(Frame<'a>),
) -> Result<Option<usize>, CaptureError> {
    if bytes.starts_with(&SECTION_HEADER.to_le_bytes()) {
        return pcapng(bytes, give);
    }
    match parse_pcap_header(bytes) {
        Ok((rest, header)) => pcap(bytes, rest, &header, give),
        Err(_) => Err(CaptureError::NotACapture { hint: hint(bytes) }),
    }
}

fn hint(bytes: &[u8]) -> &'static str {
    match bytes {
        [] => " (it is empty)",
        [0x1f, 0x8b, ..] => " (it is compressed: gunzip it)",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => " (it is compressed: unzstd it)",
        [0xfd, b'7', b'z', ..] => " (it is compressed: unxz it)",
        _ if bytes
            .iter()
            .take(256)
            .all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace()) =>
        {
            " (it is text)"
        }
        _ if bytes.len() < 24 => " (it is shorter than a header)",
        _ => "",
    }
}

fn pcap<'a>(
    bytes: &'a [u8],
    mut rest: &'a [u8],
    header: &PcapHeader,
    mut give: impl FnMut(Frame<'a>),
) -> Result<Option<usize>, CaptureError> {
    let parse = if header.is_modified_format() {
        parse_pcap_frame_modified
    } else if header.is_bigendian() {
        parse_pcap_frame_be
    } else {
        parse_pcap_frame
    };
    let unit: u64 = if header.is_nanosecond_precision() {
        1
    } else {
        1000
    };
    // What it is as a number of four bytes.
    let link = u32::from_ne_bytes(header.network.0.to_ne_bytes()) & LINK_MASK;
    let longest = LONGEST.max(
        header
            .snaplen
            .min(u32::try_from(LONGEST_BLOCK).unwrap_or(LONGEST)),
    );
    let mut packets = 0;
    while !rest.is_empty() {
        let at = bytes.len() - rest.len();
        if let Some(length) = rest.get(8..12).and_then(|b| <[u8; 4]>::try_from(b).ok()) {
            let length = if header.is_bigendian() {
                u32::from_be_bytes(length)
            } else {
                u32::from_le_bytes(length)
            };
            if length > longest {
                let problem = format!("the next packet says that {length} bytes were captured");
                return Err(CaptureError::Damaged {
                    at,
                    packets,
                    problem,
                });
            }
        }
        let Ok((after, packet)) = parse(rest) else {
            return Ok(Some(at));
        };
        let nanos = u64::from(packet.ts_usec) * unit;
        give(Frame {
            time_ns: Some(u64::from(packet.ts_sec) * 1_000_000_000 + nanos),
            link,
            interface: 0,
            length: packet.origlen as usize,
            data: packet.data,
        });
        packets += 1;
        rest = after;
    }
    Ok(None)
}

/// An interface of a section.
struct Interface {
    link: u32,
    /// Units of a second.
    resolution: u128,
    /// Added to times, seconds.
    offset_s: i64,
}

impl Interface {
    fn of(block: &InterfaceDescriptionBlock<'_>) -> Option<Self> {
        let exponent = u32::from(block.if_tsresol & 0x7f);
        let base: u128 = if block.if_tsresol & 0x80 == 0 { 10 } else { 2 };
        Some(Self {
            link: u32::try_from(block.linktype.0).ok()?,
            resolution: base.checked_pow(exponent)?,
            offset_s: block.if_tsoffset,
        })
    }

    /// A time in the interface's units, since the epoch.
    fn nanos(&self, units: u64) -> u64 {
        // Below 2^94.
        let nanos = u128::from(units) * NANOS / self.resolution;
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        nanos.saturating_add_signed(self.offset_s.saturating_mul(1_000_000_000))
    }
}

fn pcapng<'a>(
    bytes: &'a [u8],
    mut give: impl FnMut(Frame<'a>),
) -> Result<Option<usize>, CaptureError> {
    let mut interfaces: Vec<Interface> = Vec::new();
    // Interfaces of former sections: theirs are others.
    let mut before = 0u32;
    let mut is_big = false;
    let mut packets = 0;
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let damaged = |problem: String| CaptureError::Damaged {
            at,
            packets,
            problem,
        };
        let Some(header) = rest.get(..12).and_then(|b| <[u8; 12]>::try_from(b).ok()) else {
            return Ok(Some(at));
        };
        let [t0, t1, t2, t3, l0, l1, l2, l3, magic @ ..] = header;
        let is_section = u32::from_le_bytes([t0, t1, t2, t3]) == SECTION_HEADER;
        if is_section {
            is_big = magic == 0x1a2b_3c4d_u32.to_be_bytes();
        }
        let number = |b: [u8; 4]| {
            if is_big {
                u32::from_be_bytes(b)
            } else {
                u32::from_le_bytes(b)
            }
        };
        let kind = number([t0, t1, t2, t3]);
        let length = number([l0, l1, l2, l3]) as usize;
        if !(12..=LONGEST_BLOCK).contains(&length) || !length.is_multiple_of(4) {
            return Err(damaged(format!(
                "the next block says that it is {length} bytes long"
            )));
        }
        let Some(block) = rest.get(..length) else {
            return Ok(Some(at));
        };
        if is_section {
            let section = parse_sectionheaderblock(block);
            section.map_err(|e| damaged(format!("no section header ({})", name(&e))))?;
            before = before.saturating_add(u32::try_from(interfaces.len()).unwrap_or(u32::MAX));
            interfaces.clear();
        } else if kind == INTERFACE {
            let parsed = if is_big {
                parse_interfacedescriptionblock_be(block)
            } else {
                parse_interfacedescriptionblock_le(block)
            };
            let (_, parsed) =
                parsed.map_err(|e| damaged(format!("no interface ({})", name(&e))))?;
            let interface = Interface::of(&parsed)
                .filter(|_| interfaces.len() < MOST_INTERFACES)
                .ok_or_else(|| damaged("an interface beyond what can be".to_owned()))?;
            interfaces.push(interface);
        } else if kind == ENHANCED_PACKET {
            let parsed = if is_big {
                parse_enhancedpacketblock_be(block)
            } else {
                parse_enhancedpacketblock_le(block)
            };
            let (_, packet) = parsed.map_err(|e| damaged(format!("no packet ({})", name(&e))))?;
            let interface = interfaces.get(packet.if_id as usize).ok_or_else(|| {
                damaged(format!(
                    "a packet of interface {}, which is not described",
                    packet.if_id
                ))
            })?;
            let units = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
            // With its padding in `data`, which ends with the block.
            let data = packet.data;
            let captured = data.len().min(packet.caplen as usize);
            give(Frame {
                time_ns: Some(interface.nanos(units)),
                link: interface.link,
                interface: before.saturating_add(packet.if_id),
                length: packet.orig_len() as usize,
                data: &data[..captured],
            });
            packets += 1;
        } else if kind == SIMPLE_PACKET {
            give(Frame {
                time_ns: None,
                link: interfaces.first().map_or(0, |i| i.link),
                interface: before,
                length: 0,
                data: &[],
            });
            packets += 1;
        }
        at += length;
    }
    Ok(None)
}

/// In a word: the parser's own texts quote the bytes.
fn name(error: &pcap_parser::nom::Err<PcapError<&[u8]>>) -> &'static str {
    use pcap_parser::nom::Err;
    match error {
        Err::Incomplete(_) => "its lengths exceed the block",
        Err::Error(_) | Err::Failure(_) => "its lengths differ",
    }
}
