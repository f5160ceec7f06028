//! The state machine, without a simulation.

use super::*;
use crate::tune::law::Settings;

mod longer;

/// A host with connections of one length, a step a second.
struct Host {
    tuner: Tuner,
    now_ms: u64,
    all: Vec<Transition>,
}

impl Host {
    fn new() -> Self {
        Self {
            tuner: Tuner::new(Settings::new(250)),
            now_ms: 0,
            all: Vec::new(),
        }
    }

    /// One at 10 ms and 50 connections a second that is steady, and has a closed hour.
    fn steady() -> Self {
        let mut host = Self::new();
        host.run(4_000, 10_000, 50);
        assert_eq!(host.tuner.phase(), Phase::Steady);
        host.all.clear();
        host
    }

    fn growth(&self, us: u64, count: u64) -> Growth {
        let setting = self.tuner.setting();
        let mut growth = Growth {
            epoch: setting.epoch,
            attempts: count,
            ..Growth::default()
        };
        growth.path_times.add(us, count);
        let timer_us = setting.jiffies.map_or(1_000_000, |jiffies| jiffies * 4_000);
        if us > timer_us {
            growth.spurious = count;
        } else {
            growth.clean = count;
        }
        growth
    }

    fn step(&mut self, growth: &Growth) -> Decision {
        self.now_ms += 1_000;
        let decision = self.tuner.step(self.now_ms, growth);
        self.note(&decision);
        decision
    }

    fn note(&mut self, decision: &Decision) {
        // A value changes with a transition that says so.
        let mut changes = decision.transitions.iter().filter(|t| t.is_change());
        if let Some(setting) = decision.setting
            && setting.percent == 100
        {
            let last = changes.next_back().or(decision.transitions.last()).unwrap();
            assert_eq!(last.after, setting.jiffies);
        }
        self.all.extend(&decision.transitions);
    }

    fn run(&mut self, seconds: u64, us: u64, per_s: u64) {
        for _ in 0..seconds {
            let growth = self.growth(us, per_s);
            let _decision = self.step(&growth);
        }
    }

    fn causes(&self) -> Vec<Cause> {
        self.all.iter().map(|t| t.cause).collect()
    }

    fn value(&self) -> Option<u64> {
        self.tuner.setting().jiffies
    }
}

#[test]
fn from_the_kernels_own_timer_to_a_steady_value() {
    let mut host = Host::new();
    host.run(5, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Learning));
    host.run(295, 10_000, 50);
    // 1 s, and half of it at most each minute.
    let values: Vec<_> = host.all.iter().map(|t| t.after.unwrap()).collect();
    assert_eq!(values, [125, 63, 32, 16, 8]);
    let minutes = host
        .all
        .windows(2)
        .map(|pair| pair[1].at_ms - pair[0].at_ms);
    assert!(minutes.clone().all(|ms| ms == 60_000), "{:?}", host.all);
    host.run(100, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (Some(5), Phase::Steady));
    let first = &host.all[0];
    assert_eq!(
        first.to_string(),
        "learning -> lowering (enough-samples): kernel -> 125 jiffies; 0 of 300 spurious, 300 samples"
    );
    assert_eq!(first.numbers.want.unwrap().slow_us, 30_000);
    // Nothing more happens in days.
    let before = host.all.len();
    host.run(100_000, 10_000, 1);
    assert_eq!(host.all.len(), before);
}

#[test]
fn few_connections_wait_for_three_hundred_at_each_step() {
    let mut host = Host::new();
    host.run(1_000, 10_000, 1);
    let times: Vec<_> = host.all.iter().map(|t| t.at_ms).collect();
    assert_eq!(times, [300_000, 600_000, 900_000]);
}

#[test]
fn nothing_changes_without_samples_or_by_requests_that_do_not_complete() {
    let mut host = Host::steady();
    let value = host.value();
    host.run(3 * 86_400, 10_000, 0);
    let flood = Growth {
        epoch: host.tuner.setting().epoch,
        attempts: 1_000_000,
        copies: 5_000_000,
        ..Growth::default()
    };
    for _ in 0..86_400 {
        let _decision = host.step(&flood);
    }
    assert_eq!((host.value(), host.all.as_slice()), (value, &[][..]));
    assert_eq!(host.tuner.budget_capacity(), 50);
    let mut unknown = Host::new();
    for _ in 0..86_400 {
        let _decision = unknown.step(&flood);
    }
    assert_eq!((unknown.value(), unknown.all.len()), (None, 0));
}

