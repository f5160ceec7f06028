//! What an experiment compares, on which share, and for how long.

use serde::{Deserialize, Serialize};

use crate::tune::evidence::Probability;

/// How long a share must last at least, seconds: evidence has to hold for [`super::HOLD_MS`].
const LEAST_STEP_S: u64 = 60;

/// What is drawn into an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Each connection, by its addresses and ports.
    Connection,
    /// All connections of a peer, by its address. They fare alike, and connections are counted: nothing is judged.
    Peer,
}

impl Unit {
    /// "connections" or "peers".
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Connection => "connections",
            Self::Peer => "peers",
        }
    }
}

/// Rising shares of the treatment: the probabilities with which connections are drawn into it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Probability>", into = "Vec<Probability>")]
pub struct Ramp(Vec<Probability>);

/// Why a design is refused.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum DesignError {
    /// The list has no share.
    #[error("a ramp needs a share")]
    Empty,
    /// A share that is not above the one before.
    #[error(
        "the ramp's shares must rise: {:.4} % comes after {:.4} %",
        then * 100.0,
        before * 100.0
    )]
    NotRising {
        /// 0 to 1.
        before: f64,
        /// 0 to 1.
        then: f64,
    },
    /// Evidence could not hold for long enough at each share.
    #[error("a ramp of {steps} steps needs {least_s} s at least, not {duration_s} s")]
    TooShort {
        /// Of the ramp.
        steps: usize,
        /// What was asked for, seconds.
        duration_s: u64,
        /// What it needs, seconds.
        least_s: u64,
    },
}

impl Ramp {
    /// The shares, from the first.
    pub fn shares(&self) -> &[Probability] {
        &self.0
    }

    /// How many of equal parts the duration has: two for each step and one.
    const fn parts(&self) -> u64 {
        2 * self.0.len() as u64 + 1
    }
}

impl TryFrom<Vec<Probability>> for Ramp {
    type Error = DesignError;

    /// # Errors
    ///
    /// No share, or one that is not above the one before.
    fn try_from(shares: Vec<Probability>) -> Result<Self, DesignError> {
        if shares.is_empty() {
            return Err(DesignError::Empty);
        }
        for (before, then) in shares.iter().zip(shares.iter().skip(1)) {
            if then <= before {
                return Err(DesignError::NotRising {
                    before: before.get(),
                    then: then.get(),
                });
            }
        }
        Ok(Self(shares))
    }
}

impl From<Ramp> for Vec<Probability> {
    fn from(ramp: Ramp) -> Self {
        ramp.0
    }
}

/// What an experiment compares, on which share, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Design {
    /// The policy whose timers are compared with the kernel's own.
    pub policy: String,
    /// A digest of the policy's settings: other settings are another experiment.
    pub settings: String,
    /// The same on all hosts that take part.
    pub identity: String,
    /// Of the hash that draws the arms, of this host.
    pub seed: u32,
    /// What is drawn.
    pub unit: Unit,
    /// The shares, one after the other.
    pub ramp: Ramp,
    /// How long it runs at most, seconds.
    pub duration_s: u64,
    /// Whether all connections are treated once the gain is proven.
    pub promote: bool,
}

impl Design {
    /// Whether the duration is long enough for the ramp.
    ///
    /// # Errors
    ///
    /// Several steps and too short a duration.
    pub fn check(&self) -> Result<(), DesignError> {
        let least_s = LEAST_STEP_S * self.ramp.parts();
        let steps = self.ramp.shares().len();
        if steps > 1 && self.duration_s < least_s {
            return Err(DesignError::TooShort {
                steps,
                duration_s: self.duration_s,
                least_s,
            });
        }
        Ok(())
    }

    /// How long a step lasts at least, seconds: a seventh of the duration with three steps, a day of a week.
    pub fn step_s(&self) -> u64 {
        self.duration_s / self.ramp.parts()
    }
}
