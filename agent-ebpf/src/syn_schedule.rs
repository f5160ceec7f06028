//! The SYN schedule of a connecting socket that has lost its first SYN, or the answer to it
//! ([`rto_agent_common::syn`]).
//!
//! When the timer of a SYN fires, the kernel runs, with the socket locked (`tcp_retransmit_timer()`, Linux 6.18):
//!
//! 1. RTO_CB ([`at_timeout`]), unless the attempt is over,
//! 2. RETRANS_CB ([`retransmitted`]), once the SYN has been sent,
//! 3. the doubling of `icsk_rto`, after the linear phase and up to the maximum RTO,
//! 4. the arming of the timer, which TCP_USER_TIMEOUT shortens (`tcp_clamp_rto_to_user_timeout()`),
//! 5. TIMEOUT_INIT ([`armed`]), as the base of `retransmits_timed_out()`.
//!
//! TCP_USER_TIMEOUT is set at 2 and taken back at 5, so it shapes this one interval, and no other thread sees it. In
//! the same way TCP_RTO_MAX_MS limits the doubling (Linux 6.15): if the program is gone at the next timeout, the
//! kernel goes on as it would have alone.
//!
//! Invariant: a socket has [`socket_flags::SYN_SCHEDULE`] from its first timeout until it is established, closed or
//! connected again, each of which calls [`end`].

use core::arch::asm;

use aya_ebpf::{bindings::bpf_sock_ops, helpers::bpf_jiffies64, programs::SockOpsContext};
use rto_agent_common::{
    Policy, RTO_MAX_MS, Schedule, SockOpt, SocketState, direction, policy_flags,
    schedule_flags::{HELD, KEEPS_PATH, LAST, NOT_SENT, PLANNED, SENT, SHAPED},
    schedules, socket_flags,
    syn::{Attempt, Fired, MAX_SYNCNT, Next, Timeouts, both, lower, upper},
};
use rto_agent_ebpf::ops::SYN_SENT;

use crate::{
    hook::{self, argument},
    kernel_sock::{self, SynSocket},
    options::Target,
    socket::{self, constant_u8},
    storage,
    syn_ack_rto::{self, jiffies_of_ms, milliseconds},
    tables::{self, SCHEDULES, Tally},
};

/// 1: the kernel runs TIMEOUT_INIT after it has armed the timer. The loader writes it.
#[unsafe(no_mangle)]
static SHAPES_SYNS: u8 = 0;

/// RTO_CB of a connecting socket with storage: plans the next timer, and sets the TCP_SYNCNT with which the attempt ends
/// when the kernel alone would have ended it.
#[inline(always)]
pub(crate) fn at_timeout(ctx: &SockOpsContext) {
    rto_at_syn_timeout(ctx.ops, SEEN);
}

/// TIMEOUT_INIT without an RTO_CB before it, because another program has cleared the callbacks: it is too late to shape
/// this interval, but TCP_SYNCNT can still keep the attempt going.
#[inline(always)]
pub(crate) fn after_timeout(ctx: &SockOpsContext) {
    rto_at_syn_timeout(ctx.ops, 0);
}

/// The argument of [`rto_at_syn_timeout`] in RTO_CB.
const SEEN: u32 = 1;

/// A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_at_syn_timeout(ops: *mut bpf_sock_ops, seen: u32) -> u32 {
    // SAFETY: the caller holds no reference to the storage.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    // The child of a TCP Fast Open request also waits in SYN_RECV, for the last ACK of the handshake. It has no
    // schedule.
    if state.direction != direction::ACTIVE {
        return 0;
    }
    let Some(policy) = tables::settings(tables::owner(state)) else {
        return 0;
    };
    let own = SynSocket::of(ctx);
    let timer = state.handshake.initial_rto_jiffies;
    let is_short = timer != 0 && timer < syn_ack_rto::kernel_jiffies();
    let is_limited = policy.syn_retries != 0 || state.options.is_wanted(SockOpt::RtoMax);
    let has_schedule = own.is_known() && (is_short || is_limited);
    // The kernel also asks before RTO_CB (`tcp_write_timeout()`, Linux 6.18), when the timer has not been armed again.
    let is_armed = own.timer_expires.wrapping_sub(jiffies()).cast_signed() > 0;
    if seen != SEEN && !(has_schedule && is_armed) {
        return 0;
    }
    if own.is_known() && state.schedule.attempt.start == 0 {
        note_start(state, own, seen);
    }
    if has_schedule && state.flags & socket_flags::SYN_SCHEDULE == 0 {
        state.flags |= socket_flags::SYN_SCHEDULE;
        count(schedules::SOCKETS, 1);
    }
    let elapsed_us = socket::now().wrapping_sub(state.handshake.ns) / 1000;
    let [_, last_us] = state.handshake.copies_us;
    state.handshake.copies_us = [last_us, u32::try_from(elapsed_us).unwrap_or(u32::MAX)];
    if !has_schedule {
        return 0;
    }
    if state.schedule.flags & (SHAPED | HELD) != 0 {
        if state.schedule.flags & LAST == 0 {
            // No TIMEOUT_INIT followed the last arming.
            count(schedules::LEFT_SET, 1);
        }
        state.schedule.flags &= !LAST;
        return rto_syn_take_back(ops);
    }
    plan(ctx, state, policy, own, seen);
    0
}

