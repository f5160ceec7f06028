//! Connections without storage.
//!
//! A connection gets storage at its first loss, or when it is established and drawn for sampling. Until then the program
//! remembers nothing about it: its state is on the socket itself.
//!
//! | state      | begins at                           | callbacks           | gets storage at                    |
//! |------------|-------------------------------------|---------------------|------------------------------------|
//! | connecting | TIMEOUT_INIT, before the first SYN  | RTO_CB, RETRANS_CB  | the first SYN timeout [1]          |
//! | opened     | ACTIVE_ESTABLISHED_CB               | RTO_CB, RETRANS_CB  | sampling, RTO_CB or RETRANS_CB [2] |
//! | accepted   | PASSIVE_ESTABLISHED_CB              | RETRANS_CB          | sampling or RETRANS_CB [2]         |
//!
//! All of them have the mark [`hook::MARK`] among their callbacks.
//!
//! [1] RTO_CB, which the kernel runs before it doubles `icsk_rto` (`tcp_retransmit_timer()`, Linux 6.18); or the
//! TIMEOUT_INIT after it, if another program has cleared the callbacks ([`crate::active`]).
//! [2] [`established`], [`at_loss`].
//!
//! A policy without [`policy_flags::STORED`] sets at most rto_min and delack_max on such a socket, at TIMEOUT_INIT or
//! PASSIVE_ESTABLISHED_CB, and only if it has the kernel's own values ([`Target::apply_unremembered`]).
//!
//! | what           | is recognised by                                   | is restored by                       |
//! |----------------|----------------------------------------------------|--------------------------------------|
//! | the connection | the mark ([`are_ours`]); a socket that connects    |                                      |
//! |                | and has storage also has STATE_CB                  |                                      |
//! | its direction  | RTO_CB ([`direction_of`]). An accepted connection  |                                      |
//! |                | does without: each of its retransmission timeouts  |                                      |
//! |                | also retransmits. Where another program has added  |                                      |
//! |                | RTO_CB: the backlog inherited from the listener    |                                      |
//! | an option      | its value: a policy has set it ([`lasting`])       | its storage, once it has some; a     |
//! |                |                                                    | walk; connect() to an address        |
//! |                |                                                    | without an entry                     |
//! | the callbacks  |                                                    | they stay, without the mark: other   |
//! |                |                                                    | programs may have requested them     |
//!
//! Invariant: a connection whose state could not be recognised this way has storage from the start ([`can_connect`],
//! [`can_accept`]).

use core::hint::cold_path;

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    GOOD_US, NO_POLICY, Options, Policy, Remembered, SockOpt, SocketState, UNMATCHED, also, arm,
    direction, lasting, policy_flags, statistics,
};
use rto_agent_ebpf::{counter::Counter, verdict::LONG_US};

use crate::{
    discovery, events, fallback, handshake,
    hook::{self, MARK, RETRANS_CB_FLAG, RTO_CB_FLAG},
    kernel_sock, lookup,
    options::{Defaults, Target, each_option},
    socket::{self, constant},
    storage::{self, Storage},
    tables::{self, Tally, Times},
};

/// Samples 1 in N loss-free connections until they close; 1: all. The loader writes it.
#[unsafe(no_mangle)]
static SAMPLING: u32 = 1;

/// Whether a connection of this policy can start without storage.
#[inline(always)]
pub(crate) fn can_connect(ctx: &SockOpsContext, policy: &Policy) -> bool {
    policy.flags & (policy_flags::STORED | policy_flags::DRAINING) == 0
        // With callbacks, the socket was connected before, or another program requested them and may clear them.
        && !hook::has_callbacks(ctx)
        && !kernel_sock::is_special(ctx)
        // A client that listens to events needs the process, which is kept in the storage.
        && !events::need_storage()
}

/// Whether an accepted connection needs no storage so far.
#[inline(always)]
pub(crate) fn can_accept(ctx: &SockOpsContext, storage: &mut Storage<'_>, policy: &Policy) -> bool {
    policy.flags & (policy_flags::STORED | policy_flags::DRAINING) == 0
        && socket::total_retrans(ctx) == 0
        // Another program requested them and may clear them.
        && !hook::has_callbacks(ctx)
        // `rto_clone` may have created storage.
        && (policy.rto_min_us == 0 || storage.find().is_none())
}

/// The callbacks that a connection without storage requests, and the mark. (Without a branch, whose two sides the
/// verifier would both follow.)
#[inline(always)]
pub(crate) fn callbacks(direction: u32) -> u32 {
    const { assert!(RTO_CB_FLAG == 1 && direction::ACTIVE == 0 && direction::PASSIVE == 1) };
    MARK | RETRANS_CB_FLAG | (RTO_CB_FLAG & !direction)
}

