//! Plain data shared by the rto-agent daemon and its eBPF program.
//!
//! Everything here crosses the kernel boundary through BPF maps, so it is
//! `repr(C)`, of fixed width, without implicit padding, and its layout is
//! asserted at compile time. Change a layout and [`LAYOUT_VERSION`] must go up:
//! pins of another version are replaced, never reinterpreted.
#![no_std]

pub mod address;
pub mod arm;
pub mod brake;
pub mod discovery;
pub mod event;
pub mod histogram;
mod kernel_types;
mod policy;
pub mod restart;
mod socket;
pub mod syncnt;

pub use kernel_types::{Offsets, SocketTypes, kfunc};
pub use policy::{GAINS, HostDefaults, Policy, PolicySlot, lasting, policy_flags};
pub use socket::{Handshake, Options, Remembered, SocketState, Watch, settled, socket_flags};

use histogram::Histogram;

/// Version of every struct and map below; it is part of the pins' directory name.
pub const LAYOUT_VERSION: u32 = 11;

/// Policies that may be in force at once.
pub const MAX_POLICIES: u32 = 1024;

/// Slots of the `POLICIES` array. While one configuration replaces another the policies of both are there.
pub const SLOTS: u32 = FIRST_SLOT + 2 * MAX_POLICIES;

/// Slots whose counters and handshake times lie in `COUNTERS`: 134 kB a CPU. (An array takes all of its memory at once,
/// and has to have room for the most policies there can be, unlike the hash.)
pub const FAST_SLOTS: u32 = 32;

/// Slot 0 belongs to no policy: a zeroed map value can never name one.
pub const NO_POLICY: u32 = 0;

/// The slot of connections that no entry covers, where these are counted: a policy without settings.
pub const UNMATCHED: u32 = 1;

/// The slot of the settings that control arms ([`arm`]) have: none.
pub const CONTROL: u32 = 2;

/// The same for control arms in which delays of ACKs are counted ([`policy_flags::MEASURES_ACKS`]).
pub const CONTROL_OF_ACKS: u32 = 3;

/// The first slot that a policy of the configuration may have.
pub const FIRST_SLOT: u32 = 4;

/// Who began a connection; a policy has one [`Statistics`] for each.
pub mod direction {
    /// This host, by connect().
    pub const ACTIVE: u32 = 0;
    /// The peer; this host accepted it.
    pub const PASSIVE: u32 = 1;
    /// Not known: the socket was open already when its policy came.
    pub const UNKNOWN: u32 = 2;
    /// All of them.
    pub const ALL: [u32; 3] = [ACTIVE, PASSIVE, UNKNOWN];
}

/// Key of the `STATISTICS` of an [`arm`] for a direction; 0 is that of no policy. Those of an unknown direction, in which
/// few count, lie beyond all others.
#[inline(always)]
#[must_use]
pub const fn statistics_key(arm: u32, direction: u32) -> u32 {
    let unknown = (direction & direction::UNKNOWN) << UNKNOWN_SHIFT;
    arm << 1 | direction & direction::PASSIVE | unknown
}

/// Takes [`direction::UNKNOWN`] beyond the keys of every arm.
const UNKNOWN_SHIFT: u32 = (arm::treated(SLOTS) << 1).ilog2();

/// Length of `COUNTERS`.
pub const FAST_COUNTERS: u32 = arm::treated(FAST_SLOTS) << 1;

/// Places in `LEASE`: until when automatic values are in force. Reading the clock costs each connection more than all that
/// is done for them beside, so that a program reads it once for each renewal, and jiffies from then on.
pub mod lease {
    /// The lease's end, nanoseconds of CLOCK_MONOTONIC: what the daemon writes.
    pub const UNTIL_NS: u32 = 0;
    /// The one that programs go by.
    pub const SEEN_NS: u32 = 1;
    /// The same time in jiffies.
    pub const SEEN_JIFFIES: u32 = 2;
    /// Number of places.
    pub const LEN: u32 = 3;
}

