//! The SYN schedule: when the kernel alone would retransmit a SYN, and when it would give up.
//!
//! The kernel's first `tcp_syn_linear_timeouts` + 1 timeouts are 1 s apart (Linux 6.5; only one before). After that the
//! interval doubles up to the maximum RTO (`tcp_retransmit_timer()`, Linux 6.18). These timeouts are called slots here.
//! With a shorter initial RTO the intervals soon grow longer than the kernel's, so that after an outage of a few
//! seconds the next copy would come late. The schedule therefore limits each interval with TCP_RTO_MAX_MS, so that each
//! copy follows just after the kernel's next slot.

/// TCP_SYNCNT of a socket whose deadline is its TCP_USER_TIMEOUT: the kernel's maximum.
pub const SYNCNT: u32 = 127;

/// `TCP_TIMEOUT_INIT`, milliseconds.
pub const KERNEL_RTO_MS: u32 = 1000;

/// The minimum of TCP_RTO_MAX_MS, milliseconds (`TCP_RTO_MAX_MIN_SEC`).
const CAP_LEAST_MS: u64 = 1000;

/// A copy at most this much before the late end of a slot ([`Timeouts::cap_ms`]) counts as the copy for that slot,
/// milliseconds.
const BEHIND_MS: u64 = 20;

/// More doublings of a jiffy than fit below 120 s.
const DOUBLINGS: u32 = 17;

/// The timeouts of a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The initial RTO, milliseconds; at least 1.
    pub initial_rto_ms: u32,
    /// TCP_SYNCNT of the socket, or `net.ipv4.tcp_syn_retries` of its namespace.
    pub retries: u32,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub linear: u32,
    /// The maximum RTO, milliseconds.
    pub rto_max_ms: u32,
}

impl Timeouts {
    /// The first timeout at or after a time since the first SYN, milliseconds.
    #[inline(always)]
    #[must_use]
    pub const fn first_at(&self, ms: u64) -> u64 {
        let rto = self.initial_rto_ms as u64;
        let rto_max = self.rto_max_ms as u64;
        let linear_end = (self.linear as u64 + 1) * rto;
        if ms <= linear_end {
            return next_multiple(ms, rto);
        }
        let (mut at, mut gap, mut n) = (linear_end, rto, 0);
        while n < DOUBLINGS {
            gap *= 2;
            if gap >= rto_max {
                break;
            }
            at += gap;
            if at >= ms {
                return at;
            }
            n += 1;
        }
        at + next_multiple(ms - at, rto_max)
    }

    /// When connect() gives up, milliseconds since the first SYN, with exact timers; `user_timeout_ms` is the
    /// application's TCP_USER_TIMEOUT, or 0 (`tcp_write_timeout()`, `retransmits_timed_out()`, Linux 6.18).
    #[inline(always)]
    #[must_use]
    pub const fn gives_up(&self, user_timeout_ms: u32) -> u64 {
        let rto = self.initial_rto_ms as u64;
        let modelled = self.model_timeout();
        let by_count = modelled + self.linear as u64 * rto;
        // The kernel checks no deadline before the first retransmission.
        let by_time = if user_timeout_ms == 0 {
            self.first_at(larger(modelled, 2 * rto))
        } else {
            larger(user_timeout_ms as u64, rto)
        };
        if by_time < by_count {
            by_time
        } else {
            by_count
        }
    }

    /// The TCP_USER_TIMEOUT, milliseconds, with which connect() gives up when the kernel would with these timeouts. The
    /// kernel's timers of seconds fire 1.5 % late on average over the levels of the timer wheel, which is added here;
    /// an application's own deadline is used unchanged.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "bounded")]
    pub const fn deadline_ms(&self, user_timeout_ms: u32) -> u32 {
        let ms = self.gives_up(user_timeout_ms);
        let late = if ms == user_timeout_ms as u64 {
            ms
        } else {
            ms + ms / 64
        };
        if late < i32::MAX as u64 {
            late as u32
        } else {
            i32::MAX as u32
        }
    }

    /// How much earlier a connection was established than with these timeouts, milliseconds; negative: later.
    /// `copies_ms`: when its last two SYNs were sent. The outage ended between them, and the kernel's first timeout
    /// after that moment would have got the answer. The result is the mean over all such moments.
    #[inline(always)]
    #[must_use]
    pub const fn saved_ms(&self, copies_ms: [u32; 2]) -> i64 {
        /// Maximum number of timeouts considered between two copies: more than there are in 8 s.
        const SLOTS: u32 = 8;
        let (from, to) = (copies_ms[0] as u64, copies_ms[1] as u64);
        if to <= from {
            return 0;
        }
        let (mut at, mut sum, mut slot, mut n) = (from, 0, 0, 0);
        while n < SLOTS && at < to {
            slot = self.fires_at(at + 1);
            let until = if slot < to { slot } else { to };
            sum += (until - at) * slot;
            at = until;
            n += 1;
        }
        sum += (to - at) * slot;
        (sum / (to - from)).cast_signed() - to.cast_signed()
    }

