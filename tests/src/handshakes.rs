//! Handshakes on an emulated link: which SYNs were sent, and when they were answered.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rto_testbed::link::{
    packet::{Direction, Kind},
    relay::Relayed,
};

/// The client's side of a connection.
#[derive(Clone, Debug)]
pub struct Handshake {
    /// The client's port.
    pub port: u16,
    /// When the link read each SYN, and whether it forwarded it.
    pub syns: Vec<(Instant, bool)>,
    /// When the first SYN-ACK was due to leave to the client.
    pub answered: Option<Instant>,
    /// When the last segment with data was due to leave; the outcome of a connection is known by then.
    pub last_data: Option<Instant>,
}

impl Handshake {
    /// The handshakes of connections to this server port, in the order in which they began.
    #[must_use]
    pub fn all(log: &[Relayed], server_port: u16) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        // A port may be reused. The initial sequence number distinguishes connections; retransmitted SYNs keep it.
        let mut by_syn: HashMap<(u16, u32), usize> = HashMap::new();
        let mut by_port: HashMap<u16, usize> = HashMap::new();
        for one in log {
            let Some(packet) = one
                .packet
                .filter(|packet| packet.server_port == server_port)
            else {
                continue;
            };
            let port = packet.client_port;
            match (packet.direction, packet.kind) {
                (Direction::ToServer, Kind::Syn) => {
                    let index = *by_syn.entry((port, packet.seq)).or_insert_with(|| {
                        all.push(Self {
                            port,
                            syns: Vec::new(),
                            answered: None,
                            last_data: None,
                        });
                        all.len() - 1
                    });
                    by_port.insert(port, index);
                    all[index].syns.push((one.at, !one.dropped()));
                }
                (Direction::ToClient, kind @ (Kind::SynAck | Kind::Data)) => {
                    let Some(index) = by_port.get(&port) else {
                        continue;
                    };
                    let (handshake, leaves) = (&mut all[*index], one.leaves);
                    match kind {
                        Kind::SynAck => handshake.answered = handshake.answered.or(leaves),
                        _ => handshake.last_data = leaves.or(handshake.last_data),
                    }
                }
                _ => {}
            }
        }
        all
    }

    /// When it began.
    #[must_use]
    pub fn begun(&self) -> Instant {
        self.syns[0].0
    }

    /// How long it took; `None` if it was not answered.
    #[must_use]
    pub fn took(&self) -> Option<Duration> {
        let answered = self.answered?;
        Some(answered.saturating_duration_since(self.begun()))
    }

    /// Whether it took longer than a limit, or was not answered.
    #[must_use]
    pub fn is_beyond(&self, limit: Duration) -> bool {
        self.took().is_none_or(|took| took > limit)
    }

    /// Retransmissions of the SYN.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.syns.len() - 1
    }

    /// SYNs sent after one had got through, whose answer was on its way. 0 if there was no answer.
    #[must_use]
    pub fn spurious(&self) -> usize {
        let carried = self.syns.iter().position(|(_, carried)| *carried);
        match (carried, self.answered) {
            (Some(first), Some(_)) => self.syns.len() - 1 - first,
            _ => 0,
        }
    }

    /// The time between the first and the second SYN.
    #[must_use]
    pub fn first_timer(&self) -> Option<Duration> {
        let [(first, _), (second, _), ..] = self.syns[..] else {
            return None;
        };
        Some(second - first)
    }
}

/// The number of SYNs in all handshakes.
#[must_use]
pub fn syns(all: &[Handshake]) -> usize {
    all.iter().map(|one| one.syns.len()).sum()
}

/// The share of handshakes that took longer than a limit, or were not answered.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "thousands")]
pub fn share_beyond(all: &[Handshake], limit: Duration) -> f64 {
    let beyond = all.iter().filter(|one| one.is_beyond(limit)).count();
    beyond as f64 / all.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handshake(syns: &[(u64, bool)], answered_ms: Option<u64>) -> Handshake {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        Handshake {
            port: 1,
            syns: syns
                .iter()
                .map(|(ms, carried)| (at(*ms), *carried))
                .collect(),
            answered: answered_ms.map(at),
            last_data: None,
        }
    }

    #[test]
    fn spurious_syns_and_handshake_time() {
        let slow = handshake(&[(0, true), (24, true), (48, true)], Some(60));
        assert_eq!((slow.copies(), slow.spurious()), (2, 2));
        assert!(slow.is_beyond(Duration::from_millis(59)));
        assert!(!slow.is_beyond(Duration::from_millis(60)));
        assert_eq!(slow.first_timer(), Some(Duration::from_millis(24)));
        let lost = handshake(&[(0, false), (24, true), (48, true)], Some(60));
        assert_eq!((lost.copies(), lost.spurious()), (2, 1));
        let never = handshake(&[(0, true), (24, true)], None);
        assert_eq!((never.spurious(), never.took()), (0, None));
        assert!(never.is_beyond(Duration::MAX));
        let all = [slow, lost, never];
        assert_eq!(syns(&all), 8);
        assert!((share_beyond(&all, Duration::from_millis(100)) - 1.0 / 3.0).abs() < 1e-9);
    }
}
