//! When unanswered data is retransmitted, and how long a connection is idle because of it.
//!
//! [`LinuxTimers`] is Linux's implementation (net/ipv4/tcp_timer.c and tcp_output.c, Linux 6.12):
//!
//! - The RTO is the smoothed RTT plus the variation, which is at least rto_min (`__tcp_set_rto()`), rounded up to
//!   jiffies.
//! - The first retransmission is a tail loss probe (RFC 8985 section 7): for a single segment after two smoothed RTTs
//!   plus rto_min, but no later than the RTO (`tcp_schedule_loss_probe()`, 6.12; earlier kernels use 200 ms instead of
//!   rto_min). The RTO timer is then restarted, so that doubling begins one transmission later.
//! - A thin stream with linear timeouts keeps the interval for `TCP_THIN_LINEAR_RETRIES` timeouts after the first
//!   (`tcp_retransmit_timer()`).
//! - Timers fire at steps of the timer wheel ([`crate::wheel`]).

use std::iter;

use crate::{syn::backoff, wheel};

/// `TCP_THIN_LINEAR_RETRIES`.
pub const THIN_LINEAR_RETRIES: u32 = 6;
/// `TCP_RTO_MIN`, microseconds.
pub const RTO_MIN_US: u64 = 200_000;
/// `TCP_RTO_MAX`, microseconds.
pub const RTO_MAX_US: u64 = 120_000_000;

/// The parameters of the kernel's timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinuxTimers {
    /// Jiffies per second.
    pub hz: u64,
    /// Smoothed round-trip time, microseconds.
    pub srtt_us: u64,
    /// Its variation in the RTO (four mean deviations), microseconds, before rto_min is applied.
    pub rttvar_us: u64,
    /// rto_min, microseconds.
    pub rto_min_us: u64,
    /// Largest RTO, microseconds.
    pub rto_max_us: u64,
    /// Timeouts after the first that keep the interval: 0 for a thick stream, else [`THIN_LINEAR_RETRIES`] or the value
    /// of `linear_retries`.
    pub linear_retries: u32,
    /// If there is a tail loss probe (`net.ipv4.tcp_early_retrans`), the time that it waits beyond two round-trip
    /// times, microseconds: rto_min, or [`RTO_MIN_US`] before Linux 6.11.
    pub probe_after_us: Option<u64>,
}

impl LinuxTimers {
    /// A steady connection to a near peer, with one segment at a time and the kernel's timers.
    pub const fn near(hz: u64, srtt_us: u64) -> Self {
        Self {
            hz,
            srtt_us,
            rttvar_us: 0,
            rto_min_us: RTO_MIN_US,
            rto_max_us: RTO_MAX_US,
            linear_retries: 0,
            probe_after_us: Some(RTO_MIN_US),
        }
    }

    /// The same with another rto_min.
    #[must_use]
    pub const fn with_rto_min(self, rto_min_us: u64) -> Self {
        Self {
            rto_min_us,
            probe_after_us: match self.probe_after_us {
                Some(_) => Some(rto_min_us),
                None => None,
            },
            ..self
        }
    }

    /// The same with rto_min minus the smoothed round-trip time, as the agent's `rto_restart` does for a single segment
    /// (RTO restart, RFC 7765): whole jiffies, at least two.
    #[must_use]
    pub const fn with_restart(self) -> Self {
        let less_us = self.rto_min_us.saturating_sub(self.srtt_us);
        let jiffies = (less_us * self.hz).div_ceil(1_000_000);
        let jiffies = if jiffies < 2 { 2 } else { jiffies };
        let us = jiffies * 1_000_000 / self.hz;
        if self.srtt_us == 0 || us >= self.rto_min_us {
            return self;
        }
        self.with_rto_min(us)
    }

    /// The same for a thin stream with linear timeouts.
    #[must_use]
    pub const fn thin(self) -> Self {
        Self {
            linear_retries: THIN_LINEAR_RETRIES,
            ..self
        }
    }

    /// The RTO, jiffies.
    pub const fn rto(&self) -> u64 {
        let least = self.rounded_us(self.rto_min_us);
        let variation = if self.rttvar_us > least {
            self.rttvar_us
        } else {
            least
        };
        self.jiffies(self.srtt_us + variation)
    }

    /// The jiffies until the tail loss probe; `None` without a probe.
    pub fn probe(&self) -> Option<u64> {
        let after_us = 2 * self.srtt_us + self.rounded_us(self.probe_after_us?);
        Some(self.jiffies(after_us).min(self.rto()))
    }

    /// usecs_to_jiffies(): rounds up.
    const fn jiffies(&self, us: u64) -> u64 {
        (us * self.hz).div_ceil(1_000_000)
    }

    /// The kernel stores rto_min in jiffies.
    const fn rounded_us(&self, us: u64) -> u64 {
        self.jiffies(us) * 1_000_000 / self.hz
    }

