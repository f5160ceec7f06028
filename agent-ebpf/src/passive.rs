//! Connections this host accepts.

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{direction, event::kind};
use rto_agent_ebpf::counter::Counter;

use crate::{
    active, events, handshake, hook, lookup,
    options::{KERNEL, Target},
    socket,
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
    if let Some((index, policy)) = lookup::policy_of_peer(ctx, lookup::Hit::Count)
        && policy.initial_rto_jiffies != 0
    {
        Tally::of(index, direction::PASSIVE).add(Counter::INITIAL_RTOS_SET, 1);
        ctx.set_reply(policy.initial_rto_jiffies);
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
    let Some((index, policy)) = lookup::policy_or_unlisted(ctx, lookup::Hit::Leave) else {
        return;
    };
    let tally = Tally::of(index, direction::PASSIVE);
    let Some(state) = socket::storage(ctx, socket::Missing::Create) else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return;
    };
    let retransmissions = socket::total_retrans(ctx);
    state.handshake_start_ns = socket::now();
    state.srtt_sampled_ns = state.handshake_start_ns;
    state.policy = index;
    state.generation = policy.generation;
    state.direction = direction::PASSIVE;
    state.initial_rto_us = policy.initial_rto_us;
    state.retransmissions_counted = retransmissions;
    handshake::begin(state, retransmissions);
    let target = Target::of(ctx);
    target.apply(state, policy, KERNEL, tally);
    target.user_timeout(state, policy.user_timeout_ms, tally);
    hook::enable(ctx, state, tally);
    handshake::established(ctx, state, retransmissions, 0);
    if retransmissions != 0 {
        tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, retransmissions.into());
        let timer = policy.initial_rto_jiffies;
        events::tell(ctx, kind::SYN_ACK, retransmissions, timer);
    }
}
