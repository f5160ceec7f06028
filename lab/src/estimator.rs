//! RTO estimators: RFC 6298 with any weights, and Linux's variant.
//!
//! Times are microseconds. A sample is compared with the RTO *before* the estimator takes it, because the timer was set
//! without knowing it.

use rto_model::estimator::{Linux, Sample};
use rto_model::retransmit::RTO_MAX_US;
use serde::Serialize;

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
    /// 1/16, 3/8.
    pub const W8: Self = Self::eighths(0.5, 3.0);

    /// The nine pairs of the published study, with their names.
    pub const ALL: [(&'static str, Self); 9] = [
        ("W1", Self::W1),
        ("W2", Self::eighths(1.0, 3.0)),
        ("W3", Self::eighths(1.0, 1.0)),
        ("W4", Self::eighths(1.5, 2.0)),
        ("W5", Self::eighths(1.5, 3.0)),
        ("W6", Self::eighths(1.5, 1.0)),
        ("W7", Self::eighths(0.5, 2.0)),
        ("W8", Self::W8),
        ("W9", Self::eighths(0.5, 1.0)),
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
}

impl Estimator for Rfc6298 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
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

impl Estimator for Linux {
    fn rto_us(&self) -> u64 {
        self.rto_us()
    }

    fn take(&mut self, sample: Sample) {
        self.take(sample);
    }

    fn with_minimum(&self, minimum_us: u64) -> Self {
        self.with_minimum(minimum_us)
    }
}

#[cfg(test)]
mod tests;