    /// When the data is retransmitted, jiffies after the first transmission, which was in jiffy `begin`; unbounded.
    pub fn times(self, begin: u64) -> impl Iterator<Item = u64> {
        self.timers().scan(begin, move |now, timer| {
            *now = wheel::fires_at(*now, timer);
            Some(*now - begin)
        })
    }

    /// The intervals between the transmissions, jiffies, without the steps of the timer wheel.
    fn timers(self) -> impl Iterator<Item = u64> {
        let rto = self.rto();
        let linear = iter::repeat_n(rto.max(1), self.linear_retries as usize);
        let doubled = backoff(rto, self.jiffies(self.rto_max_us));
        self.probe().into_iter().chain(linear).chain(doubled)
    }

    /// How long a request and response are idle, microseconds, if all packets are lost from the moment the request is
    /// sent, at the start of jiffy `begin`, until `disruption_us` later: the first retransmission at or after that time.
    pub fn idle_us(self, disruption_us: u64, begin: u64) -> u64 {
        // The times are unbounded.
        let mut times = self
            .times(begin)
            .map(|jiffies| jiffies * 1_000_000 / self.hz);
        times.find(|us| *us >= disruption_us).unwrap_or(u64::MAX)
    }

    /// The same if the host's own firewall drops the packets, in INPUT and OUTPUT, and the peer has the same timers.
    ///
    /// Each ends the idle time: the peer's retransmission of its last answer, whose ACK was in the dropped request, and a
    /// probe of the host. A send that is dropped in OUTPUT fails, so that nothing is in flight, and `tcp_write_xmit()`
    /// leaves the request to the probe timer (`tcp_check_probe_timer()`): `tcp_probe0_base()`, at least 200 ms, doubles
    /// each time whatever rto_min is (Linux 6.12).
    pub fn own_firewall_idle_us(self, disruption_us: u64, begin: u64) -> u64 {
        let base = self.rto().max(self.jiffies(RTO_MIN_US));
        let mut now = begin;
        let probe_us = backoff(base, self.jiffies(self.rto_max_us))
            .map(|timer| {
                now = wheel::fires_at(now, timer);
                (now - begin) * 1_000_000 / self.hz
            })
            .find(|us| *us >= disruption_us);
        self.idle_us(disruption_us, begin)
            .min(probe_us.unwrap_or(u64::MAX))
    }

    /// The median of [`Self::idle_us`] over all positions in the wheel's steps.
    pub fn median_idle_us(self, disruption_us: u64) -> u64 {
        median(|begin| self.idle_us(disruption_us, begin))
    }

    /// The median of [`Self::own_firewall_idle_us`] over all positions in the wheel's steps.
    pub fn median_own_firewall_idle_us(self, disruption_us: u64) -> u64 {
        median(|begin| self.own_firewall_idle_us(disruption_us, begin))
    }
}

