#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count"
)]

use proptest::prelude::*;

use super::*;

const DAY_S: u64 = 86_400;
const DAY_MS: u64 = 1000 * DAY_S;

fn ramp(shares: &[f64]) -> Ramp {
    Ramp::try_from(shares.to_vec()).unwrap()
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
    Experiment::start(design, "host-1".to_owned()).unwrap()
}

/// Attempts in each arm for this share, with this many bad ones.
fn increments(share: f64, attempts: u64, bad: (u64, u64)) -> Increments {
    let treated = (attempts as f64 * share) as u64;
    let counts = |attempts, bad| Counts {
        attempts,
        good: attempts - bad,
        ..Counts::default()
    };
    Increments {
        counts: Arms {
            treated: counts(treated, bad.0),
            control: counts(attempts - treated, bad.1),
        },
        ..Increments::default()
    }
}

/// Enough attempts to complete a step of the ramp with this share.
fn enough(share: f64) -> Increments {
    increments(share, 40_000, (0, 0))
}

/// Adds increments, and observes each second until an event, or until none can follow.
fn look(experiment: &mut Experiment, increments: &Increments) -> Option<Event> {
    let none = Increments::default();
    let later = std::iter::repeat_n(&none, 12);
    let mut all = std::iter::once(increments).chain(later);
    all.find_map(|increments| experiment.observe(increments, 1000))
}

#[test]
fn designs_that_make_no_sense_are_refused() {
    let refused = |shares: &[f64]| Ramp::try_from(shares.to_vec()).unwrap_err().to_string();
    assert_eq!(refused(&[]), "a ramp needs a share");
    let stored = serde_json::from_str::<Ramp>("[0.05,1.5]");
    assert_eq!(
        stored.unwrap_err().to_string(),
        "a share of 150.0000 % is outside 0.1 % to 99.9 %"
    );
    assert_eq!(
        refused(&[0.05, 0.5, 0.5]),
        "the ramp's shares must rise: 50.0000 % comes after 50.0000 %"
    );
    for ramp in ["[0.5, 0.05]", "[]", "[0.05, 1.0]"] {
        assert!(serde_json::from_str::<Ramp>(ramp).is_err(), "{ramp}");
    }
    let mut design = design();
    design.duration_s = 1800;
    assert!(design.check().is_ok());
    design.duration_s = 400;
    let error = Experiment::start(design.clone(), "a".to_owned()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a ramp of 3 steps needs at least 420 s, not 400 s"
    );
    design.ramp = ramp(&[0.5]);
    design.duration_s = 60;
    assert!(design.check().is_ok());
}

#[test]
fn share_rises_after_its_time_and_its_connections() {
    let none = Increments::default();
    let mut experiment = started(design());
    assert_eq!(experiment.share(), 0.05);
    // Enough connections, but not enough time.
    assert_eq!(experiment.observe(&enough(0.05), DAY_MS - 1000), None);
    assert_eq!(experiment.step_left_s(), 1);
    assert_eq!(
        experiment.observe(&none, 1000),
        Some(Event::Raised { share: 0.5 })
    );
    // Enough time, but not enough connections.
    assert_eq!(experiment.observe(&none, 2 * DAY_MS), None);
    assert_eq!(
        experiment.observe(&enough(0.5), 1000),
        Some(Event::Raised { share: 0.95 })
    );
    assert_eq!(experiment.observe(&enough(0.95), 3 * DAY_MS), None);
    assert_eq!(
        experiment.observe(&none, DAY_MS),
        Some(Event::Ended(Verdict::Inconclusive))
    );
    assert_eq!(experiment.share(), 0.0);
}

#[test]
fn suspicion_of_harm_holds_the_ramp_and_the_gain() {
    let mut experiment = started(design());
    let mut bad = increments(0.05, 40_000, (0, 200));
    bad.counts.treated.late_accepted = 4;
    bad.counts.control.late_accepted = 5;
    assert_eq!(look(&mut experiment, &bad), None);
    assert_eq!(experiment.observe(&Increments::default(), DAY_MS), None);
    let assessment = experiment.assess().unwrap();
    let harm = assessment.harm_e[&Outcome::LateAccepted];
    assert!((SUSPECTED_HARM..HARM).contains(&harm), "{harm}");
    assert!(assessment.gain_e > GAIN);
    assert_eq!(
        (experiment.share(), experiment.is_gain_proven()),
        (0.05, false)
    );
    // The suspicion ends once the control arm has as many.
    let mut control = increments(0.05, 40_000, (0, 0));
    control.counts.control.late_accepted = 200;
    assert_eq!(
        look(&mut experiment, &control),
        Some(Event::Raised { share: 0.5 })
    );
    let none = Increments::default();
    assert_eq!(look(&mut experiment, &none), Some(Event::GainProven));
}

