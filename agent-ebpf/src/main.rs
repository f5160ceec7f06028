//! The sock_ops program: initial RTO, and TCP options, by longest prefix of the peer's address.
//!
//! It returns 1 always and writes `reply` only where an entry says so: any other sock_ops
//! program on the host must not notice it (a `reply` of an earlier program is kept).
#![no_std]
#![no_main]

mod lookup;
mod socket;
mod tables;

use aya_ebpf::{
    bindings::bpf_sock_ops,
    helpers::bpf_ktime_get_ns,
    macros::sock_ops,
    programs::SockOpsContext,
};
use rto_agent_common::{Counters, NO_POLICY, Policy, SockOpt, SocketState};
use rto_agent_ebpf::ops::{Action, decide, is_ours};

/// What every callback answers: "go on".
const CONTINUE: u32 = 1;

/// The program.
#[sock_ops]
fn rto_agent(ctx: SockOpsContext) -> u32 {
    let ops = ctx.ops;
    if is_ours(ctx.op()) {
        // SAFETY: the kernel hands in a valid context; the loads are of documented fields.
        let (full, state) = unsafe { (socket::read(&raw const (*ops).is_fullsock), socket::read(&raw const (*ops).state)) };
        match decide(ctx.op(), full != 0, state) {
            Action::Leave => {}
            Action::Connect => connect(&ctx),
            Action::SynTimeout => syn_timeout(&ctx),
            Action::SynAckTimeout => syn_ack_timeout(&ctx),
            Action::ActiveEstablished => active_established(&ctx),
            Action::PassiveEstablished => passive_established(&ctx),
        }
    }
    CONTINUE
}

/// connect(): the policy is chosen once, here, and kept in the socket's storage, so that no
/// reload changes a connection under way.
#[inline(always)]
fn connect(ctx: &SockOpsContext) {
    let Some((index, policy)) = lookup::policy_of_peer(ctx.ops) else {
        forget(ctx);
        return;
    };
    let Some(state) = socket::storage(ctx.ops, true) else {
        if let Some(counters) = tables::counters(index) {
            counters.storage_failures += 1;
        }
        return;
    };
    let own_syn_retries = socket::own_syn_retries(ctx.ops, state);
    state.handshake_start_ns = now();
    state.policy = index;
    state.generation = policy.generation;
    state.initial_rto_jiffies = policy.initial_rto_jiffies;
    state.retransmissions_counted = socket::total_retrans(ctx.ops);
    state.timeouts_set = 0;
    let Some(counters) = tables::counters(index) else { return };
    socket::set_syn_retries(ctx.ops, state, policy, own_syn_retries, counters);
    set_options(ctx.ops, policy, counters);
}

/// A socket that is connected anew, to an address without an entry: gives back what the entry
/// of its former address had set and the kernel would still honour.
#[inline(always)]
fn forget(ctx: &SockOpsContext) {
    if let Some(state) = socket::storage(ctx.ops, false) {
        socket::restore_syn_retries(ctx.ops, state);
        *state = SocketState::default();
    }
}

/// The first SYN's timeout, and the kernel's questions at each SYN timeout.
#[inline(always)]
fn syn_timeout(ctx: &SockOpsContext) {
    let Some(state) = socket::storage(ctx.ops, false) else { return };
    if state.policy == NO_POLICY {
        return;
    }
    if let Some(counters) = counters_of(state) {
        count_syn_retransmissions(ctx.ops, state, counters);
        if state.initial_rto_jiffies != 0 && state.timeouts_set == 0 {
            counters.syn_timeouts_set += 1;
        }
    }
    if state.initial_rto_jiffies != 0 {
        state.timeouts_set = 1;
        ctx.set_reply(state.initial_rto_jiffies);
    }
}

