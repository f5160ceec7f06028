//! Simulates a connect(): its SYNs, the host's knowledge of them, and the truth.
//!
//! The server answers each SYN that arrives; its own timer, at least 1 s, is omitted. Both ends have timestamps, and a
//! SYN-ACK echoes the first SYN that arrived (`req->ts_recent`, `tcp_check_req()`, Linux 6.12). SYNs are sent
//! when the program sends them, on the timer wheel. Verdicts follow `docs/reference/statistics.md`.

use rand::{RngExt as _, rngs::ChaCha8Rng};
use rto_model::outage::{Host, Timers};

use super::path::Path;

/// Number of RTTs after the handshake until a verdict.
const SLOW_RTTS: usize = 3;
/// Upper bound of a connection's RTTs.
const MOST_RTTS: u32 = 12;

/// The times at which SYNs are sent, microseconds since the first.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Each SYN.
    pub sent_us: Vec<f64>,
    /// The initial RTO.
    pub timer_us: f64,
}

impl Schedule {
    /// The schedule of an initial RTO in jiffies: the agent's, or the kernel's for a second.
    pub fn new(jiffies: u64, hz: u64) -> Self {
        let host = Host {
            hz,
            linear_timeouts: 4,
            syn_retries: 6,
        };
        let timers = match jiffies == hz {
            true => Timers::Kernel,
            false => Timers::Scheduled(jiffies),
        };
        let us = |jiffies: u64| jiffies as f64 * 1e6 / hz as f64;
        Self {
            sent_us: host.syns(timers, 0).sent.into_iter().map(us).collect(),
            timer_us: us(jiffies),
        }
    }
}

/// The host's verdict on a handshake.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Time of the verdict, microseconds since the first SYN.
    pub after_us: f64,
    /// Spurious copies.
    pub spurious: u32,
    /// The path RTT, microseconds.
    pub path_us: f64,
}

/// One connect().
#[derive(Clone, Debug, PartialEq)]
pub struct Handshake {
    /// Send times of the copies, microseconds since the first SYN.
    pub copies_us: Vec<f64>,
    /// The connect time, microseconds; `None`: it timed out.
    pub took_us: Option<f64>,
    /// Copies that were sent while an answer to the first SYN was under way: the timer is too short. (After a loss, the
    /// schedule may send one while the answer to a copy is under way, whatever the timer is.)
    pub spurious: u32,
    /// Number of the first SYN that was delivered and whose answer was: all before were lost. 0 if there was none.
    pub needed: usize,
    /// The host's verdict; `None` if the connection was not established, or ends before the verdict.
    pub verdict: Option<Verdict>,
}

impl Handshake {
    /// Simulates a connect() whose first SYN has the outcome `first`.
    pub(super) fn simulate(
        path: &Path,
        at_s: f64,
        peer: f64,
        schedule: &Schedule,
        first: First,
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let mut answer_us: Option<f64> = None;
        let mut needed = 0;
        // The SYN that the SYN-ACKs echo: its send time and arrival time.
        let mut echoed: Option<(f64, f64)> = None;
        let mut copies_us = Vec::new();
        let mut spurious = 0;
        for (n, &sent_us) in schedule.sent_us.iter().enumerate() {
            if answer_us.is_some_and(|end_us| end_us <= sent_us) {
                break;
            }
            if n > 0 {
                copies_us.push(sent_us);
                spurious += u32::from(answer_us.is_some() && needed == 0);
            }
            let (rtt_us, syn_lost, ack_lost) = if n == 0 {
                (first.rtt_us, first.syn_lost, first.ack_lost)
            } else {
                let sent_s = at_s + sent_us / 1e6;
                let rtt_us = path.rtt_us(sent_s, peer, rng);
                let loss = path.loss_at(sent_s);
                (
                    rtt_us,
                    rng.random::<f64>() < loss,
                    rng.random::<f64>() < loss,
                )
            };
            if syn_lost {
                continue;
            }
            let arrived_us = sent_us + rtt_us / 2.0;
            if echoed.is_none_or(|(_, earlier_us)| arrived_us < earlier_us) {
                echoed = Some((sent_us, arrived_us));
            }
            if ack_lost {
                continue;
            }
            let end_us = sent_us + rtt_us;
            match answer_us {
                None => (answer_us, needed) = (Some(end_us), n),
                Some(earlier_us) => answer_us = Some(earlier_us.min(end_us)),
            }
        }
        let verdict = answer_us.zip(echoed).and_then(|(end_us, (echoed_us, _))| {
            let copies = u32::try_from(copies_us.len()).unwrap_or(u32::MAX);
            let later = || path.rtt_us(at_s + end_us / 1e6, peer, rng);
            let rtt_us = end_us - echoed_us;
            judge(end_us, rtt_us, copies, schedule.timer_us, later, first.rtts)
        });
        Self {
            copies_us,
            took_us: answer_us,
            spurious,
            needed,
            verdict,
        }
    }
}

/// The random values of a handshake's first SYN.
#[derive(Clone, Copy, Debug)]
pub(super) struct First {
    /// Its round trip, microseconds.
    pub(super) rtt_us: f64,
    pub(super) syn_lost: bool,
    pub(super) ack_lost: bool,
    /// Number of the connection's RTTs after the handshake.
    pub(super) rtts: u32,
}

