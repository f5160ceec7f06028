//! Evidence from several hosts: the output of `rto-agent stats --json`, added.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use rto_agent_core::{
    policy::PolicyName,
    printable,
    wire::stats::{DirectionStats, PolicyStats, StatsAnswer},
};
use rto_agent_daemon::build_info;
use serde::Deserialize as _;
use serde_json::{Deserializer, Value};

use super::evidence::{Gathered, Source};

/// One document, and its name in errors.
struct Document {
    title: String,
    stats: StatsAnswer,
}

/// Adds the counts of a policy in these files; without `policy`, of their only policy.
pub(super) fn read(paths: &[PathBuf], policy: Option<&PolicyName>) -> anyhow::Result<Gathered> {
    let mut documents = Vec::new();
    for path in paths {
        let title = format!("--stats {}", printable::path(path));
        let input: Box<dyn Read> = if path == Path::new("-") {
            Box::new(io::stdin().lock())
        } else {
            Box::new(File::open(path).with_context(|| title.clone())?)
        };
        documents.extend(documents_of(&title, BufReader::new(input))?);
    }
    gathered(&documents, paths, policy)
}

/// Reads all concatenated documents of a file.
fn documents_of(title: &str, input: impl Read) -> anyhow::Result<Vec<Document>> {
    let values = Deserializer::from_reader(input).into_iter::<Value>();
    let values: Vec<Value> = values
        .collect::<Result<_, _>>()
        .context("not JSON")
        .with_context(|| title.to_owned())?;
    ensure!(!values.is_empty(), "{title}: the file is empty");
    let is_only = values.len() == 1;
    let documents = values.iter().zip(1..).map(|(value, number)| {
        let title = match is_only {
            true => title.to_owned(),
            false => format!("{title}, document {number}"),
        };
        let stats = stats_of(value).with_context(|| title.clone())?;
        Ok(Document { title, stats })
    });
    documents.collect()
}

fn stats_of(value: &Value) -> anyhow::Result<StatsAnswer> {
    let policies = value.get("policies").and_then(Value::as_object);
    let is_stats = ["at_ms", "on", "rtt_sampling"].map(|field| value.get(field).is_some());
    let Some(policies) = policies.filter(|_| is_stats == [true; 3]) else {
        bail!("not the output of rto-agent stats --json");
    };
    let mut missing = None;
    if value.get("sampling").is_none() {
        missing = Some("sampling".to_owned());
    }
    let fields = serde_json::to_value(DirectionStats::default())?;
    let fields: BTreeSet<&String> = fields
        .as_object()
        .into_iter()
        .flatten()
        .map(|f| f.0)
        .collect();
    for (name, policy) in policies {
        let arms = [Some(policy), policy.get("control")].into_iter().flatten();
        let directions = ["active", "passive", "unknown"];
        for (arm, direction) in arms.flat_map(|arm| directions.map(|d| (arm, d))) {
            let has = |field: &str| arm.get(direction).is_some_and(|d| d.get(field).is_some());
            let lacks = fields.iter().find(|field| !has(field));
            let lacks = lacks.map(|field| format!("{field} of policy {name}"));
            missing = missing.or(lacks);
        }
    }
    if let Some(missing) = missing {
        bail!(
            "{missing} is missing, because an earlier version does not count it: collect the \
             statistics with version {} on all hosts",
            build_info::VERSION
        );
    }
    let stats =
        StatsAnswer::deserialize(value).context("not the output of rto-agent stats --json")?;
    ensure!(
        stats.on,
        "that host has no statistics: set statistics = true in its [agent] and restart its daemon, \
         or leave the host out"
    );
    Ok(stats)
}

