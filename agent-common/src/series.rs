//! How much earlier a lost segment of an established connection was retransmitted than by the kernel's own timers.
//!
//! A series begins with a tail loss probe and continues with retransmission timeouts until an ACK arrives. The outage
//! ended after the last retransmission but one, so the kernel alone would have got the ACK by its first retransmission
//! after that one, or by a later one: the gain that is counted is never above the truth. The kernel alone would have
//! sent its probe after one interval, its first timeout another interval later, and so on, doubling: 1, 2, 4, 8
//! intervals after the timer began (`tcp_send_loss_probe()` restarts the timer, Linux 6.18).

/// A series of retransmissions. Times are the lower half of bpf_ktime_get_ns() in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// When the timer of the lost segment began.
    pub start_us: u32,
    /// The last retransmission.
    pub last_us: u32,
    /// How much later the kernel alone would have got the ACK of the last retransmission; negative: earlier.
    pub gain_us: i32,
    /// Duplicate segments that the peer had reported before.
    pub dsacks: u32,
}

/// The kernel's own timer, without the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The first interval, microseconds.
    pub first_us: u32,
    /// The maximum, microseconds.
    pub max_us: u32,
    /// Whether the intervals are equal (TCP_THIN_LINEAR_TIMEOUTS). The kernel doubles them after six; here they never
    /// double, so that the result is not above the truth.
    pub is_linear: bool,
    /// A jiffy, microseconds: a timer may be late by one.
    pub jiffy_us: u32,
}

impl Interval {
    /// The first of the kernel's own retransmissions after this time, microseconds since the timer began.
    #[inline(always)]
    #[must_use]
    pub const fn next_us(&self, after_us: u32) -> u32 {
        if self.is_linear && self.first_us != 0 {
            return (after_us / self.first_us + 1) * self.first_us;
        }
        let (mut slot, mut gap) = (self.first_us, self.first_us);
        let mut n = 0;
        // 32 intervals last longer than a connection without an ACK.
        while n < 32 && slot <= after_us {
            slot += gap;
            gap = if gap * 2 < self.max_us {
                gap * 2
            } else {
                self.max_us
            };
            n += 1;
        }
        slot
    }
}

/// How far a round-trip time from timestamps, whose unit is a millisecond, may be from the time since the retransmission.
const TOLERANCE_US: u32 = 2000;

impl Series {
    /// Begins with a tail loss probe of the only segment in flight, whose timer was `timer_us`.
    #[inline(always)]
    #[must_use]
    pub const fn probed(now_us: u32, timer_us: u32, kernel: &Interval, dsacks: u32) -> Self {
        Self {
            start_us: now_us.wrapping_sub(timer_us),
            last_us: now_us,
            gain_us: gain(kernel.first_us, timer_us, kernel),
            dsacks,
        }
    }

    /// Begins with a tail loss probe that the kernel alone would have sent at the same time: with more segments in
    /// flight, its timer does not depend on rto_min.
    #[inline(always)]
    #[must_use]
    pub const fn probed_alike(now_us: u32, kernel: &Interval, dsacks: u32) -> Self {
        Self {
            start_us: now_us.wrapping_sub(kernel.first_us),
            last_us: now_us,
            gain_us: 0,
            dsacks,
        }
    }

    /// A retransmission timeout.
    #[inline(always)]
    pub const fn timed_out(&mut self, now_us: u32, kernel: &Interval) {
        let before_us = self.last_us.wrapping_sub(self.start_us);
        let elapsed_us = now_us.wrapping_sub(self.start_us);
        self.gain_us = gain(kernel.next_us(before_us), elapsed_us, kernel);
        self.last_us = now_us;
    }

