//! RTT samples of a packet capture: pcap or pcapng, as tcpdump and Wireshark write them.
//!
//! One sample for each ACK that covers something new, of the oldest segment it covers, as Linux takes them
//! (`tcp_clean_rtx_queue()`, net/ipv4/tcp_input.c, 6.12). Karn's rule: an ACK that covers anything that was
//! retransmitted gives none. Samples of SYN and SYN-ACK are kept apart.
//!
//! The times are those of the place of capture: they are round trips only at the host that sends, and a capture
//! elsewhere gives the part of the path beyond it.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

#[cfg(feature = "pcap")]
mod file;
#[cfg(feature = "pcap")]
mod packet;
#[cfg(feature = "pcap")]
mod track;

use crate::estimator::Sample;

/// Which samples there are in a capture, and what was read for them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capture {
    /// Directions of connections that sent anything with a sequence number, in order of their first packet.
    pub flows: Vec<Flow>,
    /// What was read.
    pub counts: Counts,
    /// Time of the first packet, Unix microseconds; samples' times count from it.
    pub began_us: Option<u64>,
    /// Time of the last.
    pub ended_us: Option<u64>,
    /// The byte at which the file ends in the middle of a packet, as one does whose writer was killed.
    pub cut_off_at: Option<usize>,
}

/// A capture as `rto-lab advise` hands it to `rto-agent advise --samples`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedCapture {
    /// The file it was read from.
    pub file: PathBuf,
    /// What is in it.
    pub capture: Capture,
}

/// One direction of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// Who sent the segments.
    pub from: SocketAddr,
    /// Who answered.
    pub to: SocketAddr,
    /// The interface of the capture; 0 where the format has none.
    pub interface: u32,
    /// Which part of the handshake it sent, if that was captured.
    pub opened: Option<Opening>,
    /// Round trips of the handshake: SYN to SYN-ACK, or SYN-ACK to ACK. One, but for simultaneous ones.
    pub handshake: Vec<Sample>,
    /// Round trips of data and FIN.
    pub data: Vec<Sample>,
    /// What it sent.
    pub counts: FlowCounts,
}

/// Who began a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Opening {
    /// This side, by a SYN.
    Active,
    /// The other; this side sent the SYN-ACK.
    Passive,
}

/// What a flow sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowCounts {
    /// Segments with SYN, data or FIN.
    pub segments: u64,
    /// Of these, such as were sent (at least in part) before, or came out of order.
    pub retransmitted: u64,
    /// Of these, SYNs and SYN-ACKs.
    pub handshake_retransmitted: u64,
    /// Not answered when the capture or the connection ended.
    pub unanswered: u64,
    /// ACKs without a sample, because something they cover had been retransmitted.
    pub ambiguous: u64,
}

/// What was read of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Packets.
    pub packets: u64,
    /// Of these, no TCP (or TCP within a tunnel, which is not looked into).
    pub not_tcp: u64,
    /// Of these, of a link that is not read (see [`CaptureError::NothingReadable`]).
    pub other_links: u64,
    /// Of these, IP fragments, whose lengths say nothing.
    pub fragments: u64,
    /// Of these, cut off by the capture before the TCP header's flags.
    pub cut_short: u64,
    /// Of these, without a time (pcapng's simple packets).
    pub without_time: u64,
    /// Of these, left out because there were more flows than [`Limits::flows`].
    pub beyond_flows: u64,
    /// Segments that were not followed because more were outstanding than [`Limits::outstanding`] or
    /// [`Limits::outstanding_in_all`].
    pub beyond_outstanding: u64,
    /// ACKs older than what they answer: the packets are not in the order of their times.
    pub backwards: u64,
}

/// Bounds of the memory that a capture may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Directions of connections.
    pub flows: usize,
    /// Segments without an answer, of one of them.
    pub outstanding: usize,
    /// The same, of all.
    pub outstanding_in_all: usize,
}

impl Default for Limits {
    /// 250,000 flows; 16,384 segments, and a million in all: some 150 MB.
    fn default() -> Self {
        Self {
            flows: 250_000,
            outstanding: 16_384,
            outstanding_in_all: 1 << 20,
        }
    }
}

/// Why a file is no capture that can be read. Bytes and packets count from 0 and 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// Neither format.
    #[error(
        "byte 0: this is neither pcap nor pcapng{hint}; capture with: tcpdump -s 128 -w FILE tcp"
    )]
    NotACapture {
        /// What it may be.
        hint: &'static str,
    },
    /// A header that contradicts itself.
    #[error(
        "byte {at}, after {packets} packet(s): {problem}; the file is damaged from there on: capture again, or \
         keep what comes before with: editcap -r IN OUT 1-{packets}"
    )]
    Damaged {
        /// Where.
        at: usize,
        /// How many packets came before.
        packets: u64,
        /// What is wrong.
        problem: String,
    },
    /// Packets, but none of a link that is read.
    #[error(
        "none of the {packets} packet(s) can be read: their link type is {link}; it can be Ethernet, raw IP, \
         Linux cooked (tcpdump -i any) or null: capture on such an interface"
    )]
    NothingReadable {
        /// How many.
        packets: u64,
        /// The first one's link type, as in <https://www.tcpdump.org/linktypes.html>.
        link: u32,
    },
}

/// Reads a capture, with the default limits.
///
/// # Errors
///
/// If it is none, or damaged. One that ends in the middle of a packet is read up to there
/// ([`Capture::cut_off_at`]).
#[cfg(feature = "pcap")]
pub fn read(bytes: &[u8]) -> Result<Capture, CaptureError> {
    read_with(bytes, Limits::default())
}

