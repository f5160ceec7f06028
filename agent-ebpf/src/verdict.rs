//! Whether retransmissions of a SYN or SYN-ACK were spurious.
//!
//! A copy is spurious if the answer to an earlier copy was already under way. The rules:
//!
//! - With timestamps, the smoothed RTT of the handshake counts from the copy that was answered. If it is shorter than
//!   the initial RTO, no copy was sent while the answer was under way: none is spurious.
//! - Otherwise, and if there is no RTT (without timestamps, because of Karn's algorithm), a lost answer and a slow path
//!   look the same. Later RTTs decide: after [`SAMPLES`] samples that are not below the initial RTO, the path is slow.
//!   (A single sample may be a delayed ACK.)
//! - If later RTTs are below the initial RTO, and the answer came about one RTT after the last copy, the copies were
//!   needed. A later answer belongs to an earlier copy: a firewall, a SYN queue or a radio link delayed only the SYN.
//!   Then all copies are spurious, however short the RTTs are afterwards.
//! - A handshake of [`LONG_US`] or more whose later RTTs are short had a loss, at whichever end: the peer's own SYN-ACK
//!   timer, or its limit of one answer in 500 ms, decided when it ended, and not the copies. None is spurious, and the
//!   handshake's time is no path RTT, also where nothing was retransmitted here ([`had_loss`]).
//! - If an active handshake took longer than its RTT by about an RTO or more, the peer did not answer the first copy:
//!   at least one retransmission was needed, whatever the others were.
//! - A connection that ends earlier is judged by the samples so far; without any it stays undecided.

/// A handshake that took this long, microseconds, may have had a loss at the other end: a little less than the least
/// interval between two answers of a listener (`net.ipv4.tcp_invalid_ratelimit`, 500 ms).
pub const LONG_US: u32 = 450_000;

/// Whether a handshake was long because of a loss, judged by the least RTT since: on a long path RTTs stay long.
#[inline(always)]
#[must_use]
pub const fn had_loss(took_us: u64, least_us: u32) -> bool {
    took_us >= LONG_US as u64 && (least_us as u64) < took_us / 2
}

/// RTT samples after which a path counts as slow.
pub const SAMPLES: u32 = 3;

/// The verdict on the retransmissions of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Open until there are more RTT samples.
    Open,
    /// This number was spurious, the others were needed.
    Spurious(u32),
}

/// The maximum number of spurious retransmissions, as known when the connection is established. Unless it is 0, later
/// RTTs must decide. `srtt_us` is 0 if there is none; `took_us` is the time since the first copy, or 0 if unknown.
#[inline(always)]
#[must_use]
pub const fn spurious_at_most(
    retransmissions: u32,
    srtt_us: u32,
    took_us: u64,
    initial_rto_us: u32,
) -> u32 {
    if srtt_us == 0 || initial_rto_us == 0 {
        return retransmissions;
    }
    if srtt_us < initial_rto_us {
        return 0;
    }
    let answered_after_us = took_us.saturating_sub(srtt_us as u64);
    if answered_after_us >= (initial_rto_us / 2) as u64 {
        return retransmissions.saturating_sub(1);
    }
    retransmissions
}

/// The RTT samples of a connection since it was established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Number of samples.
    pub count: u32,
    /// The minimum of them and of the handshake's RTT, microseconds.
    pub least_us: u32,
    /// The longest of them, microseconds; 0 if the kernel does not pass the sample (before Linux 6.10).
    pub longest_us: u32,
    /// The connection has ended, so there will be no more.
    pub are_all: bool,
}

impl Samples {
    /// The longest time after which an answer still belongs to the last SYN: four times the longest sample, and at
    /// least a third of the initial RTO. (Simulated: if the RTO is twice the 99.9th percentile of a lognormal, Pareto
    /// or Wi-Fi-like RTT, at most 2 % of the answers to the last SYN come later.)
    #[inline(always)]
    const fn tolerance_us(&self, initial_rto_us: u32) -> u64 {
        let longest_us = if self.longest_us > self.least_us {
            self.longest_us
        } else {
            self.least_us
        };
        let (samples, timer) = (longest_us as u64 * 4, (initial_rto_us / 3) as u64);
        if samples > timer { samples } else { timer }
    }
}

