//! Checks the estimators with hand-made samples and the RFC's formulas.

use proptest::prelude::*;

use super::*;

const HZ: u32 = 250;

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
fn a_computed_example() {
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
        rtos(Rfc6298::new(Weights::W5), &rtts[..2]),
        [300_000, 393_750]
    );
}

#[test]
fn the_state_of_the_computed_example() {
    let mut rfc = Rfc6298::new(Weights::W1);
    assert_eq!(rfc.state(), None);
    let states = in_turn([100_000, 200_000, 100_000])
        .into_iter()
        .map(|sample| {
            rfc.take(sample);
            rfc.state().unwrap()
        });
    assert!(states.eq([
        (100_000.0, 50_000.0),
        (112_500.0, 62_500.0),
        (110_937.5, 50_000.0)
    ]));
    // with_minimum() is for a new connection.
    let other = rfc.with_minimum(7_000);
    let new = Rfc6298 {
        minimum_us: 7_000,
        ..Rfc6298::new(Weights::W1)
    };
    assert_eq!(other, new);
}

/// Expected values from another transcription of `tcp_rtt_estimator()` (net/ipv4/tcp_input.c, Linux 6.12), in Python:
/// eight times the smoothed RTT, four times the mean deviation, and the variation.
#[test]
fn the_kernels_arithmetic() {
    let check = |rto_min_us, samples: &[Sample], states: &[(u32, u32, u32)]| {
        let mut linux = Linux::new(1000).with_minimum(rto_min_us);
        assert_eq!(samples.len(), states.len());
        for (sample, state) in samples.iter().zip(states) {
            linux.take(*sample);
            assert_eq!((linux.srtt_us, linux.mdev_us, linux.rttvar_us), *state);
        }
        assert_eq!(
            linux.with_minimum(4_000),
            Linux::new(1000).with_minimum(4_000)
        );
    };
    check(
        200_000,
        &in_turn([400_000, 100_000, 350_000, 350_000, 100, 600_000, 90_000]),
        &[
            (3_200_000, 800_000, 800_000),
            (2_900_000, 812_500, 812_500),
            (2_887_500, 621_875, 764_844),
            (2_876_563, 477_344, 692_969),
            (2_517_093, 507_360, 646_567),
            (2_802_457, 665_884, 665_884),
            (2_542_150, 677_613, 677_613),
        ],
    );
    // Segments sent in one window.
    let sent = [(0, 400_000), (10, 100_000), (20, 500_000), (30, 300)];
    check(
        50_000,
        &sent.map(|(sent_us, rtt_us)| Sample { sent_us, rtt_us }),
        &[
            (3_200_000, 800_000, 800_000),
            (2_900_000, 812_500, 812_500),
            (3_037_500, 746_875, 812_500),
            (2_658_113, 770_958, 812_500),
        ],
    );
    // The longest RTT whose eightfold fits.
    for rtt_us in [(1 << 28) - 1, 1 << 28, u64::MAX] {
        let state = [(2_147_483_640, 536_870_910, 536_870_910)];
        check(200_000, &[Sample { sent_us: 0, rtt_us }], &state);
    }
}

#[test]
fn a_steady_path_ends_at_the_granularity() {
    let last = *rtos(Rfc6298::new(Weights::W1), &[1_000; 100])
        .last()
        .unwrap();
    assert_eq!(last, 1_250);
}

#[test]
fn the_weights_are_the_published_ones() {
    let pairs = Weights::ALL.map(|(_, w)| (w.alpha * 16.0, w.beta * 8.0));
    let alphas = [2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0];
    let betas = [2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0];
    for (i, (alpha, beta)) in pairs.into_iter().enumerate() {
        assert_eq!((alpha, beta), (alphas[i], betas[i]));
    }
}

/// Measured on Linux 6.18, HZ 250, over a veth: the RTO that ss(8) shows, milliseconds.
#[test]
fn the_measured_rtos() {
    let after = |estimator: Linux, n: usize| rtos(estimator, &vec![100; n + 1])[n] / 1000;
    let own = Linux::new(HZ);
    let low = own.with_minimum(8_000);
    for n in [0, 1, 2, 5, 10, 20, 40] {
        assert_eq!(after(own, n), 204);
        assert_eq!(after(low, n), 12);
    }
    assert_eq!(after(own.with_minimum(50_000), 3), 56);
    assert_eq!(after(own.with_minimum(500_000), 3), 504);
    assert_eq!(after(own.with_minimum(20_000), 3), 24);
    assert_eq!(after(own.with_minimum(100_000), 3), 104);
}

