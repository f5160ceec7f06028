use std::time::Duration;

use rto_agent_common::Statistics;
use rto_agent_core::wire::{experiments::State, stats::ArmStatistics, types::Caller};
use rto_model::tune::experiment::{Arms, Design, Event, Outcome, Ramp, Unit, Verdict};

use super::*;

const DAY_MS: u64 = 86_400_000;
const BY: Caller = Caller { uid: 0, pid: 1 };
const START_S: u64 = 1000;

fn near() -> PolicyName {
    "near".parse().unwrap()
}

fn settings(ms: u64) -> Settings {
    Settings {
        initial_rto: Some(Duration::from_millis(ms).into()),
        ..Settings::default()
    }
}

fn design(unit: Unit, shares: &[f64]) -> Design {
    Design {
        policy: "near".to_owned(),
        settings: digest(&settings(100)),
        identity: "near".to_owned(),
        seed: 7,
        unit,
        ramp: Ramp::try_from(shares.to_vec()).unwrap(),
        duration_s: 7 * DAY_MS / 1000,
        promote: false,
    }
}

fn arm(attempts: u64, bad: u64) -> [Statistics; 3] {
    let mut active = Statistics::default();
    active.counters.attempts = attempts;
    active.path_rtt.buckets[30] = attempts - bad;
    [active, Statistics::default(), Statistics::default()]
}

fn arms(treated: (u64, u64), control: (u64, u64)) -> ArmStatistics {
    ArmStatistics {
        treated: arm(treated.0, treated.1),
        control: Some(arm(control.0, control.1)),
    }
}

fn started(unit: Unit, shares: &[f64], before: &ArmStatistics) -> Record {
    Record::start(design(unit, shares), "a".to_owned(), BY, before, START_S).unwrap()
}

fn untouched() -> ArmStatistics {
    arms((0, 0), (0, 0))
}

/// Evaluates the same counters each second until there is an event.
fn look(record: &mut Record, statistics: &ArmStatistics, from_s: u64) -> Option<Event> {
    (from_s..from_s + 12).find_map(|s| record.look(statistics, s * 1000, START_S + s))
}

/// The control arm's share as applied in the kernel.
fn control_share(record: &Record) -> Option<String> {
    record.control().map(|control| control.share.to_string())
}

#[test]
fn gain_is_proven_by_growth() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    assert_eq!(record.state(), State::Running);
    assert_eq!(control_share(&record).as_deref(), Some("50%"));
    assert_eq!(record.look(&arms((1000, 0), (1000, 3)), 0, START_S), None);
    let event = look(&mut record, &arms((5000, 0), (5000, 40)), 1);
    assert_eq!(event, Some(Event::GainProven));
    let view = record.view();
    assert_eq!(
        view.counts.map(|counts| counts.attempts),
        Arms {
            treated: 5000,
            control: 5000
        }
    );
    assert!(view.evidence.unwrap().gain_e >= 20.0);
    assert!(view.gain_proven && view.connect_time.treated.count == 5000);
    assert!(
        view.answer.starts_with(
            "0 of 5000 (0.000 %) connects were bad with the policy's timers, 40 of 5000 (0.800 %) with the kernel's \
             own; ratio 0.00 (0.00 to 0."
        ),
        "{}",
        view.answer
    );
    assert!(
        view.next[0].starts_with("ends after another 2days"),
        "{:?}",
        view.next
    );
}

/// Connections before the start were all treated; some are bad, or still in progress.
#[test]
fn connections_before_the_start_do_not_count() {
    let before = arms((9000, 10), (0, 0));
    let mut record = started(Unit::Connection, &[0.05], &before);
    for (ms, treated) in [(0, (9050, 60)), (1000, (9100, 400)), (2000, (9100, 400))] {
        let now = arms(treated, (100, 0));
        assert_eq!(record.look(&now, ms, START_S), None);
        assert_eq!(record.experiment.counts(), Arms::default());
    }
    assert_eq!(
        record.look(&arms((9150, 400), (1050, 2)), 3000, START_S),
        None
    );
    let counts = record.experiment.counts();
    assert_eq!(counts.treated.of(Outcome::Bad), 0);
    assert_eq!(
        (counts.treated.attempts, counts.control.attempts),
        (50, 950)
    );
    // For comparison: the same counts since the start mean harm.
    let mut fresh = started(Unit::Connection, &[0.05], &untouched());
    let event = look(&mut fresh, &arms((500, 400), (9500, 0)), 0);
    let outcome = Outcome::Bad;
    assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
}

