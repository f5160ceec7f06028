//! Fields of sockets that the context does not have, read by offsets from the running kernel's BTF: how often the
//! kernel retransmits a SYN-ACK, and for which SYNs a short timer would do harm.
//!
//! Every offset is 0 if the kernel has no such field or does not let the program read it. The verifier sees these
//! globals as constants, so code that reads a missing field is not part of the loaded program.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::kfunc;

use crate::{
    socket::{self, constant, read},
    structs::{field, offsets},
    syn_ack_rto, tables,
};

offsets! {
    OFFSET_IS_MPTCP
    OFFSET_FASTOPEN_REQ
    OFFSET_NET
    OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT
    OFFSET_SYNACK_RETRIES
    OFFSET_SYN_RETRIES
    OFFSET_DEFER_ACCEPT
    OFFSET_LISTENER
    OFFSET_CONTEXT_SK
    OFFSET_RTO
    OFFSET_RTO_MIN
    OFFSET_DELACK_MAX
    OFFSET_USER_TIMEOUT
    OFFSET_RETRANSMITS
    OFFSET_NET_SYN_RETRIES
    OFFSET_NET_SYN_LINEAR_TIMEOUTS
    OFFSET_NET_RTO_MIN
    OFFSET_NET_THIN_LINEAR
    OFFSET_RTO_MAX
    OFFSET_RETRANS_STAMP
    OFFSET_TIMER_EXPIRES
    OFFSET_TXREHASH
    OFFSET_DST_CACHE
    OFFSET_METRICS
    OFFSET_MAX_ACK_BACKLOG
    OFFSET_TOTAL_RTO_TIME
    TYPE_CONNECTION_SOCK
    TYPE_TCP_SOCK
    TYPE_DST_METRICS
}

