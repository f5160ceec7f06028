//! The same experiment on several hosts, as one.

use super::{Design, Experiment, GAIN, HARM, MISMATCH, Step, Unit, Verdict};

/// Why experiments are not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// No experiments.
    #[error("there is no experiment to merge")]
    Nothing,
    /// Something that must be the same differs.
    #[error("experiments with different {what} cannot be merged: {one} and {other}")]
    Different {
        /// The policy, the identity, the settings, the unit or the ramp.
        what: &'static str,
        /// Of the first.
        one: String,
        /// The host whose design differs.
        other: String,
    },
    /// The same counts twice.
    #[error("host {host} is in it twice")]
    Twice {
        /// Its name.
        host: String,
    },
    /// With one seed a peer is in the same arm on both hosts, and would count twice as one draw.
    #[error("peers were drawn with the same seed ({seed}) on several hosts")]
    SameSeed {
        /// The seed.
        seed: u32,
    },
}

impl Experiment {
    /// Sums the counts of several hosts. The verdict is that of the sums; time and the ramp play no part.
    ///
    /// # Errors
    ///
    /// None; a different policy, identity, settings, unit or ramp; a host twice; one seed for peers of several hosts.
    pub fn merge(experiments: &[Self]) -> Result<Self, MergeError> {
        let (first, rest) = experiments.split_first().ok_or(MergeError::Nothing)?;
        let mut merged = first.clone();
        for other in rest {
            same(first, other)?;
            for (host, seed) in &other.hosts {
                if merged.hosts.contains_key(host) {
                    return Err(MergeError::Twice { host: host.clone() });
                }
                if first.design.unit == Unit::Peer && merged.hosts.values().any(|had| had == seed) {
                    return Err(MergeError::SameSeed { seed: *seed });
                }
            }
            merged.add(other);
        }
        merged.verdict = merged.conclusion();
        merged.is_gain_proven = matches!(merged.verdict, Some(Verdict::GainProven { .. }));
        Ok(merged)
    }

    fn add(&mut self, other: &Self) {
        self.hosts.extend(other.hosts.clone());
        self.elapsed_ms = self.elapsed_ms.max(other.elapsed_ms);
        self.under_way += other.under_way;
        let steps = self.steps.len().max(other.steps.len());
        self.steps.resize_with(steps, Step::default);
        for (step, other) in self.steps.iter_mut().zip(&other.steps) {
            step.counts += other.counts;
            step.under_way += other.under_way;
        }
    }

    /// By the counts alone.
    fn conclusion(&self) -> Option<Verdict> {
        if self.design.unit == Unit::Peer {
            return None;
        }
        if self.mismatch_reaches(MISMATCH) {
            return Some(Verdict::Invalid);
        }
        if let Some(outcome) = self.harm(HARM) {
            return Some(Verdict::Harm { outcome });
        }
        let gains = self.suspected_harm().is_none() && self.gain_reaches(GAIN);
        gains.then_some(Verdict::GainProven { promoted: false })
    }
}

/// What two experiments must have in common.
fn same(one: &Experiment, other: &Experiment) -> Result<(), MergeError> {
    let (one, other) = (&one.design, &other.design);
    let ramp = |design: &Design| {
        let shares = design.ramp.shares().iter();
        let percent: Vec<_> = shares
            .map(|share| format!("{}%", share.get() * 100.0))
            .collect();
        percent.join(",")
    };
    let unit = |design: &Design| format!("{:?}", design.unit).to_lowercase();
    for (what, one, other) in [
        ("policies", one.policy.clone(), other.policy.clone()),
        ("identities", one.identity.clone(), other.identity.clone()),
        ("settings", one.settings.clone(), other.settings.clone()),
        ("units", unit(one), unit(other)),
        ("ramps", ramp(one), ramp(other)),
    ] {
        if one != other {
            return Err(MergeError::Different { what, one, other });
        }
    }
    Ok(())
}
