//! Suggests an initial RTO and an rto_min for observed round-trip times, with a confidence bound.
//!
//! A suggestion is conservative:
//!
//! - The initial RTO is what the law of learnt values says of the same samples ([`crate::tune::law`]).
//! - The share of spurious retransmissions that counts is not the observed share but its upper bound at 95 %
//!   ([`upper_bound`]): if none of n samples exceeds a value, 3/n of all may (the "rule of three"). With fewer samples
//!   than the requested share needs there is no suggestion.
//! - An rto_min is above the peers' delayed ACK and two jiffies of a slow peer. Below that, the tail loss probe of a
//!   request without an answer is sent before the delayed ACK arrives (measured: 1 in 20 requests with 8 and 20 ms,
//!   none with 48 ms).
//! - Only the first timer of a single segment counts: the RTO, or the tail loss probe if that is earlier (two smoothed
//!   RTTs plus rto_min). The timer of several segments does not depend on rto_min.
//! - Values are rounded up to jiffies. A timer of n jiffies never fires earlier.
//!
//! # Handshakes without a sample
//!
//! A handshake that was not answered, or whose answer may belong to several SYNs, has no round-trip time. Its wait is a
//! lower bound ([`Handshakes`]): the handshake counts as spurious for every timer shorter than the wait, and is ignored
//! for longer ones.
//!
//! # Samples without order
//!
//! A histogram does not show in which order, and on which connection, its values occurred. Linux's estimator is
//! therefore run over values drawn at random (always the same), which is right if every connection sees all of them.
//! Drawn values vary more than consecutive values of a single path, which makes the estimated RTO too large; therefore
//! the suggestion must also be at least twice the whole spread. Smoothed RTTs hide single slow answers, so a share
//! computed from them is too low.

#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::{
    distribution::Distribution,
    estimator::{Linux, Sample, in_turn},
    retransmit::RTO_MAX_US,
    syn::INITIAL_RTO_US,
    tune::{
        law,
        quantile::{samples_needed, upper_bound},
    },
};

/// The kernel's rto_min, and the largest a program can set (`TCP_RTO_MIN`), microseconds.
pub const RTO_MIN_US: u64 = crate::retransmit::RTO_MIN_US;
/// The kernel's default minimum delay of an ACK (`TCP_DELACK_MIN`), microseconds.
pub const PEER_DELACK_US: u64 = 40_000;
/// How much later a delayed ACK may be: two jiffies at HZ 250.
const PEER_TIMER_US: u64 = 8_000;
/// `TCP_TIMEOUT_MIN`: the smallest rto_min, jiffies.
const LEAST_JIFFIES: u64 = 2;
/// Ratio of an rto_min to the spread of the samples.
const HEADROOM: u64 = 2;
/// Values in the tables, microseconds.
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
/// The start of the spread: the share of the fastest times that is ignored.
const SPREAD_FROM: f64 = 0.05;

/// Number of samples in a flow that is drawn from values without order.
const DRAWN_FLOW: usize = 250;

/// Times of handshakes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handshakes {
    /// Measured times.
    pub took: Distribution,
    /// Waits of handshakes without a measured time (censored values).
    pub longer_than: Distribution,
}

impl Handshakes {
    /// The number of handshakes.
    pub const fn count(&self) -> u64 {
        self.took.count().saturating_add(self.longer_than.count())
    }

    /// The number of handshakes that took longer than a time, and the number for which that is known.
    fn above(&self, us: u64) -> (u64, u64) {
        // A handshake whose wait was exactly this long took longer.
        let longer = self.longer_than.above(us.saturating_sub(1));
        let above = self.took.above(us).saturating_add(longer);
        (above, self.took.count().saturating_add(longer))
    }
}

impl From<Distribution> for Handshakes {
    fn from(took: Distribution) -> Self {
        Self {
            took,
            longer_than: Distribution::default(),
        }
    }
}

/// Round-trip times of established connections.
#[derive(Clone, Debug)]
pub enum RoundTrips {
    /// Their order is unknown.
    Unordered(Distribution),
    /// The samples of each flow, in order.
    Flows(Vec<Vec<Sample>>),
}