/// Judges the retransmissions of a handshake by later RTT samples; `at_most`, `took_us`: see [`spurious_at_most`].
/// `answered_after_us`: the time from the last copy of the SYN to the answer, for connections that this host opens. A
/// listener also answers duplicate SYNs, which follow the peer's timers, so for its connections the number of copies
/// that fit into a round trip means nothing.
#[inline(always)]
#[must_use]
pub const fn after_samples(
    at_most: u32,
    samples: Samples,
    initial_rto_us: u32,
    took_us: u64,
    answered_after_us: Option<u64>,
) -> Verdict {
    if samples.are_all && at_most == 0 {
        return Verdict::Spurious(0);
    }
    if samples.count == 0 || initial_rto_us == 0 {
        return Verdict::Open;
    }
    let is_fast = samples.least_us < initial_rto_us;
    let is_late = match answered_after_us {
        Some(us) => us > samples.tolerance_us(initial_rto_us),
        None => false,
    };
    if is_fast && !is_late || had_loss(took_us, samples.least_us) {
        return Verdict::Spurious(0);
    }
    if samples.count < SAMPLES && !samples.are_all {
        return Verdict::Open;
    }
    Verdict::Spurious(if is_fast || answered_after_us.is_none() {
        at_most
    } else {
        lesser(at_most, samples.least_us / initial_rto_us)
    })
}

