//! The end of a handshake: how long it took, and what its retransmissions were good for.

use core::arch::asm;

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    GAINS, Handshake, Policy, SLOW_HANDSHAKE_US, SocketState, UNMATCHED, arm, direction,
    policy_flags, socket_flags, statistics,
};
use rto_agent_ebpf::{
    counter::Counter,
    ops::{Change, change},
    verdict::{Verdict, after_samples, spurious_at_most, syn_ack_gain_us},
};

use crate::{
    brake, discovery,
    hook::{self, argument},
    options::Target,
    socket::{self, read},
    storage::{self, Storage},
    tables::{self, Tally, Times},
};

/// Least time between two samples of a connection's smoothed RTT; 0: none but the one at its end. The
/// loader writes it.
#[unsafe(no_mangle)]
static RTT_INTERVAL_NS: u64 = 0;

/// Of so many connections without storage one is measured to its end; 1: all. The loader writes it.
#[unsafe(no_mangle)]
static SAMPLING: u32 = 1;

/// Whether smoothed RTTs are sampled while connections last.
#[inline(always)]
pub(crate) fn samples_rtt() -> bool {
    rtt_interval_ns() != 0
}

#[inline(always)]
fn rtt_interval_ns() -> u64 {
    // SAFETY: a constant, which the loader may have written before the program was loaded.
    unsafe { read(&raw const RTT_INTERVAL_NS) }
}

/// For how many the connection at hand is to be measured; 0: it is not. Its initial sequence number decides.
#[inline(always)]
fn sampled(ctx: &SockOpsContext) -> u32 {
    // SAFETY: a constant, which the loader may have written before the program was loaded.
    let one_in = unsafe { read(&raw const SAMPLING) };
    if one_in <= 1 {
        return 1;
    }
    let chosen = (u64::from(socket::sequence_hash(ctx)) * u64::from(one_in)) >> 32 == 0;
    if chosen { one_in } else { 0 }
}

/// Notes whose connection it is.
#[inline(always)]
pub(crate) fn note(
    ctx: &SockOpsContext,
    state: &mut SocketState,
    arm: u32,
    policy: &Policy,
    direction: u32,
) {
    const MEASURES_ACKS: u32 = policy_flags::MEASURES_ACKS / socket_flags::MEASURES_ACKS;
    state.arm = arm;
    state.generation = tables::generation(arm, policy);
    state.direction = direction;
    let measures_acks = policy.flags & policy_flags::MEASURES_ACKS;
    state.flags |= measures_acks / MEASURES_ACKS * u32::from(arm::is_control(arm));
    state.options.epoch = brake::epoch(policy, direction);
    state.handshake.initial_rto_jiffies = policy.initial_rto_jiffies;
    state.handshake.initial_rto_us = policy.initial_rto_us;
    state.handshake.retransmissions_counted = socket::total_retrans(ctx);
    state.watch.weight = 1;
}

/// Notes [`Handshake::ns`] and what is to be asked, before the hook is asked for.
#[inline(always)]
pub(crate) fn begin(handshake: &mut Handshake, retransmissions: u32, ns: u64) {
    handshake.ns = ns;
    handshake.in_question = retransmissions;
    handshake.spurious_at_most = retransmissions;
    handshake.samples = 0;
}

/// Counts a connection that has just been established without storage. With nothing sent again its handshake took a
/// round trip, the first sample of it. One of several goes on with storage.
#[inline(always)]
pub(crate) fn established_clean(
    ctx: &SockOpsContext,
    storage: &mut Storage<'_>,
    arm: u32,
    policy: &Policy,
    direction: u32,
) {
    if !tables::counts(statistics::ON) {
        return;
    }
    let tally = Tally::of(arm, direction);
    tally.add_one(Counter::CONNECTIONS);
    let more = policy.flags & policy_flags::AT_ESTABLISHED;
    if more != 0 {
        more_at_established(ctx, arm, policy, direction);
    }
    if socket::srtt_us(ctx) > SLOW_HANDSHAKE_US {
        tally.add(Counter::SLOW_HANDSHAKES, 1);
    }
    let weight = sampled(ctx);
    if weight != 0
        && let Some(state) = store(ctx, storage, arm, policy, direction)
    {
        state.watch.weight = weight;
        state.watch.srtt_sampled_ns = socket::now();
        if more & policy_flags::TIMED == 0 {
            tally.time(Times::Handshake, socket::srtt_us(ctx).into(), weight);
        }
    }
}

/// What only some policies ask for of each connection that was established without a retransmission.
#[inline(always)]
fn more_at_established(ctx: &SockOpsContext, arm: u32, policy: &Policy, direction: u32) {
    let more = policy.flags;
    if more & policy_flags::BRAKED != 0 {
        brake::credit(arm, policy, direction, 0);
    }
    if more & policy_flags::TIMED != 0 {
        Tally::of(arm, direction).handshake_one(socket::srtt_us(ctx));
    }
    if more & policy_flags::DISCOVERS != 0 {
        discovery::note(ctx, 0);
    }
}

