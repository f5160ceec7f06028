//! Takes RTT samples from packet captures: pcap or pcapng, as tcpdump and Wireshark write them.
//!
//! Each ACK of new data gives one sample, of the oldest segment that it covers, like in Linux (`tcp_clean_rtx_queue()`,
//! net/ipv4/tcp_input.c, 6.12). Karn's algorithm: an ACK that covers a retransmitted segment gives none. Samples of SYN
//! and SYN-ACK are kept separately.

use std::collections::HashSet;

mod clock;
mod file;
mod fit;
mod host;
mod packet;
mod samples;
mod track;

pub use self::{
    fit::{Fit, Unfit},
    host::Sides,
    samples::{Capture, Counts, Flow, FlowCounts, Opening, Times},
};

/// Limits of the memory for a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of flows, which are directions of connections.
    pub flows: usize,
    /// Unanswered segments of a flow.
    pub outstanding: usize,
    /// Unanswered segments of all flows.
    pub outstanding_in_all: usize,
}

impl Default for Limits {
    /// 250,000 flows, and 16,384 segments each, but at most a million in all: about 150 MB.
    fn default() -> Self {
        Self {
            flows: 250_000,
            outstanding: 16_384,
            outstanding_in_all: 1 << 20,
        }
    }
}

/// Why a file cannot be read as a capture. Bytes count from 0, packets from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The file has neither format.
    #[error(
        "byte 0: this is neither pcap nor pcapng{hint}; capture with: tcpdump -s 128 -w FILE tcp"
    )]
    NotACapture {
        /// What the file may be instead.
        hint: &'static str,
    },
    /// A header that contradicts itself.
    #[error(
        "byte {at}, after {packets} packet(s): {problem}; the rest of the file is damaged: capture \
         again, or keep the packets before it with: editcap -r IN OUT 1-{packets}"
    )]
    Damaged {
        /// Offset of the damage.
        at: usize,
        /// Number of packets before it.
        packets: u64,
        /// Description of the problem.
        problem: String,
    },
    /// No packet has a supported link type.
    #[error(
        "none of the {packets} packet(s) can be read: their link type is {link}; supported are \
         Ethernet, raw IP and Linux cooked (tcpdump -i any): capture on such an interface"
    )]
    NothingReadable {
        /// Number of packets.
        packets: u64,
        /// The link type of the first, as in <https://www.tcpdump.org/linktypes.html>.
        link: u32,
    },
}

/// Reads a capture, with the default limits.
/// Fails if it is not a capture, or damaged. A file that ends in the middle of a packet is read up to that packet
/// ([`Capture::cut_off_at`]).
pub fn read(bytes: &[u8]) -> Result<Capture, CaptureError> {
    read_with(bytes, Limits::default())
}

/// Reads a capture.
pub fn read_with(bytes: &[u8], limits: Limits) -> Result<Capture, CaptureError> {
    read_parts(&[bytes], limits)
}

/// Reads the files of one capture, in the order of their first packets: connections may go on in the next one.
pub fn read_parts(files: &[&[u8]], limits: Limits) -> Result<Capture, CaptureError> {
    let mut files = files.to_vec();
    files.sort_by_cached_key(|bytes| first_ns(bytes));
    // The earliest time need not be that of the first packet.
    let mut clocks = clock::Clocks::default();
    let mut rest = file::Rest::default();
    for bytes in &files {
        let found = file::frames(bytes, |frame| {
            clocks.take(&frame);
        })?;
        rest.cut_off_at = rest.cut_off_at.or(found.cut_off_at);
        rest.other_blocks += found.other_blocks;
        rest.other_block = rest.other_block.or(found.other_block);
    }
    let earliest_ns = clocks.earliest_ns().unwrap_or(0);
    let times = clocks.times();
    let mut counts = Counts {
        other_blocks: rest.other_blocks,
        other_block: rest.other_block,
        ..Counts::default()
    };
    let mut tracker = track::Tracker::new(limits);
    let mut clocks = clock::Clocks::default();
    let mut last = track::Moment { ns: 0, back: 0 };
    let mut take = |frame: file::Frame<'_>| {
        counts.packets += 1;
        let (Some(time_ns), Some(back)) = (frame.time_ns, clocks.take(&frame)) else {
            counts.without_time += 1;
            return;
        };
        last = track::Moment {
            ns: time_ns.abs_diff(earliest_ns),
            back,
        };
        match packet::segment(&frame) {
            Ok(segment) => tracker.segment(last, &segment, &mut counts),
            Err(packet::Skipped::OtherLink) => {
                counts.other_link.get_or_insert(frame.link);
                counts.other_links += 1;
            }
            Err(packet::Skipped::OtherProtocol(protocol)) => {
                counts.other_protocol.get_or_insert(protocol);
                counts.other_protocols += 1;
            }
            Err(packet::Skipped::Tunnel) => counts.tunnelled += 1,
            Err(packet::Skipped::NotTcp) => counts.not_tcp += 1,
            Err(packet::Skipped::Fragment) => counts.fragments += 1,
            Err(packet::Skipped::CutShort) => counts.cut_short += 1,
        }
    };
    for bytes in &files {
        file::frames(bytes, &mut take)?;
    }
    if let Some(link) = counts.other_link
        && counts.other_links == counts.packets
    {
        let packets = counts.packets;
        return Err(CaptureError::NothingReadable { packets, link });
    }
    Ok(Capture {
        flows: tracker.finish(),
        counts,
        times,
        cut_off_at: rest.cut_off_at,
        sampled: None,
    })
}

/// The time of a file's first packet; `None` if there is none.
fn first_ns(bytes: &[u8]) -> Option<i64> {
    let mut first = None;
    // What is damaged later is reported by the reader.
    let _ = file::frames(bytes, |frame| first = first.or(frame.time_ns));
    first
}

/// Keeps what a capture of one in `every` packets proves.
///
/// The first captured ACK of a segment may be a later one, and a segment may be a copy, so data and SYN-ACKs have no
/// round-trip times. A SYN has one if its SYN-ACK was captured, which no packet of the peer precedes. A SYN without an
/// answer proves nothing: the answer may not have been captured.
/// Fails if nothing remains.
pub fn retain_sampled(capture: &mut Capture, every: u32) -> anyhow::Result<()> {
    capture.sampled = Some(every);
    let answered = capture
        .flows
        .iter()
        .filter(|flow| flow.opened == Some(Opening::Passive));
    let answered: HashSet<_> = answered.map(|flow| (flow.to, flow.from)).collect();
    for flow in &mut capture.flows {
        flow.data.clear();
        flow.unsampled_us.clear();
        flow.counts = FlowCounts::default();
        if flow.opened != Some(Opening::Active) || !answered.contains(&(flow.from, flow.to)) {
            flow.handshake.clear();
        }
    }
    anyhow::ensure!(
        capture.flows.iter().any(|flow| !flow.handshake.is_empty()),
        "one in {every} packets was captured, and of no handshake both the SYN and the SYN-ACK: this proves nothing \
         about a timer; capture every packet: tcpdump -s 128 -w FILE tcp"
    );
    Ok(())
}

#[cfg(test)]
mod tests;
