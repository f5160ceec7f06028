use std::time::Duration;

use rto_agent_common::Statistics;
use rto_model::tune::{
    evidence,
    experiment::{Design, Outcome, Ramp, SETTLING_S, Unit, Verdict},
};

use super::*;
use crate::wire::{experiments::State, types::Caller};

const DAY_S: u64 = 86_400;
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
    let shares = shares
        .iter()
        .map(|share| evidence::Probability::try_from(*share).unwrap());
    Design {
        policy: "near".to_owned(),
        settings: digest(&settings(100)),
        identity: "near".to_owned(),
        seed: 7,
        unit,
        ramp: Ramp::try_from(shares.collect::<Vec<_>>()).unwrap(),
        duration_s: 7 * DAY_S,
        promote: false,
    }
}

fn arm(connections: u64, slow: u64) -> [Statistics; 3] {
    let mut active = Statistics::default();
    active.counters.connections = connections;
    active.counters.slow_handshakes = slow;
    active.handshake.buckets[30] = connections;
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

/// The share of the control arm, of which the kernel draws so many.
fn control_share(record: &Record) -> Option<String> {
    record.control().map(|control| control.share.to_string())
}

#[test]
fn what_grows_is_counted_and_a_gain_is_proven() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    assert_eq!(record.state(START_S), State::Running);
    assert_eq!(control_share(&record).as_deref(), Some("50%"));
    assert_eq!(record.look(&arms((1000, 0), (1000, 3)), START_S), None);
    let event = record.look(&arms((5000, 0), (5000, 40)), START_S + 1);
    assert_eq!(event, Some(Event::GainProven));
    let view = record.view(START_S + 1);
    assert_eq!((view.attempts.treated, view.attempts.control), (5000, 5000));
    assert!(view.gain_e.unwrap() >= 20.0);
    assert_eq!(view.ratio.unwrap().likeliest, Some(0.0));
    assert_eq!(view.outcomes[1].count.control, 40);
    assert!(view.text.contains("a gain is proven"), "{}", view.text);
    let text = view.waits_for.join("\n");
    assert!(text.starts_with("time: this share lasts another"), "{text}");
}

#[test]
fn connections_of_before_the_start_count_nowhere() {
    // All were treated, and some are slow yet.
    let mut record = started(Unit::Connection, &[0.05], &arms((9000, 10), (0, 0)));
    assert_eq!(record.state(START_S), State::Settling);
    let late = arms((9500, 400), (100, 0));
    assert_eq!(record.look(&late, START_S + SETTLING_S - 1), None);
    assert_eq!(record.evidence.counts().treated.attempts, 0);
    let text = record.text(START_S + 10);
    assert!(text.contains("it counts in 2m 5s"), "{text}");
    // The control: the same counts from the beginning on are harm.
    let mut fresh = started(Unit::Connection, &[0.05], &untouched());
    let event = fresh.look(&arms((500, 400), (9500, 0)), START_S);
    let outcome = Outcome::Beyond500Ms;
    assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
    // Afterwards it counts what comes then.
    let later = arms((9550, 400), (1050, 2));
    assert_eq!(record.look(&later, START_S + SETTLING_S), None);
    assert_eq!(record.evidence.counts().treated.attempts, 50);
    assert_eq!(record.state(START_S + SETTLING_S), State::Running);
}

#[test]
fn ends_of_connections_of_before_are_shown_and_not_judged() {
    let counted = |dsack| {
        let mut both = arms((10_000, 0), (10_000, 0));
        both.treated[0].counters.dsack_connections = dsack;
        both.treated[0].counters.aborted_after_loss = dsack;
        both
    };
    let mut touched = started(Unit::Connection, &[0.5], &counted(1));
    let mut more = counted(500);
    more.treated[0].counters.connections += 100;
    more.control.as_mut().unwrap()[0].counters.connections += 100;
    let now_s = START_S + SETTLING_S;
    assert_eq!(touched.look(&more, now_s), None);
    let view = touched.view(now_s);
    let ends = &view.outcomes[3..];
    assert!(
        ends.iter()
            .all(|o| o.harm_e.is_none() && o.count.treated == 499),
        "{ends:?}"
    );
    assert!(
        view.notes
            .iter()
            .any(|note| note.starts_with("DSACKs are not judged"))
    );
    // Where no connection was open DSACKs are; aborts after a spurious copy are the timer's doing in no way.
    let mut fresh = started(Unit::Connection, &[0.5], &untouched());
    let outcome = Outcome::Dsack;
    let event = fresh.look(&counted(500), START_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
    let mut fresh = started(Unit::Connection, &[0.5], &untouched());
    let mut aborts = counted(500);
    aborts.treated[0].counters.dsack_connections = 0;
    assert_eq!(fresh.look(&aborts, START_S), None);
}

#[test]
fn harm_suspends_and_stays_through_a_restart() {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &untouched());
    let outcome = Outcome::Beyond500Ms;
    let event = record.look(&arms((100, 60), (1900, 2)), START_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
    assert_eq!(control_share(&record).as_deref(), Some("100%"));
    let text = serde_json::to_string(&record).unwrap();
    let mut record: Record = serde_json::from_str(&text).unwrap();
    record.counters_anew();
    assert_eq!((record.share(), record.is_counting()), (0.0, false));
    assert_eq!(
        record.look(&arms((9000, 0), (9000, 500)), START_S + DAY_S),
        None
    );
    let warning = record.warning(START_S + DAY_S).unwrap();
    assert!(warning.starts_with("harm proven (beyond-500-ms); none of its connections is treated"));
    assert!(
        warning.contains("rto-agent experiment clear near"),
        "{warning}"
    );
}

#[test]
fn the_ramp_rises_with_its_connections_and_its_time() {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &untouched());
    let enough = arms((1000, 0), (19_000, 0));
    assert_eq!(record.look(&enough, START_S + 60), None);
    let waits = record.view(START_S + 60).waits_for;
    assert_eq!(
        waits,
        ["time: this share lasts another 1day 9h 35m at least"]
    );
    let event = record.look(&enough, START_S + 2 * DAY_S);
    assert_eq!(event, Some(Event::Raised { share: 0.5 }));
    assert_eq!(control_share(&record).as_deref(), Some("50%"));
    let waits = record.view(START_S + 2 * DAY_S).waits_for;
    assert_eq!(waits[1], "attempts: 0 of 1000 treated ones at this share");
    // Nothing is proven in time.
    let event = record.look(&enough, START_S + 7 * DAY_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Inconclusive)));
    assert_eq!(control_share(&record).as_deref(), Some("100%"));
    assert_eq!(record.ended_s, Some(START_S + 7 * DAY_S));
}

