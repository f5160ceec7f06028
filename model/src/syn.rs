//! Schedules of SYN and SYN-ACK retransmissions, and when connect() gives up.
//!
//! A connecting socket retransmits its SYN after the initial RTO (RFC 6298 section 2.1: one second). Linux keeps that
//! interval for `tcp_syn_linear_timeouts` more timeouts (6.5 and later, default 4) and then doubles it, up to the
//! maximum RTO (120 s, or TCP_RTO_MAX_MS).
//!
//! It gives up with ETIMEDOUT at the first timeout at which one of two rules of `tcp_write_timeout()`
//! (net/ipv4/tcp_timer.c, Linux 6.12) applies:
//!
//! - `TCP_SYNCNT + tcp_syn_linear_timeouts` SYNs were retransmitted, or
//! - the time since the first SYN has reached `tcp_model_timeout()` for `TCP_SYNCNT` doublings of the initial RTO.
//!
//! Because of the second rule a short initial RTO alone makes connect() give up proportionally earlier.

use std::iter;

use crate::wheel;

/// The kernel's initial RTO (`TCP_TIMEOUT_INIT`), microseconds.
pub const INITIAL_RTO_US: u64 = 1_000_000;
/// `TCP_RTO_MAX`, seconds.
pub const RTO_MAX_S: u64 = 120;
/// Largest value of TCP_SYNCNT (`MAX_TCP_SYNCNT`).
pub const MAX_SYNCNT: u8 = 127;

/// How long a half-open request must be kept with a shorter SYN-ACK timer, seconds: the sum of 1, 2, 4, 8 and
/// 16 s, so that an outage of 30 s at the end of a handshake does not cost the connection.
pub const SYN_ACK_LIFETIME_S: u64 = 31;

/// The parameters of a connecting socket's timeouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynTimers {
    /// Initial RTO, jiffies; at least 1.
    pub initial_rto: u64,
    /// Largest RTO, jiffies.
    pub rto_max: u64,
    /// TCP_SYNCNT, or `net.ipv4.tcp_syn_retries` if it is not set.
    pub syn_retries: u8,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub linear_timeouts: u8,
}

/// The precision of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Timers fire exactly when they are due.
    Exact,
    /// Timers fire at steps of the kernel's timer wheel; the connection begins at a multiple of every level's step.
    TimerWheel,
}

/// The schedule of an unanswered connect().
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynSchedule {
    /// When each SYN is sent, jiffies since the first (which is at 0).
    pub sent: Vec<u64>,
    /// When connect() returns ETIMEDOUT, jiffies since the first SYN.
    pub gives_up: u64,
}

impl SynSchedule {
    /// The jiffies between each SYN and the next.
    pub fn gaps(&self) -> impl Iterator<Item = u64> {
        self.sent.windows(2).map(|pair| pair[1] - pair[0])
    }
}

impl SynTimers {
    /// The kernel's defaults at `hz` jiffies per second: 1 s, and a maximum of 120 s.
    pub const fn kernel(hz: u64, syn_retries: u8, linear_timeouts: u8) -> Self {
        Self {
            initial_rto: hz,
            rto_max: RTO_MAX_S * hz,
            syn_retries,
            linear_timeouts,
        }
    }

    /// The schedule of an unanswered connect().
    pub fn schedule(&self, granularity: Granularity) -> SynSchedule {
        let mut sent = vec![0];
        let gives_up = self.run(granularity, |now| sent.push(now));
        SynSchedule { sent, gives_up }
    }

    /// Jiffies from the first SYN until connect() gives up, with exact timers.
    pub fn gives_up(&self) -> u64 {
        self.run(Granularity::Exact, |_| ())
    }

    fn run(&self, granularity: Granularity, mut sent: impl FnMut(u64)) -> u64 {
        let limit = self.elapsed_limit();
        let most = u32::from(self.syn_retries) + u32::from(self.linear_timeouts);
        let (mut now, mut rto) = (0, self.initial_rto.max(1));
        for retransmits in 0.. {
            now = match granularity {
                Granularity::Exact => now + rto,
                Granularity::TimerWheel => wheel::fires_at(now, rto),
            };
            // The time rule applies only after the first retransmission.
            if retransmits >= most || (retransmits > 0 && now >= limit) {
                break;
            }
            sent(now);
            if retransmits >= u32::from(self.linear_timeouts) {
                rto = (rto * 2).min(self.rto_max.max(1));
            }
        }
        now
    }

