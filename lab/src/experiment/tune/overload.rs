//! The budget in situations where copies do harm: a server with limited capacity for SYNs, and outages.

use rand::{SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::tune::budget;

use super::{
    CONNECTIONS, agenda::Agenda, brakes::Brakes, handshake::Schedule, host::HZ, path::exponential,
};
use crate::summary::share;

/// A connection that takes longer is late, microseconds: longer than a short timer or a round trip.
const LATE_US: f64 = 500_000.0;
/// RTT of the path, microseconds.
const RTT_US: f64 = 10_000.0;
/// Start of a stall, microseconds.
const STALL_US: f64 = 10e6;
/// The disturbance of SYNs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// A server answers this many SYNs per second, copies as well as first ones, and drops SYNs when its queue is full.
    Limit {
        /// SYNs per second.
        per_s: f64,
        /// Length of the queue, SYNs.
        queue: f64,
        /// After ten seconds it answers nothing for this time; seconds.
        stall_s: f64,
    },
    /// All SYNs are lost for a time.
    Blackout {
        /// Seconds since the beginning.
        from_s: f64,
        /// Seconds since the beginning.
        to_s: f64,
    },
}

/// The timer of the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// The kernel's own.
    Kernel,
    /// A policy's, jiffies.
    Fixed(u64),
    /// The same with a budget: this many connections pay for a copy (10 in the program).
    Budgeted(u64, u32),
}

/// The results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Connection attempts.
    pub attempts: u64,
    /// SYNs, first ones and copies.
    pub syns: u64,
    /// Attempts that were established within 500 ms.
    pub in_time: u64,
    /// Attempts of the second half, except its last second.
    pub later_attempts: u64,
    /// Later attempts that were established within 500 ms.
    pub later_in_time: u64,
}

impl Sums {
    /// SYNs sent per attempt.
    pub fn syns_per_attempt(&self) -> f64 {
        share(self.syns, self.attempts)
    }

    /// Share of the attempts that were not established within 500 ms, 0 to 1.
    pub fn late_share(&self) -> f64 {
        1.0 - share(self.in_time, self.attempts)
    }

    /// The same for the attempts of the second half.
    pub fn later_late_share(&self) -> f64 {
        1.0 - share(self.later_in_time, self.later_attempts)
    }
}

/// The simulated budget with any price: it is credited more or less often.
#[derive(Clone, Copy, Debug)]
struct Account {
    brakes: Brakes,
    connections: u32,
    /// Fractions of a credit.
    due: u32,
}

impl Account {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "some thousand"
    )]
    fn new(per_s: f64, connections: u32) -> Self {
        Self {
            brakes: Brakes::new(budget::for_peak(per_s as u64)),
            connections: connections.max(1),
            due: 0,
        }
    }

    fn established(&mut self) {
        self.due += CONNECTIONS;
        while self.due >= self.connections {
            self.due -= self.connections;
            self.brakes.established();
        }
    }
}

/// Connections at a rate for this time, and their results within the same time.
pub fn run(trouble: Trouble, timers: Timers, per_s: f64, seconds: f64, seed: u64) -> Sums {
    let hz = u64::from(HZ);
    let kernel = Schedule::new(hz, hz);
    let own = |jiffies| Some(Schedule::new(jiffies, hz));
    let (own, mut account) = match timers {
        Timers::Kernel => (None, None),
        Timers::Fixed(jiffies) => (own(jiffies), None),
        Timers::Budgeted(jiffies, connections) => {
            (own(jiffies), Some(Account::new(per_s, connections)))
        }
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sums = Sums::default();
    // The server is busy until this time.
    let mut busy_us = 0.0_f64;
    let mut due: Agenda<What> = Agenda::new();
    let mut next_us = 0.0;
    let end_us = seconds * 1e6;
    let later_us = end_us / 2.0..end_us - 1e6;
    loop {
        let (at_us, mut syn) = match due.take_until(next_us) {
            Some((at_us, What::Syn(again))) => (at_us, again),
            Some((_, What::Established)) => {
                if let Some(account) = &mut account {
                    account.established();
                }
                continue;
            }
            None if next_us >= end_us => break,
            None => {
                let at_us = next_us;
                next_us += exponential(&mut rng) / per_s * 1e6;
                sums.attempts += 1;
                sums.later_attempts += u64::from(later_us.contains(&at_us));
                let first = Syn {
                    begun_us: at_us,
                    n: 0,
                    is_own: !account.is_some_and(|account| account.brakes.is_throttled()),
                    answer_us: f64::INFINITY,
                };
                (at_us, first)
            }
        };
        if syn.answer_us <= at_us {
            continue;
        }
        sums.syns += 1;
        if let Some(account) = account.as_mut().filter(|_| syn.n > 0) {
            account.brakes.retransmitted();
        }
        let answer_us = match trouble {
            Trouble::Limit {
                per_s,
                queue,
                stall_s,
            } => {
                let stall_us = STALL_US..STALL_US + stall_s * 1e6;
                if stall_us.contains(&at_us) {
                    busy_us = busy_us.max(stall_us.end);
                }
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
            let in_time = u64::from(answer_us - syn.begun_us <= LATE_US);
            sums.in_time += in_time;
            if later_us.contains(&syn.begun_us) {
                sums.later_in_time += in_time;
            }
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

/// A pending event.
#[derive(Clone, Copy, Debug)]
enum What {
    Syn(Syn),
    /// An answer arrives.
    Established,
}

/// A SYN to send; all times, including its send time, are microseconds since the start.
#[derive(Clone, Copy, Debug)]
struct Syn {
    /// Send time of the connection's first SYN.
    begun_us: f64,
    /// Its number in the connection.
    n: usize,
    is_own: bool,
    /// Arrival time of the answer to an earlier SYN.
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
            stall_s: 0.0,
        };
        for timers in [
            Timers::Kernel,
            Timers::Fixed(6),
            Timers::Budgeted(6, CONNECTIONS),
        ] {
            let sums = run(trouble, timers, 100.0, 20.0, 1);
            assert_eq!((sums.syns, sums.in_time), (sums.attempts, sums.attempts));
            assert_eq!(sums.later_in_time, sums.later_attempts);
            assert!(sums.later_attempts.abs_diff(900) < 150);
            assert!(sums.attempts.abs_diff(2_000) < 200);
        }
    }

    #[test]
    fn short_timer_in_outage_connects_earlier() {
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

    #[test]
    fn the_cheaper_a_copy_the_more_are_sent() {
        let trouble = Trouble::Limit {
            per_s: 100.0,
            queue: 40.0,
            stall_s: 0.3,
        };
        let with = |connections| run(trouble, Timers::Budgeted(6, connections), 90.0, 40.0, 1);
        let own = with(CONNECTIONS);
        // With 2 connections per copy the budget is five times as cheap, with 20 twice as dear.
        assert!(with(2).syns > own.syns && with(20).syns < own.syns);
        // More attempts are late than with the kernel's timer, with which the server has recovered
        // from the stall.
        let kernel = run(trouble, Timers::Kernel, 90.0, 40.0, 1);
        assert_eq!(kernel.later_late_share(), 0.0);
        assert!(with(2).later_late_share() > 0.1);
    }
}
