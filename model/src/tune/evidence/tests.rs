//! Compares e-values with their definition, and over random walks.

use proptest::prelude::*;

use super::*;

const DIRECTIONS: [Direction; 3] = [Direction::Either, Direction::Gain, Direction::Harm];

fn tally(share: f64, treated: u64, control: u64) -> Tally {
    Tally {
        share: Probability::try_from(share).unwrap(),
        treated: treated as f64,
        control: control as f64,
    }
}

fn ln_e(share: f64, treated: u64, control: u64, direction: Direction) -> f64 {
    tally(share, treated, control).ln_e(direction)
}

/// The beta-binomial mixture as a product of each attempt's predictive probabilities.
fn product(share: f64, treated: u64, control: u64) -> f64 {
    let factor = |n: u64, share: f64, before: u64| {
        let (n, before) = (n as f64, before as f64);
        ((PRIOR_WEIGHT * share + n) / ((PRIOR_WEIGHT + before + n) * share)).ln()
    };
    let first: f64 = (0..treated).map(|n| factor(n, share, 0)).sum();
    let then: f64 = (0..control).map(|n| factor(n, 1.0 - share, treated)).sum();
    first + then
}

#[test]
fn e_value_is_the_product_of_predictions() {
    for share in [1e-8, 0.001, 0.05, 0.1, 0.5, 0.95, 0.999] {
        for (treated, control) in [
            (0, 0),
            (0, 12),
            (7, 0),
            (3, 40),
            (900, 20),
            (100_000, 100_100),
        ] {
            let wanted = product(share, treated, control);
            let is = ln_e(share, treated, control, Direction::Either);
            let error = (is - wanted).abs() / wanted.abs().max(1.0);
            assert!(
                error < 1e-8,
                "{share} {treated} {control}: {is}, not {wanted}"
            );
        }
    }
}

/// Computed by the trapezoidal rule over 400,000 steps of the log odds.
#[test]
fn sided_e_values_are_integrals_of_their_side() {
    for (share, treated, control, gain, harm) in [
        (0.5, 0, 12, 6.445_842, -2.564_949),
        (0.95, 90, 1, -2.474_781, 0.578_735),
        (0.1, 20, 10, -4.628_112, 25.812_314),
    ] {
        let is = ln_e(share, treated, control, Direction::Gain);
        assert!((is - gain).abs() < 1e-5, "{is} {gain}");
        let is = ln_e(share, treated, control, Direction::Harm);
        assert!((is - harm).abs() < 1e-5, "{is} {harm}");
    }
}

/// Within a standard deviation of the expected counts, a normal distribution approximates them
/// well.
#[test]
fn e_values_are_sound_up_to_ten_billion() {
    for (n, more) in [(10_000, 100), (1_000_000, 1000), (10_000_000_000, 100_000)] {
        let is = ln_e(0.5, n + more, n - more, Direction::Either);
        // For 2n attempts, the standard deviation is the square root of n / 2.
        let wanted = 1.0 - 0.5 * (n as f64 / std::f64::consts::PI * 4.0).ln();
        assert!((is - wanted).abs() < 0.01, "{n}: {is} {wanted}");
        let harm = ln_e(0.5, n + more, n - more, Direction::Harm);
        // 92.1 % of the normal distribution are on that side, and half of the prior.
        assert!(
            (harm - is - (2.0_f64 * 0.921_35).ln()).abs() < 0.01,
            "{n}: {harm} {is}"
        );
    }
}

#[test]
fn both_directions_are_halves_of_an_even_split() {
    for (treated, control) in [(0, 11), (5, 9), (60, 20)] {
        let e = DIRECTIONS.map(|direction| ln_e(0.5, treated, control, direction).exp());
        assert!((e[0] - f64::midpoint(e[1], e[2])).abs() < 1e-9 * e[0]);
        assert_eq!(e[1] > e[2], treated < control);
    }
}

/// The mean e-value over all counts of `n` bad attempts, each of which is treated with
/// `probability`.
fn mean(share: f64, probability: f64, n: u64, direction: Direction) -> f64 {
    let mut weight = (1.0 - probability).powi(i32::try_from(n).unwrap());
    let mut sum = 0.0;
    for treated in 0..=n {
        sum += weight * ln_e(share, treated, n - treated, direction).exp();
        weight *= (n - treated) as f64 / (treated + 1) as f64 * probability / (1.0 - probability);
    }
    sum
}

#[test]
fn e_value_mean_is_1_without_difference() {
    for share in [0.05, 0.1, 0.5, 0.95] {
        for n in [1, 2, 7, 40] {
            for direction in DIRECTIONS {
                let mean = mean(share, share, n, direction);
                assert!(
                    (mean - 1.0).abs() < 1e-9,
                    "{share} {n} {direction:?}: {mean}"
                );
            }
            // An effect in the other direction proves nothing either.
            assert!(mean(share, share * 0.7, n, Direction::Harm) < 1.0);
            assert!(mean(share, share + 0.3 * (1.0 - share), n, Direction::Gain) < 1.0);
        }
    }
}

