//! The budget where copies do harm: a server that takes only so many SYNs, and outages.

use std::{cmp::Reverse, collections::BinaryHeap};

use rand::{SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::brake::Budget;

use super::{handshake::Schedule, host::HZ, path::exponential};

/// A connection that takes longer is late, microseconds: neither a short timer nor a round trip does.
const LATE_US: f64 = 500_000.0;
/// Of the path, microseconds.
const RTT_US: f64 = 10_000.0;
/// So many SYNs at once are answered after an idle time.
const BURST: f64 = 10.0;

/// What happens to SYNs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// A relay drops SYNs beyond so many a second.
    Limit {
        /// SYNs a second.
        per_s: f64,
    },
    /// All are lost for a time.
    Blackout {
        /// Seconds since the beginning.
        from_s: f64,
        /// Seconds since the beginning.
        to_s: f64,
    },
}

/// Whose timer connections have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// The kernel's own.
    Kernel,
    /// A policy's, jiffies.
    Fixed(u64),
    /// The same with a budget.
    Budgeted(u64),
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Connection attempts.
    pub attempts: u64,
    /// SYNs, first ones and copies.
    pub syns: u64,
    /// Attempts that were not established within 500 ms.
    pub late: u64,
}

impl Sums {
    /// SYNs sent for each attempt.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of some minutes")]
    pub fn syns_per_attempt(&self) -> f64 {
        self.syns as f64 / self.attempts.max(1) as f64
    }

    /// Of the attempts, 0 to 1.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of some minutes")]
    pub fn late_share(&self) -> f64 {
        self.late as f64 / self.attempts.max(1) as f64
    }
}

/// Connections at a rate for so long, and what follows of them in the same time.
#[must_use]
pub fn run(trouble: Trouble, timers: Timers, per_s: f64, seconds: f64, seed: u64) -> Sums {
    let hz = u64::from(HZ);
    let kernel = Schedule::new(hz, hz);
    let (own, mut budget) = match timers {
        Timers::Kernel => (None, None),
        Timers::Fixed(jiffies) => (Some(Schedule::new(jiffies, hz)), None),
        Timers::Budgeted(jiffies) => {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "some hundred"
            )]
            let capacity = Budget::capacity_for(per_s as u32);
            (
                Some(Schedule::new(jiffies, hz)),
                Some(Budget::full(capacity)),
            )
        }
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sums = Sums::default();
    let (mut tokens, mut filled_us) = (BURST, 0.0);
    // Of SYNs to be sent: when (nanoseconds, as floats have no order), since when, which, and by which timer.
    let mut due: BinaryHeap<Reverse<(u64, u64, usize, bool)>> = BinaryHeap::new();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "some minutes"
    )]
    let ns = |us: f64| (us * 1e3) as u64;
    let mut next_us = 0.0;
    let end_us = seconds * 1e6;
    loop {
        let retransmits = due
            .peek()
            .is_some_and(|Reverse((at, ..))| *at <= ns(next_us));
        let (at_ns, begun_ns, n, is_own) = if retransmits {
            let Some(Reverse(syn)) = due.pop() else { break };
            syn
        } else {
            if next_us >= end_us {
                break;
            }
            let at = ns(next_us);
            next_us += exponential(&mut rng) / per_s * 1e6;
            let is_own = budget.as_mut().is_none_or(Budget::attempt);
            sums.attempts += 1;
            (at, at, 0, is_own)
        };
        if n > 0
            && let Some(budget) = &mut budget
        {
            budget.copy();
        }
        sums.syns += 1;
        #[expect(clippy::cast_precision_loss, reason = "some minutes")]
        let (at_us, begun_us) = (at_ns as f64 / 1e3, begun_ns as f64 / 1e3);
        let lost = match trouble {
            Trouble::Limit { per_s } => {
                tokens = (tokens + (at_us - filled_us) / 1e6 * per_s).min(BURST);
                filled_us = at_us;
                let lost = tokens < 1.0;
                if !lost {
                    tokens -= 1.0;
                }
                lost
            }
            Trouble::Blackout { from_s, to_s } => (from_s * 1e6..to_s * 1e6).contains(&at_us),
        };
        let took_us = at_us + RTT_US - begun_us;
        if !lost {
            sums.late += u64::from(took_us > LATE_US);
            continue;
        }
        let schedule = own.as_ref().filter(|_| is_own).unwrap_or(&kernel);
        let again_us = schedule.sent_us.get(n + 1).map(|us| begun_us + us);
        match again_us.filter(|us| *us < end_us) {
            Some(us) => due.push(Reverse((ns(us), begun_ns, n + 1, is_own))),
            None => sums.late += 1,
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_trouble_every_attempt_is_one_syn() {
        let trouble = Trouble::Limit { per_s: 1e6 };
        for timers in [Timers::Kernel, Timers::Fixed(6), Timers::Budgeted(6)] {
            let sums = run(trouble, timers, 100.0, 20.0, 1);
            assert_eq!((sums.syns, sums.late), (sums.attempts, 0));
            assert!(sums.attempts.abs_diff(2_000) < 200);
        }
    }

    #[test]
    fn in_an_outage_a_short_timer_sends_more_and_finds_its_end_sooner() {
        let trouble = Trouble::Blackout {
            from_s: 5.0,
            to_s: 5.3,
        };
        let kernel = run(trouble, Timers::Kernel, 100.0, 20.0, 1);
        let fixed = run(trouble, Timers::Fixed(6), 100.0, 20.0, 1);
        assert!(fixed.syns > kernel.syns);
        assert!(fixed.late < 5 && kernel.late > 20, "{fixed:?} {kernel:?}");
    }
}
