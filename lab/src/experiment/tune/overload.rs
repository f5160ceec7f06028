//! The budget where copies do harm: a server that takes only so many SYNs, and outages.

use rand::{SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::brake::Budget;

use super::{agenda::Agenda, handshake::Schedule, host::HZ, path::exponential};

/// A connection that takes longer is late, microseconds: neither a short timer nor a round trip does.
const LATE_US: f64 = 500_000.0;
/// Of the path, microseconds.
const RTT_US: f64 = 10_000.0;
/// What happens to SYNs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// A server answers so many SYNs a second, copies as well as first ones, and drops what its queue has no room for.
    Limit {
        /// SYNs a second.
        per_s: f64,
        /// SYNs that wait.
        queue: f64,
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
    /// Attempts that were established within 500 ms.
    pub in_time: u64,
}

impl Sums {
    /// SYNs sent for each attempt.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of some minutes")]
    pub fn syns_per_attempt(&self) -> f64 {
        self.syns as f64 / self.attempts.max(1) as f64
    }

    /// Of the attempts, those that were not established within 500 ms, 0 to 1.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of some minutes")]
    pub fn late_share(&self) -> f64 {
        1.0 - self.in_time as f64 / self.attempts.max(1) as f64
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
    // Until then the server has what to do.
    let mut busy_us = 0.0_f64;
    let mut due: Agenda<What> = Agenda::new();
    let mut next_us = 0.0;
    let end_us = seconds * 1e6;
    loop {
        let (at_us, mut syn) = match due.take_until(next_us) {
            Some((at_us, What::Syn(again))) => (at_us, again),
            Some((_, What::Established)) => {
                if let Some(budget) = &mut budget {
                    budget.established();
                }
                continue;
            }
            None if next_us >= end_us => break,
            None => {
                let at_us = next_us;
                next_us += exponential(&mut rng) / per_s * 1e6;
                sums.attempts += 1;
                let first = Syn {
                    begun_us: at_us,
                    n: 0,
                    is_own: !budget.is_some_and(|budget| budget.is_throttled()),
                    answer_us: f64::INFINITY,
                };
                (at_us, first)
            }
        };
        if syn.answer_us <= at_us {
            continue;
        }
        sums.syns += 1;
        if let Some(budget) = budget.as_mut().filter(|_| syn.n > 0) {
            budget.copies(1);
        }
        let answer_us = match trouble {
            Trouble::Limit { per_s, queue } => {
                let waits_us = (busy_us - at_us).max(0.0);
                (waits_us * per_s / 1e6 < queue).then(|| {
                    busy_us = at_us + waits_us + 1e6 / per_s;
                    busy_us + RTT_US
                })
            }
            Trouble::Blackout { from_s, to_s } => {
                let lost = (from_s * 1e6..to_s * 1e6).contains(&at_us);
                (!lost).then_some(at_us + RTT_US)
            }
        };
        if let Some(answer_us) = answer_us.filter(|_| syn.answer_us.is_infinite()) {
            syn.answer_us = answer_us;
            due.add(answer_us, What::Established);
            sums.in_time += u64::from(answer_us - syn.begun_us <= LATE_US);
        }
        let schedule = own.as_ref().filter(|_| syn.is_own).unwrap_or(&kernel);
        let again_us = schedule.sent_us.get(syn.n + 1).map(|us| syn.begun_us + us);
        if let Some(again_us) = again_us.filter(|us| *us < end_us) {
            syn.n += 1;
            due.add(again_us, What::Syn(syn));
        }
    }
    sums
}

/// What is due.
#[derive(Clone, Copy, Debug)]
enum What {
    Syn(Syn),
    /// An answer arrives.
    Established,
}

/// A SYN to be sent; times, also that of sending it, are microseconds since the beginning.
#[derive(Clone, Copy, Debug)]
struct Syn {
    /// When the first one was sent.
    begun_us: f64,
    /// Which one of the connection.
    n: usize,
    is_own: bool,
    /// When the answer to an earlier one arrives.
    answer_us: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_trouble_every_attempt_is_one_syn() {
        let trouble = Trouble::Limit {
            per_s: 1e6,
            queue: 10.0,
        };
        for timers in [Timers::Kernel, Timers::Fixed(6), Timers::Budgeted(6)] {
            let sums = run(trouble, timers, 100.0, 20.0, 1);
            assert_eq!((sums.syns, sums.in_time), (sums.attempts, sums.attempts));
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
        assert!(
            fixed.late_share() < 0.003 && kernel.late_share() > 0.01,
            "{fixed:?} {kernel:?}"
        );
    }
}
