//! Evidence that one arm has more bad attempts than the other: an e-value that is valid at every
//! observation.
//!
//! Each connection is assigned to the treated arm with a known probability `p`, by a hash. If the
//! timers make no difference, a bad attempt is in the treated arm with exactly this probability,
//! however losses cluster in time. The e-value is the likelihood of the counts relative to that,
//! averaged over the prior Beta(2p, 2(1 - p)) of the probability. For [`Direction::Harm`] the prior
//! is cut off below `p`, for [`Direction::Gain`] above it.
//!
//! # Why it is valid
//!
//! Given all earlier attempts, the next bad attempt multiplies the likelihood ratio at each
//! probability `q` by `q / p` with probability `p`, else by `(1 - q) / (1 - p)`: 1 on average. So
//! the average over a prior fixed in advance also stays 1 on average. It reaches `1 / alpha` at any
//! observation with a probability of at most `alpha` (Ville's inequality).
//!
//! This requires independently assigned arms.

use serde::{Deserialize, Serialize};

/// The weight of the prior, in bad attempts.
const PRIOR_WEIGHT: f64 = 2.0;
/// The e-value at which a ratio is outside of the 95 % interval.
const OUTSIDE: f64 = 20.0;
/// Maximum terms of the continued fraction, which needs about the square root of the counts.
const MOST_TERMS: u32 = 20_000;

/// The probability `p` that a bad attempt is in the treated arm if the timers make no difference:
/// the share of connections assigned to it.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Probability(f64);

/// A probability at which one arm would be empty.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a share of {} % leaves one arm empty", share * 100.0)]
pub struct ProbabilityError {
    /// The refused share, 0 to 1.
    pub share: f64,
}

impl Probability {
    /// The smallest and the largest probability.
    pub const RANGE: std::ops::RangeInclusive<f64> = 1e-9..=1.0 - 1e-9;

    /// The probability, 0 to 1.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Probability {
    type Error = ProbabilityError;

    fn try_from(share: f64) -> Result<Self, ProbabilityError> {
        if Self::RANGE.contains(&share) {
            Ok(Self(share))
        } else {
            Err(ProbabilityError { share })
        }
    }
}

impl From<Probability> for f64 {
    fn from(probability: Probability) -> Self {
        probability.0
    }
}

/// The hypothesis to be proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The rates differ.
    Either,
    /// The rate of the treated arm is lower.
    Gain,
    /// The rate of the treated arm is higher.
    Harm,
}

/// The bad attempts in each arm, among connections assigned with one share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tally {
    /// The share of treated connections.
    pub share: Probability,
    /// Bad attempts in the treated arm, 0 or more.
    pub treated: f64,
    /// Bad attempts in the control arm, 0 or more.
    pub control: f64,
}

/// A ratio of rates, treatment to control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Ratio {
    /// The most likely ratio; absent while the control arm has no bad attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub likeliest: Option<f64>,
    /// Lower end of the interval, which is valid over all evaluations together (95 %).
    pub low: f64,
    /// Upper end of the interval; absent: none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
}

impl Tally {
    /// The natural logarithm of the e-value. It ever reaches ln 20 with a probability of at most 5
    /// % if there is no effect.
    pub fn ln_e(self, direction: Direction) -> f64 {
        let (p, rest) = (self.share.0, 1.0 - self.share.0);
        let (a, b) = (PRIOR_WEIGHT * p, PRIOR_WEIGHT * rest);
        let (treated, control) = (self.treated, self.control);
        let either = ln_beta(a + treated, b + control)
            - ln_beta(a, b)
            - treated * p.ln()
            - control * rest.ln();
        either
            + match direction {
                Direction::Either => 0.0,
                Direction::Gain => {
                    ln_share_below(a + treated, b + control, p, rest)
                        - ln_share_below(a, b, p, rest)
                }
                Direction::Harm => {
                    ln_share_below(b + control, a + treated, rest, p)
                        - ln_share_below(b, a, rest, p)
                }
            }
    }

    /// An upper bound of [`Self::ln_e`] that is faster to compute. The likelihood is largest at the
    /// observed probability, or at `p`, relative to which it is 1, if the counts point the other
    /// way.
    pub fn at_most(self, direction: Direction) -> f64 {
        let (p, rest) = (self.share.0, 1.0 - self.share.0);
        let more_treated = self.treated * rest - self.control * p;
        let points_there = match direction {
            Direction::Either => true,
            Direction::Gain => more_treated < 0.0,
            Direction::Harm => more_treated > 0.0,
        };
        if !points_there {
            return 0.0;
        }
        let sum = self.treated + self.control;
        let part = |count: f64, share: f64| match count > 0.0 {
            true => count * (count / (sum * share)).ln(),
            false => 0.0,
        };
        part(self.treated, p) + part(self.control, rest)
    }

    /// Whether the e-value has reached `e`.
    pub fn reaches(self, direction: Direction, e: f64) -> bool {
        self.at_most(direction) >= e.ln() && self.ln_e(direction) >= e.ln()
    }

