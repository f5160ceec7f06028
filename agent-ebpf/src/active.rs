//! Connections that this host opens.
//!
//! Invariant: the policy is chosen once, before the first SYN, and its settings stay in effect on the socket; a reload
//! does not change a connection under way. A connection without storage cannot remember its initial RTO. At its first
//! loss the program takes it from the timer that fired, not from the entries, which may have changed since.
//!
//! Invariant: only a connection whose first SYN the program has treated or counted is changed, stored or counted later.
//! The mark among its callbacks proves it ([`hook::MARK`]), or its storage; where another program has overwritten the
//! callbacks, its entry and its timer. A socket that was already connecting when the program was attached, or that
//! another program gave a short timer, is left alone.

use core::hint::cold_path;

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    Policy, Schedule, SockOpt, SocketState, UNMATCHED, arm, direction, event::kind, policy_flags,
    socket_flags,
};
use rto_agent_ebpf::{counter::Counter, ops::is_end};

use crate::{
    events, fallback, handshake, hook, kernel_sock, lookup,
    options::{self, Defaults, Target},
    socket, storage, syn_ack_rto, syn_schedule,
    tables::{self, Tally},
    unstored,
};

/// TIMEOUT_INIT of a connecting socket. The kernel runs it before the first SYN, when the program chooses the policy
/// and sets the options that must precede the SYN, and again at each SYN timeout (`retransmits_timed_out()`, Linux
/// 6.12).
#[inline(always)]
pub(crate) fn syn_timeout(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    if socket::packets_out(ctx) != 0 {
        cold_path();
        return asked_again(ops);
    }
    let is_probe = socket::is_probe(ctx);
    let hit = if is_probe {
        lookup::Hit::Leave
    } else {
        lookup::Hit::Count
    };
    let Some((arm, policy)) = lookup::policy_or_unmatched(ctx, hit) else {
        return left_alone(ops);
    };
    let tally = Tally::of(arm, direction::ACTIVE);
    if is_probe
        || !unstored::can_connect(ctx, policy)
        || !Target::apply_unremembered(ctx, policy, tally)
    {
        cold_path();
        return connect_with_storage(ops, arm, policy, is_probe);
    }
    if policy.initial_rto_jiffies != 0 && !fallback::holds(arm, policy, direction::ACTIVE) {
        ctx.set_reply(policy.initial_rto_jiffies);
    }
    tally.add_one(Counter::ATTEMPTS);
    hook::enable_without_storage(ctx, direction::ACTIVE, tally);
    0
}

/// TIMEOUT_INIT before the first SYN of a connection that keeps the kernel's own timers. Without callbacks and TCP_SYNCNT
/// the program never changed this socket.
#[inline(always)]
fn left_alone(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    if hook::has_callbacks(ctx) || kernel_sock::has_syncnt(ctx) {
        forget(ops)
    } else {
        0
    }
}

/// TIMEOUT_INIT at a SYN timeout: the kernel asks again, after it has armed the timer. Without a reply, it computes the
/// deadline from its own 1 s.
#[inline(never)]
pub(crate) fn asked_again(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: no other `Storage` is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    if let Some(state) = storage.find()
        && is_of_this_attempt(ctx, state)
    {
        let tally = Tally::of_socket(state);
        count_syn_retransmissions(ops, state);
        // Another program may have cleared them.
        hook::mark_stored(ctx, tally);
        let flags = syn_schedule::note_armed(&mut state.schedule);
        syn_schedule::armed(ctx, flags);
    } else {
        note_unseen_loss(ctx);
    }
    0
}

