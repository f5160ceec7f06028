//! The socket of a context.

use core::{arch::asm, ffi::c_void, mem::offset_of};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_ops},
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

/// Reads one field with its own load.
///
/// # Safety
///
/// The verifier must allow the program to read through the pointer.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(field: *const T) -> T {
    // SAFETY: by the contract of this function.
    unsafe { core::ptr::read_volatile(field) }
}

/// Defines a function that reads a global which the loader may have written before the program was loaded. The verifier
/// knows its value. The compiler does not, but reads it only once where it is used several times.
macro_rules! constant {
    ($name:ident, $type:ty, $load:literal) => {
        #[expect(
            clippy::pointers_in_nomem_asm_block,
            reason = "the memory never changes"
        )]
        #[inline(always)]
        pub(crate) fn $name(global: &'static $type) -> $type {
            let value: u64;
            // SAFETY: a load from memory that never changes; it clears the rest of the register.
            unsafe {
                asm!($load, value = out(reg) value, global = in(reg) &raw const *global,
                    options(pure, nomem, nostack));
                core::hint::assert_unchecked(value <= <$type>::MAX as u64);
            }
            #[expect(clippy::cast_possible_truncation, reason = "asserted")]
            let value = value as $type;
            value
        }
    };
}
constant!(constant_u8, u8, "{value} = *(u8 *)({global} + 0)");
constant!(constant, u32, "{value} = *(u32 *)({global} + 0)");

/// A u32 of the context. The verifier accepts only the context's own address plus a constant. The compiler does not
/// know this and might keep the sum in a register for a second use.
macro_rules! word {
    ($ctx:expr, $field:ident) => {{
        let word: u64;
        // SAFETY: a field of the context. The load clears the upper half of the register.
        unsafe {
            asm!("{word} = *(u32 *)({ops} + {field})", word = out(reg) word, ops = in(reg) $ctx.ops,
                field = const offset_of!(bpf_sock_ops, $field), options(readonly, nostack));
            core::hint::assert_unchecked(word <= u32::MAX as u64);
        }
        #[expect(clippy::cast_possible_truncation, reason = "asserted")]
        let word = word as u32;
        word
    }};
}

/// The full socket of a context, or null. On request sockets, a load whose destination register is also its source
/// register leaves the context's address there (before commit 10f86a2a5c91 of April 2026). An `out` register differs
/// from an `in` register, so this asm avoids it.
#[inline(always)]
fn full_sock(ctx: &SockOpsContext) -> *mut bpf_sock {
    let sk: *mut bpf_sock;
    // SAFETY: a field of the context.
    unsafe {
        asm!("{sk} = *(u64 *)({ops} + {field})", sk = out(reg) sk, ops = in(reg) ctx.ops,
            field = const offset_of!(bpf_sock_ops, __bindgen_anon_2), options(readonly, nostack));
    }
    sk
}

/// Whether there is a full socket (and not only a connection request).
#[inline(always)]
pub(crate) fn is_full(ctx: &SockOpsContext) -> bool {
    word!(ctx, is_fullsock) != 0
}

/// The socket's state (`BPF_TCP_*`).
#[inline(always)]
pub(crate) fn state(ctx: &SockOpsContext) -> u32 {
    word!(ctx, state)
}

/// Whether the socket is the agent's own probe. (The context does not have the mark, so it is read from the socket.)
#[inline(always)]
pub(crate) fn is_probe(ctx: &SockOpsContext) -> bool {
    let sk = full_sock(ctx);
    // SAFETY: not null, and a field the verifier lets programs read.
    !sk.is_null() && unsafe { read(&raw const (*sk).mark) } == PROBE_MARK
}

/// The socket's retransmissions so far, SYNs (or SYN-ACKs) included.
#[inline(always)]
pub(crate) fn total_retrans(ctx: &SockOpsContext) -> u32 {
    word!(ctx, total_retrans)
}

