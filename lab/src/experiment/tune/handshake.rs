//! Simulates a connect(): its SYNs, the host's knowledge of them, and the truth.
//!
//! The server answers the first SYN that arrives, and then duplicates, at most one in 500 ms; its own timer answers
//! again after 1 s, 3 s and so on (`tcp_check_req()`, Linux 6.12). Both ends have timestamps, and a SYN-ACK echoes the
//! first SYN that arrived. SYNs are sent when the program sends them, on the timer wheel, and judged by its own code
//! (`rto_agent_ebpf::verdict`).

use rand::{RngExt as _, rngs::ChaCha8Rng};
use rto_agent_ebpf::verdict::{
    self, LONG_US, SAMPLES, Samples, after_samples, had_loss, spurious_at_most,
};
use rto_model::outage::{Host, Timers};

use super::path::Path;

/// The server's first timer, microseconds.
const SYN_ACK_RTO_US: f64 = 1e6;
/// How often it answers by itself.
const SYN_ACK_RETRIES: u32 = 5;
/// The least time between answers to duplicates (`net.ipv4.tcp_invalid_ratelimit`), microseconds.
const RATE_LIMIT_US: f64 = 500e3;
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
    /// The path RTT, microseconds; `None`: unknown.
    pub path_us: Option<f64>,
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
        let mut server: Option<Server> = None;
        // The earliest answer: its arrival, and whether it answers the first SYN.
        let mut answer: Option<(f64, bool)> = None;
        let mut copies_us = Vec::new();
        let mut spurious = 0;
        let sent = schedule.sent_us.iter().copied().map(Some).chain([None]);
        for (n, sent_us) in sent.enumerate() {
            // After the last SYN, only the server's timer is left.
            let until_us = sent_us.unwrap_or(f64::INFINITY);
            while let Some(due_us) = server.as_mut().and_then(|server| server.due(until_us)) {
                let at_s = at_s + due_us / 1e6;
                let [_, loss] = path.losses_at(at_s);
                let end_us = due_us + path.rtt_us(at_s, peer, rng) / 2.0;
                if rng.random::<f64>() >= loss && answer.is_none_or(|(us, _)| end_us < us) {
                    answer = Some((end_us, false));
                }
            }
            let is_over = answer.is_some_and(|(end_us, _)| end_us <= until_us);
            let Some(sent_us) = sent_us.filter(|_| !is_over) else {
                break;
            };
            if n > 0 {
                copies_us.push(sent_us);
                spurious += u32::from(answer.is_some_and(|(_, is_first)| is_first));
            }
            let sent_s = at_s + sent_us / 1e6;
            let (rtt_us, syn_lost, ack_lost) = if n == 0 {
                (first.rtt_us, first.syn_lost, first.ack_lost)
            } else {
                let losses = path.losses_at(sent_s);
                let rtt_us = path.rtt_us(sent_s, peer, rng);
                let [syn, ack] = losses.map(|loss| rng.random::<f64>() < loss);
                (rtt_us, syn, ack)
            };
            if syn_lost {
                continue;
            }
            let arrived_us = sent_us + path.syn_delay_us(sent_s) + rtt_us / 2.0;
            let answers = match &mut server {
                None => {
                    server = Some(Server::new(sent_us, arrived_us));
                    true
                }
                Some(server) => server.answers_duplicate(arrived_us),
            };
            let end_us = arrived_us + rtt_us / 2.0;
            if answers && !ack_lost && answer.is_none_or(|(us, _)| end_us < us) {
                answer = Some((end_us, n == 0));
            }
        }
        let verdict = answer
            .zip(server.as_ref())
            .and_then(|((end_us, _), server)| {
                let later = || path.rtt_us(at_s + end_us / 1e6, peer, rng);
                let rtt_us = end_us - server.echoed_us;
                judge(
                    end_us,
                    rtt_us,
                    &copies_us,
                    schedule.timer_us,
                    later,
                    first.rtts,
                )
            });
        Self {
            copies_us,
            took_us: answer.map(|(end_us, _)| end_us),
            spurious,
            verdict,
        }
    }
}

/// A server's request: when it answers.
struct Server {
    /// When the first SYN that arrived was sent, microseconds since the connection's first.
    echoed_us: f64,
    /// When its own timer fires next.
    timer_us: f64,
    /// How often it has fired.
    fired: u32,
    /// When it last answered a duplicate.
    duplicate_us: f64,
}

impl Server {
    const fn new(echoed_us: f64, arrived_us: f64) -> Self {
        Self {
            echoed_us,
            timer_us: arrived_us + SYN_ACK_RTO_US,
            fired: 0,
            duplicate_us: f64::NEG_INFINITY,
        }
    }

    /// When its own timer fires before this time.
    fn due(&mut self, until_us: f64) -> Option<f64> {
        let due_us = self.timer_us;
        (due_us < until_us && self.fired < SYN_ACK_RETRIES).then(|| {
            self.fired += 1;
            self.timer_us += self.timeout_us();
            due_us
        })
    }

    /// Whether it answers a duplicate, which restarts its timer.
    fn answers_duplicate(&mut self, at_us: f64) -> bool {
        let answers = at_us - self.duplicate_us >= RATE_LIMIT_US;
        if answers {
            self.duplicate_us = at_us;
            self.timer_us = at_us + self.timeout_us();
        }
        answers
    }

