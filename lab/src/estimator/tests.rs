//! Checks the estimators with hand-made samples and the RFC's formulas.

use proptest::prelude::*;
use rto_model::estimator::in_turn;

use super::*;

/// The RTO after each sample.
fn rtos<E: Estimator>(mut estimator: E, rtts_us: &[u64]) -> Vec<u64> {
    let samples = in_turn(rtts_us.iter().copied());
    samples
        .into_iter()
        .map(|sample| {
            estimator.take(sample);
            estimator.rto_us()
        })
        .collect()
}

#[test]
fn rfc6298_matches_computed_example() {
    let rfc = Rfc6298::new(Weights::W1);
    assert_eq!(rfc.rto_us(), 1_000_000);
    // R = 100 ms: SRTT 100, RTTVAR 50, RTO 300.
    // R = 200 ms: RTTVAR 3/4 * 50 + 1/4 * 100 = 62.5, SRTT 7/8 * 100 + 1/8 * 200 = 112.5, RTO 362.5.
    // R = 100 ms: RTTVAR 3/4 * 62.5 + 1/4 * 12.5 = 50, SRTT 110.9375, RTO 310.9375.
    let rtts = [100_000, 200_000, 100_000];
    assert_eq!(rtos(rfc, &rtts), [300_000, 362_500, 310_938]);
    assert_eq!(
        rtos(rfc.with_minimum(350_000), &rtts),
        [350_000, 362_500, 350_000]
    );
    let bounded = Rfc6298 {
        maximum_us: 310_000,
        ..rfc
    };
    assert_eq!(rtos(bounded, &rtts), [300_000, 310_000, 310_000]);
    // Other weights: W5 = 3/16, 3/8; RTTVAR 5/8 * 50 + 3/8 * 100 = 68.75, SRTT 118.75.
    assert_eq!(
        rtos(Rfc6298::new(Weights::ALL[4].1), &rtts[..2]),
        [300_000, 393_750]
    );
}

#[test]
fn steady_path_converges_to_granularity() {
    let last = *rtos(Rfc6298::new(Weights::W1), &[1_000; 100])
        .last()
        .unwrap();
    assert_eq!(last, 1_250);
}

#[test]
fn weights_are_published_ones() {
    let pairs = Weights::ALL.map(|(_, w)| (w.alpha * 16.0, w.beta * 8.0));
    let alphas = [2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0];
    let betas = [2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0];
    for (i, (alpha, beta)) in pairs.into_iter().enumerate() {
        assert_eq!((alpha, beta), (alphas[i], betas[i]));
    }
}

/// RFC 6298 section 2, implemented independently.
fn naive(rtts_us: &[u64], alpha: f64, beta: f64, g: f64) -> Vec<f64> {
    let mut srtt = 0.0;
    let mut rttvar = 0.0;
    let mut all = Vec::new();
    for (n, r) in rtts_us.iter().map(|r| *r as f64).enumerate() {
        if n == 0 {
            srtt = r;
            rttvar = r / 2.0;
        } else {
            rttvar = rttvar - beta * rttvar + beta * f64::abs(srtt - r);
            srtt = srtt - alpha * srtt + alpha * r;
        }
        all.push(srtt + f64::max(g, 4.0 * rttvar));
    }
    all
}

proptest! {
    #[test]
    fn rfc6298_matches_naive_implementation(
        rtts in prop::collection::vec(0u64..10_000_000, 1..50),
        which in 0usize..9,
        granularity_us in 0u64..10_000,
    ) {
        let weights = Weights::ALL[which].1;
        let rfc = Rfc6298 { granularity_us, maximum_us: u64::MAX, ..Rfc6298::new(weights) };
        let expected = naive(&rtts, weights.alpha, weights.beta, granularity_us as f64);
        for (ours, theirs) in rtos(rfc, &rtts).into_iter().zip(expected) {
            prop_assert!((ours as f64 - theirs).abs() <= 0.51, "{} {}", ours, theirs);
        }
    }
}