/// Gives storage to a connection that did without so far: notes whose it is, what was set on it, and which callbacks it
/// asked for; what it stands for in samples is itself alone.
#[inline(always)]
pub(crate) fn store<'a>(
    ctx: &SockOpsContext,
    storage: &'a mut Storage<'_>,
    arm: u32,
    policy: &Policy,
    direction: u32,
) -> Option<&'a mut SocketState> {
    let tally = Tally::of(arm, direction);
    let Some(state) = storage.make() else {
        tally.add(Counter::STORAGE_FAILURES, 1);
        return None;
    };
    note(ctx, state, arm, policy, direction);
    Target::of(ctx).remember(&mut state.options);
    state.options.cb_flags_added |= hook::without_storage(direction);
    hook::enable(ctx, state, tally);
    Some(state)
}

/// Counts a connection that has just been established, last of all: what is decided here would be
/// multiplied, for the verifier, with all that follows.
#[inline(always)]
pub(crate) fn established(
    ctx: &SockOpsContext,
    state: &mut SocketState,
    retransmissions: u32,
    tally: Tally,
) {
    if tally.is_nobody() {
        return;
    }
    tally.add(Counter::CONNECTIONS, 1);
    let took_us = state.handshake.ns / 1000;
    let srtt_us = socket::srtt_us(ctx);
    let initial_rto_us = state.handshake.initial_rto_us;
    // A passive handshake is not seen to begin: its request has no storage.
    let time_us = if took_us != 0 {
        took_us
    } else {
        srtt_us.into()
    };
    brake::credit_stored(state, retransmissions);
    if state.arm == arm::treated(UNMATCHED) && tables::counts(statistics::UNMATCHED) {
        discovery::note(ctx, retransmissions);
    }
    if time_us > SLOW_HANDSHAKE_US.into() {
        tally.add(Counter::SLOW_HANDSHAKES, 1);
    }
    if retransmissions == 0 {
        tally.time(Times::Handshake, time_us, 1);
        return;
    }
    tally.add(Counter::RETRANSMITTED_HANDSHAKES, 1);
    let at_most = spurious_at_most(retransmissions, srtt_us, took_us, initial_rto_us);
    state.handshake.spurious_at_most = at_most;
    // Where the answer came late none may be spurious, and the path's time is still not known.
    if srtt_us != 0 && srtt_us < initial_rto_us {
        state.handshake.in_question = 0;
        judge(state, tally, retransmissions, 0, srtt_us);
    }
}

/// Counts what the retransmissions of a handshake were good for, and how long the path took: the whole
/// handshake where the answer was to the first copy, else the least round trip; 0 where none is known.
#[inline(always)]
fn judge(state: &SocketState, tally: Tally, retransmissions: u32, spurious: u32, rtt_us: u32) {
    let took_us = state.handshake.ns / 1000;
    let time_us = if spurious == retransmissions && took_us != 0 {
        took_us
    } else {
        rtt_us.into()
    };
    if time_us != 0 {
        tally.time(Times::Handshake, time_us, 1);
    }
    if spurious != 0 {
        tally.add(Counter::SPURIOUS, spurious.into());
        tally.add(Counter::SPURIOUS_CONNECTIONS, 1);
        brake::judged_spurious(state, spurious);
    }
    let needed = retransmissions.saturating_sub(spurious);
    if needed != 0 {
        let initial_rto_us = state.handshake.initial_rto_us;
        rto_recovered(state.arm, state.direction, needed, initial_rto_us);
    }
}

/// Counts a connection that so many retransmissions brought about, with the initial RTO that was in force. A
/// function with a symbol: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_recovered(arm: u32, direction: u32, needed: u32, initial_rto_us: u32) -> u32 {
    let tally = Tally::of(arm, direction);
    tally.add(Counter::RECOVERED, 1);
    let Some(policy) = tables::settings(arm) else {
        return 0;
    };
    if direction == direction::ACTIVE {
        // Where the connection had another initial RTO, the table says nothing about it: the kernel's own, or
        // that of the policy as it was.
        if initial_rto_us == policy.initial_rto_us {
            let needed = needed as usize;
            let mut index = if needed > GAINS {
                GAINS - 1
            } else {
                needed.wrapping_sub(1)
            };
            // A bound that the verifier sees.
            // SAFETY: arithmetic on one register.
            unsafe {
                asm!("{index} &= {mask}", index = inout(reg) index, mask = const GAINS - 1,
                    options(pure, nomem, nostack));
            }
            // SAFETY: within the table, by the bound; the verifier checks the access.
            let gain = unsafe { read((&raw const policy.gain_us).cast::<i32>().add(index)) };
            count_gain(tally, gain.into());
        }
    } else {
        count_gain(tally, syn_ack_gain_us(needed, initial_rto_us));
    }
    0
}

#[inline(always)]
fn count_gain(tally: Tally, gain_us: i64) {
    if gain_us >= 0 {
        tally.add(Counter::TIME_SAVED, gain_us.unsigned_abs());
    } else {
        tally.add(Counter::TIME_LOST, gain_us.unsigned_abs());
    }
}

