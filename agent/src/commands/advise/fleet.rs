//! Evidence from several hosts: the output of `rto-agent stats --json`, added.

use std::{collections::BTreeSet, io::Read, path::PathBuf};

use anyhow::{Context as _, bail, ensure};
use rto_agent_core::{
    policy::PolicyName,
    wire::stats::{PolicyStats, StatsAnswer},
};
use serde_json::Deserializer;

use super::evidence::{Gathered, Source, choose_policy, open};

/// One document, and the file's name in errors.
struct Document {
    title: String,
    stats: StatsAnswer,
}

/// Adds the counts of a policy in these files; without `policy`, of their only policy.
pub(super) fn read(paths: &[PathBuf], policy: Option<PolicyName>) -> anyhow::Result<Gathered> {
    let mut documents = Vec::new();
    for path in paths {
        let (title, input) = open("--stats", path)?;
        documents.extend(documents_of(&title, input)?);
    }
    gathered(&documents, paths, policy)
}

/// Reads all concatenated documents of a file.
fn documents_of(title: &str, input: impl Read) -> anyhow::Result<Vec<Document>> {
    let mut documents = Vec::new();
    for stats in Deserializer::from_reader(input).into_iter::<StatsAnswer>() {
        let stats = stats
            .context("not the output of rto-agent stats --json")
            .with_context(|| title.to_owned())?;
        ensure!(
            stats.on,
            "{title}: that host has no statistics: set statistics = true in its [agent] and restart \
             its daemon, or leave the host out"
        );
        let title = title.to_owned();
        documents.push(Document { title, stats });
    }
    ensure!(!documents.is_empty(), "{title}: the file is empty");
    Ok(documents)
}

fn gathered(
    documents: &[Document],
    paths: &[PathBuf],
    policy: Option<PolicyName>,
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
    let known = documents.iter().flat_map(|d| d.stats.policies.keys());
    let known: BTreeSet<PolicyName> = known.cloned().collect();
    let policy = choose_policy(policy, &known)?;
    let having: Vec<_> = documents
        .iter()
        .filter_map(|document| Some((document, document.stats.policies.get(&policy)?)))
        .collect();
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
    let [one, another] = [first, other].map(|document| {
        let StatsAnswer {
            sampling,
            rtt_sampling,
            ..
        } = &document.stats;
        format!("sampling = {sampling} and rtt_sampling = \"{rtt_sampling}\"")
    });
    ensure!(
        one == another,
        "{}: counted with {another}, but {} with {one}: give only files of hosts with the same \
         settings",
        other.title,
        first.title
    );
    Ok(())
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
        gathered(
            &documents,
            &[],
            policy.map(|policy| policy.parse().unwrap()),
        )
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
            ("hello".to_owned(), "b.json: not the output of rto-agent"),
            (
                good[..good.len() / 2].to_owned(),
                "b.json: not the output of rto-agent stats --json",
            ),
            (String::new(), "b.json: the file is empty"),
            (
                "{\"policies\":{},\"entries\":[]}".to_owned(),
                "b.json: not the output of rto-agent stats --json",
            ),
            (
                with(|s| s.on = false),
                "b.json: that host has no statistics",
            ),
            (
                with(|s| s.sampling = 256),
                "b.json: counted with sampling = 256 and",
            ),
            (
                with(|s| s.rtt_sampling = "off".to_owned()),
                "rtt_sampling = \"off\"",
            ),
            (good.clone(), "b.json: the same statistics as a.json"),
            (
                format!("{}{{}}", with(|_| {})),
                "b.json: not the output of rto-agent",
            ),
        ] {
            let error = error(&[("a.json", good.clone()), ("b.json", other)], None);
            assert!(error.contains(said), "{said}: {error}");
        }
        let missing = PathBuf::from("/no/such/file");
        let error = format!("{:#}", read(&[missing], None).err().unwrap());
        assert!(error.contains("--stats /no/such/file"), "{error}");
    }

    #[test]
    fn several_policies_need_a_choice() {
        let arm = || PolicyStats::from(arm(10, 1_000));
        let two = text(&stats(1, &[("near", arm()), ("far", arm())]));
        let one = text(&stats(2, &[("near", arm()), ("unmatched", arm())]));
        let error = |policy| error(&[("a", two.clone()), ("b", one.clone())], policy);
        for (policy, said) in [
            (None, "policies there: far, near, unmatched"),
            (Some("mid"), "no policy mid; policies there: far, near"),
        ] {
            let error = error(policy);
            assert!(error.contains(said), "{error}");
        }
        let only = files(&[("b", one.clone())], None).unwrap();
        assert_eq!(only.source.policy().0, "near".parse().ok());
        // Reports a host without the policy.
        let far = files(&[("a", two.clone()), ("b", one.clone())], Some("far")).unwrap();
        let text = super::super::text::source(&far.source);
        assert!(text.contains("the sum of 1 of 2 statistics"), "{text}");
    }
}
