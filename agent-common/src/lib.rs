//! Plain data shared by the rto-agent daemon and its eBPF program.
//!
//! Everything here crosses the kernel boundary through BPF maps, so it is
//! `repr(C)`, of fixed width, without implicit padding, and its layout is
//! asserted at compile time. Change a layout and [`LAYOUT_VERSION`] must go up:
//! pins of another version are replaced, never reinterpreted.
#![no_std]

pub mod address;
pub mod event;
pub mod histogram;
pub mod restart;
pub mod syncnt;

use event::COMM_LEN;
use histogram::Histogram;

/// Version of every struct and map below; it is part of the pins' directory name.
pub const LAYOUT_VERSION: u32 = 6;

/// Slots of the `POLICIES` array.
pub const MAX_POLICIES: u32 = 1024;

/// Slot 0 is nobody's: a zeroed map value can never name a policy.
pub const NO_POLICY: u32 = 0;

/// The slot of connections that no entry covers, where these are counted: a policy without settings.
pub const UNLISTED: u32 = 1;

/// The first slot that a policy of the configuration may have.
pub const FIRST_SLOT: u32 = 2;

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

/// Key of a policy's `STATISTICS` for a direction; 0 is nobody's.
#[inline(always)]
#[must_use]
pub const fn statistics_key(policy: u32, direction: u32) -> u32 {
    policy << 2 | direction
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
    /// Per-CPU hash: [`super::statistics_key`] -> [`super::Statistics`].
    pub const STATISTICS: &str = "STATISTICS";
    /// Socket storage -> [`super::SocketState`].
    pub const SOCKETS: &str = "SOCKETS";
    /// Ring buffer of [`super::event::Event`].
    pub const EVENTS: &str = "EVENTS";
    /// Array of two: [`super::event::EventControl`].
    pub const EVENT_CONTROL: &str = "EVENT_CONTROL";
    /// Array of one: [`super::WalkControl`], what a walk over open sockets is to do. Not pinned.
    pub const WALK_CONTROL: &str = "WALK_CONTROL";
    /// Array: policy index -> [`super::WalkCounts`], what the walk did. Not pinned.
    pub const WALK_COUNTS: &str = "WALK_COUNTS";
    /// Array of one: [`super::Probe`], what the kernel answered. Not pinned.
    pub const PROBE: &str = "PROBE";
    /// All that are pinned.
    pub const ALL: [&str; 8] = [
        ENTRIES_V4,
        ENTRIES_V6,
        POLICIES,
        HOST_DEFAULTS,
        STATISTICS,
        SOCKETS,
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
    /// u64: cookie of the socket to probe with.
    pub const PROBE_COOKIE: &str = "PROBE_COOKIE";
    /// u32 each: as [`super::SocketTypes`] has them, in its order.
    pub const SOCKET_TYPES: [&str; 10] = [
        "OFFSET_IS_MPTCP",
        "OFFSET_FASTOPEN_REQ",
        "OFFSET_NET",
        "OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT",
        "OFFSET_SYNACK_RETRIES",
        "OFFSET_SYN_RETRIES",
        "OFFSET_DEFER_ACCEPT",
        "OFFSET_LISTENER",
        "OFFSET_CONTEXT_SK",
        "TYPE_CONNECTION_SOCK",
    ];
    /// u32 each: offsets as [`super::Offsets`] has them, in its order.
    pub const OFFSETS: [&str; 15] = [
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
    ];
}

/// Bits of [`globals::STATISTICS_MODE`].
pub mod statistics {
    /// Anything is counted at all.
    pub const ON: u8 = 1 << 0;
    /// Connections that no entry covers are counted at [`super::UNLISTED`].
    pub const UNLISTED: u8 = 1 << 1;
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
    /// Initial RTO of the SYN, jiffies (`reply` of TIMEOUT_INIT).
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
    /// The initial RTO of the SYN in force, the kernel's own included, microseconds: an answer that
    /// took no longer is no answer to a copy sent too early.
    pub initial_rto_us: u32,
    /// What the first so many retransmissions of a SYN gain over the kernel's own timers, microseconds:
    /// negative where the policy's are longer.
    pub gain_us: [i32; GAINS],
    /// Initial RTO of the SYN-ACK, jiffies, by how often the kernel retransmits it before it drops the
    /// request (`net.ipv4.tcp_synack_retries`, or the listener's TCP_SYNCNT); the last is for all beyond.
    pub syn_ack_rto_jiffies: [u32; SYN_ACK_RETRIES_LEN],
    /// TCP_SYNCNT to set, by the value in force on the socket; 0 leaves it.
    pub syn_retries: [u8; SYN_RETRIES_LEN],
    /// Jiffies a second, where `rto_min_us` is lowered while few segments are outstanding
    /// ([`restart`]); 0: it is not.
    pub restart_hz: u32,
}

/// A slot of `POLICIES`. A program that runs while the slot is written reads one whole policy, the former or
/// the new one: a write of an array's value is a plain copy, so the daemon writes the copy that is not in
/// force, and then [`PolicySlot::active`] alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySlot {
    /// Index of the copy in force, 0 or 1.
    pub active: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
    /// The two copies.
    pub copies: [Policy; 2],
}