fn gathered(
    documents: &[Document],
    paths: &[PathBuf],
    policy: Option<&PolicyName>,
) -> anyhow::Result<Gathered> {
    let Some(first) = documents.first() else {
        bail!("--stats: give at least one file");
    };
    for (number, document) in documents.iter().enumerate() {
        check_same(first, document)?;
        let earlier = documents[..number].iter();
        let mut earlier = earlier.filter(|earlier| earlier.stats == document.stats);
        if let Some(earlier) = earlier.next() {
            bail!(
                "{}: the same statistics as {}, which would be counted twice",
                document.title,
                earlier.title
            );
        }
    }
    let policy = match policy {
        Some(policy) => policy.clone(),
        None => only_policy(documents)?,
    };
    let having: Vec<_> = documents
        .iter()
        .filter_map(|document| Some((document, document.stats.policies.get(&policy)?)))
        .collect();
    ensure!(
        !having.is_empty(),
        "no file has statistics of policy {policy}; policies in the files: {}",
        names(documents)
    );
    let mut sum = PolicyStats::default();
    for (number, (_, stats)) in having.iter().enumerate() {
        sum = match number {
            0 => (*stats).clone(),
            _ => sum.plus(stats),
        };
    }
    let times = having.iter().map(|(document, _)| document.stats.at_ms);
    let mut gathered = Gathered::of(Source::Fleet {
        policy,
        files: paths.to_vec(),
        documents: documents.len(),
        with_policy: having.len(),
        first_ms: times.clone().min().unwrap_or_default(),
        last_ms: times.max().unwrap_or_default(),
        rtt_sampling: first.stats.rtt_sampling.clone(),
    });
    let observed = having.iter().map(|(document, stats)| {
        let since_ms = stats.since_ms?;
        Some(document.stats.at_ms.saturating_sub(since_ms))
    });
    gathered.observed_ms = observed.min().flatten();
    gathered.count(&sum, first.stats.sampling, &first.stats.rtt_sampling);
    gathered.notes.push(
        "statistics do not contain the active values: \"now\" is the kernel's own value, and \
         jiffies are those of this host; do not give two files of the same host"
            .to_owned(),
    );
    Ok(gathered)
}

/// Refuses documents with different sampling: their times have different weights.
fn check_same(first: &Document, other: &Document) -> anyhow::Result<()> {
    let of = |document: &Document| {
        let stats = &document.stats;
        [
            ("sampling", stats.sampling.to_string()),
            ("rtt_sampling", format!("\"{}\"", stats.rtt_sampling)),
        ]
    };
    for ((key, one), (_, another)) in of(first).into_iter().zip(of(other)) {
        ensure!(
            one == another,
            "{}: counted with {key} = {another}, but {} with {key} = {one}: give only files of \
             hosts with the same setting",
            other.title,
            first.title
        );
    }
    Ok(())
}

/// The policy with connections, if there is exactly one.
fn only_policy(documents: &[Document]) -> anyhow::Result<PolicyName> {
    let policies = documents.iter().flat_map(|d| d.stats.policies.keys());
    let policies: BTreeSet<_> = policies.collect();
    let unmatched = PolicyName::unmatched();
    let mut named = policies.iter().filter(|name| ***name != unmatched);
    match (named.next(), named.next()) {
        (Some(only), None) => Ok((**only).clone()),
        _ => bail!(
            "--stats: give the policy with --policy NAME; policies in the files: {}",
            names(documents)
        ),
    }
}

