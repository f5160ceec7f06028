//! Plain data shared by the rto-agent daemon and its eBPF program.
//!
//! Everything here crosses the kernel boundary through BPF maps, so it is
//! `repr(C)`, of fixed width, without implicit padding, and its layout is
//! asserted at compile time. Change a layout and [`LAYOUT_VERSION`] must go up:
//! pins of another version are replaced, never reinterpreted.
#![no_std]

pub mod address;
pub mod syncnt;

/// Version of every struct and map below; it is part of the pins' directory name.
pub const LAYOUT_VERSION: u32 = 1;

/// Slots of the `POLICIES` and `COUNTERS` arrays.
pub const MAX_POLICIES: u32 = 1024;

/// Slot 0 is nobody's: a zeroed map value can never name a policy.
pub const NO_POLICY: u32 = 0;

/// Bytes of a policy name in the kernel, padded with NUL.
pub const POLICY_NAME_LEN: usize = 64;

/// Entries of [`Policy::syn_retries`]: one for each value `TCP_SYNCNT` can have (0 to 127).
pub const SYN_RETRIES_LEN: usize = 128;

/// Names of the maps, in the object, in the kernel and as pins.
pub mod maps {
    /// LPM trie: IPv4 prefix -> [`super::EntryValue`].
    pub const ENTRIES_V4: &str = "ENTRIES_V4";
    /// LPM trie: IPv6 prefix -> [`super::EntryValue`].
    pub const ENTRIES_V6: &str = "ENTRIES_V6";
    /// Array: index -> [`super::Policy`].
    pub const POLICIES: &str = "POLICIES";
    /// Per-CPU array, same index -> [`super::Counters`].
    pub const COUNTERS: &str = "COUNTERS";
    /// Socket storage -> [`super::SocketState`].
    pub const SOCKETS: &str = "SOCKETS";
    /// All of them.
    pub const ALL: [&str; 5] = [ENTRIES_V4, ENTRIES_V6, POLICIES, COUNTERS, SOCKETS];
}

/// Name of the sock_ops program in the object.
pub const PROGRAM: &str = "rto_agent";

/// Value of both tries. Eight bytes: a node with an IPv6 key then still fits the
/// kernel's 64-byte allocation class.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryValue {
    /// Index into `POLICIES`; [`NO_POLICY`] is ignored.
    pub policy: u32,
    /// Connections this entry has decided: one for each connect() to it, one for each connection
    /// request from it that was answered and remembered (under SYN cookies none is). Counting
    /// ends at [`EntryValue::HITS_MAX`].
    pub hits: u32,
}

impl EntryValue {
    /// Hits from here on mean "as many, or more".
    pub const HITS_MAX: u32 = u32::MAX - u16::MAX as u32;
}

/// Settings of one policy, in the units the kernel takes. Zero leaves the kernel's own value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// UTF-8, padded with NUL; all NUL is a free slot.
    pub name: [u8; POLICY_NAME_LEN],
    /// Goes up each time the slot gets another policy, so that sockets of the
    /// former owner are not counted for the new one.
    pub generation: u32,
    /// Initial RTO of SYN and SYN-ACK, jiffies (`reply` of TIMEOUT_INIT).
    pub initial_rto_jiffies: u32,
    /// TCP_BPF_RTO_MIN, microseconds.
    pub rto_min_us: u32,
    /// TCP_BPF_DELACK_MAX, microseconds.
    pub delack_max_us: u32,
    /// TCP_RTO_MAX_MS, milliseconds.
    pub rto_max_ms: u32,
    /// TCP_USER_TIMEOUT, milliseconds; set once the connection is established.
    pub user_timeout_ms: u32,
    /// Bits of [`policy_flags`].
    pub flags: u32,
    /// RTOs in linear (thin) mode before backoff turns exponential; for the RTO hook.
    pub linear_retries: u32,
    /// TCP_SYNCNT to set, by the value in force on the socket; 0 leaves it.
    pub syn_retries: [u8; SYN_RETRIES_LEN],
}

/// Bits of [`Policy::flags`].
pub mod policy_flags {
    /// [`super::Policy`] decides TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR_SET: u32 = 1 << 0;
    /// The value it decides for.
    pub const THIN_LINEAR: u32 = 1 << 1;
}

/// What a policy did; one per policy and CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Initial RTOs set on connecting sockets, once a connection.
    pub syn_timeouts_set: u64,
    /// Initial RTOs set on connection requests (SYN-ACK), once a request.
    pub syn_ack_timeouts_set: u64,
    /// connect() calls that reached ESTABLISHED.
    pub established_active: u64,
    /// Accepted connections that reached ESTABLISHED.
    pub established_passive: u64,
    /// SYNs sent again, also by connections that never got through.
    pub syn_retransmissions: u64,
    /// SYN-ACKs sent again before a connection was established. Those of
    /// requests that never complete are not seen by a sock_ops program.
    pub syn_ack_retransmissions: u64,
    /// Failed bpf_setsockopt calls, by [`SockOpt`].
    pub setsockopt_failures: [u64; SockOpt::COUNT],
    /// Connections left alone because socket storage could not be had (memory).
    pub storage_failures: u64,
    /// Keeps the size a multiple of 64.
    pub reserved: u64,
}