impl PolicySlot {
    /// The policy in force.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.copies[(self.active & 1) as usize]
    }

    /// The slot with `policy` in the copy that is not in force, and the same with that copy in force: the two
    /// values to write, in this order.
    #[must_use]
    pub const fn replaced(&self, policy: &Policy) -> [Self; 2] {
        let next = (self.active & 1) ^ 1;
        let mut staged = *self;
        staged.copies[next as usize] = *policy;
        let mut flipped = staged;
        flipped.active = next;
        [staged, flipped]
    }
}

/// Defaults of the daemon's network namespace, for kernels on which a program cannot ask the socket itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostDefaults {
    /// `net.ipv4.tcp_syn_retries`. A socket's TCP_SYNCNT can be read by a program from Linux 6.1 on.
    pub syn_retries: u32,
    /// The retransmissions of a SYN-ACK to reckon with: `net.ipv4.tcp_synack_retries`, but no more than the
    /// kernel's default of 5, as a namespace of its own begins with that. A request's listener can be read
    /// from Linux 6.2 on.
    pub syn_ack_retries: u32,
}

/// Retransmissions that [`Policy::gain_us`] tells apart; more count as the last.
pub const GAINS: usize = 8;

/// Bits of [`Policy::flags`].
pub mod policy_flags {
    /// [`super::Policy`] decides TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR_SET: u32 = 1 << 0;
    /// The value it decides for.
    pub const THIN_LINEAR: u32 = 1 << 1;
    /// SYNs of MPTCP sockets get the policy's initial RTO, too.
    pub const MPTCP: u32 = 1 << 2;
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
    /// Of these, needless: the answer to an earlier copy was on its way.
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
    /// Connections left alone because socket storage could not be had (memory).
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
    /// Keeps the size a multiple of 64.
    pub reserved: u64,
}

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

/// What a socket remembers between callbacks (value of `SOCKETS`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// bpf_ktime_get_ns() when the handshake began (active). Once it is over: how long it took,
    /// nanoseconds; 0 where that is not known (passive).
    pub handshake_ns: u64,
    /// bpf_ktime_get_ns() of the last sample of the smoothed RTT that was counted.
    pub srtt_sampled_ns: u64,
    /// Bytes that will have been acknowledged once everything is that was outstanding at the last
    /// retransmission timeout: until then what is sent again belongs to that timeout. 0: none was.
    pub loss_end: u64,
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
    /// [`Policy::linear_retries`] this connection began with; 0: the kernel's own number.
    pub linear_retries: u32,
    /// 1 while the RTO hook has linear mode switched off.
    pub linear_off: u32,
    /// Bits of bpf_sock_ops.bpf_sock_ops_cb_flags that this program added.
    pub cb_flags_added: u32,
    /// 1 if the connection is in no count: the agent's own probe, known by [`PROBE_MARK`].
    pub uncounted: u32,
    /// The options that are set on the socket and what they were before.
    pub rto_min: Remembered,
    /// As above.
    pub delack_max: Remembered,
    /// As above.
    pub thin_linear: Remembered,
    /// As above.
    pub rto_max: Remembered,
    /// As above.
    pub user_timeout: Remembered,
    /// One of [`direction`].
    pub direction: u32,
    /// The initial RTO in force for the handshake, the kernel's own included, microseconds.
    pub initial_rto_us: u32,
    /// Retransmissions of the handshake of which it is not known yet whether they were needed.
    pub in_question: u32,
    /// RTT samples seen since.
    pub samples: u32,
    /// Process that called connect(); 0: not known.
    pub pid: u32,
    /// Its name, padded with NUL.
    pub comm: [u8; COMM_LEN],
    /// [`Policy::restart_hz`] this connection began with; 0 once somebody else has set the option.
    pub restart_hz: u32,
    /// [`Policy::rto_min_us`] this connection began with, where `restart_hz` is not 0. (What is set now
    /// is in `rto_min`.)
    pub restart_rto_min_us: u32,
    /// Of the options that are being set: [`settled`] bits. Only one callback's; kept here since what a
    /// map holds does not multiply the states the verifier goes through.
    pub settled: u32,
    /// At most so many of those in question were spurious.
    pub spurious_at_most: u32,
}

