//! Decides whether advice may be based on a capture.

use rto_model::{advice::Handshakes, estimator::Sample};

use super::{Capture, Flow};

/// A coarser resolution permits no suggestion below the kernel's initial RTO, as a suggestion is twice a round-trip
/// time.
const COARSEST_US: u64 = rto_model::syn::INITIAL_RTO_US / 2;
/// Resolutions of this length or more mean that all packets have the same time.
const NEVER_US: u64 = u64::MAX / 1000;
/// A resolution finer than a jiffy divided by this does not affect a suggestion.
const FINE_PARTS: u64 = 10;
/// With a fine clock at most one handshake in this many may take no time. (Real clocks tick either every microsecond or
/// more often, or every millisecond or less often.)
const OF_HANDSHAKES: usize = 100;
/// With any clock at least one round trip in this many is longer than zero: some begin before a tick and end after it.
const OF_TICKS: usize = 1000;

/// Why advice cannot be based on a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The file has no usable times.
    #[error(
        "all packets, or all of one interface, have the same time: the program that wrote the file \
         did not record arrival times; capture with: tcpdump -s 128 -w FILE tcp"
    )]
    SameTimes,
    /// The resolution of the times is too coarse.
    #[error(
        "times have a resolution of only {} ms, too coarse to evaluate timers shorter than the \
         kernel's own; capture with: tcpdump -s 128 -w FILE tcp",
        .resolution_us.div_ceil(1000)
    )]
    TooCoarse {
        /// The resolution, microseconds.
        resolution_us: u64,
    },
    /// Too many answers have the time of the packet that they answer.
    #[error(
        "{instant} of {of} round trips take no time: the times are not arrival times; capture \
         with: tcpdump -s 128 -w FILE tcp"
    )]
    Instant {
        /// Number of such round trips.
        instant: usize,
        /// Number of all round trips.
        of: usize,
    },
}

/// How the times of a capture can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// How much longer a round trip may be than it appears, microseconds.
    blur_us: u64,
    /// Whether the round trips of data are precise enough for an RTT estimator.
    has_round_trips: bool,
}

/// The number of round trips that take no time, and the number of all.
fn instant<'a>(samples: impl Iterator<Item = &'a Sample>) -> (usize, usize) {
    samples.fold((0, 0), |(instant, of), sample| {
        (instant + usize::from(sample.rtt_us == 0), of + 1)
    })
}

impl Capture {
    /// Compares the resolution of the times with a jiffy.
    /// Fails if the times are unusable.
    pub fn fit(&self, jiffy_us: u64) -> Result<Fit, Unfit> {
        let times = &self.times;
        if times.began_us == times.ended_us || times.resolution_us >= NEVER_US {
            return Err(Unfit::SameTimes);
        }
        let resolution_us = times.resolution_us;
        if resolution_us >= COARSEST_US {
            return Err(Unfit::TooCoarse { resolution_us });
        }
        let [handshakes, data] = [
            instant(self.flows.iter().flat_map(|flow| &flow.handshake)),
            instant(self.flows.iter().flat_map(|flow| &flow.data)),
        ];
        let all = (handshakes.0 + data.0, handshakes.1 + data.1);
        let is_fine = resolution_us.saturating_mul(FINE_PARTS) <= jiffy_us;
        let unfit = if is_fine && handshakes.0 * OF_HANDSHAKES > handshakes.1 {
            Some(handshakes)
        } else {
            Some(all).filter(|(instant, of)| *of > 0 && (of - instant) * OF_TICKS < *of)
        };
        if let Some((instant, of)) = unfit {
            return Err(Unfit::Instant { instant, of });
        }
        Ok(Fit {
            blur_us: if is_fine { 0 } else { resolution_us },
            has_round_trips: resolution_us <= jiffy_us,
        })
    }
}

impl Fit {
    /// A remark for the user, if the times are coarse.
    pub fn remark(&self) -> Option<String> {
        let blur_us = self.blur_us;
        let round_trips = if self.has_round_trips {
            ""
        } else {
            ", and rto_min is not evaluated"
        };
        (blur_us > 0).then(|| {
            format!(
                "times have a resolution of only {blur_us} us: round trips count as that much \
                 longer{round_trips}; files of tcpdump have a resolution of 1 us"
            )
        })
    }

    /// The handshakes of some flows.
    pub fn handshakes<'a>(&self, flows: impl Iterator<Item = &'a Flow>) -> Handshakes {
        let mut handshakes = Handshakes::default();
        for flow in flows {
            for sample in &flow.handshake {
                handshakes.took.add(self.at_most(sample.rtt_us), 1);
            }
            for waited_us in &flow.unsampled_us {
                let at_least = waited_us.saturating_sub(self.blur_us);
                handshakes.longer_than.add(at_least, 1);
            }
        }
        handshakes
    }

    /// The round trips of some flows, each in order.
    pub fn round_trips<'a>(&self, flows: impl Iterator<Item = &'a Flow>) -> Vec<Vec<Sample>> {
        let wider = |sample: Sample| Sample {
            rtt_us: self.at_most(sample.rtt_us),
            ..sample
        };
        let each = flows
            .filter(|_| self.has_round_trips)
            .map(|flow| flow.samples().into_iter().map(wider).collect::<Vec<_>>());
        each.filter(|samples| !samples.is_empty()).collect()
    }

    const fn at_most(&self, rtt_us: u64) -> u64 {
        rtt_us.saturating_add(self.blur_us)
    }
}