/// A connection request's SYN-ACK. There is no socket yet that could remember the policy.
#[inline(always)]
fn syn_ack_timeout(ctx: &SockOpsContext) {
    let Some((index, policy)) = lookup::policy_of_peer(ctx.ops) else { return };
    if policy.initial_rto_jiffies != 0 {
        if let Some(counters) = tables::counters(index) {
            counters.syn_ack_timeouts_set += 1;
        }
        ctx.set_reply(policy.initial_rto_jiffies);
    }
}

#[inline(always)]
fn active_established(ctx: &SockOpsContext) {
    let Some(state) = socket::storage(ctx.ops, false) else { return };
    let Some(counters) = counters_of(state) else { return };
    count_syn_retransmissions(ctx.ops, state, counters);
    counters.established_active += 1;
    if let Some(policy) = tables::policy(state.policy) {
        set_user_timeout(ctx.ops, policy, counters);
    }
}

/// An accepted connection. (Under TCP Fast Open this comes before the handshake is over, with
/// SYN cookies without any SYN-ACK timeout before it.)
#[inline(always)]
fn passive_established(ctx: &SockOpsContext) {
    let Some((index, policy)) = lookup::policy_of_peer_uncounted(ctx.ops) else { return };
    let Some(counters) = tables::counters(index) else { return };
    let Some(state) = socket::storage(ctx.ops, true) else {
        counters.storage_failures += 1;
        return;
    };
    let retransmissions = socket::total_retrans(ctx.ops);
    state.handshake_start_ns = now();
    state.policy = index;
    state.generation = policy.generation;
    state.retransmissions_counted = retransmissions;
    counters.established_passive += 1;
    counters.syn_ack_retransmissions += u64::from(retransmissions);
    set_options(ctx.ops, policy, counters);
    set_user_timeout(ctx.ops, policy, counters);
}

/// The counters of a socket's policy, if its slot still belongs to that policy.
#[inline(always)]
fn counters_of(state: &SocketState) -> Option<&'static mut Counters> {
    let policy = tables::policy(state.policy)?;
    if policy.generation == state.generation { tables::counters(state.policy) } else { None }
}

/// Adds the SYNs sent again since the last look. The kernel asks for the timeout before and
/// after each retransmission, so that none is missed even where the connection never comes about.
#[inline(always)]
fn count_syn_retransmissions(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    counters: &mut Counters,
) {
    let total = socket::total_retrans(ops);
    counters.syn_retransmissions += u64::from(total.wrapping_sub(state.retransmissions_counted));
    state.retransmissions_counted = total;
}

/// The options of a policy that may stand before the handshake is over.
#[inline(always)]
fn set_options(ops: *mut bpf_sock_ops, policy: &Policy, counters: &mut Counters) {
    use rto_agent_common::policy_flags::{THIN_LINEAR, THIN_LINEAR_SET};

    if policy.rto_min_us != 0 {
        socket::set(ops, SockOpt::RtoMin, policy.rto_min_us, counters);
    }
    if policy.delack_max_us != 0 {
        socket::set(ops, SockOpt::DelackMax, policy.delack_max_us, counters);
    }
    if policy.flags & THIN_LINEAR_SET != 0 {
        let on = u32::from(policy.flags & THIN_LINEAR != 0);
        socket::set(ops, SockOpt::ThinLinear, on, counters);
    }
    if policy.rto_max_ms != 0 {
        socket::set(ops, SockOpt::RtoMax, policy.rto_max_ms, counters);
    }
}

/// Only once established: on a connecting socket it would make connect() give up sooner.
#[inline(always)]
fn set_user_timeout(ops: *mut bpf_sock_ops, policy: &Policy, counters: &mut Counters) {
    if policy.user_timeout_ms != 0 {
        socket::set(ops, SockOpt::UserTimeout, policy.user_timeout_ms, counters);
    }
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: the helper takes nothing and only reads the clock.
    unsafe { bpf_ktime_get_ns() }
}

/// The verifier proves that nothing panics; the compiler wants a handler all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel reads the licence to decide which helpers a program may call.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
