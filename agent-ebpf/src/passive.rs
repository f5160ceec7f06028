//! Connections this host accepts.

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{direction, event::kind};
use rto_agent_ebpf::counter::Counter;

use crate::{
    active, events, handshake, hook, lookup,
    options::{KERNEL, Target},
    socket, syn_ack_rto,
    tables::Tally,
};

/// TIMEOUT_INIT of a connection request: its SYN-ACK's timeout. There is no socket yet that could
/// remember the policy, so that the accepted connection looks it up once more. Under SYN cookies
/// the kernel does not ask: nothing is kept that could send a SYN-ACK again.
#[inline(always)]
pub(crate) fn syn_ack_timeout(ctx: &SockOpsContext) {
    // A full socket with storage is one that connected and got a SYN instead of a SYN-ACK.
    if let Some(state) = socket::policy_state(ctx) {
        active::answer(ctx, state);
        return;
    }
    let Some((index, policy)) = lookup::policy_of_peer(ctx, lookup::Hit::Count) else {
        return;
    };
    let jiffies = syn_ack_rto::jiffies(ctx, policy);
    if jiffies != 0 {
        Tally::of(index, direction::PASSIVE).add(Counter::INITIAL_RTOS_SET, 1);
        ctx.set_reply(jiffies);
    }
}

/// PASSIVE_ESTABLISHED_CB: the last ACK of the handshake has come. (Under TCP Fast Open the data
/// of the SYN has, and the ACK has not.)
#[inline(always)]
pub(crate) fn established(ctx: &SockOpsContext) {
    if let Some(state) = socket::policy_state(ctx) {
        active::finish(ctx, state);
        return;
    }
    let Some((index, policy)) = lookup::policy_or_unmatched(ctx, lookup::Hit::Leave) else {
        return;
    };
    let tally = Tally::of(index, direction::PASSIVE);
    let Some(state) = socket::storage(ctx, socket::Missing::Create) else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return;
    };
    let retransmissions = socket::total_retrans(ctx);
    let initial_rto_jiffies = syn_ack_rto::jiffies(ctx, policy);
    state.srtt_sampled_ns = socket::now();
    state.policy = index;
    state.generation = policy.generation;
    state.direction = direction::PASSIVE;
    state.initial_rto_us = syn_ack_rto::microseconds(initial_rto_jiffies);
    state.retransmissions_counted = retransmissions;
    handshake::begin(state, retransmissions, 0);
    let target = Target::of(ctx);
    target.apply(state, policy, policy.rto_max_ms, KERNEL, tally);
    target.user_timeout(state, policy.user_timeout_ms, tally);
    hook::enable(ctx, state, tally);
    handshake::established(ctx, state, retransmissions);
    if retransmissions != 0 {
        tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, retransmissions.into());
        let timer = match initial_rto_jiffies {
            0 => syn_ack_rto::kernel_jiffies(),
            jiffies => jiffies,
        };
        events::tell(ctx, kind::SYN_ACK, retransmissions, timer);
    }
}
