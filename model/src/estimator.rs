//! RTO estimators: RFC 6298 with any weights, and Linux's variant with its integer arithmetic.
//!
//! Times are microseconds. A sample is compared with the RTO *before* the estimator takes it, because the timer was set
//! without knowing it.

use serde::{Deserialize, Serialize};

use crate::retransmit::{RTO_MAX_US, RTO_MIN_US};

/// One measured round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When the segment was sent, microseconds since an arbitrary moment common to the flow's samples.
    pub sent_us: u64,
    /// The time until its ACK, microseconds.
    pub rtt_us: u64,
}

impl Sample {
    /// When the ACK arrived.
    #[must_use]
    pub const fn acked_us(self) -> u64 {
        self.sent_us.saturating_add(self.rtt_us)
    }
}

/// The samples of a flow that sends one segment at a time, each when the previous one is
/// acknowledged.
#[must_use]
pub fn in_turn(rtts_us: impl IntoIterator<Item = u64>) -> Vec<Sample> {
    let mut sent_us = 0;
    let samples = rtts_us.into_iter().map(|rtt_us| {
        let sample = Sample { sent_us, rtt_us };
        sent_us = sample.acked_us();
        sample
    });
    samples.collect()
}

/// Computes an RTO from RTT samples.
pub trait Estimator: Clone {
    /// The current RTO, microseconds.
    fn rto_us(&self) -> u64;

    /// Takes a sample.
    fn take(&mut self, sample: Sample);

    /// The same estimator without any sample, with another minimum RTO (Linux: rto_min), microseconds.
    #[must_use]
    fn with_minimum(&self, minimum_us: u64) -> Self;
}

/// Weights of a new sample in the smoothed RTT (alpha) and in its variation (beta).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Weights {
    /// Weight in the smoothed RTT.
    pub alpha: f64,
    /// Weight in the variation.
    pub beta: f64,
}

impl Weights {
    /// RFC 6298's.
    pub const W1: Self = Self::eighths(1.0, 2.0);
    /// 1/8, 3/8.
    pub const W2: Self = Self::eighths(1.0, 3.0);
    /// 1/8, 1/8.
    pub const W3: Self = Self::eighths(1.0, 1.0);
    /// 3/16, 1/4.
    pub const W4: Self = Self::eighths(1.5, 2.0);
    /// 3/16, 3/8.
    pub const W5: Self = Self::eighths(1.5, 3.0);
    /// 3/16, 1/8.
    pub const W6: Self = Self::eighths(1.5, 1.0);
    /// 1/16, 1/4.
    pub const W7: Self = Self::eighths(0.5, 2.0);
    /// 1/16, 3/8.
    pub const W8: Self = Self::eighths(0.5, 3.0);
    /// 1/16, 1/8.
    pub const W9: Self = Self::eighths(0.5, 1.0);

    /// All nine, with their names.
    pub const ALL: [(&'static str, Self); 9] = [
        ("W1", Self::W1),
        ("W2", Self::W2),
        ("W3", Self::W3),
        ("W4", Self::W4),
        ("W5", Self::W5),
        ("W6", Self::W6),
        ("W7", Self::W7),
        ("W8", Self::W8),
        ("W9", Self::W9),
    ];

    const fn eighths(alpha: f64, beta: f64) -> Self {
        Self {
            alpha: alpha / 8.0,
            beta: beta / 8.0,
        }
    }
}

/// RFC 6298 section 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rfc6298 {
    /// Weights of a new sample.
    pub weights: Weights,
    /// K: the number of variations by which the RTO exceeds the smoothed RTT.
    pub k: f64,
    /// G: the clock's granularity, by which the RTO exceeds the smoothed RTT at least, microseconds.
    pub granularity_us: u64,
    /// Minimum RTO, microseconds; RFC 6298 (2.4) has 1 s.
    pub minimum_us: u64,
    /// Maximum RTO, microseconds; RFC 6298 (2.5) has 60 s or more.
    pub maximum_us: u64,
    /// RTO before the first sample, microseconds (2.1).
    pub initial_us: u64,
    /// SRTT and RTTVAR, microseconds, after the first sample.
    state: Option<(f64, f64)>,
}

impl Rfc6298 {
    /// K = 4, G = 250 us, no minimum, a maximum of 120 s, 1 s before the first sample; set the fields for other values.
    #[must_use]
    pub const fn new(weights: Weights) -> Self {
        Self {
            weights,
            k: 4.0,
            granularity_us: 250,
            minimum_us: 0,
            maximum_us: RTO_MAX_US,
            initial_us: 1_000_000,
            state: None,
        }
    }

    /// Smoothed RTT and its variation (SRTT, RTTVAR), microseconds; `None` before the first sample.
    #[must_use]
    pub const fn state(&self) -> Option<(f64, f64)> {
        self.state
    }
}

impl Estimator for Rfc6298 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "neither negative nor, below the maximum, large"
    )]
    fn rto_us(&self) -> u64 {
        let rto_us = match self.state {
            None => self.initial_us,
            Some((srtt, rttvar)) => {
                (srtt + (self.k * rttvar).max(self.granularity_us as f64)).round() as u64
            }
        };
        rto_us.max(self.minimum_us).min(self.maximum_us)
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a round trip is below 2^53 microseconds"
    )]
    fn take(&mut self, sample: Sample) {
        let r = sample.rtt_us as f64;
        let Weights { alpha, beta } = self.weights;
        self.state = Some(match self.state {
            // (2.2)
            None => (r, r / 2.0),
            // (2.3): the variation first, with the old smoothed RTT.
            Some((srtt, rttvar)) => (
                (1.0 - alpha) * srtt + alpha * r,
                (1.0 - beta) * rttvar + beta * (srtt - r).abs(),
            ),
        });
    }

    fn with_minimum(&self, minimum_us: u64) -> Self {
        Self {
            minimum_us,
            state: None,
            ..*self
        }
    }
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
    #[must_use]
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
    #[must_use]
    pub const fn state(&self) -> (u32, u32) {
        (self.srtt_us >> 3, self.mdev_us >> 2)
    }

    /// The current RTO, jiffies.
    #[must_use]
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
    #[must_use]
    pub fn probe_jiffies(&self) -> u64 {
        let rto = self.rto_jiffies();
        if self.srtt_us == 0 {
            return rto;
        }
        self.jiffies(u64::from(self.srtt_us >> 2) + self.rto_min_us)
            .min(rto)
    }

    /// Converts jiffies to microseconds.
    #[must_use]
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
}

impl Estimator for Linux {
    fn rto_us(&self) -> u64 {
        self.micros(self.rto_jiffies())
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "m is below 2^28, and so is what is made of it but for the factor of eight"
    )]
    fn take(&mut self, sample: Sample) {
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

    fn with_minimum(&self, minimum_us: u64) -> Self {
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
