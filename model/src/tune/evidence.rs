//! Evidence that one arm has more bad outcomes than the other: an e-value that holds at any time one looks.
//!
//! Each connection is in the treatment with a known probability, by a hash. If the timers make no difference, a
//! *bad* connection (one that failed, was slow, had a spurious copy) is in the treatment with just this
//! probability `p`, however losses cluster in time. If the treatment's rate is `exp(s)` times the control's, it is
//! there with probability `p exp(s) / (1 - p + p exp(s))`. The e-value is the likelihood of the counts, relative to
//! that at `s = 0`, averaged over a prior of `s`: the prior of the beta-binomial mixture Beta(10p, 10(1-p)),
//! written in the log ratio, so that one `s` serves all shares of a ramp.
//!
//! # Why it is valid
//!
//! Given all that came before, the next bad connection multiplies the likelihood ratio at each `s` by
//! `exp(s) / (1 - p + p exp(s))` with probability `p`, else by `1 / (1 - p + p exp(s))`, with the `p` in force when
//! its arm was drawn: 1 on average, whatever `p` was chosen by what was seen before. The average over a prior fixed
//! in advance therefore stays 1 on average as well, and reaches `1 / alpha` with a probability of `alpha` at most,
//! at any of the times one looks (Ville's inequality). For [`Direction::Harm`] only `s > 0` is averaged, and for
//! [`Direction::Gain`] only `s < 0`, where the mean is 1 at most for each smaller (greater) probability than `p`
//! too: they hold if the treatment is no worse (no better), not only if it is the same.
//!
//! It needs arms that are drawn independently. With `unit = "peer"` all connections of a peer are in one arm:
//! then peers are what is to be counted, each once in the experiment.

use serde::{Deserialize, Serialize};

/// So many bad connections the prior is worth.
const PRIOR_WEIGHT: f64 = 10.0;
/// Where a density has fallen by exp(-36), the rest is not integrated: 2e-16 of it.
const NEGLIGIBLE: f64 = 36.0;
/// Panels of a side of the integral, each twice as wide as the one before: a share of 0.1 % has a tail a thousand
/// times as long as its peak is wide.
const PANELS: u32 = 12;
/// Gauss and Legendre's positions and weights for ten points, one half of them.
const POINTS: [(f64, f64); 5] = [
    (0.148_874_338_981_631_2, 0.295_524_224_714_752_9),
    (0.433_395_394_129_247_2, 0.269_266_719_309_996_3),
    (0.679_409_568_299_024_4, 0.219_086_362_515_982),
    (0.865_063_366_688_984_5, 0.149_451_349_150_580_6),
    (0.973_906_528_517_171_7, 0.066_671_344_308_688_1),
];

/// The probability `p` that a bad connection is in the treatment if the timers make no difference: the share of
/// connections that are drawn into it, 0.001 to 0.999.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Probability(f64);

/// A probability by which one arm would be next to empty.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a share of {:.4} % is outside 0.1 % to 99.9 %", share * 100.0)]
pub struct ProbabilityError {
    /// What was asked for, 1 for all.
    pub share: f64,
}

impl Probability {
    /// The least and the greatest.
    pub const RANGE: std::ops::RangeInclusive<f64> = 0.001..=0.999;
    /// 0.5 %.
    pub const HALF_A_PERCENT: Self = Self(0.005);

    /// 0 to 1.
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
    fn from(share: Probability) -> Self {
        share.0
    }
}

/// How many bad connections each arm had, of those whose arm was drawn with one share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tally {
    /// The share that was treated.
    pub share: Probability,
    /// In the treatment.
    pub treated: u64,
    /// In the control arm.
    pub control: u64,
}

/// What is to be proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// That the rates differ.
    Either,
    /// That the treatment's rate is lower.
    Gain,
    /// That it is higher.
    Harm,
}

/// What counts of two arms say about the ratio of their rates.
#[derive(Clone, Debug)]
pub struct Evidence {
    prior: Curve,
    counted: Curve,
    with_prior: Curve,
}

impl Evidence {
    /// Of the counts at each share of a ramp, in its order.
    ///
    /// The prior is centred by the first share. It is fixed in advance only if the first share always stands first,
    /// also while it has counted nothing. Of no tallies it is that of an even split, and proves nothing.
    pub fn of(tallies: &[Tally]) -> Self {
        let first = tallies.first().map_or(0.5, |tally| tally.share.get());
        let prior = Term::new(first, PRIOR_WEIGHT * first, PRIOR_WEIGHT * (1.0 - first));
        let terms = tallies.iter().map(|tally| {
            Term::new(
                tally.share.get(),
                tally.treated as f64,
                tally.control as f64,
            )
        });
        let counted: Vec<Term> = terms
            .filter(|term| term.treated + term.control > 0.0)
            .collect();
        let with_prior = counted.iter().copied().chain([prior]).collect();
        Self {
            prior: Curve(vec![prior]),
            counted: Curve(counted),
            with_prior: Curve(with_prior),
        }
    }

