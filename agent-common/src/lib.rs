//! Plain data shared by the rto-agent daemon and its eBPF program.
//!
//! Everything here crosses the kernel boundary through BPF maps, so it is
//! `repr(C)`, of fixed width, without implicit padding, and its layout is
//! asserted at compile time. Change a layout and [`LAYOUT_VERSION`] must go up:
//! pins of another version are replaced, never reinterpreted.
#![no_std]

pub mod address;
pub mod arm;
pub mod discovery;
pub mod event;
pub mod fallback;
pub mod histogram;
mod kernel_types;
mod layout;
mod policy;
pub mod restart;
pub mod series;
mod socket;
mod socket_option;
pub mod syn;
pub mod wheel;

pub use kernel_types::{Offsets, SocketTypes, kfunc};
pub use layout::LAYOUT_VERSION;
pub use policy::{HostDefaults, Policy, PolicySlot, lasting, policy_flags};
pub use socket::{
    Handshake, MAX_KEPT, Options, Remembered, Schedule, SocketState, Watch, schedule_flags,
    settled, socket_flags,
};
pub use socket_option::{
    Kept, LARGEST_US, Own, RTO_MAX_MS, Row, SockOpt, TABLE as SOCKET_OPTIONS, When, also,
};

use histogram::Histogram;

/// Maximum number of active policies.
pub const MAX_POLICIES: u32 = 1024;

/// Slots of the `POLICIES` array: room for two whole configurations, because the old and the new policies coexist while
/// one replaces the other.
pub const SLOTS: u32 = FIRST_SLOT + 2 * MAX_POLICIES;

/// The first slots, whose counters and path RTTs are in `COUNTERS`: 134 kB per CPU. An array, unlike the hash,
/// allocates all of its memory when it is created, so it covers only these slots.
pub const FAST_SLOTS: u32 = 32;

/// Slot 0 belongs to no policy, so that a zeroed map value never refers to one.
pub const NO_POLICY: u32 = 0;

/// The slot of connections that no entry covers, if they are counted: a policy without settings.
pub const UNMATCHED: u32 = 1;

/// The slot with the settings of control arms ([`arm`]), which set nothing.
pub const CONTROL: u32 = 2;

/// The first slot that a policy of the configuration may have.
pub const FIRST_SLOT: u32 = 3;

/// Which side opened a connection; a policy has one [`Statistics`] for each.
pub mod direction {
    /// This host, by connect().
    pub const ACTIVE: u32 = 0;
    /// The peer; this host accepted it.
    pub const PASSIVE: u32 = 1;
    /// Not known: the socket was open before its policy was applied.
    pub const UNKNOWN: u32 = 2;
    /// All of them.
    pub const ALL: [u32; 3] = [ACTIVE, PASSIVE, UNKNOWN];
}

/// Key of the `STATISTICS` of an [`arm`] and a direction; 0 is no policy. Keys of [`direction::UNKNOWN`] follow all
/// other keys, so that `COUNTERS` does not cover them: they count few connections.
#[inline(always)]
#[must_use]
pub const fn statistics_key(arm: u32, direction: u32) -> u32 {
    let unknown = (direction & direction::UNKNOWN) << UNKNOWN_SHIFT;
    arm << 1 | direction & direction::PASSIVE | unknown
}

/// Moves keys of [`direction::UNKNOWN`] past the keys of every arm.
const UNKNOWN_SHIFT: u32 = (arm::treated(SLOTS) << 1).ilog2();

/// Length of `COUNTERS`.
pub const FAST_COUNTERS: u32 = arm::treated(FAST_SLOTS) << 1;

/// Indexes of `SCHEDULES`: SYN schedules ([`socket_flags::SYN_SCHEDULE`]).
pub mod schedules {
    /// Connecting sockets that have a schedule.
    pub const SOCKETS: u32 = 0;
    /// 1: no timer is shaped, because the program is about to be unloaded.
    pub const STOPPED: u32 = 1;
    /// Sockets on which RTO_CB has found the options of the moment before: this kernel does not run TIMEOUT_INIT after
    /// it arms the timer. If it is not 0, no timer is shaped.
    pub const LEFT_SET: u32 = 2;
    /// When the policies were made to leave new connections alone, seconds of CLOCK_BOOTTIME; 0: they were not. Written
    /// and read by the daemon alone.
    pub const DRAINING_SINCE_S: u32 = 3;
    /// Number of indexes.
    pub const LEN: u32 = 4;
}

