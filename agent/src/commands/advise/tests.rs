//! Advice from made-up evidence, as text and as JSON.

use rto_agent_common::{Statistics, histogram::bucket_of};
use rto_agent_core::{
    advice::Answer,
    policy::{PolicyName, Settings, compile::compile},
    testing::HOST,
    wire::{
        stats::{ArmStats, StatsAnswer},
        types::{EntryView, ListAnswer, PolicyView, SourceView},
    },
};

use super::*;
use crate::commands::advise::evidence::Source;

const QUESTION: Question = Question {
    hz: HOST.hz,
    share: 0.001,
    min_us: 60_000,
    peer_delack_us: rto_model::advice::PEER_DELACK_US,
};

/// Connections with handshakes and smoothed RTTs near 100 us.
fn near(connections: u64) -> Statistics {
    let mut statistics = Statistics::default();
    for us in (0..connections).map(|n| 90 + n % 60) {
        statistics.path_rtt.buckets[bucket_of(us + 30)] += 1;
        statistics.srtt.buckets[bucket_of(us)] += 1;
    }
    statistics
}

fn stats(directions: [Statistics; 3], rtt_sampling: &str) -> StatsAnswer {
    StatsAnswer {
        at_ms: 1_700_000_000_000,
        on: true,
        sampling: 1,
        rtt_sampling: rtt_sampling.to_owned(),
        policies: [("near".parse().unwrap(), ArmStats::from(&directions).into())].into(),
    }
}

fn entries(spec: &Settings, cidrs: &[&str]) -> ListAnswer {
    let name: PolicyName = "near".parse().unwrap();
    let compiled = compile(&name, spec, &HOST).unwrap();
    let entry = |cidr: &&str| EntryView {
        cidr: cidr.parse().unwrap(),
        policy: name.clone(),
        source: SourceView::File {
            path: "config.toml".into(),
            line: 3,
        },
        hits: 1,
        overrides: None,
    };
    let policy = PolicyView {
        settings: spec.clone(),
        effects: compiled.effects,
        ..PolicyView::default()
    };
    ListAnswer {
        policies: [(name.clone(), policy)].into(),
        entries: cidrs.iter().map(entry).collect(),
        ..ListAnswer::default()
    }
}

fn spec() -> Settings {
    Settings {
        initial_rto: Some(std::time::Duration::from_millis(100).into()),
        thin_linear: Some(true),
        ..Settings::default()
    }
}

fn advise(directions: [Statistics; 3]) -> Answer<Source> {
    let entries = entries(&spec(), &["10.0.0.0/24", "10.0.1.0/24"]);
    let name = "near".parse().unwrap();
    let gathered = evidence::of_policy(&name, &entries, stats(directions, "end"), HOST.hz).unwrap();
    answer(gathered, &QUESTION, &HOST)
}

/// Statistics with a tail of slow answers, repaired losses, and spurious retransmissions.
fn busy() -> [Statistics; 3] {
    let mut active = near(10_000);
    active.counters.handshake_retransmissions = 14;
    active.counters.recovered = 12;
    active.counters.spurious = 2;
    active.counters.tail_loss_probes = 7;
    let mut passive = near(5_000);
    passive.path_rtt.buckets[bucket_of(9_000)] += 20;
    passive.srtt.buckets[bucket_of(9_000)] += 20;
    [active, passive, Statistics::default()]
}

#[test]
fn advice_from_statistics() {
    let answer = advise(busy());
    insta::assert_snapshot!("statistics", text::text(&answer, None));
    insta::assert_json_snapshot!("statistics_json", answer);
}

#[test]
fn too_few_samples_have_no_advice() {
    let entries = entries(&spec(), &["10.0.0.0/24"]);
    let name = "near".parse().unwrap();
    let directions = [near(200), Statistics::default(), Statistics::default()];
    let mut stats = stats(directions, "off");
    for policy in stats.policies.values_mut() {
        policy.treated.active.srtt = Default::default();
    }
    let gathered = evidence::of_policy(&name, &entries, stats, HOST.hz).unwrap();
    let answer = answer(gathered, &QUESTION, &HOST);
    assert!(answer.snippet.is_none());
    insta::assert_snapshot!("too_little", text::text(&answer, None));
}

