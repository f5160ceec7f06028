//! connect() in an outage of any length: when SYNs are sent, with and without the agent.
//!
//! All SYNs are lost from the first one until the outage ends. The first SYN after the end connects, so a host that
//! sends a SYN just before the end waits for the whole next interval. There are three schedules:
//!
//! - the kernel's own: a SYN each second for `tcp_syn_linear_timeouts` timeouts (Linux 6.5), then doubling,
//! - a shorter initial RTO that doubles likewise, which is all that is possible before Linux 6.15,
//! - the same, with each interval capped by TCP_RTO_MAX_MS so that a SYN follows just after the next slot of the
//!   kernel's own schedule (Linux 6.15 and later).
//!
//! Timers fire at steps of the timer wheel ([`crate::wheel`]). The position of connect() between two steps matters, so
//! comparisons are averages over [`PHASES`] positions.

use std::{iter, ops::Range};

use serde::Serialize;

mod steps;

pub use self::steps::{DATA_OUTAGES_MS, compare_rto_min, in_step, rto_min_in_step};

use crate::{
    syn::{RTO_MAX_S, SynSchedule, SynTimers, model_timeout},
    wheel,
};

/// Number of positions in the timer wheel's steps that a comparison covers.
pub const PHASES: u64 = 16;
/// Jiffies between two positions; odd, so that they differ in the steps of every level.
const PHASE_JIFFIES: u64 = 157;
/// `TCP_RTO_MAX_MIN_SEC`: the smallest value of TCP_RTO_MAX_MS (include/net/tcp.h, Linux 6.15).
const RTO_MAX_LEAST_MS: u64 = 1_000;
/// A SYN is aimed at this many thousandths of a slot's time, because timers of seconds fire late; later below HZ 250.
const fn slot_permille(hz: u64) -> u64 {
    if hz < 250 { 1_050 } else { 1_040 }
}
/// Shortest time to a slot that is aimed at, milliseconds.
const MARGIN_MS: u64 = 20;
/// A smaller delay of connect() does not count as late, milliseconds.
const LATE_MS: u64 = 250;
/// Nor does a delay below 1/20 of the outage.
const LATE_PART: u64 = 20;
/// A value is in step if less than this share of the outages up to [`IN_STEP_MS`] are late.
pub const IN_STEP_LATE: f64 = 0.015;
/// The longest outage that is considered for that, milliseconds.
pub const IN_STEP_MS: u64 = 30_000;

/// The timers of a connecting socket. Initial RTOs are in jiffies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// The kernel's timers: one second.
    Kernel,
    /// A shorter initial RTO, which doubles after the linear phase.
    Doubling(u64),
    /// The same, with intervals capped by TCP_RTO_MAX_MS.
    Capped(u64),
}

/// The parameters of SYN schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    /// Jiffies per second.
    pub hz: u64,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub linear_timeouts: u8,
    /// TCP_SYNCNT, or `net.ipv4.tcp_syn_retries`.
    pub syn_retries: u8,
}

impl Host {
    /// The SYNs of an unanswered connect() in jiffy `begin`, in jiffies since the first.
    ///
    /// With the agent it gives up when the kernel alone would with exact timers (TCP_USER_TIMEOUT).
    pub fn syns(&self, timers: Timers, begin: u64) -> SynSchedule {
        let kernel = SynTimers::kernel(self.hz, self.syn_retries, self.linear_timeouts);
        let linear = u64::from(self.linear_timeouts);
        let (initial_rto, most, limit) = match timers {
            Timers::Kernel => (
                self.hz,
                linear + u64::from(self.syn_retries),
                model_timeout(self.hz, kernel.rto_max, self.syn_retries),
            ),
            Timers::Doubling(initial_rto) | Timers::Capped(initial_rto) => {
                (initial_rto.max(1), u64::MAX, kernel.gives_up())
            }
        };
        let mut sent = vec![0];
        let (mut now, mut rto, mut cap) = (begin, initial_rto, kernel.rto_max);
        for retransmits in 0.. {
            now = wheel::fires_at(now, rto.min(cap));
            let elapsed = now - begin;
            // `tcp_write_timeout()`: the time limit applies only after the first retransmission.
            if retransmits >= most || (retransmits > 0 && elapsed >= limit) {
                break;
            }
            sent.push(elapsed);
            // RTO_CB runs before the kernel doubles `icsk_rto` (`tcp_retransmit_timer()`, 6.15), so the cap set here
            // applies to the next interval.
            if matches!(timers, Timers::Capped(_)) {
                cap = self.cap(elapsed);
            }
            if retransmits >= linear {
                rto = (rto * 2).min(cap);
            }
        }
        let gives_up = match timers {
            Timers::Kernel => now - begin,
            Timers::Doubling(_) | Timers::Capped(_) => limit,
        };
        SynSchedule { sent, gives_up }
    }

    /// TCP_RTO_MAX_MS as the program sets it at this time after the first SYN, jiffies.
    fn cap(&self, elapsed: u64) -> u64 {
        let elapsed_ms = elapsed * 1_000 / self.hz;
        let aims = self.slots_s().map(|slot_s| slot_s * slot_permille(self.hz));
        let mut ahead = aims.filter(|aim_ms| *aim_ms > elapsed_ms + MARGIN_MS);
        let cap_ms = ahead
            .next()
            .map_or(RTO_MAX_S * 1_000, |aim_ms| aim_ms - elapsed_ms);
        // `msecs_to_jiffies()` rounds up.
        (cap_ms.max(RTO_MAX_LEAST_MS) * self.hz).div_ceil(1_000)
    }

