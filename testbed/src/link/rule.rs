//! Rules that decide exactly which packets are dropped.

use std::time::Instant;

use super::packet::{Direction, Kind, Packet};

/// A predicate of packets. All fields that are set must match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketFilter {
    /// Direction.
    pub direction: Option<Direction>,
    /// Kind of packet.
    pub kind: Option<Kind>,
    /// Port of the client's end.
    pub client_port: Option<u16>,
    /// Bytes of data: minimum and maximum.
    pub payload: Option<(u32, u32)>,
    /// Only data at or after this byte of the flow, for example the last `k` segments of a flow of known length.
    pub from_byte: Option<u64>,
    /// Only packets that the link has not seen before, so no retransmissions.
    pub first_time: bool,
}

impl PacketFilter {
    /// Every TCP packet.
    pub const ALL: Self = Self {
        direction: None,
        kind: None,
        client_port: None,
        payload: None,
        from_byte: None,
        first_time: false,
    };
    /// SYNs, from either side.
    pub const SYN: Self = Self::kind(Kind::Syn);
    /// SYN-ACKs, from either side.
    pub const SYN_ACK: Self = Self::kind(Kind::SynAck);
    /// ACKs without data from the client.
    pub const CLIENT_ACK: Self = Self::kind(Kind::Ack).towards(Direction::ToServer);
    /// Segments with data from the client.
    pub const CLIENT_DATA: Self = Self::kind(Kind::Data).towards(Direction::ToServer);
    /// Segments with data from the server.
    pub const SERVER_DATA: Self = Self::kind(Kind::Data).towards(Direction::ToClient);

    /// Packets of a kind.
    #[must_use]
    pub const fn kind(kind: Kind) -> Self {
        Self {
            kind: Some(kind),
            ..Self::ALL
        }
    }

    /// Restricts it to one direction.
    #[must_use]
    pub const fn towards(mut self, direction: Direction) -> Self {
        self.direction = Some(direction);
        self
    }

    /// Restricts it to the connection with this port at the client's end.
    #[must_use]
    pub const fn of_client(mut self, port: u16) -> Self {
        self.client_port = Some(port);
        self
    }

    /// Restricts it to packets with exactly this many bytes of data.
    #[must_use]
    pub const fn with_payload(mut self, bytes: u32) -> Self {
        self.payload = Some((bytes, bytes));
        self
    }

    /// Restricts it to data at or after this byte of the flow.
    #[must_use]
    pub const fn from_byte(mut self, offset: u64) -> Self {
        self.from_byte = Some(offset);
        self
    }

    /// Excludes retransmissions.
    #[must_use]
    pub const fn first_time(mut self) -> Self {
        self.first_time = true;
        self
    }

    /// Whether a packet matches.
    #[must_use]
    pub fn matches(&self, packet: &Packet) -> bool {
        self.direction.is_none_or(|d| d == packet.direction)
            && self.kind.is_none_or(|k| k == packet.kind)
            && self.client_port.is_none_or(|p| p == packet.client_port)
            && self
                .payload
                .is_none_or(|(least, most)| (least..=most).contains(&packet.payload))
            && self.from_byte.is_none_or(|from| {
                packet.kind == Kind::Data && packet.offset.is_some_and(|offset| offset >= from)
            })
            && !(self.first_time && packet.repeated)
    }
}

/// Which of the packets that match are dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DropPattern {
    /// All of them.
    All,
    /// The next `n`, and no more.
    Next(u64),
    /// One in `n`, beginning with the first.
    Every(u64),
    /// Each with this probability.
    Share(f64),
    /// Several in a row, by the model of Gilbert and Elliott: while a direction is in its good state it drops nothing,
    /// and in its bad state everything.
    Runs {
        /// Share of the packets that are dropped, on average.
        share: f64,
        /// Packets that are dropped in a row, on average.
        length: f64,
    },
    /// Packets beyond a rate, as a policer drops them: a token bucket.
    Above {
        /// Packets per second that pass.
        per_s: u32,
        /// Packets that pass at once after a pause.
        burst: u32,
    },
}

