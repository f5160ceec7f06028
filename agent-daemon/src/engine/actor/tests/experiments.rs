//! Experiments: from requests to the kernel's arms, and over restarts.

use rto_agent_common::Statistics;
use rto_agent_core::{
    config::AgentConfig,
    wire::{
        experiments::{ExperimentAnswer, ExperimentView, StartRequest, State},
        stats::ArmStatistics,
        types::now_s,
    },
};
use rto_model::tune::{
    experiment::{Design, Outcome, Ramp, Unit},
    tuner::{self, Cause},
};

use super::*;
use crate::{
    engine::document::Document,
    experiment::{Experiments, Record, digest},
};

fn start(bed: &Bed, request: StartRequest) -> Result<ExperimentAnswer, EngineError> {
    let request = Box::new(request);
    bed.call(|reply| Message::StartExperiment(near(), request, BY, reply))
}

fn stop(bed: &Bed) -> Result<ExperimentAnswer, EngineError> {
    bed.call(|reply| Message::StopExperiment(near(), BY, reply))
}

fn clear(bed: &Bed) -> Result<ExperimentAnswer, EngineError> {
    bed.call(|reply| Message::ClearExperiment(near(), BY, reply))
}

fn ramp(shares: &[&str]) -> StartRequest {
    StartRequest {
        ramp: shares.iter().map(|share| share.parse().unwrap()).collect(),
        ..StartRequest::default()
    }
}

fn refused(bed: &Bed, request: StartRequest) -> String {
    let error = start(bed, request).unwrap_err();
    assert!(error.is_refusal(), "{error:?}");
    error.to_string()
}

/// The percentage of connections that the kernel draws into the control arm.
fn control_percent(bed: &Bed) -> u64 {
    let state = bed.kernel.state();
    let below = u64::from(state.maps.policies[&near()].control_below);
    (below * 100 + (1 << 31)) >> 32
}

fn arm((attempts, bad): (u64, u64)) -> [Statistics; 3] {
    let mut active = Statistics::default();
    active.counters.attempts = attempts;
    active.counters.untimed = attempts - bad;
    [active, Statistics::default(), Statistics::default()]
}

/// Sets the kernel's counters.
fn count(bed: &Bed, treated: (u64, u64), control: (u64, u64)) {
    let counted = ArmStatistics {
        treated: arm(treated),
        control: Some(arm(control)),
    };
    bed.kernel.state().statistics.insert(near(), counted);
}

/// A third of the treated connections has a spurious copy: immediate harm.
fn count_spurious(bed: &Bed) {
    let mut counted = ArmStatistics {
        treated: arm((1000, 0)),
        control: Some(arm((1000, 0))),
    };
    counted.treated[0].counters.spurious_connections = 300;
    bed.kernel.state().statistics.insert(near(), counted);
}

fn shown(bed: &Bed) -> ExperimentView {
    bed.engine.snapshot().experiments().experiments[&near()].clone()
}

/// Waits until the evaluated experiment satisfies a condition.
fn until(bed: &Bed, what: impl Fn(&ExperimentView) -> bool) -> ExperimentView {
    bed.until("evaluated", |bed| what(&shown(bed)));
    shown(bed)
}

fn saved(bed: &Bed) -> PathBuf {
    bed.dir.path().join("lasting/experiments.json")
}

