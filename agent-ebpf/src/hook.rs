//! The RTO hook: callbacks of established connections that have a policy.
//!
//! The kernel runs them only for sockets whose flags request them, and the program sets the flags only on sockets that
//! have a policy, so other sockets cost nothing.

use aya_ebpf::{
    bindings::bpf_sock_ops, helpers::generated::bpf_sock_ops_cb_flags_set, programs::SockOpsContext,
};
use rto_agent_common::{SockOpt, SocketState, event::kind, features, socket_flags, statistics};
use rto_agent_ebpf::counter::Counter;

use crate::{
    events, handshake,
    options::Target,
    series,
    socket::{self, read},
    storage,
    tables::{self, Tally},
    unstored,
};

// include/uapi/linux/bpf.h
pub(crate) const RTO_CB_FLAG: u32 = 1 << 0;
pub(crate) const RETRANS_CB_FLAG: u32 = 1 << 1;
const STATE_CB_FLAG: u32 = 1 << 2;
const RTT_CB_FLAG: u32 = 1 << 3;
/// `BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG`: the mark of a connection that this program treats or counts. It costs
/// nothing, because only a segment with a TCP option that the kernel does not know causes this callback
/// (`bpf_skops_parse_hdr()`, Linux 6.18), and no other program is known to request it alone. A program that overwrites
/// the callbacks removes it, so callbacks with the mark are this program's.
pub(crate) const MARK: u32 = 1 << 5;

/// The callbacks that a connection with storage needs. Invariant: the program never clears them while the connection
/// lasts, because another program may have found them set and rely on them.
#[inline(always)]
fn wanted(state: &SocketState) -> u32 {
    let mut flags = 0;
    if tables::counts(statistics::ON) && state.flags & socket_flags::UNCOUNTED == 0 {
        flags |= RTO_CB_FLAG | RETRANS_CB_FLAG | STATE_CB_FLAG;
        if state.handshake.in_question != 0 || handshake::samples_rtt() {
            flags |= RTT_CB_FLAG;
        }
    }
    if state.options.linear_retries != 0 {
        flags |= RTO_CB_FLAG;
    }
    if state.options.is_any_set() {
        // The options are restored when the connection ends.
        flags |= STATE_CB_FLAG;
    }
    if tables::has(features::RTO_RESTART) && state.options.restart_hz != 0 {
        flags |= RTT_CB_FLAG;
    }
    flags | MARK
}

/// Requests the callbacks, in addition to those that other programs have requested.
#[inline(never)]
pub(crate) fn enable(ops: *mut bpf_sock_ops, state: &mut SocketState, tally: Tally) {
    add(&SockOpsContext::new(ops), wanted(state), tally);
}

/// Marks that a connecting socket has storage: requests STATE_CB, which sockets without storage do not.
#[inline(always)]
pub(crate) fn mark_stored(ctx: &SockOpsContext, tally: Tally) {
    let wanted = MARK | RTO_CB_FLAG | RETRANS_CB_FLAG | STATE_CB_FLAG;
    add(ctx, wanted, tally);
}

/// Requests STATE_CB for a connecting socket whose options must be restored when the attempt ends.
#[inline(always)]
pub(crate) fn watch_end(ctx: &SockOpsContext, tally: Tally) {
    add(ctx, STATE_CB_FLAG, tally);
}

/// Requests RTT_CB.
#[inline(always)]
pub(crate) fn watch_rtt(ctx: &SockOpsContext) {
    add(ctx, RTT_CB_FLAG, Tally::NOBODY);
}

/// Whether a connecting socket may have storage, judged by its callbacks.
#[inline(always)]
pub(crate) fn has_storage(ctx: &SockOpsContext) -> bool {
    socket::callbacks(ctx) & STATE_CB_FLAG != 0
}

/// Requests callbacks.
#[inline(always)]
fn add(ctx: &SockOpsContext, wanted: u32, tally: Tally) {
    let flags = socket::callbacks(ctx);
    let missing = wanted & !flags;
    if missing != 0 && set(ctx, flags | missing) != 0 {
        tally.add(Counter::failures_of(SockOpt::CbFlags), 1);
    }
}

