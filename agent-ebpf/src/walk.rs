//! `iter/tcp`: sockets that were open before a policy covered them.
//!
//! The kernel runs it for each TCP socket of the network namespace in which the iterator was
//! opened, with the socket's lock held.

use core::ffi::c_void;

use rto_agent_common::{NO_POLICY, SocketState, WalkControl, walk_mode};
use rto_agent_ebpf::counter::Counter;

use crate::{
    hook, lookup,
    options::{Defaults, Target},
    socket::{self, read},
    structs::SockCommon,
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
    if let ESTABLISHED | CLOSE_WAIT = common.state()
        && let Some(control) = tables::walk_control()
    {
        if control.mode == walk_mode::RESTORE {
            restore(sk, control);
        } else if control.cgroup == 0 || common.is_in_cgroup(control.cgroup) {
            apply(sk, common, control);
        }
    }
    0
}

#[inline(always)]
fn apply(sk: *mut c_void, common: SockCommon, control: &WalkControl) {
    let Some((index, policy)) = lookup::policy_of(common.peer(), lookup::Hit::Leave) else {
        tables::count_walked(NO_POLICY, Walked::Seen);
        return;
    };
    let Some(tally) = Tally::of(index) else {
        return;
    };
    tables::count_walked(index, Walked::Seen);
    let Some(state) = socket::storage_of(sk, socket::Missing::Create) else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        tables::count_walked(index, Walked::Refused);
        return;
    };
    if state.policy != NO_POLICY && control.mode == walk_mode::APPLY_TO_NEW {
        tables::count_walked(index, Walked::Kept);
        return;
    }
    let target = Target::socket(sk);
    state.policy = index;
    state.generation = policy.generation;
    state.initial_rto_jiffies = policy.initial_rto_jiffies;
    state.user_timeout_ms = policy.user_timeout_ms;
    let taken = target.apply(state, policy, defaults(control), Some(tally))
        & target.user_timeout(state, policy.user_timeout_ms, Some(tally))
        & hook::enable_on(target, state, Some(tally));
    tally.add(Counter::OPEN_SOCKETS, 1);
    tables::count_walked(index, Walked::Changed);
    if !taken {
        tables::count_walked(index, Walked::Refused);
    }
}

#[inline(always)]
fn restore(sk: *mut c_void, control: &WalkControl) {
    let Some(state) = socket::storage_of(sk, socket::Missing::None) else {
        return;
    };
    let policy = state.policy;
    if policy == NO_POLICY {
        return;
    }
    tables::count_walked(policy, Walked::Seen);
    let target = Target::socket(sk);
    let changed = has_changes(state);
    let taken = target.restore(state, defaults(control), None);
    hook::disable_on(target, state);
    state.policy = NO_POLICY;
    if changed {
        tables::count_walked(policy, Walked::Changed);
    }
    if !taken {
        tables::count_walked(policy, Walked::Refused);
    }
}

/// Whether an option of the socket is a policy's.
#[inline(always)]
fn has_changes(state: &SocketState) -> bool {
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