#[test]
fn arms_of_the_wrong_size_end_it() {
    let mut record = started(Unit::Connection, &[0.05], &untouched());
    let event = record.look(&arms((1000, 0), (1000, 0)), START_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Invalid)));
    assert_eq!(record.share(), 0.0);
}

/// A tenth of the peers are bad, each with a hundred connections: nothing is made of that.
#[test]
fn where_peers_are_drawn_nothing_is_told() {
    let mut record = started(Unit::Peer, &[0.5], &untouched());
    assert!(record.control().unwrap().by_peer);
    assert_eq!(record.look(&arms((9000, 4000), (1000, 0)), START_S), None);
    let view = record.view(START_S);
    assert_eq!(view.outcomes[1].count.treated, 4000);
    assert_eq!(
        (view.gain_e, view.mismatch_e, view.ratio),
        (None, None, None)
    );
    assert!(view.outcomes.iter().all(|outcome| outcome.harm_e.is_none()));
    assert!(view.notes[0].contains("draws of peers"), "{:?}", view.notes);
    let event = record.look(&arms((9000, 4000), (1000, 0)), START_S + 7 * DAY_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Inconclusive)));
    let text = record.text(START_S + 7 * DAY_S);
    assert!(
        text.starts_with("its time is over; none of its peers is treated"),
        "{text}"
    );
}

#[test]
fn what_is_counted_after_a_save_is_in_the_next_look() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    record.look(&arms((100, 0), (100, 1)), START_S);
    let saved = serde_json::to_string(&record).unwrap();
    record.look(&arms((300, 1), (290, 2)), START_S + 1);
    // Killed: the counters have gone on.
    let mut again: Record = serde_json::from_str(&saved).unwrap();
    again.look(&arms((320, 1), (310, 2)), START_S + 30);
    record.look(&arms((320, 1), (310, 2)), START_S + 30);
    assert_eq!(again.evidence.counts(), record.evidence.counts());
    assert_eq!(again.latency.total(), record.latency.total());
    // After a boot they begin anew.
    let mut rebooted: Record = serde_json::from_str(&saved).unwrap();
    rebooted.counters_anew();
    rebooted.look(&arms((120, 0), (130, 0)), START_S + 60);
    assert_eq!(rebooted.evidence.counts().treated.attempts, 220);
}

