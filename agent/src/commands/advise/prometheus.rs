//! Evidence from a fleet's metrics, queried through the HTTP API of Prometheus or of a compatible
//! server: Thanos, Mimir, VictoriaMetrics.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, bail, ensure};

mod api;

use rto_agent_core::{
    policy::{PolicyName, units::format_duration},
    printable::counted,
    wire::{
        histogram::{BucketView, HistogramView},
        stats::{ArmStats, DirectionStats, PolicyStats},
    },
};

use self::api::{Sample, Server};
use super::evidence::{Gathered, Source, choose_policy, count};
use crate::cli::Advise;

/// A metric that warnings are based on.
type CounterField = (&'static str, fn(&mut DirectionStats) -> &mut u64);
const COUNTERS: [CounterField; 4] = [
    ("connections", |stats| &mut stats.connections),
    ("spurious_handshake_retransmissions", |stats| {
        &mut stats.spurious
    }),
    ("undecided_handshake_retransmissions", |stats| {
        &mut stats.undecided
    }),
    ("tail_loss_probes", |stats| &mut stats.tail_loss_probes),
];
/// A metric that the advice is based on.
type HistogramField = (&'static str, fn(&mut DirectionStats) -> &mut HistogramView);
const HISTOGRAMS: [HistogramField; 3] = [
    ("connect_time", |stats| &mut stats.connect_time),
    ("path_rtt", |stats| &mut stats.path_rtt),
    ("smoothed_rtt", |stats| &mut stats.srtt),
];

/// The scope of the queries.
struct Question<'a> {
    url: &'a str,
    /// `cluster="a",zone=~"b.*"`
    matchers: &'a str,
    range: Duration,
}

impl Question<'_> {
    /// The series of a metric on the selected hosts, also restricted by `matcher` unless it is
    /// empty.
    fn selector(&self, metric: &str, matcher: &str) -> String {
        let all = [matcher, self.matchers].into_iter();
        let all: Vec<_> = all.filter(|matcher| !matcher.is_empty()).collect();
        format!("rto_agent_{metric}{{{}}}", all.join(","))
    }

    /// The increase of a metric, summed by these labels.
    fn increase(&self, metric: &str, policy: &PolicyName, by: &str) -> String {
        let selector = self.selector(metric, &format!("policy=\"{policy}\""));
        let range = self.range.as_secs();
        format!("sum by ({by}) (increase({selector}[{range}s]))")
    }
}

/// Reads the counts of a policy; without one, of the only policy.
pub(super) fn read(url: &str, args: &Advise) -> anyhow::Result<Gathered> {
    let title = || format!("--prometheus {url}");
    let policy = args.policy.as_deref().map(str::parse).transpose()?;
    let question = Question {
        url,
        matchers: args.matchers.as_deref().unwrap_or_default(),
        range: args.range,
    };
    let mut server = Server::new(url, &args.header).with_context(title)?;
    let mut gathered =
        gathered(|query| server.query(query), &question, policy).with_context(title)?;
    // Before all other warnings, because these are about missing data.
    gathered.warnings.splice(0..0, server.warnings());
    Ok(gathered)
}

fn gathered(
    mut ask: impl FnMut(&str) -> anyhow::Result<Vec<Sample>>,
    question: &Question<'_>,
    policy: Option<PolicyName>,
) -> anyhow::Result<Gathered> {
    // Each host has one such series for each policy.
    let hosts = question.selector("connections_total", "direction=\"active\"");
    let (policy, hosts) = policy_of(&ask(&format!("count by (policy) ({hosts})"))?, policy)?;
    let sampling = question.selector("connections_per_sample", "");
    let sampling = sampling_of(&ask(&format!("count_values(\"sampling\", {sampling})"))?)?;
    let mut stats = ArmStats::default();
    for (metric, field) in COUNTERS {
        let query = question.increase(&format!("{metric}_total"), &policy, "direction");
        for sample in ask(&query)? {
            if let Some(direction) = direction(&mut stats, sample.label("direction")) {
                *field(direction) = sample.count()?;
            }
        }
    }
    for (metric, field) in HISTOGRAMS {
        let metric = format!("{metric}_seconds");
        let classic = format!("{metric}_bucket");
        let mut samples = ask(&question.increase(&classic, &policy, "direction, le"))?;
        // Stored as native histograms (convert_classic_histograms_to_nhcb).
        if samples.is_empty() {
            samples = ask(&question.increase(&metric, &policy, "direction"))?;
        }
        for name in ["active", "passive", "unknown"] {
            let of = samples.extract_if(.., |sample| sample.label("direction") == name);
            let view = histogram(of).with_context(|| metric.clone())?;
            if let Some(direction) = direction(&mut stats, name) {
                *field(direction) = view;
            }
        }
    }
    let timed = stats
        .directions()
        .iter()
        .map(|(_, s)| s.path_rtt.count)
        .sum::<u64>();
    let connections = stats
        .directions()
        .iter()
        .map(|(_, s)| s.connections)
        .sum::<u64>();
    ensure!(
        timed > 0 || connections == 0,
        "there are no histograms of policy {policy}: set metrics_detail = true in [agent] of the hosts, and wait for \
         the range of the query"
    );
    let has_rtts = stats.directions().iter().any(|(_, s)| s.srtt.count > 0);
    // The CIDRs are unknown, because each of these hosts has its own entries.
    let named = (policy != PolicyName::unmatched()).then(|| policy.clone());
    let mut gathered = Gathered::new(Source::Prometheus {
        policy,
        url: question.url.to_owned(),
        matchers: question.matchers.to_owned(),
        range: format_duration(question.range),
        hosts,
    });
    gathered.policy = named;
    gathered.observed_ms = u64::try_from(question.range.as_millis()).ok();
    let rtt_sampling = if has_rtts { "end" } else { "off" };
    count(
        &mut gathered,
        &PolicyStats::from(stats),
        sampling,
        rtt_sampling,
    );
    gathered.notes.push(
        "metrics have one bucket per power of two: each time counts as the upper bound of its \
         bucket, up to twice the real time"
            .to_owned(),
    );
    gathered.notes.push(
        "metrics do not contain the active values: \"now\" is the kernel's own value, and jiffies \
         are those of this host"
            .to_owned(),
    );
    Ok(gathered)
}

