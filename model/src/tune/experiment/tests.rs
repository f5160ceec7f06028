#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count"
)]

use proptest::prelude::*;

use super::*;
use crate::tune::evidence::Probability;

const DAY_S: u64 = 86_400;

fn ramp(shares: &[f64]) -> Ramp {
    let shares: Vec<_> = shares
        .iter()
        .map(|share| Probability::try_from(*share).unwrap())
        .collect();
    Ramp::try_from(shares).unwrap()
}

fn design() -> Design {
    Design {
        policy: "same-region".to_owned(),
        settings: "f00d".to_owned(),
        identity: "2026-11".to_owned(),
        seed: 1,
        unit: Unit::Connection,
        ramp: ramp(&[0.05, 0.5, 0.95]),
        duration_s: 7 * DAY_S,
        promote: false,
    }
}

fn started(design: Design) -> Experiment {
    Experiment::start(design, "host-1".to_owned(), 0).unwrap()
}

/// Attempts by arm as the share wants them, and so many beyond 500 ms.
fn increments(share: f64, attempts: u64, slow: (u64, u64)) -> Increments {
    let treated = (attempts as f64 * share) as u64;
    let counts = |attempts, beyond_500_ms| Counts {
        attempts,
        beyond_500_ms,
        ..Counts::default()
    };
    Increments {
        counts: Arms {
            treated: counts(treated, slow.0),
            control: counts(attempts - treated, slow.1),
        },
        control_rtt: [10_000].into_iter().collect(),
    }
}

/// Enough attempts for a step of the ramp with this share.
fn enough(share: f64) -> Increments {
    increments(share, 40_000, (0, 0))
}

#[test]
fn a_share_begins_with_its_experiment() {
    let start = Experiment::start(design(), "host-1".to_owned(), 5_000).unwrap();
    assert_eq!((start.started_s(), start.raised_s()), (5_000, 5_000));
}

#[test]
fn designs_that_make_no_sense_are_refused() {
    let share = |share| Probability::try_from(share).unwrap();
    let refused = |shares: &[f64]| {
        let shares: Vec<_> = shares.iter().map(|s| share(*s)).collect();
        Ramp::try_from(shares).unwrap_err().to_string()
    };
    assert_eq!(refused(&[]), "a ramp needs a share");
    assert_eq!(
        refused(&[0.05, 0.5, 0.5]),
        "the ramp's shares must rise: 50.0000 % comes after 50.0000 %"
    );
    for ramp in ["[0.5, 0.05]", "[]", "[0.05, 1.0]"] {
        assert!(serde_json::from_str::<Ramp>(ramp).is_err(), "{ramp}");
    }
    let mut design = design();
    design.duration_s = 1800;
    let error = Experiment::start(design.clone(), "a".to_owned(), 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a ramp of 3 steps needs 1890 s at least, not 1800 s"
    );
    design.ramp = ramp(&[0.5]);
    design.duration_s = 60;
    assert!(design.check().is_ok());
}

#[test]
fn the_share_rises_after_its_time_and_its_connections() {
    let mut experiment = started(design());
    assert_eq!(experiment.share(), 0.05);
    // Its connections, not its time.
    assert_eq!(experiment.observe(&enough(0.05), DAY_S - 1), None);
    assert_eq!(
        experiment.observe(&Increments::default(), DAY_S),
        Some(Event::Raised { share: 0.5 })
    );
    // Its time, not its connections.
    assert_eq!(experiment.observe(&Increments::default(), 3 * DAY_S), None);
    assert_eq!(
        experiment.observe(&enough(0.5), 3 * DAY_S + 1),
        Some(Event::Raised { share: 0.95 })
    );
    assert_eq!(experiment.observe(&enough(0.95), 7 * DAY_S - 1), None);
    assert_eq!(
        experiment.observe(&Increments::default(), 7 * DAY_S),
        Some(Event::Ended(Verdict::Inconclusive))
    );
    assert_eq!(experiment.share(), 0.0);
}

