//! Checks the estimator with hand-made samples and measured RTOs.

use proptest::prelude::*;

use super::*;

const HZ: u32 = 250;

/// The RTO after each sample.
fn rtos(mut estimator: Linux, rtts_us: &[u64]) -> Vec<u64> {
    let samples = in_turn(rtts_us.iter().copied());
    samples
        .into_iter()
        .map(|sample| {
            estimator.take(sample);
            estimator.rto_us()
        })
        .collect()
}

/// Expected values from another transcription of `tcp_rtt_estimator()` (net/ipv4/tcp_input.c, Linux 6.12), in Python:
/// eight times the smoothed RTT, four times the mean deviation, and the variation.
#[test]
fn estimator_matches_kernel_arithmetic() {
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

/// Measured on Linux 6.18, HZ 250, over a veth: the RTO that ss(8) shows, milliseconds.
#[test]
fn estimator_matches_measured_rtos() {
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
fn falling_rtt_counts_an_eighth() {
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
fn probe_is_no_later_than_rto() {
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

proptest! {
    #[test]
    fn rto_is_never_below_its_minimum(
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
}
