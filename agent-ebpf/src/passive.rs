//! Connections that this host accepts.

use core::hint::cold_path;

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{Policy, direction, event::kind, policy_flags};
use rto_agent_ebpf::counter::Counter;

use crate::{
    active, events, fallback, handshake, hook, lookup,
    options::{self, Target},
    socket, storage, syn_ack_rto,
    tables::Tally,
    unstored,
};

/// TIMEOUT_INIT of a connection request: the timeout of its SYN-ACK. There is no socket yet that could remember the
/// policy, so the accepted connection looks it up once more. Under SYN cookies the kernel does not run TIMEOUT_INIT,
/// because it keeps no request that could retransmit a SYN-ACK (`tcp_conn_request()`, Linux 6.12).
#[inline(always)]
pub(crate) fn syn_ack_timeout(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    // A connecting socket that received a SYN instead of a SYN-ACK (simultaneous open).
    if socket::is_full(ctx) && socket::packets_out(ctx) != 0 {
        cold_path();
        return active::asked_again(ops);
    }
    let Some((arm, policy)) = lookup::policy_of_peer(ctx, lookup::Hit::Count) else {
        return 0;
    };
    Tally::of(arm, direction::PASSIVE).add_one(Counter::ATTEMPTS);
    let jiffies = syn_ack_rto::jiffies(ctx, policy);
    if jiffies != 0 && !fallback::holds(arm, policy, direction::PASSIVE) {
        ctx.set_reply(jiffies);
    }
    0
}

/// PASSIVE_ESTABLISHED_CB: the last ACK of the handshake has arrived. (Under TCP Fast Open, only the SYN with data has
/// arrived.)
#[inline(always)]
pub(crate) fn established(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some((arm, policy)) = lookup::policy_or_unmatched(ctx, lookup::Hit::Leave) else {
        return 0;
    };
    let tally = Tally::of(arm, direction::PASSIVE);
    if !unstored::can_accept(ctx, &mut storage, policy)
        || !Target::apply_unremembered(ctx, policy, tally)
    {
        cold_path();
        return established_with_storage(ops, arm, policy);
    }
    hook::enable_without_storage(ctx, direction::PASSIVE, tally);
    unstored::established(ctx, arm, policy, direction::PASSIVE);
    0
}

/// [`established`] for a connection with storage.
#[inline(never)]
fn established_with_storage(ops: *mut bpf_sock_ops, arm: u32, policy: &Policy) -> u32 {
    if policy.flags & policy_flags::DRAINING != 0 {
        return 0;
    }
    // SAFETY: no other `Storage` is in use.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let tally = Tally::of(arm, direction::PASSIVE);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return 0;
    };
    let retransmissions = socket::total_retrans(ctx);
    handshake::note(ops, state, arm, policy, direction::PASSIVE);
    let policys_jiffies = syn_ack_rto::jiffies(ctx, policy);
    // The program cannot know whether a fallback was in force when the request arrived.
    let lets_through = fallback::lets_through(arm, policy, direction::PASSIVE);
    let initial_rto_jiffies = policys_jiffies & lets_through;
    state.options.epoch &= lets_through;
    let srtt_us = socket::srtt_us(ctx);
    let took_us = if retransmissions == 0 { srtt_us } else { 0 };
    handshake::ended(
        &mut state.handshake,
        retransmissions,
        u64::from(took_us) * 1000,
    );
    state.handshake.initial_rto_jiffies = 0;
    let is_either = srtt_us == 0 || srtt_us >= syn_ack_rto::microseconds(policys_jiffies);
    state.handshake.initial_rto_us = if lets_through == 0 && is_either {
        // Retransmissions may be spurious with the policy's initial RTO, but not with the kernel's: they stay
        // undecided.
        0
    } else {
        syn_ack_rto::microseconds(initial_rto_jiffies)
    };
    state.watch.srtt_sampled_ns = socket::now();
    options::apply(ops, state, policy, tally);
    if initial_rto_jiffies != 0 && retransmissions >= 2 {
        handshake::restore_window(ctx, direction::PASSIVE, 0, tally);
    }
    hook::enable(ops, state, tally);
    handshake::established(ctx.ops, state, retransmissions, tally);
    if retransmissions != 0 {
        tally.add(Counter::HANDSHAKE_RETRANSMISSIONS, retransmissions.into());
        let timer = match initial_rto_jiffies {
            0 => syn_ack_rto::kernel_jiffies(),
            jiffies => jiffies,
        };
        events::tell(ctx, state, kind::SYN_ACK, retransmissions, timer);
    }
    0
}