/// SO_MARK of the agent's own probe of the active timers: its connection gets its policy like any other but is not
/// counted.
pub const PROBE_MARK: u32 = 0x7274_6f70;

/// Bytes of a policy name in the kernel, padded with NUL.
pub const POLICY_NAME_LEN: usize = 64;

/// Entries of [`Policy::syn_ack_rto_jiffies`]: one for each number of SYN-ACK retransmissions (0 to 15).
pub const SYN_ACK_RETRIES_LEN: usize = 16;

/// Names of the maps, in the object, in the kernel and as pins.
pub mod maps {
    /// LPM trie: IPv4 prefix -> [`super::EntryValue`].
    pub const ENTRIES_V4: &str = "ENTRIES_V4";
    /// LPM trie: IPv6 prefix -> [`super::EntryValue`].
    pub const ENTRIES_V6: &str = "ENTRIES_V6";
    /// Array: index -> [`super::PolicySlot`].
    pub const POLICIES: &str = "POLICIES";
    /// Array of one: [`super::HostDefaults`].
    pub const HOST_DEFAULTS: &str = "HOST_DEFAULTS";
    /// Array: [`super::lasting::index`] -> [`super::lasting::bit`]s: values that policies have set since the maps
    /// were created. On a socket without storage, options with such a value are restored.
    pub const LASTING: &str = "LASTING";
    /// Per-CPU array: [`super::statistics_key`] -> [`super::FastStatistics`] of the first [`super::FAST_SLOTS`] slots.
    pub const COUNTERS: &str = "COUNTERS";
    /// Per-CPU hash: [`super::statistics_key`] -> [`super::Statistics`]: everything that is not in `COUNTERS`.
    pub const STATISTICS: &str = "STATISTICS";
    /// Socket storage -> [`super::SocketState`].
    pub const SOCKETS: &str = "SOCKETS";
    /// Array: [`super::fallback::key`] -> [`super::fallback::Fallback`].
    pub const FALLBACKS: &str = "FALLBACKS";
    /// Array: an index of [`super::schedules`] -> u64. Its layout is the same in all versions.
    pub const SCHEDULES: &str = "SCHEDULES";
    /// LRU hash: [`super::discovery::Prefix`] -> [`super::discovery::Discovered`]: peers that no entry covers.
    pub const DISCOVERED: &str = "DISCOVERED";
    /// Ring buffer of [`super::event::Event`].
    pub const EVENTS: &str = "EVENTS";
    /// Array of two: [`super::event::EventControl`].
    pub const EVENT_CONTROL: &str = "EVENT_CONTROL";
    /// Array of one: [`super::WalkControl`], the task of a walk over open sockets. Not pinned.
    pub const WALK_CONTROL: &str = "WALK_CONTROL";
    /// Array: policy slot -> [`super::WalkCounts`], the results of the walk. Not pinned.
    pub const WALK_COUNTS: &str = "WALK_COUNTS";
    /// Array of one: [`super::Probe`], the kernel's answers. Not pinned.
    pub const PROBE: &str = "PROBE";
    /// All pinned maps.
    pub const ALL: [&str; 13] = [
        ENTRIES_V4,
        ENTRIES_V6,
        POLICIES,
        HOST_DEFAULTS,
        LASTING,
        COUNTERS,
        STATISTICS,
        SOCKETS,
        FALLBACKS,
        SCHEDULES,
        DISCOVERED,
        EVENTS,
        EVENT_CONTROL,
    ];
}

/// Name of the sock_ops program in the object.
pub const PROGRAM: &str = "rto_agent";
/// Name of the program at `lsm_cgroup/inet_csk_clone`.
pub const PROGRAM_CLONE: &str = "rto_clone";
/// Name of the program at `iter/tcp`.
pub const PROGRAM_WALK: &str = "rto_walk";
/// Name of the program at `tp_btf/tcp_retransmit_synack`.
pub const PROGRAM_SYN_ACK: &str = "rto_synack";
/// Name of the sock_ops program that probes the kernel's features.
pub const PROGRAM_PROBE: &str = "rto_probe";