/// Drops some of the packets that match a filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Which packets are considered.
    pub filter: PacketFilter,
    /// Which of them are dropped.
    pub pattern: DropPattern,
    /// When the rule expires; `None`: never.
    pub until: Option<Instant>,
}

impl Rule {
    /// A rule that does not expire.
    #[must_use]
    pub const fn new(filter: PacketFilter, pattern: DropPattern) -> Self {
        Self {
            filter,
            pattern,
            until: None,
        }
    }
}

/// An active rule and its counters.
#[derive(Clone, Debug)]
pub(super) struct Active {
    rule: Rule,
    matched: u64,
    dropped: u64,
    /// For [`DropPattern::Runs`]: whether each direction is in its bad state.
    bad: [bool; 2],
    /// For [`DropPattern::Above`]: tokens missing from the bucket, and when they were counted.
    spent: Option<(Instant, f64)>,
}

impl Active {
    pub(super) const fn new(rule: Rule) -> Self {
        Self {
            rule,
            matched: 0,
            dropped: 0,
            bad: [false; 2],
            spent: None,
        }
    }

    /// Whether to drop a packet. `chance` is a random number from 0 to 1.
    pub(super) fn drops(&mut self, packet: &Packet, now: Instant, chance: f64) -> bool {
        let is_over = self.rule.until.is_some_and(|until| until <= now);
        if is_over || !self.rule.filter.matches(packet) {
            return false;
        }
        self.matched += 1;
        let drops = match self.rule.pattern {
            DropPattern::All => true,
            DropPattern::Next(count) => self.dropped < count,
            DropPattern::Every(n) => (self.matched - 1).is_multiple_of(n.max(1)),
            DropPattern::Share(share) => chance < share,
            DropPattern::Runs { share, length } => {
                let bad = &mut self.bad[packet.direction as usize];
                // Bad states last `length` packets, and good ones as long as the share requires.
                let ends = if *bad { 1.0 } else { share / (1.0 - share) } / length;
                *bad ^= chance < ends;
                *bad
            }
            DropPattern::Above { per_s, burst } => !self.takes(now, per_s, burst),
        };
        self.dropped += u64::from(drops);
        drops
    }

    /// Takes a token from the bucket; returns whether there was one.
    fn takes(&mut self, now: Instant, per_s: u32, burst: u32) -> bool {
        let (at, spent) = self.spent.unwrap_or((now, 0.0));
        let refilled = now.saturating_duration_since(at).as_secs_f64() * f64::from(per_s);
        let spent = (spent - refilled).max(0.0);
        let takes = spent + 1.0 <= f64::from(burst);
        self.spent = Some((now, if takes { spent + 1.0 } else { spent }));
        takes
    }

    /// The number of packets it has dropped.
    pub(super) const fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

    use super::*;

    const SYN: Packet = Packet {
        direction: Direction::ToServer,
        kind: Kind::Syn,
        client_port: 40_000,
        server_port: 80,
        seq: 1,
        ack: None,
        payload: 0,
        offset: Some(0),
        repeated: false,
    };

    fn data(offset: u64, payload: u32, repeated: bool) -> Packet {
        Packet {
            kind: Kind::Data,
            offset: Some(offset),
            payload,
            repeated,
            ..SYN
        }
    }

    /// Which of six SYNs are dropped.
    fn of_six(pattern: DropPattern) -> Vec<usize> {
        let mut rule = Active::new(Rule::new(PacketFilter::SYN, pattern));
        let now = Instant::now();
        // Packets that do not match are not counted.
        assert!(!rule.drops(&data(0, 1, false), now, 0.0));
        let all: Vec<usize> = (1..=6).filter(|_| rule.drops(&SYN, now, 0.5)).collect();
        assert_eq!(rule.dropped(), all.len() as u64);
        all
    }