impl RoundTrips {
    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Unordered(times) => times.count() == 0,
            Self::Flows(flows) => flows.is_empty(),
        }
    }
}

/// The parameters of a suggestion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// Jiffies per second.
    pub hz: u32,
    /// The largest acceptable share of spurious retransmissions, 0 to 1.
    pub share: f64,
    /// The least initial RTO, microseconds: `min` of the policy.
    pub min_us: u64,
    /// How long the peers delay an ACK, microseconds ([`PEER_DELACK_US`]).
    pub peer_delack_us: u64,
}

/// A share of spurious retransmissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Expected {
    /// The observed or estimated share.
    pub share: f64,
    /// The upper bound at 95 %.
    pub at_most: f64,
}

/// A value and its effect.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Whole jiffies, in microseconds.
    pub value_us: u64,
    /// The same in jiffies.
    pub jiffies: u64,
    /// The samples that would be retransmitted spuriously.
    pub expected: Expected,
    /// Whether it is so short that a peer's delayed ACK arrives later.
    pub below_delack: bool,
}

/// Why there is no suggestion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum NoSuggestion {
    /// Fewer samples than the share needs.
    #[error("too few samples")]
    TooFewSamples,
    /// No value shorter than the kernel's own is sufficient.
    #[error("no value shorter than the kernel's own has such a small share")]
    NothingShorter,
}

/// The advice for one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The number of samples it is based on.
    pub samples: u64,
    /// The number of samples that the share needs.
    pub needed: u64,
    /// The current value.
    pub present: Candidate,
    /// The suggested value.
    pub suggestion: Option<Candidate>,
    /// The reason if there is no suggestion.
    pub reason: Option<NoSuggestion>,
    /// The effects of some values, including those above.
    pub candidates: Vec<Candidate>,
}

/// Advice for the initial RTO, from the duration of handshakes: what `initial_rto = "auto"` would learn from them
/// ([`law::required_us`]).
///
/// `present_us` is the current value.
pub fn initial_rto(handshakes: &Handshakes, question: &Question, present_us: u64) -> Advice {
    let count = handshakes.count();
    let expected = |us: u64| {
        let (above, of) = handshakes.above(us);
        Expected {
            share: share_of(above, of),
            at_most: upper_bound(above, of),
        }
    };
    let candidate = |jiffies: u64| question.candidate(jiffies, false, expected);
    let mut times = handshakes.took.clone();
    times.extend(&handshakes.longer_than);
    let settings = law::Settings {
        min_us: question.min_us,
        spurious: question.share,
        ..law::Settings::new(question.hz)
    };
    let suggestion = law::required_us(&times, question.share)
        .map(|us| settings.clamped(us))
        .filter(|jiffies| *jiffies < settings.largest())
        .map(candidate);
    question.advice(
        count,
        law::LEAST_SAMPLES,
        present_us,
        suggestion,
        &INITIAL_CANDIDATES_US,
        candidate,
    )
}

/// Advice for rto_min, with Linux's estimator.
///
/// `present_us` is the current value.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between the bounds"
)]
pub fn rto_min(round_trips: &RoundTrips, question: &Question, present_us: u64) -> Advice {
    let drawn: Vec<Vec<Sample>>;
    // Enough samples to show a tenth of the share.
    let wanted = (10.0 / question.share).clamp(50_000.0, 1_000_000.0) as usize;
    let (flows, count, spread_us) = match round_trips {
        RoundTrips::Flows(flows) => {
            // The first sample of each flow has no estimate before it.
            let judged = flows.iter().map(|flow| flow.len().saturating_sub(1) as u64);
            (flows.as_slice(), judged.sum(), 0)
        }
        RoundTrips::Unordered(times) => {
            drawn = draw(times, wanted);
            let from = times.quantile_us(SPREAD_FROM).unwrap_or(0);
            let to = times.quantile_us(1.0 - question.share).unwrap_or(0);
            (drawn.as_slice(), times.count(), to - from)
        }
    };
    let expected = |us: u64| {
        let (mut spurious, mut judged) = (0, 0);
        for flow in flows {
            let (of_flow, all) = spurious_of(Linux::new(question.hz).with_minimum(us), flow);
            spurious += of_flow;
            judged += all;
        }
        let share = share_of(spurious, judged);
        Expected {
            share,
            at_most: upper_bound(part_of(share, count), count),
        }
    };
    let floor = question.delack_floor();
    let candidate = |jiffies: u64| question.candidate(jiffies, jiffies < floor, expected);
    let needed = samples_needed(question.share);
    let enough = count >= needed;
    // The largest value that a program can set; with some HZ 200 ms is not a whole number of jiffies.
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
        needed,
        present_us,
        suggestion,
        &MIN_CANDIDATES_US,
        candidate,
    )
}

