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
            let next = if newton > low && newton < high {
                newton
            } else {
                f64::midpoint(low, high)
            };
            // It need not be exact: a hundredth of the curve's width.
            if (next - at).abs() <= 0.01 / curvature.sqrt() {
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIRECTIONS: [Direction; 3] = [Direction::Either, Direction::Gain, Direction::Harm];

    fn tally(share: f64, treated: u64, control: u64) -> Tally {
        Tally {
            share: Probability::try_from(share).unwrap(),
            treated,
            control,
        }
    }

    fn ln_e(share: f64, treated: u64, control: u64, direction: Direction) -> f64 {
        Evidence::of(&[tally(share, treated, control)]).ln_e(direction)
    }

    /// The beta-binomial mixture in closed form: a product of each connection's predictive probabilities.
    fn closed_form(share: f64, treated: u64, control: u64) -> f64 {
        let factor = |n: u64, share: f64, before: u64| {
            let (n, before) = (n as f64, before as f64);
            ((PRIOR_WEIGHT * share + n) / ((PRIOR_WEIGHT + before + n) * share)).ln()
        };
        let first: f64 = (0..treated).map(|n| factor(n, share, 0)).sum();
        let then: f64 = (0..control).map(|n| factor(n, 1.0 - share, treated)).sum();
        first + then
    }

    #[test]
    fn the_most_is_where_the_rates_are_those_counted() {
        for share in [0.001, 0.05, 0.5, 0.95] {
            for (treated, control) in [(3.0, 40.0), (20.0, 10.0), (900.0, 1.0)] {
                let term = Term::new(share, treated, control);
                let likeliest = (treated / share / (control / (1.0 - share))).ln();
                let most = term.most();
                assert!((term.at(likeliest) - most).abs() < 1e-9 * most.max(1.0));
                for offset in [-1.0, -0.01, 0.01, 1.0] {
                    assert!(term.at(likeliest + offset) < most);
                }
            }
            for (treated, control, limit) in [(7.0, 0.0, 50.0), (0.0, 12.0, -50.0)] {
                let term = Term::new(share, treated, control);
                assert!((term.at(limit) - term.most()).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn probabilities_are_some_however_far_off_the_ratio() {
        for (ratio, treated) in [(-1e4, 0.0), (0.0, 0.05), (1e4, 1.0)] {
            let (is, control) = Term::new(0.05, 1.0, 1.0).probabilities(ratio);
            assert!((is - treated).abs() < 1e-12 && (is + control - 1.0).abs() < 1e-12);
        }
    }

    /// Relative to the likelihood at a ratio, it is the e-value less the likelihood there.
    #[test]
    fn the_average_is_relative_to_where_it_is_asked() {
        for (share, treated, control) in [(0.05, 3, 40), (0.5, 20, 10), (0.95, 900, 1)] {
            let evidence = Evidence::of(&[tally(share, treated, control)]);
            let ln_e = evidence.ln_e(Direction::Either);
            for at in [-1.5, -0.1, 0.0, 0.3, 2.0] {
                let wanted = ln_e - evidence.counted.at(at);
                let is = evidence.ln_average(at);
                assert!(
                    (is - wanted).abs() < 1e-6,
                    "{share} {at}: {is}, not {wanted}"
                );
            }
        }
    }

    #[test]
    fn it_is_the_beta_binomial_mixture() {
        for share in [0.001, 0.05, 0.1, 0.5, 0.95, 0.999] {
            for (treated, control) in [
                (0, 0),
                (0, 12),
                (7, 0),
                (3, 40),
                (900, 20),
                (100_000, 100_100),
            ] {
                let (wanted, is) = (
                    closed_form(share, treated, control),
                    ln_e(share, treated, control, Direction::Either),
                );
                let error = (is - wanted).abs() / wanted.abs().max(1.0);
                assert!(
                    error < 1e-8,
                    "{share} {treated} {control}: {is}, not {wanted}"
                );
            }
        }
    }

    #[test]
    fn the_likeliest_ratio_is_about_that_of_the_rates() {
        let ratio = |s, t, c| Evidence::of(&[tally(s, t, c)]).likeliest_ratio();
        for (share, treated, control) in [(0.05, 3, 40), (0.5, 20, 10), (0.95, 900, 1)] {
            let rates = treated as f64 / share / (control as f64 / (1.0 - share));
            assert!((ratio(share, treated, control).unwrap() / rates - 1.0).abs() < 0.02);
        }
        assert_eq!((ratio(0.5, 0, 3), ratio(0.5, 3, 0)), (Some(0.0), None));
    }

    #[test]
    fn both_directions_are_halves_of_an_even_split() {
        for (treated, control) in [(0, 11), (5, 9), (60, 20)] {
            let e = DIRECTIONS.map(|direction| ln_e(0.5, treated, control, direction).exp());
            assert!((e[0] - f64::midpoint(e[1], e[2])).abs() < 1e-9 * e[0]);
            assert_eq!(e[1] > e[2], treated < control);
        }
    }

    /// Stirling's formula, where the counts are as expected.
    #[test]
    fn it_is_sound_up_to_2_to_the_53() {
        let half = 1_u64 << 52;
        let n = (2 * half) as f64 + PRIOR_WEIGHT;
        let beta: f64 = 24.0 * 24.0 / 362_880.0;
        let wanted = 0.5 * (std::f64::consts::TAU * 4.0 / n).ln() - beta.ln() + 10.0 * 0.5_f64.ln();
        let is = ln_e(0.5, half, half, Direction::Either);
        assert!((is - wanted).abs() < 1e-6, "{is} {wanted}");
        // One standard deviation, the root of n / 4, is half a unit; this is 0.7 of one.
        let deviation = 1 << 25;
        let more = ln_e(0.5, half + deviation, half - deviation, Direction::Either);
        assert!((more - is - 0.25).abs() < 1e-6, "{more} {is}");
        // Far off: the divergence.
        let far = ln_e(0.5, half / 2, half + half / 2, Direction::Gain);
        let divergence = (0.25 * 0.5_f64.ln() + 0.75 * 1.5_f64.ln()) * 2.0 * half as f64;
        assert!((far / divergence - 1.0).abs() < 1e-12, "{far} {divergence}");
    }

    /// The mean over all counts of `n` bad connections, each of which is treated with `probability`.
    fn mean(share: f64, probability: f64, n: u64, direction: Direction) -> f64 {
        let mut weight = (1.0 - probability).powi(i32::try_from(n).unwrap());
        let mut sum = 0.0;
        for treated in 0..=n {
            sum += weight * ln_e(share, treated, n - treated, direction).exp();
            weight *=
                (n - treated) as f64 / (treated + 1) as f64 * probability / (1.0 - probability);
        }
        sum
    }

    #[test]
    fn the_mean_is_1_if_nothing_differs() {
        for share in [0.05, 0.1, 0.5, 0.95] {
            for n in [1, 2, 7, 40] {
                for direction in DIRECTIONS {
                    let mean = mean(share, share, n, direction);
                    assert!(
                        (mean - 1.0).abs() < 1e-9,
                        "{share} {n} {direction:?}: {mean}"
                    );
                }
                // The other way round there is nothing to prove either.
                assert!(mean(share, share * 0.7, n, Direction::Harm) < 1.0);
                assert!(mean(share, share + 0.3 * (1.0 - share), n, Direction::Gain) < 1.0);
            }
        }
    }

    /// The share is raised once three of the first bad connections were in the control arm, so by what was seen.
    #[test]
    fn the_mean_is_1_through_a_ramp() {
        fn from(before: [Tally; 2], left: u32, direction: Direction) -> f64 {
            let [mut first, mut second] = before;
            if left == 0 {
                return Evidence::of(&before).ln_e(direction).exp();
            }
            let present = if first.control < 3 {
                &mut first
            } else {
                &mut second
            };
            let probability = present.share.get();
            present.treated += 1;
            let treated = if before[0].control < 3 {
                [first, before[1]]
            } else {
                [before[0], second]
            };
            let mut control = before;
            control[usize::from(before[0].control >= 3)].control += 1;
            probability * from(treated, left - 1, direction)
                + (1.0 - probability) * from(control, left - 1, direction)
        }
        for direction in DIRECTIONS {
            let mean = from([tally(0.05, 0, 0), tally(0.5, 0, 0)], 9, direction);
            assert!((mean - 1.0).abs() < 1e-9, "{direction:?}: {mean}");
        }
    }

    /// Exactly, by the probabilities of all paths of 200 bad connections.
    #[test]
    fn it_ever_reaches_20_in_less_than_5_percent() {
        for share in [0.05, 0.1, 0.5, 0.95] {
            for direction in DIRECTIONS {
                let mut reached = 0.0;
                // By the number of treated ones, of those paths that have not reached it.
                let mut paths = vec![1.0];
                for n in 1..=200_u64 {
                    let mut next = vec![0.0; paths.len() + 1];
                    for (treated, weight) in paths.iter().enumerate() {
                        next[treated] += weight * (1.0 - share);
                        next[treated + 1] += weight * share;
                    }
                    // Others do not change the fourth digit.
                    let likely = |(_, weight): &(u64, &mut f64)| **weight > 1e-9;
                    for (treated, weight) in (0..).zip(next.iter_mut()).filter(likely) {
                        let evidence = Evidence::of(&[tally(share, treated, n - treated)]);
                        if evidence.reaches(direction, 20.0) {
                            reached += std::mem::take(weight);
                        }
                    }
                    paths = next;
                }
                println!("{share} {direction:?}: {reached:.4}");
                assert!(reached > 0.0 && reached <= 0.05, "{reached}");
            }
        }
    }

    #[test]
    fn shares_outside_are_refused() {
        for share in [0.0, 0.0009, 1.0, f64::NAN, -0.5] {
            assert!(Probability::try_from(share).is_err(), "{share}");
        }
        let error = Probability::try_from(1.0).unwrap_err().to_string();
        assert_eq!(error, "a share of 100.0000 % is outside 0.1 % to 99.9 %");
        assert!(serde_json::from_str::<Probability>("0.05").is_ok());
        assert!(serde_json::from_str::<Probability>("1.5").is_err());
    }

    proptest! {
        #[test]
        fn it_is_finite_and_the_short_cut_agrees(
            share in 0.001..0.999,
            bits in (0_u32..=53, 0_u32..=53),
            low in (any::<u64>(), any::<u64>()),
            e in 1.1..1e4,
        ) {
            let count = |bits: u32, low: u64| low & ((1 << bits) - 1);
            let evidence = Evidence::of(&[
                tally(share, count(bits.0, low.0), count(bits.1, low.1)),
                tally(0.5, 3, 4),
            ]);
            for direction in DIRECTIONS {
                let ln_e = evidence.ln_e(direction);
                prop_assert!(ln_e.is_finite());
                prop_assert_eq!(evidence.reaches(direction, e), ln_e >= e.ln());
            }
        }
    }
}
