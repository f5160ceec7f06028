//! Runs tcpdump in a namespace and parses its packets.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    net::{IpAddr, SocketAddr},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use etherparse::{LaxNetSlice, LaxSlicedPacket, TcpSlice, TransportSlice};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use pcap_parser::{
    LegacyPcapReader, Linktype, PcapBlockOwned, PcapError, traits::PcapReaderIterator as _,
};
use tempfile::NamedTempFile;

use crate::{
    netns,
    wait::{TIMEOUT, eventually, eventually_seen},
};

/// A running capture; tcpdump ends when it is dropped.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Child,
    file: NamedTempFile,
}

/// One TCP segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The kernel's timestamp, since the epoch.
    pub time: Duration,
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// SYN set.
    pub syn: bool,
    /// ACK set.
    pub ack: bool,
    /// Sequence number.
    pub seq: u32,
    /// Captured bytes of payload.
    pub length: usize,
    /// The flow label of IPv6; 0 for IPv4.
    pub flow_label: u32,
}

impl Capture {
    /// Starts tcpdump on a link and returns when it captures.
    pub fn start(netns: &str, link: &str) -> anyhow::Result<Self> {
        let file = NamedTempFile::new()?;
        let mut command = Command::new("tcpdump");
        command
            .args([
                "-i",
                link,
                "-n",
                "-s",
                "256",
                "-U",
                "--immediate-mode",
                "-Z",
                "root",
            ])
            .args(["--time-stamp-precision=nano", "-w"])
            .arg(file.path())
            .arg("tcp")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut tcpdump = netns::inside(netns, || command.spawn().context("tcpdump"))?;
        let stderr = tcpdump.stderr.take().context("no stderr")?;
        let capture = Self { tcpdump, file };
        let mut lines = BufReader::new(stderr).lines();
        let text = lines.find(|line| !line.as_ref().is_ok_and(|l| !l.contains("listening on")));
        ensure!(
            text.is_some_and(|line| line.is_ok()),
            "tcpdump did not start"
        );
        // Later messages of tcpdump are discarded. The reader must stay open, or tcpdump would fail when it writes one.
        std::thread::spawn(move || lines.for_each(drop));
        eventually("header of tcpdump's", TIMEOUT, || {
            let length = capture.file.path().metadata()?.len();
            Ok((length > 0).then_some(()))
        })?;
        Ok(capture)
    }

    /// The segments captured so far.
    pub fn so_far(&self) -> anyhow::Result<Vec<Segment>> {
        parse(File::open(self.file.path())?)
    }

    /// Waits until the segments satisfy a condition and returns them.
    pub fn wait_for(
        &self,
        limit: Duration,
        enough: impl Fn(&[Segment]) -> bool,
    ) -> anyhow::Result<Vec<Segment>> {
        eventually_seen("such segments", limit, || self.so_far(), |all| enough(all))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.tcpdump.id()) {
            let _ended = kill(Pid::from_raw(pid), Signal::SIGINT);
        }
        let _reaped = self.tcpdump.wait();
    }
}

/// SYNs (not SYN-ACKs) to an address, in order.
#[must_use]
pub fn syns(segments: &[Segment], to: SocketAddr) -> Vec<Segment> {
    segments
        .iter()
        .filter(|s| s.syn && !s.ack && s.to == to)
        .cloned()
        .collect()
}

/// SYN-ACKs from an address, in order.
#[must_use]
pub fn syn_acks(segments: &[Segment], from: SocketAddr) -> Vec<Segment> {
    segments
        .iter()
        .filter(|s| s.syn && s.ack && s.from == from)
        .cloned()
        .collect()
}

/// Groups segments of one kind by connection: by addresses and sequence number, which a retransmission keeps.
#[must_use]
pub fn by_connection(segments: &[Segment]) -> Vec<Vec<Segment>> {
    let mut all: Vec<Vec<Segment>> = Vec::new();
    for segment in segments {
        let is_same = |of: &&mut Vec<Segment>| {
            of.first()
                .is_some_and(|s| (s.from, s.to, s.seq) == (segment.from, segment.to, segment.seq))
        };
        match all.iter_mut().find(is_same) {
            Some(of) => of.push(segment.clone()),
            None => all.push(vec![segment.clone()]),
        }
    }
    all
}

/// Round-trip times of ping-pong traffic as seen on the wire of one end, by connection: from each segment with SYN or
/// data that leaves `end` to the next segment that arrives. The first of each connection is that of the handshake.
#[must_use]
pub fn round_trips(segments: &[Segment], end: IpAddr) -> Vec<Vec<Duration>> {
    type Connection = ((SocketAddr, SocketAddr), Option<Duration>, Vec<Duration>);
    let mut all: Vec<Connection> = Vec::new();
    for segment in segments {
        let leaves = segment.from.ip() == end;
        let (own, peer) = (segment.from, segment.to);
        let ends = if leaves { (own, peer) } else { (peer, own) };
        let index = all.iter().position(|of| of.0 == ends);
        let index = index.unwrap_or_else(|| {
            all.push((ends, None, Vec::new()));
            all.len() - 1
        });
        let (_, sent, times) = &mut all[index];
        if !leaves {
            times.extend(sent.take().map(|sent| segment.time.saturating_sub(sent)));
        } else if segment.syn || segment.length > 0 {
            sent.get_or_insert(segment.time);
        }
    }
    all.into_iter().map(|(_, _, times)| times).collect()
}