/// Names of the read-only globals that the loader writes: settings of the programs, and byte offsets in the running
/// kernel's structs, from its BTF.
pub mod globals {
    /// u32: jiffies per second.
    pub const HZ: &str = "HZ";
    /// u8: bits of [`super::statistics`].
    pub const STATISTICS_MODE: &str = "STATISTICS_MODE";
    /// u8: bits of [`super::features`].
    pub const FEATURES: &str = "FEATURES";
    /// u64: minimum time between two samples of a connection's smoothed RTT, nanoseconds; 0: only one, when it ends.
    pub const RTT_INTERVAL_NS: &str = "RTT_INTERVAL_NS";
    /// u32: samples 1 in N loss-free connections until they close; 1: all.
    pub const SAMPLING: &str = "SAMPLING";
    /// u8: 1 if the kernel runs TIMEOUT_INIT after it has armed a SYN's timer, so that timers can be shaped.
    pub const SHAPES_SYNS: &str = "SHAPES_SYNS";
    /// u64: cookie of the socket that probes the kernel's features.
    pub const PROBE_COOKIE: &str = "PROBE_COOKIE";
    /// u32 each: the fields of [`super::SocketTypes`], in their order.
    pub const SOCKET_TYPES: [&str; 29] = [
        "OFFSET_IS_MPTCP",
        "OFFSET_FASTOPEN_REQ",
        "OFFSET_NET",
        "OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT",
        "OFFSET_SYNACK_RETRIES",
        "OFFSET_SYN_RETRIES",
        "OFFSET_DEFER_ACCEPT",
        "OFFSET_LISTENER",
        "OFFSET_CONTEXT_SK",
        "OFFSET_RTO",
        "OFFSET_RTO_MIN",
        "OFFSET_DELACK_MAX",
        "OFFSET_USER_TIMEOUT",
        "OFFSET_RETRANSMITS",
        "OFFSET_NET_SYN_RETRIES",
        "OFFSET_NET_SYN_LINEAR_TIMEOUTS",
        "OFFSET_NET_RTO_MIN",
        "OFFSET_NET_THIN_LINEAR",
        "OFFSET_RTO_MAX",
        "OFFSET_RETRANS_STAMP",
        "OFFSET_TIMER_EXPIRES",
        "OFFSET_TXREHASH",
        "OFFSET_DST_CACHE",
        "OFFSET_METRICS",
        "OFFSET_MAX_ACK_BACKLOG",
        "OFFSET_TOTAL_RTO_TIME",
        "TYPE_CONNECTION_SOCK",
        "TYPE_TCP_SOCK",
        "TYPE_DST_METRICS",
    ];
    /// u32 each: the fields of [`super::Offsets`], in their order.
    pub const OFFSETS: [&str; 16] = [
        "OFFSET_FAMILY",
        "OFFSET_STATE",
        "OFFSET_DADDR",
        "OFFSET_V6_DADDR",
        "OFFSET_CGROUP",
        "OFFSET_CGROUP_KN",
        "OFFSET_KN_ID",
        "OFFSET_CSS_PARENT",
        "OFFSET_CSS_CGROUP",
        "OFFSET_RCV_SADDR",
        "OFFSET_V6_RCV_SADDR",
        "OFFSET_DPORT",
        "OFFSET_NUM",
        "OFFSET_NUM_RETRANS",
        "OFFSET_REQUEST_TIMEOUT",
        "OFFSET_CB_FLAGS",
    ];
}

/// Bits of [`globals::STATISTICS_MODE`].
pub mod statistics {
    /// Statistics are on.
    pub const ON: u8 = 1 << 0;
    /// Connections that no entry covers are counted at [`super::UNMATCHED`], and some are noted in
    /// [`super::maps::DISCOVERED`].
    pub const UNMATCHED: u8 = 1 << 1;
    /// The smoothed RTT of a connection is sampled when it ends.
    pub const RTT_AT_END: u8 = 1 << 2;
    /// Sock_ops programs may call `bpf_get_current_comm()` for the current process.
    pub const PROCESS: u8 = 1 << 3;
}

