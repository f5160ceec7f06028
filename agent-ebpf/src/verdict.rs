//! Whether a SYN or SYN-ACK was sent again for nothing.
//!
//! A copy is spurious if the answer to an earlier one was on its way. What can be known:
//!
//! - With timestamps the smoothed RTT of the handshake counts from the copy that was answered. If it
//!   is shorter than the initial RTO, no copy was sent while the answer was under way: none is spurious.
//! - Else a lost answer looks the same as a slow path, also without an RTT (without timestamps, Karn's
//!   algorithm). The RTTs that follow tell: one below the initial RTO, and the answer was lost;
//!   [`SAMPLES`] that are not, and the path is slow. (One alone may be a delayed ACK.)
//! - If an active handshake took longer than the RTT by about an RTO or more, the first copy was not the
//!   one that was answered: at least one was needed, whatever the others were.
//! - A connection that ends before that is judged by what there was; without any sample the question
//!   stays open.

/// RTT samples after which a path counts as slow.
pub const SAMPLES: u32 = 3;

/// What is known of the retransmissions of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Later RTTs must tell.
    Open,
    /// So many were spurious, the others needed.
    Spurious(u32),
}

/// How many of the retransmissions can have been spurious, when the connection is established; for anything but 0
/// later RTTs must tell. `srtt_us` is 0 if there is none; `took_us`, the handshake's length
/// since the first copy, 0 if it is not known.
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

/// After a number of RTT samples since, `rtt_min_us` the least of them and of the handshake's; `at_most`: see
/// [`spurious_at_most`]. `last`: there will be no more. A listener also answers SYNs that come twice, which
/// follow the peer's timers: how many fit into a round trip says nothing there.
#[inline(always)]
#[must_use]
pub const fn after_samples(
    at_most: u32,
    samples: u32,
    rtt_min_us: u32,
    initial_rto_us: u32,
    is_active: bool,
    last: bool,
) -> Verdict {
    if last && at_most == 0 {
        return Verdict::Spurious(0);
    }
    if samples == 0 || initial_rto_us == 0 {
        return Verdict::Open;
    }
    if rtt_min_us < initial_rto_us {
        return Verdict::Spurious(0);
    }
    if samples >= SAMPLES || last {
        return Verdict::Spurious(if is_active {
            lesser(at_most, rtt_min_us / initial_rto_us)
        } else {
            at_most
        });
    }
    Verdict::Open
}

/// How often the timer of an accepted connection's SYN-ACK fired, at least: a lost SYN-ACK makes
/// the peer send its SYN again as well, and that is answered by another copy.
#[inline(always)]
#[must_use]
pub const fn timer_expiries(retransmissions: u32) -> u32 {
    retransmissions.div_ceil(2)
}

/// By how much sooner so many retransmissions of a SYN-ACK were sent than by the kernel's own timers,
/// microseconds; negative where it was later. Timers count as exact, and all but the first few as
/// the seventh.
#[inline(always)]
#[must_use]
pub const fn syn_ack_gain_us(retransmissions: u32, initial_rto_us: u32) -> i64 {
    let expiries = lesser(timer_expiries(retransmissions), EXPIRIES_MAX);
    // 1 + 2 + 4 + ... initial RTOs.
    ((1i64 << expiries) - 1) * (1_000_000 - initial_rto_us as i64)
}

/// Doublings of 1 s that stay below TCP_RTO_MAX (120 s).
const EXPIRIES_MAX: u32 = 7;