/// The first TIMEOUT_INIT of a connection with storage.
#[inline(never)]
fn connect_with_storage(ops: *mut bpf_sock_ops, arm: u32, policy: &Policy, is_probe: bool) -> u32 {
    if policy.flags & policy_flags::DRAINING != 0 {
        return left_alone(ops);
    }
    // SAFETY: no other `Storage` is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let tally = if is_probe {
        Tally::NOBODY
    } else {
        Tally::of(arm, direction::ACTIVE)
    };
    tally.add(Counter::ATTEMPTS, 1);
    let is_new = storage.find().is_none();
    // If another program had cleared the callbacks, this program did not see the former attempt end.
    syn_schedule::end(ctx);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return 0;
    };
    let target = Target::of(ctx);
    if is_new {
        unstored::remember(ops, &mut state.options);
    }
    begin(ctx.ops, state, arm, policy);
    hook::mark_stored(ctx, tally);
    if is_probe {
        state.flags |= socket_flags::UNCOUNTED;
    }
    socket::note_process(&mut state.watch);
    if kernel_sock::detects_fastopen_blackhole(ctx) {
        // Timeouts of the established connection count as well (`tcp_fastopen_active_detect_blackhole()`), so any timer
        // of the policy could trigger the detection.
        state.flags |= socket_flags::KERNEL_TIMERS;
        keep_kernel_rto(state);
        options::restore(ops, state, tally);
        return 0;
    }
    // A TCP_USER_TIMEOUT of an earlier policy of the socket, too, would make connect() give up earlier.
    target.restore_established(&mut state.options, tally);
    // The probe always gets the policy's timers.
    let is_left_alone = policy.flags & policy_flags::MPTCP == 0 && kernel_sock::is_mptcp(ctx);
    let keeps = is_left_alone
        || ends_early(ctx)
        || (!is_probe && fallback::holds(arm, policy, direction::ACTIVE));
    if keeps {
        keep_kernel_rto(state);
    }
    options::connect(ops, state, policy, (!keeps).into(), tally);
    if is_left_alone {
        state.options.never_set(SockOpt::RtoMax);
    }
    let jiffies = state.handshake.initial_rto_jiffies;
    if jiffies != 0 {
        ctx.set_reply(jiffies);
    }
    0
}

/// Whether the application's TCP_USER_TIMEOUT would end an attempt with shorter intervals before the kernel's own first
/// timeout, at which it ends without the program.
#[inline(always)]
fn ends_early(ctx: &SockOpsContext) -> bool {
    matches!(kernel_sock::user_timeout_ms(ctx), 1..=1000)
}

/// Keeps the kernel's own initial RTO for the SYN.
#[inline(always)]
fn keep_kernel_rto(state: &mut SocketState) {
    state.handshake.initial_rto_jiffies = 0;
    state.handshake.initial_rto_us = syn_ack_rto::KERNEL_US;
    state.options.epoch = 0;
}

/// Initialises the storage for a new connection.
#[inline(never)]
fn begin(ops: *mut bpf_sock_ops, state: &mut SocketState, arm: u32, policy: &Policy) {
    state.flags = socket_flags::CONNECTING;
    handshake::note(ops, state, arm, policy, direction::ACTIVE);
    let now = socket::now();
    handshake::begin(&mut state.handshake, 0, now);
    state.handshake.copies_us = [0; 2];
    state.schedule = Schedule::default();
    // The first interval begins now, so a short connection is sampled only when it ends.
    state.watch.srtt_sampled_ns = now;
    state.watch.loss_end = 0;
    state.options.set_nothing_later();
}

/// Restores all options of a socket that is reconnected to an address without an entry.
#[inline(never)]
fn forget(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    syn_schedule::end(&ctx);
    if let Some(state) = storage.find() {
        if state.arm == arm::NONE && hook::is_marked(&ctx) {
            // The storage belongs to a connection before the former one, which had none.
            unstored::remember(ops, &mut state.options);
        }
        options::restore(ops, state, Tally::NOBODY);
        state.arm = arm::NONE;
        state.flags &= !socket_flags::CONNECTING;
        state.handshake.initial_rto_jiffies = 0;
    } else if hook::is_marked(&ctx) {
        // A former connection of this socket.
        Target::of(&ctx).restore_unremembered(Defaults::Kernel);
    }
    hook::unmark(&ctx);
    0
}

