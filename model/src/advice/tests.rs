//! Advice from observed times.

use proptest::prelude::*;

use super::*;
use crate::estimator::in_turn;

/// The default floor of learnt values.
const MIN_US: u64 = law::Settings::new(250).min_us;
const QUESTION: Question = Question {
    hz: 250,
    share: 0.001,
    min_us: MIN_US,
    peer_delack_us: PEER_DELACK_US,
};

/// The advice for these times of handshakes.
fn initial(times: &Distribution, question: &Question) -> Advice {
    initial_rto(&times.clone().into(), question, INITIAL_RTO_US)
}

/// The suggestion in it, microseconds.
fn suggested(times: &Distribution, question: &Question) -> u64 {
    initial(times, question).suggestion.unwrap().value_us
}

/// The reason for none.
fn reason(times: &Distribution) -> Option<NoSuggestion> {
    initial(times, &QUESTION).reason
}

fn near() -> Distribution {
    (0..5000).map(|n| 200 + n % 300).collect()
}

#[test]
fn near_peer_gets_shortest_values() {
    let advice = initial(&near(), &QUESTION);
    // Twice half a millisecond, and the law's minimum.
    let suggestion = advice.suggestion.unwrap();
    assert_eq!((suggestion.jiffies, suggestion.value_us), (15, 60_000));
    // The policy's own minimum.
    let short = Question {
        min_us: 20_000,
        ..QUESTION
    };
    assert_eq!(suggested(&near(), &short), 20_000);
    assert_eq!(suggestion.expected.share, 0.0);
    assert!((suggestion.expected.at_most - 0.0006).abs() < 1e-5);
    let near = near();
    let advice = rto_min(&RoundTrips::Unordered(near.clone()), &QUESTION, RTO_MIN_US);
    // Above the peer's delayed ACK, whatever the RTTs are.
    assert_eq!(advice.suggestion.unwrap().value_us, 48_000);
    assert!(advice.candidates[0].below_delack);
    let quick = Question {
        peer_delack_us: 5_000,
        ..QUESTION
    };
    let advice = rto_min(&RoundTrips::Unordered(near.clone()), &quick, RTO_MIN_US);
    // Above that delayed ACK and two jiffies of a peer at HZ 250.
    assert_eq!(advice.suggestion.unwrap().value_us, 16_000);
}

#[test]
fn slow_tail_raises_value() {
    let with = |us| {
        let mut times = near();
        times.add(us, 50);
        times
    };
    assert_eq!(suggested(&with(40_000), &QUESTION), 80_000);
    let advice = initial(&with(40_000), &QUESTION);
    let short = advice.candidates.iter().find(|c| c.jiffies == 5).unwrap();
    assert!((short.expected.share - 50.0 / 5050.0).abs() < 1e-9);
    assert!(short.expected.at_most > short.expected.share);
    // A single slow time in ten thousand may be ignored only if one in a hundred is acceptable.
    let mut times: Distribution = (0..10_000).map(|_| 500).collect();
    times.add(300_000, 1);
    for (share, us) in [(0.01, 60_000), (0.000_4, 600_000)] {
        assert_eq!(suggested(&times, &Question { share, ..QUESTION }), us);
    }
}