/// SO_MARK of the agent's own probe of the timers in force: its connection gets its policy as any
/// other does, and is in no count.
pub const PROBE_MARK: u32 = 0x7274_6f70;

/// Bytes of a policy name in the kernel, padded with NUL.
pub const POLICY_NAME_LEN: usize = 64;

/// Entries of [`Policy::syn_retries`]: one for each value `TCP_SYNCNT` can have (0 to 127).
pub const SYN_RETRIES_LEN: usize = 128;

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
    /// Array: [`super::lasting::index`] -> bits of [`super::lasting`]: values that policies have had since the maps
    /// were made. What a socket without storage has of them is given back.
    pub const LASTING: &str = "LASTING";
    /// Per-CPU array: [`super::statistics_key`] -> [`super::FastStatistics`] of the first [`super::FAST_SLOTS`] slots.
    pub const COUNTERS: &str = "COUNTERS";
    /// Per-CPU hash: [`super::statistics_key`] -> [`super::Statistics`]: what is not in `COUNTERS`.
    pub const STATISTICS: &str = "STATISTICS";
    /// Socket storage -> [`super::SocketState`].
    pub const SOCKETS: &str = "SOCKETS";
    /// Array: [`super::brake::key`] -> [`super::brake::Brake`].
    pub const BRAKES: &str = "BRAKES";
    /// Array: a place of [`super::lease`] -> u64.
    pub const LEASE: &str = "LEASE";
    /// LRU hash: [`super::discovery::Prefix`] -> [`super::discovery::Discovered`]: peers that no entry covers.
    pub const DISCOVERED: &str = "DISCOVERED";
    /// Ring buffer of [`super::event::Event`].
    pub const EVENTS: &str = "EVENTS";
    /// Array of two: [`super::event::EventControl`].
    pub const EVENT_CONTROL: &str = "EVENT_CONTROL";
    /// Array of one: [`super::WalkControl`], what a walk over open sockets is to do. Not pinned.
    pub const WALK_CONTROL: &str = "WALK_CONTROL";
    /// Array: policy's slot -> [`super::WalkCounts`], what the walk did. Not pinned.
    pub const WALK_COUNTS: &str = "WALK_COUNTS";
    /// Array of one: [`super::Probe`], what the kernel answered. Not pinned.
    pub const PROBE: &str = "PROBE";
    /// All that are pinned.
    pub const ALL: [&str; 13] = [
        ENTRIES_V4,
        ENTRIES_V6,
        POLICIES,
        HOST_DEFAULTS,
        LASTING,
        COUNTERS,
        STATISTICS,
        SOCKETS,
        BRAKES,
        LEASE,
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
/// Name of the sock_ops program that asks the kernel what it can do.
pub const PROGRAM_PROBE: &str = "rto_probe";

/// Names of the read-only globals that the loader writes: byte offsets in the running kernel's
/// structs, from its BTF. The programs at LSM hooks and iterators read these structs.
pub mod globals {
    /// u32: jiffies a second.
    pub const HZ: &str = "HZ";
    /// u8: bits of [`super::statistics`].
    pub const STATISTICS_MODE: &str = "STATISTICS_MODE";
    /// u64: least time between two samples of a connection's smoothed RTT, nanoseconds; 0: none but
    /// the one at its end.
    pub const RTT_INTERVAL_NS: &str = "RTT_INTERVAL_NS";
    /// u32: of so many connections of which nothing is lost one is measured to its end; 1: all.
    pub const SAMPLING: &str = "SAMPLING";
    /// u64: cookie of the socket to probe with.
    pub const PROBE_COOKIE: &str = "PROBE_COOKIE";
    /// u32 each: as [`super::SocketTypes`] has them, in its order.
    pub const SOCKET_TYPES: [&str; 14] = [
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
        "TYPE_CONNECTION_SOCK",
        "TYPE_TCP_SOCK",
    ];
    /// u32 each: offsets as [`super::Offsets`] has them, in its order.
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
    /// Anything is counted at all.
    pub const ON: u8 = 1 << 0;
    /// Connections that no entry covers are counted at [`super::UNMATCHED`], and some are noted in
    /// [`super::maps::DISCOVERED`].
    pub const UNMATCHED: u8 = 1 << 1;
    /// The smoothed RTT of a connection is sampled when it ends.
    pub const RTT_AT_END: u8 = 1 << 2;
    /// The kernel tells sock_ops programs the current process (`bpf_get_current_comm()`).
    pub const PROCESS: u8 = 1 << 3;
}

/// Value of both tries. Eight bytes: a node with an IPv6 key then still fits the
/// kernel's 64-byte allocation class.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryValue {
    /// Index into `POLICIES`; [`NO_POLICY`] is ignored.
    pub policy: u32,
    /// Connections this entry has decided: one for each connect() to it, one for each connection
    /// request from it that was answered and remembered (under SYN cookies none is). Exact up to
    /// [`EntryValue::HITS_EXACT`], then an estimate; counting ends at [`EntryValue::HITS_MAX`].
    pub hits: u32,
}