/// Bits of [`SocketState::settled`].
pub mod settled {
    /// The kernel took a value.
    pub const CHANGED: u32 = 1;
    /// It did not.
    pub const REFUSED: u32 = 2;
}

/// One option of a socket, so that it can be given back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// 1 if the program set it.
    pub is_set: u32,
    /// The value it set.
    pub value: u32,
    /// The value before; [`Remembered::UNKNOWN`] where the kernel does not tell.
    pub before: u32,
}

impl Remembered {
    /// The kernel did not say what the option was.
    pub const UNKNOWN: u32 = u32::MAX;

    /// What to remember as the value before, when the socket now says `in_force` and the program
    /// sets the option: what the program set itself does not count.
    #[inline(always)]
    #[must_use]
    pub const fn before(&self, in_force: Option<u32>) -> u32 {
        match in_force {
            Some(value) if self.is_set != 0 && value == self.value => self.before,
            Some(value) => value,
            None if self.is_set != 0 => self.before,
            None => Self::UNKNOWN,
        }
    }

    /// The value to give back, when the socket now says `in_force`; `None` if the program did not
    /// set the option or somebody has set another value since. `default` is the kernel's own value.
    #[inline(always)]
    #[must_use]
    pub const fn to_restore(&self, in_force: Option<u32>, default: u32) -> Option<u32> {
        if self.is_set == 0 {
            return None;
        }
        match in_force {
            Some(value) if value != self.value => None,
            _ if self.before == Self::UNKNOWN => Some(default),
            _ => Some(self.before),
        }
    }
}

/// What a walk over the open sockets of a network namespace is to do.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkControl {
    /// Only sockets of this cgroup or one below, by its id (inode number); 0: of any.
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

/// Offsets of fields in the running kernel's structs, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// `sock_common.skc_family`, u16.
    pub family: u32,
    /// `sock_common.skc_state`, u8.
    pub state: u32,
    /// `sock_common.skc_daddr`, 4 bytes.
    pub daddr: u32,
    /// `sock_common.skc_v6_daddr`, 16 bytes.
    pub v6_daddr: u32,
    /// `sock.sk_cgrp_data.cgroup`, pointer.
    pub cgroup: u32,
    /// `cgroup.kn`, pointer.
    pub cgroup_kn: u32,
    /// `kernfs_node.id`, u64.
    pub kn_id: u32,
    /// `cgroup.self.parent`, pointer.
    pub css_parent: u32,
    /// `cgroup_subsys_state.cgroup`, pointer.
    pub css_cgroup: u32,
    /// `sock_common.skc_rcv_saddr`, 4 bytes.
    pub rcv_saddr: u32,
    /// `sock_common.skc_v6_rcv_saddr`, 16 bytes.
    pub v6_rcv_saddr: u32,
    /// `sock_common.skc_dport`, u16 in network byte order.
    pub dport: u32,
    /// `sock_common.skc_num`, u16.
    pub num: u32,
    /// `request_sock.num_retrans`, u8.
    pub num_retrans: u32,
    /// `request_sock.timeout`, u32, jiffies (Linux 5.17); 0: it has none.
    pub request_timeout: u32,
}

