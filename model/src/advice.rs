//! Which initial RTO and rto_min would suit the round trips that were observed, and how sure that is.
//!
//! A suggestion is conservative:
//!
//! - The share of spurious retransmissions it is chosen by is not the observed one but its upper bound at
//!   95 % ([`upper_bound`]): of n samples none of which exceeded a value, 3/n may (the "rule of three"). With
//!   fewer samples than the asked share needs there is no suggestion.
//! - An initial RTO is twice the least value that would do: there is no variation to go by before the first
//!   sample, and not every peer has been seen.
//! - An rto_min lies above the peers' delayed ACK and two jiffies of a slow peer. Below it the tail loss probe
//!   of a request without answer comes before the delayed ACK (measured: 1 in 20 requests with 8 and 20 ms,
//!   none with 48 ms).
//! - What counts is the first timer of a single segment: the RTO, or the tail loss probe if that is sooner (two
//!   smoothed RTTs and rto_min). That of several segments does not depend on rto_min.
//! - All is rounded up to jiffies. A timer of n jiffies never fires sooner.
//!
//! # Samples without order
//!
//! Of a histogram nobody knows in which order, and on which connection, its values came. Linux's estimator is
//! then run over values drawn at random (always the same ones), which is right if every connection sees all of
//! them. Values drawn so vary more from one to the next than those of one path, which makes the estimate of the
//! RTO larger than it would be; so the suggestion must also be twice the whole spread. Smoothed RTTs hide single
//! slow answers: the share computed from them is too low by what they hide.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    estimator::{Estimator, Linux, Sample, in_turn},
    retransmit::RTO_MAX_US,
    study::{Sampling, Study},
};

/// The kernel's initial RTO (`TCP_TIMEOUT_INIT`), microseconds.
pub const INITIAL_RTO_US: u64 = 1_000_000;
/// The kernel's rto_min, and the largest a program can set (`TCP_RTO_MIN`), microseconds.
pub const RTO_MIN_US: u64 = crate::retransmit::RTO_MIN_US;
/// How long a peer with the kernel's defaults delays an ACK at least (`TCP_DELACK_MIN`), microseconds.
pub const PEER_DELACK_US: u64 = 40_000;
/// By how much later a delayed ACK may come: two jiffies at HZ 250.
const PEER_TIMER_US: u64 = 8_000;
/// `TCP_TIMEOUT_MIN`: the least rto_min, jiffies.
const LEAST_JIFFIES: u64 = 2;
/// An initial RTO is so many times the least that would do.
const HEADROOM: u64 = 2;
/// -ln(5 %): the upper bound of the expected number of what did not happen.
const OF_NONE: f64 = 2.995_732_273_553_991;
/// Values of the tables, microseconds.
const INITIAL_CANDIDATES_US: [u64; 7] = [
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    INITIAL_RTO_US,
];
const MIN_CANDIDATES_US: [u64; 5] = [10_000, 20_000, 50_000, 100_000, RTO_MIN_US];
/// Samples of a flow made of values without order.
const DRAWN_FLOW: usize = 250;
/// Where the spread begins: the share of the fastest that is not counted.
const SPREAD_FROM: f64 = 0.05;

/// Times and how often they were seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    counts: BTreeMap<u64, u64>,
    count: u64,
}

impl Distribution {
    /// Adds times that were so long at most: a value, or the upper end of a histogram's bucket
    /// (`u64::MAX` if it has none), microseconds.
    pub fn add(&mut self, at_most_us: u64, count: u64) {
        // So that sums of parts never exceed what can be counted.
        let count = count.min(u64::MAX - self.count);
        if count > 0 {
            *self.counts.entry(at_most_us).or_default() += count;
            self.count += count;
        }
    }

    /// Adds another.
    pub fn extend(&mut self, other: &Self) {
        for (at_most_us, count) in &other.counts {
            self.add(*at_most_us, *count);
        }
    }

    /// How many times.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// How many may be longer.
    #[must_use]
    pub fn above(&self, us: u64) -> u64 {
        let longer = self.counts.range(us.saturating_add(1)..);
        longer.map(|(_, count)| *count).sum()
    }

