//! The clocks for timeouts.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Milliseconds of CLOCK_BOOTTIME, which counts through suspend and cannot be set.
pub fn boottime_ms() -> u64 {
    ms(ClockId::CLOCK_BOOTTIME)
}

/// Milliseconds of CLOCK_MONOTONIC, which does not count through suspend.
pub fn monotonic_ms() -> u64 {
    ms(ClockId::CLOCK_MONOTONIC)
}

fn ms(clock: ClockId) -> u64 {
    let now = clock_gettime(clock).map(|t| Duration::from(t).as_millis());
    now.map_or(0, |ms| u64::try_from(ms).unwrap_or(u64::MAX))
}