#[test]
fn a_suspicion_of_harm_holds_the_ramp_and_the_gain() {
    let mut experiment = started(design());
    let mut bad = increments(0.05, 40_000, (0, 200));
    bad.counts.treated.failed = 4;
    bad.counts.control.failed = 5;
    assert!(experiment.observe(&bad, DAY_S).is_none());
    let assessment = experiment.assess();
    let harm = assessment.harm_ln_e[&Outcome::Failed];
    assert!(harm > SUSPECTED_HARM.ln() && harm < HARM.ln(), "{harm}");
    assert!(assessment.gain_ln_e > GAIN.ln());
    assert_eq!(
        (experiment.share(), experiment.gain_proven_s()),
        (0.05, None)
    );
    // The suspicion goes as the control arm has as many.
    let mut control = increments(0.05, 40_000, (0, 0));
    control.counts.control.failed = 200;
    assert_eq!(
        experiment.observe(&control, DAY_S + 1),
        Some(Event::GainProven)
    );
}

#[test]
fn a_proven_gain_goes_through_the_ramp_and_is_promoted_if_asked() {
    for promote in [false, true] {
        let mut experiment = started(Design {
            promote,
            ..design()
        });
        let gain = increments(0.05, 40_000, (0, 200));
        assert_eq!(experiment.observe(&gain, 10), Some(Event::GainProven));
        assert_eq!((experiment.verdict(), experiment.share()), (None, 0.05));
        let mut now_s = 10;
        for share in [0.5, 0.95] {
            now_s += DAY_S;
            let event = experiment.observe(&Increments::default(), now_s);
            assert_eq!(event, Some(Event::Raised { share }));
            assert_eq!(experiment.observe(&enough(share), now_s + SETTLING_S), None);
        }
        let verdict = Verdict::GainProven { promoted: promote };
        assert_eq!(
            experiment.observe(&Increments::default(), now_s + DAY_S),
            Some(Event::Ended(verdict))
        );
        assert_eq!(experiment.gain_proven_s(), Some(10));
        // Where there is still a control arm, harm is still judged.
        let harm = increments(0.95, 40_000, (2000, 0));
        let event = experiment.observe(&harm, now_s + 8 * DAY_S);
        if promote {
            assert_eq!((event, experiment.share()), (None, 1.0));
        } else {
            let outcome = Outcome::Beyond500Ms;
            assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
            assert_eq!(experiment.share(), 0.0);
        }
    }
}

#[test]
fn arms_of_the_wrong_size_are_invalid() {
    let mut experiment = started(design());
    let half = increments(0.5, 200, (0, 0));
    let event = experiment.observe(&half, 1);
    assert_eq!(event, Some(Event::Ended(Verdict::Invalid)));
    assert_eq!(
        serde_json::to_string(&event).unwrap(),
        r#"{"event":"ended","verdict":"invalid"}"#
    );
    // Nothing is counted after the end.
    assert_eq!(experiment.observe(&half, 2), None);
    assert_eq!(experiment.counts().treated.attempts, 100);
}

/// Connections of the share of 5 % still come in when it is 50 % by now.
#[test]
fn what_comes_while_a_step_settles_is_no_gain_and_no_mismatch() {
    let raised = || {
        let mut experiment = started(design());
        experiment.observe(&enough(0.05), DAY_S);
        assert_eq!(experiment.share(), 0.5);
        experiment
    };
    let late = increments(0.05, 10_000, (1, 60));
    let mut settling = raised();
    assert_eq!(settling.observe(&late, DAY_S + SETTLING_S - 1), None);
    assert_eq!(settling.assess().gain_ln_e, 0.0);
    // The control: the same a second later.
    let event = raised().observe(&late, DAY_S + SETTLING_S);
    assert_eq!(event, Some(Event::Ended(Verdict::Invalid)));
    // Harm is seen at once.
    let harm = increments(0.5, 100, (40, 0));
    let outcome = Outcome::Beyond500Ms;
    assert_eq!(
        raised().observe(&harm, DAY_S + 1),
        Some(Event::Ended(Verdict::Harm { outcome }))
    );
}

#[test]
fn a_few_spurious_copies_are_tolerated() {
    let mut experiment = started(design());
    let mut few = increments(0.05, 400_000, (0, 0));
    few.counts.treated.spurious = 40;
    few.counts.treated.dsack = 60;
    assert_eq!(experiment.observe(&few, 1), None);
    // They are a difference, beyond doubt.
    assert!(experiment.assess().harm_ln_e[&Outcome::Spurious] > HARM.ln());
    let mut many = increments(0.05, 20_000, (0, 0));
    many.counts.treated.spurious = 300;
    let outcome = Outcome::Spurious;
    assert_eq!(
        experiment.observe(&many, 2),
        Some(Event::Ended(Verdict::Harm { outcome }))
    );
    // As many DSACKs in both arms are not the treatment's doing.
    let mut experiment = started(design());
    let mut both = increments(0.05, 40_000, (0, 0));
    both.counts.treated.dsack = 40;
    both.counts.control.dsack = 760;
    assert_eq!(experiment.observe(&both, 1), None);
}