/// RTO_CB of a connecting socket. The kernel runs it in `tcp_write_timeout()`, before it retransmits the SYN and
/// doubles `icsk_rto` (`tcp_retransmit_timer()`, Linux 6.18). At the first loss the socket gets storage and its SYN
/// schedule, so that the schedule already applies to the next interval.
#[inline(never)]
pub(crate) fn syn_lost(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    // The number of timeouts (argument 0) is not used, because an earlier program may have overwritten it.
    let is_stored = storage
        .find()
        .is_some_and(|state| is_of_this_attempt(&ctx, state));
    if !is_stored {
        if !hook::is_marked(&ctx) {
            // Another program has requested the callback. If it has overwritten this program's, `note_unseen_loss`
            // notices.
            return 0;
        }
        lost(ops, hook::argument(&ctx, 1));
    }
    if socket::total_retrans(&ctx) == 0
        && let Some(state) = storage.find()
        && !Tally::of_socket(state).is_nobody()
    {
        fallback::first_syn_lost(state);
    }
    // If argument 2 is not 0, the kernel gives the attempt up.
    if hook::argument(&ctx, 2) == 0 {
        syn_schedule::at_timeout(&ctx);
        if let Some(state) = storage.find() {
            let attempt = socket::total_retrans(&ctx).wrapping_add(1);
            events::tell(&ctx, state, kind::SYN, attempt, hook::argument(&ctx, 1));
        }
    }
    0
}

/// Whether the storage of a connecting socket was made for the attempt under way. An attempt without storage has the
/// mark but not STATE_CB; then its socket's storage belongs to a former connection.
#[inline(always)]
fn is_of_this_attempt(ctx: &SockOpsContext, state: &SocketState) -> bool {
    state.flags & socket_flags::SYN_SCHEDULE != 0
        || (state.flags & socket_flags::CONNECTING != 0
            && (hook::has_storage(ctx) || !hook::is_marked(ctx)))
}

/// Handles TIMEOUT_INIT of a socket that has retransmitted a SYN but has neither storage nor this program's callbacks:
/// another program has overwritten those of a socket that has a policy, or the socket was connecting before this program
/// was attached, or has no policy. An entry and the policy's own timer show the first.
#[inline(never)]
fn note_unseen_loss(ctx: &SockOpsContext) {
    if hook::is_marked(ctx) {
        return;
    }
    let Some((_, policy)) = lookup::arm_at_loss(ctx) else {
        return;
    };
    let timer = policy.initial_rto_jiffies;
    let retransmits = socket::retransmits(ctx).unwrap_or(0) & 31;
    let now = kernel_sock::rto(ctx);
    // In the linear phase the timer has not doubled (`net.ipv4.tcp_syn_linear_timeouts`, Linux 6.5).
    let is_ours = timer == now || timer << retransmits == now;
    if timer != 0 && timer < syn_ack_rto::kernel_jiffies() && is_ours {
        lost(ctx.ops, timer);
        syn_schedule::after_timeout(ctx);
    }
}

/// Creates storage for a connection that has lost its first SYN or the answer; its timer was `timer` jiffies. If no
/// entry covers the peer any more, the connection has no policy, and its SYN schedule depends only on the timer.
#[inline(never)]
fn lost(ops: *mut bpf_sock_ops, timer: u32) {
    // SAFETY: the caller holds no reference to the storage.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some((arm, policy)) = lookup::arm_at_loss(ctx) else {
        return;
    };
    let tally = Tally::of(arm, direction::ACTIVE);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        if timer < syn_ack_rto::kernel_jiffies() && policy.initial_rto_jiffies != 0 {
            syn_schedule::begin_without_storage(ctx, tally);
        }
        return;
    };
    syn_schedule::end_without_storage(ctx);
    unstored::remember(ops, &mut state.options);
    begin(ctx.ops, state, arm, policy);
    note_timer(ctx, state, policy, timer);
    state.handshake.retransmissions_counted = 0;
    hook::mark_stored(ctx, tally);
}

/// Derives the connection's initial RTO and its start from the timer that fired, jiffies.
#[inline(always)]
fn note_timer(ctx: &SockOpsContext, state: &mut SocketState, policy: &Policy, fired: u32) {
    let is_counted = policy.initial_rto_jiffies == 0 && state.arm != arm::NONE;
    let handshake = &mut state.handshake;
    let mut timer = fired;
    if policy.initial_rto_jiffies != 0 && socket::retransmits(ctx).unwrap_or(0) != 0 {
        // There was no memory for storage at the first timeout, and the interval may have doubled since.
        timer = policy.initial_rto_jiffies;
    }
    if timer != policy.initial_rto_jiffies {
        // 0, because the program does not reply for the kernel's own initial RTO. Nor has it replied for a connection
        // that is only counted, such as one of the control arm: another program's timer is left alone.
        let is_left_alone = is_counted || timer == syn_ack_rto::kernel_jiffies();
        handshake.initial_rto_jiffies = if is_left_alone { 0 } else { timer };
        handshake.initial_rto_us = syn_ack_rto::microseconds(timer);
        state.options.epoch = 0;
    }
    let waited_ns = u64::from(syn_ack_rto::microseconds(timer)) * 1000;
    handshake.ns = handshake.ns.wrapping_sub(waited_ns);
}

