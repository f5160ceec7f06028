//! RTT samples of a packet capture.
//!
//! Times are taken where the packets are captured. They are round-trip times only at the sending host; a capture at
//! another place shows the part of the path beyond it.

use std::{collections::HashSet, net::SocketAddr};

use rto_model::estimator::Sample;

/// The samples of a capture, and statistics about what was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// The directions of connections that sent any sequence number, in order of their first packet.
    pub flows: Vec<Flow>,
    /// Statistics about what was read.
    pub counts: Counts,
    /// What the times show about the clocks.
    pub times: Times,
    /// The offset at which the file ends in the middle of a packet, for example because its writer was killed.
    pub cut_off_at: Option<usize>,
    /// One in this many packets was captured, if not all were.
    pub sampled: Option<u32>,
}

/// What the times of a capture show about the clocks that made them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The earliest time, in Unix microseconds; samples' times count from it.
    pub began_us: Option<i64>,
    /// The latest time, in Unix microseconds.
    pub ended_us: Option<i64>,
    /// Resolution of the times, microseconds: the file's, or that of its packets if they show a coarser one. Longer
    /// than any capture if all packets of an interface have the same time.
    pub resolution_us: u64,
    /// How often a clock went back by a millisecond or more; `back_us` is the largest step.
    pub back: u64,
    /// The largest step back, microseconds.
    pub back_us: u64,
}

/// One direction of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The sender of the segments.
    pub from: SocketAddr,
    /// Their receiver.
    pub to: SocketAddr,
    /// The interface of the capture, the last one if there were several; 0 if the format has none.
    pub interface: u32,
    /// Whether the host sent it, if the capture shows that (Linux cooked, flags of pcapng).
    pub sent_by_host: Option<bool>,
    /// Which part of the handshake this side sent, if it was captured.
    pub opened: Option<Opening>,
    /// Round trips of the handshake: SYN to SYN-ACK, or SYN-ACK to ACK. One, except for simultaneous opens.
    pub handshake: Vec<Sample>,
    /// Answered handshakes without a sample: retransmitted ones for which it is unknown which copy was answered. The
    /// time from the first SYN or SYN-ACK to the answer, microseconds; `u64::MAX` if a clock went back in that time.
    pub unsampled_us: Vec<u64>,
    /// Round trips of data and FINs.
    pub data: Vec<Sample>,
    /// What was sent.
    pub counts: FlowCounts,
}

/// Which side opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// This side, with a SYN.
    Active,
    /// The other side; this side sent the SYN-ACK.
    Passive,
}

/// Counts of a flow's segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Segments with SYN, data or FIN.
    pub segments: u64,
    /// Segments that were sent before, at least in part, or arrived out of order.
    pub retransmitted: u64,
    /// Retransmitted SYNs and SYN-ACKs.
    pub handshake_retransmitted: u64,
    /// Segments that were not answered when the capture or the connection ended.
    pub unanswered: u64,
    /// SYNs and SYN-ACKs among these, which were refused or not answered at all.
    pub handshake_unanswered: u64,
    /// ACKs without a sample, because they cover a retransmitted segment.
    pub ambiguous: u64,
}

/// Statistics about reading a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets.
    pub packets: u64,
    /// Packets that are not TCP.
    pub not_tcp: u64,
    /// Packets with an unsupported link type.
    pub other_links: u64,
    /// The first such link type.
    pub other_link: Option<u32>,
    /// Packets with an unsupported header before the IP header.
    pub other_protocols: u64,
    /// The first such `EtherType`.
    pub other_protocol: Option<u16>,
    /// Packets in a tunnel, which is not decoded.
    pub tunnelled: u64,
    /// IP fragments, whose length is not that of a segment.
    pub fragments: u64,
    /// Packets that the capture truncated before the TCP header's flags.
    pub cut_short: u64,
    /// Packets without a time (pcapng's simple packets).
    pub without_time: u64,
    /// Packets left out because there were more flows than the reader's limit.
    pub beyond_flows: u64,
    /// Copies of packets that were seen on another interface.
    pub elsewhere: u64,
    /// Blocks of unknown pcapng types.
    pub other_blocks: u64,
    /// The type of the first such block.
    pub other_block: Option<u32>,
    /// Segments that were not tracked because more were outstanding than the reader's limits.
    pub beyond_outstanding: u64,
    /// Round trips left out because a clock went back during them.
    pub backwards: u64,
}

impl Flow {
    /// All samples, beginning with the handshake: what the sender's estimator receives.
    pub fn samples(&self) -> Vec<Sample> {
        [self.handshake.as_slice(), &self.data].concat()
    }
}

