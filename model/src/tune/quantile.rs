//! Quantiles with a confidence bound: Clopper and Pearson (1934), one-sided at 95 %.

use crate::distribution::Distribution;

/// The error probability: 1 - 95 %.
const ERROR: f64 = 0.05;
/// -ln(5 %): the upper bound, at 95 %, of the mean number of events if none was observed.
const OF_NONE: f64 = 2.995_732_273_553_991;
/// The largest exponent for which a binomial's first term, e to the minus this, does not underflow.
/// Beyond it the Poisson bound is used, which is slightly larger.
const EXACT_TO: f64 = 600.0;

/// How many of `count` samples may lie above a value so that, at this error probability, no more
/// than `share` of all do; `None` if none may. Fewer samples than [`samples_needed`] are always too
/// few. The Poisson bound always uses 5 %.
pub(super) fn allowed_with(count: u64, share: f64, error: f64) -> Option<u64> {
    if !(share > 0.0 && share < 1.0) || count < samples_needed(share) {
        return None;
    }
    let ln_first = count as f64 * (-share).ln_1p();
    if ln_first < -EXACT_TO {
        return Some(poisson_allowed(count, share));
    }
    // P(X <= k) of a binomial distribution with the probability `share`: finds the largest k at
    // which it is at most the error.
    let odds = share / (1.0 - share);
    let mut term = ln_first.exp();
    let mut below = term;
    let mut allowed = None;
    for k in 0..count {
        if below > error {
            break;
        }
        allowed = Some(k);
        term *= (count - k) as f64 / (k + 1) as f64 * odds;
        below += term;
    }
    allowed
}

/// The same by the bound of a Poisson distribution's mean.
fn poisson_allowed(count: u64, share: f64) -> u64 {
    let (mut allowed, mut too_many) = (0, count);
    while allowed + 1 < too_many {
        let middle = u64::midpoint(allowed, too_many);
        if upper_bound(middle, count) <= share {
            allowed = middle;
        } else {
            too_many = middle;
        }
    }
    allowed
}

/// The number of samples that a share needs if none exceeds the value (the "rule of three": 3/n).
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast to an integer saturates"
)]
pub fn samples_needed(share: f64) -> u64 {
    (OF_NONE / share).ceil() as u64
}

/// The upper bound of a share at 95 % if `count` of `of` were observed: that of a Poisson distribution's mean, which is
/// slightly above that of the binomial one. 1 if `of` is 0.
pub fn upper_bound(count: u64, of: u64) -> f64 {
    if of == 0 {
        return 1.0;
    }
    let mean = match count {
        0 => OF_NONE,
        1..=100 => poisson_bound(count),
        _ => {
            // The approximation by Wilson and Hilferty; its error is below 0.001 here.
            let n = (count + 1) as f64;
            n * (1.0 - 1.0 / (9.0 * n) + 1.644_854 / (3.0 * n.sqrt())).powi(3)
        }
    };
    (mean / of as f64).min(1.0)
}

/// The mean for which `count` or fewer events have a probability of 5 %.
fn poisson_bound(count: u64) -> f64 {
    let (mut low, mut high) = (count as f64, 2.0 * count as f64 + 10.0);
    while high - low > 1e-9 * high {
        let mean = f64::midpoint(low, high);
        let mut term = (-mean).exp();
        let mut sum = term;
        for n in 1..=count {
            term *= mean / n as f64;
            sum += term;
        }
        if sum > 0.05 {
            low = mean;
        } else {
            high = mean;
        }
    }
    high
}

