//! RTT samples of a capture or of the agent's statistics.

use anyhow::{Context as _, ensure};
use rto_model::{advice::Distribution, capture, estimator::Sample};
use serde::Deserialize;

/// Samples drawn of histograms.
const DRAWN: usize = 50_000;

/// RTT samples from one place.
#[derive(Clone, Debug, Default)]
pub(super) struct Source {
    /// What they are of.
    pub(super) title: String,
    /// By flow, in order.
    pub(super) flows: Vec<Vec<Sample>>,
    /// Whether flows are only drawn of what was counted.
    pub(super) is_drawn: bool,
    /// What to know of them.
    pub(super) remarks: Vec<String>,
}

/// The samples of a capture: of the host where it was taken.
pub(super) fn of_capture(name: &str, bytes: &[u8]) -> anyhow::Result<Source> {
    let mut capture = capture::read(bytes)?;
    capture.retain_far();
    let flows = capture.samples();
    ensure!(!flows.is_empty(), "no round trip of TCP in it");
    Ok(Source {
        title: name.to_owned(),
        flows,
        is_drawn: false,
        remarks: capture.remarks(),
    })
}

/// What `rto-agent stats --json` prints, as far as it is needed.
#[derive(Deserialize)]
struct Statistics {
    policies:
        std::collections::BTreeMap<String, std::collections::BTreeMap<String, serde_json::Value>>,
}

#[derive(Deserialize)]
struct Histogram {
    buckets: Vec<Bucket>,
}

#[derive(Deserialize)]
struct Bucket {
    below_us: Option<u64>,
    count: u64,
}

/// Samples drawn at random of the smoothed RTTs that the agent counted, of one policy or of all.
pub(super) fn of_statistics(text: &str, policy: Option<&str>) -> anyhow::Result<Source> {
    let statistics: Statistics = serde_json::from_str(text)
        .context("not what `rto-agent stats --json` prints: give the file it was written to")?;
    let known: Vec<&str> = statistics.policies.keys().map(String::as_str).collect();
    if let Some(policy) = policy {
        ensure!(
            known.contains(&policy),
            "unknown policy {policy}; the statistics have: {}",
            known.join(", ")
        );
    }
    let mut times = Distribution::default();
    let wanted = statistics.policies.iter();
    for (_, directions) in wanted.filter(|(name, _)| policy.is_none_or(|policy| policy == *name)) {
        for direction in directions.values() {
            let Some(histogram) = direction.get("srtt").filter(|srtt| !srtt.is_null()) else {
                continue;
            };
            let histogram: Histogram = serde_json::from_value(histogram.clone())?;
            for bucket in histogram.buckets {
                times.add(bucket.below_us.unwrap_or(u64::MAX), bucket.count);
            }
        }
    }
    ensure!(
        times.count() > 0,
        "no round trips in the statistics: is rtt_sampling off?"
    );
    Ok(Source {
        title: format!("smoothed RTTs of {}", policy.unwrap_or("all policies")),
        flows: times.drawn(DRAWN),
        is_drawn: true,
        remarks: vec![
            format!(
                "{} smoothed RTTs, of which samples were drawn without order: single slow answers are hidden in them",
                times.count()
            ),
            "intervals are over the drawn flows: they tell how much another draw would differ, not other traffic"
                .to_owned(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATISTICS: &str = r#"{"on": true, "policies": {
        "near": {"active": {"connections": 7, "srtt": {"count": 10, "sum_us": 1000, "buckets": [
            {"from_us": 100, "below_us": 120, "count": 9}, {"from_us": 1000, "count": 1}]}},
          "passive": {"connections": 0, "srtt": null}},
        "far": {"active": {"srtt": {"count": 5, "sum_us": 5, "buckets": [
            {"from_us": 50000, "below_us": 60000, "count": 5}]}}}}}"#;

    #[test]
    fn statistics_of_the_agent() {
        let all = of_statistics(STATISTICS, None).unwrap();
        assert!(all.is_drawn && all.remarks[0].starts_with("15 smoothed RTTs"));
        let far = of_statistics(STATISTICS, Some("far")).unwrap();
        assert!(far.flows.iter().flatten().all(|s| s.rtt_us == 60_000));
        assert!(far.flows.iter().map(Vec::len).sum::<usize>() >= DRAWN);
        for (text, policy, said) in [
            (STATISTICS, Some("other"), "the statistics have: far, near"),
            ("{}", None, "rto-agent stats --json"),
            (r#"{"policies": {}}"#, None, "rtt_sampling"),
        ] {
            let error = format!("{:#}", of_statistics(text, policy).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
    }
}
