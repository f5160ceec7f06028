//! Situations in which retransmissions could do harm: a server with limited capacity for SYNs, and outages.

use std::ops::Range;

use rand::{SeedableRng as _, rngs::ChaCha8Rng};

use super::{
    agenda::Agenda, fallbacks::Fallbacks, handshake::Schedule, host::HZ, path::exponential,
};
use crate::summary::{f, share};

/// A connection that takes longer is late, microseconds: longer than a short timer or a round trip.
const LATE_US: f64 = 500_000.0;
/// RTT of the path, microseconds.
const RTT_US: f64 = 3_000.0;
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
    /// A policy's, jiffies, with `guard = "off"`.
    Bare(u64),
    /// The same with `guard = "on"`.
    Guarded(u64),
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
    /// Attempts that began in the outage.
    pub in_outage: u64,
    /// SYNs of these.
    pub outage_syns: u64,
    /// Connect times of these, microseconds.
    pub outage_us: f64,
}

impl Sums {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            attempts: self.attempts + other.attempts,
            syns: self.syns + other.syns,
            in_time: self.in_time + other.in_time,
            later_attempts: self.later_attempts + other.later_attempts,
            later_in_time: self.later_in_time + other.later_in_time,
            in_outage: self.in_outage + other.in_outage,
            outage_syns: self.outage_syns + other.outage_syns,
            outage_us: self.outage_us + other.outage_us,
        }
    }

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

    /// Mean connect time of attempts that began in the outage, milliseconds.
    pub fn outage_ms(&self) -> f64 {
        self.outage_us / f(self.in_outage.max(1)) / 1000.0
    }
}

/// Connections at a rate for this time, and their results within the same time.
pub fn run(trouble: Trouble, timers: Timers, per_s: f64, seconds: f64, seed: u64) -> Sums {
    let hz = u64::from(HZ);
    let kernel = Schedule::new(hz, hz);
    let (own, mut fallbacks) = match timers {
        Timers::Kernel => (None, None),
        Timers::Bare(jiffies) => (Some(Schedule::new(jiffies, hz)), None),
        Timers::Guarded(jiffies) => (Some(Schedule::new(jiffies, hz)), Some(Fallbacks::default())),
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sums = Sums::default();
    let mut server = Server {
        trouble,
        busy_us: 0.0,
    };
    let mut due: Agenda<What> = Agenda::new();
    let mut next_us = 0.0;
    let end_us = seconds * 1e6;
    let later_us = end_us / 2.0..end_us - 1e6;
    loop {
        let (at_us, mut syn) = match due.take_until(next_us) {
            Some((at_us, What::Syn(again))) => (at_us, again),
            Some((_, what)) => {
                if let Some(fallbacks) = &mut fallbacks {
                    match what {
                        What::Established { clean } => fallbacks.established(clean),
                        What::Spurious | What::Syn(_) => fallbacks.spurious(),
                    }
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
                    is_own: !fallbacks.is_some_and(|fallbacks| fallbacks.holds(at_us)),
                    answer_us: f64::INFINITY,
                    is_spurious: false,
                };
                (at_us, first)
            }
        };
        if syn.answer_us <= at_us {
            continue;
        }
        let in_outage = server.outage_us().contains(&syn.begun_us);
        sums.syns += 1;
        sums.outage_syns += u64::from(in_outage);
        if let Some(fallbacks) = fallbacks.as_mut().filter(|_| syn.n == 1) {
            fallbacks.first_syn_lost(at_us);
        }
        // An earlier SYN waits in the server's queue.
        if syn.answer_us.is_finite() && syn.is_own && !syn.is_spurious {
            syn.is_spurious = true;
            due.add(syn.answer_us + 3.0 * RTT_US, What::Spurious);
        }
        let answer_us = server.answer_us(at_us);
        if let Some(answer_us) = answer_us.filter(|_| syn.answer_us.is_infinite()) {
            syn.answer_us = answer_us;
            due.add(answer_us, What::Established { clean: syn.n == 0 });
            let in_time = u64::from(answer_us - syn.begun_us <= LATE_US);
            sums.in_time += in_time;
            if later_us.contains(&syn.begun_us) {
                sums.later_in_time += in_time;
            }
            if in_outage {
                sums.in_outage += 1;
                sums.outage_us += answer_us - syn.begun_us;
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

/// The server, or the path to it.
#[derive(Debug)]
struct Server {
    trouble: Trouble,
    /// The server is busy until this time.
    busy_us: f64,
}

impl Server {
    fn outage_us(&self) -> Range<f64> {
        match self.trouble {
            Trouble::Blackout { from_s, to_s } => from_s * 1e6..to_s * 1e6,
            Trouble::Limit { .. } => 0.0..0.0,
        }
    }

    /// When the answer to a SYN arrives; `None`: never.
    fn answer_us(&mut self, at_us: f64) -> Option<f64> {
        match self.trouble {
            Trouble::Limit {
                per_s,
                queue,
                stall_s,
            } => {
                let stall_us = STALL_US..STALL_US + stall_s * 1e6;
                if stall_us.contains(&at_us) {
                    self.busy_us = self.busy_us.max(stall_us.end);
                }
                let waits_us = (self.busy_us - at_us).max(0.0);
                (waits_us * per_s / 1e6 < queue).then(|| {
                    self.busy_us = at_us + waits_us + 1e6 / per_s;
                    self.busy_us + RTT_US
                })
            }
            Trouble::Blackout { .. } => {
                (!self.outage_us().contains(&at_us)).then_some(at_us + RTT_US)
            }
        }
    }
}

/// A pending event.
#[derive(Clone, Copy, Debug)]
enum What {
    Syn(Syn),
    /// An answer arrives; `clean`: to the first SYN.
    Established {
        clean: bool,
    },
    /// A connection's later round trips show that it had a spurious copy.
    Spurious,
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
    /// An earlier copy was spurious.
    is_spurious: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_without_loss_sends_one_syn() {
        let trouble = Trouble::Limit {
            per_s: 1e6,
            queue: 10.0,
            stall_s: 0.0,
        };
        for timers in [Timers::Kernel, Timers::Bare(6), Timers::Guarded(6)] {
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
        let bare = run(trouble, Timers::Bare(6), 100.0, 20.0, 1);
        assert!(bare.syns > kernel.syns);
        assert!(
            bare.late_share() < 0.003 && kernel.late_share() > 0.01,
            "{bare:?} {kernel:?}"
        );
        assert_eq!(run(trouble, Timers::Guarded(6), 100.0, 20.0, 1), bare);
    }
}
