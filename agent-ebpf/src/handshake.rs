//! The end of a handshake: how long it took, and whether its retransmissions were needed.

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    GOOD_US, Handshake, Policy, SockOpt, SocketState, UNMATCHED, also, arm, direction, features,
    socket_flags, statistics, syn::Timeouts,
};
use rto_agent_ebpf::{
    counter::Counter,
    ops::{Change, change, has_closed},
    verdict::{LONG_US, Samples, Verdict, after_samples, had_loss, spurious_at_most},
};

use crate::{
    discovery, fallback,
    hook::{self, argument},
    kernel_sock::{self, SynSocket},
    options::{self, Defaults, Target},
    series,
    socket::{self, read},
    storage, syn_ack_rto, syn_schedule,
    tables::{self, Tally, Times},
    unstored,
};

/// Minimum time between two samples of a connection's smoothed RTT; 0: only one, when it ends. The loader writes it.
#[unsafe(no_mangle)]
static RTT_INTERVAL_NS: u64 = 0;

/// Whether smoothed RTTs are sampled during connections.
#[inline(always)]
pub(crate) fn samples_rtt() -> bool {
    rtt_interval_ns() != 0
}

#[inline(always)]
fn rtt_interval_ns() -> u64 {
    // SAFETY: a constant, which the loader may have written before the program was loaded.
    unsafe { read(&raw const RTT_INTERVAL_NS) }
}

/// Records the connection's arm, policy generation, direction and initial RTO.
#[inline(never)]
pub(crate) fn note(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    arm: u32,
    policy: &Policy,
    direction: u32,
) {
    state.arm = arm;
    state.generation = tables::generation(arm, policy);
    state.direction = direction;
    state.options.epoch = fallback::epoch(policy, direction);
    state.handshake.initial_rto_jiffies = policy.initial_rto_jiffies;
    state.handshake.initial_rto_us = policy.initial_rto_us;
    state.handshake.retransmissions_counted = socket::total_retrans(&SockOpsContext::new(ops));
    state.watch.weight = 1;
}

/// [`LONG_US`], nanoseconds.
const LONG_NS: u64 = LONG_US as u64 * 1000;

/// Sets the duration of a handshake and what is to be judged. Invariant: this precedes [`hook::enable`], which requests
/// RTT_CB only while something is in question.
#[inline(always)]
pub(crate) fn ended(handshake: &mut Handshake, retransmissions: u32, took_ns: u64) {
    begin(handshake, retransmissions, took_ns);
    if retransmissions == 0 && took_ns >= LONG_NS {
        handshake.in_question = Handshake::WHOLE;
    }
}

/// Sets [`Handshake::ns`] and the retransmissions to judge.
#[inline(always)]
pub(crate) fn begin(handshake: &mut Handshake, retransmissions: u32, ns: u64) {
    handshake.ns = ns;
    let retransmissions = u16::try_from(retransmissions).unwrap_or(Handshake::WHOLE - 1);
    handshake.in_question = retransmissions;
    handshake.spurious_at_most = retransmissions;
    handshake.samples = 0;
    handshake.rtt_max_us = 0;
}

/// Restores the initial window of the route on a connection that this program's timers made retransmit more than once.
/// The kernel then starts with one segment (`tcp_init_transfer()`, which runs the callback after that; Linux 6.18). If
/// it alone would have retransmitted more than once by now, the window stays.
#[inline(always)]
pub(crate) fn restore_window(ctx: &SockOpsContext, direction: u32, took_ns: u64, tally: Tally) {
    rto_restore_window(ctx.ops, direction, took_ns, tally.key());
}

