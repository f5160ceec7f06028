//! Tuning: from counters to the content of the kernel, and over restarts.

use rto_agent_common::{Statistics, fallback::Fallback, histogram::bucket_of};
use rto_agent_core::wire::{
    stats::ArmStatistics,
    tune::{TuneAction, TunedTimer},
};
use rto_model::tune::tuner::State;

use super::*;
use crate::{
    engine::{
        control::{monotonic_ms, read_due},
        desired::tests::desired,
        snapshot::tests::healthy,
    },
    tuning::Due,
};

/// A configuration like [`NEAR`] with other settings.
fn configured(settings: &str) -> TempDir {
    let dir = Bed::configured("");
    let path = dir.path().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("initial_rto = \"100ms\"", settings)).unwrap();
    dir
}

fn start(settings: &str) -> Bed {
    Bed::restarted(FakeHost::default(), configured(settings))
}

impl Bed {
    /// Counts `count` active connections with a path RTT of `us`, for the next read.
    fn connect(&self, us: u64, count: u64) {
        let mut state = self.kernel.state();
        let none = ArmStatistics {
            treated: [Statistics::default(); 3],
            control: None,
        };
        let active = &mut state.statistics.entry(near()).or_insert(none).treated[0];
        active.path_rtt.buckets[bucket_of(us)] += count;
    }

    fn epoch(&self) -> u32 {
        self.kernel.state().maps.policies[&near()].epochs[0]
    }

    fn jiffies(&self) -> u32 {
        self.kernel.state().maps.policies[&near()].initial_rto_jiffies
    }

    fn timer(&self) -> TunedTimer {
        let tuned = self.engine.snapshot().tune();
        tuned.policies[&near()].timers[0].clone()
    }

    /// Waits until the timer shows this state. The kernel has it before.
    fn until_shown(&self, state: State) {
        self.until(state.name(), |bed| bed.timer().state == state);
    }

    /// Has a tick read the current counters.
    fn tick(&self) {
        let at = || self.engine.snapshot().tune().at_ms;
        for _ in 0..2 {
            let before = at();
            self.until("a tick", |_| at() != before);
        }
    }

    fn learnt() -> Self {
        let bed = start("initial_rto = \"auto\"");
        bed.tick();
        assert_eq!((bed.jiffies(), bed.epoch()), (0, 0));
        bed.connect(9_000, 400);
        bed.until("learnt", |bed| bed.jiffies() != 0);
        bed.until_shown(State::Active);
        bed
    }
}

/// Fallback (spurious) of the first epoch.
fn spurious() -> Fallback {
    Fallback {
        epoch: 1,
        spurious: Fallback::LIMIT + Fallback::BEGUN,
        ..Fallback::default()
    }
}

#[test]
fn value_is_learnt_shown_and_withdrawn() {
    let bed = Bed::learnt();
    let law = rto_model::tune::law::Settings::new(host_facts(&[]).unwrap().hz);
    // Three times the bucket's upper bound.
    let first = law.clamped(30_720);
    assert_eq!((u64::from(bed.jiffies()), bed.epoch()), (first, 1));
    let policy = bed.kernel.state().maps.policies[&near()];
    assert!(policy.flags & rto_agent_common::policy_flags::GUARDED != 0);
    let mut lines = bed.call(|reply| Message::Watch(None, reply)).err();
    // The kernel in memory has no events, but watchers still receive decisions.
    assert!(lines.take().is_some());
    let outage = Fallback {
        lost: Fallback::LOST,
        lost_since_ms: monotonic_ms().wrapping_sub(Fallback::OUTAGE_MS),
        ..Fallback::default()
    };
    let set = |active| {
        let both = [active, Fallback::default()];
        bed.kernel.state().fallbacks.insert(near(), both);
    };
    set(outage);
    bed.until_shown(State::FallbackOutage);
    assert_eq!((u64::from(bed.jiffies()), bed.epoch()), (first, 1));
    set(Fallback::default());
    bed.until_shown(State::Active);
    set(spurious());
    bed.until("held back", |bed| bed.epoch() != 1);
    bed.until_shown(State::FallbackSpurious);
    let status = bed.status();
    assert!(status.healthy);
    assert!(
        status.tuning[0].contains("fallback (spurious)"),
        "{:?}",
        status.tuning
    );
}