fn names(documents: &[Document]) -> String {
    let policies = documents.iter().flat_map(|d| d.stats.policies.keys());
    let policies: BTreeSet<_> = policies.map(PolicyName::as_str).collect();
    policies.into_iter().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{Statistics, histogram::bucket_of};
    use rto_agent_core::wire::stats::ArmStats;

    use super::*;

    fn arm(connections: u64, us: u64) -> ArmStats {
        let mut active = Statistics::default();
        active.counters.spurious = 1;
        active.path_rtt.buckets[bucket_of(us)] = connections;
        active.srtt.buckets[bucket_of(us)] = connections;
        ArmStats::from(&[active, Statistics::default(), Statistics::default()])
    }

    fn stats(at_ms: u64, policies: &[(&str, PolicyStats)]) -> StatsAnswer {
        let policies = policies.iter();
        StatsAnswer {
            at_ms,
            on: true,
            sampling: 1,
            rtt_sampling: "end".to_owned(),
            policies: policies
                .map(|(name, stats)| (name.parse().unwrap(), stats.clone()))
                .collect(),
        }
    }

    fn near(at_ms: u64, connections: u64) -> StatsAnswer {
        stats(at_ms, &[("near", arm(connections, 1_000).into())])
    }

    fn text(stats: &StatsAnswer) -> String {
        serde_json::to_string_pretty(stats).unwrap()
    }

    fn files(texts: &[(&str, String)], policy: Option<&str>) -> anyhow::Result<Gathered> {
        let mut documents = Vec::new();
        for (title, text) in texts {
            documents.extend(documents_of(title, text.as_bytes())?);
        }
        let policy = policy.map(|policy| policy.parse().unwrap());
        gathered(&documents, &[], policy.as_ref())
    }

    fn error(texts: &[(&str, String)], policy: Option<&str>) -> String {
        format!("{:#}", files(texts, policy).err().unwrap())
    }

    #[test]
    fn a_fleet_is_as_one_host() {
        let (a, b) = (text(&near(1_000, 2_000)), text(&near(2_000, 1_000)));
        let of_files = files(&[("a.json", a.clone()), ("b.json", b.clone())], None).unwrap();
        // Concatenated files, and lines as `stats --watch` prints them.
        let of_stream = files(&[("-", format!("{a}\n{b}\n"))], Some("near")).unwrap();
        for gathered in [of_files, of_stream] {
            assert_eq!(gathered.handshakes.all.count(), 3_000);
            assert_eq!(gathered.evidence.len(), 3);
            let spurious = &gathered.warnings[0];
            assert!(
                spurious.starts_with("observed so far: 2 spurious"),
                "{spurious}"
            );
            assert!(spurious.contains("3000 connections"), "{spurious}");
            let Source::Fleet {
                with_policy,
                first_ms,
                last_ms,
                ..
            } = gathered.source
            else {
                panic!();
            };
            assert_eq!((with_policy, first_ms, last_ms), (2, 1_000, 2_000));
        }
    }

    #[test]
    fn handshake_times_are_of_both_arms_and_the_rest_of_the_treated_one() {
        let with_control = PolicyStats {
            control: Some(arm(500, 2_000)),
            ..arm(1_500, 1_000).into()
        };
        let one = text(&stats(1, &[("near", with_control)]));
        let gathered = files(&[("a", one), ("b", text(&near(2, 1_000)))], None).unwrap();
        assert_eq!(gathered.handshakes.all.count(), 3_000);
        let samples: Vec<_> = gathered.evidence.iter().map(|one| one.samples).collect();
        // The samples of connect times, path RTTs and smoothed RTTs.
        assert_eq!(samples, [2_500, 3_000, 2_500]);
        assert!(gathered.warnings[0].starts_with("observed so far: 2 spurious"));
    }

    #[test]
    fn statistics_that_differ_are_refused_with_the_file() {
        let good = text(&near(1, 10));
        let with = |change: fn(&mut StatsAnswer)| {
            let mut stats = near(2, 10);
            change(&mut stats);
            text(&stats)
        };
        for (other, said) in [
            ("hello".to_owned(), "b.json: not JSON"),
            (good[..good.len() / 2].to_owned(), "b.json: not JSON"),
            (String::new(), "b.json: the file is empty"),
            (
                "{\"policies\":{},\"entries\":[]}".to_owned(),
                "b.json: not the output of rto-agent stats --json",
            ),
            (
                "[1]".to_owned(),
                "b.json: not the output of rto-agent stats --json",
            ),
            (
                good.replace("\"active\": {", "\"active\": 3, \"x\": {"),
                "b.json: aborted of policy near is missing",
            ),
            (
                with(|s| s.on = false),
                "b.json: that host has no statistics",
            ),
            (
                with(|s| s.sampling = 256),
                "b.json: counted with sampling = 256, but a.json with sampling = 1",
            ),
            (
                with(|s| s.rtt_sampling = "off".to_owned()),
                "rtt_sampling = \"off\"",
            ),
            (
                good.replace("\"sampling\"", "\"other\""),
                "b.json: sampling is missing, because an earlier version",
            ),
            (
                good.replace("\"braked\"", "\"other\""),
                "b.json: braked of policy near is missing",
            ),
            (good.clone(), "b.json: the same statistics as a.json"),
            (
                format!("{}{{}}", with(|_| {})),
                "b.json, document 2: not the output of rto-agent",
            ),
        ] {
            let error = error(&[("a.json", good.clone()), ("b.json", other)], None);
            assert!(error.contains(said), "{said}: {error}");
        }
        let missing = Path::new("/no/such/file").to_owned();
        let error = format!("{:#}", read(&[missing], None).err().unwrap());
        assert!(error.contains("--stats /no/such/file"), "{error}");
    }

    #[test]
    fn several_policies_need_a_choice() {
        let arm = || PolicyStats::from(arm(10, 1_000));
        let two = text(&stats(1, &[("near", arm()), ("far", arm())]));
        let one = text(&stats(2, &[("near", arm()), ("unmatched", arm())]));
        let error = error(&[("a", two.clone()), ("b", one.clone())], None);
        assert!(
            error.contains("policies in the files: far, near, unmatched"),
            "{error}"
        );
        let only = files(&[("b", one.clone())], None).unwrap();
        assert_eq!(only.source.policy().0, "near".parse().ok());
        // Reports a host without the policy.
        let far = files(&[("a", two), ("b", one)], Some("far")).unwrap();
        let text = super::super::text::source(&far.source);
        assert!(text.contains("the sum of 1 of 2 statistics"), "{text}");
    }

    #[test]
    fn a_policy_that_no_file_has() {
        let error = error(&[("a", text(&near(1, 10)))], Some("mid"));
        assert!(
            error.contains("policy mid; policies in the files: near"),
            "{error}"
        );
    }
}