#[inline(always)]
const fn lesser(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::{Verdict::*, *};

    const RTO: u32 = 100_000;

    #[test]
    fn a_short_rtt_with_timestamps_is_a_lost_segment() {
        // A lost SYN, RTT 10 ms; a lost SYN, RTT just below the RTO.
        assert_eq!(spurious_at_most(1, 10_000, 114_000, RTO), 0);
        assert_eq!(spurious_at_most(1, 90_000, 194_000, RTO), 0);
        // Accepted: how long it took is not known.
        assert_eq!(spurious_at_most(1, 10_000, 0, RTO), 0);
    }

    #[test]
    fn an_rtt_as_long_as_the_rto_is_not_short() {
        assert_eq!(spurious_at_most(1, RTO, RTO.into(), RTO), 1);
        assert_eq!(after_samples(1, 3, RTO, RTO, true, false), Spurious(1));
    }

    #[test]
    fn a_long_one_counts_from_the_copy_that_was_answered() {
        // A lost SYN on a slow path: one retransmission was needed, none spurious.
        assert_eq!(spurious_at_most(1, 120_000, 224_000, RTO), 0);
        assert_eq!(after_samples(0, 3, 120_000, RTO, true, false), Spurious(0));
        assert_eq!(after_samples(0, 0, 120_000, RTO, true, true), Spurious(0));
        // The first lost, the second answered after 120 ms, the third spurious.
        assert_eq!(spurious_at_most(2, 120_000, 224_000, RTO), 1);
        assert_eq!(after_samples(1, 3, 120_000, RTO, true, false), Spurious(1));
    }

    #[test]
    fn a_lost_syn_and_a_lost_syn_ack_are_not_spurious() {
        // 1 s, RTT 10 ms: SYN 1 lost, the answer to SYN 2 lost, SYN 3 answered; the RTT counts from SYN 2.
        let at_most = spurious_at_most(2, 1_010_000, 2_020_000, 1_000_000);
        assert_eq!(at_most, 1);
        let later =
            |samples, rtt_us, last| after_samples(at_most, samples, rtt_us, 1_000_000, true, last);
        assert_eq!(later(1, 10_000, false), Spurious(0));
        assert_eq!(later(0, u32::MAX, true), Open);
    }

    #[test]
    fn a_lost_answer_and_a_slow_path_look_the_same_at_first() {
        // SYN-ACK lost, RTT 10 ms: 115 ms measured. Nothing lost, RTT 150 ms. No timestamps.
        assert_eq!(spurious_at_most(1, 115_000, 115_000, RTO), 1);
        assert_eq!(spurious_at_most(1, 150_000, 150_000, RTO), 1);
        assert_eq!(spurious_at_most(1, 0, 150_000, RTO), 1);
        assert_eq!(after_samples(1, 1, 10_000, RTO, true, false), Spurious(0));
        assert_eq!(after_samples(1, 1, 150_000, RTO, true, false), Open);
        assert_eq!(after_samples(1, 3, 150_000, RTO, true, false), Spurious(1));
        assert_eq!(after_samples(1, 1, 150_000, RTO, true, true), Spurious(1));
        assert_eq!(after_samples(1, 0, u32::MAX, RTO, true, true), Open);
    }

    #[test]
    fn as_many_are_spurious_as_fit_into_a_round_trip() {
        // RTT 90 ms, RTO 24 ms: three copies of the first.
        assert_eq!(
            after_samples(3, 3, 90_000, 24_000, true, false),
            Spurious(3)
        );
        // Only two fit: the path became slower meanwhile, or one was lost.
        assert_eq!(
            after_samples(3, 3, 50_000, 24_000, true, false),
            Spurious(2)
        );
    }

    #[test]
    fn a_listener_answers_every_syn() {
        // Its own timer, and the peer's second SYN.
        assert_eq!(after_samples(2, 3, 120_000, RTO, false, false), Spurious(2));
        assert_eq!(timer_expiries(2), 1);
        assert_eq!(timer_expiries(1), 1);
    }

    #[test]
    fn a_syn_acks_gain_doubles() {
        assert_eq!(syn_ack_gain_us(1, 100_000), 900_000);
        assert_eq!(syn_ack_gain_us(3, 100_000), 2_700_000);
        assert_eq!(syn_ack_gain_us(1, 3_000_000), -2_000_000);
        assert_eq!(syn_ack_gain_us(1, 1_000_000), 0);
        assert_eq!(syn_ack_gain_us(u32::MAX, 0), 127_000_000);
    }
}