/// Reads a capture.
///
/// # Errors
///
/// As [`read`].
#[cfg(feature = "pcap")]
pub fn read_with(bytes: &[u8], limits: Limits) -> Result<Capture, CaptureError> {
    let mut tracker = track::Tracker::new(limits);
    let mut counts = Counts::default();
    let mut began_ns: Option<u64> = None;
    let mut ended_ns: Option<u64> = None;
    let mut other_link = None;
    let cut_off_at = file::frames(bytes, |frame| {
        counts.packets += 1;
        let Some(time_ns) = frame.time_ns else {
            counts.without_time += 1;
            return;
        };
        let first_ns = *began_ns.get_or_insert(time_ns);
        ended_ns = Some(ended_ns.unwrap_or(time_ns).max(time_ns));
        let time_ns = time_ns.saturating_sub(first_ns);
        match packet::segment(&frame) {
            Ok(segment) => tracker.segment(time_ns, &segment, &mut counts),
            Err(packet::Skipped::OtherLink) => {
                other_link.get_or_insert(frame.link);
                counts.other_links += 1;
            }
            Err(packet::Skipped::NotTcp) => counts.not_tcp += 1,
            Err(packet::Skipped::Fragment) => counts.fragments += 1,
            Err(packet::Skipped::CutShort) => counts.cut_short += 1,
        }
    })?;
    if let Some(link) = other_link
        && counts.other_links == counts.packets
    {
        let packets = counts.packets;
        return Err(CaptureError::NothingReadable { packets, link });
    }
    Ok(Capture {
        flows: tracker.finish(),
        counts,
        began_us: began_ns.map(|ns| ns / 1000),
        ended_us: ended_ns.map(|ns| ns / 1000),
        cut_off_at,
    })
}

impl Flow {
    /// All samples, those of the handshake first: what the sender's estimator saw.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample> {
        [self.handshake.as_slice(), &self.data].concat()
    }
}

impl Capture {
    /// Keeps the flows to peers that a condition is true of.
    pub fn retain_peers(&mut self, is_wanted: impl Fn(IpAddr) -> bool) {
        self.flows
            .retain(|flow| is_wanted(flow.to.ip().to_canonical()));
    }

    /// Keeps of each connection the direction with the longer round trips: the segments of the host at which
    /// was captured. The other's are answered there at once, which says nothing of the path.
    pub fn retain_far(&mut self) {
        // The least: it is the path's, whatever ACKs were delayed.
        let least = |flow: &Flow| {
            let all = flow.handshake.iter().chain(&flow.data);
            all.map(|sample| sample.rtt_us).min()
        };
        let by_key: HashMap<_, _> = self
            .flows
            .iter()
            .map(|flow| ((flow.interface, flow.from, flow.to), least(flow)))
            .collect();
        self.flows.retain(|flow| {
            let other = by_key.get(&(flow.interface, flow.to, flow.from));
            let (own, other) = (least(flow), other.copied().flatten());
            // If they are equal (loopback) one of them.
            own > other || (own == other && flow.from < flow.to)
        });
    }

    /// The samples of each flow, handshake first, for [`crate::study::Study::run`]; flows without any are
    /// left out.
    #[must_use]
    pub fn samples(&self) -> Vec<Vec<Sample>> {
        let all = self.flows.iter().map(Flow::samples);
        all.filter(|samples| !samples.is_empty()).collect()
    }

    /// The sum of what the flows sent.
    #[must_use]
    pub fn sent(&self) -> FlowCounts {
        let mut sum = FlowCounts::default();
        for FlowCounts {
            segments,
            retransmitted,
            handshake_retransmitted,
            unanswered,
            ambiguous,
        } in self.flows.iter().map(|flow| flow.counts)
        {
            sum.segments += segments;
            sum.retransmitted += retransmitted;
            sum.handshake_retransmitted += handshake_retransmitted;
            sum.unanswered += unanswered;
            sum.ambiguous += ambiguous;
        }
        sum
    }

    /// What to know of how complete it is, a sentence each.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        let mut say = |is_so: bool, text: String| {
            if is_so {
                remarks.push(text);
            }
        };
        let c = &self.counts;
        if let Some(at) = self.cut_off_at {
            say(
                true,
                format!(
                    "the file ends in the middle of a packet, at byte {at}: the rest is missing"
                ),
            );
        }
        for (count, what) in [
            (c.other_links, "of a link type that is not read"),
            (c.fragments, "fragments of IP packets, which are left out"),
            (
                c.cut_short,
                "cut off before the TCP header ends; capture more of each (tcpdump -s 128)",
            ),
            (c.without_time, "without a time (pcapng simple packets)"),
            (
                c.beyond_flows,
                "of more connections than are followed; give a part of the capture",
            ),
        ] {
            say(count > 0, format!("{count} packet(s) are {what}"));
        }
        let outstanding = c.beyond_outstanding;
        say(
            outstanding > 0,
            format!(
                "{outstanding} segment(s) were not followed: too many without an answer at a time"
            ),
        );
        let backwards = c.backwards;
        say(
            backwards > 0,
            format!(
                "{backwards} ACK(s) are older than what they answer: sort the capture by time (reordercap)"
            ),
        );
        let sent = self.sent();
        say(
            sent.segments >= 10 && sent.retransmitted * 3 > sent.segments,
            format!(
                "{} of {} segments look retransmitted: is each packet in the capture twice (two interfaces of one \
                 path)?",
                sent.retransmitted, sent.segments
            ),
        );
        remarks
    }
}

#[cfg(test)]
#[cfg(feature = "pcap")]
mod tests;
