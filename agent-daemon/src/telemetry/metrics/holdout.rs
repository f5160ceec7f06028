//! Metrics of the comparison of policies' arms.

use rto_agent_core::wire::{
    holdout::{ArmConnects, HoldoutView},
    tune::TuneAnswer,
};

use super::{Labels, Metrics, with};

/// None without a control arm: hosts without any export no series.
pub(super) fn add(metrics: &mut Metrics, tuned: &TuneAnswer, in_detail: bool) {
    let policies = tuned.policies.iter().filter_map(|(name, policy)| {
        let labels: Labels = vec![("policy", name.to_string())];
        Some((labels, policy.holdout.as_ref()?))
    });
    let all: Vec<_> = policies.collect();
    metrics.gauges(
        "holdout_share",
        "Share of a policy's connections in its control arm, 0 to 1",
        all.iter().map(|(labels, holdout)| {
            let labels = with(labels, "holdout", &holdout.share.to_string());
            (labels, holdout.share.fraction())
        }),
    );
    metrics.gauges(
        "holdout_attempts",
        "Attempts by arm since the policy has these settings and this holdout; they start at 0 \
         again with others",
        by_arm(&all, |arm| arm.attempts),
    );
    metrics.gauges(
        "holdout_bad_attempts",
        "Of these, attempts that were not established within 500 ms",
        by_arm(&all, |arm| arm.bad),
    );
    metrics.gauges(
        "connect_time_difference_seconds",
        "Mean connect time of the treated arm minus that of the control arm, and its always-valid \
         95 % interval (established active connections)",
        all.iter().flat_map(|(labels, holdout)| {
            let difference = holdout.connect_time_difference.iter();
            difference.flat_map(move |difference| {
                let [low, high] = difference.interval_us;
                let bounds = [("mean", difference.mean_us), ("low", low), ("high", high)];
                bounds.map(|(bound, us)| (with(labels, "bound", bound), us / 1e6))
            })
        }),
    );
    metrics.gauges(
        "holdout_verdict",
        "Verdict about a policy's timers: 1, with the current verdict as its label",
        all.iter()
            .flat_map(|(labels, holdout)| [(with(labels, "verdict", holdout.verdict.name()), 1.0)]),
    );
    metrics.gauges(
        "fallback_harm",
        "Whether new connections get the kernel's own timers because harm is proven",
        all.iter().map(|(labels, holdout)| {
            let in_force = f64::from(u8::from(holdout.fallback));
            (labels.clone(), in_force)
        }),
    );
    if in_detail {
        evidence(metrics, &all);
    }
}

/// The evidence of each verdict.
fn evidence(metrics: &mut Metrics, all: &[(Labels, &HoldoutView)]) {
    metrics.gauges(
        "holdout_bad_ratio",
        "Share of bad attempts in the treated arm divided by that in the control arm, and its \
         always-valid 95 % interval; an end that is unknown is left out",
        all.iter().flat_map(|(labels, holdout)| {
            let ratio = holdout.evidence.ratio;
            let bounds = [
                ("likeliest", ratio.likeliest),
                ("low", Some(ratio.low)),
                ("high", ratio.high),
            ];
            let known = bounds
                .into_iter()
                .filter_map(|(bound, value)| Some((bound, value?)));
            known.map(|(bound, value)| (with(labels, "bound", bound), value))
        }),
    );
    metrics.gauges(
        "holdout_e_value",
        "E-values of the comparison: a gain is proven at 20, harm at 400; with a mismatch of 1000 \
         there is no verdict",
        all.iter().flat_map(|(labels, holdout)| {
            let evidence = &holdout.evidence;
            let values = [
                ("gain", evidence.gain_e),
                ("harm", evidence.harm_e),
                ("mismatch", evidence.mismatch_e),
            ];
            values.map(|(of, e)| (with(labels, "of", of), e))
        }),
    );
}

/// A count (attempts, and bad ones) in each arm. The share is a label, so that only hosts with the
/// same share are added up.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
fn by_arm(all: &[(Labels, &HoldoutView)], count: fn(&ArmConnects) -> u64) -> Vec<(Labels, f64)> {
    let samples = all.iter().flat_map(|(labels, holdout)| {
        let labels = with(labels, "holdout", &holdout.share.to_string());
        let arms = &holdout.arms;
        [("treated", &arms.treated), ("control", &arms.control)]
            .map(|(arm, connects)| (with(&labels, "arm", arm), count(connects) as f64))
    });
    samples.collect()
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        testing::holdout,
        wire::{holdout::Verdict, tune::TunedPolicy},
    };

    use super::*;

    #[test]
    fn holdout_comparison_has_its_series() {
        let policy = TunedPolicy {
            holdout: Some(holdout(Verdict::Harm)),
            ..TunedPolicy::default()
        };
        let tuned = TuneAnswer {
            policies: [("near".parse().unwrap(), policy)].into(),
            ..TuneAnswer::default()
        };
        let stats = rto_agent_core::wire::stats::StatsAnswer::default();
        let text = super::super::tests::rendered(&stats, &tuned, true);
        for line in [
            "rto_agent_holdout_share{policy=\"near\",holdout=\"5%\"} 0.05",
            "rto_agent_holdout_attempts{policy=\"near\",holdout=\"5%\",arm=\"treated\"} 9500.0",
            "rto_agent_holdout_bad_attempts{policy=\"near\",holdout=\"5%\",arm=\"control\"} 6.0",
            "rto_agent_holdout_bad_ratio{policy=\"near\",bound=\"low\"} 0.1",
            "rto_agent_connect_time_difference_seconds{policy=\"near\",bound=\"mean\"} -0.0015",
            "rto_agent_holdout_e_value{policy=\"near\",of=\"gain\"} 2.5",
            "rto_agent_holdout_verdict{policy=\"near\",verdict=\"harm\"} 1.0",
            "rto_agent_fallback_harm{policy=\"near\"} 1.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("bound=\"high\"} NaN"));
    }
}
