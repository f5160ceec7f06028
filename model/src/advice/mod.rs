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

mod distribution;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use self::distribution::Distribution;
pub(crate) use self::distribution::SplitMix64;

use crate::{
    estimator::{Estimator, Linux, Sample},
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
/// Where the spread begins: the share of the fastest that is not counted.
const SPREAD_FROM: f64 = 0.05;

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
    /// Samples that would be retransmitted spuriously.
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

/// When a single segment is retransmitted first. What was retransmitted gives no sample: the copy that was not needed makes
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
