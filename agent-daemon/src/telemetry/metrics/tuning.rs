//! Metrics of learnt and guarded timers.

use rto_agent_core::{
    policy::PolicyName,
    wire::tune::{TimerKind, TuneAnswer, TunedTimer},
};
use rto_model::tune::tuner::State;

use super::{Family, Labels, Samples, family, family_in_seconds};

/// Empty without such timers: hosts without any export no series.
pub(super) fn families(tuned: &TuneAnswer) -> Vec<Family> {
    if tuned.policies.is_empty() {
        return Vec::new();
    }
    let labels = |name: &PolicyName, timer: &TunedTimer| -> Labels {
        vec![
            ("policy", name.to_string()),
            ("setting", timer.setting.clone()),
            ("direction", timer.direction.clone()),
        ]
    };
    let (mut seconds, mut states, mut transitions, mut budgets) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (name, timer) in tuned.timers() {
        let labels = labels(name, timer);
        let with = |more: Labels| -> Labels { labels.iter().cloned().chain(more).collect() };
        #[expect(clippy::cast_precision_loss, reason = "seconds are a double")]
        if let (TimerKind::Auto | TimerKind::Guarded | TimerKind::Advice, Some(us)) =
            (timer.kind, timer.value_us)
        {
            let kind = vec![("kind", timer.kind.name().to_owned())];
            seconds.push((with(kind), us as f64 / 1e6));
        }
        for state in State::ALL {
            let is_present = state == timer.state;
            let state = vec![("state", state.name().to_owned())];
            states.push((with(state), f64::from(u8::from(is_present))));
        }
        for count in &timer.transitions {
            let more = vec![
                ("to", count.to.name().to_owned()),
                ("cause", count.cause.name().to_owned()),
            ];
            transitions.push((with(more), count.count));
        }
        if let Some(brakes) = &timer.brakes {
            budgets.push((labels.clone(), brakes.budget_left));
        }
    }
    let mut all = vec![
        family_in_seconds(
            "tuned",
            "A learnt timer (kind auto; kind advice: not applied) or guarded timer; absent \
                   while it is the kernel's own",
            Samples::Gauge(seconds),
        ),
        family(
            "guard_state",
            "State of a learnt or guarded timer: 1 for the current state",
            Samples::Gauge(states),
        ),
        family(
            "guard_transitions",
            "Changes of a timer's state or value, by new state and cause",
            Samples::Counter(transitions),
        ),
        family(
            "budget_ratio",
            "Remaining budget for retransmissions of SYNs and SYN-ACKs, 0 to 1; at half or \
                   less, new connections get the kernel's own timer",
            Samples::Gauge(budgets),
        ),
    ];
    all.retain(|family| match &family.samples {
        Samples::Gauge(samples) => !samples.is_empty(),
        Samples::Counter(samples) => !samples.is_empty(),
        _ => true,
    });
    all
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        testing::timer,
        wire::tune::{BrakesView, TransitionCount, TunedPolicy},
    };
    use rto_model::tune::tuner::Cause;

    use super::*;

    #[test]
    fn a_series_for_each_timer() {
        let sample = timer("active", State::Active);
        let timer = TunedTimer {
            value_us: Some(24_000),
            brakes: sample.brakes.map(|brakes| BrakesView {
                budget_left: 0.75,
                ..brakes
            }),
            transitions: vec![TransitionCount {
                to: State::BrakedFuse,
                cause: Cause::Fuse,
                count: 2,
            }],
            ..sample
        };
        let policy = TunedPolicy {
            timers: vec![timer],
            ..TunedPolicy::default()
        };
        let tuned = TuneAnswer {
            policies: [("near".parse().unwrap(), policy)].into(),
            ..TuneAnswer::default()
        };
        let stats = rto_agent_core::wire::stats::StatsAnswer::default();
        let text =
            super::super::render(&super::super::tests::status(), &stats, &tuned, None).unwrap();
        let of = "policy=\"near\",setting=\"initial_rto\",direction=\"active\"";
        for line in [
            format!("rto_agent_tuned_seconds{{{of},kind=\"auto\"}} 0.024"),
            format!("rto_agent_guard_state{{{of},state=\"active\"}} 1.0"),
            format!("rto_agent_guard_state{{{of},state=\"braked-fuse\"}} 0.0"),
            format!(
                "rto_agent_guard_transitions_total{{{of},to=\"braked-fuse\",cause=\"fuse\"}} 2"
            ),
            format!("rto_agent_budget_ratio{{{of}}} 0.75"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert_eq!(families(&TuneAnswer::default()).len(), 0);
    }
}
