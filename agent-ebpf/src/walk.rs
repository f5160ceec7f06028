//! `iter/tcp`: applies policies to sockets that were already open, and restores sockets.
//!
//! The kernel runs it for each TCP socket of the network namespace in which the iterator was opened, and holds the
//! socket's lock (`bpf_iter_tcp_seq_show()`, Linux 6.12).

use core::ffi::c_void;

use rto_agent_common::{
    NO_POLICY, Options, Policy, UNMATCHED, WalkControl, arm, direction, policy_flags, settled,
    socket_flags, walk_mode,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    hook, lookup,
    options::{Defaults, Target},
    socket::read,
    storage::Storage,
    structs::SockCommon,
    tables::{self, Tally, Walked},
    unstored,
};

/// `struct bpf_iter__tcp`.
#[repr(C)]
struct Context {
    meta: *mut c_void,
    sk_common: *mut c_void,
    uid: u32,
}

/// The arm of connections that no entry covers.
const UNMATCHED_ARM: u32 = arm::treated(UNMATCHED);

// `BPF_TCP_*`. In ESTABLISHED and CLOSE_WAIT the socket may still send data.
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
    // SAFETY: not null, and the verifier knows its type.
    let common = unsafe { SockCommon::new(sk) };
    let Some(control) = tables::walk_control() else {
        return 0;
    };
    if control.mode == walk_mode::RESTORE {
        // In any state, because options are set before the first SYN and matter until the last ACK.
        restore(sk, common, control);
    } else if let ESTABLISHED | CLOSE_WAIT = common.state()
        && is_in_cgroup(common, control)
    {
        apply(sk, common, control);
    }
    0
}

#[inline(always)]
fn apply(sk: *mut c_void, common: SockCommon, control: &WalkControl) {
    let Some((arm, policy)) = lookup::policy_of(common) else {
        tables::count_walked(arm::NONE, Walked::Seen);
        return;
    };
    tables::count_walked(arm, Walked::Seen);
    // SAFETY: this run has no other `Storage`, and the kernel holds the lock.
    let mut storage = unsafe { Storage::of_socket(sk) };
    let target = Target::socket(sk);
    let callbacks = common.callbacks();
    let is_new_to_storage = storage.find().is_none();
    // The socket has had a policy, without storage, since its connection began.
    let has_policy = is_new_to_storage && unstored::are_ours(callbacks);
    if has_policy && (control.mode == walk_mode::APPLY_TO_NEW || is_as_policy_says(target, policy))
    {
        tables::count_walked(arm, Walked::Kept);
        return;
    }
    let Some(state) = storage.make() else {
        Tally::of(arm, direction::UNKNOWN).add(Counter::STORAGE_FAILURES, 1);
        tables::count_walked(arm, Walked::Refused);
        return;
    };
    if is_new_to_storage {
        target.remember(&mut state.options);
    }
    if has_policy {
        state.direction = unstored::direction_of(callbacks);
    } else if state.arm == arm::NONE {
        state.direction = direction::UNKNOWN;
    }
    let is_new = !has_policy && matches!(arm::slot(state.arm), NO_POLICY | UNMATCHED);
    let tally = Tally::of(arm, state.direction);
    let keeps_kernel_timers = state.flags & socket_flags::KERNEL_TIMERS != 0;
    if keeps_kernel_timers || (!is_new && control.mode == walk_mode::APPLY_TO_NEW) {
        tables::count_walked(arm, Walked::Kept);
        return;
    }
    let generation = tables::generation(arm, policy);
    if state.arm != arm || state.generation != generation {
        let handshake = &mut state.handshake;
        if handshake.in_question != 0 {
            // The handshake does not count for the new policy.
            let undecided = handshake.in_question.into();
            handshake.in_question = 0;
            Tally::of_socket(state).add(Counter::UNDECIDED, undecided);
        }
        state.handshake.initial_rto_jiffies = policy.initial_rto_jiffies;
        state.handshake.initial_rto_us = policy.initial_rto_us;
        state.options.epoch = 0;
    }
    state.arm = arm;
    state.generation = generation;
    if state.watch.weight == 0 {
        state.watch.weight = 1;
    }
    state.options.settled = 0;
    target.apply(state, policy, Defaults::Namespace(control), tally);
    let settled = outcome(&state.options);
    let has_hook = hook::enable_on(target, state, tally);
    if is_new {
        tally.add(Counter::OPEN_SOCKETS, 1);
    }
    if settled & settled::CHANGED != 0 {
        tables::count_walked(arm, Walked::Changed);
    }
    if settled & settled::REFUSED != 0 || !has_hook {
        tables::count_walked(arm, Walked::Refused);
    }
}

#[inline(always)]
fn is_in_cgroup(common: SockCommon, control: &WalkControl) -> bool {
    control.cgroup == WalkControl::ANY || common.is_in_cgroup(control.cgroup)
}

/// Whether a socket without storage already has the settings of its policy, so that it needs no storage.
#[inline(always)]
fn is_as_policy_says(target: Target, policy: &Policy) -> bool {
    policy.flags & policy_flags::STORED == 0 && target.has_timers_of(policy)
}

#[inline(always)]
fn restore(sk: *mut c_void, common: SockCommon, control: &WalkControl) {
    let target = Target::socket(sk);
    // SAFETY: this run has no other `Storage`, and the kernel holds the lock.
    let mut storage = unsafe { Storage::of_socket(sk) };
    let Some(state) = storage.find() else {
        // Sockets of another agent look the same; only the cgroup distinguishes them.
        if unstored::are_ours(common.callbacks()) && is_in_cgroup(common, control) {
            restore_unremembered(target, common, control);
        }
        return;
    };
    let touched = state.arm != arm::NONE || state.options.is_any_set();
    // The program stays for sockets that are connecting.
    if !touched || state.flags & socket_flags::SYN_SCHEDULE != 0 {
        return;
    }
    // A socket whose policy is gone, or whose options were set before its policy was chosen, is counted for no policy.
    let policy = match tables::owner(state) {
        UNMATCHED_ARM => arm::NONE,
        policy => policy,
    };
    tables::count_walked(policy, Walked::Seen);
    state.options.settled = 0;
    target.restore(state, Defaults::Namespace(control), Tally::NOBODY);
    let settled = outcome(&state.options);
    hook::unmark_on(target);
    state.arm = arm::NONE;
    count(policy, settled);
}

/// As [`restore`], for a socket without storage. It is counted for the policy that covers its peer now.
#[inline(always)]
fn restore_unremembered(target: Target, common: SockCommon, control: &WalkControl) {
    let found = lookup::policy_of(common);
    let policy = found.map_or(arm::NONE, |(arm, _)| arm);
    tables::count_walked(policy, Walked::Seen);
    let settled = target.restore_unremembered(Defaults::Namespace(control));
    hook::unmark_on(target);
    count(policy, settled);
}

#[inline(always)]
fn count(policy: u32, settled: u8) {
    if settled & settled::CHANGED != 0 {
        tables::count_walked(policy, Walked::Changed);
    }
    if settled & settled::REFUSED != 0 {
        tables::count_walked(policy, Walked::Refused);
    }
}

/// [`Options::settled`], read from memory; its documentation gives the reason.
#[inline(always)]
fn outcome(options: &Options) -> u8 {
    // SAFETY: a reference is valid for reads.
    unsafe { read(&raw const options.settled) }
}