#[test]
fn harm_suspends_and_stays_through_a_restart() {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &untouched());
    let outcome = Outcome::Bad;
    let event = look(&mut record, &arms((100, 60), (1900, 2)), 0);
    assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
    assert_eq!(control_share(&record).as_deref(), Some("100%"));
    let text = serde_json::to_string(&record).unwrap();
    let mut record: Record = serde_json::from_str(&text).unwrap();
    record.reset_counters();
    assert_eq!((record.share(), record.is_counting()), (0.0, false));
    let much = arms((9000, 0), (9000, 500));
    assert_eq!(record.look(&much, DAY_MS, START_S), None);
    let warning = record.warning().unwrap();
    assert!(warning.starts_with("harm proven (bad); none of its connections is treated"));
    assert!(
        warning.contains("rto-agent experiment clear near"),
        "{warning}"
    );
}

#[test]
fn ramp_rises_with_connections_and_time() {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &untouched());
    let enough = arms((1000, 0), (19_000, 0));
    record.look(&untouched(), 0, START_S);
    assert_eq!(record.look(&enough, 60_000, START_S), None);
    let next = record.view().next;
    assert_eq!(
        next[0],
        "50% of connections are treated after another 1day 9h 35m"
    );
    let event = record.look(&enough, 2 * DAY_MS, START_S);
    assert_eq!(event, Some(Event::Raised { share: 0.5 }));
    assert_eq!(control_share(&record).as_deref(), Some("50%"));
    let next = record.view().next;
    assert!(
        next[1].contains("1000 more treated connections"),
        "{next:?}"
    );
    // No gain is proven in time.
    let event = record.look(&enough, 7 * DAY_MS, START_S + 9);
    assert_eq!(event, Some(Event::Ended(Verdict::Inconclusive)));
    assert_eq!(control_share(&record).as_deref(), Some("100%"));
    assert_eq!(record.ended_s, Some(START_S + 9));
}

/// Neither a change of the wall clock nor a reboot counts as time.
#[test]
fn time_passes_only_between_looks() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    record.look(&untouched(), 500_000, START_S);
    record.look(&untouched(), 501_000, START_S + 100 * DAY_MS);
    record.look(&untouched(), 502_000, 0);
    assert_eq!(record.experiment.elapsed_ms(), 2000);
    let text = serde_json::to_string(&record).unwrap();
    // CLOCK_BOOTTIME restarts at boot.
    let mut again: Record = serde_json::from_str(&text).unwrap();
    again.look(&untouched(), 3_000, START_S);
    again.look(&untouched(), 4_000, START_S);
    assert_eq!(again.experiment.elapsed_ms(), 3000);
    assert_eq!(again.state(), State::Running);
}

#[test]
fn arm_without_connections_is_warned_of_after_ten_minutes() {
    let mut record = started(Unit::Peer, &[0.5], &untouched());
    let one_peer = arms((500, 0), (0, 0));
    record.look(&one_peer, 0, START_S);
    record.look(&one_peer, 599_000, START_S);
    assert_eq!(record.warning(), None);
    record.look(&one_peer, 600_000, START_S);
    let warning = record.warning().unwrap();
    assert!(
        warning.contains("no connection in the control arm"),
        "{warning}"
    );
    record.look(&arms((500, 0), (1, 0)), 601_000, START_S);
    assert_eq!(record.warning(), None);
}

