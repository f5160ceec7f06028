//! Linux's RTO estimator, with its integer arithmetic. Times are microseconds.

use crate::retransmit::{RTO_MAX_US, RTO_MIN_US};

/// One measured round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When the segment was sent, microseconds since an arbitrary moment common to the flow's samples.
    pub sent_us: u64,
    /// The time until its ACK, microseconds.
    pub rtt_us: u64,
}

impl Sample {
    /// When the ACK arrived.
    pub const fn acked_us(self) -> u64 {
        self.sent_us.saturating_add(self.rtt_us)
    }
}

/// The samples of a flow that sends one segment at a time, each when the previous one is
/// acknowledged.
pub fn in_turn(rtts_us: impl IntoIterator<Item = u64>) -> Vec<Sample> {
    let mut sent_us = 0;
    let samples = rtts_us.into_iter().map(|rtt_us| {
        let sample = Sample { sent_us, rtt_us };
        sent_us = sample.acked_us();
        sample
    });
    samples.collect()
}

/// Linux's estimator: `tcp_rtt_estimator()` (net/ipv4/tcp_input.c) and `__tcp_set_rto()`
/// (include/net/tcp.h), Linux 6.12.
///
/// It differs from RFC 6298: rto_min bounds the variation and not the RTO; the variation is the largest of a window (it
/// rises at once and falls by a quarter per window); a sample far below the smoothed RTT raises the variation by an
/// eighth of the effect of a sample as far above it; the RTO is rounded up to whole jiffies.
///
/// A window ends with the sample of a segment that was sent after the previous window had ended. (The kernel checks
/// whether the ACK covers such a segment: an ACK that also covers an older segment ends the window one ACK earlier.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linux {
    hz: u64,
    rto_min_us: u64,
    /// RTO before the first sample.
    initial_us: u64,
    /// Eight times the smoothed RTT, microseconds; 0 before the first sample.
    srtt_us: u32,
    /// Four times the mean deviation.
    mdev_us: u32,
    /// The largest of these in this window.
    mdev_max_us: u32,
    /// The variation that is added to the smoothed RTT.
    rttvar_us: u32,
    /// A segment sent at this time or later ends the window (`rtt_seq`).
    window_from_us: u64,
}

impl Linux {
    /// The kernel's defaults: rto_min 200 ms, a maximum of 120 s, 1 s before the first sample.
    pub fn new(hz: u32) -> Self {
        let hz = u64::from(hz.max(1));
        let new = Self {
            hz,
            rto_min_us: 0,
            initial_us: 1_000_000,
            srtt_us: 0,
            mdev_us: 0,
            mdev_max_us: 0,
            rttvar_us: 0,
            window_from_us: 0,
        };
        new.with_minimum(RTO_MIN_US)
    }

    /// Sets rto_min on a connection that already has samples, like TCP_BPF_RTO_MIN.
    pub const fn set_rto_min(&mut self, rto_min_us: u64) {
        self.rto_min_us = self.micros(self.jiffies(rto_min_us));
    }

    /// The smoothed RTT and its mean deviation, microseconds, as in TCP_INFO (`tcpi_rtt`, `tcpi_rttvar`).
    pub const fn state(&self) -> (u32, u32) {
        (self.srtt_us >> 3, self.mdev_us >> 2)
    }

    /// The current RTO, jiffies.
    pub fn rto_jiffies(&self) -> u64 {
        let rto_us = if self.srtt_us == 0 {
            self.initial_us
        } else {
            u64::from(self.srtt_us >> 3) + u64::from(self.rttvar_us)
        };
        self.jiffies(rto_us).min(self.jiffies(RTO_MAX_US))
    }

    /// The jiffies until the tail loss probe of a single segment: two smoothed RTTs plus rto_min, or the RTO if that is
    /// earlier (`tcp_schedule_loss_probe()`, 6.12; before 6.11 it used 200 ms instead of rto_min).
    pub fn probe_jiffies(&self) -> u64 {
        let rto = self.rto_jiffies();
        if self.srtt_us == 0 {
            return rto;
        }
        self.jiffies(u64::from(self.srtt_us >> 2) + self.rto_min_us)
            .min(rto)
    }

    /// Converts jiffies to microseconds.
    pub const fn micros(&self, jiffies: u64) -> u64 {
        jiffies * 1_000_000 / self.hz
    }

    /// usecs_to_jiffies(): rounds up.
    const fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz).div_ceil(1_000_000)
    }

    fn rto_min(&self) -> u32 {
        u32::try_from(self.rto_min_us).unwrap_or(u32::MAX)
    }

    /// The current RTO, microseconds.
    pub fn rto_us(&self) -> u64 {
        self.micros(self.rto_jiffies())
    }

    /// Takes a sample.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "m is below 2^28, and so is what is made of it but for the factor of eight"
    )]
    pub fn take(&mut self, sample: Sample) {
        // Eight times this value must fit into 32 bits; it is more than four minutes.
        let mut m = sample.rtt_us.min((1 << 28) - 1) as i64;
        if self.srtt_us == 0 {
            self.srtt_us = ((m as u32) << 3).max(1);
            self.mdev_us = (m as u32) << 1;
            self.rttvar_us = self.mdev_us.max(self.rto_min());
            self.mdev_max_us = self.rttvar_us;
            self.window_from_us = sample.acked_us();
            return;
        }
        m -= i64::from(self.srtt_us >> 3);
        self.srtt_us = ((i64::from(self.srtt_us) + m) as u32).max(1);
        if m < 0 {
            m = -m - i64::from(self.mdev_us >> 2);
            // Not when the RTT falls, which would raise the variation.
            if m > 0 {
                m >>= 3;
            }
        } else {
            m -= i64::from(self.mdev_us >> 2);
        }
        self.mdev_us = (i64::from(self.mdev_us) + m) as u32;
        if self.mdev_us > self.mdev_max_us {
            self.mdev_max_us = self.mdev_us;
            self.rttvar_us = self.rttvar_us.max(self.mdev_max_us);
        }
        if sample.sent_us >= self.window_from_us {
            if self.mdev_max_us < self.rttvar_us {
                self.rttvar_us -= (self.rttvar_us - self.mdev_max_us) >> 2;
            }
            self.window_from_us = sample.acked_us();
            self.mdev_max_us = self.rto_min();
        }
    }

    /// The same estimator without any sample, with another rto_min, microseconds.
    #[must_use]
    pub fn with_minimum(&self, minimum_us: u64) -> Self {
        let mut new = Self {
            srtt_us: 0,
            mdev_us: 0,
            mdev_max_us: 0,
            rttvar_us: 0,
            window_from_us: 0,
            ..*self
        };
        new.set_rto_min(minimum_us);
        new
    }
}

#[cfg(test)]
mod tests;
