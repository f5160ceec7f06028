//! What is counted in the arms of an experiment.

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use crate::tune::evidence::Probability;

/// One thing for each arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arms<T> {
    /// Of connections with the policy's timers.
    pub treated: T,
    /// Of connections with the kernel's own.
    pub control: T,
}

/// A bad outcome. One connection may have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The handshake never completed.
    Failed,
    /// It took more than 500 ms, less than the kernel's initial RTO: something was lost.
    #[serde(rename = "beyond-500-ms")]
    Beyond500Ms,
    /// A spurious SYN or SYN-ACK.
    Spurious,
    /// A DSACK: the peer received something twice.
    Dsack,
    /// Aborted after retransmissions.
    Aborted,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Failed,
        Self::Beyond500Ms,
        Self::Spurious,
        Self::Dsack,
        Self::Aborted,
    ];

    /// The share of treated connections up to which it is no harm.
    ///
    /// Spurious copies are the price of a short timer: the control arm has next to none, so that a handful of them
    /// is a proven difference. Up to 0.5 %, the default of a policy's guard, they are no reason to stop.
    pub const fn tolerated(self) -> Option<Probability> {
        match self {
            Self::Spurious | Self::Dsack => Some(Probability::HALF_A_PERCENT),
            Self::Failed | Self::Beyond500Ms | Self::Aborted => None,
        }
    }
}

/// How many connections (or peers) of an arm were attempted, and how many of them had which outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Attempts.
    pub attempts: u64,
    /// [`Outcome::Failed`].
    pub failed: u64,
    /// [`Outcome::Beyond500Ms`].
    pub beyond_500_ms: u64,
    /// [`Outcome::Spurious`].
    pub spurious: u64,
    /// [`Outcome::Dsack`].
    pub dsack: u64,
    /// [`Outcome::Aborted`].
    pub aborted: u64,
}

impl Counts {
    /// How many had an outcome.
    pub const fn of(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::Failed => self.failed,
            Outcome::Beyond500Ms => self.beyond_500_ms,
            Outcome::Spurious => self.spurious,
            Outcome::Dsack => self.dsack,
            Outcome::Aborted => self.aborted,
        }
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            attempts: self.attempts.saturating_add(other.attempts),
            failed: self.failed.saturating_add(other.failed),
            beyond_500_ms: self.beyond_500_ms.saturating_add(other.beyond_500_ms),
            spurious: self.spurious.saturating_add(other.spurious),
            dsack: self.dsack.saturating_add(other.dsack),
            aborted: self.aborted.saturating_add(other.aborted),
        }
    }
}

impl<T: Add<Output = T>> Add for Arms<T> {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            treated: self.treated + other.treated,
            control: self.control + other.control,
        }
    }
}

impl<T: Add<Output = T> + Copy> AddAssign for Arms<T> {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
