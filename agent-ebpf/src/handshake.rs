//! The end of a handshake: how long it took, and what its retransmissions were good for.

use core::arch::asm;

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{GAINS, SocketState, direction, statistics};
use rto_agent_ebpf::{
    counter::Counter,
    ops::{Change, change},
    verdict::{Verdict, after_samples, at_establishment, timer_expiries},
};

use crate::{
    hook::argument,
    options::Target,
    socket::{self, read},
    tables::{self, Tally, Times},
};

/// Least time between two samples of a connection's smoothed RTT; 0: none but the one at its end. The
/// loader writes it.
#[unsafe(no_mangle)]
static RTT_INTERVAL_NS: u64 = 0;

/// Whether smoothed RTTs are sampled while connections last.
#[inline(always)]
pub(crate) fn samples_rtt() -> bool {
    rtt_interval_ns() != 0
}

#[inline(always)]
fn rtt_interval_ns() -> u64 {
    // SAFETY: a constant, which the loader may have written before the program was loaded.
    unsafe { read(&raw const RTT_INTERVAL_NS) }
}

/// Notes what is to be asked, before the hook is asked for.
#[inline(always)]
pub(crate) fn begin(state: &mut SocketState, retransmissions: u32) {
    state.in_question = retransmissions;
    state.samples = 0;
}

/// Counts a connection that has just been established, last of all: what is decided here would be
/// multiplied, for the verifier, with all that follows.
/// `took_us`: since the first copy of what was
/// sent again, 0 if it is not known.
#[inline(always)]
pub(crate) fn established(
    ctx: &SockOpsContext,
    state: &mut SocketState,
    retransmissions: u32,
    took_us: u64,
) {
    let tally = Tally::of_socket(state);
    if tally.is_nobody() {
        return;
    }
    let time_us = if took_us != 0 {
        took_us
    } else {
        passive_time_us(ctx, state, retransmissions)
    };
    tally.time(Times::Handshake, time_us, Some(Counter::CONNECTIONS));
    if retransmissions != 0 {
        let srtt_us = socket::srtt_us(ctx);
        match at_establishment(retransmissions, srtt_us, took_us, state.initial_rto_us) {
            Verdict::Open => {}
            Verdict::Spurious(spurious) => {
                state.in_question = 0;
                judge(state, retransmissions, spurious);
            }
        }
    }
}

/// An accepted connection's handshake is not seen to begin: its request has no storage. With
/// timestamps, or where nothing was sent again, the RTT tells; else the timers that have fired do.
#[inline(always)]
fn passive_time_us(ctx: &SockOpsContext, state: &SocketState, retransmissions: u32) -> u64 {
    let srtt_us = socket::srtt_us(ctx);
    let initial_rto_us = state.initial_rto_us;
    if retransmissions != 0 && srtt_us < initial_rto_us {
        // 1 + 2 + 4 + ... initial RTOs; nobody allows more than 16.
        let retransmissions = timer_expiries(retransmissions, false);
        let doublings = if retransmissions > 16 {
            16
        } else {
            retransmissions
        };
        u64::from(initial_rto_us) * ((1u64 << doublings) - 1) + u64::from(srtt_us)
    } else {
        u64::from(srtt_us)
    }
}

/// Counts what the retransmissions of a handshake were good for.
#[inline(always)]
fn judge(state: &SocketState, retransmissions: u32, spurious: u32) {
    rto_judge(state.policy, state.direction, retransmissions, spurious);
}

/// A function with a symbol: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_judge(slot: u32, direction: u32, retransmissions: u32, spurious: u32) -> u32 {
    let tally = Tally::of(slot, direction);
    if spurious != 0 {
        tally.add(Counter::SPURIOUS, spurious.into());
    }
    let needed = retransmissions.saturating_sub(spurious);
    if needed == 0 {
        return 0;
    }
    tally.add(Counter::RECOVERED, 1);
    let Some(policy) = tables::policy(slot) else {
        return 0;
    };
    let expiries = timer_expiries(needed, direction == direction::ACTIVE) as usize;
    let last = if expiries > GAINS { GAINS } else { expiries };
    let (mut index, mut side) = (last - 1, direction as usize);
    // Bounds that the verifier sees.
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const GAINS - 1,
            options(pure, nomem, nostack));
        asm!("{side} &= 1", side = inout(reg) side, options(pure, nomem, nostack));
    }
    // SAFETY: within the table, by the two bounds; the verifier checks the access.
    let gain = unsafe {
        let table = (&raw const policy.gain_us).cast::<i32>();
        read(table.add(side * GAINS + index))
    };
    if gain >= 0 {
        tally.add(Counter::TIME_SAVED, u64::from(gain.unsigned_abs()));
    } else {
        tally.add(Counter::TIME_LOST, u64::from(gain.unsigned_abs()));
    }
    0
}