/// A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_restore_window(
    ops: *mut bpf_sock_ops,
    direction: u32,
    took_ns: u64,
    tally: u32,
) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    if socket::snd_cwnd(ctx) != 1 {
        return 0;
    }
    let is_early = if direction == direction::ACTIVE {
        let second_ns = if SynSocket::of(ctx).linear == 0 {
            3_000_000_000
        } else {
            2_000_000_000
        };
        took_ns < second_ns
    } else {
        matches!(kernel_sock::accepted_after_ms(ctx), 1..1000)
    };
    if is_early {
        let window = kernel_sock::initial_window(ctx);
        Target::of(ctx).set(SockOpt::InitialWindow, window, Tally::of_key(tally));
    }
    0
}

/// Counts a connection with storage that has just been established. This is called last, because the verifier
/// multiplies the branches taken here with everything that follows.
#[inline(never)]
pub(crate) fn established(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    retransmissions: u32,
    tally: Tally,
) {
    if tally.is_nobody() {
        return;
    }
    let ctx = &SockOpsContext::new(ops);
    let took_us = state.handshake.ns / 1000;
    let srtt_us = socket::srtt_us(ctx);
    let initial_rto_us = state.handshake.initial_rto_us;
    // The program does not see a passive handshake begin, because a request has no storage.
    let time_us = if took_us != 0 {
        took_us
    } else {
        srtt_us.into()
    };
    fallback::established_stored(state, retransmissions);
    let is_long = state.handshake.in_question == Handshake::WHOLE;
    if !is_long {
        discover(ctx, state, retransmissions);
    }
    if time_us > GOOD_US.into() {
        tally.add(Counter::LATE, 1);
    }
    if time_us == 0 {
        tally.add(Counter::UNTIMED, 1);
    }
    if retransmissions == 0 {
        let times = if is_long {
            Times::Lossy
        } else {
            Times::PathRtt
        };
        tally.time(times, time_us, 1);
        return;
    }
    tally.time(Times::Lossy, time_us, 1);
    tally.add(Counter::RETRANSMITTED_HANDSHAKES, 1);
    let at_most = spurious_at_most(retransmissions, srtt_us, took_us, initial_rto_us);
    state.handshake.spurious_at_most = u16::try_from(at_most).unwrap_or(u16::MAX);
    // `at_most == 0` would not do: after a late answer the path RTT is unknown even if no copy can be spurious.
    if srtt_us != 0 && srtt_us < initial_rto_us {
        state.handshake.in_question = 0;
        judge(state, tally, retransmissions, 0, srtt_us);
    }
}

/// Notes a connection that no entry covers.
#[inline(always)]
fn discover(ctx: &SockOpsContext, state: &SocketState, retransmissions: u32) {
    if state.arm == arm::treated(UNMATCHED) && tables::counts(statistics::UNMATCHED) {
        discovery::note(ctx, retransmissions);
    }
}

/// Counts a handshake of [`LONG_US`] or more without a retransmission, once later RTTs are known: its time is the path
/// RTT, or it had a loss at the other end.
#[inline(never)]
fn judge_whole(ops: *mut bpf_sock_ops, state: &mut SocketState, tally: Tally) {
    let ctx = &SockOpsContext::new(ops);
    let took_us = state.handshake.ns / 1000;
    let lost = had_loss(took_us, socket::rtt_min_us(ctx));
    if !lost {
        tally.time(Times::PathRtt, took_us, 1);
        tally.take_back(Times::Lossy, took_us);
    }
    discover(ctx, state, lost.into());
}