    /// What a share of all is not longer than, microseconds; `None` of none.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count is not above it"
    )]
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let wanted = ((self.count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
        self.nth(wanted - 1)
    }

    /// So many samples or some more, drawn at random (always the same), as flows of 250 segments that are each sent
    /// when the one before is answered; none of none.
    #[must_use]
    pub fn drawn(&self, samples: usize) -> Vec<Vec<Sample>> {
        if self.count == 0 {
            return Vec::new();
        }
        // How many come before the end of each value, so that one is found by halving.
        let sums: Vec<(u64, u64)> = self
            .counts
            .iter()
            .scan(0, |sum, (us, count)| {
                *sum += count;
                Some((*sum, (*us).min(RTO_MAX_US)))
            })
            .collect();
        let mut random = SplitMix64(0x5274_6f41_6476_6973);
        let mut one = || {
            let n = random.below(self.count);
            let index = sums.partition_point(|(sum, _)| *sum <= n);
            sums.get(index).map_or(0, |(_, us)| *us)
        };
        (0..samples.div_ceil(DRAWN_FLOW))
            .map(|_| in_turn((0..DRAWN_FLOW).map(|_| one())))
            .collect()
    }

    /// The n-th shortest, from 0.
    fn nth(&self, n: u64) -> Option<u64> {
        let mut before = 0;
        let found = self.counts.iter().find(|(_, count)| {
            before += **count;
            n < before
        });
        found.map(|(us, _)| *us)
    }
}

impl FromIterator<u64> for Distribution {
    fn from_iter<I: IntoIterator<Item = u64>>(times_us: I) -> Self {
        let mut distribution = Self::default();
        for us in times_us {
            distribution.add(us, 1);
        }
        distribution
    }
}

/// Round trips of established connections.
#[derive(Clone, Copy, Debug)]
pub enum RoundTrips<'a> {
    /// Without order.
    Unordered(&'a Distribution),
    /// Of each flow, in order.
    Flows(&'a [Vec<Sample>]),
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// Jiffies a second.
    pub hz: u32,
    /// The share of spurious retransmissions that is not to be exceeded, 0 to 1.
    pub share: f64,
    /// How long the peers delay an ACK, microseconds ([`PEER_DELACK_US`]).
    pub peer_delack_us: u64,
}

/// A share of spurious retransmissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Expected {
    /// As observed, or estimated.
    pub share: f64,
    /// What it is not above, at 95 %.
    pub at_most: f64,
}

/// A value, and what it would do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Whole jiffies, as microseconds.
    pub value_us: u64,
    /// The same in jiffies.
    pub jiffies: u64,
    /// Samples that would be sent again in vain.
    pub expected: Expected,
    /// Whether it is so short that a peer's delayed ACK comes later.
    pub below_delack: bool,
}

/// Why there is no suggestion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum NoSuggestion {
    /// Fewer samples than the share needs.
    #[error("too few samples")]
    TooFewSamples,
    /// Nothing shorter than the kernel's own value would do.
    #[error("nothing shorter than the kernel's own value has so small a share")]
    NothingShorter,
}

/// The advice for one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// How many samples it rests on.
    pub samples: u64,
    /// How many the share needs.
    pub needed: u64,
    /// The value in force.
    pub present: Candidate,
    /// What is suggested.
    pub suggestion: Option<Candidate>,
    /// Or why nothing is.
    pub reason: Option<NoSuggestion>,
    /// What some values would do, the above among them.
    pub candidates: Vec<Candidate>,
}

/// How many samples a share needs, none of which exceeds the value (the "rule of three": 3/n).
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast to an integer saturates"
)]
pub fn samples_needed(share: f64) -> u64 {
    (OF_NONE / share).ceil() as u64
}

/// What a share is not above, at 95 %, if `count` of `of` were observed: the upper bound of a Poisson
/// distribution's mean, which is slightly above that of the binomial one. 1 of none.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
pub fn upper_bound(count: u64, of: u64) -> f64 {
    if of == 0 {
        return 1.0;
    }
    let mean = match count {
        0 => OF_NONE,
        1..=100 => poisson_bound(count),
        _ => {
            // Wilson and Hilferty; exact to a thousandth here.
            let n = (count + 1) as f64;
            n * (1.0 - 1.0 / (9.0 * n) + 1.644_854 / (3.0 * n.sqrt())).powi(3)
        }
    };
    (mean / of as f64).min(1.0)
}

/// The mean of which so many or fewer have a probability of 5 %.
#[expect(clippy::cast_precision_loss, reason = "at most 100")]
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