impl EntryValue {
    /// Hits from here on mean "as many, or more".
    pub const HITS_MAX: u32 = u32::MAX - u16::MAX as u32;
    /// Hits from here on are counted by sampling.
    pub const HITS_EXACT: u32 = 1024;
    /// What one of them stands for, and how many there are to one that counts; a power of two.
    pub const HITS_SHARE: u32 = 16;
}

/// What a policy did; one per policy, direction and CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that reached ESTABLISHED.
    pub connections: u64,
    /// Initial RTOs set: on connecting sockets, once a connection; on connection requests, once a
    /// request.
    pub initial_rtos_set: u64,
    /// SYNs sent again, also by connections that never got through; SYN-ACKs sent again before a
    /// connection was established (those of requests that never complete are not seen by a sock_ops
    /// program).
    pub handshake_retransmissions: u64,
    /// Of these, spurious: the answer to an earlier copy was on its way.
    pub spurious: u64,
    /// Of these, those of established connections of which it could not be told.
    pub undecided: u64,
    /// Connections that a needed retransmission brought about.
    pub recovered: u64,
    /// By how much sooner than with the kernel's own timers, microseconds.
    pub time_saved_us: u64,
    /// By how much later, where the policy's timers are longer, microseconds.
    pub time_lost_us: u64,
    /// Failed bpf_setsockopt calls, by [`SockOpt`].
    pub setsockopt_failures: [u64; SockOpt::COUNT],
    /// Connections for whose state there was no memory: they lack options of the policy, or are not counted in full.
    pub storage_failures: u64,
    /// Retransmission timeouts of established connections (RFC 6298 section 5.4), by how many
    /// came right before without an answer: 0, 1, ... and 7 or more.
    pub rtos: [u64; RTO_STEPS],
    /// Connections given up at a retransmission timeout (ETIMEDOUT).
    pub expired: u64,
    /// Tail loss probes (RFC 8985 section 7) that sent a segment again. One that sends new data is
    /// not seen by a sock_ops program.
    pub tail_loss_probes: u64,
    /// Segments sent again by established connections, other than by a tail loss probe.
    pub segments_retransmitted: u64,
    /// Times the linear mode of a thin stream was ended by `linear_retries`.
    pub linear_ended: u64,
    /// Sockets that were open already and got the policy's options by a walk.
    pub open_sockets: u64,
    /// Connections that ended without both sides having finished: reset, timed out, or closed with
    /// data unread. Those in `expired` are among them.
    pub aborted: u64,
    /// Connections that were begun, lost a SYN or its answer, and were not established: given up by the kernel, or closed
    /// after [`FAILED_NS`] or more (sooner, the kernel's own timer has not noticed a loss).
    pub failed: u64,
    /// Handshakes that took longer than [`SLOW_HANDSHAKE_US`]. Of accepted connections only the last round trip is known.
    pub slow_handshakes: u64,
    /// Connections of whose handshake a retransmission was spurious.
    pub spurious_connections: u64,
    /// Connections that lost something and were told by the peer that it got a segment twice (DSACK, RFC 2883).
    pub dsack_connections: u64,
    /// Connections of which a SYN, or its answer, was retransmitted before they were established.
    pub retransmitted_handshakes: u64,
    /// Connections of `aborted` that had lost something: all of them, whatever is sampled.
    pub aborted_after_loss: u64,
    /// Connections that began with the kernel's own timer as a [`brake`] held.
    pub braked: u64,
    /// Keep the size a multiple of 32, so that those of every connection share a cache line.
    pub reserved: [u64; 2],
}

