//! E-values against their definition, and over random walks.

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

/// On the flat side of the top, where the curve is hardly curved.
#[test]
fn it_is_finite_however_rare_the_treated_are() {
    for bits in 1..=53 {
        for share in [0.001, 0.05, 0.5, 0.9835865448495794, 0.999] {
            let control = 897_843_345_883_585_024 & ((1 << bits) - 1);
            let evidence = Evidence::of(&[tally(share, 0, control), tally(0.5, 3, 4)]);
            for direction in DIRECTIONS {
                let ln_e = evidence.ln_e(direction);
                assert!(ln_e.is_finite(), "{share} {control}: {ln_e}");
            }
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
        weight *= (n - treated) as f64 / (treated + 1) as f64 * probability / (1.0 - probability);
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