/// STATE_CB of a connecting socket. The application may call connect() on it again.
#[inline(never)]
pub(crate) fn failed(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    // A socket in SYN_RECV that the application closes may still complete the handshake.
    if !is_end(hook::argument(&ctx, 1)) {
        return 0;
    }
    syn_schedule::end(&ctx);
    if let Some(state) = storage.find()
        && state.flags & socket_flags::CONNECTING != 0
    {
        state.flags &= !socket_flags::CONNECTING;
        options::restore(ops, state, Tally::NOBODY);
    }
    0
}

/// ACTIVE_ESTABLISHED_CB: the SYN-ACK has arrived.
#[inline(always)]
pub(crate) fn established(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    let retransmissions = socket::total_retrans(ctx);
    // A connection without callbacks has no policy, unless another program has cleared them. In that case it may still
    // have a schedule after a lost SYN.
    let callbacks = socket::callbacks(ctx);
    if callbacks == 0 && retransmissions == 0 {
        return 0;
    }
    if !unstored::are_ours(callbacks) || hook::has_storage(ctx) || retransmissions != 0 {
        cold_path();
        if established_with_storage(ops) != 0 || callbacks == 0 {
            return 0;
        }
    }
    if let Some((arm, policy)) = lookup::policy_or_unmatched(ctx, lookup::Hit::Leave) {
        unstored::established(ctx, arm, policy, direction::ACTIVE);
        if !unstored::are_ours(callbacks) && arm::slot(arm) != UNMATCHED {
            cold_path();
            // Another program has overwritten the callbacks since the attempt was counted.
            unstored::store(ops, arm, policy, direction::ACTIVE, 1);
        }
    }
    0
}

/// [`established`] for a connection that may have storage. Returns 1 if it has storage and a policy.
#[inline(never)]
fn established_with_storage(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: no other `Storage` is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    syn_schedule::end(&ctx);
    let Some(state) = storage.find() else {
        return 0;
    };
    finish(&ctx, state);
    (state.arm != arm::NONE).into()
}

#[inline(always)]
fn finish(ctx: &SockOpsContext, state: &mut SocketState) {
    state.flags &= !socket_flags::CONNECTING;
    let retransmissions = socket::total_retrans(ctx);
    let took_ns = socket::now().wrapping_sub(state.handshake.ns);
    handshake::ended(&mut state.handshake, retransmissions, took_ns);
    let tally = Tally::of_socket(state);
    let target = Target::of(ctx);
    if state.arm == arm::NONE {
        return;
    }
    if retransmissions >= 2 {
        handshake::restore_window(ctx, direction::ACTIVE, took_ns, tally);
    }
    if tables::settings(state.arm).is_some_and(|policy| policy.flags & policy_flags::DRAINING != 0)
    {
        state.options.set_nothing_later();
    }
    target.established(&mut state.options, tally);
    hook::enable(ctx.ops, state, tally);
    handshake::established(ctx.ops, state, retransmissions, tally);
    count_syn_retransmissions(ctx.ops, state);
}

/// Counts the SYNs retransmitted since the last callback. The kernel runs TIMEOUT_INIT after each retransmission
/// (`tcp_retransmit_timer()`, Linux 6.12), so that none is missed even if the connection is never established.
#[inline(never)]
fn count_syn_retransmissions(ops: *mut bpf_sock_ops, state: &mut SocketState) {
    let total = socket::total_retrans(&SockOpsContext::new(ops));
    let new = total.wrapping_sub(state.handshake.retransmissions_counted);
    if new == 0 {
        return;
    }
    state.handshake.retransmissions_counted = total;
    let tally = Tally::of_socket(state);
    tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, new.into());
}
