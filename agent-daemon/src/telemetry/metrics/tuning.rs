//! Metrics of learnt and guarded timers.

use rto_agent_core::wire::tune::TuneAnswer;

use super::{Labels, Metrics, seconds, with};

/// None without such timers: hosts without any export no series.
pub(super) fn add(metrics: &mut Metrics, tuned: &TuneAnswer) {
    let timers = tuned.timers().map(|(name, timer)| {
        let labels: Labels = vec![
            ("policy", name.to_string()),
            ("direction", timer.direction.clone()),
        ];
        (labels, timer)
    });
    let timers: Vec<_> = timers.collect();
    metrics.gauges(
        "tuned_seconds",
        "A learnt timer (kind auto; kind advice: not applied) or guarded timer; absent while it is \
         the kernel's own",
        timers.iter().filter_map(|(labels, timer)| {
            let us = timer.value_us?;
            Some((with(labels, "kind", timer.kind.name()), seconds(us)))
        }),
    );
    metrics.gauges(
        "guard_state",
        "State of a learnt or guarded timer: 1, with the current state as its label",
        timers
            .iter()
            .map(|(labels, timer)| (with(labels, "state", timer.state.name()), 1.0)),
    );
    metrics.counters(
        "guard_transitions",
        "Changes of a timer's state or value, by new state and cause",
        timers.iter().flat_map(|(labels, timer)| {
            timer.transitions.iter().map(|one| {
                let labels = with(labels, "to", one.to.name());
                (with(&labels, "cause", one.cause.name()), one.count)
            })
        }),
    );
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        testing::timer,
        wire::tune::{TransitionCount, TunedPolicy, TunedTimer},
    };
    use rto_model::tune::tuner::{Cause, State};

    use super::*;

    #[test]
    fn each_timer_has_a_series() {
        let sample = timer("active", State::Active);
        let timer = TunedTimer {
            value_us: Some(24_000),
            transitions: vec![TransitionCount {
                to: State::FallbackSpurious,
                cause: Cause::Spurious,
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
        let text = super::super::tests::rendered(&stats, &tuned, true);
        let of = "policy=\"near\",direction=\"active\"";
        for line in [
            format!("rto_agent_tuned_seconds{{{of},kind=\"auto\"}} 0.024"),
            format!("rto_agent_guard_state{{{of},state=\"active\"}} 1.0"),
            format!(
                "rto_agent_guard_transitions_total{{{of},to=\"fallback-spurious\",cause=\"spurious\"}} 2"
            ),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