const _: () = assert!(GAINS.is_power_of_two() && GAINS <= 255);

/// RTT_CB: a round-trip time was measured, at most one each round trip (`tcp_rtt_estimator()`, Linux
/// 6.12). The least so far contains it already; the smoothed one does not yet.
#[inline(never)]
pub(crate) fn rtt_sample(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.of_policy() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    if state.options.restart_hz != 0 {
        restart(ctx, state, tally);
    }
    if state.flags & socket_flags::MEASURES_ACKS != 0 {
        measure_ack(ctx, tally);
    }
    if state.handshake.in_question != 0 {
        state.handshake.samples += 1;
        reconsider(ctx, state, tally, false);
    }
    let interval_ns = rtt_interval_ns();
    if interval_ns == 0 {
        return 0;
    }
    let now = socket::now();
    if now.wrapping_sub(state.watch.srtt_sampled_ns) < interval_ns {
        return 0;
    }
    state.watch.srtt_sampled_ns = now;
    tally.time(Times::Srtt, socket::srtt_us(ctx).into(), state.watch.weight);
    0
}

/// Counts by how much the ACK came later than the fastest one. The sample is the callback's first argument (Linux 6.10;
/// before, there was none, and it is 0). Another program's answer lies in the same place: less than the least RTT, or
/// more than any, is no sample.
#[inline(always)]
fn measure_ack(ctx: &SockOpsContext, tally: Tally) {
    let (rtt_us, rtt_min_us) = (argument(ctx, 0), socket::rtt_min_us(ctx));
    if rtt_us != 0 && rtt_us >= rtt_min_us && rtt_us <= i32::MAX.cast_unsigned() {
        // 0 is no time.
        tally.time(Times::AckExcess, u64::from(rtt_us - rtt_min_us) + 1, 1);
    }
}

/// rto_min less a round trip, while few segments are outstanding. A lower rto_min takes the RTO down, and
/// a higher one does not take it up again: of a path that is slower for a while than it was, the least RTT
/// counts.
#[inline(always)]
fn restart(ctx: &SockOpsContext, state: &mut SocketState, tally: Tally) {
    let (srtt_us, rtt_min_us) = (socket::srtt_us(ctx), socket::rtt_min_us(ctx));
    if srtt_us == 0 {
        return;
    }
    let rtt_us = if rtt_min_us < srtt_us {
        rtt_min_us
    } else {
        srtt_us
    };
    let outstanding = socket::packets_out(ctx);
    Target::of(ctx).restart(&mut state.options, rtt_us, outstanding, tally);
}

/// STATE_CB: the connection may have ended.
#[inline(never)]
pub(crate) fn state_changed(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: the only one of this run.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    // SAFETY: fields of the context.
    let is_acknowledged =
        unsafe { read(&raw const (*ctx.ops).snd_una) == read(&raw const (*ctx.ops).snd_nxt) };
    // The state changes after the callback (`tcp_set_state()`, Linux 6.12): it is still the former one.
    let change = change(socket::state(ctx), argument(ctx, 1), is_acknowledged);
    if change == Change::Other {
        return 0;
    }
    let Some(state) = storage.of_policy() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    if state.handshake.in_question != 0 {
        reconsider(ctx, state, tally, true);
    }
    if tally.is_nobody() {
        return 0;
    }
    let weight = state.watch.weight;
    if change == Change::Aborted {
        tally.add(Counter::ABORTED, weight.into());
    }
    if socket::total_retrans(ctx) != 0 {
        if change == Change::Aborted {
            tally.add(Counter::ABORTED_AFTER_LOSS, 1);
        }
        if socket::has_dsacks(ctx) {
            tally.add(Counter::DSACK_CONNECTIONS, 1);
        }
    }
    if tables::counts(statistics::RTT_AT_END) {
        tally.time(Times::Srtt, socket::srtt_us(ctx).into(), weight);
    }
    0
}

/// Looks at the retransmissions in question again, with what is known now.
#[inline(always)]
fn reconsider(ctx: &SockOpsContext, state: &mut SocketState, tally: Tally, last: bool) {
    let (retransmissions, samples) = (state.handshake.in_question, state.handshake.samples);
    let verdict = after_samples(
        state.handshake.spurious_at_most,
        samples,
        socket::rtt_min_us(ctx),
        state.handshake.initial_rto_us,
        state.direction == direction::ACTIVE,
        last,
    );
    if verdict == Verdict::Open && !last {
        return;
    }
    state.handshake.in_question = 0;
    if tally.is_nobody() {
        return;
    }
    match verdict {
        Verdict::Open => tally.add(Counter::UNDECIDED, retransmissions.into()),
        Verdict::Spurious(spurious) => {
            // Without a sample since, the least is that of the handshake, which counts from another copy.
            let rtt_us = if samples == 0 {
                0
            } else {
                socket::rtt_min_us(ctx)
            };
            judge(state, tally, retransmissions, spurious, rtt_us);
        }
    }
}