#[test]
fn proven_gain_goes_through_the_ramp_and_is_promoted_if_asked() {
    for promote in [false, true] {
        let mut experiment = started(Design {
            promote,
            ..design()
        });
        let gain = increments(0.05, 40_000, (0, 200));
        assert_eq!(look(&mut experiment, &gain), Some(Event::GainProven));
        assert_eq!((experiment.verdict(), experiment.share()), (None, 0.05));
        for share in [0.5, 0.95] {
            let event = experiment.observe(&Increments::default(), DAY_MS);
            assert_eq!(event, Some(Event::Raised { share }));
            assert_eq!(look(&mut experiment, &enough(share)), None);
        }
        let none = Increments::default();
        let verdict = |promoted| Some(Event::Ended(Verdict::GainProven { promoted }));
        if promote {
            // The share itself has not proven anything yet.
            assert_eq!(experiment.observe(&none, DAY_MS), None);
            let own = increments(0.95, 40_000, (10, 20));
            assert_eq!(look(&mut experiment, &own), verdict(true));
        } else {
            assert_eq!(experiment.observe(&none, DAY_MS), verdict(false));
        }
        // While there is a control arm, harm is still judged.
        let harm = increments(0.95, 40_000, (4000, 0));
        let event = look(&mut experiment, &harm);
        if promote {
            assert_eq!((event, experiment.share()), (None, 1.0));
        } else {
            let outcome = Outcome::Bad;
            assert_eq!(event, Some(Event::Ended(Verdict::Harm { outcome })));
            assert_eq!(experiment.share(), 0.0);
        }
    }
}

/// Without a promotion, the experiment keeps the last share as without `promote`.
#[test]
fn gain_without_evidence_at_the_last_share_is_not_promoted() {
    let mut experiment = started(Design {
        promote: true,
        ..design()
    });
    let gain = increments(0.05, 40_000, (0, 200));
    assert_eq!(look(&mut experiment, &gain), Some(Event::GainProven));
    for share in [0.5, 0.95] {
        experiment.observe(&Increments::default(), DAY_MS);
        assert_eq!(look(&mut experiment, &enough(share)), None);
    }
    let event = experiment.observe(&Increments::default(), 7 * DAY_MS);
    let verdict = Verdict::GainProven { promoted: false };
    assert_eq!(event, Some(Event::Ended(verdict)));
    assert_eq!(experiment.share(), 0.95);
}

#[test]
fn arms_of_the_wrong_size_are_invalid() {
    let mut experiment = started(design());
    let half = increments(0.5, 200, (0, 0));
    let event = experiment.observe(&half, 1000);
    assert_eq!(event, Some(Event::Ended(Verdict::Invalid)));
    assert_eq!(
        serde_json::to_string(&experiment.verdict()).unwrap(),
        r#"{"verdict":"invalid"}"#
    );
    // Counts after the end are ignored.
    assert_eq!(experiment.observe(&half, 1000), None);
    assert_eq!(experiment.counts().treated.attempts, 100);
}

/// Forty attempts are under way at each observation. The arms differ only by chance.
#[test]
fn attempts_under_way_are_neither_gain_nor_harm() {
    let looks = |under_way: f64| {
        let mut experiment = started(Design {
            ramp: ramp(&[0.5]),
            ..design()
        });
        let both = Arms {
            treated: under_way,
            control: under_way,
        };
        let mut event = None;
        for (treated, control) in [(20, 60), (60, 20)] {
            let mut next = increments(0.5, 400, (treated, control));
            next.under_way = both;
            event = event.or(look(&mut experiment, &next));
            // These attempts are established, and as many new ones start.
            next = Increments::default();
            next.counts.treated.good = treated;
            next.counts.control.good = control;
            next.under_way = both;
            experiment.observe(&next, 1000);
        }
        event
    };
    assert_eq!(looks(40.0), None);
    // Without the allowance, chance proves a gain.
    assert_eq!(looks(0.0), Some(Event::GainProven));
}

#[test]
fn evidence_counts_once_it_has_held() {
    let mut experiment = started(design());
    let gain = increments(0.05, 40_000, (0, 200));
    assert_eq!(experiment.observe(&gain, 1000), None);
    for _ in 0..HOLD_MS / 1000 - 1 {
        assert_eq!(experiment.observe(&Increments::default(), 1000), None);
    }
    // The evidence does not hold.
    let mut late = Increments::default();
    late.counts.control.good = 200;
    assert_eq!(look(&mut experiment, &late), None);
    assert!(!experiment.is_gain_proven());
}

#[test]
fn a_few_spurious_copies_are_tolerated() {
    let mut experiment = started(design());
    let mut few = increments(0.05, 400_000, (0, 0));
    few.counts.treated.spurious = 60;
    assert_eq!(experiment.observe(&few, 1000), None);
    // There is proven harm without the tolerance.
    assert!(experiment.assess().unwrap().harm_e[&Outcome::Spurious] > HARM);
    let mut many = increments(0.05, 20_000, (0, 0));
    many.counts.treated.spurious = 300;
    let outcome = Outcome::Spurious;
    assert_eq!(
        experiment.observe(&many, 1000),
        Some(Event::Ended(Verdict::Harm { outcome }))
    );
}