#[test]
fn learnt_values_survive_a_kill_and_a_reboot() {
    for is_reboot in [false, true] {
        let bed = Bed::learnt();
        let (jiffies, epoch) = (bed.jiffies(), bed.epoch());
        let kept = bed.dir.path().join("lasting/tuning.json");
        bed.until("stored", |_| kept.exists());
        let stored = fs::read_to_string(&kept).unwrap();
        bed.engine.stop();
        let (kernel, dir) = bed.ended();
        let bed = if is_reboot {
            let boot_id = crate::engine::store::boot_id();
            fs::write(&kept, stored.replace(&boot_id, "another")).unwrap();
            Bed::restarted(FakeHost::default(), dir)
        } else {
            // As after a kill: the maps stay, with the file of that moment.
            fs::write(&kept, stored).unwrap();
            let bed = Bed::restarted(kernel, dir);
            assert_eq!((bed.epoch(), bed.timer().state), (epoch, State::Active));
            bed
        };
        assert_eq!(bed.jiffies(), jiffies);
    }
}

#[test]
fn damaged_tuning_file_is_moved_aside() {
    let dir = configured("initial_rto = \"auto\"");
    let lasting = dir.path().join("lasting");
    fs::create_dir(&lasting).unwrap();
    fs::write(lasting.join("tuning.json"), "{\"format\":1,").unwrap();
    let bed = Bed::restarted(FakeHost::default(), dir);
    assert_eq!(bed.timer().state, State::Learning);
    let aside = lasting.join("tuning.json.unreadable");
    assert!(aside.exists());
    let reported = |bed: &Bed| {
        let warnings = bed.status().warnings;
        let mut lost = warnings
            .into_iter()
            .filter(|w| w.starts_with("learnt values and proven harm are lost"));
        (lost.next(), lost.next())
    };
    let (Some(warning), None) = reported(&bed) else {
        panic!("{:?}", reported(&bed));
    };
    let fix = format!("moved to {}: restore it from a backup", aside.display());
    assert!(warning.contains(&fix), "{warning}");
    // A reload does not restore it.
    bed.reload().unwrap();
    assert_eq!(reported(&bed), (Some(warning), None));
}

#[test]
fn unwritable_persistent_dir_falls_back_to_state_dir() {
    let dir = configured("initial_rto = \"auto\"");
    // A file instead of the directory.
    fs::write(dir.path().join("lasting"), "").unwrap();
    let bed = Bed::restarted(FakeHost::default(), dir);
    bed.tick();
    bed.connect(9_000, 400);
    bed.until("learnt", |bed| bed.jiffies() != 0);
    bed.until("reported", |bed| {
        bed.engine.snapshot().tune().not_stored.is_some()
    });
    let (jiffies, epoch) = (bed.jiffies(), bed.epoch());
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    assert!(dir.path().join("state/tuning.json").exists());
    let bed = Bed::restarted(kernel, dir);
    assert_eq!((bed.jiffies(), bed.epoch()), (jiffies, epoch));
}

#[test]
fn freeze_ends_with_changed_settings() {
    let bed = Bed::learnt();
    let tune = |action| bed.call(|reply| Message::Tune(action, near(), BY, reply));
    let frozen = tune(TuneAction::Freeze).unwrap();
    assert_eq!(frozen.policies[&near()].timers[0].state, State::Frozen);
    assert_eq!((bed.jiffies(), bed.epoch()), (0, 0));
    let _resumed = tune(TuneAction::Resume).unwrap();
    assert_ne!(bed.jiffies(), 0);
    // A change of the files replaces the decision at once.
    let fixed = bed.text().replace("\"auto\"", "\"100ms\"");
    bed.load(fixed.clone()).unwrap();
    let hz = host_facts(&[]).unwrap().hz;
    assert_eq!(bed.jiffies(), hz.div_ceil(10));
    assert!(bed.epoch() > 1);
    bed.load(fixed.replace("initial_rto", "guard = \"off\"\ninitial_rto"))
        .unwrap();
    assert_eq!(bed.epoch(), 0);
    let refused = tune(TuneAction::Freeze).unwrap_err();
    assert!(refused.to_string().contains("has no guard"), "{refused}");
}