#[test]
fn too_few_or_too_slow_samples_have_no_advice() {
    let few: Distribution = (0..299).map(|_| 500).collect();
    let advice = initial(&few, &QUESTION);
    assert_eq!(advice.reason, Some(NoSuggestion::TooFewSamples));
    assert_eq!((advice.samples, advice.needed), (299, 300));
    // Too few for the share: three times the longest.
    let some: Distribution = (0..2995).map(|_| 30_000).collect();
    assert_eq!(suggested(&some, &QUESTION), 92_000);
    // The bounds are shown nevertheless.
    assert!(advice.present.expected.at_most > 0.001);
    let none = Distribution::default();
    for round_trips in [
        RoundTrips::Unordered(none.clone()),
        RoundTrips::Flows(Vec::new()),
    ] {
        let advice = rto_min(&round_trips, &QUESTION, RTO_MIN_US);
        assert_eq!(advice.reason, Some(NoSuggestion::TooFewSamples));
        assert_eq!(advice.present.expected.at_most, 1.0);
    }
    // Satellite links: twice the time exceeds the kernel's own value.
    let far: Distribution = (0..5000).map(|_| 600_000).collect();
    assert_eq!(reason(&far), Some(NoSuggestion::NothingShorter));
    // A last bucket without an upper bound.
    let mut unknown = near();
    unknown.add(u64::MAX, 100);
    assert_eq!(reason(&unknown), Some(NoSuggestion::NothingShorter));
    let advice = rto_min(
        &RoundTrips::Unordered(unknown.clone()),
        &QUESTION,
        RTO_MIN_US,
    );
    assert_eq!(advice.reason, Some(NoSuggestion::NothingShorter));
}

#[test]
fn rto_min_covers_spread_of_rtts() {
    let times: Distribution = (0..5000)
        .map(|n| if n % 2 == 0 { 500 } else { 50_000 })
        .collect();
    let advice = rto_min(&RoundTrips::Unordered(times.clone()), &QUESTION, RTO_MIN_US);
    assert_eq!(advice.suggestion.unwrap().value_us, 100_000);
    // The same distance for all: long RTTs, but steady.
    let times: Distribution = (0..5000).map(|_| 50_000).collect();
    let advice = rto_min(&RoundTrips::Unordered(times.clone()), &QUESTION, RTO_MIN_US);
    assert_eq!(advice.suggestion.unwrap().value_us, 48_000);
}

#[test]
fn ordered_flows_are_judged_in_order() {
    // Steady, with every 50th answer 70 ms late.
    let late = |n: u64| if n % 50 == 49 { 70_000 } else { 300 };
    let flows = vec![in_turn((0..5000).map(late))];
    let advice = rto_min(&RoundTrips::Flows(flows.clone()), &QUESTION, RTO_MIN_US);
    assert_eq!(advice.samples, 4999);
    let suggestion = advice.suggestion.unwrap();
    // A value above 48 ms and up to 72 ms is sufficient.
    assert!((48_000..=72_000).contains(&suggestion.value_us));
    let low = advice
        .candidates
        .iter()
        .find(|c| c.value_us == 12_000)
        .unwrap();
    assert!((low.expected.share - 0.02).abs() < 0.001, "{low:?}");
    assert!(low.below_delack);
}

#[test]
fn retransmitted_segments_give_no_samples() {
    // Half of the answers take 20 ms: an estimator that sampled them would soon wait as long, and so would its probe.
    let rtts = (0..4501).map(|n| if n % 2 == 1 { 20_000 } else { 300 });
    let flows = vec![in_turn(rtts)];
    let advice = rto_min(&RoundTrips::Flows(flows.clone()), &QUESTION, 8_000);
    let share = advice.present.expected.share;
    assert!((share - 0.5).abs() < 0.001, "{share}");
    let mut open = Linux::new(250).with_minimum(8_000);
    flows[0].iter().for_each(|sample| open.take(*sample));
    assert!(open.rto_us() > 20_000, "{open:?}");
}

/// The output of the reference implementation (prng.di.unimi.it/splitmix64.c) for the seed 1234567.
#[test]
fn draws_are_those_of_splitmix64() {
    let mut random = SplitMix64(1_234_567);
    for draw in [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
        4_593_380_528_125_082_431,
        16_408_922_859_458_223_821,
    ] {
        assert_eq!(random.next(), draw);
    }
}