impl Offsets {
    /// In the order of [`globals::OFFSETS`].
    #[must_use]
    pub const fn values(&self) -> [u32; 15] {
        [
            self.family,
            self.state,
            self.daddr,
            self.v6_daddr,
            self.cgroup,
            self.cgroup_kn,
            self.kn_id,
            self.css_parent,
            self.css_cgroup,
            self.rcv_saddr,
            self.v6_rcv_saddr,
            self.dport,
            self.num,
            self.num_retrans,
            self.request_timeout,
        ]
    }
}

/// What the sock_ops program reads of the running kernel's structs beyond its context: offsets in bytes and
/// ids of its BTF; 0 where the kernel does not have it, or does not let the program read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketTypes {
    /// `tcp_sock.is_mptcp`, bool.
    pub is_mptcp: u32,
    /// `tcp_sock.fastopen_req`, pointer: not null while a SYN with TCP Fast Open is to be sent.
    pub fastopen_req: u32,
    /// `sock_common.skc_net`, pointer.
    pub net: u32,
    /// `net.ipv4.sysctl_tcp_fastopen_blackhole_timeout`, u32.
    pub fastopen_blackhole_timeout: u32,
    /// `net.ipv4.sysctl_tcp_synack_retries`, its first byte.
    pub synack_retries: u32,
    /// `inet_connection_sock.icsk_syn_retries`, u8.
    pub syn_retries: u32,
    /// `inet_connection_sock.icsk_accept_queue.rskq_defer_accept`, u8.
    pub defer_accept: u32,
    /// `sock_common.skc_listener` of a request, pointer. 0 where a program cannot get at the request: that
    /// takes [`kfunc`]s.
    pub listener: u32,
    /// `bpf_sock_ops_kern.sk`, pointer.
    pub context_sk: u32,
    /// BTF id of `struct inet_connection_sock`.
    pub connection_sock: u32,
}

impl SocketTypes {
    /// In the order of [`globals::SOCKET_TYPES`].
    #[must_use]
    pub const fn values(&self) -> [u32; 10] {
        [
            self.is_mptcp,
            self.fastopen_req,
            self.net,
            self.fastopen_blackhole_timeout,
            self.synack_retries,
            self.syn_retries,
            self.defer_accept,
            self.listener,
            self.context_sk,
            self.connection_sock,
        ]
    }
}

/// Kernel functions that the program calls (Documentation/bpf/kfuncs.rst, Linux 6.12). aya knows nothing of
/// them: each call is an instruction with a number in place of the function's BTF id, which the loader
/// replaces.
pub mod kfunc {
    /// `bpf_cast_to_kern_ctx()`, Linux 6.2: from a program's context to the kernel's.
    pub const CAST_TO_KERN_CTX: u32 = 0x7274_6f01;
    /// `bpf_rdonly_cast()`, Linux 6.2: a pointer that may be read as a type.
    pub const RDONLY_CAST: u32 = 0x7274_6f02;
    /// Opcode and registers of such a call: BPF_JMP | BPF_CALL, source BPF_PSEUDO_KFUNC_CALL, offset 0 (the
    /// kernel's own BTF).
    pub const CALL: [u8; 4] = [0x85, 0x20, 0, 0];
    /// `r0 = 0`, in place of a call of a function that the kernel does not have.
    pub const NULL: [u8; 8] = [0xb7, 0, 0, 0, 0, 0, 0, 0];
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
        initial_rto_us: 0,
        gain_us: [0; GAINS],
        syn_ack_rto_jiffies: [0; SYN_ACK_RETRIES_LEN],
        syn_retries: [0; SYN_RETRIES_LEN],
        restart_hz: 0,
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
    assert!(size_of::<Policy>() == 64 + 9 * 4 + 32 + 64 + 128 + 4);
    assert!(size_of::<PolicySlot>() == 8 + 2 * size_of::<Policy>());
    assert!(size_of::<HostDefaults>() == 8);
    assert!(size_of::<Counters>() == 256);
    assert!(size_of::<Statistics>() == 256 + 2 * (8 + 8 * histogram::BUCKETS));
    assert!(size_of::<SocketState>() == 72 + 5 * 12 + 5 * 4 + 16 + 8 + 8);
    assert!(size_of::<WalkControl>() == 24);
    assert!(size_of::<WalkCounts>() == 16);
    assert!(size_of::<Probe>() == 8 * 19);
    assert!(core::mem::offset_of!(Policy, generation) == 64);
    assert!(core::mem::offset_of!(Policy, syn_retries) == 196);
    assert!(core::mem::offset_of!(Statistics, counters) == 0);
    assert!(core::mem::offset_of!(Statistics, handshake) == 256);
    assert!(core::mem::offset_of!(Counters, setsockopt_failures) == 64);
    assert!(core::mem::offset_of!(SocketState, policy) == 24);
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
    unsafe impl aya::Pod for super::event::EventControl {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketState {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::WalkControl {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::WalkCounts {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Probe {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program sees of a slot that the kernel is copying: the first words new, the others as they were.
    fn torn(from: &PolicySlot, to: &PolicySlot, words: usize) -> PolicySlot {
        type Words = [u64; size_of::<PolicySlot>() / size_of::<u64>()];
        // SAFETY: repr(C) of integers and bytes alone, without padding (asserted), so that all are the same bytes.
        unsafe {
            let [from, to] =
                [*from, *to].map(|slot| core::mem::transmute::<PolicySlot, Words>(slot));
            let seen = core::array::from_fn(|i| if i < words { to[i] } else { from[i] });
            core::mem::transmute::<Words, PolicySlot>(seen)
        }
    }

