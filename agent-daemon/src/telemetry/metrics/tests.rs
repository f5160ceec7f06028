use std::collections::BTreeMap;

use rto_agent_common::Statistics;
use rto_agent_core::{
    policy::PolicyName,
    testing::HOST,
    wire::{
        stats::{ArmStats, PolicyStats},
        tune::TuneAnswer,
    },
};
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

fn metrics(policies: BTreeMap<PolicyName, PolicyStats>) -> Vec<String> {
    let stats = StatsAnswer {
        on: true,
        sampling: 1,
        policies,
        ..StatsAnswer::default()
    };
    let text = render(&status(), &stats, &TuneAnswer::default(), None).unwrap();
    text.lines().map(ToOwned::to_owned).collect()
}

fn near() -> PolicyName {
    "near".parse().unwrap()
}

#[test]
fn arms_are_compared_for_policies_that_have_two() {
    let with_control = PolicyStats {
        control: Some(counted(100)),
        ..counted(1000).into()
    };
    // A policy without a control arm has none of them.
    let far = ("far".parse().unwrap(), counted(10).into());
    let lines = metrics([(near(), with_control), far].into());
    let of_arms = lines
        .iter()
        .filter(|line| line.starts_with("rto_agent_arm_"));
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
fn series_of_a_policy() {
    let series = |policies: usize, control: bool| {
        let policy = |n: usize| {
            let stats = PolicyStats {
                control: control.then(|| counted(100)),
                ..counted(100).into()
            };
            (format!("p{n}").parse().unwrap(), stats)
        };
        let lines = metrics((0..policies).map(policy).collect());
        lines.iter().filter(|line| !line.starts_with('#')).count()
    };
    let page = include_str!("../../../../docs/reference/metrics.md");
    let host = series(0, false);
    let plain = series(2, false) - series(1, false);
    let with_control = series(2, true) - series(1, true);
    assert_eq!(series(10, false), host + 10 * plain);
    let said = format!("{plain} series per policy, {with_control} with a control arm");
    assert!(page.contains(&said), "docs/reference/metrics.md: {said}");
}
