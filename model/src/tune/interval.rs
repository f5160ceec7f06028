//! Which ratios of two arms' rates agree with their counts, at any time one looks.

use serde::{Deserialize, Serialize};

use super::evidence::Evidence;

/// A log ratio beyond what counts below 2^64 can tell from infinity.
const FAR: f64 = 80.0;

/// An interval of the ratio of rates, treatment to control.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The lower end, 0 or more.
    pub low: f64,
    /// The upper end; `None` while the control arm has had nothing bad.
    pub high: Option<f64>,
}

impl Interval {
    /// All ratios `r` for which the e-value against "the ratio is `r`" has not reached `1 / (1 - confidence)`.
    ///
    /// That e-value is the average likelihood over the likelihood at `r`. It is valid as the one against 1 is
    /// ([`super::evidence`]), with the probability of the treatment that belongs to `r`. A ratio that stays the same
    /// is therefore in all the intervals one ever looks at with a probability of `confidence` (0 to 1) at least. The
    /// likelihood has one peak, so that these ratios are one interval.
    pub fn of(evidence: &Evidence, confidence: f64) -> Self {
        let (treated, control) = evidence.totals();
        let likeliest = match (treated > 0.0, control > 0.0) {
            (false, false) => {
                return Self {
                    low: 0.0,
                    high: None,
                };
            }
            (false, true) => -FAR,
            (true, false) => FAR,
            (true, true) => evidence.likeliest(),
        };
        let level = evidence.ln_average(likeliest) + (1.0 - confidence).ln();
        let likelihood = evidence.likelihood_around(likeliest);
        let end = |sign: f64| likeliest + sign * distance(|d| likelihood(sign * d) > level);
        Self {
            low: if treated > 0.0 { end(-1.0).exp() } else { 0.0 },
            high: (control > 0.0).then(|| end(1.0).exp()),
        }
    }

    /// Whether a ratio is in it.
    pub fn contains(self, ratio: f64) -> bool {
        self.low <= ratio && self.high.is_none_or(|high| ratio <= high)
    }
}

/// The distance up to which something holds.
fn distance(holds: impl Fn(f64) -> bool) -> f64 {
    let mut high = 1e-9;
    while holds(high) && high < 4.0 * FAR {
        high *= 2.0;
    }
    let mut low = high / 2.0;
    while high - low > 1e-9 * high {
        let middle = f64::midpoint(low, high);
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tune::evidence::{Direction, Probability, Tally};

    fn tally(share: f64, treated: u64, control: u64) -> Tally {
        Tally {
            share: Probability::try_from(share).unwrap(),
            treated,
            control,
        }
    }

    fn interval(tallies: &[Tally]) -> Interval {
        Interval::of(&Evidence::of(tallies), 0.95)
    }

    #[test]
    fn an_arm_without_bad_connections_has_an_open_end() {
        assert_eq!(interval(&[]), interval(&[tally(0.5, 0, 0)]));
        assert_eq!(interval(&[tally(0.5, 0, 0)]).high, None);
        let gain = interval(&[tally(0.5, 0, 30)]);
        assert_eq!(gain.low, 0.0);
        assert!(
            gain.high.is_some_and(|high| (0.1..0.5).contains(&high)),
            "{gain:?}"
        );
        let harm = interval(&[tally(0.5, 30, 0)]);
        assert!(
            harm.high.is_none() && (2.0..10.0).contains(&harm.low),
            "{harm:?}"
        );
        // By symmetry.
        assert!((harm.low * gain.high.unwrap() - 1.0).abs() < 1e-6);
        // By the trapezoidal rule over 400,000 steps.
        let few = interval(&[tally(0.5, 0, 12)]);
        assert!((few.high.unwrap() - 0.960_801_107).abs() < 1e-6, "{few:?}");
    }

    #[test]
    fn it_narrows_around_the_ratio() {
        // A tenth is treated, with three times the control arm's rate.
        for (n, width) in [(100, 5.0), (10_000, 0.4), (1 << 52, 1e-6)] {
            let is = interval(&[tally(0.1, 3 * n, 9 * n)]);
            assert!(is.contains(3.0), "{is:?}");
            assert!(is.high.unwrap() - is.low < width, "{n}: {is:?}");
        }
    }

    proptest! {
        /// It leaves out 1 exactly where the e-value of either direction has reached 20.
        #[test]
        fn it_is_the_test_inverted(
            first in (0.001..0.999, 0_u64..40, 0_u64..40),
            second in (0.001..0.999, 0_u64..4000, 0_u64..4000),
        ) {
            let tallies = [first, second].map(|(share, treated, control)| tally(share, treated, control));
            let evidence = Evidence::of(&tallies);
            let ln_e = evidence.ln_e(Direction::Either);
            prop_assume!((ln_e - 20_f64.ln()).abs() > 1e-6);
            prop_assert_eq!(!interval(&tallies).contains(1.0), ln_e > 20_f64.ln());
        }
    }
}