/// The requested policy, or the only one, and the number of hosts that have it.
fn policy_of(counts: &[Sample], wanted: Option<PolicyName>) -> anyhow::Result<(PolicyName, u64)> {
    ensure!(
        !counts.is_empty(),
        "no metrics of rto-agent there: check --match, and that statistics and metrics are enabled \
         ([agent])"
    );
    let mut hosts = BTreeMap::new();
    for sample in counts {
        hosts.insert(sample.label("policy").parse()?, sample.count()?);
    }
    let policy = choose_policy(wanted, &hosts.keys().cloned().collect())?;
    let count = hosts.remove(&policy).unwrap_or_default();
    Ok((policy, count))
}

/// The sampling, which must be the same everywhere: otherwise the times have different weights.
fn sampling_of(counts: &[Sample]) -> anyhow::Result<u32> {
    if let [one] = counts {
        let sampling = one.label("sampling").parse();
        return sampling.context("rto_agent_connections_per_sample");
    }
    let mut of = Vec::new();
    for sample in counts {
        let hosts = counted(sample.count()?, "host", "hosts");
        of.push(format!(
            "{hosts} with sampling = {}",
            sample.label("sampling")
        ));
    }
    ensure!(
        !of.is_empty(),
        "rto_agent_connections_per_sample is missing there"
    );
    bail!(
        "{}: select hosts with the same setting with --match",
        of.join(", ")
    )
}

fn direction<'a>(stats: &'a mut ArmStats, name: &str) -> Option<&'a mut DirectionStats> {
    match name {
        "active" => Some(&mut stats.active),
        "passive" => Some(&mut stats.passive),
        "unknown" => Some(&mut stats.unknown),
        _ => None,
    }
}

/// Converts cumulative buckets.
fn histogram(samples: impl Iterator<Item = Sample>) -> anyhow::Result<HistogramView> {
    let mut cumulative = Vec::new();
    for sample in samples {
        if let Some((_, native)) = &sample.histogram {
            cumulative.extend(native.cumulative()?);
            continue;
        }
        let end: f64 = sample.label("le").parse().context("le")?;
        cumulative.push((end, sample.count()?));
    }
    cumulative.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut view = HistogramView::default();
    let (mut from_us, mut below) = (0, 0);
    for (end, count) in cumulative {
        let below_us = microseconds(end);
        // Extrapolated sums need not increase from bucket to bucket.
        let bucket = BucketView {
            from_us,
            below_us,
            count: count.saturating_sub(below),
        };
        if bucket.count > 0 {
            view.buckets.push(bucket);
        }
        view.count += bucket.count;
        below = below.max(count);
        from_us = below_us.unwrap_or(from_us);
    }
    Ok(view)
}

