//! What a policy's handshake timers gain over the kernel's own.

use rto_agent_common::{GAINS, Policy as KernelPolicy};
use rto_model::syn::{Granularity, MAX_SYNCNT, RTO_MAX_S, SynTimers};

use super::{HostFacts, units::jiffies_to_usecs};

/// The initial RTO of the SYN in force with a compiled policy, and by how much sooner its first, second, ...
/// retransmission is sent than by the kernel's own timers: both in microseconds, negative where it is later.
/// Timers count as exact. (The program reckons those of a SYN-ACK, whose timer depends on the listener.)
pub(super) fn saved_time(policy: &KernelPolicy, host: &HostFacts) -> (u32, [i32; GAINS]) {
    let hz = u64::from(host.hz);
    let kernel = SynTimers::kernel(hz, MAX_SYNCNT, host.tcp_syn_linear_timeouts);
    let set = |value: u32, otherwise: u64| match value {
        0 => otherwise,
        value => value.into(),
    };
    let own = SynTimers {
        initial_rto: set(policy.initial_rto_jiffies, hz),
        rto_max: set(policy.rto_max_ms, RTO_MAX_S * 1000) * hz / 1000,
        ..kernel
    };
    let syns = |timers: SynTimers| timers.schedule(Granularity::Exact).sent;
    let initial_rto_us = jiffies_to_usecs(own.initial_rto, host.hz);
    (
        u32::try_from(initial_rto_us).unwrap_or(u32::MAX),
        difference(&syns(kernel), &syns(own), host.hz),
    )
}

/// By how much sooner the second schedule's retransmissions are sent.
fn difference(kernel: &[u64], own: &[u64], hz: u32) -> [i32; GAINS] {
    let mut gains = [0; GAINS];
    for (gain, (kernel, own)) in gains.iter_mut().zip(kernel.iter().zip(own).skip(1)) {
        let us = |jiffies: &u64| i64::try_from(jiffies_to_usecs(*jiffies, hz)).unwrap_or(i64::MAX);
        let saved = us(kernel).saturating_sub(us(own));
        *gain = i32::try_from(saved).unwrap_or(if saved < 0 { i32::MIN } else { i32::MAX });
    }
    gains
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::compile::tests::HOST;

    fn with(initial_rto_jiffies: u32) -> (u32, [i32; GAINS]) {
        let policy = KernelPolicy {
            initial_rto_jiffies,
            ..KernelPolicy::EMPTY
        };
        saved_time(&policy, &HOST)
    }

    #[test]
    fn of_100_ms() {
        let (initial_rto_us, syn) = with(25);
        assert_eq!(initial_rto_us, 100_000);
        // 1 s, 2 s, ... 5 s, 7 s, 11 s, 19 s against a tenth of it.
        let seconds = [1, 2, 3, 4, 5, 7, 11, 19];
        assert_eq!(syn, seconds.map(|s| s * 900_000));
    }

    #[test]
    fn without_one_there_is_nothing_to_gain() {
        assert_eq!(with(0), (1_000_000, [0; GAINS]));
    }

    #[test]
    fn a_shorter_maximum_gains_once_it_is_reached() {
        let policy = KernelPolicy {
            rto_max_ms: 2_000,
            ..KernelPolicy::EMPTY
        };
        // 1 s, 2 s, ... 5 s, 7 s, and then 11 s and 19 s by the kernel's own timers, 9 s and 11 s by these.
        let expected = [0, 0, 0, 0, 0, 0, 2_000_000, 8_000_000];
        assert_eq!(saved_time(&policy, &HOST), (1_000_000, expected));
    }

    #[test]
    fn beyond_35_minutes_it_is_the_most() {
        let hour = [0, 3600 * 250];
        assert_eq!(difference(&hour, &[0, 0], 250)[0], i32::MAX);
        assert_eq!(difference(&[0, 0], &hour, 250)[0], i32::MIN);
    }

    #[test]
    fn longer_timers_lose() {
        let (initial_rto_us, syn) = with(750);
        assert_eq!((initial_rto_us, syn[0]), (3_000_000, -2_000_000));
    }
}
