//! Merges the results of the same experiment on several hosts.

use super::{Design, Experiment, GAIN, HARM, MISMATCH, Step, Unit, Verdict};

/// Why experiments cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MergeError(String);

impl Experiment {
    /// Adds the counts of several hosts. The verdict is computed from the sums; time and the ramp
    /// are ignored.
    /// Fails if there are no experiments, the designs differ in policy, identity, settings, unit or ramp,
    /// a host occurs twice, or several hosts use the same seed for peers.
    pub fn merge(experiments: &[Self]) -> Result<Self, MergeError> {
        let refused = |why: String| Err(MergeError(why));
        let Some((first, rest)) = experiments.split_first() else {
            return refused("there is no experiment to merge".to_owned());
        };
        let mut merged = first.clone();
        for other in rest {
            same(first, other)?;
            for (host, seed) in &other.hosts {
                if merged.hosts.contains_key(host) {
                    return refused(format!("host {host} occurs twice"));
                }
                // With the same seed, a peer is in the same arm on both hosts, so its assignment
                // would count twice.
                if first.design.unit == Unit::Peer && merged.hosts.values().any(|had| had == seed) {
                    return refused(format!(
                        "peers were assigned to arms with the same seed ({seed}) on several hosts"
                    ));
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

    /// The verdict from the counts alone.
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

/// Checks that two experiments have the same design.
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
            return Err(MergeError(format!(
                "experiments with different {what} cannot be merged: {one} and {other}"
            )));
        }
    }
    Ok(())
}
