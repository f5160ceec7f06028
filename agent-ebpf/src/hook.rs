//! The RTO hook: what happens to established connections of a policy.
//!
//! The kernel calls it only for sockets whose flags ask for it, and the flags are set only on
//! sockets of a policy: others cost nothing.

use aya_ebpf::{helpers::generated::bpf_sock_ops_cb_flags_set, programs::SockOpsContext};
use rto_agent_common::{SockOpt, SocketState};
use rto_agent_ebpf::counter::Counter;

use crate::{
    options::Target,
    socket::{self, read},
    tables::{self, Tally},
};

// include/uapi/linux/bpf.h
const RTO_CB_FLAG: u32 = 1 << 0;
const RETRANS_CB_FLAG: u32 = 1 << 1;
/// What the hook needs.
pub(crate) const FLAGS: u32 = RTO_CB_FLAG | RETRANS_CB_FLAG;

/// Asks for the callbacks, beside those that other programs asked for.
#[inline(always)]
pub(crate) fn enable(ctx: &SockOpsContext, state: &mut SocketState, tally: Option<Tally>) {
    let flags = flags(ctx);
    let missing = FLAGS & !flags;
    if missing == 0 {
        return;
    }
    if set(ctx, flags | missing) == 0 {
        state.cb_flags_added |= missing;
    } else {
        tables::add(tally, Counter::failures_of(SockOpt::CbFlags), 1);
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
pub(crate) fn enable_on(target: Target, state: &mut SocketState, tally: Option<Tally>) -> bool {
    let Some(flags) = target.get(SockOpt::CbFlags) else {
        return true;
    };
    let missing = FLAGS & !flags;
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
            let _taken = target.set(SockOpt::CbFlags, flags & !state.cb_flags_added, None);
        }
        // Where there is no such option nothing more can be done; the flags ask for callbacks that
        // no program answers.
        state.cb_flags_added = 0;
    }
}

/// RTO_CB: the retransmission timer has fired, nothing was sent yet (`tcp_write_timeout()`, Linux
/// 6.12). The arguments: timeouts right before this one, the RTO in jiffies, whether the
/// connection is given up.
#[inline(always)]
pub(crate) fn rto(ctx: &SockOpsContext) {
    let Some(state) = socket::policy_state(ctx) else {
        return;
    };
    let tally = Tally::of_socket(state);
    let before = argument(ctx, 0);
    if argument(ctx, 2) != 0 {
        tables::add(tally, Counter::EXPIRED, 1);
        return;
    }
    tables::add(tally, Counter::rtos(tables::step(before)), 1);
    if state.linear_retries == 0 {
        return;
    }
    let target = Target::of(ctx);
    if before < state.linear_retries {
        target.linear_mode_on(state, tally);
    } else if state.linear_off == 0 && is_thin(ctx) && target.set(SockOpt::ThinLinear, 0, tally) {
        state.linear_off = 1;
        tables::add(tally, Counter::LINEAR_ENDED, 1);
    }
}

/// Whether linear mode is for this stream at all (`tcp_stream_is_thin()`, Linux 6.12).
#[inline(always)]
fn is_thin(ctx: &SockOpsContext) -> bool {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).packets_out) < 4 }
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
    if lost == 0 {
        tables::add(tally, Counter::TAIL_LOSS_PROBES, 1);
    } else {
        let segments = argument(ctx, 1);
        tables::add(tally, Counter::SEGMENTS_RETRANSMITTED, segments.into());
    }
}

#[inline(always)]
fn argument(ctx: &SockOpsContext, index: usize) -> u32 {
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