#[test]
fn a_step_is_answered_at_once_and_held() {
    let mut host = Host::steady();
    host.run(1, 140_000, 50);
    // Three times what the last ones took.
    assert_eq!(
        (host.value(), host.tuner.phase()),
        (Some(105), Phase::Backoff)
    );
    assert_eq!(host.causes(), [Cause::Alarm]);
    assert_eq!(host.all[0].numbers.spurious, 50);
    host.run(599, 140_000, 50);
    assert_eq!(host.all.len(), 1);
    // 1.5 times the last is all that is asked for then: not a fifth less.
    host.run(2_000, 140_000, 50);
    assert_eq!(
        host.causes()[1..],
        [Cause::HoldOver, Cause::WantLower, Cause::Settled]
    );
    assert_eq!(host.value(), Some(53));
}

#[test]
fn a_raised_value_is_lowered_when_nothing_has_asked_for_it_for_an_hour() {
    let mut host = Host::steady();
    let spike = |host: &mut Host| {
        // More than one in fifty of 300, at 1.5 times 20 ms: above the value, below an alarm.
        let mut growth = host.growth(10_000, 290);
        growth.path_times.add(20_000, 10);
        let _decision = host.step(&growth);
    };
    spike(&mut host);
    assert_eq!(
        (host.value(), host.causes()),
        (Some(8), vec![Cause::WantHigher])
    );
    host.run(3_000, 10_000, 50);
    // Asked for again: another hour.
    spike(&mut host);
    host.run(3_580, 10_000, 50);
    assert_eq!(host.value(), Some(8));
    host.run(120, 10_000, 50);
    assert_eq!(host.value(), Some(5));
    assert_eq!(host.causes()[1..], [Cause::WantLower, Cause::Settled]);
}

#[test]
fn holds_double_and_are_forgotten_after_a_clean_day() {
    let mut host = Host::steady();
    let hold = |host: &mut Host| {
        host.run(1, 100_000, 50);
        assert_eq!(host.tuner.phase(), Phase::Backoff, "{:?}", host.all);
        let hold_ms = host.tuner.hold_until_ms - host.now_ms;
        // Back to where it was.
        host.tuner.history = History::default();
        host.run(hold_ms / 1000 + 3_000, 10_000, 50);
        assert_eq!((host.tuner.phase(), host.value()), (Phase::Steady, Some(5)));
        hold_ms / 1000
    };
    assert_eq!((hold(&mut host), hold(&mut host)), (600, 1_200));
    assert_eq!(hold(&mut host), 2_400);
    host.run(86_400, 10_000, 50);
    assert_eq!(hold(&mut host), 600);
}

#[test]
fn alarms_within_a_hold_raise_the_value_and_not_the_hold() {
    let mut host = Host::steady();
    for us in [30_000, 100_000, 310_000] {
        host.run(1, us, 50);
        assert_eq!(host.tuner.phase(), Phase::Backoff);
        assert!(host.value().unwrap() * 4_000 >= 3 * us);
        assert_eq!(host.tuner.hold_until_ms - host.now_ms, 600_000);
    }
}

#[test]
fn a_blown_fuse_is_an_alarm_of_its_epoch_alone() {
    let mut host = Host::steady();
    let stale = Growth {
        epoch: host.tuner.setting().epoch.wrapping_sub(1),
        spurious: 100,
        fuse_blown: true,
        ..Growth::default()
    };
    assert_eq!(host.step(&stale), Decision::default());
    let blown = Growth {
        epoch: host.tuner.setting().epoch,
        fuse_blown: true,
        ..Growth::default()
    };
    let before = host.value().unwrap();
    let setting = host.step(&blown).setting.unwrap();
    assert_eq!(setting.jiffies, Some(2 * before));
    assert_eq!(host.causes(), [Cause::Fuse]);
    // The same again is of the epoch before.
    assert_eq!(host.step(&blown), Decision::default());
}

