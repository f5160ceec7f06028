//! Control arms: from the files and requests to what is published.

use std::cell::Cell;

use rto_agent_common::Statistics;
use rto_agent_core::wire::{
    holdout::{HoldoutView, Verdict},
    stats::ArmStatistics,
    tune::TuneAction,
};

use super::*;

#[test]
fn control_arm_follows_files() {
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
        let is_warned = notes.contains("--holdout 5% has no use while");
        assert_eq!(is_warned, !is_counted, "{notes}");
        let effect = change.effects.iter().find(|e| e.setting == "holdout");
        let effect = effect.unwrap().describe(250);
        assert!(effect.starts_with("5% (of connections"), "{effect}");
    }
}

/// Sets the kernel's counters of both arms: attempts, and of these bad ones.
fn count(bed: &Bed, treated: (u64, u64), control: (u64, u64)) {
    let arm = |(attempts, bad): (u64, u64)| {
        let mut active = Statistics::default();
        active.counters.attempts = attempts;
        active.counters.untimed = attempts - bad;
        [active, Statistics::default(), Statistics::default()]
    };
    let counted = ArmStatistics {
        treated: arm(treated),
        control: Some(arm(control)),
    };
    bed.kernel.state().statistics.insert(near(), counted);
}

fn shown(bed: &Bed) -> HoldoutView {
    bed.status().holdouts[&near()].clone()
}

/// Whether the kernel gives all new connections its own timers.
fn is_held_back(bed: &Bed) -> bool {
    bed.kernel.state().maps.policies[&near()].control_below == u32::MAX
}

fn compared() -> Bed {
    let bed = Bed::ready();
    bed.load(
        bed.text()
            .replacen("initial_rto", "holdout = \"50%\"\ninitial_rto", 1),
    )
    .unwrap();
    count(&bed, (0, 0), (0, 0));
    bed
}

/// Counts a harm each second until it has been counted after the holdout began, and has held.
fn prove_harm(bed: &Bed) {
    let attempts = Cell::new(0);
    bed.until("proven", |bed| {
        if shown(bed).arms.treated.bad < 40 {
            attempts.set(attempts.get() + 100);
            let n = attempts.get();
            count(bed, (n, n / 2), (n, 0));
            std::thread::sleep(Duration::from_millis(30));
        }
        shown(bed).verdict == Verdict::Harm
    });
    bed.until("in force", |bed| shown(bed).fallback);
}

#[test]
fn proven_harm_holds_new_connections_back_until_resumed() {
    let bed = compared();
    assert_eq!(shown(&bed).verdict, Verdict::NotYet);
    prove_harm(&bed);
    assert!(is_held_back(&bed));
    bed.verify();
    let warned = |bed: &Bed| {
        let warnings = bed.status().warnings;
        let text = "policy near: fallback (harm): new connections get the kernel's own timers";
        warnings.iter().any(|warning| warning.starts_with(text))
    };
    assert!(warned(&bed));
    let stats = bed.engine.snapshot().stats().unwrap();
    let verdict = stats.policies[&near()].verdict.as_ref().unwrap();
    assert_eq!((verdict.verdict, verdict.fallback), (Verdict::Harm, true));
    // A kill loses nothing: the verdict was saved before it was applied.
    let kept = bed.dir.path().join("lasting/tuning.json");
    let stored = fs::read_to_string(&kept).unwrap();
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    fs::write(&kept, stored).unwrap();
    let bed = Bed::restarted(kernel, dir);
    assert!(is_held_back(&bed) && warned(&bed) && shown(&bed).fallback);
    // A smaller control arm does not end it.
    bed.load(bed.text().replace("50%", "5%")).unwrap();
    assert!(is_held_back(&bed) && shown(&bed).fallback);
    let resume = || bed.call(|reply| Message::Tune(TuneAction::Resume, near(), BY, reply));
    let resumed = resume().unwrap();
    let view = resumed.policies[&near()].holdout.clone().unwrap();
    assert_eq!((view.verdict, view.fallback), (Verdict::NotYet, false));
    assert!(!is_held_back(&bed) && !warned(&bed));
}

#[test]
fn changed_settings_end_proven_harm() {
    let bed = compared();
    prove_harm(&bed);
    let answer = bed.load(bed.text().replace("100ms", "200ms")).unwrap();
    let note = "policy near: fallback (harm) has ended: the policy's settings changed";
    assert!(answer.notes.iter().any(|known| known == note), "{answer:?}");
    assert!(!is_held_back(&bed));
    assert_eq!(shown(&bed).verdict, Verdict::NotYet);
}

#[test]
fn harm_that_cannot_be_saved_is_in_force_and_reported() {
    let bed = compared();
    for name in ["lasting", "state"] {
        let dir = bed.dir.path().join(name);
        if dir.exists() {
            fs::rename(&dir, dir.with_extension("aside")).unwrap();
        }
        fs::write(&dir, "not a directory").unwrap();
    }
    prove_harm(&bed);
    assert!(is_held_back(&bed));
    let lost = "proven harm do not survive a restart of the daemon";
    bed.until("reported", |bed| {
        bed.status().warnings.iter().any(|w| w.contains(lost))
    });
}