/// The exact probability over all paths of 200 bad attempts.
#[test]
fn e_value_ever_reaches_20_in_less_than_5_percent() {
    for share in [0.05, 0.1, 0.5, 0.95] {
        for direction in DIRECTIONS {
            let mut reached = 0.0;
            // Weights of the paths that have not reached it, by the number of treated attempts.
            let mut paths = vec![1.0];
            for n in 1..=200_u64 {
                let mut next = vec![0.0; paths.len() + 1];
                for (treated, weight) in paths.iter().enumerate() {
                    next[treated] += weight * (1.0 - share);
                    next[treated + 1] += weight * share;
                }
                // Less likely paths do not change the fourth digit.
                let likely = |(_, weight): &(u64, &mut f64)| **weight > 1e-9;
                for (treated, weight) in (0..).zip(next.iter_mut()).filter(likely) {
                    if ln_e(share, treated, n - treated, direction) >= 20_f64.ln() {
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
    for share in [0.0, 1e-10, 1.0, f64::NAN, -0.5] {
        assert!(Probability::try_from(share).is_err(), "{share}");
    }
    let error = Probability::try_from(1.0).unwrap_err().to_string();
    assert_eq!(error, "a share of 100 % leaves one arm empty");
}

#[test]
fn interval_is_open_where_an_arm_has_nothing_bad() {
    let ratio = |treated, control| tally(0.5, treated, control).ratio();
    let none = ratio(0, 0);
    assert_eq!((none.low, none.likeliest, none.high), (0.0, None, None));
    let (gain, harm) = (ratio(0, 30), ratio(30, 0));
    assert_eq!((gain.low, gain.likeliest), (0.0, Some(0.0)));
    assert!(gain.high.is_some_and(|high| (0.1..0.5).contains(&high)));
    assert_eq!((harm.likeliest, harm.high), (None, None));
    // The arms are symmetric.
    assert!((harm.low * gain.high.unwrap() - 1.0).abs() < 1e-6);
}

/// 1.96 at a single observation; here for all of them.
#[test]
fn standard_errors_are_least_at_ten_thousand() {
    let [few, least, many] = [100.0, 10_000.0, 1e7].map(standard_errors);
    assert!((least - 3.0).abs() < 0.1, "{least}");
    assert!(few > least && many > least, "{few} {many}");
}

/// A tenth is treated, with three times the rate of the control arm.
#[test]
fn interval_narrows_around_the_ratio() {
    for (n, width) in [(100, 5.0), (10_000, 0.4), (1 << 36, 1e-3)] {
        let is = tally(0.1, 3 * n, 9 * n).ratio();
        assert!((is.likeliest.unwrap() - 3.0).abs() < 1e-9);
        assert!(is.low < 3.0 && is.high.unwrap() > 3.0, "{is:?}");
        assert!(is.high.unwrap() - is.low < width, "{n}: {is:?}");
    }
}

proptest! {
    /// A stored file may contain any counts.
    #[test]
    fn e_value_is_a_number_within_its_bound(
        share in 1e-8..0.999,
        bits in (0_u32..=63, 0_u32..=63),
        low in (any::<u64>(), any::<u64>()),
    ) {
        let count = |bits: u32, low: u64| low & ((1 << bits) - 1);
        let tally = tally(share, count(bits.0, low.0), count(bits.1, low.1));
        for direction in DIRECTIONS {
            let ln_e = tally.ln_e(direction);
            prop_assert!(!ln_e.is_nan() && ln_e < f64::INFINITY, "{}", ln_e);
            let slack = 1e-9 * (1.0 + tally.treated + tally.control);
            prop_assert!(ln_e <= tally.at_most(direction) + slack, "{}", ln_e);
        }
        let ratio = tally.ratio();
        prop_assert!(ratio.high.is_none_or(|high| ratio.low <= high));
    }

    /// The interval excludes 1 exactly if the e-value of either direction has reached 20.
    #[test]
    fn interval_is_the_test_inverted(
        share in 0.001..0.999,
        treated in 0_u64..4000,
        control in 0_u64..4000,
    ) {
        let tally = tally(share, treated, control);
        let ln_e = tally.ln_e(Direction::Either);
        prop_assume!((ln_e - 20_f64.ln()).abs() > 1e-6);
        let ratio = tally.ratio();
        let contains = ratio.low <= 1.0 && ratio.high.is_none_or(|high| high >= 1.0);
        prop_assert_eq!(!contains, ln_e > 20_f64.ln());
    }
}
