//! Experiments in the engine, without a kernel.

use std::{fs, time::Instant};

use super::*;
use crate::engine::document::SAVE_INTERVAL;

#[test]
fn arms_are_drawn_otherwise_by_another_share_seed_or_unit() {
    let drawn = Policy {
        control_below: 1 << 31,
        control_seed: 7,
        ..Policy::EMPTY
    };
    let is_changed = |before: Option<Policy>, next: Policy| {
        let near: PolicyName = "near".parse().unwrap();
        let state = |policy: Option<Policy>| MapState {
            policies: policy
                .map(|policy| (near.clone(), policy))
                .into_iter()
                .collect(),
            ..MapState::default()
        };
        let changed = arms_changed(&state(before), &state(Some(next)));
        assert!(changed.iter().all(|name| *name == near));
        !changed.is_empty()
    };
    let by_peer = policy_flags::CONTROL_BY_PEER;
    for other in [
        Policy {
            control_below: 1 << 30,
            ..drawn
        },
        Policy {
            control_seed: 8,
            ..drawn
        },
        Policy {
            flags: by_peer,
            ..drawn
        },
    ] {
        assert!(is_changed(Some(drawn), other) && is_changed(Some(other), drawn));
    }
    // No other change affects the arms.
    for flags in [0, by_peer] {
        let before = Policy { flags, ..drawn };
        let next = Policy {
            flags: flags | !by_peer,
            initial_rto_jiffies: 25,
            ..drawn
        };
        assert!(!is_changed(Some(before), next));
    }
    assert!(!is_changed(None, drawn));
}

#[test]
fn they_are_saved_each_minute_and_what_failed_is_told_and_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let persistent_dir = dir.path().join("lasting");
    let agent = AgentConfig {
        persistent_dir: persistent_dir.clone(),
        state_dir: dir.path().join("state"),
        ..AgentConfig::default()
    };
    let mut experiments = RunningExperiments::load(&agent).unwrap();
    assert!(!experiments.document.is_save_due() && !experiments.needs_ticks());
    experiments.document.saved_at = Instant::now().checked_sub(SAVE_INTERVAL).unwrap();
    assert!(experiments.document.is_save_due());
    assert_eq!(experiments.problem(), None);
    // A file instead of the directory.
    fs::write(&persistent_dir, "").unwrap();
    experiments.save();
    assert!(!experiments.document.is_save_due());
    let problem = experiments.problem().unwrap();
    assert!(problem.contains("until it is saved"), "{problem}");
    fs::remove_file(&persistent_dir).unwrap();
    experiments.retry_save();
    assert_eq!(experiments.problem(), None);
    assert!(persistent_dir.join(FILE).is_file());
}