    fn timeout_us(&self) -> f64 {
        SYN_ACK_RTO_US * f64::from(1 << self.fired)
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
    /// Draws the first SYN of a handshake that has a loss, by the losses of SYNs and SYN-ACKs; or that takes long.
    pub(super) fn new(rtt_us: f64, losses: Option<[f64; 2]>, rng: &mut ChaCha8Rng) -> Self {
        // Both at once is rare.
        let syn_lost =
            losses.is_some_and(|[syns, syn_acks]| rng.random::<f64>() < syns / (syns + syn_acks));
        Self {
            rtt_us,
            syn_lost,
            ack_lost: losses.is_some() && !syn_lost,
            rtts: rng.random::<u32>() % MOST_RTTS,
        }
    }
}

/// The program's verdict (`handshake.rs` of `agent-ebpf`); `rtt_us` counts from the SYN that was echoed.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast to an integer saturates"
)]
fn judge(
    took_us: f64,
    rtt_us: f64,
    copies_us: &[f64],
    timer_us: f64,
    mut later_us: impl FnMut() -> f64,
    rtts: u32,
) -> Option<Verdict> {
    let us = |us: f64| us as u32;
    let (took, srtt, timer) = (took_us as u64, us(rtt_us), us(timer_us));
    let copies = u32::try_from(copies_us.len()).unwrap_or(u32::MAX);
    let (mut after_us, mut least_us, mut longest_us) = (took_us, rtt_us, 0.0);
    let verdict = |after_us, spurious, path_us| {
        Some(Verdict {
            after_us,
            spurious,
            path_us,
        })
    };
    let is_long = copies == 0 && took >= LONG_US.into();
    if copies == 0 && !is_long || srtt < timer && copies > 0 {
        return verdict(took_us, 0, Some(rtt_us));
    }
    let at_most = spurious_at_most(copies, srtt, took, timer);
    let answered_after = copies_us.last().map(|last_us| (took_us - last_us) as u64);
    for count in 0..=rtts {
        if count > 0 {
            let sample_us = later_us();
            after_us += sample_us;
            least_us = sample_us.min(least_us);
            longest_us = sample_us.max(longest_us);
        }
        let are_all = count == rtts;
        if is_long {
            if are_all || count == SAMPLES {
                let is_path = count > 0 && !had_loss(took, us(least_us));
                return verdict(after_us, 0, is_path.then_some(took_us));
            }
            continue;
        }
        let samples = Samples {
            count,
            least_us: us(least_us),
            longest_us: us(longest_us),
            are_all,
        };
        if let verdict::Verdict::Spurious(spurious) =
            after_samples(at_most, samples, timer, took, answered_after)
        {
            let path_us = match (spurious == copies, count) {
                (true, _) => Some(took_us),
                (false, 0) => None,
                (false, _) => Some(least_us),
            };
            return verdict(after_us, spurious, path_us);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::{super::path::Change, *};

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
        // Time taken, spurious copies; and the verdict: spurious copies, path RTT, and its time.
        for (rtt_us, first, expected, verdict) in [
            (10e3, syn_lost, (38e3, 0), Some((0, 10e3, 38e3))),
            // The first RTT counts from the first SYN.
            (10e3, ack_lost, (38e3, 0), Some((0, 10e3, 48e3))),
            // A slow path is recognised after three RTTs.
            (150e3, FIRST, (150e3, 5), Some((5, 150e3, 600e3))),
            // A connection that ends earlier is judged by its RTTs so far; without any RTT it is undecided.
            (150e3, ends_after(1), (150e3, 5), Some((5, 150e3, 300e3))),
            (150e3, ends_after(0), (150e3, 5), None),
            // The second SYN is answered after 78 ms; the host takes that at 56 ms for spurious.
            (50e3, syn_lost, (78e3, 0), Some((1, 50e3, 228e3))),
        ] {
            let found = one(rtt_us, 6, first);
            let took = (found.took_us.unwrap(), found.spurious);
            assert_eq!(took, expected, "{found:?}");
            let judged = found
                .verdict
                .map(|v| (v.spurious, v.path_us.unwrap(), v.after_us));
            assert_eq!(judged, verdict, "{found:?}");
        }
    }

    #[test]
    fn server_answers_duplicates_at_intervals_and_by_its_own_timer() {
        let mut server = Server::new(0.0, 10.0);
        let answers = [30e3, 60e3, 530e3].map(|at_us| server.answers_duplicate(at_us));
        assert_eq!(answers, [true, false, true]);
        // Duplicates restart its timer, which doubles.
        assert_eq!(server.due(1.5e6), None);
        assert_eq!(server.due(f64::INFINITY), Some(1.53e6));
        assert_eq!(server.due(f64::INFINITY), Some(3.53e6));
    }

    /// Only SYNs are slow: the answer to the first is under way while the others are sent. (RTT 0.2 ms.)
    #[test]
    fn copies_of_delayed_syns_are_judged_spurious() {
        let path = Path {
            base_us: 200.0,
            loss: 0.0,
            events: vec![(0.0..f64::INFINITY, Change::SynDelay(150e3))],
            ..Path::metro(1.0)
        };
        let schedule = Schedule::new(6, 250);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut copies, mut judged) = (0, 0);
        for _ in 0..1_000 {
            let rtt_us = path.rtt_us(0.0, 1.0, &mut rng);
            let first = First { rtt_us, ..FIRST };
            let one = Handshake::simulate(&path, 0.0, 1.0, &schedule, first, &mut rng);
            copies += one.copies_us.len();
            judged += one.verdict.unwrap().spurious as usize;
        }
        assert_eq!(copies, 5_000);
        assert!(judged * 100 >= copies * 95, "{judged}");
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