#[test]
fn a_restart_changes_nothing() {
    let mut experiment = started(design());
    experiment.observe(&increments(0.05, 40_000, (3, 20)), DAY_S);
    let text = serde_json::to_string(&experiment).unwrap();
    let mut restarted: Experiment = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&restarted).unwrap(), text);
    for (now_s, slow) in [(2, (0, 5)), (3, (0, 20)), (4, (0, 60))] {
        let now_s = now_s * DAY_S;
        let next = increments(experiment.share(), 40_000, slow);
        assert_eq!(
            experiment.observe(&next, now_s),
            restarted.observe(&next, now_s)
        );
    }
    assert_eq!(experiment.assess(), restarted.assess());
    assert!(experiment.gain_proven_s().is_some());
}

#[test]
fn the_operator_ends_it_once() {
    let mut experiment = started(design());
    experiment.stop();
    assert_eq!(experiment.verdict(), Some(Verdict::Stopped));
    assert_eq!(experiment.share(), 0.0);
    let mut ended = started(design());
    ended.observe(&increments(0.5, 200, (0, 0)), 1);
    ended.stop();
    assert_eq!(ended.verdict(), Some(Verdict::Invalid));
}

/// A day in blocks of an hour: the control arm's losses and RTT, and what is made of them at the next share.
#[test]
fn a_control_arm_that_fares_worse_holds_the_ramp() {
    let day = |slow: u64, rtt_us: u64| {
        let mut experiment = started(design());
        let mut observe = |from_s: u64, share: f64, slow, rtt_us: u64| {
            for minute in 0..25 * 60 {
                let bursts = if minute % 60 < 6 { slow } else { 0 };
                let mut next = increments(share, 2000, (0, 0));
                next.counts.treated.beyond_500_ms = (bursts as f64 * share).round() as u64;
                next.counts.control.beyond_500_ms = bursts - next.counts.treated.beyond_500_ms;
                next.control_rtt = [rtt_us].into_iter().collect();
                if let Some(event) = experiment.observe(&next, from_s + minute * 60) {
                    return Some(event);
                }
            }
            None
        };
        assert_eq!(
            observe(0, 0.05, 20, 10_000),
            Some(Event::Raised { share: 0.5 })
        );
        let event = observe(DAY_S + 60, 0.5, slow, rtt_us);
        (event, experiment.assess().spill_over)
    };
    let raised = Some(Event::Raised { share: 0.95 });
    let (event, spill_over) = day(20, 10_000);
    assert_eq!((event, spill_over.is_suspected()), (raised, false));
    let (event, spill_over) = day(60, 10_000);
    assert_eq!(event, None);
    let change = spill_over.beyond_500_ms.unwrap();
    assert!((0.0009..0.0011).contains(&change.first), "{change:?}");
    assert!((0.0027..0.0033).contains(&change.present), "{change:?}");
    let (event, spill_over) = day(20, 15_000);
    assert_eq!((event, spill_over.is_suspected()), (None, true));
    assert_eq!(spill_over.median_rtt_us.unwrap().present, 15_000.0);
    // Less than half a bucket of the histograms is no rise.
    assert_eq!(day(20, 11_000).0, raised);
}

fn host(name: &str, seed: u32, unit: Unit) -> Experiment {
    let design = Design {
        seed,
        unit,
        ..design()
    };
    Experiment::start(design, name.to_owned(), 0).unwrap()
}