/// A tenth of the peers are bad, with a hundred connections each: no verdict.
#[test]
fn peers_have_no_verdict() {
    let mut record = started(Unit::Peer, &[0.5], &untouched());
    assert!(record.control().unwrap().by_peer);
    let bad = arms((9000, 4000), (1000, 0));
    assert_eq!(look(&mut record, &bad, 0), None);
    let view = record.view();
    assert_eq!(view.counts.treated.of(Outcome::Bad), 4000);
    assert!(view.evidence.is_none() && !view.answer.contains("ratio"));
    assert!(
        view.notes[0].contains("peers are randomised"),
        "{:?}",
        view.notes
    );
    let event = record.look(&bad, 8 * DAY_MS, START_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Inconclusive)));
    let text = record.text();
    assert!(
        text.starts_with("its maximum duration has passed; none of its peers is treated"),
        "{text}"
    );
}

#[test]
fn counts_after_a_save_are_in_the_next_look() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    record.look(&arms((100, 0), (100, 1)), 0, START_S);
    let saved = serde_json::to_string(&record).unwrap();
    record.look(&arms((300, 1), (290, 2)), 1000, START_S);
    // After a kill the counters have continued.
    let mut again: Record = serde_json::from_str(&saved).unwrap();
    again.look(&arms((320, 1), (310, 2)), 30_000, START_S);
    record.look(&arms((320, 1), (310, 2)), 30_000, START_S);
    assert_eq!(again.experiment.counts(), record.experiment.counts());
    assert_eq!(again.connect_time, record.connect_time);
    // After a reboot the counters are 0.
    let mut rebooted: Record = serde_json::from_str(&saved).unwrap();
    rebooted.reset_counters();
    rebooted.look(&arms((120, 0), (130, 0)), 60_000, START_S);
    assert_eq!(rebooted.experiment.counts().treated.attempts, 220);
}

#[test]
fn counts_of_arms_drawn_otherwise_are_left_out() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    record.look(&arms((100, 0), (100, 0)), 0, START_S);
    record.arms_changed();
    record.look(&arms((5000, 900), (100, 0)), 3000, START_S);
    record.look(&arms((5010, 900), (110, 0)), 4000, START_S);
    assert_eq!(record.experiment.counts().treated.attempts, 110);
    assert_eq!(record.experiment.verdict(), None);
}

#[test]
fn another_policy_is_in_force_as_configured() {
    let (same, other) = (settings(100), settings(200));
    let name = near();
    let with = |settings| -> BTreeMap<&PolicyName, &Settings> { [(&name, settings)].into() };
    let control = |all: &Experiments, settings| {
        let mut adjustments = Adjustments::new();
        all.adjust(&with(settings), &mut adjustments);
        adjustments
            .get(&name)
            .and_then(|adjustment| adjustment.control)
    };
    let mut all = Experiments::default();
    all.insert(
        name.clone(),
        started(Unit::Connection, &[0.05], &untouched()),
    );
    assert_eq!(control(&all, &same).unwrap().share.to_string(), "95%");
    assert_eq!(control(&all, &other), None);
    // The guard's arm takes precedence, except for a suspended policy.
    let suspended = rto_agent_core::policy::ControlArm {
        share: rto_agent_core::policy::Share::ALL,
        seed: 1,
        by_peer: false,
    };
    let mut guarded = Adjustments::new();
    guarded.entry(name.clone()).or_default().control = Some(suspended);
    all.adjust(&with(&same), &mut guarded);
    assert_eq!(guarded[&name].control, Some(suspended));
    // A holdout does not change the treatment.
    let held = Settings {
        holdout: "5%".parse().ok(),
        ..same.clone()
    };
    assert!(all.follow(&with(&held), START_S).is_empty());
    let ended = all.follow(&with(&other), START_S + 5);
    assert_eq!(ended, [(name.clone(), "the policy's settings changed")]);
    let record = all.get(&name).unwrap();
    assert_eq!(record.state(), State::Stopped);
    assert_eq!(
        record.text(),
        "stopped: the policy's settings changed; the policy is active as configured"
    );
    assert_eq!(record.warning(), None);
    // Even if the settings change back.
    assert_eq!(control(&all, &same), None);
    assert!(all.follow(&with(&same), START_S + 6).is_empty());
    let mut gone = Experiments::default();
    gone.insert(
        name.clone(),
        started(Unit::Connection, &[0.05], &untouched()),
    );
    let ended = gone.follow(&BTreeMap::new(), START_S);
    assert_eq!(ended, [(name.clone(), "the policy was removed")]);
}