impl Capture {
    /// The counts of all flows together.
    pub fn sent(&self) -> FlowCounts {
        let each = self.flows.iter().map(|flow| flow.counts);
        each.fold(FlowCounts::default(), |sum, one| FlowCounts {
            segments: sum.segments + one.segments,
            retransmitted: sum.retransmitted + one.retransmitted,
            handshake_retransmitted: sum.handshake_retransmitted + one.handshake_retransmitted,
            unanswered: sum.unanswered + one.unanswered,
            handshake_unanswered: sum.handshake_unanswered + one.handshake_unanswered,
            ambiguous: sum.ambiguous + one.ambiguous,
        })
    }

    /// The number of connections of which only one direction was captured: they have data, which no peer sends without
    /// an answer to its SYN.
    pub fn one_way(&self) -> usize {
        let keys: HashSet<_> = self.flows.iter().map(|flow| (flow.from, flow.to)).collect();
        let one_way = self.flows.iter().filter(|flow| {
            let handshakes = flow.counts.handshake_retransmitted + u64::from(flow.opened.is_some());
            flow.counts.segments > handshakes
                && flow.counts.unanswered > flow.counts.handshake_unanswered
                && flow.handshake.is_empty()
                && flow.unsampled_us.is_empty()
                && flow.data.is_empty()
                && !keys.contains(&(flow.to, flow.from))
        });
        one_way.count()
    }

    /// Remarks for the user about what is missing, a sentence each.
    pub fn remarks(&self) -> Vec<String> {
        let (c, times, sent) = (&self.counts, &self.times, self.sent());
        let mut remarks = Vec::new();
        if let Some(at) = self.cut_off_at {
            remarks.push(format!(
                "the file ends in the middle of a packet, at byte {at}: the rest is missing"
            ));
        }
        if let Some(every) = self.sampled {
            remarks.push(format!(
                "one in {every} packets was captured: only handshakes count whose SYN and SYN-ACK are both there; \
                 rto_min is not evaluated, as copies of a segment and its first ACK may be missing"
            ));
        }
        if c.other_blocks > 0 {
            remarks.push(format!(
                "{} block(s) of pcapng are not read, the first of type {}; if they are packets, convert the file: editcap \
                 IN OUT",
                c.other_blocks,
                c.other_block.unwrap_or_default()
            ));
        }
        let link = format!(
            "of a link type that is not read, the first of {}",
            c.other_link.unwrap_or_default()
        );
        let protocol = format!(
            "of an EtherType that is not read, the first of {:#06x}",
            c.other_protocol.unwrap_or_default()
        );
        let packets = [
            (c.other_links, link.as_str()),
            (c.other_protocols, protocol.as_str()),
            (
                c.tunnelled,
                "inside a tunnel, which is not decoded; capture on the tunnel's interface",
            ),
            (c.fragments, "fragments of IP packets, which are left out"),
            (
                c.cut_short,
                "cut off before the end of the TCP header; capture more of each (tcpdump -s 128)",
            ),
            (
                c.without_time,
                "without a time (pcapng simple packets) and left out",
            ),
            (
                c.beyond_flows,
                "of connections beyond the limit; use a part of the capture",
            ),
            (
                c.elsewhere,
                "copies of packets of another interface, and left out",
            ),
        ];
        let packets = packets.into_iter().filter(|(count, _)| *count > 0);
        remarks.extend(packets.map(|(count, what)| format!("{count} packet(s) are {what}")));
        let one_way = self.one_way();
        if one_way > 0 {
            remarks.push(format!(
                "of {one_way} connection(s) only one direction was captured, so their round trips are unknown: capture \
                 both directions (tcpdump without a filter on addresses or interfaces of one direction)"
            ));
        }
        if c.beyond_outstanding > 0 {
            remarks.push(format!(
                "{} segment(s) were not followed: too many were outstanding at the same time",
                c.beyond_outstanding
            ));
        }
        if times.back > 0 {
            remarks.push(format!(
                "the clock goes back {} time(s), by up to {} ms: {} round trip(s) across these jumps are left out; if \
                 the packets are not in order, sort them: reordercap IN OUT",
                times.back,
                times.back_us.div_ceil(1000),
                c.backwards
            ));
        }
        // Retransmitted SYNs have their own remark, as they are normal for a far peer.
        let again = sent
            .retransmitted
            .saturating_sub(sent.handshake_retransmitted);
        if sent.segments >= 10 && again * 3 > sent.segments {
            remarks.push(format!(
                "{again} of {} segments look retransmitted: is each packet in the capture twice (two interfaces of one \
                 path)?",
                sent.segments
            ));
        }
        remarks
    }
}