/// Bits of [`globals::FEATURES`]: what few policies need. The code of other features is not part of the loaded program.
pub mod features {
    /// `rto_restart` ([`super::restart`]).
    pub const RTO_RESTART: u8 = 1 << 0;
    /// All of them.
    pub const ALL: u8 = RTO_RESTART;
}

/// Value of both tries. At eight bytes, a node with an IPv6 key still fits the kernel's 64-byte allocation class.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryValue {
    /// The lower [`EntryValue::SLOT_BITS`] are an index into `POLICIES`; [`NO_POLICY`] is ignored. The upper bits are
    /// the entry's end, in units of 2^[`EntryValue::END_SHIFT`] ns of CLOCK_BOOTTIME; 0: none.
    pub policy_and_end: u32,
    /// Connections that matched this entry: one for each connect(), one for each connection request that the kernel
    /// answered and kept (under SYN cookies it keeps none). Exact up to [`EntryValue::HITS_EXACT`], then an estimate;
    /// stops at [`EntryValue::HITS_MAX`].
    pub hits: u32,
}

impl EntryValue {
    /// Bits of a policy's slot.
    pub const SLOT_BITS: u32 = 12;
    /// The unit of an end, 68.7 s, as a power of two of nanoseconds: ends up to 834 days after boot are in range.
    pub const END_SHIFT: u32 = 36;

    /// An entry that points to this slot and expires at `end` ([`EntryValue::end_at`]; 0: never).
    #[must_use]
    pub const fn new(slot: u32, end: u32) -> Self {
        Self {
            policy_and_end: slot | end << Self::SLOT_BITS,
            hits: 0,
        }
    }

    /// The slot of the entry's policy.
    #[inline(always)]
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.policy_and_end & ((1 << Self::SLOT_BITS) - 1)
    }

    /// When the entry expires, in units of 2^[`EntryValue::END_SHIFT`] ns of CLOCK_BOOTTIME; 0: never.
    #[inline(always)]
    #[must_use]
    pub const fn end(self) -> u32 {
        self.policy_and_end >> Self::SLOT_BITS
    }

    /// The end of an entry that expires at this time (milliseconds of CLOCK_BOOTTIME), rounded up to the next unit; 0
    /// if it is out of range.
    #[must_use]
    pub fn end_at(boot_ms: u64) -> u32 {
        let end = (u128::from(boot_ms) * 1_000_000).div_ceil(1 << Self::END_SHIFT);
        let is_in_range = |end: &u32| *end < 1 << (u32::BITS - Self::SLOT_BITS);
        u32::try_from(end).ok().filter(is_in_range).unwrap_or(0)
    }

    /// Whether the entry has expired: the daemon removes expired entries, but it may not be running. `boot_ns`, the
    /// time of CLOCK_BOOTTIME in nanoseconds, is read only for an entry with an end.
    #[inline(always)]
    #[must_use]
    pub fn is_over(self, boot_ns: impl FnOnce() -> u64) -> bool {
        self.end() != 0 && boot_ns() >> Self::END_SHIFT >= self.end().into()
    }

    /// From this value, hits mean "at least this many".
    pub const HITS_MAX: u32 = u32::MAX - u16::MAX as u32;
    /// From this value, hits are counted by sampling.
    pub const HITS_EXACT: u32 = 1024;
    /// One hit in this many is sampled, and counts as this many; a power of two.
    pub const HITS_SHARE: u32 = 16;
}

