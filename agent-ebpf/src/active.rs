//! Connections this host opens.
//!
//! The policy is chosen once, in connect(), and what it says of later moments is copied into the
//! socket's storage: no reload changes a connection under way. A socket without storage is none
//! of ours (no entry, or already connecting when the program was attached) and is left alone.

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{
    NO_POLICY, Policy, SocketState, direction, event::kind, policy_flags, socket_flags,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    events, handshake, hook, kernel_sock, lookup,
    options::{KERNEL, Target},
    socket, syn_ack_rto, syn_retries,
    tables::Tally,
};

/// TCP_CONNECT_CB: before the SYN is sent.
#[inline(always)]
pub(crate) fn connect(ctx: &SockOpsContext) {
    let is_probe = socket::is_probe(ctx);
    let hit = if is_probe {
        lookup::Hit::Leave
    } else {
        lookup::Hit::Count
    };
    let Some((index, policy)) = lookup::policy_or_unmatched(ctx, hit) else {
        forget(ctx);
        return;
    };
    let tally = if is_probe {
        Tally::NOBODY
    } else {
        Tally::of(index, direction::ACTIVE)
    };
    let Some(state) = socket::storage(ctx, socket::Missing::Create) else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return;
    };
    begin(ctx, state, index, policy);
    state.flags = if is_probe { socket_flags::UNCOUNTED } else { 0 };
    socket::note_process(state);
    let target = Target::of(ctx);
    if kernel_sock::detects_fastopen_blackhole(ctx) {
        // Timeouts of the established connection count as well, so that none of the policy's timers is safe.
        state.flags |= socket_flags::KERNEL_TIMERS;
        keep_kernel_rto(state);
        syn_retries::restore(target, state);
        state.user_timeout_ms = 0;
        target.restore(state, KERNEL, tally);
        return;
    }
    let keeps = policy.flags & policy_flags::MPTCP == 0 && kernel_sock::is_mptcp(ctx);
    if keeps {
        keep_kernel_rto(state);
    }
    if keeps && policy.flags & policy_flags::SYN_RETRIES_FIXED == 0 {
        syn_retries::restore(target, state);
    } else {
        syn_retries::apply(ctx, state, policy, tally);
    }
    // A maximum below that of the kernel's SYN timers would make connect() give up sooner.
    let rto_max_ms = if keeps { 0 } else { policy.rto_max_ms };
    target.apply(state, policy, rto_max_ms, KERNEL, tally);
    // One that an earlier policy of the socket set would make connect() give up sooner.
    target.user_timeout(state, 0, tally);
}

/// Leaves the SYN the kernel's own initial RTO.
#[inline(always)]
fn keep_kernel_rto(state: &mut SocketState) {
    state.initial_rto_jiffies = 0;
    state.initial_rto_us = syn_ack_rto::KERNEL_US;
}

/// Fills the storage for a connection that begins. TCP_SYNCNT is not touched: what was done to it
/// for a former connection attempt of the socket must be known to the new one.
#[inline(always)]
fn begin(ctx: &SockOpsContext, state: &mut SocketState, index: u32, policy: &Policy) {
    let now = socket::now();
    handshake::begin(state, 0, now);
    // A short connection has the sample at its end.
    state.srtt_sampled_ns = now;
    state.policy = index;
    state.generation = policy.generation;
    state.direction = direction::ACTIVE;
    state.initial_rto_jiffies = policy.initial_rto_jiffies;
    state.initial_rto_us = policy.initial_rto_us;
    state.user_timeout_ms = policy.user_timeout_ms;
    state.retransmissions_counted = socket::total_retrans(ctx);
    state.timeouts_set = 0;
    state.loss_end = 0;
}

/// A socket that is connected anew, to an address without an entry: gives everything back.
#[inline(always)]
fn forget(ctx: &SockOpsContext) {
    if let Some(state) = socket::storage(ctx, socket::Missing::None) {
        syn_retries::restore(Target::of(ctx), state);
        Target::of(ctx).restore(state, KERNEL, Tally::NOBODY);
        hook::disable(ctx, state);
        state.policy = NO_POLICY;
    }
}

/// TIMEOUT_INIT of a connecting socket: the first SYN's timeout, and the kernel's questions at
/// each SYN timeout.
#[inline(always)]
pub(crate) fn syn_timeout(ctx: &SockOpsContext) {
    if let Some(state) = socket::policy_state(ctx) {
        answer(ctx, state);
    }
}

/// The same for a socket known to be ours.
#[inline(always)]
pub(crate) fn answer(ctx: &SockOpsContext, state: &mut SocketState) {
    if state.initial_rto_jiffies != 0 {
        ctx.set_reply(state.initial_rto_jiffies);
        if state.timeouts_set == 0 {
            state.timeouts_set = 1;
            Tally::of_socket(state).add(Counter::INITIAL_RTOS_SET, 1);
        }
    }
    count_syn_retransmissions(ctx, state);
}

/// ACTIVE_ESTABLISHED_CB: the SYN-ACK has come.
#[inline(always)]
pub(crate) fn established(ctx: &SockOpsContext) {
    if let Some(state) = socket::policy_state(ctx) {
        finish(ctx, state);
    }
}

/// The same for a socket known to be ours.
#[inline(always)]
pub(crate) fn finish(ctx: &SockOpsContext, state: &mut SocketState) {
    let retransmissions = socket::total_retrans(ctx);
    let took_ns = socket::now().wrapping_sub(state.handshake_ns);
    handshake::begin(state, retransmissions, took_ns);
    let tally = Tally::of_socket(state);
    // Not before: on a connecting socket it would make connect() give up sooner.
    let millis = state.user_timeout_ms;
    Target::of(ctx).user_timeout(state, millis, tally);
    hook::enable(ctx, state, tally);
    handshake::established(ctx, state, retransmissions);
    count_syn_retransmissions(ctx, state);
}

/// Adds the SYNs sent again since the last look. The kernel asks for the timeout after each
/// retransmission (`tcp_retransmit_timer()`, Linux 6.12), so that none is missed even where the
/// connection never comes about.
#[inline(always)]
fn count_syn_retransmissions(ctx: &SockOpsContext, state: &mut SocketState) {
    let total = socket::total_retrans(ctx);
    let new = total.wrapping_sub(state.retransmissions_counted);
    if new == 0 {
        return;
    }
    state.retransmissions_counted = total;
    let tally = Tally::of_socket(state);
    tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, new.into());
    events::tell(ctx, kind::SYN, total, state.initial_rto_jiffies);
}