impl Question {
    /// Jiffies, rounded up like usecs_to_jiffies().
    fn jiffies(&self, us: u64) -> u64 {
        us.saturating_mul(self.hz.into()).div_ceil(1_000_000)
    }

    fn micros(&self, jiffies: u64) -> u64 {
        jiffies.saturating_mul(1_000_000) / u64::from(self.hz.max(1))
    }

    /// The smallest rto_min for which a peer's delayed ACK arrives in time, jiffies.
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
        needed: u64,
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
            needed,
            present,
            suggestion,
            reason: match suggestion {
                Some(_) => None,
                None if samples >= needed => Some(NoSuggestion::NothingShorter),
                None => Some(NoSuggestion::TooFewSamples),
            },
            candidates,
        }
    }
}

/// How many segments of a flow are retransmitted spuriously, of how many: all but the first, which has no estimate
/// before it. Each is a single segment, whose first timer is the probe's.
///
/// A retransmitted segment gives no sample: the spurious copy makes the peer answer at once, so the estimator never
/// learns of slow answers. (Linux 6.18, rto_min 8 ms, answers after up to 100 ms: the RTO stayed at 12 ms over 400
/// requests, with timestamps.)
fn spurious_of(mut linux: Linux, flow: &[Sample]) -> (u64, u64) {
    let (mut spurious, mut judged) = (0, 0);
    for (n, sample) in flow.iter().enumerate() {
        let in_time = sample.rtt_us <= linux.micros(linux.probe_jiffies());
        if n > 0 {
            judged += 1;
            spurious += u64::from(!in_time);
        }
        if in_time {
            linux.take(*sample);
        }
    }
    (spurious, judged)
}

/// The smallest value of a range that satisfies `does`, if all larger values satisfy it as well.
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

/// At least `samples` samples, drawn at random (always the same), as flows of 250 segments,
/// each of which is sent when the previous one is answered; empty if there are no times.
pub fn draw(times: &Distribution, samples: usize) -> Vec<Vec<Sample>> {
    if times.count() == 0 {
        return Vec::new();
    }
    // Cumulative counts, so that a value can be found by binary search.
    let sums: Vec<(u64, u64)> = times
        .iter()
        .scan(0, |sum, (us, count)| {
            *sum += count;
            Some((*sum, us.min(RTO_MAX_US)))
        })
        .collect();
    let mut random = SplitMix64(0x5274_6f41_6476_6973);
    let mut one = || {
        let n = random.below(times.count());
        let index = sums.partition_point(|(sum, _)| *sum <= n);
        sums.get(index).map_or(0, |(_, us)| *us)
    };
    (0..samples.div_ceil(DRAWN_FLOW))
        .map(|_| in_turn((0..DRAWN_FLOW).map(|_| one())))
        .collect()
}

/// The generator by Steele, Lea and Flood. It always yields the same draws, so that the same evidence gives the same
/// advice.
struct SplitMix64(u64);

impl SplitMix64 {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`: the upper half of a product, which is uniform enough for counts far below 2^64.
    const fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }
}

fn share_of(count: u64, of: u64) -> f64 {
    count as f64 / of.max(1) as f64
}

/// The number that a share of a count amounts to, rounded up.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count is not above it"
)]
fn part_of(share: f64, count: u64) -> u64 {
    // Rounding errors of an exact share must not add one.
    ((share * count as f64) - 1e-6).ceil().max(0.0) as u64
}
