//! `iter/tcp`: sockets that were open before a policy covered them.
//!
//! The kernel runs it for each TCP socket of the network namespace in which the iterator was
//! opened, with the socket's lock held.

use core::ffi::c_void;

use rto_agent_common::{
    NO_POLICY, SocketState, UNMATCHED, WalkControl, direction, settled, socket_flags, walk_mode,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    hook, lookup,
    options::{Defaults, Target},
    socket::{self, read},
    structs::SockCommon,
    syn_retries,
    tables::{self, Tally, Walked},
};

/// `struct bpf_iter__tcp`.
#[repr(C)]
struct Context {
    meta: *mut c_void,
    sk_common: *mut c_void,
    uid: u32,
}

// `BPF_TCP_*` of the states in which data may still be sent.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;

#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
extern "C" fn rto_walk(ctx: *const Context) -> i32 {
    // SAFETY: a field of the context.
    let sk = unsafe { read(&raw const (*ctx).sk_common) };
    // The last call has no socket.
    if sk.is_null() {
        return 0;
    }
    // SAFETY: not null, and the verifier knows it as what it is.
    let common = unsafe { SockCommon::new(sk) };
    let Some(control) = tables::walk_control() else {
        return 0;
    };
    if control.mode == walk_mode::RESTORE {
        // In any state: options are set before the SYN, and count until the last ACK.
        restore(sk, control);
    } else if let ESTABLISHED | CLOSE_WAIT = common.state()
        && (control.cgroup == 0 || common.is_in_cgroup(control.cgroup))
    {
        apply(sk, common, control);
    }
    0
}

#[inline(always)]
fn apply(sk: *mut c_void, common: SockCommon, control: &WalkControl) {
    let Some((index, policy)) = lookup::policy_of(common.peer(), lookup::Hit::Leave) else {
        tables::count_walked(NO_POLICY, Walked::Seen);
        return;
    };
    tables::count_walked(index, Walked::Seen);
    let Some(state) = socket::storage_of(sk, socket::Missing::Create) else {
        Tally::of(index, direction::UNKNOWN).add(Counter::STORAGE_FAILURES, 1);
        tables::count_walked(index, Walked::Refused);
        return;
    };
    let is_new = matches!(state.policy, NO_POLICY | UNMATCHED);
    if state.policy == NO_POLICY {
        state.direction = direction::UNKNOWN;
    }
    let tally = Tally::of(index, state.direction);
    let keeps_kernel_timers = state.flags & socket_flags::KERNEL_TIMERS != 0;
    if keeps_kernel_timers || (!is_new && control.mode == walk_mode::APPLY_TO_NEW) {
        tables::count_walked(index, Walked::Kept);
        return;
    }
    let target = Target::socket(sk);
    if state.policy != index || state.generation != policy.generation {
        if state.in_question != 0 {
            // Its handshake does not count for the new policy.
            Tally::of_socket(state).add(Counter::UNDECIDED, state.in_question.into());
            state.in_question = 0;
        }
        state.initial_rto_jiffies = policy.initial_rto_jiffies;
        state.initial_rto_us = policy.initial_rto_us;
    }
    state.policy = index;
    state.generation = policy.generation;
    state.user_timeout_ms = policy.user_timeout_ms;
    state.settled = 0;
    target.apply(state, policy, policy.rto_max_ms, defaults(control), tally);
    target.user_timeout(state, policy.user_timeout_ms, tally);
    let settled = outcome(state);
    let has_hook = hook::enable_on(target, state, tally);
    if is_new {
        tally.add(Counter::OPEN_SOCKETS, 1);
    }
    if settled & settled::CHANGED != 0 {
        tables::count_walked(index, Walked::Changed);
    }
    if settled & settled::REFUSED != 0 || !has_hook {
        tables::count_walked(index, Walked::Refused);
    }
}

#[inline(always)]
fn restore(sk: *mut c_void, control: &WalkControl) {
    let Some(state) = socket::storage_of(sk, socket::Missing::None) else {
        return;
    };
    let touched = state.policy != NO_POLICY
        || is_set(state)
        || state.syn_retries_set != 0
        || state.cb_flags_added != 0;
    if !touched {
        return;
    }
    // A socket of a policy that is gone, or that was set before its policy was chosen, counts for none.
    let policy = match tables::owner(state) {
        UNMATCHED => NO_POLICY,
        policy => policy,
    };
    tables::count_walked(policy, Walked::Seen);
    let target = Target::socket(sk);
    state.settled = 0;
    target.restore(state, defaults(control), Tally::NOBODY);
    let settled = outcome(state);
    syn_retries::restore(target, state);
    hook::disable_on(target, state);
    state.policy = NO_POLICY;
    if settled & settled::CHANGED != 0 {
        tables::count_walked(policy, Walked::Changed);
    }
    if settled & settled::REFUSED != 0 {
        tables::count_walked(policy, Walked::Refused);
    }
}

/// [`SocketState::settled`], read from memory: see there.
#[inline(always)]
fn outcome(state: &SocketState) -> u32 {
    // SAFETY: a reference is valid.
    unsafe { read(&raw const state.settled) }
}

/// Whether an option of the socket is a policy's.
#[inline(always)]
fn is_set(state: &SocketState) -> bool {
    let set = state.rto_min.is_set
        | state.delack_max.is_set
        | state.thin_linear.is_set
        | state.rto_max.is_set
        | state.user_timeout.is_set;
    set != 0
}

#[inline(always)]
fn defaults(control: &WalkControl) -> Defaults {
    Defaults {
        rto_min_us: control.rto_min_us,
        rto_max_ms: control.rto_max_ms,
    }
}
