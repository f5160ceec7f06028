//! Simulates a sender of one file over a recorded bottleneck, with estimators that no kernel has.
//!
//! Each segment finds the queue that a packet of the recorded traffic found at that time, behind the file's own
//! segments, and is dropped if that packet was. The RTO is the estimator's, doubled after each timeout (RFC 6298
//! section 5). [`Control::Reno`] has Reno's window, which begins with ten segments, selective ACKs, and fast retransmit
//! after three later segments. [`Control::Bare`] has neither selective ACKs nor congestion control: a fixed window, and
//! only timeouts, each of which retransmits the earliest segment.
//!
//! It leaves out that the other traffic would yield to the file, delayed ACKs, tail loss probes, and that Linux undoes
//! the effects of a spurious timeout (F-RTO, Eifel).

use rto_model::estimator::Sample;
use rto_model::retransmit::RTO_MAX_US;
use rto_testbed::link::{config::LinkConfig, packet::Direction, relay::Relayed};

use crate::{
    estimator::Estimator,
    study::{Sampler, Sampling},
    summary::micros,
};

/// Bytes of a full packet.
const PACKET: u64 = 1500;
/// The initial window, segments (`TCP_INIT_CWND`).
const INITIAL_WINDOW: f64 = 10.0;
/// The window without congestion control, segments: the largest without window scaling.
const FIXED_WINDOW: f64 = 45.0;
/// A segment is lost if this many later ones have arrived (RFC 5681).
const LATER: usize = 3;

/// A bottleneck with the traffic that passed it. Times are microseconds.
#[derive(Debug)]
pub(crate) struct Trace {
    /// When packets came, and how long each waited in the queue, unless it was dropped.
    packets: Vec<(u64, Option<u64>)>,
    /// Round trip without the queue.
    path_us: u64,
    /// Time that the bottleneck needs for a full packet.
    packet_us: u64,
    /// Longest wait in the queue.
    queue_us: u64,
}

impl Trace {
    /// The packets from the client to the server, where the link is limited.
    pub(crate) fn of(log: &[Relayed], link: &LinkConfig) -> Self {
        let sending_us = |bytes: u64| bytes * 8_000_000 / link.rate.unwrap_or(u64::MAX).max(1);
        // Only this direction has packets other than TCP's.
        let is_towards = |one: &&Relayed| {
            one.packet
                .is_none_or(|it| it.direction == Direction::ToServer)
        };
        let packets = log.iter().filter(is_towards).map(|one| {
            let waits_us = one.leaves.map(|leaves| {
                let spent = micros(leaves.saturating_duration_since(one.at));
                spent.saturating_sub(micros(link.delay) + sending_us(one.bytes as u64))
            });
            (micros(one.at - log[0].at), waits_us)
        });
        Self {
            packets: packets.collect(),
            path_us: 2 * micros(link.delay),
            packet_us: sending_us(PACKET),
            queue_us: sending_us(link.queue),
        }
    }

    /// How long it lasts.
    pub(crate) fn length_us(&self) -> u64 {
        self.packets.last().map_or(0, |(at_us, _)| *at_us)
    }

    /// How long a packet would wait that comes at this time; `None` if it is dropped. The traffic repeats.
    fn waits_us(&self, at_us: u64) -> Option<u64> {
        let at_us = at_us % self.length_us().max(1);
        let after = self
            .packets
            .partition_point(|(came_us, _)| *came_us <= at_us);
        let Some((came_us, waits_us)) = after.checked_sub(1).map(|last| self.packets[last]) else {
            return Some(0);
        };
        let since_us = at_us - came_us;
        match waits_us {
            None if since_us < self.packet_us => None,
            None => Some(self.queue_us.saturating_sub(since_us)),
            Some(waits_us) => Some((waits_us + self.packet_us).saturating_sub(since_us)),
        }
    }
}

/// How a sender reacts to losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Congestion control and selective ACKs.
    Reno,
    /// Neither of them.
    Bare,
}

/// A simulated transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// From the SYN to the last byte.
    pub(crate) us: u64,
    /// Segments sent, including retransmissions.
    pub(crate) sent: u64,
    /// Retransmissions.
    pub(crate) again: u64,
    /// Retransmissions of segments that got through.
    pub(crate) spurious: u64,
}

