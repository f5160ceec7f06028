//! The design of an experiment: what it compares, with which shares, and for how long.

use serde::{Deserialize, Serialize};

use crate::tune::evidence::Probability;

/// The minimum duration of a share, seconds: evidence must hold for [`super::HOLD_MS`].
const LEAST_STEP_S: u64 = 60;

/// What is assigned to an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Each connection, by its addresses and ports.
    Connection,
    /// All connections of a peer, by its address. Connections of a peer are not independent, but
    /// connections are counted: there is no verdict.
    Peer,
}

impl Unit {
    /// "connections" or "peers", for messages.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Connection => "connections",
            Self::Peer => "peers",
        }
    }
}

/// Rising shares of the treatment: the probabilities with which connections are drawn into it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
pub struct Ramp(Vec<Probability>);

/// Why a design is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DesignError(String);

impl Ramp {
    /// The shares in ascending order.
    pub fn shares(&self) -> &[Probability] {
        &self.0
    }

    /// The number of equal parts of the duration: two for each step and one more.
    const fn parts(&self) -> u64 {
        2 * self.0.len() as u64 + 1
    }
}

impl TryFrom<Vec<f64>> for Ramp {
    type Error = DesignError;

    /// # Errors
    ///
    /// If there is no share, or a share is not a [`Probability`] or not larger than the previous
    /// one.
    fn try_from(shares: Vec<f64>) -> Result<Self, DesignError> {
        if shares.is_empty() {
            return Err(DesignError("a ramp needs a share".to_owned()));
        }
        for (before, then) in shares.iter().zip(shares.iter().skip(1)) {
            if then <= before {
                let [before, then] = [before, then].map(|share| share * 100.0);
                return Err(DesignError(format!(
                    "the ramp's shares must rise: {then:.4} % comes after {before:.4} %"
                )));
            }
        }
        let shares = shares.into_iter().map(Probability::try_from);
        let shares: Result<_, _> = shares.collect();
        shares.map(Self).map_err(|e| DesignError(e.to_string()))
    }
}

impl From<Ramp> for Vec<f64> {
    fn from(ramp: Ramp) -> Self {
        ramp.0.into_iter().map(Probability::get).collect()
    }
}

/// The design of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Design {
    /// The policy whose timers are compared with the kernel's own.
    pub policy: String,
    /// A digest of the policy's settings: with different settings, it is a different experiment.
    pub settings: String,
    /// Identifies the experiment; the same on all participating hosts.
    pub identity: String,
    /// Seed of the hash that assigns the arms on this host.
    pub seed: u32,
    /// What is assigned to an arm.
    pub unit: Unit,
    /// The shares, in order.
    pub ramp: Ramp,
    /// The maximum duration, seconds.
    pub duration_s: u64,
    /// Whether all connections are treated once a gain is proven.
    pub promote: bool,
}

impl Design {
    /// Checks that the duration is long enough for the ramp.
    /// Fails if there are several steps and the duration is too short for them.
    pub fn check(&self) -> Result<(), DesignError> {
        let least_s = LEAST_STEP_S * self.ramp.parts();
        let steps = self.ramp.shares().len();
        if steps > 1 && self.duration_s < least_s {
            let duration_s = self.duration_s;
            return Err(DesignError(format!(
                "a ramp of {steps} steps needs at least {least_s} s, not {duration_s} s"
            )));
        }
        Ok(())
    }

    /// The minimum duration of a step, seconds: with three steps a seventh of the duration, so a
    /// day of a week.
    pub fn step_s(&self) -> u64 {
        self.duration_s / self.ramp.parts()
    }
}