#[test]
fn direction_with_longest_value_decides() {
    let [active, mut passive, unknown] = busy();
    passive.path_rtt.buckets[bucket_of(30_000)] += 5;
    let answer = advise([active, passive, unknown]);
    // The slow handshakes are few enough of all 15,000, but not of the 5,000 accepted ones.
    assert_eq!(answer.initial_rto.by, "passive");
    let suggestion = answer.initial_rto.advice.suggestion.unwrap();
    assert_eq!(suggestion.value_us, 68_000);
}

#[test]
fn learnt_policy_is_advised_from_its_own_min() {
    for (min, us) in [("", 60_000), (", min = '20ms'", 20_000)] {
        let text = format!("initial_rto = {{ auto = true{min} }}");
        let entries = entries(&toml::from_str(&text).unwrap(), &["10.0.0.0/24"]);
        let directions = [near(5_000), Statistics::default(), Statistics::default()];
        let name = "near".parse().unwrap();
        let gathered =
            evidence::of_policy(&name, &entries, stats(directions, "end"), HOST.hz).unwrap();
        let suggestion = answer(gathered, &QUESTION, &HOST)
            .initial_rto
            .advice
            .suggestion;
        assert_eq!(suggestion.unwrap().value_us, us);
    }
}

#[test]
fn snippet_has_changed_keys_only() {
    let answer = advise(busy());
    let snippet = answer.snippet.unwrap();
    let parsed: toml::Table = toml::from_str(&snippet).unwrap();
    let policy = parsed["policy"]["near"].as_table().unwrap();
    assert_eq!(policy["rto_min"].as_str(), Some("48ms"));
    let keys: Vec<_> = policy.keys().map(String::as_str).collect();
    assert_eq!(keys, ["initial_rto", "rto_min"]);
}

#[test]
fn runtime_policy_gets_add_command() {
    let mut entries = entries(&spec(), &["10.0.0.0/24", "10.0.1.0/24"]);
    let name = PolicyName::for_settings(&spec(), |_| false);
    let near = entries.policies.pop_first().unwrap().1;
    entries.policies.insert(name.clone(), near);
    for entry in &mut entries.entries {
        entry.policy = name.clone();
    }
    let mut stats = stats(busy(), "end");
    let counted = stats.policies.pop_first().unwrap().1;
    stats.policies.insert(name.clone(), counted);
    let gathered = evidence::of_policy(&name, &entries, stats, HOST.hz).unwrap();
    let answer = answer(gathered, &QUESTION, &HOST);
    assert_eq!(answer.snippet, None);
    let command = answer.command.as_deref();
    let message =
        "rto-agent add 10.0.0.0/24 10.0.1.0/24 --initial-rto 60ms --rto-min 48ms --thin-linear";
    assert_eq!(command, Some(message));
    assert!(text::text(&answer, None).contains(message));
}

#[test]
fn too_short_active_value_warns() {
    let [mut active, passive, unknown] = busy();
    active.path_rtt.buckets[bucket_of(150_000)] += 40;
    let answer = advise([active, passive, unknown]);
    let warning =
        "the active initial_rto = 100ms is too short: 0.27% of the handshakes took longer";
    assert!(
        answer.warnings.iter().any(|w| w == warning),
        "{:?}",
        answer.warnings
    );
}

#[test]
fn wide_prefix_without_force_warns() {
    let spec = Settings {
        initial_rto: Some(std::time::Duration::from_millis(300).into()),
        ..Settings::default()
    };
    let entries = entries(&spec, &["10.0.0.0/7"]);
    let directions = [near(5000), Statistics::default(), Statistics::default()];
    let gathered = evidence::of_policy(
        &"near".parse().unwrap(),
        &entries,
        stats(directions, "end"),
        HOST.hz,
    )
    .unwrap();
    let answer = answer(gathered, &QUESTION, &HOST);
    assert!(
        answer.warnings.iter().any(|w| w.contains("force = true")),
        "{:?}",
        answer.warnings
    );
    assert_eq!(answer.snippet, None);
}
