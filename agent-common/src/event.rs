//! What the program tells while somebody listens: one retransmission each.

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
    /// Remote port as bpf_sock_ops has it: network byte order, in the upper half on little-endian.
    pub remote_port: u32,
    /// AF_INET or AF_INET6.
    pub family: u32,
    /// One of [`kind`].
    pub kind: u32,
    /// Which retransmission it is: 1 for the first.
    pub attempt: u32,
    /// The timer that fired, jiffies; 0 where the program cannot know.
    pub timer_jiffies: u32,
    /// `BPF_TCP_*`.
    pub state: u32,
    /// The connection's [`super::arm`].
    pub arm: u32,
    /// [`super::Policy::generation`] at the connection's beginning.
    pub generation: u32,
    /// One of [`super::direction`].
    pub direction: u32,
    /// Process that called connect(); 0: not known.
    pub pid: u32,
    /// Its name, padded with NUL.
    pub comm: [u8; COMM_LEN],
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// `TASK_COMM_LEN`.
pub const COMM_LEN: usize = 16;

/// Values of [`Event::kind`].
pub mod kind {
    /// A SYN was sent again.
    pub const SYN: u32 = 1;
    /// A SYN-ACK was sent again; told at once where [`super::LIVE`], else when the connection is
    /// established.
    pub const SYN_ACK: u32 = 2;
    /// A retransmission timeout of an established connection.
    pub const RTO: u32 = 3;
    /// A tail loss probe that sent a segment again.
    pub const TLP: u32 = 4;
    /// A segment was sent again without a timeout: fast retransmit, RACK.
    pub const FAST: u32 = 5;
}

/// Whether anybody listens ([`CONTROL`], written by the daemon alone), and what was lost ([`LOST`],
/// written by the programs alone).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventControl {
    /// Events for which the ring buffer had no room.
    pub lost: u64,
    /// Only listeners of this cgroup or one below, by its id (inode number); 0: of any.
    pub cgroup: u64,
    /// [`ON`] or [`LIVE`] while somebody listens, else 0.
    pub on: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// Somebody listens.
pub const ON: u32 = 1;
/// The same, and SYN-ACKs are told by the tracepoint, as they are sent again.
pub const LIVE: u32 = 2;

/// Index of what the daemon says.
pub const CONTROL: u32 = 0;
/// Index of what the programs count.
pub const LOST: u32 = 1;

/// Bytes of the ring buffer: 2,340 events.
pub const RING_BYTES: u32 = 1 << 18;

const _: () = {
    assert!(size_of::<Event>() == 8 + 16 + 16 + 11 * 4 + 16 + 4);
    assert!(size_of::<Event>() == 104);
    assert!(size_of::<EventControl>() == 24);
};

impl Event {
    /// A record of the ring buffer; `None` if it is not as long as one.
    #[must_use]
    pub fn from_bytes(record: &[u8]) -> Option<Self> {
        let record: &[u8; size_of::<Self>()] = record.try_into().ok()?;
        // SAFETY: repr(C) of integers and bytes alone, every bit pattern is one; the copy need not be
        // aligned.
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

    /// Each with the header of eight bytes that the kernel puts before it (`BPF_RINGBUF_HDR_SZ`).
    #[test]
    fn the_ring_has_room_for_as_many_as_it_says() {
        assert!(RING_BYTES.is_power_of_two());
        assert_eq!(RING_BYTES as usize / (size_of::<Event>() + 8), 2340);
    }

    #[test]
    fn what_is_longer_or_shorter_is_none() {
        let long = [0; size_of::<Event>() + 1];
        assert_eq!(Event::from_bytes(&long), None);
        assert_eq!(Event::from_bytes(&long[2..]), None);
        assert_eq!(Event::from_bytes(&[]), None);
    }
}