/// Counts whether the retransmissions of a handshake were needed, and the path RTT: the duration of the whole handshake
/// if the first copy was answered, otherwise `rtt_us`, the minimum RTT (0: unknown).
#[inline(never)]
fn judge(state: &SocketState, tally: Tally, retransmissions: u32, spurious: u32, rtt_us: u32) {
    let took_us = state.handshake.ns / 1000;
    let time_us = if spurious == retransmissions && took_us != 0 {
        took_us
    } else {
        rtt_us.into()
    };
    // The connect time was already counted when the connection was established.
    tally.time(Times::PathRtt, time_us, 1);
    tally.take_back(Times::Lossy, time_us);
    if spurious != 0 {
        tally.add(Counter::SPURIOUS, spurious.into());
        tally.add(Counter::SPURIOUS_CONNECTIONS, 1);
        fallback::judged_spurious(state);
    }
    let needed = retransmissions.saturating_sub(spurious);
    if needed == 0 {
        return;
    }
    tally.add(Counter::RECOVERED, 1);
    let handshake = &state.handshake;
    // For an accepted connection no gain is known: the peer repeats its own SYN, which causes another SYN-ACK, at times
    // that this host does not know.
    if state.direction == direction::ACTIVE && spurious == 0 && handshake.initial_rto_jiffies != 0 {
        // Only the send times of the last two copies are known, so a connection with spurious copies has no known gain.
        // With the kernel's own timer there is no gain.
        let [before_us, last_us] = handshake.copies_us;
        rto_saved(state.arm, state.schedule.attempt.start, before_us, last_us);
    }
}

/// Counts the gain of a connection whose first SYN was sent in jiffy `start`, and its last two this many microseconds
/// later. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_saved(arm: u32, start: u32, before_us: u32, last_us: u32) -> u32 {
    let hz = syn_ack_rto::kernel_jiffies();
    let kernel = Timeouts::kernel(hz, 0, tables::host_defaults().syn_linear_timeouts);
    // The outage ended after the last SYN but one, and the kernel's next slot after that would have got the answer. The
    // first SYN was sent within the jiffy in which the slots begin.
    let slot = kernel
        .slots(start, syn_ack_rto::jiffies_of_us(before_us))
        .next;
    let kernels_us = u64::from(slot - 1) * u64::from(syn_ack_rto::microseconds(1));
    let saved_us = kernels_us.cast_signed() - i64::from(last_us);
    let counters = [Counter::TIME_SAVED, Counter::TIME_LOST];
    Tally::of(arm, direction::ACTIVE).add_gain(counters, saved_us);
    0
}