#[test]
fn a_share_is_treated_until_a_gain_is_proven() {
    let bed = Bed::ready();
    let answer = start(&bed, ramp(&["50%"])).unwrap();
    let view = answer.experiment.unwrap();
    assert_eq!((view.state, view.share), (State::Running, 0.5));
    assert_eq!(control_percent(&bed), 50);
    let runs = clear(&bed).unwrap_err().to_string();
    assert!(
        runs.starts_with("the experiment of near is still running:"),
        "{runs}"
    );
    let stats = bed.engine.snapshot().stats().unwrap();
    let title = stats.policies[&near()].control_title();
    assert_eq!(title.as_deref(), Some("control (50%)"));
    let text = refused(&bed, ramp(&["50%"]));
    assert!(
        text.contains("an experiment of near is already running"),
        "{text}"
    );
    count(&bed, (5000, 0), (5000, 40));
    let view = until(&bed, |view| view.gain_proven);
    assert_eq!(view.counts.treated.attempts, 5000);
    let status = bed.status();
    let summary = &status.experiments[&near()];
    assert!(summary.e_values["gain"] >= 20.0);
    assert!(
        summary.text.contains("a gain is proven"),
        "{}",
        summary.text
    );
    let text = stop(&bed).unwrap().experiment.unwrap().text;
    assert!(
        text.starts_with("stopped; none of its connections is treated"),
        "{text}"
    );
    assert_eq!(control_percent(&bed), 100);
    assert!(stop(&bed).unwrap_err().to_string().contains("has ended"));
    clear(&bed).unwrap();
    assert_eq!(control_percent(&bed), 0);
    assert!(bed.engine.snapshot().experiments().experiments.is_empty());
    for none in [clear(&bed), stop(&bed)] {
        let none = none.unwrap_err().to_string();
        assert!(none.starts_with("policy near has no experiment;"), "{none}");
    }
}

#[test]
fn harm_suspends_at_once_and_over_a_restart() {
    let bed = Bed::ready();
    start(&bed, ramp(&["50%"])).unwrap();
    count_spurious(&bed);
    until(&bed, |view| view.state == State::Harm);
    bed.until("in force", |bed| control_percent(bed) == 100);
    let warned = |bed: &Bed| {
        let warnings = bed.status().warnings;
        warnings
            .iter()
            .any(|w| w.contains("experiment harm proven (spurious)"))
    };
    assert!(warned(&bed));
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    assert!(!kernel.state().attached);
    let bed = Bed::restarted(kernel, dir);
    assert_eq!(control_percent(&bed), 100);
    assert!(warned(&bed));
    // The change is accepted: the settings apply to all connections at once.
    let answer = bed.load(bed.text().replace("100ms", "200ms")).unwrap();
    assert_eq!(control_percent(&bed), 0);
    let told = "the experiment of policy near has ended: the policy's settings changed";
    assert!(answer.notes.iter().any(|note| note == told), "{answer:?}");
    assert!(!warned(&bed));
    assert_eq!(shown(&bed).state, State::Harm);
}

/// No tick may follow the stop, as nothing is counted then.
#[test]
fn harm_found_during_a_stop_takes_effect() {
    let bed = Bed::ready();
    start(&bed, ramp(&["50%"])).unwrap();
    count_spurious(&bed);
    let error = stop(&bed).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
    assert_eq!(control_percent(&bed), 100);
}

#[test]
fn harm_freezes_a_guarded_timer_too() {
    let bed = Bed::ready();
    let guarded = bed
        .text()
        .replacen("initial_rto", "guard = \"on\"\ninitial_rto", 1);
    bed.load(guarded).unwrap();
    let jiffies = |bed: &Bed| bed.kernel.state().maps.policies[&near()].initial_rto_jiffies;
    assert_ne!(jiffies(&bed), 0);
    start(&bed, ramp(&["50%"])).unwrap();
    count_spurious(&bed);
    until(&bed, |view| view.state == State::Harm);
    bed.until("in force", |bed| jiffies(bed) == 0);
    bed.verify();
    let tuned = bed.engine.snapshot().tune().policies[&near()].clone();
    let mut timers = tuned.timers.iter();
    assert!(timers.all(|timer| timer.state == tuner::State::Frozen));
    let causes = tuned.transitions.iter().map(|t| t.transition.cause);
    assert!(causes.eq([Cause::HarmProven; 2]));
    // The timers stay frozen even if the experiment is cleared.
    clear(&bed).unwrap();
    assert_eq!((control_percent(&bed), jiffies(&bed)), (0, 0));
}