/// The time between each segment and the next.
#[must_use]
pub fn gaps(segments: &[Segment]) -> Vec<Duration> {
    segments
        .windows(2)
        .map(|pair| pair[1].time.saturating_sub(pair[0].time))
        .collect()
}

/// The segments of a capture in pcap format, up to an incomplete packet.
pub(crate) fn parse(file: File) -> anyhow::Result<Vec<Segment>> {
    let mut reader = LegacyPcapReader::new(1 << 16, file).map_err(|e| anyhow::anyhow!("{e:?}"))?;
    let mut segments = Vec::new();
    let (mut nanoseconds, mut is_ethernet) = (true, true);
    loop {
        match reader.next() {
            Ok((offset, block)) => {
                match block {
                    PcapBlockOwned::LegacyHeader(header) => {
                        nanoseconds = header.is_nanosecond_precision();
                        is_ethernet = header.network == Linktype::ETHERNET;
                    }
                    PcapBlockOwned::Legacy(packet) => {
                        let unit = if nanoseconds { 1 } else { 1_000 };
                        let time = Duration::from_secs(packet.ts_sec.into())
                            + Duration::from_nanos(u64::from(packet.ts_usec) * unit);
                        segments.extend(segment(time, packet.data, is_ethernet));
                    }
                    PcapBlockOwned::NG(_) => {}
                }
                reader.consume(offset);
            }
            Err(PcapError::Incomplete(_)) => {
                if reader.refill().is_err() || reader.reader_exhausted() {
                    return Ok(segments);
                }
            }
            // An incomplete packet: tcpdump is still writing it.
            Err(_) => return Ok(segments),
        }
    }
}

fn segment(time: Duration, frame: &[u8], is_ethernet: bool) -> Option<Segment> {
    // Lax, because the capture truncates long segments. A TUN device delivers packets without an Ethernet frame.
    let packet = if is_ethernet {
        LaxSlicedPacket::from_ethernet(frame).ok()?
    } else {
        LaxSlicedPacket::from_ip(frame).ok()?
    };
    let flow_label = match &packet.net {
        Some(LaxNetSlice::Ipv6(ip)) => ip.header().flow_label().value(),
        _ => 0,
    };
    let (from, to, tcp) = tcp(packet)?;
    Some(Segment {
        time,
        from,
        to,
        syn: tcp.syn(),
        ack: tcp.ack(),
        seq: tcp.sequence_number(),
        length: tcp.payload().len(),
        flow_label,
    })
}

/// Sender, receiver and TCP header of a packet; `None` if it is not TCP.
pub(crate) fn tcp(packet: LaxSlicedPacket<'_>) -> Option<(SocketAddr, SocketAddr, TcpSlice<'_>)> {
    let (from, to): (IpAddr, IpAddr) = match packet.net? {
        LaxNetSlice::Ipv4(ip) => (
            ip.header().source_addr().into(),
            ip.header().destination_addr().into(),
        ),
        LaxNetSlice::Ipv6(ip) => (
            ip.header().source_addr().into(),
            ip.header().destination_addr().into(),
        ),
        LaxNetSlice::Arp(_) => return None,
    };
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
        return None;
    };
    let (from, to) = ((from, tcp.source_port()), (to, tcp.destination_port()));
    Some((from.into(), to.into(), tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capture_yields_round_trips_of_connection() {
        let [client, server] = [1u8, 2].map(|host| SocketAddr::from(([10, 0, 0, host], 1)));
        let segment = |ms, leaves: bool, syn, length| Segment {
            time: Duration::from_millis(ms),
            from: if leaves { client } else { server },
            to: if leaves { server } else { client },
            syn,
            ack: ms > 0,
            seq: 0,
            length,
            flow_label: 0,
        };
        let all = [
            segment(0, true, true, 0),
            segment(20, false, true, 0),
            segment(21, true, false, 0),
            segment(22, true, false, 100),
            segment(45, false, false, 1),
            segment(85, true, false, 0),
        ];
        let ms = |ms: &[u64]| vec![ms.iter().map(|ms| Duration::from_millis(*ms)).collect()];
        let at_client: Vec<Vec<Duration>> = ms(&[20, 23]);
        assert_eq!(round_trips(&all, client.ip()), at_client);
        let at_server: Vec<Vec<Duration>> = ms(&[1, 40]);
        assert_eq!(round_trips(&all, server.ip()), at_server);
    }
}