#[test]
fn a_spent_budget_is_shown_and_lowers_nothing() {
    let mut host = Host::new();
    host.run(10, 10_000, 50);
    let mut growth = host.growth(10_000, 50);
    growth.throttled = true;
    for _ in 0..600 {
        growth.epoch = host.tuner.setting().epoch;
        let _decision = host.step(&growth);
    }
    assert_eq!(
        (host.value(), host.tuner.phase()),
        (Some(125), Phase::Throttled)
    );
    host.run(600, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (Some(5), Phase::Steady));
    let causes = host.causes();
    assert_eq!(
        causes[..3],
        [Cause::EnoughSamples, Cause::Budget, Cause::BudgetRefilled]
    );
}

#[test]
fn harm_suspends_and_a_few_try_again_after_the_hold() {
    let mut host = Host::steady();
    let decision = host.tuner.harm_proven(host.now_ms);
    host.note(&decision);
    let setting = decision.setting.unwrap();
    assert_eq!((setting.jiffies, setting.percent), (None, 100));
    host.run(599, 10_000, 50);
    assert_eq!(host.tuner.phase(), Phase::Suspended);
    host.run(1, 10_000, 50);
    let setting = host.tuner.setting();
    assert_eq!((setting.jiffies, setting.percent), (Some(125), 5));
    host.run(7, 10_000, 50);
    assert_eq!(host.tuner.setting().percent, 100);
    assert_eq!(
        host.causes(),
        [Cause::HarmProven, Cause::HoldOver, Cause::CanaryClean]
    );
    // An alarm while a few try: suspended for twice as long.
    let mut host = Host::steady();
    let _decision = host.tuner.harm_proven(host.now_ms);
    host.run(600, 10_000, 50);
    host.run(1, 600_000, 4);
    assert_eq!(host.tuner.phase(), Phase::Suspended);
    assert_eq!(host.tuner.hold_until_ms - host.now_ms, 1_200_000);
}

#[test]
fn what_asks_for_the_largest_value_is_suspended() {
    let mut host = Host::steady();
    host.run(1, 700_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Suspended));
    // As long as the paths are as slow.
    host.run(10_000, 700_000, 50);
    assert_eq!(host.tuner.phase(), Phase::Suspended);
    // A slow path from the beginning has nothing to gain.
    let mut slow = Host::new();
    slow.run(10_000, 600_000, 50);
    assert_eq!((slow.tuner.phase(), slow.all.len()), (Phase::Learning, 0));
}

#[test]
fn an_operator_freezes_and_resumes() {
    let mut host = Host::steady();
    let decision = host.tuner.freeze(host.now_ms);
    assert_eq!(decision.setting.unwrap().jiffies, None);
    host.run(10_000, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Frozen));
    assert_eq!(host.tuner.freeze(host.now_ms), Decision::default());
    assert_eq!(host.tuner.harm_proven(host.now_ms), Decision::default());
    assert_eq!(host.tuner.after_boot(host.now_ms), Decision::default());
    let _decision = host.tuner.resume(host.now_ms);
    assert_eq!(host.tuner.resume(host.now_ms), Decision::default());
    host.run(600, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (Some(5), Phase::Steady));
}

#[test]
fn a_lease_that_is_over_and_a_boot_begin_with_twice_the_value() {
    let mut host = Host::steady();
    host.now_ms += 2 * HOUR_MS;
    let growth = host.growth(10_000, 1);
    let decision = host.step(&growth);
    assert_eq!(decision.setting.unwrap().jiffies, Some(10));
    assert_eq!(host.causes(), [Cause::LeaseOver, Cause::LeaseOver]);
    assert_eq!(host.all[0].to, Phase::Frozen);
    assert_eq!(host.all[0].at_ms, host.now_ms - HOUR_MS - 1_000);
    assert_eq!((host.all[0].after, host.all[1].before), (None, None));
    // Less than that is no news.
    host.now_ms += HOUR_MS - 1_000;
    assert_eq!(host.step(&Growth::default()), Decision::default());
    // A boot.
    let mut host = Host::steady();
    host.now_ms += HOUR_MS;
    let decision = host.tuner.after_boot(host.now_ms);
    assert_eq!(decision.setting.unwrap().jiffies, Some(10));
    host.run(600, 10_000, 50);
    assert_eq!(host.value(), Some(5));
    // After more than the memory.
    host.now_ms += 25 * HOUR_MS;
    let decision = host.tuner.after_boot(host.now_ms);
    assert_eq!(decision.setting.unwrap().jiffies, None);
    assert_eq!(host.tuner.phase(), Phase::Learning);
    // A hold goes on.
    let mut host = Host::steady();
    host.run(1, 100_000, 50);
    let until_ms = host.tuner.hold_until_ms;
    let _decision = host.tuner.after_boot(host.now_ms + 1_000);
    assert_eq!(host.tuner.phase(), Phase::Backoff);
    assert_eq!(host.tuner.hold_until_ms, until_ms);
}