/// Notes when the attempt began. The timer that has fired was armed by connect(), with the initial RTO.
#[inline(always)]
fn note_start(state: &mut SocketState, own: SynSocket, seen: u32) {
    let hz = syn_ack_rto::kernel_jiffies();
    let by_timer = own.timer_expires.wrapping_sub(own.rto);
    let since_stamp = elapsed_ms(own, jiffies().wrapping_sub(by_timer));
    let by_stamp = jiffies().wrapping_sub(jiffies_of_ms(since_stamp));
    // After a challenge ACK the timer was another one (`tcp_rcv_synsent_state_process()`, Linux 6.18).
    let differ = by_stamp.wrapping_sub(by_timer).wrapping_add(hz / 10) > hz / 5;
    let stamped_ns = socket::now().wrapping_sub(u64::from(since_stamp) * 1_000_000);
    // The stamp has whole milliseconds; a timer may have fired some milliseconds late.
    if state
        .handshake
        .ns
        .wrapping_sub(stamped_ns)
        .wrapping_add(2_000_000)
        > 4_000_000
    {
        state.handshake.ns = stamped_ns;
    }
    state.schedule.attempt.start = if differ || seen != SEEN {
        by_stamp
    } else {
        by_timer
    };
}

#[inline(always)]
fn plan(ctx: &SockOpsContext, state: &mut SocketState, policy: &Policy, own: SynSocket, seen: u32) {
    let hz = syn_ack_rto::kernel_jiffies();
    let schedule = &mut state.schedule;
    // The application may have set another value since.
    if schedule.retries == 0 || own.retries != schedule.retries.into() {
        schedule.retries = 0;
        schedule.own_retries = small(if own.retries == 0 {
            own.net_retries
        } else {
            own.retries
        });
    }
    schedule.own_user_timeout_ms = own.user_timeout_ms;
    let start = schedule.attempt.start;
    let kernel = Timeouts {
        hz,
        initial_rto: hz,
        // In a simultaneous open the socket is in SYN_RECV, in which the kernel has no linear phase.
        linear: if socket::state(ctx) == SYN_SENT {
            own.linear
        } else {
            0
        },
        retries: schedule.own_retries.into(),
        rto_max: match state.options.to_restore(SockOpt::RtoMax, None, RTO_MAX_MS) {
            Some(before) => jiffies_of_ms(before),
            None => own.rto_max,
        },
        user_timeout_ms: own.user_timeout_ms,
    };
    let by_timer = policy.flags & policy_flags::GIVES_UP_BY_TIMER != 0;
    let initial_rto = match state.handshake.initial_rto_jiffies {
        0 => hz,
        timer => timer,
    };
    let (first, retries) = match policy.syn_retries {
        _ if !by_timer => (hz, kernel.retries),
        0 => (initial_rto, kernel.retries),
        fixed => (initial_rto, fixed),
    };
    let now = jiffies().wrapping_sub(start);
    let gives_up = rto_syn_gives_up(
        both(start, first),
        kernel.linear,
        retries,
        kernel.rto_max,
        kernel.user_timeout_ms,
    );
    let is_short = initial_rto < hz;
    let is_shaped = is_short && seen == SEEN && constant_u8(&SHAPES_SYNS) != 0 && may_shape();
    // What RTO_CB would have seen before the kernel counted this timeout and doubled the interval.
    let (rto, retransmits) = match own.retransmits.checked_sub(1) {
        Some(before) if seen != SEEN && before >= kernel.linear => (own.rto / 2, before),
        Some(before) if seen != SEEN => (own.rto, before),
        _ => (own.rto, own.retransmits),
    };
    let fired = Fired {
        now,
        initial_rto,
        rto,
        rto_max: own.rto_max,
        retransmits,
        gives_up,
        is_shaped,
        is_held: is_shaped && kernel_sock::has_rto_max(),
    };
    let passed = kernel.passed(start, now);
    let next = next(&mut schedule.attempt, &kernel, &fired, passed);
    // Before the kernel alone would have retransmitted, and before the time that the law says of the path.
    let is_early =
        upper(passed) == 0 && (policy.repath_jiffies == 0 || now < policy.repath_jiffies.into());
    schedule.user_timeout_ms = 0;
    schedule.rto_max_ms = 0;
    schedule.flags &= NOT_SENT;
    if seen == SEEN {
        schedule.flags |= PLANNED;
    }
    if is_shaped {
        let hold = kernel.hold(upper(passed));
        if hold < own.rto_max {
            schedule.rto_max_ms = milliseconds(hold);
        }
        if next.timer != 0 {
            // `msecs_to_jiffies()` rounds up.
            let rounding = u32::from(hz < 1000);
            schedule.user_timeout_ms = elapsed_ms(own, now) + milliseconds(next.timer) - rounding;
        }
        if by_timer && next.is_last {
            schedule.flags |= LAST;
            if next.timer == 0 {
                schedule.user_timeout_ms = milliseconds(gives_up);
            }
        }
    }
    rto_syn_planned(ctx.ops, next.retries, u32::from(is_early && is_shaped));
}