#[inline(always)]
const fn lesser(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::{Verdict::*, *};

    fn samples(count: u32, rtt_us: u32, are_all: bool) -> Samples {
        Samples {
            count,
            least_us: rtt_us,
            longest_us: if rtt_us == u32::MAX { 0 } else { rtt_us },
            are_all,
        }
    }

    /// The answer came one RTT after the last copy.
    fn in_time(at_most: u32, count: u32, rtt_us: u32, rto_us: u32, are_all: bool) -> Verdict {
        let answered_after_us = Some(rtt_us.into());
        after_samples(
            at_most,
            samples(count, rtt_us, are_all),
            rto_us,
            0,
            answered_after_us,
        )
    }

    const RTO: u32 = 100_000;

    #[test]
    fn a_short_rtt_with_timestamps_is_a_lost_segment() {
        // A lost SYN, RTT 10 ms; a lost SYN, RTT just below the RTO.
        assert_eq!(spurious_at_most(1, 10_000, 114_000, RTO), 0);
        assert_eq!(spurious_at_most(1, 90_000, 194_000, RTO), 0);
        // Accepted: the duration is unknown.
        assert_eq!(spurious_at_most(1, 10_000, 0, RTO), 0);
    }

    #[test]
    fn an_rtt_as_long_as_the_rto_is_not_short() {
        assert_eq!(spurious_at_most(1, RTO, RTO.into(), RTO), 1);
        assert_eq!(in_time(1, 3, RTO, RTO, false), Spurious(1));
    }

    #[test]
    fn a_long_one_counts_from_the_copy_that_was_answered() {
        // A lost SYN on a slow path: one retransmission was needed, none spurious.
        assert_eq!(spurious_at_most(1, 120_000, 224_000, RTO), 0);
        assert_eq!(in_time(0, 3, 120_000, RTO, false), Spurious(0));
        assert_eq!(in_time(0, 0, 120_000, RTO, true), Spurious(0));
        // The first copy lost, the second answered after 120 ms, the third spurious.
        assert_eq!(spurious_at_most(2, 120_000, 224_000, RTO), 1);
        assert_eq!(in_time(1, 3, 120_000, RTO, false), Spurious(1));
    }

    #[test]
    fn a_lost_syn_and_a_lost_syn_ack_are_not_spurious() {
        // 1 s, RTT 10 ms: SYN 1 lost, the answer to SYN 2 lost, SYN 3 answered; the RTT counts from SYN 2.
        let at_most = spurious_at_most(2, 1_010_000, 2_020_000, 1_000_000);
        assert_eq!(at_most, 1);
        let later = |samples, rtt_us, last| in_time(at_most, samples, rtt_us, 1_000_000, last);
        assert_eq!(later(1, 10_000, false), Spurious(0));
        assert_eq!(later(0, u32::MAX, true), Open);
    }

    #[test]
    fn a_lost_answer_and_a_slow_path_look_the_same_at_first() {
        // SYN-ACK lost, RTT 10 ms: 115 ms measured. Nothing lost, RTT 150 ms. No timestamps.
        assert_eq!(spurious_at_most(1, 115_000, 115_000, RTO), 1);
        assert_eq!(spurious_at_most(1, 150_000, 150_000, RTO), 1);
        assert_eq!(spurious_at_most(1, 0, 150_000, RTO), 1);
        assert_eq!(in_time(1, 1, 10_000, RTO, false), Spurious(0));
        assert_eq!(in_time(1, 1, 150_000, RTO, false), Open);
        assert_eq!(in_time(1, 3, 150_000, RTO, false), Spurious(1));
        assert_eq!(in_time(1, 1, 150_000, RTO, true), Spurious(1));
        assert_eq!(in_time(1, 0, u32::MAX, RTO, true), Open);
    }

    #[test]
    fn as_many_are_spurious_as_fit_into_a_round_trip() {
        // RTT 90 ms, RTO 24 ms: three copies of the first.
        assert_eq!(in_time(3, 3, 90_000, 24_000, false), Spurious(3));
        // Only two fit: the path has become slower since, or one copy was lost.
        assert_eq!(in_time(3, 3, 50_000, 24_000, false), Spurious(2));
    }

    /// A copy follows every 24 ms; the firewall holds the first SYN for 150 ms, and the RTT is 0.2 ms.
    #[test]
    fn late_answer_makes_every_copy_spurious() {
        const SHORT: u32 = 24_000;
        let judged = |count, answered_after_us| {
            after_samples(
                5,
                samples(count, 200, false),
                SHORT,
                150_000,
                Some(answered_after_us),
            )
        };
        assert_eq!(judged(1, 30_000), Open);
        assert_eq!(judged(3, 30_000), Spurious(5));
        // In time: the fifth copy was needed, and so were the others.
        assert_eq!(judged(1, 300), Spurious(0));
        assert_eq!(judged(1, 8_000), Spurious(0));
        assert_eq!(judged(1, 8_001), Open);
        // RTTs that vary widen the bound, and a connection that ends is judged by the samples so far.
        let mut varied = samples(2, 200, false);
        varied.longest_us = 9_000;
        assert_eq!(
            after_samples(5, varied, SHORT, 150_000, Some(30_000)),
            Spurious(0)
        );
        let ended = samples(1, 200, true);
        assert_eq!(
            after_samples(5, ended, SHORT, 150_000, Some(30_000)),
            Spurious(5)
        );
        // Timestamps have shown that the first copy was lost.
        assert_eq!(
            after_samples(4, ended, SHORT, 150_000, Some(30_000)),
            Spurious(4)
        );
    }

    /// SYN-ACKs are lost for a time; the peer's own timer answers at 492 ms or 1 s, between two copies.
    #[test]
    fn long_handshake_with_short_rtts_had_a_loss() {
        for took_us in [492_000, 1_003_000] {
            let judged = |rtt_us| {
                let later = samples(3, rtt_us, false);
                after_samples(4, later, RTO, took_us, Some(80_000))
            };
            assert_eq!(judged(3_000), Spurious(0));
            assert!(had_loss(took_us, 3_000));
        }
        // A long path.
        let later = samples(3, 480_000, false);
        assert_eq!(
            after_samples(4, later, RTO, 500_000, Some(80_000)),
            Spurious(4)
        );
        assert!(!had_loss(500_000, 480_000) && !had_loss(449_999, 3_000));
    }

    #[test]
    fn a_listener_answers_every_syn() {
        // The listener's own timer, and the peer's second SYN.
        assert_eq!(
            after_samples(2, samples(3, 120_000, false), RTO, 0, None),
            Spurious(2)
        );
    }
}