/// A handshake that took longer counts as slow, microseconds.
pub const SLOW_HANDSHAKE_US: u32 = 500_000;

/// A connection that is closed sooner counts in no arm as failed, nanoseconds: the kernel's own initial RTO, and what its
/// timer can be late, as applications close connections after a second, too.
pub const FAILED_NS: u64 = 1_100_000_000;

/// Everything that is counted for a policy, a direction and a CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Counts.
    pub counters: Counters,
    /// How long handshakes took: from connect(), or from the first SYN-ACK, to the end of it.
    pub handshake: Histogram,
    /// Smoothed round-trip times (RFC 6298 section 2, SRTT).
    pub srtt: Histogram,
    /// By how much RTT samples exceed the least of their connection: delays of ACKs, and queues. Counted in control
    /// arms ([`policy_flags::MEASURES_ACKS`]).
    pub ack_excess: Histogram,
}

/// The beginning of [`Statistics`]: what each connection may count in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastStatistics {
    /// Counts.
    pub counters: Counters,
    /// [`Statistics::handshake`].
    pub handshake: Histogram,
}

impl From<FastStatistics> for Statistics {
    fn from(fast: FastStatistics) -> Self {
        Self {
            counters: fast.counters,
            handshake: fast.handshake,
            ..Self::default()
        }
    }
}

/// Length of [`Counters::rtos`].
pub const RTO_STEPS: usize = 8;

impl Statistics {
    const WORDS: usize = size_of::<Self>() / size_of::<u64>();

    /// The sum of two, for adding up CPUs.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        let (a, b) = (self.words(), other.words());
        Self::from_words(core::array::from_fn(|i| a[i].wrapping_add(b[i])))
    }

    fn words(&self) -> [u64; Self::WORDS] {
        // SAFETY: repr(C) of u64 alone, so that both are the same bytes.
        unsafe { core::mem::transmute(*self) }
    }

    fn from_words(words: [u64; Self::WORDS]) -> Self {
        // SAFETY: as above.
        unsafe { core::mem::transmute(words) }
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
    /// TCP_BPF_SOCK_OPS_CB_FLAGS, or bpf_sock_ops_cb_flags_set(): the RTO hook.
    CbFlags = 6,
}