/// Advice for the initial RTO, from the times that handshakes took.
///
/// `present_us` is the value in force.
#[must_use]
pub fn initial_rto(handshakes: &Distribution, question: &Question, present_us: u64) -> Advice {
    let count = handshakes.count();
    let expected = |us: u64| {
        let above = handshakes.above(us);
        Expected {
            share: share_of(above, count),
            at_most: upper_bound(above, count),
        }
    };
    let candidate = |jiffies: u64| question.candidate(jiffies, false, expected);
    let enough = count >= samples_needed(question.share);
    let least = handshakes
        .counts
        .keys()
        .find(|us| expected(**us).at_most <= question.share);
    // One jiffy is taken by the kernel, but may be over at once.
    let suggestion = least
        .filter(|_| enough)
        .map(|us| {
            question
                .jiffies(us.saturating_mul(HEADROOM))
                .max(LEAST_JIFFIES)
        })
        .filter(|jiffies| *jiffies < question.jiffies(INITIAL_RTO_US))
        .map(candidate);
    question.advice(
        count,
        enough,
        present_us,
        suggestion,
        &INITIAL_CANDIDATES_US,
        candidate,
    )
}

/// Advice for rto_min, by Linux's estimator.
///
/// `present_us` is the value in force.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between the bounds"
)]
pub fn rto_min(round_trips: RoundTrips<'_>, question: &Question, present_us: u64) -> Advice {
    let drawn: Vec<Vec<Sample>>;
    // As many as show a tenth of the share.
    let wanted = (10.0 / question.share).clamp(50_000.0, 1_000_000.0) as usize;
    let (flows, count, spread_us) = match round_trips {
        RoundTrips::Flows(flows) => {
            // The first of each flow has no estimate before it.
            let judged = flows.iter().map(|flow| flow.len().saturating_sub(1) as u64);
            (flows, judged.sum(), 0)
        }
        RoundTrips::Unordered(times) => {
            drawn = times.drawn(wanted);
            let from = times.quantile_us(SPREAD_FROM).unwrap_or(0);
            let to = times.quantile_us(1.0 - question.share).unwrap_or(0);
            (drawn.as_slice(), times.count(), to - from)
        }
    };
    let study = Study::every(Sampling::All);
    let expected = |us: u64| {
        let shares = study.run(&FirstTimer(Linux::new(question.hz)), flows, &[us]);
        let avoided = shares.avoided.first().map_or(0, |(_, count)| *count);
        let share = share_of(shares.judged - avoided, shares.judged);
        Expected {
            share,
            at_most: upper_bound(part_of(share, count), count),
        }
    };
    let floor = question.delack_floor();
    let candidate = |jiffies: u64| question.candidate(jiffies, jiffies < floor, expected);
    let enough = count >= samples_needed(question.share);
    // The largest a program can set; with some HZ 200 ms is not whole jiffies.
    let last = RTO_MIN_US * u64::from(question.hz) / 1_000_000;
    let first = floor.max(question.jiffies(spread_us.saturating_mul(HEADROOM)));
    let does = |jiffies: u64| expected(question.micros(jiffies)).at_most <= question.share;
    let suggestion = (enough && first < last)
        .then(|| least_that(first, last, does))
        .flatten()
        .filter(|jiffies| *jiffies < last)
        .map(candidate);
    question.advice(
        count,
        enough,
        present_us,
        suggestion,
        &MIN_CANDIDATES_US,
        candidate,
    )
}

impl Question {
    /// Rounded up, as usecs_to_jiffies() does.
    fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz.into()).div_ceil(1_000_000)
    }

    fn micros(&self, jiffies: u64) -> u64 {
        jiffies.saturating_mul(1_000_000) / u64::from(self.hz.max(1))
    }

    /// The least rto_min that a peer's delayed ACK comes before, jiffies.
    fn delack_floor(&self) -> u64 {
        self.jiffies(self.peer_delack_us.saturating_add(PEER_TIMER_US))
            .max(LEAST_JIFFIES)
    }

    fn candidate(
        &self,
        jiffies: u64,
        below_delack: bool,
        expected: impl Fn(u64) -> Expected,
    ) -> Candidate {
        let value_us = self.micros(jiffies);
        Candidate {
            value_us,
            jiffies,
            expected: expected(value_us),
            below_delack,
        }
    }

    fn advice(
        &self,
        samples: u64,
        enough: bool,
        present_us: u64,
        suggestion: Option<Candidate>,
        candidates_us: &[u64],
        candidate: impl Fn(u64) -> Candidate,
    ) -> Advice {
        let present = candidate(self.jiffies(present_us));
        let others = candidates_us.iter().map(|us| self.jiffies(*us));
        let mut candidates: Vec<Candidate> = [LEAST_JIFFIES]
            .into_iter()
            .chain(others)
            .map(candidate)
            .chain([present])
            .chain(suggestion)
            .collect();
        candidates.sort_by_key(|c| c.jiffies);
        candidates.dedup_by_key(|c| c.jiffies);
        Advice {
            samples,
            needed: samples_needed(self.share),
            present,
            suggestion,
            reason: match suggestion {
                Some(_) => None,
                None if enough => Some(NoSuggestion::NothingShorter),
                None => Some(NoSuggestion::TooFewSamples),
            },
            candidates,
        }
    }
}