impl First {
    /// Draws the first SYN of a handshake that is lost, or whose timer is too short.
    pub(super) fn new(rtt_us: f64, lost: bool, rng: &mut ChaCha8Rng) -> Self {
        // Both directions lose equally often; both at once is rare.
        let syn_lost = lost && rng.random::<bool>();
        Self {
            rtt_us,
            syn_lost,
            ack_lost: lost && !syn_lost,
            rtts: rng.random::<u32>() % MOST_RTTS,
        }
    }
}

fn judge(
    took_us: f64,
    first_rtt_us: f64,
    copies: u32,
    timer_us: f64,
    mut later_us: impl FnMut() -> f64,
    rtts: u32,
) -> Option<Verdict> {
    let mut verdict = Verdict {
        after_us: took_us,
        spurious: 0,
        path_us: first_rtt_us,
    };
    // No copy was sent while the answer was under way.
    if copies == 0 || first_rtt_us < timer_us {
        return Some(verdict);
    }
    // The path is slow, or an answer was lost: undecided until there are later RTTs.
    if rtts == 0 {
        return None;
    }
    for _ in 0..SLOW_RTTS.min(rtts as usize) {
        let rtt_us = later_us();
        verdict.after_us += rtt_us;
        verdict.path_us = verdict.path_us.min(rtt_us);
        if rtt_us < timer_us {
            // The answer was lost, and every copy was needed.
            return Some(verdict);
        }
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast to an integer saturates"
    )]
    let fit = (verdict.path_us / timer_us) as u32;
    // A copy after the first one was answered.
    let needed = u32::from(took_us > verdict.path_us + timer_us / 2.0);
    verdict.spurious = copies.saturating_sub(needed).min(fit);
    if verdict.spurious == copies {
        verdict.path_us = took_us;
    }
    Some(verdict)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    const FIRST: First = First {
        rtt_us: 0.0,
        syn_lost: false,
        ack_lost: false,
        rtts: 5,
    };

    /// A handshake on a constant path, on which only the first SYN may be lost.
    fn one(rtt_us: f64, jiffies: u64, first: First) -> Handshake {
        let path = Path {
            shape: super::super::path::Shape::Lognormal {
                peers: 0.0,
                trips: 0.0,
            },
            base_us: rtt_us,
            loss: 0.0,
            ..Path::metro(1.0)
        };
        let schedule = Schedule::new(jiffies, 250);
        let first = First { rtt_us, ..first };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        Handshake::simulate(&path, 0.0, 1.0, &schedule, first, &mut rng)
    }

    #[test]
    fn syns_follow_the_kernels_slots() {
        // A timer of 6 jiffies fires in the seventh.
        let schedule = Schedule::new(6, 250);
        assert_eq!(schedule.sent_us[..6], [0.0, 28e3, 56e3, 84e3, 112e3, 140e3]);
        let kernel = Schedule::new(250, 250);
        assert_eq!(kernel.sent_us.len(), 11);
        for slot_us in kernel.sent_us {
            let next = schedule.sent_us.iter().find(|at_us| **at_us >= slot_us);
            assert!(
                next.is_some_and(|at_us| at_us - slot_us < 0.3e6),
                "{slot_us}"
            );
        }
    }

    #[test]
    fn copies_are_judged_with_later_rtts() {
        let syn_lost = First {
            syn_lost: true,
            ..FIRST
        };
        let ack_lost = First {
            ack_lost: true,
            ..FIRST
        };
        let ends_after = |rtts| First { rtts, ..FIRST };
        // Time taken, spurious copies, and the first SYN that was needed; and the verdict: spurious copies, path RTT, and
        // its time.
        for (rtt_us, first, expected, verdict) in [
            (10e3, syn_lost, (38e3, 0, 1), Some((0, 10e3, 38e3))),
            // The first RTT counts from the first SYN.
            (10e3, ack_lost, (38e3, 0, 1), Some((0, 10e3, 48e3))),
            // A slow path is recognised after three RTTs.
            (150e3, FIRST, (150e3, 5, 0), Some((5, 150e3, 600e3))),
            // A connection that ends earlier is judged by its RTTs so far; without any RTT it is undecided.
            (150e3, ends_after(1), (150e3, 5, 0), Some((5, 150e3, 300e3))),
            (150e3, ends_after(0), (150e3, 5, 0), None),
            // The second SYN is answered after 78 ms; the host takes that at 56 ms for spurious.
            (50e3, syn_lost, (78e3, 0, 1), Some((1, 50e3, 228e3))),
        ] {
            let found = one(rtt_us, 6, first);
            let took = (found.took_us.unwrap(), found.spurious, found.needed);
            assert_eq!(took, expected, "{found:?}");
            let judged = found.verdict.map(|v| (v.spurious, v.path_us, v.after_us));
            assert_eq!(judged, verdict, "{found:?}");
        }
    }

    #[test]
    fn connect_without_answer_times_out() {
        let path = Path {
            loss: 1.0,
            ..Path::metro(1.0)
        };
        let first = First {
            syn_lost: true,
            ..FIRST
        };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let schedule = Schedule::new(250, 250);
        let found = Handshake::simulate(&path, 0.0, 1.0, &schedule, first, &mut rng);
        assert_eq!(
            (found.took_us, found.verdict, found.copies_us.len()),
            (None, None, 10)
        );
    }
}
