//! A moment on the tuner's clock and on the host's.

use rto_model::tune::tuner::{Next, Transition};
use serde::{Deserialize, Serialize};

/// The same moment on three clocks, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The tuner's clock.
    pub tuner_ms: u64,
    /// CLOCK_BOOTTIME.
    pub boottime_ms: u64,
    /// Unix time.
    pub unix_ms: u64,
}

impl Moment {
    /// Converts a time of the tuner's clock to Unix time.
    pub(super) const fn unix(self, at_ms: u64) -> u64 {
        self.unix_ms
            .saturating_add(at_ms)
            .saturating_sub(self.tuner_ms)
    }

    pub(super) const fn transition(self, transition: Transition) -> Transition {
        Transition {
            at_ms: self.unix(transition.at_ms),
            ..transition
        }
    }

    pub(super) fn next(self, mut next: Next) -> Next {
        if let Next::Lower { at_ms, .. } | Next::HoldEnds { at_ms } = &mut next {
            *at_ms = self.unix(*at_ms);
        }
        next
    }
}
