//! The counts in the arms of an experiment.

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use crate::tune::evidence::Probability;

/// One value for each arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Arms<T> {
    /// For connections with the policy's timers.
    pub treated: T,
    /// For connections with the kernel's own timers.
    pub control: T,
}

impl<T> Arms<T> {
    /// Applies a function to each arm.
    pub fn map<U>(&self, mut of: impl FnMut(&T) -> U) -> Arms<U> {
        Arms {
            treated: of(&self.treated),
            control: of(&self.control),
        }
    }

    /// Applies a function to each arm of both.
    pub fn zip<U, V>(&self, other: &Arms<U>, of: impl Fn(&T, &U) -> V) -> Arms<V> {
        Arms {
            treated: of(&self.treated, &other.treated),
            control: of(&self.control, &other.control),
        }
    }
}

names!(
    /// What is judged.
    Outcome {
        /// A spurious SYN or SYN-ACK.
        Spurious = "spurious",
        /// Of accepted connections: the last round trip of the handshake took more than 500 ms.
        LateAccepted = "late-accepted",
        /// An attempt that was not established within 500 ms.
        Bad = "bad",
    }
);

impl Outcome {
    /// The share of treated connections with this outcome that is not yet harm.
    ///
    /// Spurious copies are the price of a short timer. The control arm has almost none, so a
    /// handful is already a proven difference. Up to 0.5 %, the default of a policy's guard, they
    /// are no reason to stop.
    pub const fn tolerated(self) -> Option<Probability> {
        match self {
            Self::Spurious => Some(Probability::HALF_A_PERCENT),
            Self::LateAccepted | Self::Bad => None,
        }
    }
}

/// Counts of an arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Attempts: connect() calls whose first SYN was sent.
    pub attempts: u64,
    /// Of these, established within 500 ms. The others are bad.
    pub good: u64,
    /// Connection requests that were answered.
    pub requests: u64,
    /// [`Outcome::LateAccepted`].
    pub late_accepted: u64,
    /// [`Outcome::Spurious`], of connections of both directions.
    pub spurious: u64,
}

impl Counts {
    /// Connections with this outcome. An attempt under way counts as bad until it is established.
    pub const fn of(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::Bad => self.attempts.saturating_sub(self.good),
            Outcome::LateAccepted => self.late_accepted,
            Outcome::Spurious => self.spurious,
        }
    }

    /// Connections that were assigned to an arm.
    pub const fn drawn(&self) -> u64 {
        self.attempts.saturating_add(self.requests)
    }

    /// The connections of which the outcome is a share.
    pub const fn all(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::Bad => self.attempts,
            Outcome::LateAccepted => self.requests,
            Outcome::Spurious => self.drawn(),
        }
    }

    /// The growth of each count since an earlier time. Counters of several processors are not read
    /// at once, so a count may appear to shrink; its growth is then 0.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }

    fn with(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            attempts: f(self.attempts, other.attempts),
            good: f(self.good, other.good),
            requests: f(self.requests, other.requests),
            late_accepted: f(self.late_accepted, other.late_accepted),
            spurious: f(self.spurious, other.spurious),
        }
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(&other, u64::saturating_add)
    }
}

impl<T: Add<Output = T> + Copy> Add for Arms<T> {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(&other, |one, other| *one + *other)
    }
}

impl<T: Add<Output = T> + Copy> AddAssign for Arms<T> {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