#[test]
fn other_settings_are_followed() {
    let mut host = Host::steady();
    let settings = Settings {
        min_us: 60_000,
        ..Settings::new(250)
    };
    host.tuner.configure(settings);
    host.run(1, 10_000, 50);
    assert_eq!(
        (host.value(), host.causes()),
        (Some(15), vec![Cause::WantHigher])
    );
}

/// A host whose configured value of 24 ms is guarded.
fn guarded(tuner: Tuner) -> Host {
    let mut host = Host {
        tuner,
        ..Host::new()
    };
    host.run(600, 10_000, 50);
    assert_eq!(
        (host.value(), host.tuner.phase(), host.all.len()),
        (Some(6), Phase::Steady, 0)
    );
    host
}

#[test]
fn a_configured_value_is_raised_for_a_while_and_never_lowered() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    // Path times ask for 20 ms.
    assert_eq!(host.tuner.want().unwrap().jiffies, 5);
    assert_eq!(host.tuner.next(), Next::Nothing);
    host.run(1, 140_000, 50);
    assert_eq!(
        (host.value(), host.tuner.phase()),
        (Some(105), Phase::Backoff)
    );
    // More than it is configured to be is asked for, and clean: the hold decides.
    host.run(590, 10_000, 50);
    assert_eq!(host.value(), Some(105));
    let at_ms = host.all[0].at_ms + 600_000;
    let connections = 0;
    assert_eq!(host.tuner.next(), Next::HoldEnds { at_ms, connections });
    host.run(10, 10_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (Some(6), Phase::Steady));
    host.run(86_400, 10_000, 50);
    assert_eq!(host.causes(), [Cause::Alarm, Cause::HoldOver]);
}

#[test]
fn a_configured_value_that_does_harm_is_suspended_and_tried_again_by_a_few() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    host.run(1, 700_000, 50);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Suspended));
    host.run(600, 10_000, 50);
    let setting = host.tuner.setting();
    assert_eq!((setting.jiffies, setting.percent), (Some(6), 5));
    assert_eq!(host.tuner.phase(), Phase::Steady);
    host.run(10, 10_000, 50);
    assert_eq!(host.tuner.setting().percent, 100);
    // Frozen, and back.
    let now_ms = host.now_ms;
    assert_eq!(host.tuner.freeze(now_ms).setting.unwrap().jiffies, None);
    host.run(10_000, 10_000, 50);
    assert_eq!(host.tuner.next(), Next::Resume);
    let now_ms = host.now_ms;
    assert_eq!(host.tuner.resume(now_ms).setting.unwrap().jiffies, Some(6));
    assert_eq!(host.tuner.phase(), Phase::Steady);
}

#[test]
fn a_configured_value_has_no_lease_and_a_hold_outlives_a_boot() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    host.now_ms += 48 * HOUR_MS;
    host.run(1, 10_000, 50);
    assert_eq!(host.all, []);
    host.run(1, 100_000, 50);
    let raised = host.value();
    assert!(raised.is_some_and(|value| value > 6));
    let decision = host.tuner.after_boot(host.now_ms + 30_000);
    assert_eq!(decision, Decision::default());
    assert_eq!((host.value(), host.tuner.phase()), (raised, Phase::Backoff));
}

#[test]
fn a_warning_changes_nothing_and_is_said_once_a_hold() {
    let mut host = guarded(Tuner::warning(Settings::new(250), 6));
    host.run(300, 100_000, 50);
    assert_eq!(
        (host.value(), host.tuner.phase()),
        (Some(6), Phase::Backoff)
    );
    assert_eq!((host.all.len(), host.tuner.setting().epoch), (1, 1));
    assert_eq!(host.all[0].numbers.spurious, 50);
    host.run(600, 10_000, 50);
    assert_eq!(host.causes(), [Cause::Alarm, Cause::HoldOver]);
    assert_eq!(host.tuner.phase(), Phase::Steady);
    assert_eq!(host.tuner.freeze(host.now_ms), Decision::default());
    assert_eq!(host.tuner.harm_proven(host.now_ms), Decision::default());
}