    /// The gain, once a round-trip time was measured; 0 if an earlier copy was answered, so that the timeouts were not
    /// needed: the round-trip time, from timestamps, does not begin at the last retransmission, or the peer has
    /// reported a duplicate.
    #[inline(always)]
    #[must_use]
    pub const fn answered(&self, now_us: u32, rtt_us: u32, dsacks: u32) -> i32 {
        let since_us = now_us.wrapping_sub(self.last_us);
        if since_us.abs_diff(rtt_us) > TOLERANCE_US || dsacks != self.dsacks {
            return 0;
        }
        self.gain_us
    }
}

/// The difference, less the jiffy by which the policy's timer may have been late.
#[inline(always)]
const fn gain(kernels_us: u32, elapsed_us: u32, kernel: &Interval) -> i32 {
    kernels_us.wrapping_sub(elapsed_us).cast_signed() - kernel.jiffy_us.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: Interval = Interval {
        first_us: 204_000,
        max_us: 120_000_000,
        is_linear: false,
        jiffy_us: 4000,
    };
    const START_US: u32 = u32::MAX - 100_000;

    /// The gain of a series whose retransmissions are sent at these times, the last of which is answered.
    fn gain_of(kernel: &Interval, [probe_ms, timeouts_ms @ ..]: [u32; 4]) -> i32 {
        let now_us = |ms: u32| START_US.wrapping_add(ms * 1000);
        let mut series = Series::probed(now_us(probe_ms), probe_ms * 1000, kernel, 3);
        for ms in timeouts_ms.into_iter().take_while(|ms| *ms != 0) {
            series.timed_out(now_us(ms), kernel);
        }
        series.answered(series.last_us.wrapping_add(20_500), 20_000, 3) / 1000
    }

    #[test]
    fn kernels_slot_after_last_retransmission_but_one_counts() {
        assert_eq!(gain_of(&KERNEL, [12, 0, 0, 0]), 204 - 12 - 4);
        assert_eq!(gain_of(&KERNEL, [12, 28, 0, 0]), 204 - 28 - 4);
        assert_eq!(gain_of(&KERNEL, [57, 113, 229, 0]), 204 - 229 - 4);
        assert_eq!(gain_of(&KERNEL, [113, 229, 461, 0]), 408 - 461 - 4);
        assert_eq!(gain_of(&KERNEL, [229, 461, 925, 0]), 816 - 925 - 4);
    }

    #[test]
    fn linear_and_limited_intervals_are_not_doubled() {
        let linear = Interval {
            is_linear: true,
            ..KERNEL
        };
        let limited = Interval {
            max_us: 300_000,
            ..KERNEL
        };
        for (after, doubling, equal, at_most_300) in [
            (0, 204, 204, 204),
            (203, 204, 204, 204),
            (204, 408, 408, 408),
            (500, 816, 612, 708),
            (1_000, 1_632, 1_020, 1_008),
        ] {
            let next = |kernel: &Interval| kernel.next_us(after * 1000) / 1000;
            assert_eq!(next(&KERNEL), doubling);
            assert_eq!(next(&linear), equal);
            assert_eq!(next(&limited), at_most_300);
        }
    }

    #[test]
    fn probe_with_more_segments_in_flight_is_no_gain() {
        let mut series = Series::probed_alike(START_US, &KERNEL, 0);
        assert_eq!(series.answered(START_US.wrapping_add(500), 1000, 0), 0);
        series.timed_out(START_US.wrapping_add(52_000), &KERNEL);
        assert_eq!(series.gain_us, 204_000 - 52_000 - 4000);
    }

    #[test]
    fn answer_to_an_earlier_copy_is_no_gain() {
        let series = Series::probed(START_US, 12_000, &KERNEL, 3);
        let now_us = START_US.wrapping_add(30_000);
        assert_eq!(series.answered(now_us, 30_000, 3), 188_000);
        // The original was answered, or the next segment, or the peer has received both copies.
        assert_eq!(series.answered(now_us, 42_000, 3), 0);
        assert_eq!(series.answered(now_us, 100, 3), 0);
        assert_eq!(series.answered(now_us, 30_000, 4), 0);
    }
}
