//! Control arms: from the files and requests to what is published.

use rto_agent_core::{policy::Settings, wire::stats::PolicyStats};

use super::*;

fn stats_of(bed: &Bed, policy: &str) -> PolicyStats {
    let stats = bed.engine.snapshot().stats().unwrap();
    stats.policies[&policy.parse().unwrap()].clone()
}

#[test]
fn a_control_arm_comes_and_goes_with_the_files() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let without = fs::read_to_string(&path).unwrap();
    for (setting, title) in [
        ("holdout = \"5%\"\n", Some("control (5%)")),
        ("holdout = \"0.5%\"\n", Some("control (0.5%)")),
        ("", None),
    ] {
        let settings = format!("{setting}initial_rto");
        fs::write(&path, without.replace("initial_rto", &settings)).unwrap();
        let change = bed
            .call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
            .unwrap();
        assert_eq!(change.changed.policies_changed, 1, "{setting}");
        let stats = stats_of(&bed, "near");
        assert_eq!(stats.control_title().as_deref(), title);
        assert_eq!(stats.holdout.is_some(), title.is_some());
        let maps = &bed.kernel.state().maps;
        let policy = maps.policies.values().next().unwrap();
        assert_eq!(policy.control_below != 0, title.is_some());
    }
    bed.stop();
}

#[test]
fn nothing_is_learnt_at_run_time_where_nothing_is_counted() {
    for (agent, is_counted) in [("", true), ("statistics = false\n", false)] {
        let bed = Bed::with(agent);
        let request = AddRequest {
            cidrs: vec!["10.9.0.0/16".to_owned()],
            settings: Some(Settings {
                initial_rto: "auto".parse().ok(),
                ..Settings::default()
            }),
            ..AddRequest::default()
        };
        let request = Box::new(request);
        let change = bed.call(|reply| Message::Add(request, BY, reply));
        match change {
            Ok(_) => assert!(is_counted),
            Err(e) => assert!(e.to_string().contains("statistics = false"), "{e}"),
        }
        bed.stop();
    }
}

#[test]
fn a_control_arm_at_run_time_is_warned_of_where_nothing_is_counted() {
    for (agent, warned) in [("", false), ("statistics = false\n", true)] {
        let bed = Bed::with(agent);
        let request = AddRequest {
            cidrs: vec!["10.9.0.0/16".to_owned()],
            settings: Some(Settings {
                initial_rto: Some(Duration::from_millis(100).into()),
                holdout: "5%".parse().ok(),
                ..Settings::default()
            }),
            ..AddRequest::default()
        };
        let request = Box::new(request);
        let change = bed.call(|reply| Message::Add(request, BY, reply)).unwrap();
        let notes = change.notes.join("\n");
        assert_eq!(
            notes.contains("holdout = 5% has no use while"),
            warned,
            "{notes}"
        );
        let effect = change.effects.iter().find(|e| e.setting == "holdout");
        assert!(
            effect
                .unwrap()
                .describe(250)
                .starts_with("5% (of connections")
        );
        bed.stop();
    }
}
