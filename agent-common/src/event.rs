//! Events that the program sends while a client listens: one per retransmission.

/// One retransmission (an item of the ring buffer `EVENTS`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// bpf_ktime_get_ns(): CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Local address: IPv4 in the first word, or IPv6; network byte order.
    pub local: [u32; 4],
    /// Remote address, likewise.
    pub remote: [u32; 4],
    /// Local port.
    pub local_port: u32,
    /// Remote port in the layout of `bpf_sock_ops.remote_port`: network byte order, in the upper half on little-endian.
    pub remote_port: u32,
    /// AF_INET or AF_INET6.
    pub family: u32,
    /// One of [`kind`].
    pub kind: u32,
    /// Number of the retransmission: 1 for the first.
    pub attempt: u32,
    /// The timer that fired, jiffies; 0 if the program cannot know it.
    pub timer_jiffies: u32,
    /// `BPF_TCP_*`.
    pub state: u32,
    /// The connection's [`super::arm`].
    pub arm: u32,
    /// [`super::Policy::generation`] when the connection began.
    pub generation: u32,
    /// One of [`super::direction`].
    pub direction: u32,
    /// Process that called connect(); 0: unknown.
    pub pid: u32,
    /// The process's name, padded with NUL.
    pub comm: [u8; COMM_LEN],
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// `TASK_COMM_LEN`.
pub const COMM_LEN: usize = 16;

/// Values of [`Event::kind`].
pub mod kind {
    /// A retransmitted SYN.
    pub const SYN: u32 = 1;
    /// A retransmitted SYN-ACK; sent at once with [`super::LIVE`], otherwise when the connection is established.
    pub const SYN_ACK: u32 = 2;
    /// A retransmission timeout of an established connection.
    pub const RTO: u32 = 3;
    /// A tail loss probe that retransmitted a segment.
    pub const TLP: u32 = 4;
    /// A segment retransmitted without a timeout: fast retransmit, RACK.
    pub const FAST: u32 = 5;
}

/// Whether a client listens ([`CONTROL`], written by the daemon, except [`EventControl::overwritten`]), and how many
/// events were lost ([`LOST`], written only by the programs).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventControl {
    /// Events for which the ring buffer had no room.
    pub lost: u64,
    /// Only listening sockets in this cgroup or below it, by its id (inode number); 0: in any.
    pub cgroup: u64,
    /// [`ON`] or [`LIVE`] while a client listens, otherwise 0.
    pub on: u32,
    /// 1: another program overwrites callbacks, so that the connections of connect() get storage when they begin. Set by
    /// the programs; the daemon clears it when it writes the others, and the next loss sets it again.
    pub overwritten: u32,
}

/// A client listens.
pub const ON: u32 = 1;
/// A client listens, and the tracepoint sends an event for each SYN-ACK when it is retransmitted.
pub const LIVE: u32 = 2;

/// Index that the daemon writes.
pub const CONTROL: u32 = 0;
/// Index that the programs write.
pub const LOST: u32 = 1;

/// Bytes of the ring buffer: 2,340 events.
pub const RING_BYTES: u32 = 1 << 18;

impl Event {
    /// Parses a record of the ring buffer; `None` if its length is wrong.
    #[must_use]
    pub fn from_bytes(record: &[u8]) -> Option<Self> {
        let record: &[u8; size_of::<Self>()] = record.try_into().ok()?;
        // SAFETY: repr(C) of integers and bytes only, so every bit pattern is valid; the copy need not be aligned.
        Some(unsafe { core::ptr::read_unaligned(record.as_ptr().cast()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_fields_wherever_it_lies() {
        let mut ring = [0u8; size_of::<Event>() + 8];
        for (byte, n) in ring.iter_mut().zip(0..=u8::MAX) {
            *byte = n;
        }
        for begin in 0..8usize {
            let record = &ring[begin..begin + size_of::<Event>()];
            let word = |at: usize| {
                u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]])
            };
            let event = Event::from_bytes(record).unwrap();
            assert_eq!(event.time_ns.to_ne_bytes(), record[..8]);
            assert_eq!(event.local, [word(8), word(12), word(16), word(20)]);
            assert_eq!((event.local_port, event.pid), (word(40), word(80)));
            assert_eq!(event.comm, record[84..100]);
        }
    }

    /// Each event has the kernel's header of eight bytes before it (`BPF_RINGBUF_HDR_SZ`).
    #[test]
    fn the_ring_has_room_for_as_many_as_it_says() {
        assert!(RING_BYTES.is_power_of_two());
        assert_eq!(RING_BYTES as usize / (size_of::<Event>() + 8), 2340);
    }

    #[test]
    fn event_of_other_length_is_none() {
        let long = [0; size_of::<Event>() + 1];
        assert_eq!(Event::from_bytes(&long), None);
        assert_eq!(Event::from_bytes(&long[2..]), None);
        assert_eq!(Event::from_bytes(&[]), None);
    }
}
