//! What the program reads of sockets beyond its context, by the running kernel's BTF: who retransmits a
//! SYN-ACK how often, and which SYNs a short timer would do harm.
//!
//! Every offset is 0 where the kernel has no such field or does not let the program at it. These are
//! constants to the verifier, so that what reads such a field is no part of the program there.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::kfunc;

use crate::{
    socket::{self, read},
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
    TYPE_CONNECTION_SOCK
    TYPE_TCP_SOCK
}

#[inline(always)]
fn constant(global: *const u32) -> u32 {
    // SAFETY: a constant, which the loader may have written before the program was loaded.
    unsafe { read(global) }
}

/// Whether the socket is a subflow of MPTCP. Two SYN timeouts make such a one fall back to TCP, and the kernel
/// then does without MPTCP for an hour (`mptcp_active_detect_blackhole()`, Linux 6.18).
#[inline(always)]
pub(crate) fn is_mptcp(ctx: &SockOpsContext) -> bool {
    if constant(&raw const OFFSET_IS_MPTCP) == 0 {
        return false;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    // SAFETY: a TCP socket, not null.
    !tcp.is_null() && unsafe { field::<u8>(tcp, &raw const OFFSET_IS_MPTCP) } != 0
}

/// Whether the SYN is sent with TCP Fast Open, and three timeouts of the connection in a row would make the
/// kernel do without it for a while (`tcp_fastopen_active_detect_blackhole()`, Linux 6.12; off by default,
/// `net.ipv4.tcp_fastopen_blackhole_timeout_sec`).
#[inline(always)]
pub(crate) fn detects_fastopen_blackhole(ctx: &SockOpsContext) -> bool {
    if constant(&raw const OFFSET_FASTOPEN_REQ) == 0
        || constant(&raw const OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT) == 0
    {
        return false;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    if tcp.is_null() {
        return false;
    }
    // SAFETY: a TCP socket, not null; loads through what is read from it are made safe by the verifier.
    unsafe {
        if field::<u64>(tcp, &raw const OFFSET_FASTOPEN_REQ) == 0 {
            return false;
        }
        let net: *const c_void = field(tcp, &raw const OFFSET_NET);
        !net.is_null() && field::<u32>(net, &raw const OFFSET_FASTOPEN_BLACKHOLE_TIMEOUT) != 0
    }
}

/// Whether the socket is one of the two kinds above, of which only some are to keep the kernel's timers.
#[inline(always)]
pub(crate) fn is_mptcp_or_fastopen(ctx: &SockOpsContext) -> bool {
    let (is_mptcp, fastopen_req) = (
        constant(&raw const OFFSET_IS_MPTCP),
        constant(&raw const OFFSET_FASTOPEN_REQ),
    );
    if is_mptcp == 0 && fastopen_req == 0 {
        return false;
    }
    let tcp = tcp_sock(ctx);
    if tcp.is_null() {
        return false;
    }
    // SAFETY: a TCP socket, not null.
    unsafe {
        (is_mptcp != 0 && field::<u8>(tcp, &raw const OFFSET_IS_MPTCP) != 0)
            || (fastopen_req != 0 && field::<u64>(tcp, &raw const OFFSET_FASTOPEN_REQ) != 0)
    }
}

/// [`socket::kernel_tcp_sock`] without a call, where the kernel has the functions for that.
#[inline(always)]
fn tcp_sock(ctx: &SockOpsContext) -> *const c_void {
    let (context_sk, tcp_sock) = (
        constant(&raw const OFFSET_CONTEXT_SK),
        constant(&raw const TYPE_TCP_SOCK),
    );
    if context_sk == 0 || tcp_sock == 0 {
        return socket::kernel_tcp_sock(ctx);
    }
    let context = cast_to_kern_ctx(ctx);
    if context.is_null() {
        return core::ptr::null();
    }
    // SAFETY: not null, the kernel's own context; loads through what is read from it are made safe by the verifier.
    unsafe { rdonly_cast(field(context, &raw const OFFSET_CONTEXT_SK), tcp_sock) }
}

/// The socket's retransmission timer, jiffies (`icsk_rto`); 0 where it cannot be read.
#[inline(always)]
pub(crate) fn rto(ctx: &SockOpsContext) -> u32 {
    if constant(&raw const OFFSET_RTO) == 0 {
        return 0;
    }
    let tcp = socket::kernel_tcp_sock(ctx);
    if tcp.is_null() {
        return 0;
    }
    // SAFETY: a TCP socket, not null.
    unsafe { field(tcp, &raw const OFFSET_RTO) }
}

/// Whether the socket has the kernel's own `TCP_RTO_MIN` and `TCP_DELACK_MAX`, a fifth of a second each; `None` where
/// they cannot be read without asking for the options.
#[inline(always)]
pub(crate) fn has_kernels_timers(ctx: &SockOpsContext) -> Option<bool> {
    let (rto_min, delack_max) = (
        constant(&raw const OFFSET_RTO_MIN),
        constant(&raw const OFFSET_DELACK_MAX),
    );
    if rto_min == 0 || delack_max == 0 {
        return None;
    }
    let tcp = tcp_sock(ctx);
    if tcp.is_null() {
        return None;
    }
    let fifth = syn_ack_rto::kernel_jiffies() / 5;
    // SAFETY: a TCP socket, not null.
    let (rto_min, delack_max): (u32, u32) = unsafe {
        (
            field(tcp, &raw const OFFSET_RTO_MIN),
            field(tcp, &raw const OFFSET_DELACK_MAX),
        )
    };
    Some(rto_min == fifth && delack_max == fifth)
}

/// In place of a number of retransmissions: the listener has TCP_DEFER_ACCEPT.
pub(crate) const DEFERRED: u32 = u32::MAX;

/// How often the kernel retransmits the SYN-ACK of a request, or of the socket made of it, before it gives up
/// (`reqsk_timer_handler()`, Linux 6.12); or [`DEFERRED`], where it drops the peer's ACK until the
/// retransmissions are over, which are counted as if the first timeout were 1 s.
#[inline(always)]
pub(crate) fn syn_ack_retries(ctx: &SockOpsContext) -> u32 {
    if constant(&raw const OFFSET_LISTENER) != 0 {
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
    // SAFETY: not null, the kernel's own context; loads through what is read from it are made safe by the
    // verifier.
    unsafe {
        let sk: *const c_void = field(context, &raw const OFFSET_CONTEXT_SK);
        if sk.is_null() {
            return UNKNOWN;
        }
        // A socket that was made of a request has the listener's options, but for TCP_DEFER_ACCEPT
        // (`inet_csk_clone_lock()`, Linux 6.12).
        let holder = if socket::is_full(ctx) {
            sk
        } else {
            field(sk, &raw const OFFSET_LISTENER)
        };
        let connection = rdonly_cast(holder, constant(&raw const TYPE_CONNECTION_SOCK));
        if connection.is_null() {
            return UNKNOWN;
        }
        if field::<u8>(connection, &raw const OFFSET_DEFER_ACCEPT) != 0 {
            return DEFERRED;
        }
        let own: u8 = field(connection, &raw const OFFSET_SYN_RETRIES);
        if own != 0 {
            return own.into();
        }
        let net: *const c_void = field(sk, &raw const OFFSET_NET);
        if net.is_null() {
            return UNKNOWN;
        }
        field::<u8>(net, &raw const OFFSET_SYNACK_RETRIES).into()
    }
}

/// `bpf_cast_to_kern_ctx()`: the kernel's own context, `struct bpf_sock_ops_kern`; null where the kernel has no
/// such function.
#[inline(always)]
fn cast_to_kern_ctx(ctx: &SockOpsContext) -> *const c_void {
    let context: *const c_void;
    // SAFETY: a call by the calling convention of BPF: r0 is the result, r1 to r5 are lost.
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

/// `bpf_rdonly_cast()`: the pointer as one to the type with this BTF id, whose fields may be read, whatever it
/// is; null where the kernel has no such function.
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