/// Counters of a policy; one per direction and CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that reached ESTABLISHED after a handshake of unknown duration. All others are in the histogram of
    /// connect times ([`Statistics::connect_times`]).
    pub untimed: u64,
    /// Attempts. Active: connect() calls that send a SYN. Passive: requests from covered peers that the kernel answers
    /// (under SYN cookies the program sees none).
    pub attempts: u64,
    /// Retransmitted SYNs, including those of failed connections; retransmitted SYN-ACKs of connections that were
    /// established (a sock_ops program does not see SYN-ACKs of requests that never complete).
    pub handshake_retransmissions: u64,
    /// Of these, spurious: the answer to an earlier copy was already under way.
    pub spurious: u64,
    /// Of these, undecided: the connection was established, but not enough was known to judge them.
    pub undecided: u64,
    /// Connections established thanks to a needed retransmission.
    pub recovered: u64,
    /// How much earlier connections were established than with the kernel's timers, microseconds. The outage ended after
    /// the last SYN but one. The kernel's first timeout after that one is the earliest that would have got the answer, so
    /// this is never above the truth.
    pub time_saved_us: u64,
    /// How much later, microseconds.
    pub time_lost_us: u64,
    /// Failed bpf_setsockopt calls, by [`SockOpt`].
    pub setsockopt_failures: [u64; SockOpt::COUNT],
    /// Connections whose socket storage could not be allocated: they lack options of the policy, or are not fully
    /// counted.
    pub storage_failures: u64,
    /// Retransmission timeouts of established connections (RFC 6298 section 5.4), by the number of unanswered timeouts
    /// directly before: 0, 1, ... and 7 or more.
    pub rtos: [u64; RTO_STEPS],
    /// Connections that the kernel gave up at a retransmission timeout (ETIMEDOUT).
    pub expired: u64,
    /// Tail loss probes (RFC 8985 section 7) that retransmitted a segment. A sock_ops program does not see probes that
    /// send new data.
    pub tail_loss_probes: u64,
    /// Segments retransmitted by established connections, except by tail loss probes.
    pub segments_retransmitted: u64,
    /// How often `linear_retries` ended the linear mode of a thin stream.
    pub linear_ended: u64,
    /// Sockets that were already open when a walk applied the policy's options to them.
    pub open_sockets: u64,
    /// Connections that ended before both sides had finished: reset, timed out, or closed with unread data. Includes
    /// `expired`.
    pub aborted: u64,
    /// Connections established more than [`GOOD_US`] after their first SYN. All others are good attempts. (For accepted
    /// connections the program does not see the first SYN-ACK: the last round trip of the handshake counts instead.)
    pub late: u64,
    /// Connections with a spurious retransmission in the handshake.
    pub spurious_connections: u64,
    /// Connections with a loss whose peer reported duplicate segments (DSACK, RFC 2883).
    pub dsack_connections: u64,
    /// Connections whose SYN or SYN-ACK was retransmitted before they were established.
    pub retransmitted_handshakes: u64,
    /// Connections of `aborted` with a loss. All of them are counted, whatever the sampling rate.
    pub aborted_after_loss: u64,
    /// Connections that began with the kernel's timers because of a [`fallback`].
    pub fallbacks: u64,
    /// Connections with a loss whose callbacks another program had overwritten: the program has not seen all of their
    /// losses, and cannot prove that it set their timers.
    pub callbacks_lost: u64,
    /// How much earlier established connections got an answer than with the kernel's own rto_min, microseconds
    /// ([`series`]).
    pub data_time_saved_us: u64,
    /// At most how much later, microseconds. The difference of both is never above the truth.
    pub data_time_lost_us: u64,
    /// Keeps the size a multiple of 32, so that the counters that every connection updates share a cache line.
    pub reserved: [u64; 3],
}

/// An attempt is good if it is established within this time, microseconds.
pub const GOOD_US: u32 = 500_000;

/// All statistics of a policy, a direction and a CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Counts.
    pub counters: Counters,
    /// Path RTTs: round-trip times of handshakes without the time lost to losses. Each loss-free connection counts
    /// exactly once; others count if their path RTT became known.
    pub path_rtt: Histogram,
    /// Smoothed round-trip times (RFC 6298 section 2, SRTT).
    pub srtt: Histogram,
    /// The difference between connect times and path RTTs. Each connection with a loss in its handshake adds 1 to the
    /// bucket of its connect time, and subtracts 1 from the bucket of its path RTT when that is counted. Sums wrap.
    pub lossy: Histogram,
}

/// The first fields of [`Statistics`], which any connection may update.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastStatistics {
    /// Counts.
    pub counters: Counters,
    /// [`Statistics::path_rtt`].
    pub path_rtt: Histogram,
}