/// Whether the callbacks of a socket are the program's.
#[inline(always)]
pub(crate) fn are_ours(flags: u32) -> bool {
    flags & MARK != 0
}

/// The direction of a connection without storage, judged by its callbacks; see [`callbacks`].
#[inline(always)]
pub(crate) fn direction_of(flags: u32) -> u32 {
    !flags & RTO_CB_FLAG
}

/// Counts a connection that has just been established. Without retransmissions its handshake took one round trip, which
/// is its first RTT sample. One in [`SAMPLING`] gets storage, for later samples.
#[inline(always)]
pub(crate) fn established(ctx: &SockOpsContext, arm: u32, policy: &Policy, direction: u32) {
    if policy.flags & policy_flags::AT_ESTABLISHED != 0 {
        cold_path();
        more_at_established(ctx.ops, arm, policy, direction);
    }
    if !tables::counts(statistics::ON) {
        return;
    }
    let tally = Tally::of(arm, direction);
    let connect_time_us = socket::srtt_us(ctx);
    if connect_time_us >= LONG_US {
        cold_path();
        long_handshake(ctx.ops, arm, policy, direction);
        return;
    }
    tally.established_one(connect_time_us);
    let weight = sampled(ctx);
    if weight != 0 {
        cold_path();
        store(ctx.ops, arm, policy, direction, weight);
    }
}

/// Counts a connection whose handshake took [`LONG_US`] or more. It gets storage for later RTTs, which show whether
/// that is the path RTT.
#[inline(never)]
fn long_handshake(ops: *mut bpf_sock_ops, arm: u32, policy: &Policy, direction: u32) -> u32 {
    let us = socket::srtt_us(&SockOpsContext::new(ops));
    let tally = Tally::of(arm, direction);
    tally.time(Times::Lossy, us.into(), 1);
    if us > GOOD_US {
        tally.add(Counter::LATE, 1);
    }
    store(ops, arm, policy, direction, LONG)
}

/// The extra work that some policies need for each connection established without a retransmission.
#[inline(never)]
fn more_at_established(ops: *mut bpf_sock_ops, arm: u32, policy: &Policy, direction: u32) -> u32 {
    let more = policy.flags;
    if more & policy_flags::GUARDED != 0 {
        fallback::established(arm, policy, direction, 0);
    }
    let ctx = &SockOpsContext::new(ops);
    if tables::counts(statistics::UNMATCHED)
        && more & policy_flags::DISCOVERS != 0
        && socket::srtt_us(ctx) < LONG_US
    {
        discovery::note(ctx, 0);
    }
    0
}

/// The number of connections that this one represents in samples, drawn by its initial sequence number; 0: it is not
/// sampled.
#[inline(always)]
fn sampled(ctx: &SockOpsContext) -> u32 {
    let one_in = constant(&SAMPLING);
    if one_in <= 1 {
        return 1;
    }
    let chosen = (u64::from(socket::sequence_hash(ctx)) * u64::from(one_in)) >> 32 == 0;
    if chosen { one_in } else { 0 }
}

/// The state of an established connection of a policy; its storage is created at its first loss.
#[inline(always)]
pub(crate) fn at_loss<'a>(
    ctx: &SockOpsContext,
    storage: &'a mut Storage<'_>,
) -> Option<&'a mut SocketState> {
    if storage.of_policy().is_none() {
        if !hook::is_marked(ctx) {
            return None;
        }
        store_at_loss(ctx.ops);
    }
    let state = storage.of_policy()?;
    if !hook::is_marked(ctx) {
        cold_path();
        hook::enable(ctx.ops, state, Tally::NOBODY);
    }
    // Every connection with a loss is counted; only loss-free ones are sampled.
    state.watch.weight = 1;
    Some(state)
}

#[inline(never)]
fn store_at_loss(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = SockOpsContext::new(ops);
    if tables::counts(statistics::ON)
        && let Some((arm, policy)) = lookup::arm_at_loss(&ctx)
        && arm != arm::NONE
    {
        let direction = if kernel_sock::was_accepted(&ctx) {
            direction::PASSIVE
        } else {
            direction_of(socket::callbacks(&ctx))
        };
        store(ops, arm, policy, direction, 1);
    }
    0
}

/// The weight of a connection whose handshake is to be judged. It represents only itself.
const LONG: u32 = 0;