    /// The first timeout that fires at or after a time since the first SYN: timers of seconds are late, by a little
    /// more than is counted here, so that the reported saving is rather too small than too large.
    #[inline(always)]
    const fn fires_at(&self, ms: u64) -> u64 {
        const UNCOUNTED_MS: u64 = 8;
        let slot = self.first_at(((ms + UNCOUNTED_MS) * 64).div_ceil(65));
        let late = (slot + slot / 64).wrapping_sub(UNCOUNTED_MS);
        if late < ms { ms } else { late }
    }

    /// `tcp_model_timeout()`, Linux 6.18, milliseconds.
    #[inline(always)]
    const fn model_timeout(&self) -> u64 {
        let rto = self.initial_rto_ms as u64;
        let most = match self.rto_max_ms.checked_div(self.initial_rto_ms) {
            Some(fold @ 1..) => fold.ilog2(),
            _ => 0,
        };
        let doublings = if self.retries < most {
            self.retries
        } else {
            most
        };
        ((2 << doublings) - 1) * rto + (self.retries - doublings) as u64 * self.rto_max_ms as u64
    }

    /// The TCP_RTO_MAX_MS to set at a timeout `elapsed_ms` after the first SYN, so that the next copy follows just
    /// after the next of these timeouts. A multiple of [`jiffy_unit_ms`], because the kernel counts in jiffies.
    ///
    /// The slot plus 4 %, because the kernel's own timers of seconds fire late, and a copy just before a slot would
    /// leave a whole interval uncovered. Below HZ 250, where the steps of the timer wheel are wider, plus 5 %.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "bounded")]
    pub const fn cap_ms(&self, elapsed_ms: u64, hz: u32) -> u32 {
        let (behind, of) = if hz < 250 { (21, 20) } else { (26, 25) };
        // The first slot S with S x 1.04 > elapsed + 20 ms.
        let slot = self.first_at((elapsed_ms + BEHIND_MS) * of / behind + 1);
        let cap = larger(
            (slot * behind / of).saturating_sub(elapsed_ms),
            CAP_LEAST_MS,
        );
        let cap = next_multiple(cap, jiffy_unit_ms(hz) as u64);
        if cap < self.rto_max_ms as u64 {
            cap as u32
        } else {
            self.rto_max_ms
        }
    }
}

/// Number of timeouts within a time, with an interval that starts at `rto_ms` and doubles up to 120 s.
#[inline(always)]
#[must_use]
pub const fn timeouts_within(ms: u64, rto_ms: u32) -> u32 {
    let (mut left, mut gap, mut n) = (ms, if rto_ms == 0 { 1 } else { rto_ms as u64 }, 0);
    while n < DOUBLINGS && left > gap {
        left -= gap;
        gap = if gap < 60_000 { gap * 2 } else { 120_000 };
        n += 1;
    }
    n
}

/// The smallest whole number of milliseconds that is also a whole number of jiffies, for each HZ of Linux.
#[inline(always)]
#[must_use]
pub const fn jiffy_unit_ms(hz: u32) -> u32 {
    if hz != 0 && 1000 % hz == 0 {
        1000 / hz
    } else {
        // HZ=300: three jiffies.
        10
    }
}

#[inline(always)]
const fn next_multiple(n: u64, of: u64) -> u64 {
    // A division by 0 would panic, which the verifier rejects.
    if of == 0 { n } else { n.div_ceil(of) * of }
}