#[test]
fn hosts_are_merged() {
    // Neither has enough, both have.
    let hosts = ["a", "b"].map(|name| {
        let mut host = host(name, 1, Unit::Connection);
        assert_eq!(host.observe(&increments(0.05, 4000, (0, 40)), 1), None);
        host
    });
    let merged = Experiment::merge(&hosts).unwrap();
    assert_eq!(
        merged.verdict(),
        Some(Verdict::GainProven { promoted: false })
    );
    assert_eq!(merged.counts(), hosts[0].counts() + hosts[1].counts());
    let [a, b] = hosts;
    let other_way = Experiment::merge(&[b.clone(), a.clone()]).unwrap();
    assert_eq!(merged.assess(), other_way.assess());
    // A third one that is a step ahead.
    let mut ahead = host("c", 1, Unit::Connection);
    ahead.observe(&enough(0.05), DAY_S);
    ahead.observe(&enough(0.5), DAY_S + SETTLING_S);
    let all = Experiment::merge(&[merged, ahead.clone()]).unwrap();
    assert_eq!(all.counts(), a.counts() + b.counts() + ahead.counts());
    assert_eq!(
        all.assess().mismatch_ln_e,
        Experiment::merge(&[ahead, a, b])
            .unwrap()
            .assess()
            .mismatch_ln_e
    );
}

#[test]
fn what_is_not_the_same_experiment_is_not_merged() {
    let one = host("a", 1, Unit::Connection);
    let with = |change: &dyn Fn(&mut Design)| {
        let mut design = design();
        change(&mut design);
        let other = Experiment::start(design, "b".to_owned(), 0).unwrap();
        Experiment::merge(&[one.clone(), other])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        with(&|design| design.policy = "far".to_owned()),
        "experiments with different policies cannot be merged: same-region and far"
    );
    assert_eq!(
        with(&|design| design.identity = "x".to_owned()),
        "experiments with different identities cannot be merged: 2026-11 and x"
    );
    assert_eq!(
        with(&|design| design.settings = "beef".to_owned()),
        "experiments with different settings cannot be merged: f00d and beef"
    );
    assert_eq!(
        with(&|design| design.unit = Unit::Peer),
        "experiments with different units cannot be merged: connection and peer"
    );
    assert_eq!(
        with(&|design| design.ramp = ramp(&[0.05, 0.5])),
        "experiments with different ramps cannot be merged: 5%,50%,95% and 5%,50%"
    );
    assert_eq!(Experiment::merge(&[]), Err(MergeError::Nothing));
    let twice = Experiment::merge(&[one.clone(), one]).unwrap_err();
    assert_eq!(twice.to_string(), "host a is in it twice");
}

/// One seed puts a peer into the same arm of all hosts.
#[test]
fn peers_of_hosts_with_one_seed_are_not_merged() {
    let peers = |name, seed| host(name, seed, Unit::Peer);
    let merged = Experiment::merge(&[peers("a", 1), peers("b", 2)]).unwrap();
    assert_eq!(
        Experiment::merge(&[peers("a", 1), peers("b", 1)]),
        Err(MergeError::SameSeed { seed: 1 })
    );
    assert_eq!(
        Experiment::merge(&[merged, peers("c", 2)]),
        Err(MergeError::SameSeed { seed: 2 })
    );
}

fn counts() -> impl Strategy<Value = Counts> {
    let count = prop_oneof![0_u64..5, 0_u64..5000, any::<u64>()];
    proptest::array::uniform6(count).prop_map(|n| Counts {
        attempts: n[0],
        failed: n[1],
        beyond_500_ms: n[2],
        spurious: n[3],
        dsack: n[4],
        aborted: n[5],
    })
}

proptest! {
    /// Whatever is counted, and however the clock goes, the share rises along the ramp until the end.
    #[test]
    fn the_share_is_one_of_the_ramp_until_the_end(
        all in proptest::collection::vec((counts(), counts(), 0..9 * DAY_S), 0..20),
    ) {
        let mut experiment = started(Design { promote: true, ..design() });
        let mut before = experiment.share();
        for (treated, control, now_s) in all {
            let increments = Increments {
                counts: Arms { treated, control },
                control_rtt: [10_000].into_iter().collect(),
            };
            experiment.observe(&increments, now_s);
            let share = experiment.share();
            match experiment.verdict() {
                None => prop_assert!([0.05, 0.5, 0.95].contains(&share) && share >= before),
                Some(Verdict::GainProven { .. }) => prop_assert_eq!(share, 1.0),
                Some(_) => prop_assert_eq!(share, 0.0),
            }
            before = share;
            prop_assert!(experiment.assess().gain_ln_e.is_finite());
        }
    }
}