/// Counts a connection with a loss whose callbacks another program has overwritten. Whether the program had treated it,
/// and its direction, are not known.
#[inline(never)]
pub(crate) fn lost_callbacks(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    if hook::is_marked(ctx) || !tables::counts(statistics::ON) {
        return 0;
    }
    if let Some((arm, _)) = lookup::arm_at_loss(ctx)
        && !matches!(arm::slot(arm), NO_POLICY | UNMATCHED)
    {
        Tally::of(arm, direction::UNKNOWN).add(Counter::CALLBACKS_LOST, 1);
        events::note_overwritten();
    }
    0
}

/// Creates storage: records the connection's arm, the options that were set on it, and the number of connections that it
/// represents in samples.
#[inline(never)]
pub(crate) fn store(
    ops: *mut bpf_sock_ops,
    arm: u32,
    policy: &Policy,
    direction: u32,
    weight: u32,
) -> u32 {
    // SAFETY: the callers hold no reference to the storage.
    let (_, mut storage) = unsafe { storage::context(ops) };
    let tally = Tally::of(arm, direction);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return 0;
    };
    handshake::note(ops, state, arm, policy, direction);
    remember(ops, &mut state.options);
    if weight == LONG {
        let us = socket::srtt_us(&SockOpsContext::new(ops));
        handshake::ended(&mut state.handshake, 0, u64::from(us) * 1000);
    } else {
        state.watch.weight = weight;
    }
    state.watch.srtt_sampled_ns = socket::now();
    hook::enable(ops, state, tally);
    0
}

/// [`Target::remember`] for a context's socket, in one place of the program.
#[inline(never)]
pub(crate) fn remember(ops: *mut bpf_sock_ops, options: &mut Options) {
    Target::of(&SockOpsContext::new(ops)).remember(options);
}

impl Target {
    /// Applies a policy without [`rto_agent_common::policy_flags::STORED`] if the socket has the kernel's own values,
    /// so that there is nothing to remember. Otherwise it does nothing and returns false.
    #[inline(always)]
    pub(crate) fn apply_unremembered(ctx: &SockOpsContext, policy: &Policy, tally: Tally) -> bool {
        let mut sets_any = false;
        each_option!(OPTION => {
            sets_any |= OPTION.is(also::RECOGNISED) && OPTION.wanted(policy).is_some();
        });
        if !sets_any {
            return true;
        }
        let target = Self::of(ctx);
        let is_kernels =
            kernel_sock::has_kernels_timers(ctx).unwrap_or_else(|| target.has_kernels_values());
        if !is_kernels {
            return false;
        }
        each_option!(OPTION => {
            if OPTION.is(also::RECOGNISED) && let Some(value) = OPTION.wanted(policy) {
                target.set(OPTION, value, tally);
            }
        });
        true
    }

    /// Whether the socket has the kernel's own value of each option that a policy may set without storage.
    #[inline(always)]
    fn has_kernels_values(self) -> bool {
        each_option!(OPTION => {
            if OPTION.is(also::RECOGNISED) && self.get(OPTION) != former(OPTION) {
                return false;
            }
        });
        true
    }

    /// Whether a socket without storage has exactly the timers that its policy sets.
    #[inline(always)]
    pub(crate) fn has_timers_of(self, policy: &Policy) -> bool {
        let mut has_all = true;
        each_option!(OPTION => {
            if OPTION.is(also::RECOGNISED) {
                has_all &= self.set_by_policy(OPTION) == OPTION.wanted(policy);
            }
        });
        has_all
    }

    /// Remembers options that were set without storage.
    #[inline(always)]
    pub(crate) fn remember(self, options: &mut Options) {
        each_option!(OPTION => {
            if OPTION.is(also::RECOGNISED)
                && !options.is_set(OPTION)
                && let Some(value) = self.set_by_policy(OPTION)
            {
                options.note(OPTION, value, Remembered::UNKNOWN);
            }
        });
    }

    /// The value of an option, if a policy has set it.
    #[inline(always)]
    fn set_by_policy(self, option: SockOpt) -> Option<u32> {
        self.get(option).filter(|value| {
            former(option) != Some(*value) && tables::was_set(lasting::bit(option), *value)
        })
    }

    /// Restores options that were set without storage; returns [`settled`] bits.
    #[inline(always)]
    pub(crate) fn restore_unremembered(self, defaults: Defaults<'_>) -> u8 {
        let mut outcome = 0;
        each_option!(OPTION => {
            if OPTION.is(also::RECOGNISED)
                && self.set_by_policy(OPTION).is_some()
                && let Some(former) = former(OPTION)
            {
                outcome |= self.put_back(OPTION, defaults.of(OPTION, former));
            }
        });
        outcome
    }
}

/// The kernel's own value of an option that a policy sets.
#[inline(always)]
fn former(option: SockOpt) -> Option<u32> {
    option.row().kept.map(|kept| kept.former)
}