    fn elapsed_limit(&self) -> u64 {
        model_timeout(self.initial_rto, self.rto_max, self.syn_retries)
    }
}

/// The duration of `retries` doublings of an RTO, in the same unit: `tcp_model_timeout()`, Linux 6.15.
pub fn model_timeout(rto: u64, rto_max: u64, retries: u8) -> u64 {
    let base = rto.max(1);
    let boundary = u64::from(retries);
    let doublings = u64::from((rto_max / base).max(1).ilog2());
    if boundary <= doublings {
        ((2 << boundary) - 1) * base
    } else {
        ((2 << doublings) - 1) * base + (boundary - doublings) * rto_max
    }
}

/// When a listener sends its SYN-ACK, jiffies since the first: `retries` (`net.ipv4.tcp_synack_retries`)
/// retransmissions whose interval doubles from the start, up to `rto_max` (`reqsk_timer_handler()`,
/// net/ipv4/inet_connection_sock.c, Linux 6.12).
pub fn syn_ack_schedule(initial_rto: u64, rto_max: u64, retries: u8) -> Vec<u64> {
    let mut now = 0;
    let timers = backoff(initial_rto, rto_max).take(retries.into());
    let retransmitted = timers.map(|rto| {
        now += rto;
        now
    });
    iter::once(0).chain(retransmitted).collect()
}

/// How long a half-open request is kept, jiffies: until the timer after the last of `retries` SYN-ACK retransmissions
/// expires, which is (2^(retries + 1) - 1) times the initial RTO below `rto_max`.
pub fn syn_ack_lifetime(initial_rto: u64, rto_max: u64, retries: u8) -> u64 {
    let timers = backoff(initial_rto.min(rto_max), rto_max);
    timers.take(usize::from(retries) + 1).sum()
}

/// Intervals that double up to the longest.
pub(crate) fn backoff(first: u64, longest: u64) -> impl Iterator<Item = u64> {
    iter::successors(Some(first.max(1)), move |interval| {
        Some(interval.saturating_mul(2).min(longest.max(1)))
    })
}

