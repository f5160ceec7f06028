//! Reads the two file formats: their packets, times and link types.

use pcap_parser::{
    PcapError, PcapHeader, parse_pcap_frame, parse_pcap_frame_be, parse_pcap_frame_modified,
    parse_pcap_header,
    pcapng::{
        InterfaceDescriptionBlock, OptionCode, parse_enhancedpacketblock_be,
        parse_enhancedpacketblock_le, parse_interfacedescriptionblock_be,
        parse_interfacedescriptionblock_le, parse_sectionheaderblock,
    },
};

use super::CaptureError;

/// Longest packet: libpcap's MAXIMUM_SNAPLEN.
const LONGEST: u32 = 262_144;
/// Longest block of pcapng: a packet, and options.
const LONGEST_BLOCK: usize = 16 << 20;
/// Most interfaces in a section.
const MOST_INTERFACES: usize = 65_536;
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
/// Blocks without packets, which are ignored: name resolution, interface statistics, systemd's journal, decryption
/// secrets, and both custom blocks.
const DESCRIPTIONS: [u32; 6] = [4, 5, 9, 10, 0xbad, 0x4000_0bad];
/// `epb_flags`: the first two bits are the direction.
const OPTION_FLAGS: OptionCode = OptionCode(2);
/// Removes the upper bits of the link type: the length of the frame check sequence (four bits), the flag that it is known
/// (0x0400_0000) and the reserved one beside it (pcap-common.c of libpcap).
const LINK_MASK: u32 = 0x03ff_ffff;
const NANOS: u128 = 1_000_000_000;

/// A packet as it was captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    /// Time since the epoch.
    pub(super) time_ns: Option<i64>,
    /// The unit of the file's times.
    pub(super) unit_ns: u64,
    /// Whether the host sent it, if the file or the link type shows that.
    pub(super) outgoing: Option<bool>,
    /// Its link type.
    pub(super) link: u32,
    /// Its interface in the file.
    pub(super) interface: u32,
    /// Its length before the capture truncated it.
    pub(super) length: usize,
    /// The captured bytes.
    pub(super) data: &'a [u8],
}

/// The parts of a file that are not packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    /// The offset of the last packet, if it is incomplete.
    pub(super) cut_off_at: Option<usize>,
    /// Number of blocks of unknown types, and the type of the first.
    pub(super) other_blocks: u64,
    pub(super) other_block: Option<u32>,
}

/// Passes each packet to `give`.
pub(super) fn frames<'a>(
    bytes: &'a [u8],
    give: impl FnMut(Frame<'a>),
) -> Result<Rest, CaptureError> {
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
) -> Result<Rest, CaptureError> {
    let parse = if header.is_modified_format() {
        parse_pcap_frame_modified
    } else if header.is_bigendian() {
        parse_pcap_frame_be
    } else {
        parse_pcap_frame
    };
    let unit: u32 = if header.is_nanosecond_precision() {
        1
    } else {
        1000
    };
    // The link type as a number of four bytes.
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
            let length = number(header.is_bigendian(), length);
            if length > longest {
                let problem = format!("the next packet claims {length} captured bytes");
                return Err(CaptureError::Damaged {
                    at,
                    packets,
                    problem,
                });
            }
        }
        let Ok((after, packet)) = parse(rest) else {
            return Ok(Rest {
                cut_off_at: Some(at),
                ..Rest::default()
            });
        };
        let nanos = i64::from(packet.ts_usec) * i64::from(unit);
        give(Frame {
            time_ns: Some(i64::from(packet.ts_sec) * 1_000_000_000 + nanos),
            unit_ns: unit.into(),
            outgoing: None,
            link,
            interface: 0,
            length: packet.origlen as usize,
            data: packet.data,
        });
        packets += 1;
        rest = after;
    }
    Ok(Rest::default())
}

/// An interface of a section.
struct Interface {
    link: u32,
    /// Units per second.
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

    /// Converts a time in the interface's units to nanoseconds since the epoch.
    fn nanos(&self, units: u64) -> i64 {
        // The product is below 2^94.
        let nanos = u128::from(units) * NANOS / self.resolution;
        let nanos = i64::try_from(nanos).unwrap_or(i64::MAX);
        nanos.saturating_add(self.offset_s.saturating_mul(1_000_000_000))
    }

    fn unit_ns(&self) -> u64 {
        u64::try_from(NANOS / self.resolution).map_or(u64::MAX, |ns| ns.max(1))
    }
}