/// The median over the jiffy in which the data is sent.
fn median(of: impl Fn(u64) -> u64) -> u64 {
    // The steps of the three finest levels repeat every 512 jiffies.
    let mut all: Vec<u64> = (0..512).map(of).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rto_restart_fires_one_rtt_sooner() {
        let far = LinuxTimers::near(250, 60_000).with_rto_min(100_000);
        assert_eq!(far.with_restart(), far.with_rto_min(40_000));
        // 160 ms without and 100 ms with it, in jiffies of 4 ms.
        assert_eq!((far.rto(), far.with_restart().rto()), (40, 25));
        // The minimum is two jiffies, and a near peer gains nothing.
        assert_eq!(far.with_rto_min(20_000).with_restart().rto_min_us, 8_000);
        let near = LinuxTimers::near(250, 100).with_rto_min(100_000);
        assert_eq!(near.with_restart(), near);
        // Nor is the value rounded up above the configured one.
        let odd = LinuxTimers::near(250, 100).with_rto_min(99_000);
        assert_eq!(odd.with_restart(), odd);
    }

    #[test]
    fn probe_fires_after_two_rtts_and_rto_min() {
        let unsteady = LinuxTimers {
            rttvar_us: 300_000,
            ..LinuxTimers::near(1000, 30_000)
        };
        assert_eq!((unsteady.probe(), unsteady.rto()), (Some(260), 330));
        let low = unsteady.with_rto_min(50_000);
        assert_eq!((low.probe(), low.rto()), (Some(110), 330));
        let without = LinuxTimers {
            probe_after_us: None,
            ..unsteady
        };
        assert_eq!(without.with_rto_min(50_000).probe(), None);
    }

    #[test]
    fn own_firewall_leaves_probes_of_200_ms() {
        let low = LinuxTimers::near(1000, SRTT_US).with_rto_min(5_000).thin();
        // 200, 400 and 800 ms in steps of the timer wheel, where the peer's own timers are longer.
        for (lost_ms, ms) in [(500, 616), (600, 616), (1_000, 1_476), (1_400, 1_476)] {
            let us = low.median_own_firewall_idle_us(lost_ms * 1000);
            // A step of the timer wheel at HZ 1000 is 8 ms, or 64 ms from half a second on.
            assert!(us.abs_diff(ms * 1000) <= 32_000, "{lost_ms}: {us}");
        }
        // Otherwise the peer's retransmission comes first.
        for us in [10_000, 50_000, 100_000] {
            assert_eq!(low.median_own_firewall_idle_us(us), low.median_idle_us(us));
        }
    }

    #[test]
    fn median_idle_splits_phases_in_half() {
        let near = LinuxTimers::near(HZ, SRTT_US);
        for disruption_us in [1_000, 500_000, 3_000_000, 20_000_000] {
            let median = near.median_idle_us(disruption_us);
            let all = (0..512).map(|begin| near.idle_us(disruption_us, begin));
            let (below, above) = all.fold((0, 0), |(below, above), us| {
                (
                    below + u32::from(us < median),
                    above + u32::from(us > median),
                )
            });
            assert!(below <= 256 && above <= 256, "{below} {above}");
        }
    }

    const HZ: u64 = 250;
    /// The smoothed RTT of a veth, microseconds.
    const SRTT_US: u64 = 100;

    /// Gaps in milliseconds.
    fn gaps(kernel: LinuxTimers, begin: u64, count: usize) -> Vec<u64> {
        let mut before = 0;
        let times = kernel.times(begin).take(count);
        times
            .map(|now| {
                let gap = (now - before) * 1000 / kernel.hz;
                before = now;
                gap
            })
            .collect()
    }

    /// Measured on Linux 6.18, HZ 250: 100 bytes into a black hole; the first gap is the probe's.
    #[test]
    fn measured_retransmission_gaps_match() {
        let near = LinuxTimers::near(HZ, SRTT_US);
        let low = near.with_rto_min(8_000);
        let one_second = LinuxTimers {
            rto_max_us: 1_000_000,
            ..near
        };
        for (kernel, measured) in [
            (near, &[207, 208, 440, 832, 1664, 3424][..]),
            (low, &[13, 16, 28, 52, 100, 196, 412, 800]),
            (
                low.thin(),
                &[13, 16, 16, 16, 16, 16, 16, 16, 28, 52, 100, 196, 408, 800],
            ),
            (one_second, &[207, 208, 440, 832, 1024, 1024]),
        ] {
            let modelled = gaps(kernel, 0, measured.len());
            for (modelled, measured) in modelled.iter().zip(measured) {
                // A step of the wheel's level, as the run began within one, and a jiffy.
                let step = wheel::step(measured * HZ / 1000) * 1000 / HZ;
                let tolerance = step + 1000 / HZ;
                assert!(
                    modelled.abs_diff(*measured) <= tolerance,
                    "{modelled} vs {measured} ms of {kernel:?}"
                );
            }
        }
    }

    #[test]
    fn measured_rtos_match() {
        let near = LinuxTimers::near(HZ, SRTT_US);
        // 204, 12 and 56 ms, as ss(8) shows them.
        for (rto_min_us, ms) in [(200_000, 204), (8_000, 12), (50_000, 56)] {
            assert_eq!(near.with_rto_min(rto_min_us).rto() * 1000 / HZ, ms);
        }
        // On an unsteady path the variation determines the RTO.
        let unsteady = LinuxTimers {
            rttvar_us: 40_000,
            ..near.with_rto_min(8_000)
        };
        assert_eq!(unsteady.rto() * 1000 / HZ, 44);
    }

    #[test]
    fn probe_fires_no_later_than_rto() {
        let near = LinuxTimers::near(HZ, SRTT_US);
        assert_eq!(near.probe(), Some(near.rto()));
        let far = LinuxTimers::near(HZ, 300_000).with_rto_min(8_000);
        assert_eq!(far.probe(), Some(far.rto()));
        let without = LinuxTimers {
            probe_after_us: None,
            ..near
        };
        assert_eq!(without.probe(), None);
        assert_eq!(gaps(without, 0, 3), [208, 432, 832]);
    }

    proptest! {
        #[test]
        fn retransmission_is_never_before_its_timer(
            hz in prop::sample::select(vec![100u64, 250, 300, 1000]),
            rto_min_us in 1_000u64..200_000,
            srtt_us in 10u64..400_000,
            begin in 0u64..1000,
            thin: bool,
        ) {
            let near = LinuxTimers::near(hz, srtt_us).with_rto_min(rto_min_us);
            let kernel = if thin { near.thin() } else { near };
            // Each timer is set when the previous one fires.
            let mut due = 0;
            for (time, timer) in kernel.times(begin).zip(kernel.timers()).take(12) {
                due += timer;
                prop_assert!(time > due);
            }
        }
    }
}