#[test]
fn restart_changes_nothing() {
    let mut experiment = started(design());
    experiment.observe(&increments(0.05, 40_000, (3, 20)), DAY_MS);
    let text = serde_json::to_string(&experiment).unwrap();
    let mut restarted: Experiment = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&restarted).unwrap(), text);
    for bad in [(0, 5), (0, 20), (0, 60)] {
        let next = increments(experiment.share(), 40_000, bad);
        assert_eq!(look(&mut experiment, &next), look(&mut restarted, &next));
    }
    assert_eq!(experiment.assess(), restarted.assess());
    assert!(experiment.is_gain_proven());
}

#[test]
fn operator_ends_it_once() {
    let mut experiment = started(design());
    experiment.stop();
    assert_eq!(experiment.verdict(), Some(Verdict::Stopped));
    assert_eq!(experiment.share(), 0.0);
    let mut ended = started(design());
    ended.observe(&increments(0.5, 200, (0, 0)), 1000);
    ended.stop();
    assert_eq!(ended.verdict(), Some(Verdict::Invalid));
}

#[test]
fn peers_are_not_judged() {
    let mut experiment = started(Design {
        unit: Unit::Peer,
        ramp: ramp(&[0.5]),
        ..design()
    });
    let odd = increments(0.9, 10_000, (4000, 0));
    assert_eq!(look(&mut experiment, &odd), None);
    assert_eq!(experiment.assess(), None);
    let event = experiment.observe(&odd, 7 * DAY_MS);
    assert_eq!(event, Some(Event::Ended(Verdict::Inconclusive)));
}

fn host(name: &str, seed: u32, unit: Unit) -> Experiment {
    let design = Design {
        seed,
        unit,
        ..design()
    };
    Experiment::start(design, name.to_owned()).unwrap()
}

#[test]
fn hosts_are_merged() {
    // Neither host alone has enough evidence; both together have.
    let hosts = ["a", "b"].map(|name| {
        let mut host = host(name, 1, Unit::Connection);
        assert_eq!(host.observe(&increments(0.05, 4000, (0, 60)), 1000), None);
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
    // The third host is one step ahead.
    let mut ahead = host("c", 1, Unit::Connection);
    ahead.observe(&enough(0.05), DAY_MS);
    ahead.observe(&enough(0.5), 1000);
    let all = Experiment::merge(&[merged, ahead.clone()]).unwrap();
    assert_eq!(all.counts(), a.counts() + b.counts() + ahead.counts());
    let again = Experiment::merge(&[ahead, a, b]).unwrap();
    assert_eq!(all.assess(), again.assess());
}

#[test]
fn different_experiments_are_not_merged() {
    let one = host("a", 1, Unit::Connection);
    let with = |change: &dyn Fn(&mut Design)| {
        let mut design = design();
        change(&mut design);
        let other = Experiment::start(design, "b".to_owned()).unwrap();
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
    assert!(Experiment::merge(&[]).is_err());
    let twice = Experiment::merge(&[one.clone(), one]).unwrap_err();
    assert_eq!(twice.to_string(), "host a occurs twice");
}

/// With the same seed, a peer is in the same arm on all hosts.
#[test]
fn peers_of_hosts_with_one_seed_are_not_merged() {
    let peers = |name, seed| host(name, seed, Unit::Peer);
    let merged = Experiment::merge(&[peers("a", 1), peers("b", 2)]).unwrap();
    for (experiments, seed) in [
        ([peers("a", 1), peers("b", 1)], 1),
        ([merged, peers("c", 2)], 2),
    ] {
        let error = Experiment::merge(&experiments).unwrap_err().to_string();
        assert!(error.contains(&format!("same seed ({seed})")), "{error}");
    }
}

fn counts() -> impl Strategy<Value = Counts> {
    let count = prop_oneof![0_u64..5, 0_u64..5000, any::<u64>()];
    proptest::array::uniform5(count).prop_map(|n| Counts {
        attempts: n[0],
        good: n[1],
        requests: n[2],
        late_accepted: n[3],
        spurious: n[4],
    })
}

proptest! {
    /// For any counts, the share rises along the ramp until the end.
    #[test]
    fn share_is_one_of_the_ramp_until_the_end(
        all in proptest::collection::vec((counts(), counts(), 0.0..1e6, 0..4 * DAY_MS), 0..20),
    ) {
        let mut experiment = started(Design { promote: true, ..design() });
        let mut before = experiment.share();
        for (treated, control, under_way, elapsed_ms) in all {
            let increments = Increments {
                counts: Arms { treated, control },
                under_way: Arms { treated: under_way, control: under_way },
            };
            experiment.observe(&increments, elapsed_ms);
            let share = experiment.share();
            match experiment.verdict() {
                None => prop_assert!([0.05, 0.5, 0.95].contains(&share) && share >= before),
                Some(Verdict::GainProven { promoted }) => {
                    prop_assert_eq!(share, if promoted { 1.0 } else { 0.95 });
                }
                Some(_) => prop_assert_eq!(share, 0.0),
            }
            before = share;
            prop_assert!(experiment.assess().unwrap().gain_e.is_finite());
        }
    }
}
