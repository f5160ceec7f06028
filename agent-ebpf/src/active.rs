//! Connections this host opens.
//!
//! The policy is chosen once, before the SYN is sent, and what it says is in force on the socket from then on: no reload
//! changes a connection under way. At the first loss the timer that fired tells which initial RTO the connection began
//! with, whatever entries say by now. A socket that was connecting already when the program was attached is left alone.

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    FAILED_NS, Policy, SocketState, arm, direction, event::kind, policy_flags, socket_flags,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    brake, events, handshake, hook, kernel_sock, lookup,
    options::{KERNEL, Target},
    socket,
    storage::{self, Storage},
    syn_ack_rto, syn_retries,
    tables::{self, Tally},
};

/// TIMEOUT_INIT of a connecting socket: before the first SYN, when the policy is chosen and what must stand by then is
/// set, and the kernel's questions at each SYN timeout.
#[inline(always)]
pub(crate) fn syn_timeout(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    if socket::packets_out(ctx) != 0 {
        return asked_again(ops);
    }
    let is_probe = socket::is_probe(ctx);
    let hit = if is_probe {
        lookup::Hit::Leave
    } else {
        lookup::Hit::Count
    };
    let Some((arm, policy)) = lookup::policy_or_unmatched(ctx, hit) else {
        // Without callbacks nothing was ever done to it.
        return if hook::has_callbacks(ctx) {
            forget(ops)
        } else {
            0
        };
    };
    let tally = Tally::of(arm, direction::ACTIVE);
    if is_probe
        || !goes_without_storage(ctx, policy)
        || !Target::apply_unremembered(ctx, policy, tally)
    {
        return connect_with_storage(ops, arm, policy, is_probe);
    }
    if policy.initial_rto_jiffies != 0 && !brake::holds(arm, policy, direction::ACTIVE) {
        ctx.set_reply(policy.initial_rto_jiffies);
        tally.add_one(Counter::INITIAL_RTOS_SET);
    }
    hook::enable_without_storage(ctx, direction::ACTIVE, tally);
    0
}

/// Whether a connection needs no storage from its beginning on: nothing of it is known that must be remembered.
#[inline(always)]
fn goes_without_storage(ctx: &SockOpsContext, policy: &Policy) -> bool {
    policy.flags & policy_flags::STORED == 0
        // The socket was connected before, or another program may take the callbacks away.
        && !hook::has_callbacks(ctx)
        && !kernel_sock::is_mptcp_or_fastopen(ctx)
        // Who watches wants to know the process.
        && !events::are_watched()
}

/// A question of the kernel's at a SYN timeout.
#[inline(never)]
pub(crate) fn asked_again(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one that is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    if hook::has_storage(&ctx)
        && let Some(state) = storage.of_policy()
    {
        answer(&ctx, state);
    } else {
        // Not answered: the kernel's own deadline is no sooner.
        note_unseen_loss(&ctx, &mut storage);
    }
    0
}

/// The same for a connection that has something to remember.
#[inline(never)]
fn connect_with_storage(ops: *mut bpf_sock_ops, arm: u32, policy: &Policy, is_probe: bool) -> u32 {
    // SAFETY: the only one that is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let tally = if is_probe {
        Tally::NOBODY
    } else {
        Tally::of(arm, direction::ACTIVE)
    };
    let is_new = storage.find().is_none();
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return 0;
    };
    let target = Target::of(ctx);
    if is_new {
        target.remember(&mut state.options);
    }
    begin(ctx, state, arm, policy);
    hook::mark_stored(ctx, state, tally);
    if is_probe {
        state.flags |= socket_flags::UNCOUNTED;
    }
    socket::note_process(&mut state.watch);
    if kernel_sock::detects_fastopen_blackhole(ctx) {
        // Timeouts of the established connection count as well, so that none of the policy's timers is safe.
        state.flags |= socket_flags::KERNEL_TIMERS;
        keep_kernel_rto(state);
        syn_retries::restore(target, &mut state.options);
        state.options.user_timeout_ms = 0;
        target.restore(state, KERNEL, tally);
        return 0;
    }
    // The probe asks for what the policy sets.
    let is_left_alone = policy.flags & policy_flags::MPTCP == 0 && kernel_sock::is_mptcp(ctx);
    let keeps = is_left_alone || (!is_probe && brake::holds(arm, policy, direction::ACTIVE));
    if keeps {
        keep_kernel_rto(state);
        if !is_left_alone {
            state.flags |= socket_flags::RTO_MAX_LATER;
        }
    }
    if keeps && policy.flags & policy_flags::SYN_RETRIES_FIXED == 0 {
        syn_retries::restore(target, &mut state.options);
    } else {
        syn_retries::apply(target, &mut state.options, policy, tally);
    }
    // A maximum below that of the kernel's SYN timers would make connect() give up sooner.
    let rto_max_ms = if keeps { 0 } else { policy.rto_max_ms };
    target.apply(state, policy, rto_max_ms, KERNEL, tally);
    // One that an earlier policy of the socket set would make connect() give up sooner.
    target.user_timeout(&mut state.options, 0, tally);
    answer(ctx, state);
    0
}

