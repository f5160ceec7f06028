//! When a timer of the kernel's timer wheel fires (kernel/time/timer.c, Linux 4.8 and later).
//!
//! The wheel has levels of 64 buckets. Level n has steps of 8^n jiffies and holds timers that are at most 63 of its
//! steps away. An expiry is rounded up to the next step, never down, so a timer fires late rather than early.
//!
//! Times are jiffies since `start`, which is the lower half of a jiffy.

/// The step of a timer this many jiffies away, as a power of two.
#[inline(always)]
#[must_use]
pub const fn shift(delta: u32) -> u32 {
    rto_wheel_shift(delta)
}

/// A global function for the verifier, which checks it once and not again at each call.
#[cfg_attr(target_arch = "bpf", unsafe(no_mangle), inline(never))]
const extern "C" fn rto_wheel_shift(delta: u32) -> u32 {
    const LEVELS: u32 = 8;
    let mut level = 0;
    // `LVL_START`.
    while level + 1 < LEVELS && delta >= 63 << (3 * level) {
        level += 1;
    }
    3 * level
}

/// When a timer of `delta` jiffies fires that is armed at `now` within the function of another timer, as that of a
/// retransmission is. The wheel's clock is one jiffy ahead there, so that 63 steps still belong to the finer level.
#[inline(always)]
#[must_use]
pub const fn fires(start: u32, now: u32, delta: u32) -> u32 {
    let shift = shift(delta.wrapping_sub(1));
    let bucket = start
        .wrapping_add(now)
        .wrapping_add(delta)
        .wrapping_add(1 << shift)
        >> shift;
    (bucket << shift).wrapping_sub(start)
}

/// The length of a timer, armed at `now` likewise, that fires at `at`, or else at the first step after it; at least 1.
#[inline(always)]
#[must_use]
pub const fn aim(start: u32, now: u32, at: u32) -> u32 {
    if at <= now + 1 {
        return 1;
    }
    let delta = at - now;
    let step = 1 << shift(delta);
    let half = if step > 1 { step / 2 } else { 1 };
    // In the middle of a step, so that a jiffy more or less changes nothing.
    if delta > half && fires(start, now, delta - half) >= at {
        delta - half
    } else {
        delta - 1
    }
}