    #[test]
    fn a_slot_that_is_written_holds_a_whole_policy_at_every_moment() {
        let policy = |n: u8| Policy {
            initial_rto_jiffies: n.into(),
            syn_retries: [n; SYN_RETRIES_LEN],
            restart_hz: n.into(),
            ..Policy::EMPTY
        };
        let mut slot = PolicySlot::default();
        for n in 1..5 {
            let (former, new) = (*slot.policy(), policy(n));
            for next in slot.replaced(&new) {
                for words in 0..=size_of::<PolicySlot>() / 8 {
                    let seen = *torn(&slot, &next, words).policy();
                    assert!(seen == former || seen == new, "after {words} words");
                }
                slot = next;
            }
            assert_eq!(*slot.policy(), new);
        }
    }

    #[test]
    fn statistics_add_up_word_by_word() {
        let mut a = Statistics::default();
        a.counters.connections = 1;
        a.counters.rtos[7] = 2;
        a.counters.setsockopt_failures[SockOpt::CbFlags as usize] = 3;
        a.handshake.buckets[5] = 4;
        let mut b = a;
        b.counters.aborted = 5;
        b.srtt.sum_us = 6;
        let sum = a.plus(&b);
        assert_eq!(sum.counters.connections, 2);
        assert_eq!(sum.counters.rtos, [0, 0, 0, 0, 0, 0, 0, 4]);
        assert_eq!(sum.counters.setsockopt_failures[6], 6);
        assert_eq!((sum.counters.aborted, sum.counters.expired), (5, 0));
        assert_eq!((sum.handshake.buckets[5], sum.srtt.sum_us), (8, 6));
    }

    #[test]
    fn no_key_of_a_policy_is_nobodys() {
        for policy in [UNLISTED, FIRST_SLOT, MAX_POLICIES - 1] {
            for direction in direction::ALL {
                assert_ne!(statistics_key(policy, direction), 0);
            }
        }
        assert_eq!(statistics_key(NO_POLICY, direction::ACTIVE), 0);
    }

    const SET: Remembered = Remembered {
        is_set: 1,
        value: 8000,
        before: 200_000,
    };

    #[test]
    fn the_value_before_is_never_the_programs_own() {
        assert_eq!(Remembered::default().before(Some(7)), 7);
        assert_eq!(Remembered::default().before(None), Remembered::UNKNOWN);
        assert_eq!(SET.before(Some(8000)), 200_000);
        // Somebody has set another since.
        assert_eq!(SET.before(Some(9000)), 9000);
        assert_eq!(SET.before(None), 200_000);
    }

    #[test]
    fn only_what_is_still_the_programs_is_given_back() {
        assert_eq!(Remembered::default().to_restore(Some(7), 1), None);
        assert_eq!(SET.to_restore(Some(8000), 1), Some(200_000));
        assert_eq!(SET.to_restore(Some(9000), 1), None);
        assert_eq!(SET.to_restore(None, 1), Some(200_000));
        let unknown = Remembered {
            before: Remembered::UNKNOWN,
            ..SET
        };
        assert_eq!(unknown.to_restore(Some(8000), 1), Some(1));
    }
}