/// Leaves the SYN the kernel's own initial RTO.
#[inline(always)]
fn keep_kernel_rto(state: &mut SocketState) {
    state.handshake.initial_rto_jiffies = 0;
    state.handshake.initial_rto_us = syn_ack_rto::KERNEL_US;
    state.options.epoch = 0;
}

/// Fills the storage for a connection that begins. TCP_SYNCNT is not touched: what was done to it
/// for a former connection attempt of the socket must be known to the new one.
#[inline(always)]
fn begin(ctx: &SockOpsContext, state: &mut SocketState, arm: u32, policy: &Policy) {
    state.flags = 0;
    handshake::note(ctx, state, arm, policy, direction::ACTIVE);
    let now = socket::now();
    handshake::begin(&mut state.handshake, 0, now);
    // A short connection has the sample at its end.
    state.watch.srtt_sampled_ns = now;
    state.watch.loss_end = 0;
    state.options.user_timeout_ms = policy.user_timeout_ms;
}

/// A socket that is connected anew, to an address without an entry: gives everything back.
#[inline(never)]
fn forget(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let target = Target::of(&ctx);
    if let Some(state) = storage.find() {
        syn_retries::restore(target, &mut state.options);
        target.restore(state, KERNEL, Tally::NOBODY);
        hook::disable(&ctx, &mut state.options);
        state.arm = arm::NONE;
    } else {
        // Of a former connection. (Which of the callbacks others asked for is not known, so that they stay.)
        target.restore_unremembered(KERNEL);
    }
    0
}

/// Answers for a socket known to be ours.
#[inline(always)]
fn answer(ctx: &SockOpsContext, state: &mut SocketState) {
    let jiffies = state.handshake.initial_rto_jiffies;
    if jiffies != 0 {
        ctx.set_reply(jiffies);
        if state.flags & socket_flags::INITIAL_RTO_SET == 0 {
            state.flags |= socket_flags::INITIAL_RTO_SET;
            Tally::of_socket(state).add(Counter::INITIAL_RTOS_SET, 1);
        }
    }
    count_syn_retransmissions(ctx, state);
}

/// RTO_CB of a connecting socket. At its first loss the socket gets what it did without so far: TCP_SYNCNT for its
/// timer, before the kernel looks at it, and storage.
#[inline(never)]
pub(crate) fn syn_lost(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    // Not by the count of timeouts, which an earlier program may have overwritten.
    let is_first = !hook::has_storage(&ctx) || storage.find().is_none();
    if is_first {
        lost(&ctx, &mut storage, hook::argument(&ctx, 1));
    }
    if hook::argument(&ctx, 2) != 0
        && let Some(state) = storage.find()
    {
        state.flags |= socket_flags::EXPIRED;
    }
    0
}

/// A question of the kernel's about a socket without storage, which has retransmitted a SYN. Where the socket is ours,
/// another program has taken its callbacks away; that the timer is shorter than the kernel's own tells it from one that
/// began before the program was attached.
#[inline(always)]
fn note_unseen_loss(ctx: &SockOpsContext, storage: &mut Storage<'_>) {
    if hook::tells_rto(ctx) {
        return;
    }
    // Done at an earlier question.
    if let Some(state) = storage.find()
        && state.options.syn_retries_set != 0
    {
        return;
    }
    let timer = kernel_sock::rto(ctx);
    if timer == 0 || timer >= syn_ack_rto::kernel_jiffies() {
        return;
    }
    let retransmits = socket::retransmits(ctx).unwrap_or(0) & 31;
    let first = match lookup::policy_at_loss(ctx) {
        // In the linear phase, the timer has not doubled (`net.ipv4.tcp_syn_linear_timeouts`, Linux 6.5).
        Some((_, policy))
            if policy.initial_rto_jiffies == timer
                || policy.initial_rto_jiffies << retransmits == timer =>
        {
            policy.initial_rto_jiffies
        }
        _ => timer >> retransmits,
    };
    lost(ctx, storage, if first == 0 { 1 } else { first });
}