/// The smoothed RTT, microseconds; 0: none yet.
#[inline(always)]
pub(crate) fn srtt_us(ctx: &SockOpsContext) -> u32 {
    // The kernel keeps it in eighths of a microsecond.
    word!(ctx, srtt_us) >> 3
}

/// The number of consecutive unanswered timeouts (`icsk_retransmits`); `None` without a full TCP socket.
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

/// The same socket as the kernel's own struct; null if it is not a full TCP socket.
#[inline(always)]
pub(crate) fn kernel_tcp_sock(ctx: &SockOpsContext) -> *const c_void {
    let sk = sk(ctx);
    if sk.is_null() {
        return core::ptr::null();
    }
    // SAFETY: a socket that the verifier tracks, not null.
    unsafe { bpf_skc_to_tcp_sock(sk).cast() }
}

/// The number of segments sent but not acknowledged.
#[inline(always)]
pub(crate) fn packets_out(ctx: &SockOpsContext) -> u32 {
    word!(ctx, packets_out)
}

/// The congestion window, segments.
#[inline(always)]
pub(crate) fn snd_cwnd(ctx: &SockOpsContext) -> u32 {
    word!(ctx, snd_cwnd)
}

/// The number of segments sent so far, SYNs included.
#[inline(always)]
pub(crate) fn segs_out(ctx: &SockOpsContext) -> u32 {
    word!(ctx, segs_out)
}

/// The callbacks that sock_ops programs have requested (BPF_SOCK_OPS_*_CB_FLAG).
#[inline(always)]
pub(crate) fn callbacks(ctx: &SockOpsContext) -> u32 {
    word!(ctx, bpf_sock_ops_cb_flags)
}

/// Spreads differing bits over the upper bits (2^32 divided by the golden ratio).
const SPREAD: u32 = 0x9e37_79b1;

/// An unpredictable number, derived from the connection's initial sequence number.
#[inline(always)]
pub(crate) fn sequence_hash(ctx: &SockOpsContext) -> u32 {
    word!(ctx, snd_una).wrapping_mul(SPREAD)
}

/// Both ports, as [`rto_agent_common::arm::hash`] takes them.
#[inline(always)]
pub(crate) fn ports(ctx: &SockOpsContext) -> u32 {
    word!(ctx, remote_port) | word!(ctx, local_port)
}

/// A number derived from the peer's port, for peers that use many ports in turn.
#[inline(always)]
pub(crate) fn port_hash(ctx: &SockOpsContext) -> u32 {
    // The port is in the upper half.
    word!(ctx, remote_port).rotate_left(16).wrapping_mul(SPREAD)
}

/// The number of duplicate segments that the peer has reported (DSACK, RFC 2883).
#[inline(always)]
pub(crate) fn dsacks(ctx: &SockOpsContext) -> u32 {
    let sk = sk(ctx);
    if sk.is_null() {
        return 0;
    }
    // SAFETY: a socket that the verifier tracks, not null.
    let tcp = unsafe { bpf_tcp_sock(sk.cast()) };
    if tcp.is_null() {
        return 0;
    }
    // SAFETY: not null, and a field the verifier lets programs read.
    unsafe { read(&raw const (*tcp).dsack_dups) }
}

/// The recent minimum RTT, microseconds; `u32::MAX`: none yet.
#[inline(always)]
pub(crate) fn rtt_min_us(ctx: &SockOpsContext) -> u32 {
    word!(ctx, rtt_min)
}

/// Records the current process and its name, if the kernel provides them.
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
    // SAFETY: the buffer has the length that is passed; on failure the kernel zeroes it.
    unsafe {
        bpf_get_current_comm((&raw mut watch.comm).cast(), size);
    }
}

/// The socket, as helpers take it; null if the context has no full socket.
#[inline(always)]
pub(crate) fn sk(ctx: &SockOpsContext) -> *mut c_void {
    full_sock(ctx).cast()
}

/// Nanoseconds since boot, CLOCK_MONOTONIC.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper takes nothing and only reads the clock.
    unsafe { bpf_ktime_get_ns() }
}