#[test]
fn experiments_that_cannot_be_understood_are_told_until_the_next_start() {
    let dir = Bed::configured("");
    let lasting = dir.path().join("lasting");
    fs::create_dir(&lasting).unwrap();
    fs::write(lasting.join("experiments.json"), "{").unwrap();
    let bed = Bed::restarted(FakeHost::default(), dir);
    bed.reload().unwrap();
    let warnings = bed.status().warnings;
    let warning = warnings
        .iter()
        .find(|w| w.starts_with("experiments were lost"));
    let aside = lasting.join("experiments.json.unreadable");
    let fix = format!("moved to {}: restore it from a backup", aside.display());
    assert!(warning.unwrap().contains(&fix), "{warnings:?}");
}

#[test]
fn the_share_rises_in_the_kernel() {
    let dir = Bed::configured("");
    let near_settings = crate::engine::desired::tests::desired(NEAR);
    let near_settings = &near_settings.files.config.set.policies[&near()].settings;
    let design = Design {
        policy: "near".to_owned(),
        settings: digest(near_settings),
        identity: "near".to_owned(),
        seed: 1,
        unit: Unit::Connection,
        ramp: Ramp::try_from(vec![0.05, 0.5]).unwrap(),
        duration_s: 86_400,
        promote: false,
    };
    let none = ArmStatistics {
        treated: arm((0, 0)),
        control: None,
    };
    let mut record = Record::start(design, "a".to_owned(), BY, &none, now_s()).unwrap();
    // Long enough for its first step, not for its end.
    record.look(&none, 0, now_s());
    record.look(&none, 40_000_000, now_s());
    let mut experiments = Experiments::default();
    experiments.insert(near(), record);
    let owner = AgentConfig::default().pin_dir.display().to_string();
    let lasting = dir.path().join("lasting");
    Document::new(&lasting, "experiments.json", 2, owner)
        .write(&serde_json::json!({"revision": 1, "experiments": experiments}))
        .unwrap();
    let bed = Bed::restarted(FakeHost::default(), dir);
    assert_eq!(control_percent(&bed), 95);
    count(&bed, (1000, 0), (19_000, 0));
    until(&bed, |view| view.step == 2);
    bed.until("in force", |bed| control_percent(bed) == 50);
}

#[test]
fn a_kill_between_two_saves_loses_nothing() {
    let bed = Bed::with("on_exit = \"keep\"\n");
    start(&bed, ramp(&["50%"])).unwrap();
    let at_start = fs::read(saved(&bed)).unwrap();
    count(&bed, (300, 0), (310, 1));
    until(&bed, |view| view.counts.treated.attempts == 300);
    let path = saved(&bed);
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    // As after a kill.
    fs::write(&path, at_start).unwrap();
    let bed = Bed::restarted(kernel, dir);
    count(&bed, (320, 0), (330, 1));
    let view = until(&bed, |view| view.counts.treated.attempts == 320);
    assert_eq!(
        (view.counts.control.attempts, view.state),
        (330, State::Running)
    );
    assert_eq!(view.counts.control.of(Outcome::Bad), 1);
}