    /// The natural logarithm of the e-value: ln 20 or more comes to pass with a probability of 5 % at most if there
    /// is nothing to prove.
    ///
    /// Its error is below 1e-8 for counts up to 1e5. At 2^53 it is below 1e-6 where the counts are nearly as expected,
    /// and 1e-12 of the result where they are far off.
    pub fn ln_e(&self, direction: Direction) -> f64 {
        if self.counted.0.is_empty() {
            return 0.0;
        }
        self.with_prior.ln_integral(direction) - self.prior.ln_integral(direction)
    }

    /// Whether the e-value is so large (more than 1), or larger.
    ///
    /// Cheaper than [`Self::ln_e`] where it is not nearly so: an average is never above the largest likelihood
    /// ratio, which is easily computed, and is 1 where the counts point the other way.
    pub fn reaches(&self, direction: Direction, e: f64) -> bool {
        let points_there = match direction {
            Direction::Either => true,
            Direction::Gain => self.counted.slope(0.0) < 0.0,
            Direction::Harm => self.counted.slope(0.0) > 0.0,
        };
        points_there && self.counted.most() >= e.ln() && self.ln_e(direction) >= e.ln()
    }

    /// How many bad connections there are of each arm.
    pub(super) fn totals(&self) -> (f64, f64) {
        let sum = |of: fn(&Term) -> f64| self.counted.0.iter().map(of).sum();
        (sum(|term| term.treated), sum(|term| term.control))
    }

    /// The log ratio at which the counts are most likely; only where both arms have some.
    pub(super) fn likeliest(&self) -> f64 {
        self.counted.top()
    }

    /// The ratio of rates at which the counts are most likely; `None` while the control arm has had nothing bad.
    pub fn likeliest_ratio(&self) -> Option<f64> {
        let (treated, control) = self.totals();
        (control > 0.0).then(|| {
            if treated > 0.0 {
                self.likeliest().exp()
            } else {
                0.0
            }
        })
    }

    /// The log likelihood of the counts at `at + offset`, relative to that at `at`, as a function of the offset.
    pub(super) fn likelihood_around(&self, at: f64) -> impl Fn(f64) -> f64 {
        let around = self.counted.around(at);
        move |offset| around.at(offset)
    }

    /// The average of the likelihood over the prior, as a logarithm, relative to that at `at`.
    pub(super) fn ln_average(&self, at: f64) -> f64 {
        self.with_prior.around(at).ln_integral(Direction::Either) + self.prior.at(at)
            - self.prior.ln_integral(Direction::Either)
    }
}

/// The log likelihood of counts at one share, as a function of the log ratio of rates; 0 where that is 0.
#[derive(Clone, Copy, Debug)]
struct Term {
    treated: f64,
    control: f64,
    /// The probability of the treatment where the log ratio is 0.
    share: f64,
    /// 1 - share, which may be lost in rounding the share.
    rest: f64,
}

impl Term {
    fn new(share: f64, treated: f64, control: f64) -> Self {
        Self {
            treated,
            control,
            share,
            rest: 1.0 - share,
        }
    }

    /// The probabilities of the treatment and of the control arm.
    fn probabilities(self, ratio: f64) -> (f64, f64) {
        // The larger exponential is divided out.
        let (treated, control) = if ratio <= 0.0 {
            (self.share * ratio.exp(), self.rest)
        } else {
            (self.share, self.rest * (-ratio).exp())
        };
        let sum = treated + control;
        (treated / sum, control / sum)
    }

    fn at(self, ratio: f64) -> f64 {
        // By the arm that is rarer there, so that the terms do not nearly cancel.
        let treated = (self.treated, self.share, ratio);
        let control = (self.control, self.rest, -ratio);
        let (rarer, other) = if self.share * ratio.exp() <= self.rest {
            (treated, control)
        } else {
            (control, treated)
        };
        let change = rarer.1 * rarer.2.exp_m1();
        // The sum of both parts, which rounds to 1 where the change is small, and is lost where that is nearly -1.
        let ln_sum = if change > -0.5 {
            change.ln_1p()
        } else {
            (other.1 + rarer.1 * rarer.2.exp()).ln()
        };
        rarer.0 * rarer.2 - (rarer.0 + other.0) * ln_sum
    }

