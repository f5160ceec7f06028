//! The RTO hook: what happens to established connections of a policy.
//!
//! The kernel calls it only for sockets whose flags ask for it, and the flags are set only on
//! sockets of a policy: others cost nothing.

use aya_ebpf::{helpers::generated::bpf_sock_ops_cb_flags_set, programs::SockOpsContext};
use rto_agent_common::{SockOpt, SocketState, event::kind, socket_flags, statistics};
use rto_agent_ebpf::counter::Counter;

use crate::{
    events, handshake,
    options::Target,
    socket::{self, read},
    tables::{self, Tally},
};

// include/uapi/linux/bpf.h
const RTO_CB_FLAG: u32 = 1 << 0;
const RETRANS_CB_FLAG: u32 = 1 << 1;
const STATE_CB_FLAG: u32 = 1 << 2;
const RTT_CB_FLAG: u32 = 1 << 3;

/// The callbacks that a connection needs. They are never taken back while it lasts: another program
/// may have come to rely on them.
#[inline(always)]
fn wanted(state: &SocketState) -> u32 {
    let mut flags = 0;
    if tables::counts(statistics::ON) && state.flags & socket_flags::UNCOUNTED == 0 {
        flags |= RTO_CB_FLAG | RETRANS_CB_FLAG | STATE_CB_FLAG;
        if state.in_question != 0 || handshake::samples_rtt() {
            flags |= RTT_CB_FLAG;
        }
    }
    if state.linear_retries != 0 {
        flags |= RTO_CB_FLAG;
    }
    if state.restart_hz != 0 {
        flags |= RTT_CB_FLAG;
    }
    flags
}

/// Asks for the callbacks, beside those that other programs asked for.
#[inline(always)]
pub(crate) fn enable(ctx: &SockOpsContext, state: &mut SocketState, tally: Tally) {
    let flags = flags(ctx);
    let missing = wanted(state) & !flags;
    if missing == 0 {
        return;
    }
    if set(ctx, flags | missing) == 0 {
        state.cb_flags_added |= missing;
    } else {
        tally.add(Counter::failures_of(SockOpt::CbFlags), 1);
    }
}

/// Takes back what [`enable`] asked for.
#[inline(always)]
pub(crate) fn disable(ctx: &SockOpsContext, state: &mut SocketState) {
    if state.cb_flags_added != 0 {
        // Flags the kernel has just reported: it takes them.
        let _taken = set(ctx, flags(ctx) & !state.cb_flags_added);
        state.cb_flags_added = 0;
    }
}

/// As [`enable`], for a socket outside of a sock_ops program. Before Linux 6.12 there is no such
/// option, which is no refusal of this socket's.
#[inline(always)]
pub(crate) fn enable_on(target: Target, state: &mut SocketState, tally: Tally) -> bool {
    let Some(flags) = target.get(SockOpt::CbFlags) else {
        return true;
    };
    let missing = wanted(state) & !flags;
    if missing == 0 {
        return true;
    }
    let taken = target.set(SockOpt::CbFlags, flags | missing, tally);
    if taken {
        state.cb_flags_added |= missing;
    }
    taken
}

/// As [`disable`].
#[inline(always)]
pub(crate) fn disable_on(target: Target, state: &mut SocketState) {
    if state.cb_flags_added != 0 {
        if let Some(flags) = target.get(SockOpt::CbFlags) {
            let _taken = target.set(
                SockOpt::CbFlags,
                flags & !state.cb_flags_added,
                Tally::NOBODY,
            );
        }
        // Where there is no such option nothing more can be done; the flags ask for callbacks that
        // no program answers.
        state.cb_flags_added = 0;
    }
}

/// RTO_CB: the retransmission timer has fired, nothing was sent yet (`tcp_write_timeout()`, Linux
/// 6.12). The arguments: timeouts right before this one, the RTO in jiffies, whether the
/// connection is given up. The first is asked of the socket: see [`argument`].
#[inline(always)]
pub(crate) fn rto(ctx: &SockOpsContext) {
    let Some(state) = socket::policy_state(ctx) else {
        return;
    };
    let tally = Tally::of_socket(state);
    let Some(before) = socket::retransmits(ctx) else {
        return;
    };
    if argument(ctx, 2) != 0 {
        tally.add(Counter::EXPIRED, 1);
        return;
    }
    tally.add(Counter::rtos(tables::step(before)), 1);
    // SAFETY: fields of the context.
    let outstanding = unsafe {
        read(&raw const (*ctx.ops).snd_nxt).wrapping_sub(read(&raw const (*ctx.ops).snd_una))
    };
    state.loss_end = acknowledged(ctx) + u64::from(outstanding);
    if state.linear_retries != 0 {
        let target = Target::of(ctx);
        if before < state.linear_retries {
            target.linear_mode_on(state, tally);
        } else if state.linear_off == 0 && is_thin(ctx) && target.set(SockOpt::ThinLinear, 0, tally)
        {
            state.linear_off = 1;
            tally.add(Counter::LINEAR_ENDED, 1);
        }
    }
    let attempt = before.wrapping_add(1);
    events::tell(ctx, kind::RTO, attempt, argument(ctx, 1));
}

/// Bytes that the peer has acknowledged. (Sequence numbers begin again after 4 GiB.)
#[inline(always)]
fn acknowledged(ctx: &SockOpsContext) -> u64 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).bytes_acked) }
}

/// Whether linear mode is for this stream at all (`tcp_stream_is_thin()`, Linux 6.12).
#[inline(always)]
fn is_thin(ctx: &SockOpsContext) -> bool {
    socket::packets_out(ctx) < 4
}

/// RETRANS_CB: a segment was sent again. The arguments: its sequence number, how many segments
/// it was, what came of it (0, or an errno).
///
/// A tail loss probe is told by nothing being marked as lost: a timeout marks all that is
/// outstanding and a recovery at least what it sends, before they send; a probe marks nothing
/// (`tcp_enter_loss()`, `tcp_mark_skb_lost()`, `tcp_send_loss_probe()`, Linux 6.12; measured).
#[inline(always)]
pub(crate) fn retransmitted(ctx: &SockOpsContext) {
    let Some(state) = socket::policy_state(ctx) else {
        return;
    };
    if argument(ctx, 2) != 0 {
        return;
    }
    let tally = Tally::of_socket(state);
    // SAFETY: a field of the context.
    let lost = unsafe { read(&raw const (*ctx.ops).lost_out) };
    let kind = if lost == 0 {
        tally.add(Counter::TAIL_LOSS_PROBES, 1);
        kind::TLP
    } else {
        let segments = argument(ctx, 1);
        tally.add(Counter::SEGMENTS_RETRANSMITTED, segments.into());
        if acknowledged(ctx) < state.loss_end {
            // Part of the recovery that the timeout began, which was told.
            return;
        }
        kind::FAST
    };
    events::tell(ctx, kind, 1, 0);
}

/// An argument of the callback, but for the first: that is where `reply` is as well, and a program that ran
/// before may have written it (one that replies -1 to everything is in the kernel's samples).
#[inline(always)]
pub(crate) fn argument(ctx: &SockOpsContext, index: usize) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).__bindgen_anon_1.args[index]) }
}

#[inline(always)]
fn flags(ctx: &SockOpsContext) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).bpf_sock_ops_cb_flags) }
}

#[inline(always)]
fn set(ctx: &SockOpsContext, flags: u32) -> i64 {
    // SAFETY: the context of this very callback.
    unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, flags.cast_signed()) }
}
