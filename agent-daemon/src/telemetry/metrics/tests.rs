use std::collections::BTreeMap;

use rto_agent_common::Statistics;
use rto_agent_core::{
    policy::PolicyName,
    testing::{HOST, holdout, timer},
    wire::{
        holdout::Verdict,
        stats::{ArmStats, PolicyStats},
        tune::{TuneAnswer, TunedPolicy},
    },
};
use rto_model::tune::tuner::State;
use serde_json::json;

use super::*;

pub(super) fn status() -> StatusAnswer {
    let family = json!({"ipv4": 1, "ipv6": 1});
    let status = json!({
        "version": "0", "commit": "", "target": "", "pid": 1, "uptime_s": 1, "healthy": true, "problems": [],
        "warnings": [], "attachment": {"attached": true, "problem": null, "cgroup": "/", "is_root": true, "program_id": 1},
        "found_at_start": "nothing", "in_sync": true, "map_differences": {}, "kernel": "6.12", "host": HOST,
        "config": "/", "pin_dir": "/", "entries": 2, "runtime_entries": 0, "runtime_entries_left_out": 0,
        "entries_of": {"file": family, "runtime": family}, "max_entries": 16384, "policies": [],
        "last_reload": {"at_s": 1, "cause": "start", "ok": true}, "holdouts": {},
        "dropped": {"log": 0, "service_manager": 0}, "foreign_programs": 0, "features": [],
    });
    serde_json::from_value(status).unwrap()
}

/// Statistics with this many connections established in each direction, and a tenth of them for
/// each outcome. Sockets that were open before their policy have only outcomes.
fn counted(connections: u64) -> ArmStats {
    let mut known = Statistics::default();
    let counters = &mut known.counters;
    counters.late = connections / 10;
    counters.spurious_connections = connections / 10;
    counters.dsack_connections = connections / 10;
    counters.aborted = connections / 10;
    let unknown = known;
    known.counters.attempts = connections + connections / 10;
    known.counters.untimed = connections;
    ArmStats::from(&[known, known, unknown])
}

pub(super) fn rendered(stats: &StatsAnswer, tuned: &TuneAnswer, in_detail: bool) -> String {
    let scrape = Scrape {
        status: &status(),
        stats,
        tuned,
        runs: None,
        in_detail,
    };
    render(scrape).unwrap()
}

fn metrics(policies: BTreeMap<PolicyName, PolicyStats>) -> Vec<String> {
    metrics_of(policies, &TuneAnswer::default(), true)
}

fn metrics_of(
    policies: BTreeMap<PolicyName, PolicyStats>,
    tuned: &TuneAnswer,
    in_detail: bool,
) -> Vec<String> {
    let stats = StatsAnswer {
        on: true,
        sampling: 1,
        policies,
        ..StatsAnswer::default()
    };
    let text = rendered(&stats, tuned, in_detail);
    text.lines().map(ToOwned::to_owned).collect()
}

fn near() -> PolicyName {
    "near".parse().unwrap()
}

#[test]
fn policies_with_control_arm_are_compared() {
    let with_control = PolicyStats {
        control: Some(counted(100)),
        ..counted(1000).into()
    };
    // A policy without a control arm has none of them.
    let far = ("far".parse().unwrap(), counted(10).into());
    let lines = metrics([(near(), with_control), far].into());
    let of_arms = lines
        .iter()
        .filter(|line| line.starts_with("rto_agent_arm_") && !line.contains("_seconds_"));
    let of_arms: Vec<_> = of_arms.map(String::as_str).collect();
    let mut expected = Vec::new();
    let arms = [("treated", 1000, 1100), ("control", 100, 110)];
    let arms = arms.map(|arm| ["active", "passive"].map(|direction| (direction, arm)));
    for (direction, (arm, _, attempts)) in arms.as_flattened() {
        expected.push(format!(
            "rto_agent_arm_attempts_total{{policy=\"near\",direction=\"{direction}\",arm=\"{arm}\"}} {attempts}"
        ));
    }
    for (direction, (arm, established, _)) in arms.as_flattened() {
        let other = established / 10;
        let good = established - other;
        for (outcome, count) in [
            ("established", *established),
            ("good", good),
            ("spurious", other),
            ("dsack", other),
            ("aborted", other),
        ] {
            expected.push(format!(
                "rto_agent_arm_outcomes_total{{policy=\"near\",direction=\"{direction}\",arm=\"{arm}\",outcome=\"{outcome}\"}} {count}"
            ));
        }
    }
    assert_eq!(of_arms, expected);
    // All other samples belong to the treated arm.
    let active = |metric: &str| {
        let line = format!("rto_agent_{metric}_total{{policy=\"near\",direction=\"active\"}} ");
        let value = lines.iter().find_map(|l| l.strip_prefix(&line));
        value.map(ToOwned::to_owned)
    };
    assert_eq!(active("connections").as_deref(), Some("1000"));
    for outcome in ["spurious", "dsack", "aborted"] {
        let metric = format!("{outcome}_connections");
        assert_eq!(active(&metric).as_deref(), Some("100"), "{metric}");
    }
    assert_eq!(active("good_attempts").as_deref(), Some("900"));
}

#[test]
fn policy_series_match_documentation() {
    // A learnt timer in each direction, and a verdict.
    let tuned = |names: &[PolicyName]| {
        let policy = TunedPolicy {
            timers: ["active", "passive"]
                .map(|d| timer(d, State::Active))
                .into(),
            holdout: Some(holdout(Verdict::NotYet)),
            ..TunedPolicy::default()
        };
        TuneAnswer {
            policies: names
                .iter()
                .map(|name| (name.clone(), policy.clone()))
                .collect(),
            ..TuneAnswer::default()
        }
    };
    let series = |policies: usize, control: bool, in_detail: bool| {
        let names = (0..policies).map(|n| format!("p{n}").parse().unwrap());
        let names: Vec<PolicyName> = names.collect();
        let stats = PolicyStats {
            control: control.then(|| counted(100)),
            ..counted(100).into()
        };
        let counted = names.iter().map(|name| (name.clone(), stats.clone()));
        let tuned = tuned(if control { &names } else { &[] });
        let lines = metrics_of(counted.collect(), &tuned, in_detail);
        lines.iter().filter(|line| !line.starts_with('#')).count()
    };
    let page = include_str!("../../../../docs/reference/metrics.md").replace('\n', " ");
    let of_one = |control, in_detail| {
        let host = series(0, control, in_detail);
        let one = series(2, control, in_detail) - series(1, control, in_detail);
        assert_eq!(series(10, control, in_detail), host + 10 * one);
        one
    };
    let (plain, all) = (of_one(false, false), of_one(true, false));
    let (plain_detail, all_detail) = (of_one(false, true), of_one(true, true));
    assert!(all <= 40, "{all}");
    let expected = format!(
        "{plain} series for each policy, {all} with a control arm and learnt timers; with `metrics_detail = true` {plain_detail} and {all_detail}"
    );
    assert!(
        page.contains(&expected),
        "docs/reference/metrics.md: {expected}"
    );
}