/// When a single segment is sent again first. What was sent again gives no sample: the copy that was not needed makes
/// the peer answer at once, so that the estimator does not learn of slow answers. (Linux 6.18, rto_min 8 ms, answers
/// after up to 100 ms: the RTO stayed at 12 ms over 400 requests, with timestamps.)
#[derive(Clone)]
struct FirstTimer(Linux);

impl Estimator for FirstTimer {
    fn rto_us(&self) -> u64 {
        self.0.micros(self.0.probe_jiffies())
    }

    fn take(&mut self, sample: Sample) {
        if sample.rtt_us <= self.rto_us() {
            self.0.take(sample);
        }
    }

    fn with_minimum(&self, minimum_us: u64) -> Self {
        Self(self.0.with_minimum(minimum_us))
    }
}

/// The least of a range that does, where all above one that does do as well.
fn least_that(mut first: u64, mut last: u64, does: impl Fn(u64) -> bool) -> Option<u64> {
    if !does(last) {
        return None;
    }
    while first < last {
        let middle = u64::midpoint(first, last);
        if does(middle) {
            last = middle;
        } else {
            first = middle + 1;
        }
    }
    Some(last)
}

/// Steele, Lea and Flood's generator: always the same draws, for the same advice from the same evidence.
struct SplitMix64(u64);

