//! When a timer of the kernel's timer wheel actually fires.
//!
//! The wheel (kernel/time/timer.c, Linux 4.8 and later) has levels of 64 buckets; level n has steps of 8^n jiffies and
//! holds timers that are at most 63 of its steps away. Expiry is rounded up to the next step, never down, so a timer
//! fires late rather than early.

const LEVEL_SIZE: u64 = 64;
const LEVEL_SHIFT: u32 = 3;
const LEVELS: u32 = 9;

/// First delta, in jiffies, that goes to level `level` (`LVL_START`).
const fn level_start(level: u32) -> u64 {
    (LEVEL_SIZE - 1) << ((level - 1) * LEVEL_SHIFT)
}

/// The step, in jiffies, of the level that holds a timer this many jiffies away.
pub const fn step(delta: u64) -> u64 {
    let mut level = 0;
    while level + 1 < LEVELS && delta >= level_start(level + 1) {
        level += 1;
    }
    1 << (level * LEVEL_SHIFT)
}

/// The time at which a timer set at `now` for `now + delta` fires (`calc_index()`): the bucket after
/// that of the expiry.
pub const fn fires_at(now: u64, delta: u64) -> u64 {
    let step = step(delta);
    ((now + delta + step) / step) * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_as_the_kernel_documents_them() {
        // The table in kernel/time/timer.c, HZ 250: 0-255 ms in 4 ms, 256-2047 ms in 32 ms,
        // 2048-16383 ms in 256 ms, 16384-131007 ms in 2048 ms.
        for (ms, granularity) in [
            (0, 4),
            (248, 4),
            (256, 32),
            (2012, 32),
            (2048, 256),
            (16384, 2048),
        ] {
            assert_eq!(step(ms / 4) * 4, granularity, "{ms} ms");
        }
    }

    #[test]
    fn a_level_takes_63_steps_and_there_are_nine() {
        for level in 1..LEVELS {
            let step_of_level = 8u64.pow(level);
            let first = 63 * step_of_level / 8;
            assert_eq!(
                (step(first - 1), step(first)),
                (step_of_level / 8, step_of_level)
            );
        }
        assert_eq!(step(u64::MAX), 8u64.pow(LEVELS - 1));
    }

    #[test]
    fn never_early_and_late_by_two_steps_at_most() {
        for now in [0, 1, 7, 63, 64, 511, 12345] {
            for delta in [1, 2, 25, 62, 63, 64, 250, 500, 503, 504, 4000, 30000] {
                let late = fires_at(now, delta) - (now + delta);
                assert!(late >= 1 && late <= step(delta), "{now} {delta}: {late}");
            }
        }
    }
}