#[test]
fn a_throttled_guard_is_steady_again() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    let mut growth = host.growth(10_000, 50);
    growth.throttled = true;
    let _decision = host.step(&growth);
    assert_eq!(host.tuner.next(), Next::BudgetRefills);
    host.run(1, 10_000, 50);
    assert_eq!(host.causes(), [Cause::Budget, Cause::BudgetRefilled]);
    assert_eq!(host.tuner.phase(), Phase::Steady);
}

#[test]
fn what_comes_next_comes() {
    let mut host = Host::new();
    assert_eq!(host.tuner.next(), Next::Learn { samples: 300 });
    host.run(6, 10_000, 50);
    assert_eq!(
        host.tuner.next(),
        Next::Lower {
            to: 63,
            at_ms: 66_000,
            connections: 300
        }
    );
    host.run(60, 10_000, 50);
    assert_eq!(host.value(), Some(63));
    let mut slow = Host::new();
    slow.run(10, 600_000, 50);
    assert_eq!(slow.tuner.next(), Next::NothingToGain);
}

#[test]
fn epochs_begin_after_those_that_the_program_has_seen() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    host.tuner.skip_epochs(0);
    assert_eq!(host.tuner.setting().epoch, 1);
    host.tuner.skip_epochs(7);
    assert_eq!(host.tuner.setting().epoch, 8);
}

#[test]
fn phases_and_causes_have_the_names_of_their_json() {
    for phase in Phase::ALL {
        assert_eq!(format!("{phase:?}").to_lowercase(), phase.name());
    }
}

#[test]
fn another_configured_value_keeps_what_was_decided() {
    let mut host = guarded(Tuner::guarding(Settings::new(250), 6));
    let epoch = host.tuner.setting().epoch;
    host.tuner.guard_instead(6);
    assert_eq!(host.tuner.setting().epoch, epoch);
    host.tuner.guard_instead(10);
    assert_eq!(
        (host.value(), host.tuner.setting().epoch),
        (Some(10), epoch + 1)
    );
    // Raised by an alarm, and held.
    host.run(1, 140_000, 50);
    assert_eq!(host.tuner.phase(), Phase::Backoff);
    let (raised, until_ms) = (host.value().unwrap(), host.tuner.hold_until_ms);
    host.tuner.guard_instead(raised + 5);
    assert_eq!(host.value(), Some(raised + 5));
    assert_eq!(
        (host.tuner.phase(), host.tuner.hold_until_ms),
        (Phase::Backoff, until_ms)
    );
    let _decision = host.tuner.freeze(host.now_ms);
    host.tuner.guard_instead(7);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Frozen));
}

#[test]
fn what_is_held_stays_held_over_a_boot_a_lease_and_a_freeze() {
    // Twice of it is too long to be set, so that nothing is.
    let held = || {
        let mut host = Host::steady();
        host.tuner.setting.jiffies = Some(150);
        host.tuner.phase = Phase::Backoff;
        host.tuner.hold_until_ms = host.now_ms + 7_200_000;
        host
    };
    let mut host = held();
    let _decision = host.tuner.after_boot(host.now_ms);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Suspended));
    host.run(7_000, 10_000, 1);
    assert_eq!(host.value(), None);
    host.run(210, 10_000, 1);
    assert_eq!(host.tuner.setting().percent, 5);

    let mut host = held();
    let _decision = host.tuner.freeze(host.now_ms);
    let _decision = host.tuner.resume(host.now_ms);
    assert_eq!((host.value(), host.tuner.phase()), (None, Phase::Suspended));

    // Tried by a few: it is that after a boot, too.
    let mut host = held();
    (host.tuner.setting.percent, host.tuner.hold_until_ms) = (5, 0);
    let _decision = host.tuner.after_boot(host.now_ms);
    assert_eq!(host.tuner.phase(), Phase::Suspended);
    host.run(1, 10_000, 50);
    assert_eq!(host.tuner.setting().percent, 5);
}