/// Sets what must be set before the SYN is sent: TCP_SYNCNT; and as long as an answer may still be on its way
/// (`keeps_path`), the path. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_planned(ops: *mut bpf_sock_ops, retries: u32, keeps_path: u32) -> u32 {
    // SAFETY: the caller does not use its reference to the storage after this call.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    let target = Target::of(ctx);
    let schedule = &mut state.schedule;
    let current = match schedule.retries {
        0 => schedule.own_retries,
        set => set,
    };
    let retries = small(retries);
    if retries != current {
        if !target.set(SockOpt::SynCnt, retries.into(), tally) {
            // The attempt would end early.
            schedule.flags = 0;
            return 0;
        }
        schedule.retries = if retries == schedule.own_retries {
            0
        } else {
            retries
        };
    }
    // Behind a router that hashes the flow label, another label while an answer is on its way could reach another server
    // (`sk_rethink_txhash()` follows RTO_CB; Linux 6.18).
    if keeps_path != 0 && kernel_sock::rehashes(ctx) && target.try_set(SockOpt::TxRehash, 0) == 0 {
        schedule.flags |= KEEPS_PATH;
    }
    if schedule.flags & NOT_SENT != 0 {
        // No RETRANS_CB followed the last RTO_CB.
        rto_syn_shape(ops);
    }
    0
}

/// RETRANS_CB of a connecting socket; argument 2 is the result.
#[inline(never)]
pub(crate) fn retransmitted(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let Some(state) = storage.find() else {
        return 0;
    };
    if state.schedule.flags & PLANNED == 0 {
        return 0;
    }
    state.schedule.flags = state.schedule.flags & !(PLANNED | NOT_SENT) | SENT;
    if argument(&ctx, 2).cast_signed() > 0 {
        // The local queue has dropped the SYN. The kernel arms a probe and does not run TIMEOUT_INIT.
        rto_syn_take_back(ops)
    } else {
        rto_syn_shape(ops)
    }
}

/// Sets what shapes the timer that the kernel arms next. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_shape(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the callers do not use a reference to the storage after this call.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    if !may_shape() {
        return 0;
    }
    let tally = Tally::of_socket(state);
    let target = Target::of(ctx);
    let schedule = &mut state.schedule;
    let (own_ms, wanted_ms) = (schedule.own_user_timeout_ms, schedule.user_timeout_ms);
    if schedule.flags & SHAPED == 0
        && wanted_ms != 0
        && (own_ms == 0 || own_ms > wanted_ms)
        && target.set(SockOpt::UserTimeout, wanted_ms, tally)
    {
        schedule.flags |= SHAPED;
    }
    if kernel_sock::has_rto_max() && schedule.flags & HELD == 0 && schedule.rto_max_ms != 0 {
        let own_ms = milliseconds(SynSocket::of(ctx).rto_max);
        if target.set(SockOpt::RtoMax, schedule.rto_max_ms, tally) {
            schedule.rto_max_ms = own_ms;
            schedule.flags |= HELD;
        }
    }
    0
}

/// Notes a TIMEOUT_INIT; returns the flags of before, for [`armed`].
#[inline(always)]
pub(crate) const fn note_armed(schedule: &mut Schedule) -> u16 {
    let flags = schedule.flags;
    schedule.flags &= !(PLANNED | SENT);
    if flags & PLANNED != 0 {
        schedule.flags |= NOT_SENT;
    }
    flags
}

