//! How often an RTO is too short: runs an estimator over the RTT samples of flows.
//!
//! # The columns of the published study
//!
//! For each pair of weights it lists three shares that add up to about 100 ("83, 17 and 0", "50, 0 and 50"). This module
//! treats them as a partition of the samples:
//!
//! - *within*: the RTO was at most 1 s, and the RTT did not exceed it;
//! - *exceeding*: the RTO was at most 1 s, and the RTT exceeded it: a spurious retransmission;
//! - *RTO > 1 s*: whatever the RTT; [`Shares::long_exceeding`] counts the samples whose RTT exceeded even that.
//!
//! [`Study::Published`] judges the samples that the estimator takes, and the first sample of a flow against the initial
//! RTO of 1 s. *The share that avoids retransmission at a minimum RTO* is there the share with RTT <= RTO <= minimum: all
//! stated shares at 1 s that can be derived from the table are these.
//!
//! [`Study::Every`] judges every segment after the first estimate. A sample avoids retransmission there if its RTT does
//! not exceed the RTO of an estimator with that minimum. In RFC 6298 that is the greater of RTO and minimum; Linux's
//! rto_min bounds the variation, so its estimator runs once for each minimum.

use rto_model::estimator::Sample;
use serde::Serialize;

use crate::estimator::Estimator;

/// The minimum RTOs of the published study, microseconds.
pub const MINIMUMS_US: [u64; 4] = [250_000, 500_000, 750_000, 1_000_000];
/// The threshold of "RTO > 1 s".
const LONG_US: u64 = 1_000_000;

/// Which samples an estimator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sampling {
    /// The samples of all ACKs.
    All,
    /// One per window: the next sample is of a segment that was sent after the previous sample's ACK had arrived.
    One,
    /// The samples of every second ACK.
    EverySecondAck,
}

impl Sampling {
    /// All values.
    pub const ALL: [Self; 3] = [Self::All, Self::One, Self::EverySecondAck];
}

/// Decides for each sample whether an estimator takes it.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    count: u64,
    next_us: u64,
}

impl Sampler {
    pub(crate) const fn new(sampling: Sampling) -> Self {
        Self {
            sampling,
            count: 0,
            next_us: 0,
        }
    }

    pub(crate) fn takes(&mut self, sample: Sample) -> bool {
        let taken = match self.sampling {
            Sampling::All => true,
            Sampling::One => sample.sent_us >= self.next_us,
            Sampling::EverySecondAck => self.count.is_multiple_of(2),
        };
        self.count += 1;
        if taken {
            self.next_us = sample.acked_us();
        }
        taken
    }
}

/// How to run an estimator over flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Study {
    /// As in the published study: the samples that the estimator takes are judged, including the first.
    Published(Sampling),
    /// The estimator takes all samples, and every segment after the first estimate is judged.
    Every,
}

impl Study {
    /// Runs the study. Each flow starts with a new estimator; samples are in the order in which their ACKs arrived.
    pub fn run<E, F>(self, estimator: &E, flows: &[F], minimums_us: &[u64]) -> Shares
    where
        E: Estimator,
        F: AsRef<[Sample]>,
    {
        let mut shares = Shares {
            avoided: minimums_us.iter().map(|us| (*us, 0)).collect(),
            ..Shares::default()
        };
        let with_minimums: Vec<E> = minimums_us
            .iter()
            .map(|us| estimator.with_minimum(*us))
            .collect();
        for flow in flows {
            self.flow(estimator, &with_minimums, flow.as_ref(), &mut shares);
        }
        shares
    }

    fn flow<E: Estimator>(self, own: &E, others: &[E], samples: &[Sample], shares: &mut Shares) {
        let (mut own, mut others) = (own.clone(), others.to_vec());
        let mut sampler = Sampler::new(match self {
            Self::Published(sampling) => sampling,
            Self::Every => Sampling::All,
        });
        for (n, sample) in samples.iter().enumerate() {
            let taken = sampler.takes(*sample);
            if taken && (n > 0 || self != Self::Every) {
                shares.judge(own.rto_us(), sample.rtt_us);
                let (rtt_us, rto_us) = (sample.rtt_us, own.rto_us());
                for (other, (minimum_us, count)) in others.iter().zip(&mut shares.avoided) {
                    let avoids = match self {
                        Self::Published(_) => rtt_us <= rto_us && rto_us <= *minimum_us,
                        Self::Every => rtt_us <= other.rto_us(),
                    };
                    *count += u64::from(avoids);
                }
            }
            if taken {
                own.take(*sample);
                others.iter_mut().for_each(|other| other.take(*sample));
            }
        }
    }
}

/// The results for the judged samples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Shares {
    /// Number of judged samples; the sum of the next three.
    pub judged: u64,
    /// RTT <= RTO <= 1 s.
    pub within: u64,
    /// RTT > RTO, RTO <= 1 s.
    pub exceeding: u64,
    /// RTO > 1 s.
    pub long: u64,
    /// The part of them with RTT > RTO.
    pub long_exceeding: u64,
    /// By minimum RTO, microseconds: samples that would not be retransmitted spuriously.
    pub avoided: Vec<(u64, u64)>,
}