/// Sends a file of this many segments, beginning at this time of the trace.
pub(crate) fn transfer(
    trace: &Trace,
    begin_us: u64,
    segments: usize,
    control: Control,
    (mut estimator, sampling): (impl Estimator, Sampling),
) -> Transfer {
    let rtt_us = trace.path_us + trace.waits_us(begin_us).unwrap_or(trace.queue_us);
    estimator.take(Sample {
        sent_us: begin_us,
        rtt_us,
    });
    let now_us = begin_us + rtt_us;
    let mut sender = Sender {
        trace,
        timer_us: now_us + estimator.rto_us(),
        estimator,
        sampler: Sampler::new(sampling),
        segments: vec![Segment::default(); segments],
        next: 0,
        acked: 0,
        control,
        window: match control {
            Control::Reno => INITIAL_WINDOW,
            Control::Bare => FIXED_WINDOW,
        },
        threshold: f64::MAX,
        recovers_at: 0,
        doublings: 0,
        free_us: now_us,
        seen: Transfer::default(),
    };
    let end_us = sender.run(now_us);
    Transfer {
        us: end_us - begin_us,
        ..sender.seen
    }
}

#[derive(Clone, Debug, Default)]
struct Segment {
    sent_us: u64,
    copies: u32,
    /// When the ACK of a copy that got through comes.
    ack_us: Option<u64>,
    is_received: bool,
    /// Taken for lost, and not sent again yet.
    is_lost: bool,
}

struct Sender<'a, E> {
    trace: &'a Trace,
    estimator: E,
    sampler: Sampler,
    segments: Vec<Segment>,
    /// The first segment that was never sent, and the first that is not acknowledged.
    next: usize,
    acked: usize,
    control: Control,
    window: f64,
    threshold: f64,
    /// The window is halved once until this segment is acknowledged.
    recovers_at: usize,
    timer_us: u64,
    doublings: u32,
    /// When the file's last segment leaves the queue.
    free_us: u64,
    seen: Transfer,
}

impl<E: Estimator> Sender<'_, E> {
    /// Returns when the last segment is acknowledged.
    fn run(&mut self, mut now_us: u64) -> u64 {
        while self.acked < self.segments.len() {
            while self.in_flight() < self.window.floor() {
                let lost = (self.acked..self.next).find(|n| self.segments[*n].is_lost);
                match lost {
                    Some(number) => self.send(number, now_us),
                    None if self.next < self.segments.len() => {
                        self.next += 1;
                        self.send(self.next - 1, now_us);
                    }
                    None => break,
                }
            }
            let acks = (self.acked..self.next).filter(|n| !self.segments[*n].is_received);
            let next = acks
                .filter_map(|n| Some((self.segments[n].ack_us?, n)))
                .min();
            match next {
                Some((ack_us, number)) if ack_us <= self.timer_us => {
                    now_us = ack_us;
                    self.ack(number, now_us);
                }
                _ => {
                    now_us = self.timer_us;
                    self.timeout(now_us);
                }
            }
        }
        now_us
    }

    fn in_flight(&self) -> f64 {
        let sent = &self.segments[self.acked..self.next];
        // Without selective ACKs the sender does not know which segments arrived behind a loss.
        let is_known = self.control == Control::Reno;
        sent.iter()
            .filter(|one| !(one.is_received && is_known) && !one.is_lost)
            .count() as f64
    }

    fn send(&mut self, number: usize, now_us: u64) {
        let waits_us = self.trace.waits_us(now_us);
        let begins_us = waits_us.map(|waits_us| self.free_us.max(now_us + waits_us));
        let fits = begins_us.filter(|begins_us| begins_us - now_us <= self.trace.queue_us);
        let segment = &mut self.segments[number];
        self.seen.sent += 1;
        self.seen.again += u64::from(segment.copies > 0);
        self.seen.spurious += u64::from(segment.ack_us.is_some());
        if let Some(begins_us) = fits {
            self.free_us = begins_us + self.trace.packet_us;
            segment
                .ack_us
                .get_or_insert(self.free_us + self.trace.path_us);
        }
        segment.sent_us = now_us;
        segment.copies += 1;
        segment.is_lost = false;
    }

    fn ack(&mut self, number: usize, now_us: u64) {
        let segment = &mut self.segments[number];
        segment.is_received = true;
        segment.is_lost = false;
        let sent_us = segment.sent_us;
        let is_acked = self.control == Control::Reno || number == self.acked;
        // Karn's algorithm.
        if segment.copies == 1 && is_acked {
            let rtt_us = now_us - sent_us;
            let sample = Sample { sent_us, rtt_us };
            if self.sampler.takes(sample) {
                self.estimator.take(sample);
            }
        }
        let before = self.acked;
        while self
            .segments
            .get(self.acked)
            .is_some_and(|one| one.is_received)
        {
            self.acked += 1;
        }
        if self.acked > before {
            self.doublings = 0;
            self.timer_us = now_us + self.estimator.rto_us();
        }
        if self.control == Control::Bare {
            return;
        }
        let in_flight = self.in_flight();
        let mut any = false;
        for earlier in self.acked..(number + 1).saturating_sub(LATER) {
            let earlier = &mut self.segments[earlier];
            if !earlier.is_received && !earlier.is_lost && earlier.sent_us <= sent_us {
                earlier.is_lost = true;
                any = true;
            }
        }
        if self.acked < self.recovers_at {
            return;
        }
        if any {
            self.threshold = (in_flight / 2.0).max(2.0);
            self.window = self.threshold;
            self.recovers_at = self.next;
        } else if self.window < self.threshold {
            self.window += 1.0;
        } else {
            self.window += 1.0 / self.window;
        }
    }

    fn timeout(&mut self, now_us: u64) {
        if self.control == Control::Bare {
            self.segments[self.acked].is_lost = true;
        } else {
            self.threshold = (self.in_flight() / 2.0).max(2.0);
            self.window = 1.0;
            self.recovers_at = self.acked;
            for segment in &mut self.segments[self.acked..self.next] {
                segment.is_lost = !segment.is_received;
            }
        }
        self.doublings = (self.doublings + 1).min(20);
        let rto_us = (self.estimator.rto_us() << self.doublings).min(RTO_MAX_US);
        self.timer_us = now_us + rto_us;
    }
}