const _: () = assert!(GAINS.is_power_of_two());

/// RTT_CB: a round-trip time was measured, at most one each round trip (`tcp_rtt_estimator()`, Linux
/// 6.12). The least so far contains it already; the smoothed one does not yet.
#[inline(always)]
pub(crate) fn rtt_sample(ctx: &SockOpsContext) {
    let Some(state) = socket::policy_state(ctx) else {
        return;
    };
    if state.restart_hz != 0 {
        restart(ctx, state);
    }
    if state.in_question != 0 {
        state.samples += 1;
        reconsider(ctx, state, false);
    }
    let interval_ns = rtt_interval_ns();
    if interval_ns == 0 {
        return;
    }
    let now = socket::now();
    if now.wrapping_sub(state.srtt_sampled_ns) < interval_ns {
        return;
    }
    state.srtt_sampled_ns = now;
    let srtt_us = socket::srtt_us(ctx);
    Tally::of_socket(state).time(Times::Srtt, srtt_us.into(), None);
}

/// rto_min less a round trip, while few segments are outstanding. A lower rto_min takes the RTO down, and
/// a higher one does not take it up again: of a path that is slower for a while than it was, the least RTT
/// counts.
#[inline(always)]
fn restart(ctx: &SockOpsContext, state: &mut SocketState) {
    let (srtt_us, rtt_min_us) = (socket::srtt_us(ctx), socket::rtt_min_us(ctx));
    if srtt_us == 0 {
        return;
    }
    let rtt_us = if rtt_min_us < srtt_us {
        rtt_min_us
    } else {
        srtt_us
    };
    let outstanding = socket::packets_out(ctx);
    let tally = Tally::of_socket(state);
    Target::of(ctx).restart(state, rtt_us, outstanding, tally);
}

/// STATE_CB: the connection may have ended.
#[inline(always)]
pub(crate) fn state_changed(ctx: &SockOpsContext) {
    // SAFETY: fields of the context.
    let is_acknowledged =
        unsafe { read(&raw const (*ctx.ops).snd_una) == read(&raw const (*ctx.ops).snd_nxt) };
    let change = change(argument(ctx, 0), argument(ctx, 1), is_acknowledged);
    if change == Change::Other {
        return;
    }
    let Some(state) = socket::policy_state(ctx) else {
        return;
    };
    if state.in_question != 0 {
        reconsider(ctx, state, true);
    }
    let tally = Tally::of_socket(state);
    if tally.is_nobody() {
        return;
    }
    let aborted = (change == Change::Aborted).then_some(Counter::ABORTED);
    let srtt_us = if tables::counts(statistics::RTT_AT_END) {
        socket::srtt_us(ctx)
    } else {
        0
    };
    if srtt_us != 0 || aborted.is_some() {
        tally.time(Times::Srtt, srtt_us.into(), aborted);
    }
}

/// Looks at the retransmissions in question again, with what is known now.
#[inline(always)]
fn reconsider(ctx: &SockOpsContext, state: &mut SocketState, last: bool) {
    let (retransmissions, samples) = (state.in_question, state.samples);
    let verdict = after_samples(
        retransmissions,
        samples,
        socket::rtt_min_us(ctx),
        state.initial_rto_us,
        state.direction == direction::ACTIVE,
        last,
    );
    if verdict == Verdict::Open && !last {
        return;
    }
    state.in_question = 0;
    let tally = Tally::of_socket(state);
    if tally.is_nobody() {
        return;
    }
    match verdict {
        Verdict::Open => tally.add(Counter::UNDECIDED, retransmissions.into()),
        Verdict::Spurious(spurious) => judge(state, retransmissions, spurious),
    }
}