impl From<FastStatistics> for Statistics {
    fn from(fast: FastStatistics) -> Self {
        Self {
            counters: fast.counters,
            path_rtt: fast.path_rtt,
            ..Self::default()
        }
    }
}

/// Length of [`Counters::rtos`].
pub const RTO_STEPS: usize = 8;

impl Statistics {
    const WORDS: usize = size_of::<Self>() / size_of::<u64>();

    /// Adds the statistics of another CPU.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        let (a, b) = (self.words(), other.words());
        Self::from_words(core::array::from_fn(|i| a[i].wrapping_add(b[i])))
    }

    /// Connect times: from the first SYN to ESTABLISHED, losses included. For an accepted connection the time starts at
    /// its first SYN-ACK, if that time is known. A bucket may be one too low, because the counts of different CPUs are
    /// not read at the same moment.
    #[must_use]
    pub fn connect_times(&self) -> Histogram {
        let sum = |a: u64, b: u64| {
            let sum = a.wrapping_add(b);
            if sum.cast_signed() < 0 { 0 } else { sum }
        };
        Histogram {
            sum_us: sum(self.path_rtt.sum_us, self.lossy.sum_us),
            buckets: core::array::from_fn(|i| sum(self.path_rtt.buckets[i], self.lossy.buckets[i])),
        }
    }

    /// Connections that reached ESTABLISHED.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.connect_times().buckets.iter().sum::<u64>() + self.counters.untimed
    }

    fn words(&self) -> [u64; Self::WORDS] {
        // SAFETY: repr(C) with only u64 fields, so both types have the same bytes.
        unsafe { core::mem::transmute(*self) }
    }

    fn from_words(words: [u64; Self::WORDS]) -> Self {
        // SAFETY: as above.
        unsafe { core::mem::transmute(words) }
    }
}

/// The task of a walk over the open sockets of a network namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkControl {
    /// Only sockets in this cgroup or below it, by its id (inode number), or [`WalkControl::ANY`]. Sockets with storage
    /// are restored wherever they are.
    pub cgroup: u64,
    /// One of [`walk_mode`].
    pub mode: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
    /// The namespace's defaults of the options that policies set, by [`SockOpt`].
    pub defaults: [u32; MAX_KEPT],
}

impl WalkControl {
    /// Sockets of any cgroup.
    pub const ANY: u64 = 0;
    /// Sockets of no cgroup.
    pub const NONE: u64 = u64::MAX;
}

/// Values of [`WalkControl::mode`].
pub mod walk_mode {
    /// Apply its policy's options to every socket that an entry covers.
    pub const APPLY: u32 = 0;
    /// As [`APPLY`], but skip sockets that already have a policy.
    pub const APPLY_TO_NEW: u32 = 1;
    /// Restore the options that the program set.
    pub const RESTORE: u32 = 2;
}

/// Results of a walk, by policy; slot 0 counts sockets that no entry covers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkCounts {
    /// Sockets examined.
    pub seen: u32,
    /// Sockets whose options were set or restored.
    pub changed: u32,
    /// Sockets that were skipped because they already had a policy.
    pub kept: u32,
    /// Sockets for which the kernel refused at least one option.
    pub refused: u32,
}

/// The kernel's answers to the probe: 0, or a negative errno.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// 1 after the program has seen the probe's socket.
    pub ran: i64,
    /// 0 if socket storage could be created.
    pub storage: i64,
    /// bpf_setsockopt, by [`SockOpt`].
    pub set: [i64; SockOpt::COUNT],
    /// bpf_getsockopt, by [`SockOpt`].
    pub get: [i64; SockOpt::COUNT],
    /// bpf_sock_ops_cb_flags_set().
    pub cb_flags: i64,
    /// 1 after RETRANS_CB of the SYN.
    pub retransmitted: i64,
    /// 1 after the TIMEOUT_INIT that followed it.
    pub armed: i64,
}

const _: () = assert!(SLOTS <= 1 << EntryValue::SLOT_BITS);

#[cfg(feature = "user")]
mod pod;

#[cfg(test)]
mod tests;