/// The shortest SYN-ACK RTO, jiffies, that keeps a request for at least `lifetime` jiffies; `rto_max` if none does.
pub fn syn_ack_rto_for(lifetime: u64, rto_max: u64, retries: u8) -> u64 {
    let (mut low, mut high) = (1, rto_max.max(1));
    while low < high {
        let middle = u64::midpoint(low, high);
        if syn_ack_lifetime(middle, rto_max, retries) >= lifetime {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The SYN-ACK RTO that `syn_ack_rto = "auto"` chooses, jiffies: the initial RTO of the SYN, but long enough to keep a
/// request for [`SYN_ACK_LIFETIME_S`], or for as long as the kernel's timers do if that is shorter.
pub fn syn_ack_rto_auto(initial_rto: u64, hz: u64, retries: u8) -> u64 {
    let rto_max = RTO_MAX_S * hz;
    let kernel = syn_ack_lifetime(hz, rto_max, retries);
    let wanted = kernel.min(SYN_ACK_LIFETIME_S * hz);
    initial_rto.max(syn_ack_rto_for(wanted, rto_max, retries))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rto_agent_common::syn::Timeouts;

    use super::*;

    const HZ: u64 = 250;

    /// Measured on Linux 6.18, HZ 250, syn_retries 6, linear_timeouts 4: initial RTO in jiffies, and milliseconds until
    /// ETIMEDOUT.
    const MEASURED: [(u64, u64); 9] = [
        (250, 133_800),
        (25, 13_700),
        (10, 5_500),
        (8, 4_300),
        (5, 2_700),
        (4, 2_200),
        (3, 1_700),
        (2, 1_100),
        (1, 600),
    ];
    /// Gaps measured with the kernel's timers, ms.
    const MEASURED_GAPS: [u64; 10] = [1020, 1024, 1028, 1020, 1024, 2016, 4064, 8192, 16128, 32768];

    fn timers(initial_rto: u64) -> SynTimers {
        SynTimers {
            initial_rto,
            ..SynTimers::kernel(HZ, 6, 4)
        }
    }

    /// The first two are from Documentation/networking/ip-sysctl.rst (tcp_syn_retries, tcp_retries2), Linux 6.12.
    #[test]
    fn documented_syn_timeouts_match() {
        assert_eq!(model_timeout(1_000, 120_000, 6), 127_000);
        assert_eq!(model_timeout(200, 120_000, 15), 924_600);
        assert_eq!(model_timeout(1_000, 120_000, 7), 127_000 + 120_000);
        assert_eq!(model_timeout(3_000, 1_000, 2), 3_000 + 2 * 1_000);
    }

    #[test]
    fn at_least_one_syn_is_retransmitted() {
        let timers = SynTimers::kernel(HZ, 0, 4);
        let schedule = timers.schedule(Granularity::Exact);
        assert_eq!((schedule.sent, schedule.gives_up), (vec![0, HZ], 2 * HZ));
    }

    #[test]
    fn defaults_are_eleven_syns_and_131_seconds() {
        let schedule = timers(HZ).schedule(Granularity::Exact);
        assert_eq!(
            schedule.gaps().map(|g| g / HZ).collect::<Vec<_>>(),
            [1, 1, 1, 1, 1, 2, 4, 8, 16, 32]
        );
        assert_eq!(schedule.gives_up, 131 * HZ);
    }

    #[test]
    fn before_linux_6_5_seven_syns_and_127_seconds() {
        let schedule = SynTimers::kernel(HZ, 6, 0).schedule(Granularity::Exact);
        assert_eq!(schedule.sent.len(), 7);
        assert_eq!(schedule.gives_up, 127 * HZ);
    }

    #[test]
    fn measured_connect_deadlines_match() {
        for (initial_rto, ms) in MEASURED {
            let wheel = timers(initial_rto)
                .schedule(Granularity::TimerWheel)
                .gives_up
                * 1000
                / HZ;
            // A run begins anywhere between two steps of the wheel: tolerate one jiffy at every SYN, and one step of
            // the coarsest level.
            let tolerance = 11 * 4 + ms / 16;
            assert!(
                wheel.abs_diff(ms) <= tolerance,
                "{initial_rto} jiffies: {wheel} vs {ms} ms"
            );
        }
    }

    #[test]
    fn measured_syn_gaps_match_timer_wheel() {
        let schedule = timers(HZ).schedule(Granularity::TimerWheel);
        for (gap, measured) in schedule.gaps().map(|g| g * 1000 / HZ).zip(MEASURED_GAPS) {
            // One step of the level, as the run began within one.
            let tolerance = wheel::step(measured * HZ / 1000) * 1000 / HZ;
            assert!(
                gap.abs_diff(measured) <= tolerance,
                "{gap} vs {measured} ms"
            );
        }
    }

    #[test]
    fn measured_syncnt_with_100_ms() {
        // TCP_SYNCNT 1, 2, 3: SYNs sent and ETIMEDOUT in ms, measured as above.
        for (syn_retries, syns, ms) in [(1, 3, 310), (2, 6, 730), (3, 8, 1970)] {
            let schedule = SynTimers {
                syn_retries,
                ..timers(25)
            }
            .schedule(Granularity::TimerWheel);
            assert_eq!(schedule.sent.len(), syns, "TCP_SYNCNT {syn_retries}");
            let gives_up = schedule.gives_up * 1000 / HZ;
            assert!(
                gives_up.abs_diff(ms) <= 11 * 4 + ms / 16,
                "{gives_up} vs {ms}"
            );
        }
    }

    #[test]
    fn syn_acks_double_at_once() {
        assert_eq!(syn_ack_schedule(25, 30_000, 5), [0, 25, 75, 175, 375, 775]);
    }

    #[test]
    fn requests_live_as_long_as_their_timers_run() {
        let lifetime = |rto, retries| syn_ack_lifetime(rto, RTO_MAX_S * HZ, retries);
        // 63 s with the kernel's timers, 6.3 s with 100 ms, 31 s with 4 retransmissions.
        assert_eq!(lifetime(HZ, 5), 63 * HZ);
        assert_eq!(lifetime(25, 5), 63 * 25);
        assert_eq!(lifetime(HZ, 4), 31 * HZ);
        assert_eq!(lifetime(HZ, 0), HZ);
        // 120 s is the longest interval: 127 s, and 120 s more for each further retransmission.
        assert_eq!(lifetime(HZ, 8), (127 + 2 * 120) * HZ);
    }

    #[test]
    fn auto_syn_ack_rto_is_shortest_for_retries() {
        // Number of retransmissions, and jiffies at HZ 250 for an initial RTO of 100 ms.
        for (retries, jiffies) in [
            (0, 250),
            (1, 250),
            (4, 250),
            (5, 124),
            (6, 62),
            (7, 31),
            (8, 25),
            (15, 25),
        ] {
            assert_eq!(syn_ack_rto_auto(25, HZ, retries), jiffies, "{retries}");
        }
        // 492.06 ms in whole jiffies of 1 ms.
        assert_eq!(syn_ack_rto_auto(100, 1000, 5), 493);
        assert_eq!(syn_ack_rto_auto(400, HZ, 5), 400);
    }

    #[test]
    fn program_gives_up_when_the_model_does() {
        for initial_rto in [1, 5, 25, 125, 250] {
            for syn_retries in 1..=40 {
                for (linear_timeouts, rto_max_s) in [(0, 120), (1, 120), (4, 120), (4, 20)] {
                    let model = SynTimers {
                        initial_rto,
                        rto_max: rto_max_s * HZ,
                        syn_retries,
                        linear_timeouts,
                    };
                    let program = Timeouts {
                        initial_rto: u32::try_from(initial_rto).unwrap(),
                        rto_max: u32::try_from(model.rto_max).unwrap(),
                        ..Timeouts::kernel(250, syn_retries.into(), linear_timeouts.into())
                    };
                    let gives_up = model.schedule(Granularity::TimerWheel).gives_up;
                    assert_eq!(u64::from(program.gives_up(0)), gives_up, "{model:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn more_retries_give_up_later(
            initial_rto in 1u64..30_000,
            rto_max in 250u64..30_000,
            linear_timeouts in 0u8..10,
        ) {
            let mut before = 0;
            for syn_retries in 1..=MAX_SYNCNT {
                let now = SynTimers { initial_rto, rto_max, syn_retries, linear_timeouts }.gives_up();
                prop_assert!(now >= before);
                before = now;
            }
        }

        #[test]
        fn syn_ack_rto_for_is_the_shortest_sufficient(
            lifetime in 1u64..100_000,
            retries in 0u8..=255,
        ) {
            let rto_max = RTO_MAX_S * HZ;
            let found = syn_ack_rto_for(lifetime, rto_max, retries);
            prop_assert!(
                syn_ack_lifetime(found, rto_max, retries) >= lifetime || found == rto_max
            );
            if found > 1 {
                prop_assert!(syn_ack_lifetime(found - 1, rto_max, retries) < lifetime);
            }
        }

        #[test]
        fn auto_syn_ack_rto_keeps_request_lifetime(
            initial_rto in 1u64..29_999,
            hz in prop::sample::select(vec![100u64, 250, 300, 1000]),
            retries in 0u8..=255,
        ) {
            let rto_max = RTO_MAX_S * hz;
            let auto = syn_ack_rto_auto(initial_rto, hz, retries);
            let lifetime = syn_ack_lifetime(auto, rto_max, retries);
            let kernel = syn_ack_lifetime(hz, rto_max, retries);
            prop_assert!(lifetime >= kernel.min(SYN_ACK_LIFETIME_S * hz));
            prop_assert!(auto >= initial_rto && auto <= initial_rto.max(hz));
            prop_assert!(auto <= syn_ack_rto_auto(initial_rto, hz, retries.saturating_sub(1)));
        }
    }
}