/// `Q(h, s)`: the smallest value (for a histogram, an upper bound of a bucket) above which, at 95
/// %, lie no more than `share` of all, microseconds. `None` with too few samples.
pub fn bounded_quantile_us(times: &Distribution, share: f64) -> Option<u64> {
    times.exceeded_by(allowed_with(times.count(), share, ERROR)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn allowed_above(count: u64, share: f64) -> Option<u64> {
        allowed_with(count, share, ERROR)
    }

    /// P(X <= k), with logarithms of factorials: a different method than above.
    fn binomial_cdf(k: u64, n: u64, p: f64) -> f64 {
        let ln_factorial = |n: u64| (1..=n).map(|i| (i as f64).ln()).sum::<f64>();
        let ln_n = ln_factorial(n);
        let term = |i: u64| {
            let ways = ln_n - ln_factorial(i) - ln_factorial(n - i);
            (ways + i as f64 * p.ln() + (n - i) as f64 * (1.0 - p).ln()).exp()
        };
        (0..=k).map(term).sum()
    }

    #[test]
    fn a_thousandth_takes_2996_samples() {
        assert_eq!(allowed_above(2995, 0.001), None);
        assert_eq!(allowed_above(2996, 0.001), Some(0));
        assert_eq!(allowed_above(4744, 0.001), Some(1));
        assert_eq!(allowed_above(0, 0.001), None);
        for share in [0.0, 1.0, -1.0, f64::NAN] {
            assert_eq!(allowed_above(1_000_000, share), None, "{share}");
        }
        // From tables of Clopper and Pearson's bound: 300 samples, 1 above: 1.571 %; 2: 2.083 %.
        assert_eq!(allowed_above(300, 0.02), Some(1));
        assert_eq!(allowed_above(300, 0.0208), Some(1));
        assert_eq!(allowed_above(300, 0.0209), Some(2));
    }

    #[test]
    fn zero_of_n_is_bounded_by_three_over_n() {
        assert_eq!(samples_needed(0.001), 2996);
        assert_eq!(samples_needed(0.01), 300);
        for (count, of, bound) in [
            (0, 3000, 2.9957),
            // From tables of the one-sided upper bounds at 95 % of the Poisson distribution.
            (1, 3000, 4.7439),
            (2, 3000, 6.2958),
            (10, 3000, 16.9622),
            (100, 30_000, 118.0800),
        ] {
            let found = upper_bound(count, of) * of as f64;
            assert!((found - bound).abs() < 0.01, "{count}: {found}");
        }
        // The two approximations agree where they meet.
        assert!((poisson_bound(100) - upper_bound(101, 1 << 40) * (1u64 << 40) as f64).abs() < 1.2);
        assert_eq!(upper_bound(0, 0), 1.0);
        assert_eq!(upper_bound(5, 5), 1.0);
    }

    #[test]
    fn exact_and_approximate_bounds_agree() {
        let count = 599_000;
        let exact = allowed_above(count, 0.001).unwrap();
        let poisson = poisson_allowed(count, 0.001);
        assert!(
            poisson <= exact && exact - poisson <= 1,
            "{poisson} {exact}"
        );
    }

    #[test]
    fn bounded_quantile_is_bucket_above_allowed() {
        let mut times = Distribution::default();
        times.add(10_000, 2_996);
        assert_eq!(bounded_quantile_us(&times, 0.001), Some(10_000));
        times.add(20_000, 1);
        assert_eq!(bounded_quantile_us(&times, 0.001), Some(20_000));
        times.add(10_000, 2_000);
        assert_eq!(bounded_quantile_us(&times, 0.001), Some(10_000));
        times.add(u64::MAX, 10);
        assert_eq!(bounded_quantile_us(&times, 0.001), Some(u64::MAX));
        assert_eq!(bounded_quantile_us(&Distribution::default(), 0.001), None);
    }

    proptest! {
        #[test]
        fn bounds_contain_observed_share(count in 0u64..5000, more in 1u64..1_000_000) {
            let of = count + more;
            let bound = upper_bound(count, of);
            prop_assert!(bound > count as f64 / of as f64 || bound == 1.0);
            prop_assert!(bound >= upper_bound(count.saturating_sub(1), of));
        }

        #[test]
        fn bound_matches_clopper_pearson(count in 1u64..3_000, share in 0.002f64..0.15) {
            let needed = samples_needed(share);
            match allowed_above(count, share) {
                Some(k) => {
                    prop_assert!(binomial_cdf(k, count, share) <= ERROR + 1e-9);
                    prop_assert!(k + 1 == count || binomial_cdf(k + 1, count, share) > ERROR - 1e-9);
                }
                // The rule of three needs at most one sample more than the binomial bound.
                None => prop_assert!(count < needed),
            }
        }

        #[test]
        fn no_more_than_allowed_lie_above_quantile(
            times in prop::collection::vec((1u64..1_000_000, 1u64..2_000), 1..40),
            share in 0.001f64..0.2,
        ) {
            let mut distribution = Distribution::default();
            for (us, count) in &times {
                distribution.add(*us, *count);
            }
            let allowed = allowed_above(distribution.count(), share);
            match (bounded_quantile_us(&distribution, share), allowed) {
                (Some(us), Some(allowed)) => {
                    prop_assert!(distribution.above(us) <= allowed);
                    // Too many samples exceed the next shorter value.
                    let shorter = times.iter().map(|(us, _)| *us).filter(|t| *t < us).max();
                    prop_assert!(shorter.is_none_or(|us| distribution.above(us) > allowed));
                }
                (None, None) => {}
                both => prop_assert!(false, "{both:?}"),
            }
        }
    }
}
