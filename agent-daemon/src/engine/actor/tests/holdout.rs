//! Control arms: from the files and requests to what is published.

use super::*;

#[test]
fn control_arm_comes_and_goes_with_the_files() {
    let bed = Bed::ready();
    let without = bed.text();
    for (setting, title) in [
        ("holdout = \"5%\"\n", Some("control (5%)")),
        ("holdout = \"0.5%\"\n", Some("control (0.5%)")),
        ("", None),
    ] {
        let settings = format!("{setting}initial_rto");
        let change = bed.load(without.replace("initial_rto", &settings));
        assert_eq!(change.unwrap().changed.policies_changed, 1, "{setting}");
        let stats = bed.engine.snapshot().stats().unwrap();
        let stats = &stats.policies[&near()];
        assert_eq!(stats.control_title().as_deref(), title);
        assert_eq!(stats.holdout.is_some(), title.is_some());
        let policy = bed.kernel.state().maps.policies[&near()];
        assert_eq!(policy.control_below != 0, title.is_some());
    }
}

/// With settings of its own.
fn own(settings: &str) -> AddRequest {
    AddRequest {
        cidrs: vec!["10.9.0.0/16".to_owned()],
        settings: toml::from_str(settings).ok(),
        ..AddRequest::default()
    }
}

#[test]
fn runtime_policy_is_counted_or_refused_or_warned_of() {
    for (agent, is_counted) in [("", true), ("statistics = false\n", false)] {
        let bed = Bed::with(agent);
        match bed.add(own("initial_rto = \"auto\"")) {
            Ok(_) => assert!(is_counted),
            Err(e) => assert!(e.to_string().contains("statistics = false"), "{e}"),
        }
        let change = bed.add(own("initial_rto = \"100ms\"\nholdout = \"5%\""));
        let change = change.unwrap();
        let notes = change.notes.join("\n");
        let is_warned = notes.contains("holdout = 5% has no use while");
        assert_eq!(is_warned, !is_counted, "{notes}");
        let effect = change.effects.iter().find(|e| e.setting == "holdout");
        let effect = effect.unwrap().describe(250);
        assert!(effect.starts_with("5% (of connections"), "{effect}");
    }
}