    fn slope(self, ratio: f64) -> f64 {
        let (treated, control) = self.probabilities(ratio);
        self.treated * control - self.control * treated
    }

    /// The second derivative, which is negative, with its sign reversed.
    fn curvature(self, ratio: f64) -> f64 {
        let (treated, control) = self.probabilities(ratio);
        (self.treated + self.control) * treated * control
    }

    /// The same, relative to its value at `ratio`, as a function of the distance from there: it has the same form.
    fn around(self, ratio: f64) -> Self {
        let (share, rest) = self.probabilities(ratio);
        Self {
            share,
            rest,
            ..self
        }
    }

    /// The largest value: counts times the divergence of their own share from the one in force.
    fn most(self) -> f64 {
        let counts = self.treated + self.control;
        let part = |count: f64, share: f64| match count {
            0.0 => 0.0,
            _ => count * (count / (counts * share)).ln(),
        };
        part(self.treated, self.share) + part(self.control, self.rest)
    }
}

/// A sum of such terms: concave.
#[derive(Clone, Debug)]
struct Curve(Vec<Term>);

impl Curve {
    fn at(&self, ratio: f64) -> f64 {
        self.0.iter().map(|term| term.at(ratio)).sum()
    }

    fn slope(&self, ratio: f64) -> f64 {
        self.0.iter().map(|term| term.slope(ratio)).sum()
    }

    fn curvature(&self, ratio: f64) -> f64 {
        self.0.iter().map(|term| term.curvature(ratio)).sum()
    }

    fn around(&self, ratio: f64) -> Self {
        Self(self.0.iter().map(|term| term.around(ratio)).collect())
    }

    /// What it is not above.
    fn most(&self) -> f64 {
        self.0.iter().map(|term| term.most()).sum()
    }

    /// Where it is highest: Newton's steps, halved where they would leave what is known.
    fn top(&self) -> f64 {
        let (mut low, mut high) = (-1.0, 1.0);
        while self.slope(low) < 0.0 && low > -1e3 {
            low *= 2.0;
        }
        while self.slope(high) > 0.0 && high < 1e3 {
            high *= 2.0;
        }
        let mut at = 0.0;
        for _ in 0..100 {
            let slope = self.slope(at);
            if slope > 0.0 {
                low = at;
            } else {
                high = at;
            }
            let curvature = self.curvature(at);
            let newton = at + slope / curvature;
            let is_newton = newton > low && newton < high;
            let next = if is_newton {
                newton
            } else {
                f64::midpoint(low, high)
            };
            // It need not be exact: a hundredth of the curve's width. A half step may be as short far from the top, where
            // the curve is hardly curved.
            if is_newton && (next - at).abs() <= 0.01 / curvature.sqrt() {
                return next;
            }
            at = next;
        }
        at
    }

    /// The logarithm of the integral of its exponential, over the log ratios of a direction.
    fn ln_integral(&self, direction: Direction) -> f64 {
        let top = self.top();
        let (top, left, right) = match direction {
            Direction::Either => (top, f64::INFINITY, f64::INFINITY),
            Direction::Harm => (top.max(0.0), top.max(0.0), f64::INFINITY),
            Direction::Gain => (top.min(0.0), f64::INFINITY, -top.min(0.0)),
        };
        // Relative to the top the exponentials neither overflow nor lose digits.
        let around = self.around(top);
        let sum = around.side(-1.0, left) + around.side(1.0, right);
        self.at(top) + sum.ln()
    }

    /// The integral from 0 to one side, as far as `limit` or as anything counts.
    fn side(&self, sign: f64, limit: f64) -> f64 {
        let fallen = |distance: f64| -self.at(sign * distance) >= NEGLIGIBLE;
        let mut reach = 8.0 / self.curvature(0.0).sqrt();
        while !fallen(reach) && reach < limit {
            reach *= 2.0;
        }
        while fallen(reach / 1.25) {
            reach /= 1.25;
        }
        let reach = reach.min(limit);
        let panel = |n: u32| {
            let end = reach * 0.5_f64.powf(f64::from(n));
            let begin = if n + 1 == PANELS { 0.0 } else { end / 2.0 };
            let (half, middle) = ((end - begin) / 2.0, f64::midpoint(begin, end));
            let pair = |(x, weight): &(f64, f64)| {
                let value = |x: f64| self.at(sign * (middle + half * x)).exp();
                weight * (value(*x) + value(-x))
            };
            half * POINTS.iter().map(pair).sum::<f64>()
        };
        (0..PANELS).map(panel).sum()
    }
}

#[cfg(test)]
mod tests;