#[test]
fn experiment_with_a_bad_design_is_refused() {
    let bed = Bed::ready();
    for (shares, said) in [
        (&["5%", "5%"][..], "the ramp's shares must rise"),
        (&["50%", "5%"], "the ramp's shares must rise"),
        (&["0.5%"], "a share must be 1% to 99%, not 0.5%"),
        (&["5%", "100%"], "a share must be 1% to 99%, not 100%"),
    ] {
        let text = refused(&bed, ramp(shares));
        assert!(text.contains(said), "{text}");
    }
    let short = StartRequest {
        duration: Some("5m".to_owned()),
        ..ramp(&[])
    };
    let text = refused(&bed, short);
    assert!(text.contains("needs at least 420 s, not 300 s"), "{text}");
    let peers = StartRequest {
        unit: Some(Unit::Peer),
        ..ramp(&["5%", "50%"])
    };
    let text = refused(&bed, peers);
    assert!(text.contains("nothing can be proven"), "{text}");
    let unknown = bed
        .call(|reply| Message::StartExperiment("far".parse().unwrap(), Box::default(), BY, reply));
    let text = unknown.unwrap_err().to_string();
    assert!(text.starts_with("unknown policy far"), "{text}");
    let text = bed.text();
    // Both arms would have the kernel's timers.
    bed.load(text.replace("initial_rto", "syn_retries = 9 #"))
        .unwrap();
    let same = refused(&bed, ramp(&["50%"]));
    assert!(same.contains("has nothing to compare"), "{same}");
    // rto_min outlives a connection.
    bed.load(text.replace("initial_rto", "rto_min = \"20ms\"\ninitial_rto"))
        .unwrap();
    let connections = StartRequest {
        unit: Some(Unit::Connection),
        ..ramp(&["50%"])
    };
    let text = refused(&bed, connections);
    assert!(text.ends_with("randomise peers (--unit peer)"), "{text}");
    assert_eq!(control_percent(&bed), 0);
    bed.kernel.state().recent_peers = (1..40).map(|n| [10, 1, 0, n].into()).collect();
    let text = refused(&bed, ramp(&[]));
    assert!(
        text.contains(
            "39 peers were seen in the last hour; with 50 % treated, the smaller arm has 19 of the \
             20 it needs"
        ),
        "{text}"
    );
    bed.kernel.state().recent_peers.push([10, 1, 0, 40].into());
    let view = start(&bed, ramp(&[])).unwrap().experiment.unwrap();
    assert_eq!((view.unit, view.share), (Unit::Peer, 0.5));
    let bed = Bed::with("statistics = false\n");
    let text = refused(&bed, ramp(&["50%"]));
    assert!(text.contains("statistics = false"), "{text}");
}

#[test]
fn experiment_that_cannot_be_saved_does_not_start() {
    let bed = Bed::ready();
    bed.kernel.fail(1);
    let error = start(&bed, ramp(&["50%"])).unwrap_err();
    assert!(matches!(error, EngineError::Undone(_)), "{error:?}");
    assert!(bed.engine.snapshot().experiments().experiments.is_empty());
    let lasting = bed.dir.path().join("lasting");
    fs::remove_dir_all(&lasting).unwrap();
    fs::write(&lasting, "not a directory").unwrap();
    let error = start(&bed, ramp(&["50%"])).unwrap_err();
    assert!(matches!(error, EngineError::Unsaved(_)), "{error:?}");
    assert_eq!(control_percent(&bed), 0);
    assert!(bed.engine.snapshot().experiments().experiments.is_empty());
}

/// As after a kill: nothing is saved at the end.
#[test]
fn stop_outlives_a_kill_where_persistent_dir_cannot_be_written() {
    let bed = Bed::ready();
    start(&bed, ramp(&["50%"])).unwrap();
    let lasting = bed.dir.path().join("lasting");
    let aside = bed.dir.path().join("aside");
    fs::rename(&lasting, &aside).unwrap();
    fs::write(&lasting, "not a directory").unwrap();
    let answer = stop(&bed).unwrap();
    assert!(
        answer.notes[0].contains("a reboot returns to the state saved"),
        "{:?}",
        answer.notes
    );
    let of_boot = bed.dir.path().join("state/experiments.json");
    let left = fs::read(&of_boot).unwrap();
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    fs::write(&of_boot, left).unwrap();
    fs::remove_file(&lasting).unwrap();
    // It contains the last saved state: the running experiment.
    fs::rename(&aside, &lasting).unwrap();
    let bed = Bed::restarted(kernel, dir);
    assert_eq!(
        (shown(&bed).state, control_percent(&bed)),
        (State::Stopped, 100)
    );
}

#[test]
fn stop_that_cannot_be_saved_is_refused_and_changes_nothing() {
    let bed = Bed::ready();
    start(&bed, ramp(&["50%"])).unwrap();
    for name in ["lasting", "state"] {
        let dir = bed.dir.path().join(name);
        if dir.exists() {
            fs::rename(&dir, dir.with_extension("aside")).unwrap();
        }
        fs::write(&dir, "not a directory").unwrap();
    }
    let error = stop(&bed).unwrap_err();
    assert!(matches!(error, EngineError::Unsaved(_)), "{error:?}");
    assert_eq!(
        (shown(&bed).state, control_percent(&bed)),
        (State::Running, 50)
    );
}