/// The upper bound of a bucket in seconds; `None` for the last bucket.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "ends of buckets are 16 us to 67 s"
)]
fn microseconds(seconds: f64) -> Option<u64> {
    seconds
        .is_finite()
        .then(|| (seconds * 1e6).round().max(0.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(labels: &[(&str, &str)], value: f64) -> Sample {
        let labels = labels.iter();
        Sample {
            metric: labels.map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            value: (0.0, value.to_string()),
            histogram: None,
        }
    }

    const QUESTION: Question<'_> = Question {
        url: "http://x",
        matchers: "cluster=\"a\"",
        range: Duration::from_secs(86_400),
    };

    /// A fleet of two hosts. Each policy has 6,000 handshakes of up to 1.024 ms, and one beyond 67
    /// s.
    fn fleet(query: &str) -> anyhow::Result<Vec<Sample>> {
        assert!(query.contains("cluster=\"a\""), "{query}");
        if query.starts_with("count by (policy)") {
            let policies = ["near", "far", "unmatched"];
            return Ok(policies.map(|p| sample(&[("policy", p)], 2.0)).into());
        }
        if query.starts_with("count_values") {
            return Ok(vec![sample(&[("sampling", "2")], 2.0)]);
        }
        assert!(query.contains("policy=\"near\""), "{query}");
        let active = ("direction", "active");
        Ok(match query {
            q if q.contains("path_rtt") || q.contains("connect_time") => vec![
                sample(&[active, ("le", "+Inf")], 6001.2),
                sample(&[active, ("le", "0.001024")], 6000.4),
                sample(&[active, ("le", "0.000512")], 0.0),
            ],
            q if q.contains("smoothed_rtt") => Vec::new(),
            q if q.contains("connections_total") => vec![sample(&[active], 6001.0)],
            q if q.contains("spurious") => vec![sample(&[active], 2.9)],
            _ => Vec::new(),
        })
    }

    #[test]
    fn native_histograms_are_evidence() {
        let native = |query: &str| {
            if query.contains("_bucket{") {
                return Ok(Vec::new());
            }
            if !query.contains("path_rtt") && !query.contains("connect_time") {
                return fleet(query);
            }
            let json = r#"{"metric": {"direction": "active"}, "histogram": [0, {"count": "6001.2", "sum": "3", "buckets":
                [[0, "0.000512", "0.001024", "6000.4"], [0, "0.001024", "+Inf", "0.8"]]}]}"#;
            Ok(vec![serde_json::from_str(json)?])
        };
        let gathered = gathered(native, &QUESTION, "near".parse().ok()).unwrap();
        let [connects, path] = &*gathered.evidence else {
            panic!("{:?}", gathered.evidence);
        };
        for evidence in [connects, path] {
            assert_eq!((evidence.samples, evidence.p99_us), (6001, Some(1024)));
        }
    }

    #[test]
    fn missing_histograms_name_metrics_detail() {
        let basic = |query: &str| match query.contains("_seconds") {
            true => Ok(Vec::new()),
            false => fleet(query),
        };
        let error = gathered(basic, &QUESTION, "near".parse().ok())
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("metrics_detail = true"),
            "{error}"
        );
    }

    #[test]
    fn classic_histograms_are_evidence() {
        let gathered = gathered(fleet, &QUESTION, "near".parse().ok()).unwrap();
        // Each sample counts for two.
        let [connects, path] = &*gathered.evidence else {
            panic!("{:?}", gathered.evidence);
        };
        for (evidence, what) in [(connects, "connect_time"), (path, "path_rtt")] {
            assert_eq!((evidence.what, evidence.samples), (what, 6001));
            assert_eq!((evidence.p99_us, evidence.longest_us), (Some(1024), None));
        }
        let warnings = gathered.warnings.join("\n");
        assert!(warnings.contains("3 spurious SYN"), "{warnings}");
        assert!(
            warnings.contains("smoothed RTTs are not sampled"),
            "{warnings}"
        );
        let text = super::super::text::source(&gathered.source);
        assert!(
            text.contains("2 hosts") && text.contains("cluster"),
            "{text}"
        );
    }

    #[test]
    fn metrics_of_several_policies_or_hosts_need_a_choice() {
        let error = |result: anyhow::Result<Gathered>| format!("{:#}", result.err().unwrap());
        let which = error(gathered(fleet, &QUESTION, None));
        assert!(
            which.contains("policies there: far, near, unmatched"),
            "{which}"
        );
        let other = error(gathered(fleet, &QUESTION, "mid".parse().ok()));
        assert!(other.contains("no policy mid; policies there"), "{other}");
        let none = error(gathered(|_| Ok(Vec::new()), &QUESTION, None));
        assert!(none.contains("no metrics of rto-agent"), "{none}");
        let mixed = |query: &str| match query.starts_with("count_values") {
            true => Ok(vec![
                sample(&[("sampling", "1")], 1.0),
                sample(&[("sampling", "256")], 3.0),
            ]),
            false => fleet(query),
        };
        let mixed = error(gathered(mixed, &QUESTION, "near".parse().ok()));
        let message = "1 host with sampling = 1, 3 hosts with sampling = 256";
        assert!(mixed.contains(message), "{mixed}");
    }
}