    /// When the kernel alone would retransmit its SYN, seconds: first each second, then doubling up to `TCP_RTO_MAX`.
    fn slots_s(&self) -> impl Iterator<Item = u64> + use<> {
        let linear = iter::repeat_n(1, self.linear_timeouts.into());
        let doubled = iter::successors(Some(1), |gap| Some((gap * 2).min(RTO_MAX_S)));
        linear.chain(doubled).scan(0, |at, gap| {
            *at += gap;
            Some(*at)
        })
    }
}

/// The first of the ascending `times` at or after the end of an outage, in the same unit. `None` if the last one is
/// lost as well.
pub fn first_from(times: &[u64], outage: u64) -> Option<u64> {
    let lost = times.partition_point(|time| *time < outage);
    times.get(lost).copied()
}

/// The longest delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Worst {
    /// How much later than with the kernel's timers, milliseconds.
    pub later_ms: u64,
    /// It affects outages longer than this, milliseconds,
    pub from_ms: u64,
    /// and up to this, milliseconds.
    pub to_ms: u64,
}

/// A comparison of timers with the kernel's, over all outages in a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The mean difference, milliseconds; negative: earlier.
    pub mean_ms: f64,
    /// The share of outages, 0 to 1, in which connect() is late by more than max(0.25 s, 5 % of the outage).
    pub late: f64,
    /// The longest delay; all zero without delays.
    pub worst: Worst,
    /// The longest delay among these late outages; all zero if none is late.
    pub worst_late: Worst,
    /// The number of retransmitted SYNs in the longest outage, relative to the kernel's.
    pub copies: f64,
}

/// Compares pairs of schedules, (kernel, other). Each has ascending times in jiffies, the last later than the longest
/// outage. Outages are jiffies, uniformly distributed over the range.
pub fn compare(pairs: &[(Vec<u64>, Vec<u64>)], outages: Range<u64>, hz: u64) -> Comparison {
    compare_by(pairs, outages, hz, LATE_MS)
}

/// The same with a different threshold below which nothing is late, milliseconds.
fn compare_by(
    pairs: &[(Vec<u64>, Vec<u64>)],
    outages: Range<u64>,
    hz: u64,
    late_ms: u64,
) -> Comparison {
    let ms = |jiffies: u64| jiffies * 1_000 / hz;
    let (mut sum, mut late, mut all) = (0.0, 0, 0);
    let (mut copies, mut kernels_copies) = (0, 0);
    let (mut worst, mut worst_late) = (Worst::default(), Worst::default());
    for (kernel, other) in pairs {
        kernels_copies += kernel.partition_point(|time| *time < outages.end);
        copies += other.partition_point(|time| *time < outages.end);
        let mut from = outages.start;
        // All outages longer than `from`, up to the next time in either schedule, take equally long.
        while from < outages.end
            && let (Some(own), Some(with)) =
                (first_from(kernel, from + 1), first_from(other, from + 1))
        {
            let to = own.min(with).min(outages.end);
            all += to - from;
            sum += (with as f64 - own as f64) * (to - from) as f64;
            let later = with.saturating_sub(own);
            let delay = |to| Worst {
                later_ms: ms(later),
                from_ms: ms(from),
                to_ms: ms(to),
            };
            worst = worst.max(delay(to));
            // Up to this outage the delay exceeds that share of it.
            let late_to = (later * LATE_PART).min(to);
            if ms(later) > late_ms && late_to > from {
                late += late_to - from;
                worst_late = worst_late.max(delay(late_to));
            }
            from = to;
        }
    }
    let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
    Comparison {
        mean_ms: share(sum * 1_000.0, (all * hz) as f64),
        late: share(late as f64, all as f64),
        worst,
        worst_late,
        copies: share(copies as f64, kernels_copies as f64),
    }
}

/// The nearest smaller and larger of the ascending `values`, not including the value itself.
pub fn nearest(values: &[u64], value: u64) -> (Option<u64>, Option<u64>) {
    let below = values.partition_point(|other| *other < value);
    let above = values.partition_point(|other| *other <= value);
    (values[..below].last().copied(), values.get(above).copied())
}

/// The [`PHASES`] jiffies in which connect() is called in a comparison.
pub fn phases() -> impl Iterator<Item = u64> {
    (0..PHASES).map(|phase| phase * PHASE_JIFFIES)
}

impl Worst {
    /// The longer delay; if both are equal, `self`.
    const fn max(self, other: Self) -> Self {
        if other.later_ms > self.later_ms {
            other
        } else {
            self
        }
    }
}

impl Host {
    /// Compares timers with the kernel's, over outages in a range of milliseconds in which SYNs are lost.
    pub fn compare(&self, timers: Timers, outages_ms: Range<u64>) -> Comparison {
        compare(&self.pairs(timers), self.jiffies(outages_ms), self.hz)
    }

    /// Whether connect() is late in few outages, so that the timers are in step with the kernel's slots.
    pub fn is_in_step(&self, timers: Timers) -> bool {
        self.compare(timers, 0..IN_STEP_MS).late < IN_STEP_LATE
    }

    fn pairs(&self, timers: Timers) -> Vec<(Vec<u64>, Vec<u64>)> {
        phases()
            .map(|begin| {
                (
                    self.syns(Timers::Kernel, begin).sent,
                    self.syns(timers, begin).sent,
                )
            })
            .collect()
    }

    fn jiffies(&self, ms: Range<u64>) -> Range<u64> {
        let jiffies = |ms: u64| ms * self.hz / 1_000;
        jiffies(ms.start)..jiffies(ms.end)
    }
}

#[cfg(test)]
mod tests;