/// A number in the byte order of a section.
const fn number(is_big: bool, bytes: [u8; 4]) -> u32 {
    match is_big {
        true => u32::from_be_bytes(bytes),
        false => u32::from_le_bytes(bytes),
    }
}

fn pcapng<'a>(bytes: &'a [u8], mut give: impl FnMut(Frame<'a>)) -> Result<Rest, CaptureError> {
    let mut interfaces: Vec<Interface> = Vec::new();
    // The number of interfaces in earlier sections, which are different ones.
    let mut before = 0u32;
    let mut is_big = false;
    let mut packets = 0;
    let mut found = Rest::default();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let damaged = |problem: String| CaptureError::Damaged {
            at,
            packets,
            problem,
        };
        found.cut_off_at = Some(at);
        let Some(header) = rest.get(..12).and_then(|b| <[u8; 12]>::try_from(b).ok()) else {
            return Ok(found);
        };
        let [t0, t1, t2, t3, l0, l1, l2, l3, magic @ ..] = header;
        let is_section = u32::from_le_bytes([t0, t1, t2, t3]) == SECTION_HEADER;
        if is_section {
            is_big = magic == 0x1a2b_3c4d_u32.to_be_bytes();
        }
        let kind = number(is_big, [t0, t1, t2, t3]);
        let length = number(is_big, [l0, l1, l2, l3]) as usize;
        if !(12..=LONGEST_BLOCK).contains(&length) || !length.is_multiple_of(4) {
            return Err(damaged(format!(
                "the next block claims a length of {length} bytes"
            )));
        }
        let Some(block) = rest.get(..length) else {
            return Ok(found);
        };
        found.cut_off_at = None;
        match kind {
            SECTION_HEADER => {
                let section = parse_sectionheaderblock(block);
                section.map_err(|e| damaged(format!("no section header ({})", name(&e))))?;
                before = before.saturating_add(u32::try_from(interfaces.len()).unwrap_or(u32::MAX));
                interfaces.clear();
            }
            INTERFACE => {
                let parsed = if is_big {
                    parse_interfacedescriptionblock_be(block)
                } else {
                    parse_interfacedescriptionblock_le(block)
                };
                let (_, parsed) =
                    parsed.map_err(|e| damaged(format!("no interface ({})", name(&e))))?;
                let interface = Interface::of(&parsed)
                    .filter(|_| interfaces.len() < MOST_INTERFACES)
                    .ok_or_else(|| damaged("an invalid interface number".to_owned()))?;
                interfaces.push(interface);
            }
            ENHANCED_PACKET => {
                let parsed = if is_big {
                    parse_enhancedpacketblock_be(block)
                } else {
                    parse_enhancedpacketblock_le(block)
                };
                let (_, packet) =
                    parsed.map_err(|e| damaged(format!("no packet ({})", name(&e))))?;
                let id = packet.if_id;
                let interface = interfaces.get(id as usize).ok_or_else(|| {
                    damaged(format!(
                        "a packet of interface {id}, which has no description"
                    ))
                })?;
                let mut options = packet.options.iter();
                let flags = options.find(|option| option.code == OPTION_FLAGS);
                let flags = flags.and_then(|option| option.value.get(..4)?.try_into().ok());
                let units = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
                give(Frame {
                    time_ns: Some(interface.nanos(units)),
                    unit_ns: interface.unit_ns(),
                    outgoing: match flags.map(|flags| number(is_big, flags) & 3) {
                        Some(1) => Some(false),
                        Some(2) => Some(true),
                        _ => None,
                    },
                    link: interface.link,
                    interface: before.saturating_add(id),
                    length: packet.origlen as usize,
                    data: packet
                        .data
                        .get(..packet.caplen as usize)
                        .unwrap_or_default(),
                });
                packets += 1;
            }
            SIMPLE_PACKET => {
                give(Frame {
                    time_ns: None,
                    unit_ns: 0,
                    outgoing: None,
                    link: interfaces.first().map_or(0, |i| i.link),
                    interface: before,
                    length: 0,
                    data: &[],
                });
                packets += 1;
            }
            other if DESCRIPTIONS.contains(&other) => {}
            other => {
                found.other_blocks += 1;
                found.other_block.get_or_insert(other);
            }
        }
        at += length;
    }
    Ok(found)
}

/// A short description: the parser's messages quote the bytes.
fn name(error: &pcap_parser::nom::Err<PcapError<&[u8]>>) -> &'static str {
    use pcap_parser::nom::Err;
    match error {
        Err::Incomplete(_) => "its lengths exceed the block",
        Err::Error(_) | Err::Failure(_) => "its lengths differ",
    }
}