#[test]
fn drawn_samples_follow_the_distribution() {
    let times: Distribution = [1_000, 1_000, 1_000, 50_000].into_iter().collect();
    let flows = draw(&times, 50_000);
    assert_eq!(flows, draw(&times, 50_000));
    let all: Vec<_> = flows.iter().flatten().map(|s| s.rtt_us).collect();
    assert_eq!((flows.len(), all.len()), (200, 50_000));
    let long = all.iter().filter(|us| **us == 50_000).count();
    assert!(long.abs_diff(12_500) < 500 && all.iter().all(|us| [1_000, 50_000].contains(us)));
    assert!(draw(&Distribution::default(), 10).is_empty());
}

proptest! {
    #[test]
    fn suggested_initial_rto_keeps_share(
        times in prop::collection::vec((1u64..300_000, 1u64..2_000), 1..20),
        hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
        share in 0.000_5f64..0.1,
        delack_us in 0u64..100_000,
    ) {
        let mut distribution = Distribution::default();
        for (us, count) in &times {
            distribution.add(*us, *count);
        }
        let question = Question { hz, share, min_us: MIN_US, peer_delack_us: delack_us };
        let advice = initial(&distribution, &question);
        prop_assert_eq!(advice.suggestion.is_none(), advice.reason.is_some());
        if let Some(s) = advice.suggestion {
            prop_assert!(s.expected.share <= share);
            prop_assert!(s.value_us < INITIAL_RTO_US && s.jiffies >= 2);
            // Rounding the microseconds up again gives the same jiffies.
            prop_assert_eq!(question.jiffies(s.value_us), s.jiffies);
        }
    }
}

proptest! {
    // Each case draws and evaluates some hundred thousand samples.
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn suggested_rto_min_keeps_share(
        times in prop::collection::vec((1u64..150_000, 100u64..2_000), 1..6),
        hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
        share in 0.001f64..0.1,
    ) {
        let mut distribution = Distribution::default();
        for (us, count) in &times {
            distribution.add(*us, *count);
        }
        let question = Question { hz, share, min_us: MIN_US, peer_delack_us: PEER_DELACK_US };
        let advice = rto_min(&RoundTrips::Unordered(distribution.clone()), &question, RTO_MIN_US);
        if let Some(s) = advice.suggestion {
            prop_assert!(s.expected.at_most <= share && !s.below_delack);
            prop_assert!(s.value_us > PEER_DELACK_US && s.value_us <= RTO_MIN_US);
        }
    }
}

/// A path whose level drifts by the minute: 3,000 samples decide, and the next 3,000 are judged by that.
#[test]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast to an integer saturates"
)]
fn initial_rto_holds_where_the_level_drifts() {
    const RUNS: u32 = 300;
    const A_MINUTE: usize = 50;
    const MINUTES: usize = 60;
    let mut random = SplitMix64(1);
    // Irwin and Hall: nearly normal.
    let mut normal = || {
        (0..12)
            .map(|_| random.below(1 << 20) as f64 / f64::from(1 << 20))
            .sum::<f64>()
            - 6.0
    };
    let mut missed = [0, 0];
    for _ in 0..RUNS {
        let mut level = 0.0;
        let mut hour = || -> Vec<u64> {
            let mut all = Vec::new();
            for _ in 0..MINUTES {
                level = 0.95 * level + 0.1 * normal();
                // As the end of a bucket.
                let us = |normal: f64| 2500 * (40.0 * (level + 0.1 * normal).exp()) as u64 + 2500;
                all.extend((0..A_MINUTE).map(|_| us(normal())));
            }
            all
        };
        let seen: Distribution = hour().into_iter().collect();
        let next = hour();
        let advice = initial_rto(&seen.into(), &QUESTION, INITIAL_RTO_US);
        let us = advice.suggestion.unwrap().value_us;
        // With the headroom of two, and without.
        for (missed, us) in missed.iter_mut().zip([us, us / 2]) {
            let above = next.iter().filter(|took| **took > us).count();
            *missed += u32::from(above as f64 > QUESTION.share * next.len() as f64);
        }
    }
    assert!(missed[0] * 100 <= 6 * RUNS, "{missed:?}");
    assert!(missed[1] * 100 >= 30 * RUNS, "{missed:?}");
}
