//! The SYN schedule of a connecting socket that has lost its first SYN, or the answer to it
//! ([`rto_agent_common::syn`]).
//!
//! RTO_CB runs before the kernel doubles `icsk_rto` and arms the timer (`tcp_write_timeout()`,
//! `tcp_retransmit_timer()`, Linux 6.18), so TCP_RTO_MAX_MS set there limits the next interval. But the cap, like a
//! short initial RTO, would also make the kernel give up earlier, because `retransmits_timed_out()` computes the
//! deadline from both. Therefore the schedule sets the deadline as TCP_USER_TIMEOUT, which replaces that computation,
//! and raises TCP_SYNCNT so that it does not end the attempt.
//!
//! Invariant: a socket has these options if and only if it has [`socket_flags::SYN_SCHEDULE`]. Every event that ends
//! the attempt (established, closed, connected again, the walk over open sockets) calls [`end`].

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    Policy, Remembered, SockOpt, SocketState, direction, policy_flags, retrying, socket_flags,
    syn::{self, Timeouts},
};

use crate::{
    brake,
    kernel_sock::SynSocket,
    options::{KERNEL, Target},
    socket::{self, constant_u8},
    storage, syn_ack_rto,
    tables::{self, RETRYING, Tally},
};

/// `BPF_TCP_SYN_SENT`.
pub(crate) const SYN_SENT: u32 = 2;

/// 1: the kernel has TCP_RTO_MAX_MS, and a walk can restore it on sockets that remain after the program is detached.
/// The loader writes it.
#[unsafe(no_mangle)]
static SYN_CAP: u8 = 0;

/// Whether copies follow the kernel's slots.
#[inline(always)]
fn has_cap() -> bool {
    constant_u8(&SYN_CAP) != 0
}

/// RTO_CB of a connecting socket: starts the schedule, and sets the cap for the next interval. In a simultaneous open
/// the socket is in SYN_RECV, in which the kernel has no linear phase and doubles at once.
#[inline(never)]
pub(crate) fn at_timeout(ctx: &SockOpsContext, state: &mut SocketState) {
    // The child of a TCP Fast Open request also waits in SYN_RECV, for the last ACK of the handshake. It has no
    // schedule.
    if state.direction != direction::ACTIVE {
        return;
    }
    let elapsed_us = socket::now().wrapping_sub(state.handshake.ns) / 1000;
    let [_, last_us] = state.handshake.copies_us;
    state.handshake.copies_us = [last_us, u32::try_from(elapsed_us).unwrap_or(u32::MAX)];
    let elapsed_ms = elapsed_us / 1000;
    let Some(policy) = tables::settings(tables::owner(state)) else {
        return;
    };
    let timer = state.handshake.initial_rto_jiffies;
    let is_short = timer != 0 && timer < syn_ack_rto::kernel_jiffies();
    if !is_short && (state.options.rto_max_ms | policy.syn_retries) == 0 {
        return;
    }
    // SAFETY: null, or a socket that the verifier tracks.
    let mut own = unsafe { SynSocket::of(socket::sk(ctx)) };
    if !own.is_known() {
        return;
    }
    if socket::state(ctx) != SYN_SENT {
        own.linear_timeouts = 0;
    }
    if state.flags & socket_flags::ABANDONED != 0 {
        own.retries = state.options.syn_retries_before;
    }
    let target = Target::of(ctx);
    let tally = Tally::of_socket(state);
    if state.flags & socket_flags::SYN_SCHEDULE == 0 {
        if !begin(target, state, policy, own, tally) {
            return;
        }
        if is_short && policy.flags & policy_flags::OUTAGE_FUSE != 0 {
            brake::note_outage(state.arm);
        }
    }
    if !is_short || !has_cap() {
        return;
    }
    let own_max_ms = own_rto_max_ms(target, state);
    let mut cap_ms = rto_syn_cap_ms(elapsed_ms, own.linear_timeouts, own_max_ms);
    let rto_max_ms = state.options.rto_max_ms;
    if rto_max_ms != 0 && rto_max_ms < cap_ms {
        cap_ms = rto_max_ms;
    }
    target.rto_max(&mut state.options, cap_ms, tally);
}

/// Starts the schedule: sets both TCP_SYNCNT and the deadline TCP_USER_TIMEOUT, or neither.
#[inline(always)]
fn begin(
    target: Target,
    state: &mut SocketState,
    policy: &Policy,
    own: SynSocket,
    tally: Tally,
) -> bool {
    // The program is about to be detached and could not restore the options later.
    if RETRYING
        .get(retrying::STOPPED)
        .is_none_or(|stopped| *stopped != 0)
    {
        return false;
    }
    let by_timer = policy.flags & policy_flags::GIVES_UP_BY_TIMER != 0;
    let initial_rto_ms = match state.handshake.initial_rto_us / 1000 {
        1.. if by_timer => state.handshake.initial_rto_us / 1000,
        _ => syn::KERNEL_RTO_MS,
    };
    let retries = match policy.syn_retries {
        0 => own.retries,
        fixed => fixed,
    };
    let rto_max_ms = own_rto_max_ms(target, state);
    let deadline_ms = rto_syn_deadline_ms(
        initial_rto_ms,
        retries,
        own.linear_timeouts,
        rto_max_ms,
        own.user_timeout_ms,
    );
    if !target.set(SockOpt::SynCnt, syn::SYNCNT, tally) {
        return false;
    }
    // The application's own deadline may already have the right value.
    if own.user_timeout_ms != deadline_ms {
        target.user_timeout(&mut state.options, deadline_ms, tally);
        if state.options.user_timeout.is_set == 0 {
            let _taken = target.set(SockOpt::SynCnt, own.retries, tally);
            return false;
        }
        if state.options.user_timeout.before == Remembered::UNKNOWN {
            state.options.user_timeout.before = own.user_timeout_ms;
        }
    }
    state.options.syn_retries_before = own.retries;
    state.flags = state.flags & !socket_flags::ABANDONED | socket_flags::SYN_SCHEDULE;
    count(1);
    true
}