    #[test]
    fn drop_patterns_select_packets() {
        assert_eq!(of_six(DropPattern::All), [1, 2, 3, 4, 5, 6]);
        assert_eq!(of_six(DropPattern::Next(2)), [1, 2]);
        assert_eq!(of_six(DropPattern::Every(2)), [1, 3, 5]);
        assert_eq!(of_six(DropPattern::Every(3)), [1, 4]);
        assert_eq!(of_six(DropPattern::Share(0.4)), [] as [usize; 0]);
        assert_eq!(of_six(DropPattern::Share(0.6)).len(), 6);
    }

    #[test]
    fn runs_have_their_mean_share_and_length() {
        const COUNT: u32 = 400_000;
        for (share, length) in [(0.015, 2.0), (0.1, 5.0), (0.3, 1.5)] {
            let pattern = DropPattern::Runs { share, length };
            let mut rule = Active::new(Rule::new(PacketFilter::ALL, pattern));
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let answer = Packet {
                direction: Direction::ToClient,
                ..SYN
            };
            let (mut dropped, mut runs, mut before) = (0, 0, false);
            for _ in 0..COUNT {
                let now = rule.drops(&SYN, Instant::now(), rng.random());
                dropped += u32::from(now);
                runs += u32::from(now && !before);
                before = now;
                // The other direction has a state of its own.
                rule.drops(&answer, Instant::now(), rng.random());
            }
            let found = [dropped, runs].map(f64::from);
            let (own_share, own_length) = (found[0] / f64::from(COUNT), found[0] / found[1]);
            assert!(
                (own_share / share - 1.0).abs() < 0.06,
                "{share}: {own_share}"
            );
            assert!(
                (own_length / length - 1.0).abs() < 0.06,
                "{length}: {own_length}"
            );
        }
    }

    #[test]
    fn policer_drops_above_rate_and_burst() {
        let pattern = DropPattern::Above {
            per_s: 10,
            burst: 3,
        };
        let mut rule = Active::new(Rule::new(PacketFilter::SYN, pattern));
        let begin = Instant::now();
        let mut passes = |ms: u64| !rule.drops(&SYN, begin + Duration::from_millis(ms), 0.0);
        assert_eq!(
            [0, 0, 0, 0, 50].map(&mut passes),
            [true, true, true, false, false]
        );
        // A token every 100 ms, whatever arrives in between; at most three after a pause.
        assert_eq!([110, 120, 210].map(&mut passes), [true, false, true]);
        assert_eq!([9_000; 4].map(&mut passes), [true, true, true, false]);
    }

    #[test]
    fn filter_selects_last_segments_first_time() {
        let last = PacketFilter::SERVER_DATA.from_byte(200).first_time();
        let last = PacketFilter {
            direction: None,
            ..last
        };
        assert!(!last.matches(&data(100, 100, false)));
        assert!(last.matches(&data(200, 100, false)));
        assert!(!last.matches(&data(200, 100, true)));
        assert!(!last.matches(&SYN));
        let by_length = PacketFilter::ALL.with_payload(100);
        assert!(by_length.matches(&data(0, 100, false)));
        assert!(!by_length.matches(&data(0, 99, false)));
        assert!(!PacketFilter::SERVER_DATA.matches(&data(0, 1, false)));
        assert!(!PacketFilter::SYN.of_client(1).matches(&SYN));
        assert!(PacketFilter::SYN.of_client(40_000).matches(&SYN));
    }

    #[test]
    fn rule_ends_at_its_time() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let mut rule = Active::new(Rule {
            until: Some(begin + ms(30)),
            ..Rule::new(PacketFilter::ALL, DropPattern::All)
        });
        for (at, drops) in [(0, true), (29, true), (30, false)] {
            assert_eq!(rule.drops(&SYN, begin + ms(at), 0.0), drops, "{at}");
        }
    }
}
