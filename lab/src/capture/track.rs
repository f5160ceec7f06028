//! Matches ACKs with the segments that they answer.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
};

use rto_model::estimator::Sample;

use super::{Counts, Flow, FlowCounts, Limits, Opening, packet::Segment};

/// Tracks the flows of a capture.
pub(super) struct Tracker {
    limits: Limits,
    by_key: HashMap<Key, usize>,
    flows: Vec<State>,
    /// Number of unanswered segments in all flows.
    outstanding: usize,
}

/// Sender and receiver. The interface is not part of it: an answer may arrive on another.
type Key = (SocketAddr, SocketAddr);

/// Number of copies of a SYN whose timestamps are kept.
const COPIES: usize = 32;

/// The time at which a packet was captured.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// Time since the earliest packet.
    pub(super) ns: u64,
    /// How often a clock went back before it.
    pub(super) back: u64,
}

impl Moment {
    /// Time since an earlier moment, nanoseconds; `None` if a clock went back between them.
    fn since(self, earlier: Self) -> Option<u64> {
        let ns = self.ns.checked_sub(earlier.ns);
        ns.filter(|_| self.back == earlier.back)
    }
}

/// A flow and its unanswered segments.
struct State {
    flow: Flow,
    /// In the order of their sequence numbers.
    outstanding: VecDeque<Outstanding>,
    /// The end of the sent sequence numbers, and the sequence number of the SYN that opened the flow.
    sent: Option<u32>,
    syn: Option<u32>,
    /// TSval of each copy of this SYN, and when it was sent.
    copies: Vec<(u32, Moment)>,
}

/// Sequence numbers that were sent and not yet acknowledged.
#[derive(Clone, Copy)]
struct Outstanding {
    seq: u32,
    end: u32,
    sent: Moment,
    is_syn: bool,
    again: bool,
}

/// Whether a sequence number comes before another, across the wrap (RFC 9293 section 3.4).
const fn before(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).wrapping_sub(1) < 1 << 31
}

impl Tracker {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            by_key: HashMap::new(),
            flows: Vec::new(),
            outstanding: 0,
        }
    }

    /// Processes a packet: what it acknowledges, and what it sends.
    pub(super) fn segment(&mut self, at: Moment, segment: &Segment, counts: &mut Counts) {
        // The acknowledgment comes first: a SYN-ACK then opens the other direction.
        let reverse = (segment.to, segment.from);
        if let Some(&index) = self.by_key.get(&reverse) {
            let state = &mut self.flows[index];
            let had = state.outstanding.len();
            // A refused SYN has no round trip: a firewall may have refused it.
            let is_refused = segment.rst && state.outstanding.front().is_some_and(|o| o.is_syn);
            if let Some(ack) = segment.ack.filter(|_| !is_refused) {
                let echo = segment.timestamps.map(|(_, echo)| echo);
                state.acknowledged(at, ack, echo, counts);
            }
            if segment.rst {
                state.give_up();
            }
            self.outstanding -= had - state.outstanding.len();
        }
        if segment.length() == 0 || segment.rst {
            return;
        }
        let key = (segment.from, segment.to);
        let index = match self.by_key.get(&key) {
            Some(index) => *index,
            None if self.flows.len() >= self.limits.flows => {
                counts.beyond_flows += 1;
                return;
            }
            None => {
                self.by_key.insert(key, self.flows.len());
                self.flows.push(State::new(segment));
                self.flows.len() - 1
            }
        };
        let state = &mut self.flows[index];
        if !state.is_home(segment) {
            counts.elsewhere += 1;
            return;
        }
        let had = state.outstanding.len();
        let in_all = self.limits.outstanding_in_all;
        let room = self.limits.outstanding.saturating_sub(had);
        let room = room.min(in_all.saturating_sub(self.outstanding));
        counts.beyond_outstanding += state.sends(at, segment, room);
        let has = state.outstanding.len();
        self.outstanding = (self.outstanding + has).saturating_sub(had);
    }

    /// Ends the capture.
    pub(super) fn finish(self) -> Vec<Flow> {
        let ended = self.flows.into_iter().map(|mut state| {
            state.give_up();
            state.flow
        });
        ended.collect()
    }
}

impl State {
    fn new(segment: &Segment) -> Self {
        Self {
            flow: Flow {
                from: segment.from,
                to: segment.to,
                interface: segment.interface,
                sent_by_host: segment.outgoing,
                opened: None,
                handshake: Vec::new(),
                unsampled_us: Vec::new(),
                data: Vec::new(),
                counts: FlowCounts::default(),
            },
            outstanding: VecDeque::new(),
            sent: None,
            syn: None,
            copies: Vec::new(),
        }
    }

    /// Returns false for a copy of a segment that was captured on another interface before (a bridge, a bond and its
    /// members). A segment with new data moves the flow to its interface.
    fn is_home(&mut self, segment: &Segment) -> bool {
        let end = segment.seq.wrapping_add(segment.length());
        let is_new = if segment.syn {
            self.syn != Some(segment.seq)
        } else {
            self.sent.is_none_or(|sent| before(sent, end))
        };
        if is_new {
            self.flow.interface = segment.interface;
        }
        self.flow.interface == segment.interface
    }

