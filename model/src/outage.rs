//! connect() in an outage of any length: when SYNs are sent, with and without the agent.
//!
//! All SYNs are lost from the first one until the outage ends. The first SYN after the end connects, so a host that
//! sends a SYN just before the end waits for the whole next interval. There are three schedules:
//!
//! - the kernel's own: a SYN each second for `tcp_syn_linear_timeouts` timeouts (Linux 6.5), then doubling,
//! - the agent's ([`rto_agent_common::syn`]), which the eBPF program computes with the same function,
//! - a shorter initial RTO that doubles likewise, on a kernel whose intervals the program cannot shape.
//!
//! Timers fire at steps of the timer wheel ([`crate::wheel`]). The position of connect() between two steps matters, so
//! comparisons are averages over [`PHASES`] positions.

use std::ops::Range;

use rto_agent_common::syn::{Attempt, Fired, Timeouts};
use serde::Serialize;

mod rto_min;

pub use self::rto_min::{DATA_OUTAGES_MS, compare_rto_min};

use crate::{syn::SynSchedule, wheel};

/// Number of positions in the timer wheel's steps that a comparison covers.
pub const PHASES: u64 = 16;
/// Jiffies between two positions; odd, so that they differ in the steps of every level.
const PHASE_JIFFIES: u64 = 157;
/// A smaller delay of connect() does not count as late, milliseconds.
const LATE_MS: u64 = 250;
/// Nor does a delay below 1/20 of the outage.
const LATE_PART: u64 = 20;

/// The timers of a connecting socket. Initial RTOs are in jiffies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// The kernel's timers: one second.
    Kernel,
    /// The agent's schedule with this initial RTO.
    Scheduled(u64),
    /// A shorter initial RTO, which doubles after the linear phase: the kernel lacks `syn-schedule`.
    Doubling(u64),
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
    /// The SYNs of an unanswered connect() whose first timer is armed in jiffy `begin`, in jiffies since the first.
    pub fn syns(&self, timers: Timers, begin: u64) -> SynSchedule {
        // The limit only matters once the program goes.
        self.run(timers, begin, false)
    }

    /// The same; `is_held`: the program limits the doubled interval (Linux 6.15).
    fn run(&self, timers: Timers, begin: u64, is_held: bool) -> SynSchedule {
        let (initial_rto, is_shaped) = match timers {
            Timers::Kernel => (self.hz, None),
            Timers::Scheduled(initial_rto) => (initial_rto.max(1), Some(true)),
            Timers::Doubling(initial_rto) => (initial_rto.max(1), Some(false)),
        };
        let kernel = Timeouts::kernel(
            short(self.hz),
            self.syn_retries.into(),
            self.linear_timeouts.into(),
        );
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let start = begin as u32;
        let gives_up = kernel.gives_up(start);
        let mut attempt = Attempt { start, answered: 0 };
        let (mut now, mut rto, mut timer) = (0, initial_rto, initial_rto);
        let mut retries = kernel.retries;
        let mut sent = vec![0];
        for retransmits in 0.. {
            now = wheel::fires_at(begin + now, timer) - begin;
            // The time has one second also for a shorter initial RTO: the program replies with the kernel's own value
            // once a SYN is retransmitted.
            if (Timeouts { retries, ..kernel }).has_ended(retransmits, short(now)) {
                break;
            }
            sent.push(now);
            let fired = Fired {
                now: short(now),
                initial_rto: short(initial_rto),
                rto: short(rto),
                rto_max: kernel.rto_max,
                retransmits,
                gives_up,
                is_shaped: is_shaped == Some(true),
                is_held,
            };
            let slots = kernel.slots(start, fired.now);
            if retransmits >= kernel.linear {
                let hold = if is_held {
                    kernel.hold(slots.passed)
                } else {
                    u32::MAX
                };
                rto = (rto * 2).min(hold.min(kernel.rto_max).into());
            }
            timer = rto;
            if is_shaped.is_some() {
                let next = attempt.next(&kernel, &fired, slots);
                retries = next.retries;
                if next.timer != 0 {
                    timer = next.timer.into();
                }
            }
        }
        SynSchedule {
            sent,
            gives_up: now,
        }
    }
}

/// Times of an attempt are some minutes.
fn short(jiffies: u64) -> u32 {
    u32::try_from(jiffies).unwrap_or(u32::MAX >> 1)
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
