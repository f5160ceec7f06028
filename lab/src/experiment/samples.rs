//! RTT samples of a capture or of the agent's statistics.

use anyhow::{Context as _, ensure};
use rto_model::{advice::draw, distribution::Distribution, estimator::Sample};
use rto_testbed::machine::Machine;
use serde_json::Value;

use crate::capture;

/// Number of samples drawn from histograms.
const DRAWN: usize = 50_000;
/// The error for a file of another kind.
const NO_STATISTICS: &str =
    "not the output of `rto-agent stats --json`: pass a file with that output";

/// RTT samples from one source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    /// Description of the source.
    pub(crate) title: String,
    /// By flow, in order.
    pub(crate) flows: Vec<Vec<Sample>>,
    /// Whether flows are drawn from counted histograms.
    pub(crate) is_drawn: bool,
    /// Remarks about the samples.
    pub(crate) remarks: Vec<String>,
}

impl Samples {
    /// Samples of a capture, as seen by the host where it was taken.
    pub(crate) fn of_capture(name: &str, bytes: &[u8]) -> anyhow::Result<Self> {
        let mut capture = capture::read(bytes)?;
        let fit = capture.fit(1_000_000 / Machine::here()?.hz.max(1))?;
        let mut remarks = capture.remarks();
        remarks.extend(fit.remark());
        let undecided = capture.retain_sent_by_host(&[], None).undecided;
        if undecided > 0 {
            remarks.push(format!(
                "{undecided} connection(s) skipped: it is unknown which side is this host"
            ));
        }
        let flows = fit.round_trips(capture.flows.iter());
        ensure!(
            !flows.is_empty(),
            "no TCP round trips in the capture: {}",
            remarks.join("; ")
        );
        Ok(Self {
            title: name.to_owned(),
            flows,
            is_drawn: false,
            remarks,
        })
    }

    /// Draws samples from the smoothed RTTs that the agent counted, of one policy or of all.
    pub(crate) fn of_statistics(text: &str, policy: Option<&str>) -> anyhow::Result<Self> {
        let statistics: Value = serde_json::from_str(text).context(NO_STATISTICS)?;
        let policies = statistics["policies"].as_object().context(NO_STATISTICS)?;
        if let Some(policy) = policy {
            let known: Vec<&str> = policies.keys().map(String::as_str).collect();
            ensure!(
                known.contains(&policy),
                "unknown policy {policy}; the statistics have: {}",
                known.join(", ")
            );
        }
        let wanted = policies
            .iter()
            .filter(|(name, _)| policy.is_none_or(|policy| policy == *name));
        let directions =
            wanted.flat_map(|(_, of_policy)| of_policy.as_object().into_iter().flatten());
        let mut times = Distribution::default();
        for (_, direction) in directions {
            // Null if RTTs are not sampled.
            let buckets = direction["srtt"]["buckets"].as_array();
            for bucket in buckets.into_iter().flatten() {
                let count = bucket["count"].as_u64().context(NO_STATISTICS)?;
                times.add(bucket["below_us"].as_u64().unwrap_or(u64::MAX), count);
            }
        }
        ensure!(
            times.count() > 0,
            "no round trips in the statistics: is rtt_sampling off?"
        );
        Ok(Self {
            title: format!("smoothed RTTs of {}", policy.unwrap_or("all policies")),
            flows: draw(&times, DRAWN),
            is_drawn: true,
            remarks: vec![
                format!(
                    "{} smoothed RTTs, from which samples were drawn in random order: they hide single slow answers",
                    times.count()
                ),
                "intervals are over the drawn flows: they show the variation between draws, not between traffic"
                    .to_owned(),
            ],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATISTICS: &str = r#"{"on": true, "policies": {
        "near": {"active": {"connections": 7, "srtt": {"count": 10, "sum_us": 1000, "buckets": [
            {"from_us": 100, "below_us": 120, "count": 9}, {"from_us": 1000, "count": 1}]}},
          "passive": {"connections": 0, "srtt": null}},
        "far": {"holdout": "50%", "active": {"srtt": {"count": 5, "sum_us": 5, "buckets": [
            {"from_us": 50000, "below_us": 60000, "count": 5}]}}}}}"#;

    #[test]
    fn samples_are_drawn_from_agent_statistics() {
        let all = Samples::of_statistics(STATISTICS, None).unwrap();
        assert!(all.is_drawn && all.remarks[0].starts_with("15 smoothed RTTs"));
        let far = Samples::of_statistics(STATISTICS, Some("far")).unwrap();
        assert!(far.flows.iter().flatten().all(|s| s.rtt_us == 60_000));
        assert!(far.flows.iter().map(Vec::len).sum::<usize>() >= DRAWN);
        for (text, policy, message) in [
            (STATISTICS, Some("other"), "the statistics have: far, near"),
            ("{}", None, "rto-agent stats --json"),
            ("nonsense", None, "rto-agent stats --json"),
            (r#"{"policies": {}}"#, None, "rtt_sampling"),
        ] {
            let error = format!("{:#}", Samples::of_statistics(text, policy).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }
}