/// Removes the mark. The callbacks stay, because another program may have requested them as well; without the mark they
/// mean nothing to this program.
#[inline(always)]
pub(crate) fn unmark(ctx: &SockOpsContext) {
    if is_marked(ctx) {
        // The kernel accepts flags that it has just reported.
        let _taken = set(ctx, socket::callbacks(ctx) & !MARK);
    }
}

/// As [`enable`], for a socket outside a sock_ops program. Returns whether the kernel accepted the callbacks; true
/// before Linux 6.12, where the option does not exist.
#[inline(always)]
pub(crate) fn enable_on(target: Target, state: &mut SocketState, tally: Tally) -> bool {
    let Some(flags) = target.get(SockOpt::CbFlags) else {
        return true;
    };
    let missing = wanted(state) & !flags;
    if missing == 0 {
        return true;
    }
    target.set(SockOpt::CbFlags, flags | missing, tally)
}

/// As [`unmark`].
#[inline(always)]
pub(crate) fn unmark_on(target: Target) {
    // Without this option the mark stays, and a connection of this socket gets storage when it is covered again.
    if let Some(flags) = target.get(SockOpt::CbFlags)
        && flags & MARK != 0
    {
        let _taken = target.set(SockOpt::CbFlags, flags & !MARK, Tally::NOBODY);
    }
}

/// As [`enable`], for a connection without storage.
#[inline(always)]
pub(crate) fn enable_without_storage(ctx: &SockOpsContext, direction: u32, tally: Tally) {
    add(ctx, unstored::callbacks(direction), tally);
}

/// Whether another program has overwritten the callbacks and the program does not see retransmissions.
#[inline(always)]
pub(crate) fn misses_losses(ctx: &SockOpsContext) -> bool {
    socket::callbacks(ctx) & (MARK | RETRANS_CB_FLAG) != MARK | RETRANS_CB_FLAG
}

/// Whether any program has requested callbacks on the socket.
#[inline(always)]
pub(crate) fn has_callbacks(ctx: &SockOpsContext) -> bool {
    socket::callbacks(ctx) != 0
}

/// Whether the callbacks are this program's.
#[inline(always)]
pub(crate) fn is_marked(ctx: &SockOpsContext) -> bool {
    socket::callbacks(ctx) & MARK != 0
}

/// Whether the socket requests RTO_CB.
#[inline(always)]
pub(crate) fn tells_rto(ctx: &SockOpsContext) -> bool {
    socket::callbacks(ctx) & RTO_CB_FLAG != 0
}

/// RTO_CB of an established connection: its retransmission timer has fired. The kernel runs it before it retransmits
/// (`tcp_write_timeout()`, Linux 6.12). Arguments: the number of timeouts directly before this one, the RTO in jiffies,
/// and whether the kernel gives the connection up. The first is read from the socket instead: see [`argument`].
#[inline(never)]
pub(crate) fn rto(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = unstored::at_loss(ctx, &mut storage) else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    let Some(before) = socket::retransmits(ctx) else {
        return 0;
    };
    if argument(ctx, 2) != 0 {
        tally.add(Counter::EXPIRED, 1);
        return 0;
    }
    tally.add(Counter::rtos(tables::step(before)), 1);
    series::timed_out(ctx, state);
    note_loss(ctx, state);
    let linear_retries = state.options.linear_retries;
    if linear_retries != 0 {
        let target = Target::of(ctx);
        if before < linear_retries.into() {
            target.linear_mode_on(state, tally);
        } else if state.flags & socket_flags::LINEAR_OFF == 0
            && is_thin(ctx)
            && target.set(SockOpt::ThinLinear, 0, tally)
        {
            state.flags |= socket_flags::LINEAR_OFF;
            tally.add(Counter::LINEAR_ENDED, 1);
        }
    }
    let attempt = before.wrapping_add(1);
    events::tell(ctx, state, kind::RTO, attempt, argument(ctx, 1));
    0
}

