//! Writes a capture of the packets at one end of the emulated link, in tcpdump's format.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::Path,
    time::Duration,
};

/// Nanoseconds, host byte order (pcap-savefile(5)).
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
/// Enough for the headers and some data.
const SNAP_LENGTH: u32 = 128;
/// LINKTYPE_RAW: packets begin with the IP header.
const RAW: u32 = 101;

/// A capture file that is being written.
#[derive(Debug)]
pub(super) struct Pcap(BufWriter<File>);

impl Pcap {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&MAGIC.to_ne_bytes())?;
        for half in VERSION {
            file.write_all(&half.to_ne_bytes())?;
        }
        // Time zone and accuracy of the timestamps, which are always 0 (pcap-savefile(5)).
        for word in [0, 0, SNAP_LENGTH, RAW] {
            file.write_all(&word.to_ne_bytes())?;
        }
        Ok(Self(file))
    }

    /// Appends a packet, with its time since the epoch.
    pub(super) fn add(&mut self, at: Duration, packet: &[u8]) -> io::Result<()> {
        let seconds = u32::try_from(at.as_secs()).unwrap_or(u32::MAX);
        let length = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        let kept = length.min(SNAP_LENGTH);
        for word in [seconds, at.subsec_nanos(), kept, length] {
            self.0.write_all(&word.to_ne_bytes())?;
        }
        self.0.write_all(&packet[..kept as usize])
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;
    use crate::capture::parse;

    #[test]
    fn a_written_capture_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.pcap");
        let mut pcap = Pcap::create(&path).unwrap();
        let (near, far) = ([10, 89, 0, 1], [10, 89, 0, 2]);
        let data = PacketBuilder::ipv4(near, far, 64).tcp(1000, 80, 7, 500);
        let ack = PacketBuilder::ipv4(far, near, 64)
            .tcp(80, 1000, 1, 500)
            .ack(1007);
        let mut packet = Vec::new();
        data.ack(1).write(&mut packet, &[0; 1000]).unwrap();
        pcap.add(Duration::from_micros(5_000_000), &packet).unwrap();
        packet.clear();
        ack.write(&mut packet, &[]).unwrap();
        pcap.add(Duration::from_micros(5_030_000), &packet).unwrap();
        pcap.finish().unwrap();
        let read = parse(File::open(&path).unwrap()).unwrap();
        let seen: Vec<_> = read.iter().map(|s| (s.time.as_millis(), s.seq)).collect();
        assert_eq!(seen, [(5_000, 7), (5_030, 1)]);
    }
}
