//! How often an RTO is too short: RFC 6298 with any weights, sampling and minimum, and Linux's variant, over RTT
//! samples of generated load, of a capture or of the agent's statistics.

mod load;
mod tables;

use std::thread;

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use rto_model::{
    advice::Distribution,
    capture,
    estimator::{Rfc6298, Sample},
};
use rto_testbed::machine::Machine;
use serde::Deserialize;

pub use self::load::Load;
use crate::report::{Method, Report};

/// Samples drawn of histograms.
const DRAWN: usize = 50_000;

/// RTT samples from one place.
#[derive(Clone, Debug)]
pub struct Source {
    /// For the names of tables.
    pub name: String,
    /// What they are of.
    pub title: String,
    /// By flow, in order.
    pub flows: Vec<Vec<Sample>>,
    /// What to know of them.
    pub remarks: Vec<String>,
}

/// What to study.
#[derive(Clone, Debug)]
pub struct Options {
    /// An estimator beside the published ones.
    pub own: Option<Rfc6298>,
    /// Minimum RTOs to compare, microseconds.
    pub minimums_us: Vec<u64>,
    /// Values of rto_min for Linux's estimator, microseconds.
    pub rto_mins_us: Vec<u64>,
    /// Of what is random.
    pub seed: u64,
}

/// Generates loads, all at once, each on a link of its own.
///
/// # Errors
///
/// If a link or a sender cannot be made.
pub fn generate(loads: &[Load]) -> anyhow::Result<Vec<Source>> {
    let bar = ProgressBar::new(loads.iter().map(Load::steps).sum());
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent} %, {eta} left",
    )?);
    let sources = thread::scope(|scope| {
        let running: Vec<_> = loads
            .iter()
            .zip(0..)
            .map(|(load, number)| (load, number, bar.clone()))
            .map(|(load, number, bar)| scope.spawn(move || load.run(number, &bar)))
            .collect();
        let ended = running.into_iter().map(|load| {
            load.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect()
    });
    bar.finish_and_clear();
    sources
}

/// The samples of a capture: of the host where it was taken.
///
/// # Errors
///
/// If it cannot be read as one, or has no samples.
pub fn of_capture(name: &str, bytes: &[u8]) -> anyhow::Result<Source> {
    let mut capture = capture::read(bytes)?;
    capture.retain_far();
    let flows = capture.samples();
    ensure!(!flows.is_empty(), "no round trip of TCP in it");
    Ok(Source {
        name: "capture".to_owned(),
        title: name.to_owned(),
        flows,
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
///
/// # Errors
///
/// If it is not what `rto-agent stats --json` prints, or has no round trips.
pub fn of_statistics(text: &str, policy: Option<&str>) -> anyhow::Result<Source> {
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
        name: "statistics".to_owned(),
        title: format!("smoothed RTTs of {}", policy.unwrap_or("all policies")),
        flows: times.drawn(DRAWN),
        remarks: vec![format!(
            "{} smoothed RTTs, of which samples were drawn without order: single slow answers are hidden in them",
            times.count()
        )],
    })
}

/// Runs the estimators over the samples.
///
/// # Errors
///
/// If the machine does not say what it is.
pub fn study(sources: &[Source], options: &Options, method: Method) -> anyhow::Result<Report> {
    Ok(tables::report(sources, options, method, Machine::here()?))
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
        assert!(all.remarks[0].starts_with("15 smoothed RTTs"));
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
