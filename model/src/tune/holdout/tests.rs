//! Verdicts of counts.

use super::*;

fn started(treated: f64) -> Comparison {
    Comparison::new(Probability::try_from(treated).unwrap())
}

/// Attempts in each arm for this share, with this many bad ones.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count"
)]
fn increments(share: f64, attempts: u64, bad: (u64, u64)) -> Increments {
    let treated = (attempts as f64 * share) as u64;
    let counts = |attempts, bad| Counts {
        attempts,
        good: attempts - bad,
    };
    Increments {
        counts: Arms {
            treated: counts(treated, bad.0),
            control: counts(attempts - treated, bad.1),
        },
        ..Increments::default()
    }
}

/// Adds increments, and observes each second until a verdict, or until none can follow.
fn look(comparison: &mut Comparison, increments: &Increments) -> Option<Verdict> {
    let none = Increments::default();
    let later = std::iter::repeat_n(&none, 12);
    let mut all = std::iter::once(increments).chain(later);
    all.find_map(|increments| comparison.observe(increments, 1000))
}

#[test]
fn fewer_bad_attempts_are_a_gain_until_harm_is_proven() {
    let mut comparison = started(0.5);
    let gain = increments(0.5, 40_000, (0, 200));
    assert_eq!(look(&mut comparison, &gain), Some(Verdict::Gain));
    assert!(comparison.is_open());
    // Nothing new.
    assert_eq!(look(&mut comparison, &Increments::default()), None);
    let harm = increments(0.5, 40_000, (4000, 0));
    assert_eq!(look(&mut comparison, &harm), Some(Verdict::Harm));
    // Counts after the end are ignored.
    assert_eq!(look(&mut comparison, &gain), None);
    assert_eq!(comparison.counts().treated.attempts, 40_000);
    assert_eq!(comparison.verdict(), Verdict::Harm);
}

#[test]
fn harm_needs_more_evidence_than_gain() {
    for (bad, gain, harm) in [(5, None, None), (8, Some(Verdict::Gain), None)] {
        let treated = increments(0.5, 10_000, (bad, 0));
        let control = increments(0.5, 10_000, (0, bad));
        assert_eq!(look(&mut started(0.5), &control), gain, "{bad}");
        assert_eq!(look(&mut started(0.5), &treated), harm, "{bad}");
    }
    let treated = increments(0.5, 10_000, (20, 0));
    assert_eq!(look(&mut started(0.5), &treated), Some(Verdict::Harm));
}

#[test]
fn arms_of_the_wrong_size_are_invalid() {
    let mut comparison = started(0.95);
    let half = increments(0.5, 200, (100, 0));
    assert_eq!(comparison.observe(&half, 1000), Some(Verdict::Invalid));
    assert_eq!(
        serde_json::to_string(&comparison.verdict()).unwrap(),
        r#""invalid""#
    );
    assert_eq!(look(&mut comparison, &half), None);
}

/// Forty attempts are under way at each observation. The arms differ only by chance.
#[test]
fn attempts_under_way_are_neither_gain_nor_harm() {
    let looks = |under_way: f64| {
        let mut comparison = started(0.5);
        let both = Arms {
            treated: under_way,
            control: under_way,
        };
        let mut verdict = None;
        for (treated, control) in [(20, 60), (60, 20)] {
            let mut next = increments(0.5, 400, (treated, control));
            next.under_way = both;
            verdict = verdict.or(look(&mut comparison, &next));
            // These attempts are established, and as many new ones start.
            next = Increments::default();
            next.counts.treated.good = treated;
            next.counts.control.good = control;
            next.under_way = both;
            comparison.observe(&next, 1000);
        }
        verdict
    };
    assert_eq!(looks(40.0), None);
    // Without the allowance, chance proves a gain.
    assert_eq!(looks(0.0), Some(Verdict::Gain));
}

/// What was not counted as an attempt may be counted as good.
#[test]
fn attempts_under_way_at_each_start_are_allowed_for() {
    let mut comparison = started(0.5);
    for _ in 0..2 {
        comparison.wait(Arms {
            treated: 20.0,
            control: 20.0,
        });
        comparison.observe(&increments(0.5, 400, (20, 60)), 1000);
    }
    assert_eq!(comparison.begun.treated, 40.0);
    assert_eq!(look(&mut comparison, &Increments::default()), None);
}

#[test]
fn evidence_counts_once_it_has_held() {
    let mut comparison = started(0.05);
    let gain = increments(0.05, 40_000, (0, 200));
    assert_eq!(comparison.observe(&gain, 1000), None);
    for _ in 0..HOLD_MS / 1000 - 1 {
        assert_eq!(comparison.observe(&Increments::default(), 1000), None);
    }
    // The evidence does not hold.
    let mut late = Increments::default();
    late.counts.control.good = 200;
    assert_eq!(look(&mut comparison, &late), None);
    assert_eq!(comparison.verdict(), Verdict::NotYet);
}

#[test]
fn restart_changes_nothing() {
    let mut comparison = started(0.5);
    comparison.observe(&increments(0.5, 40_000, (3, 9)), 60_000);
    let text = serde_json::to_string(&comparison).unwrap();
    let mut restarted: Comparison = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&restarted).unwrap(), text);
    for bad in [(0, 5), (0, 20), (0, 60)] {
        let next = increments(0.5, 40_000, bad);
        assert_eq!(look(&mut comparison, &next), look(&mut restarted, &next));
    }
    assert_eq!(comparison.assess(), restarted.assess());
    assert_eq!(comparison.verdict(), Verdict::Gain);
}

#[test]
fn attempts_needed_prove_the_difference_so_far() {
    for (share, bad) in [(0.5, (2, 6)), (0.95, (40, 4)), (0.5, (9, 2))] {
        let mut comparison = started(share);
        look(&mut comparison, &increments(share, 10_000, bad));
        let needed = comparison.assess().attempts_needed.unwrap();
        let after = |more: u64| {
            let attempts = 10_000 + more;
            let times = |part: u64| (attempts * part + 5_000) / 10_000;
            let all = increments(share, attempts, (times(bad.0), times(bad.1)));
            look(&mut started(share), &all)
        };
        // Counts are whole.
        assert!(after(needed + needed / 5).is_some(), "{bad:?} {needed}");
        assert_eq!(after(needed / 2), None, "{bad:?} {needed}");
    }
    // Nothing bad, no difference, and a verdict.
    for bad in [(0, 0), (50, 50), (0, 200)] {
        let mut comparison = started(0.5);
        look(&mut comparison, &increments(0.5, 10_000, bad));
        assert_eq!(comparison.assess().attempts_needed, None, "{bad:?}");
    }
}