#[test]
fn fallbacks_are_reset_when_guard_is_switched_on() {
    let guarded = |guard: &str| format!("initial_rto = \"100ms\"\nguard = \"{guard}\"");
    let bed = start(&guarded("on"));
    assert_eq!(bed.epoch(), 1);
    let reload = |from: &str, to: &str| bed.load(bed.text().replace(from, to)).unwrap();
    reload("guard = \"on\"", "guard = \"off\"");
    assert_eq!(bed.epoch(), 0);
    let begun = spurious();
    bed.kernel.state().fallbacks.insert(near(), [begun; 2]);
    reload("guard = \"off\"", "guard = \"on\"");
    assert_eq!(bed.epoch(), 1);
    let none = [Fallback::default(); 2];
    assert_eq!(bed.kernel.state().fallbacks[&near()], none);
    bed.tick();
    assert_eq!((bed.timer().state, bed.epoch()), (State::Active, 1));
    // A change of a policy does not reset its fallbacks.
    bed.kernel.state().fallbacks.insert(near(), [begun; 2]);
    bed.until("held back", |bed| bed.epoch() == 0);
    assert_eq!(bed.kernel.state().fallbacks[&near()], [begun; 2]);
}

#[test]
fn statistics_are_read_if_fallbacks_have_changed() {
    let (kernel, snapshot) = healthy(desired(NEAR));
    let reader = snapshot.reader.unwrap();
    let fallbacks = |spurious| {
        let active = Fallback {
            spurious,
            ..Fallback::default()
        };
        [active, Fallback::default()]
    };
    let known = fallbacks(0);
    for (spurious, is_read) in [(0, false), (1, true)] {
        kernel.state().fallbacks.insert(near(), fallbacks(spurious));
        let due = read_due(reader.as_ref(), &near(), Due::Fallbacks { known }).unwrap();
        assert_eq!(due.is_some(), is_read);
    }
    assert_eq!(kernel.state().statistics_read, 1);
}

#[test]
fn tuning_without_learnt_values_writes_no_file() {
    let bed = Bed::with("statistics = false\n");
    assert_eq!(bed.engine.snapshot().tune().policies.len(), 0);
    // A configured value is read at the pace of the health check.
    let bed = Bed::ready();
    assert_eq!(
        bed.timer().kind,
        rto_agent_core::wire::tune::TimerKind::Guarded
    );
    assert!(
        !bed.dir
            .path()
            .join("lasting")
            .join(crate::engine::store::TUNING.file)
            .exists()
    );
}

/// Each write of a request fails, alone and with the writes of the rollback: the answer, the state,
/// the health and the kernel say the same.
#[test]
fn refused_decision_is_neither_shown_nor_stored() {
    let act = |bed: &Bed, action| bed.call(|reply| Message::Tune(action, near(), BY, reply));
    for back in [0, 1, 2] {
        let bed = Bed::learnt();
        let stored = || fs::read_to_string(bed.dir.path().join("lasting/tuning.json")).unwrap();
        bed.until("stored", |_| {
            bed.dir.path().join("lasting/tuning.json").exists()
        });
        for (action, state) in [
            (TuneAction::Freeze, State::Frozen),
            (TuneAction::Resume, State::Active),
            (TuneAction::Reset, State::Learning),
        ] {
            let before = (bed.timer().state, bed.jiffies(), stored());
            let mut refused = 0;
            for write in 1..20 {
                for failing in write..=write + back {
                    bed.kernel.fail(failing);
                }
                let answer = act(&bed, action);
                bed.kernel.state().failing.clear();
                let Err(error) = answer else {
                    break;
                };
                refused += 1;
                if matches!(error, EngineError::OutOfSync { .. }) {
                    assert!(!bed.status().healthy, "{error}");
                    bed.verify();
                } else {
                    assert!(
                        error.to_string().ends_with("nothing was changed"),
                        "{error}"
                    );
                }
                bed.tick();
                let after = (bed.timer().state, bed.jiffies(), stored());
                assert_eq!(after, before, "{action:?}, write {write}: {error}");
                assert!(bed.status().healthy, "{:?}", bed.status());
            }
            assert!(refused > 0, "{action:?} wrote nothing");
            assert_eq!(bed.timer().state, state, "{action:?}");
        }
    }
}
