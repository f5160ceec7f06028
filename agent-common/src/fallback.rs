//! Fallback: new connections of a policy get the kernel's own timers. The program decides it, so that it works without
//! the daemon.
//!
//! - Spurious: the timer has become too short for the path. The program counts connections with a spurious
//!   retransmission, and the fallback lasts until the daemon sets another value.
//! - Outage: attempts lose their first SYN and none is established. Retransmissions of a short outage gain the most, so
//!   the fallback begins after a second and a half, and the first establishment ends it. (A server sees a request only
//!   while SYNs arrive, so there is none for accepted connections.)

use crate::direction;

/// The state of one policy and direction. All zero: nothing has happened.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fallback {
    /// The epoch ([`crate::Policy::epochs`]) that `spurious` belongs to.
    pub epoch: u32,
    /// Hundredths of a connection: [`Fallback::COST`] for each connection with a spurious retransmission, less 1 for
    /// each established without one. CPUs that subtract at the same time can take it below 0.
    pub spurious: i32,
    /// Attempts that have lost their first SYN since one was last established, at most [`Fallback::LOST`] (or a few
    /// more, if CPUs add at the same time).
    pub lost: u32,
    /// When the first of these was lost, milliseconds of CLOCK_MONOTONIC; wraps.
    pub lost_since_ms: u32,
}

/// Indexes of `FALLBACKS` per slot: the active and the passive direction.
pub const DIRECTIONS: u32 = 2;

/// The index in `FALLBACKS` of a slot and a direction, active or passive.
#[inline(always)]
#[must_use]
pub const fn key(slot: u32, direction: u32) -> u32 {
    slot * DIRECTIONS + (direction & direction::PASSIVE)
}

impl Fallback {
    /// Fallback (spurious) begins with this many connections with a spurious retransmission, beyond a hundredth of the
    /// others.
    pub const SPURIOUS: i32 = 20;
    /// What a connection with a spurious retransmission adds to `spurious`.
    pub const COST: i32 = 100;
    /// Fallback (spurious) begins when `spurious` reaches this.
    pub const LIMIT: i32 = Self::SPURIOUS * Self::COST;
    /// Added when it begins, so that what other CPUs subtract cannot end it. Even a thousand CPUs that add it at the
    /// same time do not overflow the number.
    pub const BEGUN: i32 = 1 << 20;
    /// Fallback (outage) needs this many attempts that have lost their first SYN.
    pub const LOST: u32 = 6;
    /// It begins when no attempt has been established for this time since the first of them, milliseconds.
    pub const OUTAGE_MS: u32 = 1500;

    /// Whether fallback (spurious) is in force for this epoch.
    #[inline(always)]
    #[must_use]
    pub const fn is_spurious(&self, epoch: u32) -> bool {
        self.spurious >= Self::LIMIT && self.epoch == epoch
    }

    /// Whether fallback (outage) is in force at this time, milliseconds of CLOCK_MONOTONIC. The time is read only if
    /// enough attempts have lost their first SYN.
    #[inline(always)]
    #[must_use]
    pub fn is_outage(&self, now_ms: impl FnOnce() -> u32) -> bool {
        self.lost >= Self::LOST && now_ms().wrapping_sub(self.lost_since_ms) >= Self::OUTAGE_MS
    }

    /// What a connection with a spurious retransmission adds to `spurious`.
    #[inline(always)]
    #[must_use]
    pub const fn cost(&self) -> i32 {
        if self.spurious >= Self::LIMIT {
            0
        } else if self.spurious + Self::COST >= Self::LIMIT {
            Self::COST + Self::BEGUN
        } else {
            Self::COST
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_state_is_no_fallback() {
        let fallback = Fallback::default();
        assert!(!fallback.is_spurious(0) && !fallback.is_outage(|| u32::MAX));
        assert_eq!([key(5, 0), key(5, 1), key(6, 0)], [10, 11, 12]);
    }

    #[test]
    fn twentieth_spurious_connection_begins_fallback_of_its_epoch() {
        let mut fallback = Fallback {
            epoch: 7,
            ..Fallback::default()
        };
        for _ in 0..19 {
            fallback.spurious += fallback.cost();
        }
        assert!(!fallback.is_spurious(7));
        fallback.spurious += fallback.cost();
        assert!(fallback.is_spurious(7) && !fallback.is_spurious(8));
        // What other CPUs subtract at that moment does not end it.
        fallback.spurious -= 100_000;
        assert!(fallback.is_spurious(7));
        assert_eq!(fallback.cost(), 0);
    }

    #[test]
    fn spurious_does_not_overflow_if_all_cpus_add_at_once() {
        let seen = Fallback {
            epoch: 7,
            spurious: Fallback::LIMIT - 1,
            ..Fallback::default()
        };
        let mut fallback = seen;
        for _ in 0..1024 {
            fallback.spurious = fallback.spurious.checked_add(seen.cost()).unwrap();
        }
        assert!(fallback.is_spurious(7));
    }

    #[test]
    fn outage_needs_six_attempts_and_time() {
        let since = |lost, lost_since_ms| Fallback {
            lost,
            lost_since_ms,
            ..Fallback::default()
        };
        for (fallback, now_ms, holds) in [
            (since(6, 1000), 2499, false),
            (since(6, 1000), 2500, true),
            (since(5, 1000), 60_000, false),
            // The clock wraps after 49 days.
            (since(8, u32::MAX - 999), 499, false),
            (since(8, u32::MAX - 999), 500, true),
        ] {
            assert_eq!(fallback.is_outage(|| now_ms), holds, "{fallback:?}");
        }
    }
}