impl SplitMix64 {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The high half of a product: evenly enough for counts far below 2^64.
    const fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
fn share_of(count: u64, of: u64) -> f64 {
    count as f64 / of.max(1) as f64
}

/// So many of a count are a share of it, rounded up.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count is not above it"
)]
fn part_of(share: f64, count: u64) -> u64 {
    // Not one more for the last bit of a share that is exact.
    ((share * count as f64) - 1e-6).ceil().max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QUESTION: Question = Question {
        hz: 250,
        share: 0.001,
        peer_delack_us: PEER_DELACK_US,
    };

    fn near() -> Distribution {
        (0..5000).map(|n| 200 + n % 300).collect()
    }

    #[test]
    fn three_of_n() {
        assert_eq!(samples_needed(0.001), 2996);
        assert_eq!(samples_needed(0.01), 300);
        for (count, of, bound) in [
            (0, 3000, 2.9957),
            // Tables of the Poisson distribution's upper bounds at 95 %, one-sided.
            (1, 3000, 4.7439),
            (2, 3000, 6.2958),
            (10, 3000, 16.9622),
            (100, 30_000, 118.0800),
        ] {
            let found = upper_bound(count, of) * of as f64;
            assert!((found - bound).abs() < 0.01, "{count}: {found}");
        }
        // The two ways meet.
        assert!((poisson_bound(100) - upper_bound(101, 1 << 40) * (1u64 << 40) as f64).abs() < 1.2);
        assert_eq!(upper_bound(0, 0), 1.0);
        assert_eq!(upper_bound(5, 5), 1.0);
    }

    #[test]
    fn a_near_peer() {
        let advice = initial_rto(&near(), &QUESTION, INITIAL_RTO_US);
        // Twice half a millisecond, and the least.
        let suggestion = advice.suggestion.unwrap();
        assert_eq!((suggestion.jiffies, suggestion.value_us), (2, 8_000));
        assert_eq!(suggestion.expected.share, 0.0);
        assert!((suggestion.expected.at_most - 0.0006).abs() < 1e-5);
        let near = near();
        let advice = rto_min(RoundTrips::Unordered(&near), &QUESTION, RTO_MIN_US);
        // Above the peer's delayed ACK, whatever the RTTs.
        assert_eq!(advice.suggestion.unwrap().value_us, 48_000);
        assert!(advice.candidates[0].below_delack);
        let quick = Question {
            peer_delack_us: 5_000,
            ..QUESTION
        };
        let advice = rto_min(RoundTrips::Unordered(&near), &quick, RTO_MIN_US);
        assert_eq!(advice.suggestion.unwrap().value_us, 16_000);
    }

    #[test]
    fn a_tail_counts() {
        let mut times = near();
        times.add(30_000, 50);
        let advice = initial_rto(&times, &QUESTION, INITIAL_RTO_US);
        assert_eq!(advice.suggestion.unwrap().value_us, 60_000);
        let short = advice.candidates.iter().find(|c| c.jiffies == 5).unwrap();
        assert!((short.expected.share - 50.0 / 5050.0).abs() < 1e-9);
        assert!(short.expected.at_most > short.expected.share);
        // A single one in ten thousand may be ignored where one in a hundred is asked for, and only there.
        let mut times: Distribution = (0..10_000).map(|_| 500).collect();
        times.add(300_000, 1);
        let loose = Question {
            share: 0.01,
            ..QUESTION
        };
        assert_eq!(
            initial_rto(&times, &loose, 0).suggestion.unwrap().jiffies,
            2
        );
        let strict = Question {
            share: 0.000_4,
            ..QUESTION
        };
        assert_eq!(
            initial_rto(&times, &strict, 0).suggestion.unwrap().value_us,
            600_000
        );
    }

    #[test]
    fn too_little_and_too_long() {
        let few: Distribution = (0..2995).map(|_| 500).collect();
        let advice = initial_rto(&few, &QUESTION, INITIAL_RTO_US);
        assert_eq!(advice.reason, Some(NoSuggestion::TooFewSamples));
        assert_eq!((advice.samples, advice.needed), (2995, 2996));
        // The bounds are shown all the same.
        assert!(advice.present.expected.at_most > 0.001);
        let none = Distribution::default();
        let advice = rto_min(RoundTrips::Unordered(&none), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.reason, Some(NoSuggestion::TooFewSamples));
        assert_eq!(advice.present.expected.at_most, 1.0);
        let advice = rto_min(RoundTrips::Flows(&[]), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.reason, Some(NoSuggestion::TooFewSamples));
        // Satellites: half a second, twice that is the kernel's own.
        let far: Distribution = (0..5000).map(|_| 600_000).collect();
        let advice = initial_rto(&far, &QUESTION, INITIAL_RTO_US);
        assert_eq!(advice.reason, Some(NoSuggestion::NothingShorter));
        // A last bucket without an end.
        let mut unknown = near();
        unknown.add(u64::MAX, 100);
        let advice = initial_rto(&unknown, &QUESTION, INITIAL_RTO_US);
        assert_eq!(advice.reason, Some(NoSuggestion::NothingShorter));
        let advice = rto_min(RoundTrips::Unordered(&unknown), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.reason, Some(NoSuggestion::NothingShorter));
    }

    #[test]
    fn peers_at_two_distances_spread() {
        let times: Distribution = (0..5000)
            .map(|n| if n % 2 == 0 { 500 } else { 50_000 })
            .collect();
        let advice = rto_min(RoundTrips::Unordered(&times), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.suggestion.unwrap().value_us, 100_000);
        // The same distance for all: far, but steady.
        let times: Distribution = (0..5000).map(|_| 50_000).collect();
        let advice = rto_min(RoundTrips::Unordered(&times), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.suggestion.unwrap().value_us, 48_000);
    }

    #[test]
    fn flows_in_order_are_judged_as_they_came() {
        // Steady, and every 50th answer 70 ms late.
        let late = |n: u64| if n % 50 == 49 { 70_000 } else { 300 };
        let flows = vec![in_turn((0..5000).map(late))];
        let advice = rto_min(RoundTrips::Flows(&flows), &QUESTION, RTO_MIN_US);
        assert_eq!(advice.samples, 4999);
        let suggestion = advice.suggestion.unwrap();
        assert!(
            suggestion.value_us > 48_000 && suggestion.value_us <= 72_000,
            "{suggestion:?}"
        );
        let low = advice
            .candidates
            .iter()
            .find(|c| c.value_us == 12_000)
            .unwrap();
        assert!((low.expected.share - 0.02).abs() < 0.001, "{low:?}");
        assert!(low.below_delack);
    }

    #[test]
    fn what_is_sent_again_is_not_learned_from() {
        // Half of them take 20 ms: an estimator that saw that would soon wait for as long, its probe as well.
        let rtts = (0..4501).map(|n| if n % 2 == 1 { 20_000 } else { 300 });
        let flows = vec![in_turn(rtts)];
        let advice = rto_min(RoundTrips::Flows(&flows), &QUESTION, 8_000);
        let share = advice.present.expected.share;
        assert!((share - 0.5).abs() < 0.001, "{share}");
        let open = Study::every(Sampling::All).run(&Linux::new(250), &flows, &[8_000]);
        assert!(open.of(open.judged - open.avoided[0].1) < 0.01, "{open:?}");
    }

    #[test]
    fn what_is_drawn_is_what_there_is() {
        let times: Distribution = [1_000, 1_000, 1_000, 50_000].into_iter().collect();
        let flows = times.drawn(50_000);
        assert_eq!(flows, times.drawn(50_000));
        let all: Vec<_> = flows.iter().flatten().map(|s| s.rtt_us).collect();
        assert_eq!((flows.len(), all.len()), (200, 50_000));
        let long = all.iter().filter(|us| **us == 50_000).count();
        assert!(long.abs_diff(12_500) < 500 && all.iter().all(|us| [1_000, 50_000].contains(us)));
        assert!(Distribution::default().drawn(10).is_empty());
    }

    proptest! {
        #[test]
        fn bounds_contain_what_was_seen(count in 0u64..5000, more in 1u64..1_000_000) {
            let of = count + more;
            let bound = upper_bound(count, of);
            prop_assert!(bound > share_of(count, of) || bound == 1.0);
            prop_assert!(bound >= upper_bound(count.saturating_sub(1), of));
        }

        #[test]
        fn quantiles_as_of_a_sorted_list(
            mut times in prop::collection::vec(0u64..1_000_000, 1..200),
            share in 0.0f64..1.0,
        ) {
            let distribution: Distribution = times.iter().copied().collect();
            times.sort_unstable();
            // The first that so large a share is not above.
            let all = times.len() as f64;
            let expected = (1..).zip(&times).find(|(n, _)| f64::from(*n) >= share * all);
            let (_, expected) = expected.unwrap();
            prop_assert_eq!(distribution.quantile_us(share), Some(*expected));
            let above = times.iter().filter(|t| *t > expected).count() as u64;
            prop_assert_eq!(distribution.above(*expected), above);
        }

        #[test]
        fn a_suggestion_keeps_what_was_asked(
            times in prop::collection::vec((1u64..300_000, 1u64..2_000), 1..20),
            hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
            share in 0.000_5f64..0.1,
            delack_us in 0u64..100_000,
        ) {
            let mut distribution = Distribution::default();
            for (us, count) in &times {
                distribution.add(*us, *count);
            }
            let question = Question { hz, share, peer_delack_us: delack_us };
            let advice = initial_rto(&distribution, &question, INITIAL_RTO_US);
            prop_assert_eq!(advice.suggestion.is_none(), advice.reason.is_some());
            if let Some(s) = advice.suggestion {
                prop_assert!(s.expected.at_most <= share);
                prop_assert!(s.value_us < INITIAL_RTO_US && s.jiffies >= 2);
                // The jiffies are the microseconds rounded up again.
                prop_assert_eq!(question.jiffies(s.value_us), s.jiffies);
            }
        }
    }

    proptest! {
        // Each draws and runs some hundred thousand samples.
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn an_rto_min_keeps_what_was_asked(
            times in prop::collection::vec((1u64..150_000, 100u64..2_000), 1..6),
            hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
            share in 0.001f64..0.1,
        ) {
            let mut distribution = Distribution::default();
            for (us, count) in &times {
                distribution.add(*us, *count);
            }
            let question = Question { hz, share, peer_delack_us: PEER_DELACK_US };
            let advice = rto_min(RoundTrips::Unordered(&distribution), &question, RTO_MIN_US);
            if let Some(s) = advice.suggestion {
                prop_assert!(s.expected.at_most <= share && !s.below_delack);
                prop_assert!(s.value_us > PEER_DELACK_US && s.value_us <= RTO_MIN_US);
            }
        }
    }
}