#[test]
fn late_rto_min_takes_effect_gradually() {
    // Measured after this many round trips.
    let measured = [
        (0, 204),
        (1, 204),
        (2, 156),
        (5, 72),
        (10, 24),
        (20, 12),
        (40, 12),
    ];
    let samples = in_turn([100; 41]);
    let mut estimator = Linux::new(HZ);
    for (n, sample) in samples.into_iter().enumerate() {
        estimator.take(sample);
        if n == 0 {
            estimator.set_rto_min(8_000);
        }
        if let Some((_, ms)) = measured.iter().find(|(at, _)| *at == n) {
            assert_eq!(estimator.rto_us() / 1000, *ms, "after {n}");
        }
    }
    // Raising it has no effect until the variation grows: the minimum only bounds the maximum of a window.
    let mut low = Linux::new(HZ).with_minimum(8_000);
    low.take(Sample {
        sent_us: 0,
        rtt_us: 100,
    });
    low.set_rto_min(200_000);
    assert_eq!(low.rto_us(), 12_000);
}

#[test]
fn a_fall_counts_an_eighth_of_a_rise() {
    // Constant at 100 ms until the first deviation has vanished, then 80 ms off.
    let after = |last_us: u64| {
        let mut linux = Linux::new(1000).with_minimum(2_000);
        let rtts = std::iter::repeat_n(100_000, 100).chain([last_us]);
        in_turn(rtts)
            .into_iter()
            .for_each(|sample| linux.take(sample));
        linux.state()
    };
    assert_eq!(after(180_000), (110_000, 20_000));
    assert_eq!(after(20_000), (90_000, 2_500));
}

#[test]
fn the_probe_is_no_later_than_the_rto() {
    let mut low = Linux::new(1000).with_minimum(10_000);
    assert_eq!(low.probe_jiffies(), 1000);
    for sample in in_turn([4_000; 30]) {
        low.take(sample);
    }
    // Steady: the RTO is one smoothed RTT earlier.
    assert_eq!((low.rto_jiffies(), low.probe_jiffies()), (14, 14));
    // After a slow answer the variation determines the RTO, but not the probe.
    low.take(Sample {
        sent_us: 1_000_000,
        rtt_us: 84_000,
    });
    assert!(low.rto_jiffies() > 80);
    // 2 * (4 + 80 / 8) + 10.
    assert_eq!(low.probe_jiffies(), 38);
}

#[test]
fn linux_rises_at_once_and_falls_by_windows() {
    let low = Linux::new(1000).with_minimum(2_000);
    let mut rtts = vec![1_000; 20];
    rtts.push(41_000);
    rtts.extend([1_000; 10]);
    let rtos = rtos(low, &rtts);
    // 1 ms plus 2 ms; then 40 ms off: SRTT 6 ms, and the variation is a window's maximum.
    assert_eq!(rtos[19], 3_000);
    assert!(rtos[20] > 40_000, "{rtos:?}");
    assert!(rtos[21..].is_sorted_by(|a, b| a >= b), "{rtos:?}");
    // All in one window: the RTO does not fall.
    let mut estimator = low;
    for (n, rtt_us) in (0u64..).zip([1_000, 41_000, 1_000, 1_000, 1_000, 1_000]) {
        let sent_us = n;
        estimator.take(Sample { sent_us, rtt_us });
    }
    assert!(estimator.rto_us() > 40_000);
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
    fn rfc_as_the_naive_one(
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

    #[test]
    fn linux_is_never_below_what_it_is_bound_by(
        rtts in prop::collection::vec(0u64..u64::MAX, 1..50),
        hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
        rto_min_us in 1_000u64..200_000,
    ) {
        let linux = Linux::new(hz).with_minimum(rto_min_us);
        let jiffy_us = 1_000_000u64.div_ceil(hz.into());
        for rto_us in rtos(linux, &rtts) {
            prop_assert!(rto_us + jiffy_us >= rto_min_us && rto_us <= RTO_MAX_US);
        }
    }

    #[test]
    fn linux_is_near_the_rfc_where_rtts_rise_slowly(
        start in 10_000u64..100_000,
        steps in prop::collection::vec(0u64..2_000, 60..100),
    ) {
        // Every window has one sample and none falls: the arithmetic is the same except for the window's maximum and
        // the rounding to jiffies.
        let rtts: Vec<u64> = steps.iter().scan(start, |rtt, step| {
            *rtt += step;
            Some(*rtt)
        }).collect();
        let rfc = Rfc6298 { granularity_us: 0, ..Rfc6298::new(Weights::W1) };
        let linux = Linux::new(1000).with_minimum(0);
        let pairs = rtos(linux, &rtts).into_iter().zip(rtos(rfc, &rtts));
        for (linux, rfc) in pairs.skip(1) {
            prop_assert!(linux + 1_000 >= rfc, "{} {}", linux, rfc);
        }
    }
}
