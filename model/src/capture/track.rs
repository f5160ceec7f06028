//! Which ACK answers which segment.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
};

use super::{Counts, Flow, FlowCounts, Limits, Opening, packet::Segment};
use crate::estimator::Sample;

/// Follows the flows of a capture.
pub(super) struct Tracker {
    limits: Limits,
    by_key: HashMap<Key, usize>,
    flows: Vec<State>,
    /// Segments without an answer, of all flows.
    outstanding: usize,
}

/// Where a segment was seen, who sent it and to whom.
type Key = (u32, SocketAddr, SocketAddr);

/// A flow and what of it is not answered yet.
struct State {
    flow: Flow,
    /// In order of their numbers.
    outstanding: VecDeque<Outstanding>,
    /// The end of what was sent, and the sequence number of the SYN that began it.
    sent: Option<u32>,
    syn: Option<u32>,
}

/// Something with sequence numbers that was sent and not answered.
#[derive(Clone, Copy)]
struct Outstanding {
    seq: u32,
    end: u32,
    sent_ns: u64,
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

    /// A packet: what it sends, and what it answers.
    pub(super) fn segment(&mut self, time_ns: u64, segment: &Segment, counts: &mut Counts) {
        // First what it answers: a SYN-ACK then begins the other direction.
        let reverse = (segment.interface, segment.to, segment.from);
        if let Some(&index) = self.by_key.get(&reverse) {
            let state = &mut self.flows[index];
            let had = state.outstanding.len();
            if let Some(ack) = segment.ack {
                state.acknowledged(time_ns, ack, counts);
            }
            if segment.rst {
                state.give_up();
            }
            self.outstanding -= had - state.outstanding.len();
        }
        let length = segment.data + u32::from(segment.syn) + u32::from(segment.fin);
        if length == 0 || segment.rst {
            return;
        }
        let key = (segment.interface, segment.from, segment.to);
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
        let had = state.outstanding.len();
        let room = self.limits.outstanding.saturating_sub(had).min(
            self.limits.outstanding_in_all - self.outstanding.min(self.limits.outstanding_in_all),
        );
        let left_out = state.sends(time_ns, segment, room);
        counts.beyond_outstanding += left_out;
        let has = state.outstanding.len();
        self.outstanding = (self.outstanding + has).saturating_sub(had);
    }

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
                opened: None,
                handshake: Vec::new(),
                data: Vec::new(),
                counts: FlowCounts::default(),
            },
            outstanding: VecDeque::new(),
            sent: None,
            syn: None,
        }
    }

    /// Something with sequence numbers is sent. Returns how many segments there was no room for.
    fn sends(&mut self, sent_ns: u64, segment: &Segment, room: usize) -> u64 {
        let mut seq = segment.seq;
        let mut wanted = 0;
        if segment.syn {
            if self.syn != Some(seq) {
                // A new connection of the same ports.
                self.give_up();
                self.syn = Some(seq);
                self.sent = Some(seq);
            }
            let opened = if segment.ack.is_some() {
                Opening::Passive
            } else {
                Opening::Active
            };
            self.flow.opened.get_or_insert(opened);
            wanted += usize::from(self.part(sent_ns, seq, seq.wrapping_add(1), true, room));
            seq = seq.wrapping_add(1);
        }
        let length = segment.data + u32::from(segment.fin);
        if length > 0 {
            let room = room.saturating_sub(wanted);
            let end = seq.wrapping_add(length);
            let tracked = self.part(sent_ns, seq, end, false, room);
            wanted += usize::from(tracked);
        }
        let followed = wanted.min(room);
        (wanted - followed) as u64
    }

    /// Returns whether it is to be followed, which it is if there is room.
    fn part(&mut self, sent_ns: u64, seq: u32, end: u32, is_syn: bool, room: usize) -> bool {
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
            return false;
        }
        self.sent = Some(end);
        if room > 0 {
            self.outstanding.push_back(Outstanding {
                seq: if again { sent } else { seq },
                end,
                sent_ns,
                is_syn,
                again,
            });
        }
        true
    }

    /// An ACK comes.
    fn acknowledged(&mut self, time_ns: u64, ack: u32, counts: &mut Counts) {
        let Some(sent) = self.sent else { return };
        if before(sent, ack) {
            if self.outstanding.front().is_some_and(|first| first.is_syn) {
                // To an earlier connection of the same ports.
                return;
            }
            // Of something that was not captured, and of all before.
            self.sent = Some(ack);
        }
        let mut oldest: Option<Outstanding> = None;
        let mut syn: Option<Outstanding> = None;
        let mut again = false;
        while let Some(first) = self.outstanding.front_mut() {
            if !before(first.seq, ack) {
                break;
            }
            again |= first.again;
            if first.is_syn {
                syn = Some(*first);
            } else {
                oldest.get_or_insert(*first);
            }
            if before(ack, first.end) {
                // A part of what the host handed to its card at once.
                first.seq = ack;
                break;
            }
            self.outstanding.pop_front();
        }
        if syn.is_none() && oldest.is_none() {
            return;
        }
        if again {
            self.flow.counts.ambiguous += 1;
            return;
        }
        for (answered, samples) in [
            (syn, &mut self.flow.handshake),
            (oldest, &mut self.flow.data),
        ] {
            let Some(answered) = answered else { continue };
            match time_ns.checked_sub(answered.sent_ns) {
                Some(rtt_ns) => samples.push(Sample {
                    sent_us: answered.sent_ns / 1000,
                    rtt_us: rtt_ns.div_ceil(1000),
                }),
                None => counts.backwards += 1,
            }
        }
    }

    /// What is outstanding gets no answer any more.
    fn give_up(&mut self) {
        self.flow.counts.unanswered += self.outstanding.len() as u64;
        self.outstanding.clear();
    }
}