/// Records, at a retransmission timeout, that everything outstanding counts as lost.
#[inline(always)]
fn note_loss(ctx: &SockOpsContext, state: &mut SocketState) {
    // SAFETY: fields of the context.
    let outstanding = unsafe {
        read(&raw const (*ctx.ops).snd_nxt).wrapping_sub(read(&raw const (*ctx.ops).snd_una))
    };
    state.watch.loss_end = acknowledged(ctx) + u64::from(outstanding);
}

/// Bytes that the peer has acknowledged. (A sequence number would wrap after 4 GiB.)
#[inline(always)]
fn acknowledged(ctx: &SockOpsContext) -> u64 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).bytes_acked) }
}

/// Whether linear mode applies to this stream (`tcp_stream_is_thin()`, Linux 6.12).
#[inline(always)]
fn is_thin(ctx: &SockOpsContext) -> bool {
    socket::packets_out(ctx) < 4
}

/// RETRANS_CB: a segment was retransmitted. Arguments: its sequence number, the number of segments, and the result (0,
/// or an errno).
///
/// If `lost_out` is 0, this is a tail loss probe, which marks nothing as lost (`tcp_send_loss_probe()`). A timeout
/// first marks everything outstanding (`tcp_enter_loss()`), and a recovery at least the segments that it retransmits
/// (`tcp_mark_skb_lost()`; all Linux 6.12, and measured).
#[inline(never)]
pub(crate) fn retransmitted(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    if argument(ctx, 2) != 0 {
        return 0;
    }
    let is_first = !tells_rto(ctx);
    let Some(state) = unstored::at_loss(ctx, &mut storage) else {
        // Once for each connection: at its first retransmission, or when it ends.
        if socket::callbacks(ctx) & STATE_CB_FLAG == 0
            && socket::total_retrans(ctx) == argument(ctx, 1)
        {
            unstored::lost_callbacks(ops);
        }
        return 0;
    };
    let tally = Tally::of_socket(state);
    if is_first {
        missed_timeouts(ctx, state, tally);
    }
    // SAFETY: a field of the context.
    let lost = unsafe { read(&raw const (*ctx.ops).lost_out) };
    let kind = if lost == 0 {
        tally.add(Counter::TAIL_LOSS_PROBES, 1);
        series::probed(ctx, state);
        kind::TLP
    } else {
        let segments = argument(ctx, 1);
        tally.add(Counter::SEGMENTS_RETRANSMITTED, segments.into());
        if acknowledged(ctx) < state.watch.loss_end {
            // Part of the recovery from a timeout that was already reported.
            return 0;
        }
        kind::FAST
    };
    events::tell(ctx, state, kind, 1, 0);
    0
}

/// Counts the retransmission timeouts of an accepted connection before it requested RTO_CB: the timeout that
/// retransmits now, and earlier ones whose retransmission the host itself dropped.
#[inline(always)]
fn missed_timeouts(ctx: &SockOpsContext, state: &mut SocketState, tally: Tally) {
    let timeouts = socket::retransmits(ctx).unwrap_or(0);
    if timeouts == 0 {
        return;
    }
    let mut before = 0;
    // At most the number of steps that are counted.
    while (before as usize) < rto_agent_common::RTO_STEPS {
        if before >= timeouts {
            break;
        }
        tally.add(Counter::rtos(tables::step(before)), 1);
        before += 1;
    }
    note_loss(ctx, state);
    events::tell(ctx, state, kind::RTO, timeouts, 0);
}

/// An argument of the callback. The first one is unreliable: it shares its memory with `reply`, which an earlier
/// program may have written (one of the kernel's samples replies -1 to everything).
#[inline(always)]
pub(crate) fn argument(ctx: &SockOpsContext, index: usize) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).__bindgen_anon_1.args[index]) }
}

#[inline(always)]
fn set(ctx: &SockOpsContext, flags: u32) -> i64 {
    // SAFETY: the context of this very callback.
    unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, flags.cast_signed()) }
}
