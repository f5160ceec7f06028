//! The time that rto_min saves: what [`Series`] needs to know, and where it is counted.
//!
//! Nothing is counted where the kernel's own timers are not known: before Linux 6.11, with an rto_min of the route,
//! after a timeout without a probe before it, and where a probe's timer depends on more than rto_min.

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    LARGEST_US, Options, RTO_MAX_MS, Remembered, SockOpt, SocketState,
    series::{Interval, Series},
    socket_flags,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    hook,
    kernel_sock::{self, DataTimer},
    options::Target,
    socket, storage, syn_ack_rto,
    tables::Tally,
};

/// A tail loss probe: begins a series. The caller uses neither the schedule nor its flag afterwards.
#[inline(always)]
pub(crate) fn probed(ctx: &SockOpsContext, state: &SocketState) {
    if kernel_sock::knows_data_timers() && state.options.is_set(SockOpt::RtoMin) {
        rto_series(ctx.ops, PROBE);
    }
}

/// A retransmission timeout; the caller as above.
#[inline(always)]
pub(crate) fn timed_out(ctx: &SockOpsContext, state: &SocketState) {
    if kernel_sock::knows_data_timers() && state.flags & socket_flags::SERIES != 0 {
        rto_series(ctx.ops, TIMEOUT);
    }
}

/// An RTT sample: ends the series, and counts its gain. The caller as above.
#[inline(always)]
pub(crate) fn answered(ctx: &SockOpsContext, state: &SocketState, tally: Tally) {
    if kernel_sock::knows_data_timers() && state.flags & socket_flags::SERIES != 0 {
        rto_series_answered(ctx.ops, tally.key());
    }
}

/// What has been sent, for [`rto_series`].
const PROBE: u32 = 0;
const TIMEOUT: u32 = 1;

/// Begins or continues the series of a context's socket. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_series(ops: *mut bpf_sock_ops, sent: u32) -> u32 {
    // The verifier follows a global function even where nothing calls it.
    if !kernel_sock::knows_data_timers() {
        return 0;
    }
    // SAFETY: the callers do not use what this changes.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    let timer = DataTimer::of(ctx);
    let kernel = interval(ctx, state, timer);
    let now_us = now_us();
    if sent == TIMEOUT {
        let mut series = state.schedule.series();
        series.timed_out(now_us, &kernel);
        state.schedule.keep(series);
        return 0;
    }
    state.flags &= !socket_flags::SERIES;
    let rto_min_us = state.options.value(SockOpt::RtoMin).unwrap_or(0);
    let two_rtts_us = 2 * socket::srtt_us(ctx);
    let dsacks = socket::dsacks(ctx);
    // The timer of a probe is two round trips, and rto_min if only one segment is in flight, else two jiffies; and at
    // most the RTO (`tcp_schedule_loss_probe()`, Linux 6.18).
    let series = if socket::packets_out(ctx) == 1 {
        let timer_us = syn_ack_rto::microseconds(timer.rto);
        if timer.rto > jiffies(two_rtts_us + rto_min_us) || timer_us >= kernel.first_us {
            return 0;
        }
        Series::probed(now_us, timer_us, &kernel, dsacks)
    } else {
        if timer.rto < jiffies(two_rtts_us) + 2 {
            return 0;
        }
        Series::probed_alike(now_us, &kernel, dsacks)
    };
    if timer.rto != 0 {
        state.schedule.keep(series);
        state.flags |= socket_flags::SERIES;
        // RTT_CB ends it.
        hook::watch_rtt(ctx);
    }
    0
}

/// Ends the series of a context's socket. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_series_answered(ops: *mut bpf_sock_ops, tally: u32) -> u32 {
    // SAFETY: as above.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    state.flags &= !socket_flags::SERIES;
    let series = state.schedule.series();
    // Another program may have overwritten the sample, which is then not the time since the retransmission.
    let gain_us = series.answered(now_us(), hook::argument(ctx, 0), socket::dsacks(ctx));
    let counters = [Counter::DATA_TIME_SAVED, Counter::DATA_TIME_LOST];
    Tally::of_key(tally).add_gain(counters, gain_us.into());
    0
}

/// The kernel's own timer: its RTO is the smoothed RTT and at least its rto_min (`tcp_set_rto()`, Linux 6.18).
#[inline(always)]
fn interval(ctx: &SockOpsContext, state: &SocketState, timer: DataTimer) -> Interval {
    let options = &state.options;
    let own_us = match options.before(SockOpt::RtoMin, None) {
        Remembered::UNKNOWN => timer.net_rto_min_us,
        us => us,
    };
    let own_us = if own_us < LARGEST_US {
        own_us
    } else {
        LARGEST_US
    };
    let target = Target::of(ctx);
    let thin = own(target, options, SockOpt::ThinLinear);
    let rto_max_ms = own(target, options, SockOpt::RtoMax);
    let rto_max_ms = if rto_max_ms < RTO_MAX_MS {
        rto_max_ms
    } else {
        RTO_MAX_MS
    };
    let first = jiffies(socket::srtt_us(ctx) + own_us);
    Interval {
        first_us: syn_ack_rto::microseconds(first),
        max_us: rto_max_ms * 1000,
        is_linear: thin != 0 || timer.net_is_linear,
        jiffy_us: syn_ack_rto::microseconds(1),
    }
}

/// The socket's own value of an option; `u32::MAX` if it is not known.
#[inline(always)]
fn own(target: Target, options: &Options, option: SockOpt) -> u32 {
    if options.is_set(option) {
        options.before(option, None)
    } else {
        target.get(option).unwrap_or(Remembered::UNKNOWN)
    }
}

/// Rounded up, as the kernel does (`usecs_to_jiffies()`).
#[inline(always)]
fn jiffies(us: u32) -> u32 {
    syn_ack_rto::jiffies_of_us(us.wrapping_sub(1)).wrapping_add(1)
}

/// As in [`Series`].
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is used")]
fn now_us() -> u32 {
    (socket::now() / 1000) as u32
}