#[inline(always)]
const fn larger(a: u64, b: u64) -> u64 {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    const KERNEL: Timeouts = Timeouts {
        initial_rto_ms: KERNEL_RTO_MS,
        retries: 6,
        linear: 4,
        rto_max_ms: 120_000,
    };

    fn slots(timeouts: Timeouts, n: usize) -> Vec<u64> {
        let mut at = 0;
        let next = |_| {
            at = timeouts.first_at(at + 1);
            at
        };
        (0..n).map(next).collect()
    }

    #[test]
    fn slots_are_the_kernels() {
        let s = |all: &[u64]| all.iter().map(|s| s * 1000).collect::<Vec<_>>();
        let linear = s(&[1, 2, 3, 4, 5, 7, 11, 19, 35, 67, 131, 251, 371]);
        assert_eq!(slots(KERNEL, 13), linear);
        let without = Timeouts {
            linear: 0,
            ..KERNEL
        };
        assert_eq!(slots(without, 8), s(&[1, 3, 7, 15, 31, 63, 127, 247]));
        let one = Timeouts {
            linear: 1,
            ..KERNEL
        };
        assert_eq!(slots(one, 5), s(&[1, 2, 4, 8, 16]));
        let capped = Timeouts {
            rto_max_ms: 4000,
            ..KERNEL
        };
        assert_eq!(slots(capped, 8), s(&[1, 2, 3, 4, 5, 7, 11, 15]));
    }

    /// Measured on Linux 6.18, HZ 250: 133.8 s; with TCP_SYNCNT 1, 2 and 3: 3.06, 7.14 and 19.4 s.
    #[test]
    fn deadlines_are_the_measured_ones() {
        let with =
            |retries, user_timeout_ms| Timeouts { retries, ..KERNEL }.deadline_ms(user_timeout_ms);
        for (retries, measured) in [(6, 133_800), (1, 3_060), (2, 7_140), (3, 19_400)] {
            let deadline = with(retries, 0);
            assert!(
                deadline.abs_diff(measured) * 100 <= measured,
                "{retries}: {deadline}"
            );
        }
        // The application's own deadline: kept, but not before the first retransmission.
        assert_eq!([with(6, 2500), with(6, 8000)], [2500, 8000]);
        assert_eq!(with(2, 30_000), 11_000 + 11_000 / 64);
        assert_eq!(with(6, 300), 1000 + 1000 / 64);
    }

    #[test]
    fn time_saved_is_a_mean_over_the_ends_of_an_outage() {
        // One copy at 100 ms, and one in an outage of 0.4 s: the kernel's first timeout follows.
        assert_eq!(KERNEL.saved_ms([0, 100]), 907);
        assert_eq!(KERNEL.saved_ms([400, 520]), 487);
        // One just before a slot: few outages end between the two.
        assert_eq!(KERNEL.saved_ms([1980, 2980]), 14);
        // Half of the outages end before the slot, and half after it.
        assert_eq!(KERNEL.saved_ms([1523, 2523]), (2023 + 3038) / 2 - 2523);
        assert_eq!(KERNEL.saved_ms([5, 5]), 0);
        for from in (0..20_000).step_by(130) {
            for to in (from + 10..from + 9_000).step_by(170) {
                let (first, last) = (KERNEL.fires_at(from + 1), KERNEL.fires_at(to));
                let copies_ms = [from, to].map(|ms| u32::try_from(ms).unwrap());
                let connected = KERNEL.saved_ms(copies_ms) + i64::try_from(to).unwrap();
                let bounds = i64::try_from(first).unwrap() - 1..=i64::try_from(last).unwrap() + 1;
                assert!(bounds.contains(&connected), "{from} {to}: {connected}");
            }
        }
    }

    #[test]
    fn deadline_without_retries_is_after_one_retransmission() {
        let none = Timeouts {
            retries: 0,
            ..KERNEL
        };
        assert_eq!(none.gives_up(0), 2000);
        assert_eq!(Timeouts { linear: 0, ..none }.gives_up(0), 1000);
    }

    #[test]
    fn copies_follow_the_kernels_slots() {
        // The copies with an initial RTO of 200 ms and exact timers: linear, doubling up to the cap, then after each
        // slot.
        let (mut at, mut rto, mut sent) = (0, 200, Vec::new());
        for n in 0.. {
            at += rto;
            if at > 40_000 {
                break;
            }
            sent.push(at);
            if n >= 4 {
                rto = (rto * 2).min(KERNEL.cap_ms(at, 250).into());
            }
        }
        for slot in [2000, 3000, 4000, 5000, 7000, 11_000, 19_000, 35_000u64] {
            let next = sent.iter().find(|at| **at >= slot).unwrap();
            assert!(next - slot <= 250 + slot / 20, "{slot}: {sent:?}");
        }
    }

    #[test]
    fn timeouts_within_a_time_double() {
        // 1 + 2 + 4 + 8 + 16 + 32 + 64 s.
        assert_eq!(timeouts_within(127_001, 1000), 7);
        assert_eq!(timeouts_within(126_999, 1000), 6);
        assert_eq!([timeouts_within(0, 1000), timeouts_within(1000, 0)], [0, 9]);
        assert_eq!(timeouts_within(u64::MAX, 1), DOUBLINGS);
    }

    #[test]
    fn caps_are_whole_jiffies_that_the_option_takes() {
        for hz in [100, 250, 300, 1000] {
            let unit = jiffy_unit_ms(hz);
            assert_eq!(unit * hz % 1000, 0);
            for elapsed in (0..200_000).step_by(77) {
                let cap = KERNEL.cap_ms(elapsed, hz);
                assert!(cap.is_multiple_of(unit) && (1000..=120_000).contains(&cap));
            }
        }
    }
}