#[cfg(test)]
mod tests {
    use rto_model::estimator::Linux;

    use super::*;
    use crate::estimator::{Rfc6298, Weights};

    /// 100 Mbit/s and 10 ms of path, with these packets.
    fn trace(packets: Vec<(u64, Option<u64>)>) -> Trace {
        Trace {
            packets,
            path_us: 10_000,
            packet_us: 120,
            queue_us: 100_000,
        }
    }

    fn linux(trace: &Trace) -> Transfer {
        transfer(
            trace,
            0,
            221,
            Control::Reno,
            (Linux::new(250), Sampling::All),
        )
    }

    #[test]
    fn idle_link_takes_the_rounds_of_slow_start() {
        let idle = linux(&trace(Vec::new()));
        // The handshake, rounds of 10, 20, 40 and 80 segments, and the other 71 at the rate of the link.
        let rounds_us = 6 * 10_000 + (10 + 71) * 120;
        assert!(idle.us.abs_diff(rounds_us) < 3_000, "{idle:?}");
        assert_eq!((idle.sent, idle.again), (221, 0));
    }

    #[test]
    fn queue_delays_and_drops() {
        // A queue of 50 ms, and every 37th packet dropped.
        let waits = |n: u64| (n % 37 != 36).then_some(50_000);
        let busy = trace((0..100_000).map(|n| (n * 120, waits(n))).collect());
        let seen = linux(&busy);
        assert!(seen.us > 6 * 60_000, "{seen:?}");
        assert!(seen.again > 0 && seen.spurious == 0, "{seen:?}");
        assert_eq!(seen.sent, 221 + seen.again);
    }

    #[test]
    fn bare_sender_waits_for_a_timeout_at_each_loss() {
        let idle = trace(Vec::new());
        let bare = |trace: &Trace| {
            let with = (Linux::new(250), Sampling::All);
            transfer(trace, 0, 221, Control::Bare, with)
        };
        // The handshake, and the rate of 45 segments in a round trip of 10 ms and the time of one segment.
        let us = bare(&idle).us;
        assert!((50_000..80_000).contains(&us), "{us}");
        // Each loss takes a timeout of 200 ms or more, while the sender with selective ACKs continues.
        let waits = |n: u64| (n % 37 != 36).then_some(0);
        let busy = trace((0..100_000).map(|n| (n * 120, waits(n))).collect());
        let (seen, reno) = (bare(&busy), linux(&busy));
        assert!(
            seen.again > 0 && seen.us >= seen.again * 200_000,
            "{seen:?}"
        );
        assert!(reno.us < seen.us, "{reno:?} {seen:?}");
    }

    #[test]
    fn rto_below_the_round_trip_is_spurious_and_slower() {
        // The queue grows by a millisecond each ten: the variation of W9 hardly follows.
        let rising = trace(
            (0..100_000)
                .map(|n| (n * 120, Some(n * 12 % 100_000)))
                .collect(),
        );
        let run = |estimator: Rfc6298| {
            transfer(&rising, 0, 221, Control::Reno, (estimator, Sampling::All))
        };
        let long = run(Rfc6298::new(Weights::W1).with_minimum(1_000_000));
        let mut short = Rfc6298::new(Weights::ALL[8].1);
        short.k = 0.0;
        let short = run(short);
        assert_eq!(long.again, 0, "{long:?}");
        assert!(
            short.spurious > 0 && short.us > long.us,
            "{short:?} {long:?}"
        );
    }
}