    /// Records what a segment sends. Returns the number of segments for which there was no room.
    fn sends(&mut self, at: Moment, segment: &Segment, mut room: usize) -> u64 {
        let mut seq = segment.seq;
        let mut left_out = 0;
        if segment.syn {
            if self.syn != Some(seq) {
                // A new connection with the same ports.
                self.give_up();
                self.syn = Some(seq);
                self.sent = Some(seq);
                self.copies.clear();
            }
            if let Some((value, _)) = segment.timestamps
                && self.copies.len() < COPIES
            {
                self.copies.push((value, at));
            }
            let opened = if segment.ack.is_some() {
                Opening::Passive
            } else {
                Opening::Active
            };
            self.flow.opened.get_or_insert(opened);
            left_out += self.part(at, seq, seq.wrapping_add(1), true, &mut room);
            seq = seq.wrapping_add(1);
        }
        let length = segment.data + u32::from(segment.fin);
        if length > 0 {
            left_out += self.part(at, seq, seq.wrapping_add(length), false, &mut room);
        }
        left_out
    }

    /// Records a part of a segment (its SYN, data or FIN); returns 1 if there was no room for it.
    fn part(&mut self, at: Moment, seq: u32, end: u32, is_syn: bool, room: &mut usize) -> u64 {
        self.flow.counts.segments += 1;
        let sent = *self.sent.get_or_insert(seq);
        let again = before(seq, sent);
        if again {
            self.flow.counts.retransmitted += 1;
            self.flow.counts.handshake_retransmitted += u64::from(is_syn);
            let first = self.outstanding.partition_point(|o| !before(seq, o.end));
            let others = self.outstanding.range_mut(first..);
            for other in others.take_while(|other| before(other.seq, end)) {
                other.again = true;
            }
        }
        if !before(sent, end) {
            return 0;
        }
        self.sent = Some(end);
        let Some(left) = room.checked_sub(1) else {
            return 1;
        };
        *room = left;
        self.outstanding.push_back(Outstanding {
            seq: if again { sent } else { seq },
            end,
            sent: at,
            is_syn,
            again,
        });
        0
    }

    /// Processes an ACK; `echo` is its TSecr.
    fn acknowledged(&mut self, at: Moment, ack: u32, echo: Option<u32>, counts: &mut Counts) {
        let Some(sent) = self.sent else { return };
        if before(sent, ack) {
            if self.outstanding.front().is_some_and(|first| first.is_syn) {
                // It belongs to an earlier connection with the same ports.
                return;
            }
            // It acknowledges data that was not captured, and everything before.
            self.sent = Some(ack);
        }
        let mut oldest: Option<Outstanding> = None;
        let mut syn: Option<Outstanding> = None;
        let mut again = false;
        while let Some(first) = self.outstanding.front_mut() {
            if !before(first.seq, ack) {
                break;
            }
            if first.is_syn {
                syn = Some(*first);
            } else {
                again |= first.again;
                oldest.get_or_insert(*first);
            }
            if before(ack, first.end) {
                // A part of a large segment that the host left to its network card to cut (TSO).
                first.seq = ack;
                break;
            }
            self.outstanding.pop_front();
        }
        let mut without_sample = false;
        if let Some(syn) = syn {
            let answered = self.answered(syn, echo);
            let samples = &mut self.flow.handshake;
            let has_sample = answered.is_some_and(|sent| sample(samples, sent, at, counts));
            if !has_sample {
                self.flow.unsampled_us.push(waited_us(at, syn.sent));
            }
            without_sample = answered.is_none();
            again |= syn.again;
        }
        if let Some(oldest) = oldest {
            if again {
                without_sample = true;
            } else {
                sample(&mut self.flow.data, oldest.sent, at, counts);
            }
        }
        self.flow.counts.ambiguous += u64::from(without_sample);
    }

    /// When the copy of a SYN that an ACK answers was sent; `None` if that is unknown. TSecr identifies the copy. A
    /// peer that answers a later copy may echo the first copy's TSval (`tcp_check_req()`, net/ipv4/tcp_minisocks.c,
    /// 6.12): the round trip then looks longer than it was, never shorter.
    fn answered(&self, syn: Outstanding, echo: Option<u32>) -> Option<Moment> {
        if !syn.again {
            return Some(syn.sent);
        }
        let mut copies = self.copies.iter().filter(|(value, _)| Some(*value) == echo);
        match (copies.next(), copies.next()) {
            (Some((_, sent)), None) => Some(*sent),
            _ => None,
        }
    }

    /// Gives up on unanswered segments. An unanswered SYN proves nothing about the path's round trip: the peer may be
    /// down, or the SYN spoofed.
    fn give_up(&mut self) {
        self.flow.counts.unanswered += self.outstanding.len() as u64;
        let handshakes = self.outstanding.drain(..).filter(|o| o.is_syn);
        self.flow.counts.handshake_unanswered += handshakes.count() as u64;
    }
}

/// Adds a round trip. Returns false if a clock went back during it.
fn sample(samples: &mut Vec<Sample>, sent: Moment, at: Moment, counts: &mut Counts) -> bool {
    let Some(rtt_ns) = at.since(sent) else {
        counts.backwards += 1;
        return false;
    };
    samples.push(Sample {
        sent_us: sent.ns / 1000,
        rtt_us: rtt_ns.div_ceil(1000),
    });
    true
}

/// Time since a segment was sent, microseconds; `u64::MAX` if a clock went back during it.
fn waited_us(at: Moment, sent: Moment) -> u64 {
    at.since(sent).map_or(u64::MAX, |ns| ns / 1000)
}