/// Whether the socket is an MPTCP subflow. After two SYN timeouts the kernel makes the subflow fall back to TCP, and
/// then disables MPTCP for an hour (`mptcp_active_detect_blackhole()`, Linux 6.18).
#[inline(always)]
pub(crate) fn is_mptcp(ctx: &SockOpsContext) -> bool {
    if constant(&OFFSET_IS_MPTCP) == 0 {
        return false;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    // SAFETY: a TCP socket, not null.
    !tcp.is_null() && unsafe { field::<u8>(tcp, &OFFSET_IS_MPTCP) } != 0
}

/// Whether the SYN is sent with TCP Fast Open, and three consecutive timeouts of the connection would make the kernel
/// disable Fast Open for a while (`tcp_fastopen_active_detect_blackhole()`, Linux 6.12; off by default,
/// `net.ipv4.tcp_fastopen_blackhole_timeout_sec`).
#[inline(always)]
pub(crate) fn detects_fastopen_blackhole(ctx: &SockOpsContext) -> bool {
    if constant(&OFFSET_FASTOPEN_REQ) == 0 || constant(&OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT) == 0 {
        return false;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    if tcp.is_null() {
        return false;
    }
    // SAFETY: a TCP socket, not null; the verifier makes loads through pointers read from it safe.
    unsafe {
        if field::<u64>(tcp, &OFFSET_FASTOPEN_REQ) == 0 {
            return false;
        }
        let net: *const c_void = field(tcp, &OFFSET_NET);
        !net.is_null() && field::<u32>(net, &OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT) != 0
    }
}

/// Whether the socket needs storage because it is an MPTCP subflow, sends its SYN with TCP Fast Open, or has a
/// TCP_SYNCNT or TCP_USER_TIMEOUT.
#[inline(always)]
pub(crate) fn is_special(ctx: &SockOpsContext) -> bool {
    let (is_mptcp, fastopen_req, syn_retries, user_timeout) = (
        constant(&OFFSET_IS_MPTCP),
        constant(&OFFSET_FASTOPEN_REQ),
        constant(&OFFSET_SYN_RETRIES),
        constant(&OFFSET_USER_TIMEOUT),
    );
    if is_mptcp | fastopen_req | syn_retries | user_timeout == 0 {
        return false;
    }
    let tcp = tcp_sock(ctx);
    if tcp.is_null() {
        return false;
    }
    // SAFETY: a TCP socket, not null.
    unsafe {
        (is_mptcp != 0 && field::<u8>(tcp, &OFFSET_IS_MPTCP) != 0)
            || (fastopen_req != 0 && field::<u64>(tcp, &OFFSET_FASTOPEN_REQ) != 0)
            || (syn_retries != 0 && field::<u8>(tcp, &OFFSET_SYN_RETRIES) != 0)
            || (user_timeout != 0 && field::<u32>(tcp, &OFFSET_USER_TIMEOUT) != 0)
    }
}

/// The application's TCP_USER_TIMEOUT, milliseconds; 0: none, or it cannot be read.
#[inline(always)]
pub(crate) fn user_timeout_ms(ctx: &SockOpsContext) -> u32 {
    number(ctx, &OFFSET_USER_TIMEOUT)
}

/// A field of four bytes; 0 if it cannot be read.
#[inline(always)]
fn number(ctx: &SockOpsContext, offset: &'static u32) -> u32 {
    if constant(offset) == 0 {
        return 0;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    if tcp.is_null() {
        return 0;
    }
    // SAFETY: a TCP socket, not null.
    unsafe { field(tcp, offset) }
}

/// [`socket::kernel_tcp_sock`] without a helper call, if the kernel has the kfuncs for that.
#[inline(always)]
fn tcp_sock(ctx: &SockOpsContext) -> *const c_void {
    let (context_sk, tcp_sock) = (constant(&OFFSET_CONTEXT_SK), constant(&TYPE_TCP_SOCK));
    if context_sk == 0 || tcp_sock == 0 {
        return socket::kernel_tcp_sock(ctx);
    }
    let context = cast_to_kern_ctx(ctx);
    if context.is_null() {
        return core::ptr::null();
    }
    // SAFETY: not null, the kernel's own context; the verifier makes loads through pointers read from it safe.
    unsafe { rdonly_cast(field(context, &OFFSET_CONTEXT_SK), tcp_sock) }
}

/// The values that decide when the kernel retransmits a SYN, and when it gives up.
///
/// Not an `Option`, for the reason given at [`tables::Tally`].
#[derive(Clone, Copy)]
pub(crate) struct SynSocket {
    /// TCP_SYNCNT; 0: none, and `net_retries` counts.
    pub(crate) retries: u32,
    /// `tcp_syn_retries` of the socket's namespace; 0 if the kernel's structs cannot be read, and then all other fields
    /// are 0 as well.
    pub(crate) net_retries: u32,
    /// `tcp_syn_linear_timeouts` of the socket's namespace.
    pub(crate) linear: u32,
    /// The socket's TCP_USER_TIMEOUT, milliseconds; 0: none.
    pub(crate) user_timeout_ms: u32,
    /// Consecutive timeouts.
    pub(crate) retransmits: u32,
    /// The current interval, jiffies.
    pub(crate) rto: u32,
    /// The maximum RTO, jiffies.
    pub(crate) rto_max: u32,
    /// When the first SYN was sent: milliseconds, or microseconds where the route has `tcp_usec_ts` (Linux 6.7).
    pub(crate) retrans_stamp: u32,
    /// When the retransmission timer was to fire, lower half of the jiffy.
    pub(crate) timer_expires: u32,
}

impl SynSocket {
    const UNREADABLE: Self = Self {
        retries: 0,
        net_retries: 0,
        linear: 0,
        user_timeout_ms: 0,
        retransmits: 0,
        rto: 0,
        rto_max: 0,
        retrans_stamp: 0,
        timer_expires: 0,
    };

    /// Reads the fields of a context's socket.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockOpsContext) -> Self {
        if constant(&OFFSET_USER_TIMEOUT) == 0
            || constant(&OFFSET_RETRANSMITS) == 0
            || constant(&OFFSET_SYN_RETRIES) == 0
            || constant(&OFFSET_RTO) == 0
            || constant(&OFFSET_NET) == 0
            || constant(&OFFSET_NET_SYN_RETRIES) == 0
            || constant(&OFFSET_RETRANS_STAMP) == 0
            || constant(&OFFSET_TIMER_EXPIRES) == 0
        {
            return Self::UNREADABLE;
        }
        let tcp = socket::kernel_tcp_sock(ctx);
        if tcp.is_null() {
            return Self::UNREADABLE;
        }
        // SAFETY: a TCP socket, not null. The verifier makes loads through pointers read from it safe.
        unsafe {
            let net: *const c_void = field(tcp, &OFFSET_NET);
            if net.is_null() {
                return Self::UNREADABLE;
            }
            let linear = match constant(&OFFSET_NET_SYN_LINEAR_TIMEOUTS) {
                0 => 0,
                _ => field::<u8>(net, &OFFSET_NET_SYN_LINEAR_TIMEOUTS),
            };
            let rto_max = match constant(&OFFSET_RTO_MAX) {
                0 => 120 * syn_ack_rto::kernel_jiffies(),
                _ => field(tcp, &OFFSET_RTO_MAX),
            };
            #[expect(clippy::cast_possible_truncation, reason = "the lower half is used")]
            let timer_expires = field::<u64>(tcp, &OFFSET_TIMER_EXPIRES) as u32;
            Self {
                retries: field::<u8>(tcp, &OFFSET_SYN_RETRIES).into(),
                net_retries: field::<u8>(net, &OFFSET_NET_SYN_RETRIES).into(),
                linear: linear.into(),
                user_timeout_ms: field(tcp, &OFFSET_USER_TIMEOUT),
                retransmits: field::<u8>(tcp, &OFFSET_RETRANSMITS).into(),
                rto: field(tcp, &OFFSET_RTO),
                rto_max,
                retrans_stamp: field(tcp, &OFFSET_RETRANS_STAMP),
                timer_expires,
            }
        }
    }

    /// Whether the fields could be read.
    #[inline(always)]
    pub(crate) const fn is_known(&self) -> bool {
        self.net_retries != 0
    }
}

/// Whether this kernel has TCP_RTO_MAX_MS, which limits the doubling (Linux 6.15).
#[inline(always)]
pub(crate) fn has_rto_max() -> bool {
    constant(&OFFSET_RTO_MAX) != 0
}

/// Whether a retransmission of the socket chooses another path (`sk_txrehash`).
#[inline(always)]
pub(crate) fn rehashes(ctx: &SockOpsContext) -> bool {
    if constant(&OFFSET_TXREHASH) == 0 {
        return false;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    // SAFETY: a TCP socket, not null.
    !tcp.is_null() && unsafe { field::<u8>(tcp, &OFFSET_TXREHASH) } == 1
}

/// Whether the socket has a TCP_SYNCNT, which may be left of a SYN schedule whose end the program did not see.
#[inline(always)]
pub(crate) fn has_syncnt(ctx: &SockOpsContext) -> bool {
    if constant(&OFFSET_SYN_RETRIES) == 0 {
        return false;
    }
    let tcp = tcp_sock(ctx);
    // SAFETY: a TCP socket, not null.
    !tcp.is_null() && unsafe { field::<u8>(tcp, &OFFSET_SYN_RETRIES) } != 0
}

/// Whether the socket was created from a listener, whose backlog it inherits (`sk_clone_lock()`, Linux 6.18); false if
/// the listener's backlog was 0, or if it cannot be read.
#[inline(always)]
pub(crate) fn was_accepted(ctx: &SockOpsContext) -> bool {
    number(ctx, &OFFSET_MAX_ACK_BACKLOG) != 0
}

/// Milliseconds from the first SYN-ACK of a connection that has just been accepted to the last ACK of its handshake, if a
/// timeout has retransmitted the SYN-ACK (`tcp_create_openreq_child()`, Linux 6.18); otherwise, or if it cannot be read,
/// 0.
#[inline(always)]
pub(crate) fn accepted_after_ms(ctx: &SockOpsContext) -> u32 {
    number(ctx, &OFFSET_TOTAL_RTO_TIME)
}

/// The initial window of a socket's route, segments (`tcp_init_cwnd()`, Linux 6.18); `TCP_INIT_CWND` if the route has
/// none, or if it cannot be read (before Linux 6.2).
#[inline(always)]
pub(crate) fn initial_window(ctx: &SockOpsContext) -> u32 {
    const TCP_INIT_CWND: u32 = 10;
    const RTAX_INITCWND: usize = 11;
    match metric::<RTAX_INITCWND>(ctx) {
        0 | UNKNOWN => TCP_INIT_CWND,
        window => window,
    }
}

/// A metric of the socket's route, by its number (`RTAX_*`, include/uapi/linux/rtnetlink.h); [`UNKNOWN`] if it cannot be
/// read (before Linux 6.2).
#[inline(always)]
fn metric<const NUMBER: usize>(ctx: &SockOpsContext) -> u32 {
    let (dst_cache, metrics, dst_metrics) = (
        constant(&OFFSET_DST_CACHE),
        constant(&OFFSET_METRICS),
        constant(&TYPE_DST_METRICS),
    );
    if dst_cache == 0 || metrics == 0 || dst_metrics == 0 {
        return UNKNOWN;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    if tcp.is_null() {
        return UNKNOWN;
    }
    // SAFETY: a TCP socket, not null; the verifier makes loads through pointers read from it safe.
    unsafe {
        let dst: *const c_void = field(tcp, &OFFSET_DST_CACHE);
        if dst.is_null() {
            return UNKNOWN;
        }
        // The two lowest bits are flags (`DST_METRICS_FLAGS`).
        let address = field::<usize>(dst, &OFFSET_METRICS) & !3;
        let table = rdonly_cast(core::ptr::with_exposed_provenance(address), dst_metrics);
        if table.is_null() {
            return UNKNOWN;
        }
        // The numbers count from 1.
        read(table.cast::<u32>().add(NUMBER - 1))
    }
}

/// Whether the kernel's own retransmission timers of established connections are known: Linux 6.11, which is also new
/// enough to pass RTT samples to the program.
#[inline(always)]
pub(crate) fn knows_data_timers() -> bool {
    constant(&OFFSET_NET_RTO_MIN) != 0
        && constant(&OFFSET_NET_THIN_LINEAR) != 0
        && constant(&OFFSET_NET) != 0
        && constant(&OFFSET_RTO) != 0
}

/// What decides the retransmission timer of an established connection.
#[derive(Clone, Copy)]
pub(crate) struct DataTimer {
    /// The RTO, jiffies; 0 if the kernel's structs cannot be read, or if the route has an rto_min, which neither the
    /// policy nor a sysctl changes (`tcp_rto_min()`, Linux 6.18).
    pub(crate) rto: u32,
    /// `tcp_rto_min_us` of the socket's namespace.
    pub(crate) net_rto_min_us: u32,
    /// `tcp_thin_linear_timeouts` of the socket's namespace.
    pub(crate) net_is_linear: bool,
}

impl DataTimer {
    /// Reads the fields of a context's socket.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockOpsContext) -> Self {
        const RTAX_LOCK: usize = 1;
        const RTAX_RTO_MIN: u32 = 13;
        let mut timer = Self {
            rto: 0,
            net_rto_min_us: 0,
            net_is_linear: false,
        };
        // UNKNOWN has the bit as well.
        if metric::<RTAX_LOCK>(ctx) & 1 << RTAX_RTO_MIN != 0 {
            return timer;
        }
        let tcp = socket::kernel_tcp_sock(ctx);
        if tcp.is_null() {
            return timer;
        }
        // SAFETY: a TCP socket, not null. The verifier makes loads through pointers read from it safe.
        unsafe {
            let net: *const c_void = field(tcp, &OFFSET_NET);
            if !net.is_null() {
                timer.rto = field(tcp, &OFFSET_RTO);
                timer.net_rto_min_us = field(net, &OFFSET_NET_RTO_MIN);
                timer.net_is_linear = field::<u8>(net, &OFFSET_NET_THIN_LINEAR) != 0;
            }
        }
        timer
    }
}

/// The socket's RTO, jiffies (`icsk_rto`); 0 if it cannot be read.
#[inline(always)]
pub(crate) fn rto(ctx: &SockOpsContext) -> u32 {
    number(ctx, &OFFSET_RTO)
}

/// Whether the socket has the kernel's own `TCP_RTO_MIN` and `TCP_DELACK_MAX`, a fifth of a second each; `None` if they
/// can be read only with getsockopt.
#[inline(always)]
pub(crate) fn has_kernels_timers(ctx: &SockOpsContext) -> Option<bool> {
    let (rto_min, delack_max) = (constant(&OFFSET_RTO_MIN), constant(&OFFSET_DELACK_MAX));
    if rto_min == 0 || delack_max == 0 {
        return None;
    }
    let tcp = tcp_sock(ctx);
    if tcp.is_null() {
        return None;
    }
    let fifth = syn_ack_rto::kernel_jiffies() / 5;
    // SAFETY: a TCP socket, not null.
    let (rto_min, delack_max): (u32, u32) =
        unsafe { (field(tcp, &OFFSET_RTO_MIN), field(tcp, &OFFSET_DELACK_MAX)) };
    Some(rto_min == fifth && delack_max == fifth)
}

/// Returned instead of a number of retransmissions: the listener has TCP_DEFER_ACCEPT.
pub(crate) const DEFERRED: u32 = u32::MAX;

/// How often the kernel retransmits the SYN-ACK of a request, or of the socket created from it, before it gives up
/// (`reqsk_timer_handler()`, Linux 6.12). [`DEFERRED`] if TCP_DEFER_ACCEPT makes the kernel drop the peer's ACK for a
/// number of retransmissions, which the kernel computes for a first timeout of 1 s.
#[inline(always)]
pub(crate) fn syn_ack_retries(ctx: &SockOpsContext) -> u32 {
    if constant(&OFFSET_LISTENER) != 0 {
        let retries = retries_of_listener(ctx);
        if retries != UNKNOWN {
            return retries;
        }
    }
    tables::host_defaults().syn_ack_retries
}

const UNKNOWN: u32 = u32::MAX - 1;

#[inline(always)]
fn retries_of_listener(ctx: &SockOpsContext) -> u32 {
    let context = cast_to_kern_ctx(ctx);
    if context.is_null() {
        return UNKNOWN;
    }
    // SAFETY: not null, the kernel's own context; the verifier makes loads through pointers read from it safe.
    unsafe {
        let sk: *const c_void = field(context, &OFFSET_CONTEXT_SK);
        if sk.is_null() {
            return UNKNOWN;
        }
        // A socket created from a request inherits the listener's options, except TCP_DEFER_ACCEPT
        // (`inet_csk_clone_lock()`, Linux 6.12).
        let holder = if socket::is_full(ctx) {
            sk
        } else {
            field(sk, &OFFSET_LISTENER)
        };
        let connection = rdonly_cast(holder, constant(&TYPE_CONNECTION_SOCK));
        if connection.is_null() {
            return UNKNOWN;
        }
        if field::<u8>(connection, &OFFSET_DEFER_ACCEPT) != 0 {
            return DEFERRED;
        }
        let own: u8 = field(connection, &OFFSET_SYN_RETRIES);
        if own != 0 {
            return own.into();
        }
        let net: *const c_void = field(sk, &OFFSET_NET);
        if net.is_null() {
            return UNKNOWN;
        }
        field::<u8>(net, &OFFSET_SYNACK_RETRIES).into()
    }
}

/// `bpf_cast_to_kern_ctx()`: the kernel's own context, `struct bpf_sock_ops_kern`; null if the kernel has no such
/// function.
#[inline(always)]
fn cast_to_kern_ctx(ctx: &SockOpsContext) -> *const c_void {
    let context: *const c_void;
    // SAFETY: a call with BPF's calling convention: r0 is the result, r1 to r5 are clobbered.
    unsafe {
        asm!(
            ".byte {call}, {regs}, 0, 0", ".long {number}",
            call = const kfunc::CALL[0], regs = const kfunc::CALL[1],
            number = const kfunc::CAST_TO_KERN_CTX,
            inlateout("r1") ctx.ops => _,
            lateout("r0") context,
            lateout("r2") _, lateout("r3") _, lateout("r4") _, lateout("r5") _,
        );
    }
    context
}

/// `bpf_rdonly_cast()`: casts a pointer to the type with this BTF id, whose fields may then be read, whatever the
/// pointer really points to; null if the kernel has no such function.
#[inline(always)]
fn rdonly_cast(pointer: *const c_void, id: u32) -> *const c_void {
    let cast: *const c_void;
    // SAFETY: as above.
    unsafe {
        asm!(
            ".byte {call}, {regs}, 0, 0", ".long {number}",
            call = const kfunc::CALL[0], regs = const kfunc::CALL[1],
            number = const kfunc::RDONLY_CAST,
            inlateout("r1") pointer => _,
            inlateout("r2") u64::from(id) => _,
            lateout("r0") cast,
            lateout("r3") _, lateout("r4") _, lateout("r5") _,
        );
    }
    cast
}
