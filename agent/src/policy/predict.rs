//! What a policy gains and costs a connection whose packets are all lost for a while.

use std::time::Duration;

use rto_agent_common::{Policy as KernelPolicy, policy_flags, restart};
use rto_model::{
    data::{Kernel, RTO_MAX_US, THIN_LINEAR_RETRIES},
    predict::{self, Prediction},
};

use super::HostFacts;

/// For an established connection of one small request at a time on this host, whose smoothed RTT is steady.
pub fn predict(
    policy: &KernelPolicy,
    host: &HostFacts,
    srtt: Duration,
    disruptions: &[Duration],
) -> Vec<Prediction> {
    let srtt_us = u64::try_from(srtt.as_micros()).unwrap_or(u64::MAX);
    let kernel = Kernel::near(host.hz.into(), srtt_us);
    predict::predict(&kernel, &with_policy(kernel, policy), disruptions)
}

fn with_policy(kernel: Kernel, policy: &KernelPolicy) -> Kernel {
    let mut own = kernel;
    if policy.rto_min_us != 0 {
        // A request is outstanding alone.
        let srtt_us = u32::try_from(kernel.srtt_us).unwrap_or(u32::MAX);
        let rto_min_us = restart::rto_min_us(policy.rto_min_us, srtt_us, policy.restart_hz, 1);
        own = own.with_rto_min(rto_min_us.into());
    }
    if policy.rto_max_ms != 0 {
        own.rto_max_us = (u64::from(policy.rto_max_ms) * 1000).min(RTO_MAX_US);
    }
    if policy.flags & policy_flags::THIN_LINEAR != 0 {
        own.linear_retries = match policy.linear_retries {
            0 => THIN_LINEAR_RETRIES,
            retries => retries,
        };
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::compile::tests::HOST;

    const SRTT: Duration = Duration::from_micros(100);

    fn of(policy: &KernelPolicy, disruption_ms: u64) -> Prediction {
        let disruption = Duration::from_millis(disruption_ms);
        predict(policy, &HOST, SRTT, &[disruption])[0]
    }

    #[test]
    fn a_policy_without_timers_changes_nothing() {
        for disruption_ms in [1, 50, 700, 20_000] {
            let same = of(&KernelPolicy::EMPTY, disruption_ms);
            assert_eq!(same.kernel_ms, same.policy_ms);
            assert!(!same.worse);
        }
    }

    #[test]
    fn a_lower_rto_min_gains_most_in_short_disruptions_and_loses_in_some_long_ones() {
        let low = KernelPolicy {
            rto_min_us: 8_000,
            ..KernelPolicy::EMPTY
        };
        let short = of(&low, 10);
        assert_eq!((short.kernel_ms, short.policy_ms), (208.0, 16.0));
        let all: Vec<_> = (1..100).map(|n| of(&low, n * 100)).collect();
        assert!(all.iter().any(|p| p.worse) && all.iter().any(|p| !p.worse));
        // Linear timeouts never cost more than one of them, as long as they last.
        let thin = KernelPolicy {
            rto_min_us: 48_000,
            flags: policy_flags::THIN_LINEAR_SET | policy_flags::THIN_LINEAR,
            ..KernelPolicy::EMPTY
        };
        for p in (1..40).map(|n| of(&thin, n * 10)) {
            assert!(p.policy_ms - p.disruption_ms <= 60.0, "{p:?}");
        }
    }

    #[test]
    fn rto_restart_is_a_round_trip_sooner() {
        let far = |restart_hz, disruption_ms| {
            let policy = KernelPolicy {
                rto_min_us: 100_000,
                restart_hz,
                ..KernelPolicy::EMPTY
            };
            let lost = [Duration::from_millis(disruption_ms)];
            predict(&policy, &HOST, Duration::from_millis(60), &lost)[0].policy_ms
        };
        // The RTO is 160 ms without and 100 ms with it, in jiffies of 4 ms.
        assert_eq!((far(0, 10), far(250, 10)), (164.0, 104.0));
        // Below the floor it does not get: RTO 60 ms and 8 ms.
        let low = KernelPolicy {
            rto_min_us: 20_000,
            restart_hz: 250,
            ..KernelPolicy::EMPTY
        };
        let at_floor = predict(
            &low,
            &HOST,
            Duration::from_millis(60),
            &[Duration::from_millis(1)],
        );
        assert_eq!(at_floor[0].policy_ms, 72.0);
        // A near peer gains nothing.
        let near = KernelPolicy {
            rto_min_us: 100_000,
            restart_hz: 250,
            ..KernelPolicy::EMPTY
        };
        let off = KernelPolicy {
            restart_hz: 0,
            ..near
        };
        assert_eq!(of(&near, 50).policy_ms, of(&off, 50).policy_ms);
    }

    #[test]
    fn rto_max_caps_what_a_long_disruption_costs() {
        let capped = KernelPolicy {
            rto_max_ms: 1000,
            ..KernelPolicy::EMPTY
        };
        let long = of(&capped, 10_000);
        assert!(long.policy_ms < 11_200.0 && long.kernel_ms > long.policy_ms);
    }
}
