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
    let wheel = if step > 1 {
        jiffy * step
    } else {
        Duration::ZERO
    };
    rounded + jiffy + wheel + SCHEDULING
}

/// Attempts at a gap that comes late. On a shared machine a core can be taken away for longer than
/// [`SCHEDULING`]; a wrong timer is late at every attempt.
const ATTEMPTS: usize = 3;
/// Attempts that may be early, by a jiffy at most: the kernel counts a timer from `jiffies`, which lags where a
/// virtual processor was taken away for a tick (95.96 ms for 100 ms at HZ 250, once in hundreds of runs). A timer
/// that is a jiffy too short is early every second or third time.
const LAGS: usize = 1;

/// Asserts that the gap `measure` gives is made by a timer of this length.
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// If the gap is early, or late at each of three attempts; the message names both.
pub fn assert_gap(
    timer: Duration,
    mut measure: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((vec![timer], vec![measure()?])))
}

/// Asserts that each of several gaps of one connection is made by its timer, as [`assert_gap`].
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// As [`assert_gap`].
pub fn assert_gaps(
    timers: &[Duration],
    mut measure: impl FnMut() -> anyhow::Result<Vec<Duration>>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((timers.to_vec(), measure()?)))
}

/// As [`assert_gaps`], where the timers are of the connection that was measured.
///
/// # Errors
///
/// Those of `measure`, which gives the timers and the gaps.
///
/// # Panics
///
/// As [`assert_gap`].
pub fn assert_measured(
    mut measure: impl FnMut() -> anyhow::Result<(Vec<Duration>, Vec<Duration>)>,
) -> anyhow::Result<()> {
    let (mut late, mut early) = (Vec::new(), Vec::new());
    while late.len() < ATTEMPTS {
        let (timers, gaps) = measure()?;
        let pairs = || gaps.iter().zip(&timers);
        assert!(
            gaps.len() >= timers.len(),
            "{gaps:?} are fewer than {timers:?}"
        );
        let by = pairs().map(|(gap, timer)| timer.saturating_sub(EARLY).saturating_sub(*gap));
        let by = by.max().unwrap_or_default();
        if !by.is_zero() {
            early.push((gaps, timers));
            assert!(
                by <= jiffy() && early.len() <= LAGS,
                "gaps are too early for their timers: {early:?}"
            );
            continue;
        }
        if pairs().all(|(gap, timer)| *gap <= latest(*timer)) {
            return Ok(());
        }
        late.push((gaps, timers));
    }
    panic!("gaps are not those of their timers: {late:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_of_100_ms_and_1_s() {
        if jiffy() == Duration::from_millis(4) {
            assert_eq!(
                latest(Duration::from_millis(100)),
                Duration::from_millis(116)
            );
            assert_eq!(latest(Duration::from_secs(1)), Duration::from_millis(1048));
        }
        assert!(latest(Duration::from_millis(100)) < Duration::from_millis(200));
    }
}
