//! Whether a SYN or SYN-ACK was sent again for nothing.
//!
//! A copy was sent needlessly if the answer to an earlier one was on its way. What can be known:
//!
//! - With timestamps the smoothed RTT of the handshake counts from the copy that was answered. If it
//!   is shorter than the initial RTO, no copy was sent while the answer was under way. If an active
//!   handshake took longer by about an RTO or more, the first copy was lost, and only those sent
//!   during the last round trip were needless.
//! - If the RTT counts from the first copy, or there is none (without timestamps, Karn's algorithm),
//!   a lost answer looks the same as a slow path. The RTTs that follow tell: one below the initial
//!   RTO, and the answer was lost; [`SAMPLES`] that are not, and the path is slow. (One alone
//!   may be a delayed ACK.)
//! - A connection that ends before that is judged by what there was; without any sample the question
//!   stays open.

/// RTT samples after which a path counts as slow.
pub const SAMPLES: u32 = 3;

/// What is known of the retransmissions of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Later RTTs must tell.
    Open,
    /// So many were needless, the others needed.
    Spurious(u32),
}

/// When the connection is established: `srtt_us` is 0 if there is none; `took_us`, the handshake's
/// length since the first copy, 0 if it is not known.
#[inline(always)]
#[must_use]
pub const fn at_establishment(
    retransmissions: u32,
    srtt_us: u32,
    took_us: u64,
    initial_rto_us: u32,
) -> Verdict {
    if srtt_us == 0 || initial_rto_us == 0 {
        return Verdict::Open;
    }
    let answered_after_us = took_us.saturating_sub(srtt_us as u64);
    if srtt_us < initial_rto_us || answered_after_us >= (initial_rto_us / 2) as u64 {
        // At least one was needed.
        return Verdict::Spurious(at_most(
            retransmissions.saturating_sub(1),
            srtt_us / initial_rto_us,
        ));
    }
    Verdict::Open
}

/// After a number of RTT samples since, `rtt_min_us` the least of them and of the handshake's. `last`:
/// there will be no more. A listener also answers SYNs that come twice, which follow the peer's timers:
/// how many fit into a round trip says nothing there.
#[inline(always)]
#[must_use]
pub const fn after_samples(
    retransmissions: u32,
    samples: u32,
    rtt_min_us: u32,
    initial_rto_us: u32,
    is_active: bool,
    last: bool,
) -> Verdict {
    if samples == 0 || initial_rto_us == 0 {
        return Verdict::Open;
    }
    if rtt_min_us < initial_rto_us {
        return Verdict::Spurious(0);
    }
    if samples >= SAMPLES || last {
        return Verdict::Spurious(if is_active {
            at_most(retransmissions, rtt_min_us / initial_rto_us)
        } else {
            retransmissions
        });
    }
    Verdict::Open
}

/// How often the timer of an accepted connection's SYN-ACK fired, at the least: a lost SYN-ACK makes
/// the peer send its SYN again as well, and that is answered by another copy.
#[inline(always)]
#[must_use]
pub const fn timer_expiries(retransmissions: u32, is_active: bool) -> u32 {
    if is_active {
        retransmissions
    } else {
        retransmissions.div_ceil(2)
    }
}

#[inline(always)]
const fn at_most(limit: u32, n: u32) -> u32 {
    if n < limit { n } else { limit }
}

#[cfg(test)]
mod tests {
    use super::{Verdict::*, *};

    const RTO: u32 = 100_000;

    #[test]
    fn a_short_rtt_with_timestamps_is_a_lost_segment() {
        // A lost SYN, RTT 10 ms; a lost SYN, RTT just below the RTO.
        assert_eq!(at_establishment(1, 10_000, 114_000, RTO), Spurious(0));
        assert_eq!(at_establishment(1, 90_000, 194_000, RTO), Spurious(0));
        // Accepted: how long it took is not known.
        assert_eq!(at_establishment(1, 10_000, 0, RTO), Spurious(0));
    }

    #[test]
    fn a_long_one_counts_from_the_copy_that_was_answered() {
        // A lost SYN on a slow path: one retransmission was needed, none needless.
        assert_eq!(at_establishment(1, 120_000, 224_000, RTO), Spurious(0));
        // The first lost, the second answered after 120 ms, the third needless.
        assert_eq!(at_establishment(2, 120_000, 224_000, RTO), Spurious(1));
    }

    #[test]
    fn a_lost_answer_and_a_slow_path_look_the_same_at_first() {
        // SYN-ACK lost, RTT 10 ms: 115 ms measured. Nothing lost, RTT 150 ms. No timestamps.
        assert_eq!(at_establishment(1, 115_000, 115_000, RTO), Open);
        assert_eq!(at_establishment(1, 150_000, 150_000, RTO), Open);
        assert_eq!(at_establishment(1, 0, 150_000, RTO), Open);
        assert_eq!(after_samples(1, 1, 10_000, RTO, true, false), Spurious(0));
        assert_eq!(after_samples(1, 1, 150_000, RTO, true, false), Open);
        assert_eq!(after_samples(1, 3, 150_000, RTO, true, false), Spurious(1));
        assert_eq!(after_samples(1, 1, 150_000, RTO, true, true), Spurious(1));
        assert_eq!(after_samples(1, 0, u32::MAX, RTO, true, true), Open);
    }

    #[test]
    fn as_many_are_needless_as_fit_into_a_round_trip() {
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
        assert_eq!(timer_expiries(2, false), 1);
        assert_eq!(timer_expiries(2, true), 2);
        assert_eq!(timer_expiries(1, false), 1);
    }
}