/// TIMEOUT_INIT of a connecting socket with storage: the kernel has armed the timer. The caller does not use a reference
/// to the storage after this call.
#[inline(always)]
pub(crate) fn armed(ctx: &SockOpsContext, flags: u16) {
    if flags & (SHAPED | HELD | KEEPS_PATH) != 0 {
        rto_syn_take_back(ctx.ops);
    } else if flags & (PLANNED | SENT) == 0 {
        after_timeout(ctx);
    }
}

/// Sets the socket's own values again. A value that the application or another program has set since stays. A global
/// function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_take_back(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the callers do not use a reference to the storage after this call.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.find() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    let target = Target::of(ctx);
    let schedule = &mut state.schedule;
    if schedule.flags & (SHAPED | LAST) == SHAPED {
        if SynSocket::of(ctx).user_timeout_ms == schedule.user_timeout_ms {
            target.set(SockOpt::UserTimeout, schedule.own_user_timeout_ms, tally);
        }
        schedule.flags &= !SHAPED;
    }
    if kernel_sock::has_rto_max() && schedule.flags & HELD != 0 {
        target.set(SockOpt::RtoMax, schedule.rto_max_ms, tally);
        schedule.flags &= !HELD;
    }
    if schedule.flags & KEEPS_PATH != 0 {
        target.set(SockOpt::TxRehash, 1, tally);
        schedule.flags &= !KEEPS_PATH;
    }
    0
}

/// Ends the schedule of a context's socket, if it has one. The caller must not hold a reference to the socket's
/// storage.
#[inline(always)]
pub(crate) fn end(ctx: &SockOpsContext) {
    rto_end_schedule(ctx.ops);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_end_schedule(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: no other `Storage` is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let Some(state) = storage.find() else {
        end_without_storage(&ctx);
        return 0;
    };
    if state.flags & socket_flags::SYN_SCHEDULE == 0 {
        return 0;
    }
    state.schedule.flags &= !LAST;
    rto_syn_take_back(ops);
    let Some(state) = storage.find() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    let schedule = &mut state.schedule;
    let set = u32::from(schedule.retries);
    if set != 0 && SynSocket::of(&ctx).retries == set {
        let own = schedule.own_retries.into();
        Target::of(&ctx).set(SockOpt::SynCnt, own, tally);
    }
    state.schedule = Schedule {
        attempt: schedule.attempt,
        ..Schedule::default()
    };
    state.flags &= !socket_flags::SYN_SCHEDULE;
    count(schedules::SOCKETS, -1);
    0
}

/// RTO_CB of a connecting socket with the policy's initial RTO for whose storage there is no memory: the kernel doubles
/// the interval, but the attempt ends when the kernel alone would have ended it, by TCP_USER_TIMEOUT. The highest
/// TCP_SYNCNT shows that the program has set both; a socket on which the application has set either has had storage
/// since connect().
#[inline(always)]
pub(crate) fn begin_without_storage(ctx: &SockOpsContext, tally: Tally) {
    rto_syn_without_storage(ctx.ops, tally.key());
}

/// Restores the options of [`begin_without_storage`].
#[inline(always)]
pub(crate) fn end_without_storage(ctx: &SockOpsContext) {
    rto_syn_without_storage(ctx.ops, END);
}

const END: u32 = u32::MAX;

/// A global function: see `tables`. The second argument: [`Tally::key`], or [`END`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_without_storage(ops: *mut bpf_sock_ops, tally: u32) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    let own = SynSocket::of(ctx);
    let target = Target::of(ctx);
    if !own.is_known() || !hook::is_marked(ctx) {
        return 0;
    }
    if tally == END {
        if own.retries == MAX_SYNCNT {
            target.set(SockOpt::UserTimeout, 0, Tally::NOBODY);
            target.set(SockOpt::SynCnt, own.net_retries, Tally::NOBODY);
        }
        return 0;
    }
    if own.retries != 0 || own.user_timeout_ms != 0 {
        return 0;
    }
    let hz = syn_ack_rto::kernel_jiffies();
    let tally = Tally::of_key(tally);
    let gives_up = rto_syn_gives_up(
        both(jiffies().wrapping_sub(own.rto), hz),
        own.linear,
        own.net_retries,
        own.rto_max,
        0,
    );
    if target.set(SockOpt::UserTimeout, milliseconds(gives_up), tally) {
        target.set(SockOpt::SynCnt, MAX_SYNCNT, tally);
        hook::watch_end(ctx, tally);
    }
    0
}