/// RTT_CB: a round-trip time was measured, at most one per round trip. The kernel has already included it in the
/// minimum RTT, but not yet in the smoothed RTT (`tcp_rtt_estimator()`, Linux 6.12).
#[inline(never)]
pub(crate) fn rtt_sample(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    let Some(state) = storage.of_policy() else {
        return 0;
    };
    let tally = Tally::of_socket(state);
    if tables::has(features::RTO_RESTART) && state.options.restart_hz != 0 {
        restart(ctx, state, tally);
    }
    series::answered(ctx, state, tally);
    if state.handshake.in_question != 0 {
        note_sample(ctx, &mut state.handshake);
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

/// The RTT sample of an RTT_CB, microseconds: its first argument (Linux 6.10; 0 before). `reply` shares its memory, so
/// another program may have overwritten it. A value below the minimum RTT, or out of range, is not a sample: the result
/// is 0.
#[inline(always)]
fn sample_us(ctx: &SockOpsContext) -> u32 {
    let rtt_us = argument(ctx, 0);
    if rtt_us >= socket::rtt_min_us(ctx) && rtt_us <= i32::MAX.cast_unsigned() {
        rtt_us
    } else {
        0
    }
}

/// Records a sample for judging the retransmissions.
#[inline(always)]
fn note_sample(ctx: &SockOpsContext, handshake: &mut Handshake) {
    let rtt_us = sample_us(ctx);
    handshake.samples += 1;
    if rtt_us > handshake.rtt_max_us {
        handshake.rtt_max_us = rtt_us;
    }
}

/// Reduces rto_min by a round trip while few segments are outstanding. A lower rto_min lowers the RTO, but a higher one
/// does not raise it again. Therefore the lesser of the minimum and the smoothed RTT is used: an RTT that is high only
/// for a while must not lower the RTO for good.
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
    // SAFETY: this run has no other `Storage`.
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let ctx = &ctx;
    if has_closed(argument(ctx, 1)) {
        // Once the interval reaches TCP_RTO_MAX_MS, the kernel gives a closed socket up after a few more timeouts, and
        // its data is lost (`tcp_out_of_resources()`, `tcp_write_timeout()`, Linux 6.18).
        if let Some(state) = storage.of_policy() {
            Target::of(ctx).settle_those::<{ also::LIFTED }>(
                &mut state.options,
                None,
                Defaults::Kernel,
                Tally::NOBODY,
            );
        }
        return 0;
    }
    // SAFETY: fields of the context.
    let is_acknowledged =
        unsafe { read(&raw const (*ctx.ops).snd_una) == read(&raw const (*ctx.ops).snd_nxt) };
    // STATE_CB runs before the kernel changes the state (`tcp_set_state()`, Linux 6.12), so the context still has the
    // old one.
    let change = change(socket::state(ctx), argument(ctx, 1), is_acknowledged);
    if change == Change::Other {
        return 0;
    }
    let Some(state) = storage.of_policy() else {
        if socket::total_retrans(ctx) != 0 {
            unstored::lost_callbacks(ops);
        }
        return 0;
    };
    if state.flags & socket_flags::SYN_SCHEDULE != 0 {
        // A simultaneous open that was closed before the handshake was complete.
        syn_schedule::end(ctx);
        return 0;
    }
    count_end(ctx, state, change);
    // The application may use the socket again.
    options::restore(ops, state, Tally::NOBODY);
    0
}

/// Counts the end of a connection.
#[inline(always)]
fn count_end(ctx: &SockOpsContext, state: &mut SocketState, change: Change) {
    let tally = Tally::of_socket(state);
    if state.handshake.in_question != 0 {
        reconsider(ctx, state, tally, true);
    }
    if tally.is_nobody() {
        return;
    }
    if hook::misses_losses(ctx)
        && socket::total_retrans(ctx) != state.handshake.retransmissions_counted
    {
        tally.add(Counter::CALLBACKS_LOST, 1);
    }
    let weight = state.watch.weight;
    if change == Change::Aborted {
        tally.add(Counter::ABORTED, weight.into());
    }
    if socket::total_retrans(ctx) != 0 {
        if change == Change::Aborted {
            tally.add(Counter::ABORTED_AFTER_LOSS, 1);
        }
        if socket::dsacks(ctx) != 0 {
            tally.add(Counter::DSACK_CONNECTIONS, 1);
        }
    }
    if tables::counts(statistics::RTT_AT_END) {
        tally.time(Times::Srtt, socket::srtt_us(ctx).into(), weight);
    }
}

/// Judges the retransmissions in question by the RTT samples so far; `last`: the connection ends, so there will be no
/// more.
#[inline(always)]
fn reconsider(ctx: &SockOpsContext, state: &mut SocketState, tally: Tally, last: bool) {
    if state.handshake.in_question == Handshake::WHOLE {
        state.handshake.in_question = 0;
        if state.handshake.samples != 0 && !tally.is_nobody() {
            judge_whole(ctx.ops, state, tally);
        }
        return;
    }
    let handshake = &state.handshake;
    let retransmissions = u32::from(handshake.in_question);
    let samples = Samples {
        count: handshake.samples,
        least_us: socket::rtt_min_us(ctx),
        longest_us: handshake.rtt_max_us,
        are_all: last,
    };
    let [_, last_copy_us] = handshake.copies_us;
    let verdict = after_samples(
        handshake.spurious_at_most.into(),
        samples,
        handshake.initial_rto_us,
        handshake.ns / 1000,
        (state.direction == direction::ACTIVE)
            .then(|| (handshake.ns / 1000).saturating_sub(last_copy_us.into())),
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
            // Without later samples, the minimum RTT is the handshake's, which was measured from another copy.
            let rtt_us = if samples.count == 0 {
                0
            } else {
                samples.least_us
            };
            judge(state, tally, retransmissions, spurious, rtt_us);
        }
    }
}