impl Counters {
    /// The sum of two, for adding up CPUs.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            syn_timeouts_set: self.syn_timeouts_set.wrapping_add(other.syn_timeouts_set),
            syn_ack_timeouts_set: self
                .syn_ack_timeouts_set
                .wrapping_add(other.syn_ack_timeouts_set),
            established_active: self
                .established_active
                .wrapping_add(other.established_active),
            established_passive: self
                .established_passive
                .wrapping_add(other.established_passive),
            syn_retransmissions: self
                .syn_retransmissions
                .wrapping_add(other.syn_retransmissions),
            syn_ack_retransmissions: self
                .syn_ack_retransmissions
                .wrapping_add(other.syn_ack_retransmissions),
            setsockopt_failures: core::array::from_fn(|i| {
                self.setsockopt_failures[i].wrapping_add(other.setsockopt_failures[i])
            }),
            storage_failures: self.storage_failures.wrapping_add(other.storage_failures),
            reserved: 0,
        }
    }
}

/// Options the program sets, as index of [`Counters::setsockopt_failures`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SockOpt {
    /// TCP_SYNCNT.
    SynCnt = 0,
    /// TCP_BPF_RTO_MIN.
    RtoMin = 1,
    /// TCP_BPF_DELACK_MAX.
    DelackMax = 2,
    /// TCP_THIN_LINEAR_TIMEOUTS.
    ThinLinear = 3,
    /// TCP_RTO_MAX_MS.
    RtoMax = 4,
    /// TCP_USER_TIMEOUT.
    UserTimeout = 5,
}

impl SockOpt {
    /// Number of options, with room for two more.
    pub const COUNT: usize = 8;
    /// Every option with the kernel's name for it.
    pub const NAMES: [(Self, &'static str); 6] = [
        (Self::SynCnt, "TCP_SYNCNT"),
        (Self::RtoMin, "TCP_BPF_RTO_MIN"),
        (Self::DelackMax, "TCP_BPF_DELACK_MAX"),
        (Self::ThinLinear, "TCP_THIN_LINEAR_TIMEOUTS"),
        (Self::RtoMax, "TCP_RTO_MAX_MS"),
        (Self::UserTimeout, "TCP_USER_TIMEOUT"),
    ];
}

/// What a socket remembers between callbacks (value of `SOCKETS`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// bpf_ktime_get_ns() when the handshake began (active) or was seen to end (passive).
    pub handshake_start_ns: u64,
    /// Index into `POLICIES`; [`NO_POLICY`] once the socket was reconnected to an address without an entry.
    pub policy: u32,
    /// [`Policy::generation`] of that policy at that time.
    pub generation: u32,
    /// Initial RTO this connection began with, jiffies; asked again at each SYN timeout.
    pub initial_rto_jiffies: u32,
    /// The socket's total_retrans already counted.
    pub retransmissions_counted: u32,
    /// TCP_SYNCNT the socket had before this program set another; 0: not touched.
    pub syn_retries_before: u32,
    /// TCP_SYNCNT this program set; 0: not touched.
    pub syn_retries_set: u32,
    /// 1 once the initial RTO was given for this connection attempt.
    pub timeouts_set: u32,
    /// [`Policy::user_timeout_ms`] this connection began with, for when it is established.
    pub user_timeout_ms: u32,
}

impl Policy {
    /// A free slot.
    pub const EMPTY: Self = Self {
        name: [0; POLICY_NAME_LEN],
        generation: 0,
        initial_rto_jiffies: 0,
        rto_min_us: 0,
        delack_max_us: 0,
        rto_max_ms: 0,
        user_timeout_ms: 0,
        flags: 0,
        linear_retries: 0,
        syn_retries: [0; SYN_RETRIES_LEN],
    };

    /// The name without its padding; `None` for a free slot or bytes that are not UTF-8.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        let end = self
            .name
            .iter()
            .position(|&b| b == 0)
            .unwrap_or(POLICY_NAME_LEN);
        match core::str::from_utf8(&self.name[..end]) {
            Ok("") | Err(_) => None,
            Ok(name) => Some(name),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::EMPTY
    }
}

const _: () = {
    assert!(size_of::<EntryValue>() == 8);
    assert!(size_of::<Policy>() == 64 + 8 * 4 + 128);
    assert!(size_of::<Counters>() == 128);
    assert!(size_of::<SocketState>() == 40);
    assert!(core::mem::offset_of!(Policy, generation) == 64);
    assert!(core::mem::offset_of!(Policy, syn_retries) == 96);
    assert!(core::mem::offset_of!(Counters, setsockopt_failures) == 48);
    assert!(core::mem::offset_of!(SocketState, policy) == 8);
};

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), fixed-width integers only, sizes asserted above to be free of padding.
    unsafe impl aya::Pod for super::EntryValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Policy {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Counters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketState {}
}