impl Shares {
    /// Samples that would be retransmitted spuriously: RTT > RTO.
    pub const fn spurious(&self) -> u64 {
        self.exceeding + self.long_exceeding
    }

    fn judge(&mut self, rto_us: u64, rtt_us: u64) {
        let exceeds = rtt_us > rto_us;
        self.judged += 1;
        match (rto_us > LONG_US, exceeds) {
            (true, _) => {
                self.long += 1;
                self.long_exceeding += u64::from(exceeds);
            }
            (false, true) => self.exceeding += 1,
            (false, false) => self.within += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use rto_model::estimator::{Linux, in_turn};

    use super::*;
    use crate::estimator::{Rfc6298, Weights};

    /// Windows of segments sent together and answered one after the other.
    fn windows(rtts_us: &[u64], segments: u64) -> Vec<Sample> {
        let mut sent_us = 0;
        let mut all = Vec::new();
        for rtt_us in rtts_us {
            for n in 0..segments {
                let (sent_us, rtt_us) = (sent_us + n, rtt_us + n);
                all.push(Sample { sent_us, rtt_us });
            }
            sent_us += rtt_us + 2 * segments;
        }
        all
    }

    fn w1(study: Study, flows: &[Vec<Sample>], minimums_us: &[u64]) -> Shares {
        study.run(&Rfc6298::new(Weights::W1), flows, minimums_us)
    }

    #[test]
    fn sample_is_judged_before_estimator_takes_it() {
        // After 100 ms the RTO is 300 ms; 301 ms exceed it, although the RTO with that sample would be 502 ms.
        let flows = [in_turn([100_000, 301_000])];
        let shares = w1(Study::Every, &flows, &[250_000, 301_000]);
        assert_eq!((shares.judged, shares.exceeding), (1, 1));
        assert_eq!(shares.avoided, [(250_000, 0), (301_000, 1)]);
    }

    #[test]
    fn shares_add_up_to_judged() {
        // 400 ms: the RTO after it is 1.2 s. The first sample is compared with 1 s.
        let flows = [in_turn([400_000, 400_000])];
        let shares = w1(Study::Published(Sampling::One), &flows, &MINIMUMS_US);
        assert_eq!(
            (shares.within, shares.exceeding, shares.long, shares.judged),
            (1, 0, 1, 2)
        );
        // Only the RTO of 1 s is a minimum of those or less, although the second RTT does not exceed its RTO either.
        let avoided: Vec<u64> = shares.avoided.iter().map(|(_, count)| *count).collect();
        assert_eq!(avoided, [0, 0, 0, 1]);
    }

    #[test]
    fn sampling_selects_samples() {
        let flows = [windows(&[100_000; 6], 10)];
        let count = |study| w1(study, &flows, &[]).judged;
        assert_eq!(count(Study::Published(Sampling::All)), 60);
        assert_eq!(count(Study::Published(Sampling::One)), 6);
        assert_eq!(count(Study::Published(Sampling::EverySecondAck)), 30);
        assert_eq!(count(Study::Every), 59);
    }

    #[test]
    fn long_rtos_are_counted_apart() {
        let judged = |rto_us, rtt_us| {
            let mut shares = Shares::default();
            shares.judge(rto_us, rtt_us);
            let Shares {
                within,
                exceeding,
                long,
                long_exceeding,
                ..
            } = shares;
            [within, exceeding, long, long_exceeding]
        };
        assert_eq!(judged(1_000_000, 1_000_000), [1, 0, 0, 0]);
        assert_eq!(judged(1_000_000, 1_000_001), [0, 1, 0, 0]);
        assert_eq!(judged(1_000_001, 1_000_001), [0, 0, 1, 0]);
        assert_eq!(judged(1_000_001, 1_000_002), [0, 0, 1, 1]);
    }

    #[test]
    fn each_flow_restarts_estimator() {
        let flows = [in_turn([1_000; 50]), in_turn([200_000; 2])];
        assert_eq!(
            w1(Study::Published(Sampling::All), &flows, &[]).spurious(),
            0
        );
        let one = [flows.concat()];
        assert_eq!(w1(Study::Published(Sampling::All), &one, &[]).spurious(), 1);
    }

    proptest! {
        #[test]
        fn higher_minimum_never_avoids_less(
            rtts in prop::collection::vec(1u64..3_000_000, 2..80),
            linux: bool,
        ) {
            let flows = [in_turn(rtts)];
            let study = Study::Every;
            let minimums = [1_000, 10_000, 100_000, 250_000, 500_000, 1_000_000];
            let shares = if linux {
                study.run(&Linux::new(250), &flows, &minimums)
            } else {
                w1(study, &flows, &minimums)
            };
            prop_assert_eq!(shares.judged, shares.within + shares.exceeding + shares.long);
            prop_assert!(shares.avoided.iter().map(|(_, n)| *n).is_sorted());
            prop_assert!(shares.avoided.iter().all(|(_, n)| *n <= shares.judged));
        }
    }
}