impl SockOpt {
    /// Number of options, with room for one more.
    pub const COUNT: usize = 8;
    /// Every option with the kernel's name for it.
    pub const NAMES: [(Self, &'static str); 7] = [
        (Self::SynCnt, "TCP_SYNCNT"),
        (Self::RtoMin, "TCP_BPF_RTO_MIN"),
        (Self::DelackMax, "TCP_BPF_DELACK_MAX"),
        (Self::ThinLinear, "TCP_THIN_LINEAR_TIMEOUTS"),
        (Self::RtoMax, "TCP_RTO_MAX_MS"),
        (Self::UserTimeout, "TCP_USER_TIMEOUT"),
        (Self::CbFlags, "TCP_BPF_SOCK_OPS_CB_FLAGS"),
    ];
}

/// What a walk over the open sockets of a network namespace is to do.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkControl {
    /// Only sockets of this cgroup or one below, by its id (inode number), or [`WalkControl::ANY`]. Those with storage
    /// are restored wherever they are.
    pub cgroup: u64,
    /// One of [`walk_mode`].
    pub mode: u32,
    /// The namespace's default of TCP_BPF_RTO_MIN, microseconds.
    pub rto_min_us: u32,
    /// The namespace's default of TCP_RTO_MAX_MS, milliseconds.
    pub rto_max_ms: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

impl WalkControl {
    /// Of any cgroup.
    pub const ANY: u64 = 0;
    /// Of none.
    pub const NONE: u64 = u64::MAX;
}

/// Values of [`WalkControl::mode`].
pub mod walk_mode {
    /// Give every socket that an entry covers the options of its policy.
    pub const APPLY: u32 = 0;
    /// As above, but leave sockets alone that have a policy already.
    pub const APPLY_TO_NEW: u32 = 1;
    /// Give the options back that were set.
    pub const RESTORE: u32 = 2;
}

/// What a walk did, by policy; slot 0 counts sockets that no entry covers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkCounts {
    /// Sockets looked at.
    pub seen: u32,
    /// Sockets whose options were set, or given back.
    pub changed: u32,
    /// Sockets that had a policy already and were left alone.
    pub kept: u32,
    /// Sockets of which at least one option was refused.
    pub refused: u32,
}

/// What the kernel answered to the probe: 0, or a negative errno.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// 1 once the probe's socket was seen.
    pub ran: i64,
    /// 0 if socket storage could be had.
    pub storage: i64,
    /// bpf_setsockopt, by [`SockOpt`].
    pub set: [i64; SockOpt::COUNT],
    /// bpf_getsockopt, by [`SockOpt`].
    pub get: [i64; SockOpt::COUNT],
    /// bpf_sock_ops_cb_flags_set().
    pub cb_flags: i64,
}

const _: () = {
    assert!(size_of::<EntryValue>() == 8);
    assert!(size_of::<Policy>() == 16 * 4 + 64 + 32 + 128 + 64);
    assert!(size_of::<PolicySlot>() == 8 + 2 * size_of::<Policy>());
    assert!(size_of::<HostDefaults>() == 8);
    assert!(size_of::<Counters>() == 320);
    assert!(size_of::<FastStatistics>() == core::mem::offset_of!(Statistics, srtt));
    assert!(
        core::mem::offset_of!(FastStatistics, handshake)
            == core::mem::offset_of!(Statistics, handshake)
    );
    assert!(size_of::<Statistics>() == 320 + 3 * (8 + 8 * histogram::BUCKETS));
    assert!(size_of::<brake::Brake>() == 16);
    assert!(size_of::<discovery::Prefix>() == 20);
    assert!(size_of::<discovery::Discovered>() == 16 + 8 + 8 * histogram::BUCKETS);
    // With what the kernel keeps beside it (72 bytes, `struct bpf_local_storage_elem`, Linux 6.18) it still fits the
    // 256-byte allocation class.
    assert!(size_of::<SocketState>() == 16 + 32 + (5 * 12 + 9 * 4) + 40);
    assert!(size_of::<SocketState>() <= 184);
    assert!(size_of::<WalkControl>() == 24);
    assert!(size_of::<WalkCounts>() == 16);
    assert!(size_of::<Probe>() == 8 * 19);
    assert!(core::mem::offset_of!(Policy, generation) == 4);
    assert!(core::mem::offset_of!(Policy, syn_retries) == 160);
    assert!(core::mem::offset_of!(Statistics, counters) == 0);
    assert!(core::mem::offset_of!(Statistics, handshake) == 320);
    assert!(core::mem::offset_of!(Counters, setsockopt_failures) == 64);
    assert!(core::mem::offset_of!(SocketState, arm) == 0);
};

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), fixed-width integers only, sizes asserted above to be free of padding.
    unsafe impl aya::Pod for super::EntryValue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::PolicySlot {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::HostDefaults {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Statistics {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::FastStatistics {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::event::EventControl {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketState {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::WalkControl {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::WalkCounts {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Probe {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::brake::Brake {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::discovery::Prefix {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::discovery::Discovered {}
}

#[cfg(test)]
mod tests;