// Global functions: see `tables`.

/// [`Timeouts::cap_ms`] for the kernel's own timeouts.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_cap_ms(elapsed_ms: u64, linear: u32, rto_max_ms: u32) -> u32 {
    let kernel = Timeouts {
        initial_rto_ms: syn::KERNEL_RTO_MS,
        retries: 0,
        linear,
        rto_max_ms,
    };
    kernel.cap_ms(elapsed_ms, syn_ack_rto::kernel_jiffies())
}

/// [`Timeouts::deadline_ms`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_syn_deadline_ms(
    initial_rto_ms: u32,
    retries: u32,
    linear: u32,
    rto_max_ms: u32,
    user_timeout_ms: u32,
) -> u32 {
    let timeouts = Timeouts {
        initial_rto_ms,
        retries,
        linear,
        rto_max_ms,
    };
    timeouts.deadline_ms(user_timeout_ms)
}

/// The maximum RTO that the socket would have without the program.
#[inline(always)]
fn own_rto_max_ms(target: Target, state: &SocketState) -> u32 {
    let before = state.options.rto_max.before(target.get(SockOpt::RtoMax));
    if before == Remembered::UNKNOWN {
        KERNEL.rto_max_ms
    } else {
        before
    }
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
    if let Some(state) = storage.find() {
        let tally = Tally::of_socket(state);
        end_on(Target::of(&ctx), socket::sk(&ctx), state, tally);
    }
    0
}

/// Restores the socket's own TCP_SYNCNT and TCP_USER_TIMEOUT, and sets TCP_RTO_MAX_MS to the policy's value or else
/// restores it. Values that another program or the application has set since then stay.
#[inline(always)]
fn end_on(target: Target, sk: *mut c_void, state: &mut SocketState, tally: Tally) {
    const EITHER: u32 = socket_flags::SYN_SCHEDULE | socket_flags::ABANDONED;
    if state.flags & EITHER == 0 {
        return;
    }
    let is_abandoned = state.flags & socket_flags::ABANDONED != 0;
    // SAFETY: null, or a socket that the verifier tracks.
    let now = unsafe { SynSocket::of(sk) };
    if is_abandoned || !now.is_known() || now.retries == syn::SYNCNT {
        let before = state.options.syn_retries_before;
        let _taken = target.set(SockOpt::SynCnt, before, tally);
    }
    state.flags &= !EITHER;
    state.options.syn_retries_before = 0;
    if is_abandoned {
        return;
    }
    count(-1);
    restore_timeouts(target, state, now, tally);
}

#[inline(always)]
fn restore_timeouts(target: Target, state: &mut SocketState, now: SynSocket, tally: Tally) {
    let set = state.options.user_timeout;
    // Before Linux 6.1 a program cannot read the option, only the field.
    if now.is_known() && set.is_set != 0 && now.user_timeout_ms != set.value {
        state.options.user_timeout = Remembered::default();
    }
    target.user_timeout(&mut state.options, 0, tally);
    let rto_max_ms = state.options.rto_max_ms;
    target.rto_max(&mut state.options, rto_max_ms, tally);
}

/// Ends the schedule of a socket that may outlive the program. A socket that is still connecting has retransmitted more
/// often than its own TCP_SYNCNT allows, and the kernel would give it up at once. Instead it gets a TCP_SYNCNT that
/// lasts until its deadline, computed for intervals that double.
#[inline(always)]
pub(crate) fn abandon(
    target: Target,
    sk: *mut c_void,
    state: &mut SocketState,
    is_connecting: bool,
) {
    // SAFETY: null, or a socket that the verifier tracks.
    let now = unsafe { SynSocket::of(sk) };
    if !is_connecting || !now.is_known() {
        end_on(target, sk, state, Tally::NOBODY);
        return;
    }
    if state.flags & socket_flags::SYN_SCHEDULE == 0 {
        return;
    }
    let elapsed_ms = socket::now().wrapping_sub(state.handshake.ns) / 1_000_000;
    let left_ms = u64::from(now.user_timeout_ms).saturating_sub(elapsed_ms);
    let rto_ms = syn_ack_rto::microseconds(now.rto) / 1000;
    let more = syn::timeouts_within(left_ms, rto_ms);
    let enough = (now.retransmits + more).saturating_sub(now.linear_timeouts);
    let before = state.options.syn_retries_before;
    if now.retries == syn::SYNCNT {
        let wanted = if enough > before { enough } else { before };
        let wanted = if wanted < syn::SYNCNT {
            wanted
        } else {
            syn::SYNCNT - 1
        };
        let _taken = target.set(SockOpt::SynCnt, wanted, Tally::NOBODY);
    }
    state.flags = state.flags & !socket_flags::SYN_SCHEDULE | socket_flags::ABANDONED;
    count(-1);
    restore_timeouts(target, state, now, Tally::NOBODY);
}

/// Adds to the number of sockets with a schedule.
#[inline(always)]
fn count(n: i64) {
    if let Some(sockets) = RETRYING.get_ptr_mut(retrying::SOCKETS) {
        // SAFETY: a map value; the verifier checks the access.
        unsafe {
            asm!("lock *(u64 *)({sockets} + 0) += {n}", sockets = in(reg) sockets, n = in(reg) n);
        }
    }
}
