//! When a timer of the kernel's timer wheel fires ([`rto_agent_common::wheel`]), with times as the model has them.

use rto_agent_common::wheel;

/// The step, in jiffies, of the level that holds a timer of this many jiffies.
pub fn step(delta: u64) -> u64 {
    1 << wheel::shift(short(delta).saturating_sub(1))
}

/// When a timer of `delta` jiffies fires that is armed at `now`.
pub fn fires_at(now: u64, delta: u64) -> u64 {
    // Levels have at most 2^21 jiffies a step, so the lower half of the time is enough.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    let start = now as u32;
    now + u64::from(wheel::fires(start, 0, short(delta).max(1)))
}

/// The wheel holds no longer timers than some days.
fn short(delta: u64) -> u32 {
    u32::try_from(delta).unwrap_or(u32::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheel_levels_match_kernel_documentation() {
        // The table in kernel/time/timer.c, HZ 250: 0-255 ms in 4 ms, 256-2047 ms in 32 ms,
        // 2048-16383 ms in 256 ms, 16384-131007 ms in 2048 ms. A timer armed by another one has a jiffy more.
        for (ms, granularity) in [
            (0, 4),
            (252, 4),
            (256, 32),
            (2016, 32),
            (2052, 256),
            (16388, 2048),
        ] {
            assert_eq!(step(ms / 4) * 4, granularity, "{ms} ms");
        }
    }

    #[test]
    fn timer_fires_at_most_two_steps_late() {
        for now in [0, 1, 7, 63, 64, 511, 12345, u64::from(u32::MAX) - 3] {
            for delta in [1, 2, 25, 62, 63, 64, 250, 500, 503, 504, 4000, 30000] {
                let late = fires_at(now, delta) - (now + delta);
                assert!(late >= 1 && late <= step(delta), "{now} {delta}: {late}");
            }
        }
    }
}