#[test]
fn what_was_drawn_with_another_share_is_left_out() {
    let mut record = started(Unit::Connection, &[0.5], &untouched());
    record.look(&arms((100, 0), (100, 0)), START_S);
    record.resettle(START_S + 10);
    assert_eq!(record.state(START_S + 11), State::Settling);
    record.look(&arms((5000, 900), (100, 0)), START_S + 100);
    record.look(&arms((5010, 900), (110, 0)), START_S + 10 + SETTLING_S);
    assert_eq!(record.evidence.counts().treated.attempts, 110);
    assert_eq!(record.experiment().verdict(), None);
    assert!(!record.evidence.judges_ends);
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
    // The guard's arm goes first, but for a policy that is suspended.
    let suspended = crate::policy::ControlArm {
        share: crate::policy::Share::ALL,
        seed: 1,
        by_peer: false,
    };
    let mut guarded = Adjustments::new();
    guarded.entry(name.clone()).or_default().control = Some(suspended);
    all.adjust(&with(&same), &mut guarded);
    assert_eq!(guarded[&name].control, Some(suspended));
    // A holdout is no other treatment.
    let held = Settings {
        holdout: "5%".parse().ok(),
        ..same.clone()
    };
    assert!(all.follow(&with(&held), START_S).is_empty());
    let ended = all.follow(&with(&other), START_S + 5);
    assert_eq!(ended, [(name.clone(), "the policy's settings changed")]);
    let record = all.get(&name).unwrap();
    assert_eq!(record.state(START_S + 5), State::Stopped);
    assert_eq!(
        record.text(START_S + 5),
        "stopped: the policy's settings changed; the policy is in force as configured"
    );
    assert_eq!(record.warning(START_S + 5), None);
    // Also when they change back.
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
fn a_promoted_policy_has_its_own_control_arm_again() {
    let design = Design {
        promote: true,
        ..design(Unit::Connection, &[0.5])
    };
    let before = untouched();
    let mut record = Record::start(design, "a".to_owned(), BY, &before, START_S).unwrap();
    let gain = arms((5000, 0), (5000, 40));
    assert_eq!(record.look(&gain, START_S), Some(Event::GainProven));
    let event = record.look(&gain, START_S + 4 * DAY_S);
    let promoted = Verdict::GainProven { promoted: true };
    assert_eq!(event, Some(Event::Ended(promoted)));
    assert_eq!((record.control(), record.is_counting()), (None, false));
    assert_eq!(record.state(START_S + 4 * DAY_S), State::Promoted);
}

/// Ended at this time, with latencies of many blocks.
fn ended(at_s: u64, is_released: bool) -> Record {
    let mut record = started(Unit::Connection, &[0.05, 0.5], &arms((0, 0), (0, 0)));
    for minute in 1..=100 {
        record.look(&arms((minute, 0), (20 * minute, 0)), START_S + 60 * minute);
    }
    match is_released {
        true => record.release("the policy was removed", at_s),
        false => record.stop(at_s),
    }
    record
}

#[test]
fn ended_ones_are_kept_short_and_the_oldest_in_force_forgotten() {
    let one = ended(100_000, false);
    assert_eq!(one.before, Default::default());
    // Bounds are still told.
    let view = one.view(100_000);
    assert!(view.handshake[0].low_us.is_some(), "{:?}", view.handshake);
    assert!(view.handshake[0].value_us.treated.is_some());
    let mut all = Experiments::default();
    let name = |number: usize| -> PolicyName { format!("p{number}").parse().unwrap() };
    for number in 0..MOST_ENDED {
        let mut later = one.clone();
        later.ended_s = Some(200_000);
        all.insert(name(number), later);
    }
    assert_eq!(all.trim(), []);
    let running = started(Unit::Connection, &[0.05], &arms((0, 0), (0, 0)));
    all.insert("running".parse().unwrap(), running.clone());
    all.insert("suspended".parse().unwrap(), one);
    all.insert("released".parse().unwrap(), ended(100_000, true));
    let released: PolicyName = "released".parse().unwrap();
    assert_eq!(all.trim(), [released]);
    assert_eq!(all.iter().count(), MOST_ENDED + 2);
    // The policy stays suspended, and what was counted is told without bounds.
    let suspended = all.get(&"suspended".parse().unwrap()).unwrap();
    assert_eq!(suspended.share(), 0.0);
    let view = suspended.view(300_000);
    assert_eq!(view.attempts.treated, 100);
    assert!(view.handshake[0].low_us.is_none() && view.handshake[0].value_us.treated.is_some());
    assert_eq!(all.get(&"running".parse().unwrap()), Some(&running));
    assert!(
        all.get(&name(0)).unwrap().view(300_000).handshake[0]
            .low_us
            .is_some()
    );
}

/// With the most that is kept of the most experiments there can be the file can be read again.
#[test]
fn the_largest_state_fits_in_its_file() {
    let shares: Vec<f64> = (1..=10).map(|n| f64::from(n) / 100.0).collect();
    let mut running = started(Unit::Connection, &shares, &arms((0, 0), (0, 0)));
    let mut statistics = arms((0, 0), (0, 0));
    let mut largest = 0;
    for second in (0..7 * DAY_S).step_by(600) {
        let all = statistics.control.iter_mut().flatten();
        for direction in all.chain(&mut statistics.treated) {
            direction.counters.connections += 1_000_000_000;
            for bucket in 0..rto_agent_common::histogram::BUCKETS {
                direction.handshake.buckets[bucket] += 1_000_000;
                direction.srtt.buckets[bucket] += 1_000_000;
            }
        }
        running.look(&statistics, START_S + second);
        if running.is_counting() {
            largest = largest.max(serde_json::to_string(&running).unwrap().len());
        }
    }
    running.stop(START_S + 7 * DAY_S);
    let ended = serde_json::to_string(&running).unwrap().len();
    running.trim_more();
    let shortest = serde_json::to_string(&running).unwrap().len();
    let policies = rto_agent_common::MAX_POLICIES as usize;
    let most = MOST_COUNTING * largest + MOST_ENDED * ended + policies * shortest;
    assert!(
        (most as u64) < crate::engine::MAX_STATE_FILE,
        "{largest} {ended} {shortest}"
    );
}
