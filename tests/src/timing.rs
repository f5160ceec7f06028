//! How near a measured gap must be to the timer that made it.

use std::time::Duration;

use nix::time::{ClockId, clock_getres};

/// What a shared machine adds between a timer's expiry and the packet's timestamp: the softirq of
/// the expired timer may wait for a core. Measured gaps of 100 ms timers are 103 to 104 ms.
pub const SCHEDULING: Duration = Duration::from_millis(12);
/// Clocks: the timer counts in jiffies that began before the first packet's timestamp was taken.
const EARLY: Duration = Duration::from_millis(1);

/// Length of a jiffy: the resolution of the coarse clock.
#[must_use]
pub fn jiffy() -> Duration {
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::from_millis(4), Duration::from)
}

/// The longest gap a timer of this length may make: rounded up to jiffies, one jiffy because a
/// timer of n jiffies is set somewhere inside the current one, [`SCHEDULING`], and from 64 jiffies
/// on the step of the timer wheel's level, 1/8 of the timer at the most (a 1 s timer at HZ 250
/// fires after 1000 to 1032 ms).
#[must_use]
pub fn latest(timer: Duration) -> Duration {
    let jiffy = jiffy();
    let jiffies = timer.as_nanos().div_ceil(jiffy.as_nanos());
    let mut step = 1;
    let mut level_end = 63;
    while jiffies >= level_end {
        step *= 8;
        level_end *= 8;
    }
    let rounded = jiffy * u32::try_from(jiffies).unwrap_or(u32::MAX);
    let wheel = if step > 1 { jiffy * step } else { Duration::ZERO };
    rounded + jiffy + wheel + SCHEDULING
}

/// Asserts that a gap was made by a timer of this length.
///
/// # Panics
///
/// If it was not; the message names both.
#[track_caller]
pub fn assert_gap(gap: Duration, timer: Duration) {
    let (earliest, latest) = (timer.saturating_sub(EARLY), latest(timer));
    assert!(
        (earliest..=latest).contains(&gap),
        "a gap of {gap:?} is not that of a {timer:?} timer ({earliest:?} to {latest:?})"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_issue_of_100_ms_and_1_s() {
        if jiffy() == Duration::from_millis(4) {
            assert_eq!(latest(Duration::from_millis(100)), Duration::from_millis(116));
            assert_eq!(latest(Duration::from_secs(1)), Duration::from_millis(1048));
        }
        assert!(latest(Duration::from_millis(100)) < Duration::from_millis(200));
    }
}