#[test]
fn promoted_policy_has_its_own_control_arm_again() {
    let design = Design {
        promote: true,
        ..design(Unit::Connection, &[0.5])
    };
    let mut record = Record::start(design, "a".to_owned(), BY, &untouched(), START_S).unwrap();
    let gain = arms((5000, 0), (5000, 40));
    assert_eq!(look(&mut record, &gain, 0), Some(Event::GainProven));
    let event = look(&mut record, &gain, 4 * DAY_MS / 1000);
    let promoted = Verdict::GainProven { promoted: true };
    assert_eq!(event, Some(Event::Ended(promoted)));
    assert_eq!((record.control(), record.is_counting()), (None, false));
    assert_eq!(record.state(), State::Promoted);
}

fn ended(at_s: u64, is_released: bool) -> Record {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &untouched());
    record.look(&arms((100, 0), (2000, 0)), 0, START_S);
    match is_released {
        true => record.release("the policy was removed", at_s),
        false => record.stop(at_s),
    }
    record
}

#[test]
fn oldest_ended_experiments_in_force_are_forgotten() {
    let one = ended(100_000, false);
    assert_eq!(one.before, Default::default());
    assert_eq!(one.view().connect_time.treated.count, 100);
    let mut all = Experiments::default();
    let name = |number: usize| -> PolicyName { format!("p{number}").parse().unwrap() };
    for number in 0..MOST_ENDED {
        let mut later = one.clone();
        later.ended_s = Some(200_000);
        all.insert(name(number), later);
    }
    assert_eq!(all.trim(), []);
    let running = started(Unit::Connection, &[0.05], &untouched());
    all.insert("running".parse().unwrap(), running.clone());
    all.insert("suspended".parse().unwrap(), one);
    all.insert("released".parse().unwrap(), ended(100_000, true));
    let released: PolicyName = "released".parse().unwrap();
    assert_eq!(all.trim(), [released]);
    assert_eq!(all.iter().count(), MOST_ENDED + 2);
    // The suspended policy stays suspended.
    let suspended = all.get(&"suspended".parse().unwrap()).unwrap();
    assert_eq!(suspended.share(), 0.0);
    assert_eq!(all.get(&"running".parse().unwrap()), Some(&running));
}

/// The file of the maximum number of experiments, each of maximum size, can be read back.
#[test]
fn largest_state_fits_in_its_file() {
    let shares: Vec<f64> = (1..=10).map(|n| f64::from(n) / 100.0).collect();
    let mut running = started(Unit::Peer, &shares, &untouched());
    let mut statistics = untouched();
    let all = statistics.control.iter_mut().flatten();
    for direction in all.chain(&mut statistics.treated) {
        direction.counters.attempts = 1 << 50;
        for bucket in 0..rto_agent_common::histogram::BUCKETS {
            direction.path_rtt.buckets[bucket] = 1 << 40;
        }
    }
    let size = |record: &Record| serde_json::to_string(record).unwrap().len();
    let steps = shares.len() * size(&running);
    running.look(&statistics, 0, START_S);
    let largest = size(&running) + steps;
    running.stop(START_S);
    let ended = size(&running) + steps;
    let policies = rto_agent_common::MAX_POLICIES as usize;
    let most = MOST_COUNTING * largest + (MOST_ENDED + policies) * ended;
    assert!(
        (most as u64) < crate::engine::MAX_STATE_FILE,
        "{largest} {ended}"
    );
}