/// The first SYN was lost, or its answer was; its timer was so many jiffies. Where no entry covers the peer any more
/// the connection has no policy, and TCP_SYNCNT goes by the timer alone.
#[inline(always)]
fn lost(ctx: &SockOpsContext, storage: &mut Storage<'_>, timer: u32) {
    let found = lookup::policy_at_loss(ctx);
    let Some((arm, policy)) = found.or_else(lookup::no_policy) else {
        return;
    };
    let tally = Tally::of(arm, direction::ACTIVE);
    let target = Target::of(ctx);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        // Nothing is remembered: it stays raised.
        if socket::retransmits(ctx) == Some(0) {
            let mut unused = rto_agent_common::Options::default();
            syn_retries::apply_at_loss(target, &mut unused, policy, timer, tally);
        }
        return;
    };
    target.remember(&mut state.options);
    begin(ctx, state, arm, policy);
    note_timer(state, policy, timer);
    state.handshake.retransmissions_counted = 0;
    // What comes after the handshake is for connections that had storage from their beginning on.
    state.options.user_timeout_ms = 0;
    state.flags |= socket_flags::INITIAL_RTO_SET;
    hook::mark_stored(ctx, state, tally);
    syn_retries::apply_at_loss(target, &mut state.options, policy, timer, tally);
}

/// What the timer that fired tells: with which initial RTO the connection began, and when.
#[inline(always)]
fn note_timer(state: &mut SocketState, policy: &Policy, timer: u32) {
    let handshake = &mut state.handshake;
    if timer != policy.initial_rto_jiffies {
        // The kernel's own is its own answer.
        let is_kernels = timer == syn_ack_rto::kernel_jiffies();
        handshake.initial_rto_jiffies = if is_kernels { 0 } else { timer };
        handshake.initial_rto_us = syn_ack_rto::microseconds(timer);
        state.options.epoch = 0;
    }
    let waited_ns = u64::from(syn_ack_rto::microseconds(timer)) * 1000;
    handshake.ns = handshake.ns.wrapping_sub(waited_ns);
}

/// STATE_CB of a connecting socket that is closed: it has storage if it lost something.
#[inline(never)]
pub(crate) fn failed(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    if socket::total_retrans(&ctx) != 0
        && let Some(state) = storage.of_policy()
        && (state.flags & socket_flags::EXPIRED != 0
            || socket::now().wrapping_sub(state.handshake.ns) >= FAILED_NS)
    {
        Tally::of_socket(state).add(Counter::FAILED, 1);
    }
    0
}

/// ACTIVE_ESTABLISHED_CB: the SYN-ACK has come.
#[inline(always)]
pub(crate) fn established(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    // Without any callbacks it is no connection of ours.
    if !hook::has_callbacks(ctx) {
        return 0;
    }
    if hook::has_storage(ctx)
        && let Some(state) = storage.of_policy()
    {
        finish(ctx, state);
        return 0;
    }
    if let Some((arm, policy)) = lookup::policy_or_unmatched(ctx, lookup::Hit::Leave) {
        handshake::established_clean(ctx, &mut storage, arm, policy, direction::ACTIVE);
    }
    0
}

/// The same for a socket known to be ours.
#[inline(always)]
fn finish(ctx: &SockOpsContext, state: &mut SocketState) {
    let retransmissions = socket::total_retrans(ctx);
    let took_ns = socket::now().wrapping_sub(state.handshake.ns);
    handshake::begin(&mut state.handshake, retransmissions, took_ns);
    let tally = Tally::of_socket(state);
    // Not before: on a connecting socket it would make connect() give up sooner.
    let millis = state.options.user_timeout_ms;
    Target::of(ctx).user_timeout(&mut state.options, millis, tally);
    if state.flags & socket_flags::RTO_MAX_LATER != 0
        && let Some(policy) = tables::settings(tables::owner(state))
    {
        Target::of(ctx).rto_max(&mut state.options, policy.rto_max_ms, tally);
    }
    hook::enable(ctx, state, tally);
    handshake::established(ctx, state, retransmissions, tally);
    count_syn_retransmissions(ctx, state);
}

/// Adds the SYNs sent again since the last look. The kernel asks for the timeout after each
/// retransmission (`tcp_retransmit_timer()`, Linux 6.12), so that none is missed even where the
/// connection never comes about.
#[inline(always)]
fn count_syn_retransmissions(ctx: &SockOpsContext, state: &mut SocketState) {
    let total = socket::total_retrans(ctx);
    let new = total.wrapping_sub(state.handshake.retransmissions_counted);
    if new == 0 {
        return;
    }
    state.handshake.retransmissions_counted = total;
    let tally = Tally::of_socket(state);
    if !tally.is_nobody() {
        brake::spend(state, new);
    }
    tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, new.into());
    let timer = state.handshake.initial_rto_jiffies;
    events::tell(ctx, state, kind::SYN, total, timer);
}
