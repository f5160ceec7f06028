//! Round trips in the log of a link: of every segment, and as a packet sampler sees them.
//!
//! Flow metrics of clouds and sFlow sample packets. Their round-trip time is the time from a sampled data segment to an
//! ACK that covers it. They do not know which segments were retransmitted, and whether an earlier ACK covered them.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_model::estimator::Sample;
use rto_testbed::link::{packet::Direction, relay::Relayed};

use crate::summary::{f, micros};

/// The measures of a sampler: data of each end, with every ACK, and with only the ACKs that are sampled as well.
pub(crate) const MEASURES: [&str; 4] = [
    "sampled at the client",
    "sampled at the server",
    "exported at the client",
    "exported at the server",
];
/// A sampler forgets a segment without an ACK after this time.
const FORGETS: Duration = Duration::from_secs(10);

/// The round trips of data in one direction, as the end that sent it sees them: from each of these packets to the first
/// other one whose ACK covers it. Each sample comes with its data packet's place in the log.
pub(crate) fn round_trips<'a>(
    log: &'a [Relayed],
    own: Direction,
    is_data: impl Fn(usize) -> bool + 'a,
    is_ack: impl Fn(usize) -> bool + 'a,
) -> impl Iterator<Item = (usize, Sample)> + 'a {
    let data = log.iter().enumerate().filter_map(move |(number, sent)| {
        let packet = sent
            .packet
            .filter(|it| it.direction == own && it.payload > 0)?;
        is_data(number).then_some((number, sent, packet))
    });
    data.filter_map(move |(number, sent, packet)| {
        let ports = (packet.client_port, packet.server_port);
        let end = packet.seq.wrapping_add(packet.payload);
        let mut later = log.iter().enumerate().skip(number + 1);
        let (_, came) = later.find(|(number, other)| {
            let covers = other.packet.is_some_and(|ack| {
                ack.direction != own
                    && (ack.client_port, ack.server_port) == ports
                    && ack.ack.is_some_and(|ack| ack.wrapping_sub(end) < 1 << 31)
            });
            covers && !other.dropped() && is_ack(*number)
        })?;
        let rtt = came.leaves?.saturating_duration_since(sent.at);
        let sent_us = micros(sent.at.saturating_duration_since(log[0].at));
        let rtt_us = micros(rtt);
        Some((number, Sample { sent_us, rtt_us }))
    })
}

/// What a sampler of one in `every` packets reads, milliseconds, for each of [`MEASURES`]. It counts in buckets of 1 ms,
/// and reads the middle of a bucket.
pub(crate) fn readings(log: &[Relayed], every: u64, seed: u64) -> [Vec<f64>; 4] {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let drawn: Vec<bool> = log
        .iter()
        .map(|_| random.random_range(0..every.max(1)) == 0)
        .collect();
    let of = |own, exported: bool| {
        let is_drawn = |number: usize| drawn[number];
        let read = round_trips(log, own, is_drawn, |number| !exported || drawn[number])
            .filter(|(_, sample)| sample.rtt_us <= micros(FORGETS))
            .map(|(_, sample)| f(sample.rtt_us / 1000) + 0.5);
        read.collect()
    };
    let (client, server) = (Direction::ToServer, Direction::ToClient);
    [
        of(client, false),
        of(server, false),
        of(client, true),
        of(server, true),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rto_testbed::link::packet::{Kind, Packet};

    use super::*;

    /// A packet at this time, with its first sequence number, its data and its ACK.
    fn packet(
        begin: Instant,
        ms: u64,
        direction: Direction,
        (seq, payload, ack): (u32, u32, u32),
    ) -> Relayed {
        let at = begin + Duration::from_millis(ms);
        Relayed {
            at,
            time: Duration::ZERO,
            packet: Some(Packet {
                direction,
                kind: if payload > 0 { Kind::Data } else { Kind::Ack },
                client_port: 1,
                server_port: 2,
                seq,
                ack: Some(ack),
                payload,
                offset: None,
                repeated: false,
            }),
            bytes: 100,
            leaves: Some(at),
        }
    }

    /// Requests of two segments every 100 ms, answered after a millisecond; the answer is acknowledged 40 ms later.
    fn transactions(count: u32) -> Vec<Relayed> {
        let (begin, first) = (Instant::now(), u32::MAX - 300);
        let all = (0..count).flat_map(|n| {
            let at = u64::from(n) * 100;
            let (seq, answer) = (first.wrapping_add(n * 10), n * 2);
            let (to, back) = (Direction::ToServer, Direction::ToClient);
            [
                packet(begin, at, to, (seq, 9, answer)),
                packet(begin, at, to, (seq.wrapping_add(9), 1, answer)),
                packet(begin, at + 1, back, (answer, 2, seq.wrapping_add(10))),
                packet(begin, at + 41, to, (seq.wrapping_add(10), 0, answer + 2)),
            ]
        });
        all.collect()
    }

    #[test]
    fn sampler_of_every_packet_reads_each_round_trip() {
        let [client, server, exported, _] = readings(&transactions(50), 1, 1);
        assert_eq!((client.len(), server.len()), (100, 50));
        assert!(
            client.iter().all(|ms| *ms == 1.5) && client == exported,
            "{client:?}"
        );
        assert!(server.iter().all(|ms| *ms == 40.5), "{server:?}");
    }

    #[test]
    fn sampled_acks_are_later_than_the_first_one() {
        let [_, server, client, exported] = readings(&transactions(4000), 8, 1);
        assert!(server.iter().all(|ms| *ms == 40.5));
        // Of the ACKs that cover a segment one in eight is there: the next requests carry the same one.
        for read in [client, exported] {
            let mean = read.iter().sum::<f64>() / f(read.len() as u64);
            assert!((200.0..900.0).contains(&mean), "{mean}");
        }
    }
}
