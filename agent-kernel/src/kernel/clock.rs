//! The clock for timeouts that neither a suspend nor a change of the wall clock may affect.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Milliseconds of CLOCK_BOOTTIME, which counts through suspend and cannot be set.
pub fn boottime_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(|t| u64::try_from(Duration::from(t).as_millis()).unwrap_or(u64::MAX))
        .unwrap_or(0)
}
