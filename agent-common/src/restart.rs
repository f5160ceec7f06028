//! RTO restart (RFC 7765), as far as a program can implement it: rto_min is reduced by the RTT while few segments are
//! outstanding.
//!
//! RFC 7765: when an ACK restarts the timer, it expires one RTO after the earliest outstanding segment was sent,
//! instead of one RTO after the ACK. That is about one round trip earlier. A program cannot set the timer, but it can
//! lower rto_min by that round trip.

/// RTO restart applies while fewer segments than this are outstanding (RFC 7765 section 4, `rrthresh`).
pub const THRESHOLD: u32 = 4;

/// `TCP_TIMEOUT_MIN`: the minimum of TCP_BPF_RTO_MIN, jiffies (include/net/tcp.h, Linux 6.12).
pub const LEAST_JIFFIES: u64 = 2;

/// The rto_min of a connection, microseconds, rounded to whole jiffies as the kernel reports it: `base_us`, reduced by
/// the RTT while fewer than [`THRESHOLD`] segments are outstanding.
///
/// Never above `base_us`, and never below the kernel's minimum. If `hz` is 0 or there is no RTT yet (0): `base_us`.
#[inline(always)]
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    reason = "no more jiffies than base_us has"
)]
pub const fn rto_min_us(base_us: u32, rtt_us: u32, hz: u32, outstanding: u32) -> u32 {
    if hz == 0 || rtt_us == 0 || outstanding >= THRESHOLD {
        return base_us;
    }
    let less_us = base_us.saturating_sub(rtt_us) as u64;
    // usecs_to_jiffies() rounds up, jiffies_to_usecs() down (kernel/time/time.c).
    let mut jiffies = (less_us * hz as u64).div_ceil(1_000_000);
    if jiffies < LEAST_JIFFIES {
        jiffies = LEAST_JIFFIES;
    }
    let us = (jiffies * 1_000_000 / hz as u64) as u32;
    if us < base_us { us } else { base_us }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_segments_are_a_round_trip_less() {
        for outstanding in 0..4 {
            assert_eq!(rto_min_us(100_000, 60_000, 250, outstanding), 40_000);
        }
        for outstanding in [4, 5, u32::MAX] {
            assert_eq!(rto_min_us(100_000, 60_000, 250, outstanding), 100_000);
        }
    }

    #[test]
    fn rounded_up_to_jiffies_and_never_below_what_the_kernel_takes() {
        // A nearby peer: no gain.
        assert_eq!(rto_min_us(100_000, 100, 250, 1), 100_000);
        assert_eq!(rto_min_us(100_000, 4_000, 250, 1), 96_000);
        assert_eq!(rto_min_us(100_000, 3_999, 250, 1), 100_000);
        for rtt_us in [92_001, 100_000, 500_000, u32::MAX] {
            assert_eq!(rto_min_us(100_000, rtt_us, 250, 1), 8_000);
        }
    }

    #[test]
    fn without_a_sample_or_a_policy_nothing_changes() {
        assert_eq!(rto_min_us(100_000, 0, 250, 0), 100_000);
        assert_eq!(rto_min_us(100_000, 60_000, 0, 0), 100_000);
    }

    #[test]
    fn every_hz_gets_whole_jiffies_within_bounds() {
        for hz in [100, 250, 300, 1000] {
            // As in the policy: jiffies in microseconds, rounded down.
            let us = |jiffies: u32| jiffies * 1_000_000 / hz;
            for base in 2..=hz / 5 {
                for rtt_us in (1..250_000).step_by(997) {
                    let lowered = rto_min_us(us(base), rtt_us, hz, 3);
                    let jiffies = (u64::from(lowered) * u64::from(hz)).div_ceil(1_000_000);
                    assert!(
                        (LEAST_JIFFIES..=u64::from(base)).contains(&jiffies),
                        "{hz} {base} {rtt_us}: {lowered}"
                    );
                    assert_eq!(u64::from(lowered), jiffies * 1_000_000 / u64::from(hz));
                    // Reduced by at most the RTT.
                    assert!(u64::from(lowered) + u64::from(rtt_us) >= u64::from(us(base)));
                }
            }
        }
    }
}