// Global functions: see `tables`.

/// [`Timeouts::gives_up`]; the upper half of the first argument is the attempt's start, the lower its initial RTO.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_gives_up(
    start_and_rto: u64,
    linear: u32,
    retries: u32,
    rto_max: u32,
    user_timeout_ms: u32,
) -> u32 {
    let (start, initial_rto) = (upper(start_and_rto), lower(start_and_rto));
    let timeouts = Timeouts {
        hz: syn_ack_rto::kernel_jiffies(),
        initial_rto,
        linear,
        retries,
        rto_max,
        user_timeout_ms,
    };
    timeouts.gives_up(start)
}

/// [`Attempt::next`], by a global function. Its arguments and its result are scalars, two or more in each.
#[inline(always)]
fn next(attempt: &mut Attempt, kernel: &Timeouts, fired: &Fired, passed: u64) -> Next {
    let small = u64::from(kernel.rto_max) << 40
        | u64::from(fired.is_held) << 33
        | u64::from(fired.is_shaped) << 32
        | u64::from(kernel.retries & 0xff) << 24
        | u64::from(kernel.linear & 0xff) << 16
        | u64::from(fired.retransmits & 0xff) << 8
        | u64::from(upper(passed) & 0xff);
    let next = rto_syn_next(
        both(attempt.start, fired.now),
        both(attempt.answered, fired.initial_rto),
        both(fired.rto_max, fired.rto),
        both(fired.gives_up, lower(passed)),
        small,
    );
    attempt.answered = upper(next);
    Next {
        timer: lower(next) >> 8,
        retries: lower(next) & 0x7f,
        is_last: lower(next) & 0x80 != 0,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_next(
    start_now: u64,
    answered_initial_rto: u64,
    rto_max_rto: u64,
    gives_up_last: u64,
    small: u64,
) -> u64 {
    let byte = |shift: u32| lower(small >> shift) & 0xff;
    // TCP_USER_TIMEOUT counts only for `gives_up`.
    let kernel = Timeouts {
        rto_max: lower(small >> 40),
        ..Timeouts::kernel(syn_ack_rto::kernel_jiffies(), byte(24), byte(16))
    };
    let (start, now) = (upper(start_now), lower(start_now));
    let fired = Fired {
        now,
        initial_rto: lower(answered_initial_rto),
        rto: lower(rto_max_rto),
        rto_max: upper(rto_max_rto),
        retransmits: byte(8),
        gives_up: upper(gives_up_last),
        is_shaped: byte(32) & 1 != 0,
        is_held: byte(32) & 2 != 0,
    };
    let mut attempt = Attempt {
        start,
        answered: upper(answered_initial_rto),
    };
    let slots = kernel.slots_after(start, now, both(byte(0), lower(gives_up_last)));
    let next = attempt.next(&kernel, &fired, slots);
    both(
        attempt.answered,
        next.timer << 8 | u32::from(next.is_last) << 7 | next.retries,
    )
}

/// Milliseconds since the first SYN was sent, as the kernel counts them; `expected`: about as many jiffies.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower half, which wraps"
)]
fn elapsed_ms(own: SynSocket, expected: u32) -> u32 {
    let now_us = socket::now() / 1000;
    let by_ms = ((now_us / 1000) as u32).wrapping_sub(own.retrans_stamp);
    let near = milliseconds(expected).wrapping_add(2000);
    // Where the route has `tcp_usec_ts`, the stamp is in microseconds (Linux 6.7).
    if by_ms <= near {
        by_ms
    } else {
        (now_us as u32).wrapping_sub(own.retrans_stamp) / 1000
    }
}

/// The lower half of the current jiffy.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn jiffies() -> u32 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() as u32 }
}

/// TCP_SYNCNT is at most 127.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "it fits")]
const fn small(retries: u32) -> u8 {
    retries as u8
}

/// Whether timers may be shaped: the program is not about to be unloaded, and the kernel has always taken the options
/// back in time.
#[inline(always)]
fn may_shape() -> bool {
    let is_zero = |index| SCHEDULES.get(index).is_some_and(|n| *n == 0);
    is_zero(schedules::STOPPED) && is_zero(schedules::LEFT_SET)
}

/// Adds to a counter of `SCHEDULES`.
#[inline(always)]
fn count(index: u32, n: i64) {
    if let Some(place) = SCHEDULES.get_ptr_mut(index) {
        // SAFETY: a map value; the verifier checks the access.
        unsafe {
            asm!("lock *(u64 *)({place} + 0) += {n}", place = in(reg) place, n = in(reg) n);
        }
    }
}
