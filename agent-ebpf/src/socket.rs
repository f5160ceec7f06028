//! The socket behind a context.

use core::{arch::asm, ffi::c_void, mem::offset_of};

use aya_ebpf::{
    bindings::bpf_sock_ops,
    helpers::{
        bpf_ktime_get_ns,
        generated::{
            bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_skc_to_tcp_sock, bpf_tcp_sock,
        },
    },
    programs::SockOpsContext,
};
use rto_agent_common::{PROBE_MARK, Watch, event::COMM_LEN, statistics};

use crate::tables;

/// Reads one field by a load of its own.
///
/// # Safety
///
/// The pointer must be one the verifier lets the program read.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(field: *const T) -> T {
    // SAFETY: by the contract of this function.
    unsafe { core::ptr::read_volatile(field) }
}

/// A u32 of the context. The verifier takes the context's own address and a constant alone, which the compiler knows
/// nothing of: it may keep the sum for a second use.
macro_rules! word {
    ($ctx:expr, $field:ident) => {{
        let word: u32;
        // SAFETY: a field of the context.
        unsafe {
            asm!("{word} = *(u32 *)({ops} + {field})", word = out(reg) word, ops = in(reg) $ctx.ops,
                field = const offset_of!(bpf_sock_ops, $field), options(readonly, nostack));
        }
        word
    }};
}

/// Whether there is a full socket (and not just a connection request).
#[inline(always)]
pub(crate) fn is_full(ctx: &SockOpsContext) -> bool {
    word!(ctx, is_fullsock) != 0
}

/// Its state (`BPF_TCP_*`).
#[inline(always)]
pub(crate) fn state(ctx: &SockOpsContext) -> u32 {
    word!(ctx, state)
}

/// Whether it is the agent's own probe. (The mark is read of the socket that the context points to.)
#[inline(always)]
pub(crate) fn is_probe(ctx: &SockOpsContext) -> bool {
    // SAFETY: a field of the context.
    let sk = unsafe { read(&raw const (*ctx.ops).__bindgen_anon_2.sk) };
    // SAFETY: not null, and a field the verifier lets programs read.
    !sk.is_null() && unsafe { read(&raw const (*sk).mark) } == PROBE_MARK
}

/// Its retransmissions so far, SYNs (or SYN-ACKs) included.
#[inline(always)]
pub(crate) fn total_retrans(ctx: &SockOpsContext) -> u32 {
    word!(ctx, total_retrans)
}

/// Its smoothed RTT, microseconds; 0: none yet.
#[inline(always)]
pub(crate) fn srtt_us(ctx: &SockOpsContext) -> u32 {
    // The kernel keeps it in eighths.
    word!(ctx, srtt_us) >> 3
}

/// Its timeouts in a row that nothing has answered (`icsk_retransmits`).
#[inline(always)]
pub(crate) fn retransmits(ctx: &SockOpsContext) -> Option<u32> {
    let sk = sk(ctx);
    if sk.is_null() {
        return None;
    }
    // SAFETY: a socket that the verifier tracks, not null.
    let tcp = unsafe { bpf_tcp_sock(sk.cast()) };
    if tcp.is_null() {
        return None;
    }
    // SAFETY: not null, and a field the verifier lets programs read.
    Some(unsafe { read(&raw const (*tcp).icsk_retransmits) })
}

/// The same socket as the kernel has it; null where it is no full TCP socket.
#[inline(always)]
pub(crate) fn kernel_tcp_sock(ctx: &SockOpsContext) -> *const c_void {
    let sk = sk(ctx);
    if sk.is_null() {
        return core::ptr::null();
    }
    // SAFETY: a socket that the verifier tracks, not null.
    unsafe { bpf_skc_to_tcp_sock(sk).cast() }
}

/// Its segments that are sent and not yet acknowledged.
#[inline(always)]
pub(crate) fn packets_out(ctx: &SockOpsContext) -> u32 {
    word!(ctx, packets_out)
}

/// Segments it has sent so far, SYNs included.
#[inline(always)]
pub(crate) fn segs_out(ctx: &SockOpsContext) -> u32 {
    word!(ctx, segs_out)
}

/// The callbacks that are asked for (BPF_SOCK_OPS_*_CB_FLAG).
#[inline(always)]
pub(crate) fn callbacks(ctx: &SockOpsContext) -> u32 {
    word!(ctx, bpf_sock_ops_cb_flags)
}

/// Spreads what differs over the upper bits (the golden ratio, of 2^32).
const SPREAD: u32 = 0x9e37_79b1;

/// A number nobody can foresee, of the sequence number that a connection begins with.
#[inline(always)]
pub(crate) fn sequence_hash(ctx: &SockOpsContext) -> u32 {
    word!(ctx, snd_una).wrapping_mul(SPREAD)
}

/// Both ports, as [`rto_agent_common::arm::hash`] takes them.
#[inline(always)]
pub(crate) fn ports(ctx: &SockOpsContext) -> u32 {
    word!(ctx, remote_port) | word!(ctx, local_port)
}

/// A number of the peer's port, for those that come of many ports in turn.
#[inline(always)]
pub(crate) fn port_hash(ctx: &SockOpsContext) -> u32 {
    // The port is in the upper half.
    word!(ctx, remote_port).rotate_left(16).wrapping_mul(SPREAD)
}

/// Whether the peer has told of segments that it got twice (DSACK, RFC 2883).
#[inline(always)]
pub(crate) fn has_dsacks(ctx: &SockOpsContext) -> bool {
    let sk = sk(ctx);
    if sk.is_null() {
        return false;
    }
    // SAFETY: a socket that the verifier tracks, not null.
    let tcp = unsafe { bpf_tcp_sock(sk.cast()) };
    // SAFETY: not null, and a field the verifier lets programs read.
    !tcp.is_null() && unsafe { read(&raw const (*tcp).dsack_dups) } != 0
}

/// The least RTT it has seen lately, microseconds; `u32::MAX`: none yet.
#[inline(always)]
pub(crate) fn rtt_min_us(ctx: &SockOpsContext) -> u32 {
    word!(ctx, rtt_min)
}

/// The current process and its name, where the kernel tells.
#[inline(always)]
pub(crate) fn note_process(watch: &mut Watch) {
    if !tables::counts(statistics::PROCESS) {
        return;
    }
    // SAFETY: the helper takes nothing.
    watch.pid = unsafe { (bpf_get_current_pid_tgid() >> 32) as u32 };
    const { assert!(COMM_LEN <= u8::MAX as usize) };
    #[expect(clippy::cast_possible_truncation, reason = "asserted")]
    let size = COMM_LEN as u32;
    // SAFETY: the buffer is as long as said; on failure it is zeroed by the kernel.
    unsafe {
        bpf_get_current_comm((&raw mut watch.comm).cast(), size);
    }
}

/// The socket, as helpers take it; null where the context has no full one.
#[inline(always)]
pub(crate) fn sk(ctx: &SockOpsContext) -> *mut c_void {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).__bindgen_anon_2.sk).cast() }
}

/// Nanoseconds since boot, CLOCK_MONOTONIC.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper takes nothing and only reads the clock.
    unsafe { bpf_ktime_get_ns() }
}