    /// The ratio of the rates, with all ratios against which the e-value is below 20: the average
    /// likelihood relative to the likelihood at that ratio. A constant ratio is in all intervals
    /// ever computed with a probability of 95 %.
    pub fn ratio(self) -> Ratio {
        let (p, rest) = (self.share.0, 1.0 - self.share.0);
        let (treated, control) = (self.treated, self.control);
        let odds = p / rest;
        let likeliest = treated / control / odds;
        let (a, b) = (PRIOR_WEIGHT * p, PRIOR_WEIGHT * rest);
        let level = ln_beta(a + treated, b + control) - ln_beta(a, b) - OUTSIDE.ln();
        // At the probability of the treated arm that corresponds to the ratio.
        let is_inside = |ln_ratio: f64| {
            let more = ln_ratio.exp() * odds;
            let likelihood = |count: f64, q: f64| if count > 0.0 { count * q.ln() } else { 0.0 };
            likelihood(treated, more / (1.0 + more)) + likelihood(control, 1.0 / (1.0 + more))
                > level
        };
        // exp(80) is practically infinite. The likelihood has one peak.
        let peak = likeliest.ln().clamp(-80.0, 80.0);
        let end = |far: f64| {
            let (mut inside, mut outside) = (peak, far);
            for _ in 0..64 {
                let middle = f64::midpoint(inside, outside);
                if is_inside(middle) {
                    inside = middle;
                } else {
                    outside = middle;
                }
            }
            inside.exp()
        };
        Ratio {
            likeliest: (control > 0.0).then_some(likeliest),
            low: if treated > 0.0 { end(-100.0) } else { 0.0 },
            high: (control > 0.0).then(|| end(100.0)),
        }
    }
}

/// The mean and the variance of many values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// How many.
    pub count: f64,
    /// Their mean.
    pub mean: f64,
    /// Their variance.
    pub variance: f64,
}

/// A difference of two means, with the interval that contains the true one at all observations
/// together, with a probability of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The first mean minus the second.
    pub mean: f64,
    /// The ends of the interval.
    pub interval: [f64; 2],
}

impl Moments {
    /// The difference to the mean of another arm; `None` if an arm has fewer than two values.
    ///
    /// Connect times are mostly short, and a few have a second or more: an arm with few values has
    /// seen none of these. So each arm has at least the variance of both together.
    pub fn minus(self, other: Self) -> Option<Difference> {
        let count = self.count + other.count;
        let all = (self.mean * self.count + other.mean * other.count) / count;
        let around = |arm: Self| arm.count * (arm.variance + (arm.mean - all).powi(2));
        let pooled = (around(self) + around(other)) / count;
        let of_mean = |arm: Self| arm.variance.max(pooled) / arm.count;
        let half = standard_errors(count) * (of_mean(self) + of_mean(other)).sqrt();
        let mean = self.mean - other.mean;
        (self.count >= 2.0 && other.count >= 2.0).then_some(Difference {
            mean,
            interval: [mean - half, mean + half],
        })
    }
}

/// The number of standard errors around a mean of this many independent values within which the
/// true mean is at all observations together, with a probability of 95 %: an asymptotic confidence
/// sequence (Waudby-Smith and others, "Time-uniform central limit theory", 2024), narrowest at
/// 10,000 values.
fn standard_errors(values: f64) -> f64 {
    /// Where the sequence is narrowest.
    const NARROWEST: f64 = 10_000.0;
    let error = 1.0 / OUTSIDE;
    let rho = (-2.0 * error.ln() + (1.0 - 2.0 * error.ln()).ln()) / NARROWEST;
    let scaled = values * rho;
    (2.0 * (scaled + 1.0) / scaled * ((scaled + 1.0).sqrt() / error).ln()).sqrt()
}

/// The logarithm of the beta function.
fn ln_beta(a: f64, b: f64) -> f64 {
    ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b)
}

/// Stirling's series for x >= 10; smaller x use Γ(x + 1) = x Γ(x).
fn ln_gamma(mut x: f64) -> f64 {
    let mut below = 1.0;
    while x < 10.0 {
        below *= x;
        x += 1.0;
    }
    let square = x * x;
    let series = (1.0 / 12.0
        - (1.0 / 360.0 - (1.0 / 1260.0 - 1.0 / (1680.0 * square)) / square) / square)
        / x;
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - below.ln()
}

/// The logarithm of the regularised incomplete beta function: of the part of Beta(a, b) below `x`,
/// where `rest` is `1 - x`. `statrs` is not used, because it returns the part itself, which may
/// underflow to 0.
fn ln_share_below(a: f64, b: f64, x: f64, rest: f64) -> f64 {
    let front = a * x.ln() + b * rest.ln() - ln_beta(a, b);
    // The fraction converges fast on the side of the tail.
    if x < (a + 1.0) / (a + b + 2.0) {
        front + (fraction(a, b, x) / a).ln()
    } else {
        let above = (front + (fraction(b, a, rest) / b).ln()).exp();
        // Rounding must not make the part equal to 1.
        (-above.min(1.0 - f64::EPSILON)).ln_1p()
    }
}

/// The continued fraction of the incomplete beta function, by Lentz's method (NIST DLMF 8.17.22).
fn fraction(a: f64, b: f64, x: f64) -> f64 {
    let (mut c, mut d) = (1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0)));
    let mut product = d;
    for m in 1..MOST_TERMS {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let before = product;
        for term in [even, odd] {
            d = 1.0 / (1.0 + term * d);
            c = 1.0 + term / c;
            product *= c * d;
        }
        if (product / before - 1.0).abs() < 1e-14 {
            break;
        }
    }
    product
}

#[cfg(test)]
mod tests;
