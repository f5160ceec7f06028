//! Brakes on a short initial RTO that work without the daemon: a budget for retransmissions, and a fuse.
//!
//! The budget works like the retry budget of RPC libraries: beyond a reserve for short outages, the number of
//! retransmitted SYNs and SYN-ACKs is limited to a tenth of the established connections. (With a larger share, a server
//! near its capacity stays overloaded after a short stall, measured by `rto-lab tune`.) When half of the reserve is
//! spent, new connections get the kernel's timer, so that the other half is left for connections already under way. The
//! fuse detects a timer that has become too short: it counts retransmissions judged spurious, and stays blown until the
//! daemon sets another value.

use crate::direction;

/// The brakes of one policy and direction. All zero: nothing is spent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Brake {
    /// The epoch ([`crate::Policy::epochs`]) that `fuse` and `spurious` belong to.
    pub epoch: u32,
    /// How much of [`Brake::FUSE`] is spent, hundredths of a retransmission. CPUs that credit at the same time can take
    /// it below 0.
    pub fuse: i32,
    /// How much of [`crate::Policy::budgets`] is spent, tenths of a retransmission; may be below 0, as above.
    pub budget: i32,
    /// Connections with a spurious retransmission.
    pub spurious: u32,
}

/// Indexes of `BRAKES` per slot: the active and the passive direction.
pub const DIRECTIONS: u32 = 2;

/// The index in `BRAKES` of a slot and a direction, active or passive.
#[inline(always)]
#[must_use]
pub const fn key(slot: u32, direction: u32) -> u32 {
    slot * DIRECTIONS + (direction & direction::PASSIVE)
}

impl Brake {
    /// Spurious retransmissions that blow the fuse.
    pub const SPURIOUS: i32 = 20;
    /// The cost of a spurious retransmission, charged to the fuse. A connection without retransmissions credits 1.
    pub const FUSE_COST: i32 = 100;
    /// The fuse is blown when this much is spent.
    pub const FUSE: i32 = Self::SPURIOUS * Self::FUSE_COST;
    /// Spent in addition when the fuse blows, so that credits from other CPUs cannot reset it. Even a thousand CPUs
    /// that blow it at the same time do not overflow the number.
    pub const BLOWN: i32 = 1 << 20;
    /// The cost of a retransmission, charged to the budget. A connection credits 1.
    pub const BUDGET_COST: i32 = 10;

    /// Whether new connections get the kernel's timer.
    #[inline(always)]
    #[must_use]
    pub const fn holds(&self, epoch: u32, budget: u32) -> bool {
        self.is_blown(epoch) || self.is_throttled(budget)
    }

    /// Whether the fuse of this epoch is blown.
    #[inline(always)]
    #[must_use]
    pub const fn is_blown(&self, epoch: u32) -> bool {
        self.epoch == epoch && self.fuse >= Self::FUSE
    }

    /// Whether half of the budget is spent.
    #[inline(always)]
    #[must_use]
    pub const fn is_throttled(&self, budget: u32) -> bool {
        self.budget >= (budget - budget / 2).cast_signed()
    }

    /// The amount that this many spurious retransmissions add to [`Brake::fuse`].
    #[inline(always)]
    #[must_use]
    pub const fn fuse_cost(&self, retransmissions: u32) -> i32 {
        if self.fuse >= Self::FUSE {
            return 0;
        }
        // A higher number blows any fuse.
        let most = Self::SPURIOUS.cast_unsigned();
        let retransmissions = if retransmissions < most {
            retransmissions
        } else {
            most
        };
        let cost = retransmissions.cast_signed() * Self::FUSE_COST;
        if self.fuse + cost >= Self::FUSE {
            cost + Self::BLOWN
        } else {
            cost
        }
    }

    /// The amount that this many retransmissions add to [`Brake::budget`], limited to the rest of the budget.
    #[inline(always)]
    #[must_use]
    pub const fn budget_cost(&self, budget: u32, retransmissions: u32) -> i32 {
        let left = budget.cast_signed() - self.budget;
        if left <= 0 {
            return 0;
        }
        // A higher number spends all of it; the limit keeps the product in range.
        let most = left.cast_unsigned() / Self::BUDGET_COST.cast_unsigned() + 1;
        let retransmissions = if retransmissions < most {
            retransmissions
        } else {
            most
        };
        let cost = retransmissions.cast_signed() * Self::BUDGET_COST;
        if cost < left { cost } else { left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_spent_at_first() {
        let brake = Brake::default();
        assert!(!brake.holds(0, 100) && !brake.holds(1, 100));
        // A budget of 0 allows nothing.
        assert!(brake.is_throttled(0));
        assert_eq!([key(5, 0), key(5, 1), key(6, 0)], [10, 11, 12]);
    }

    #[test]
    fn either_of_both_holds() {
        let blown = Brake {
            fuse: Brake::FUSE,
            ..Brake::default()
        };
        let throttled = Brake {
            budget: 50,
            ..Brake::default()
        };
        assert!(blown.holds(0, 100) && !blown.is_throttled(100));
        assert!(throttled.holds(0, 100) && !throttled.is_blown(0));
    }

    #[test]
    fn a_budget_is_spent_to_the_last_tenth_whatever_its_size() {
        for budget in [1i32, 9, 10, 11, 55, 1 << 30] {
            let all = Brake::default().budget_cost(budget.cast_unsigned(), u32::MAX);
            assert_eq!(all, budget);
        }
    }

    #[test]
    fn a_fuse_blows_for_its_epoch() {
        let mut brake = Brake {
            epoch: 7,
            ..Brake::default()
        };
        for _ in 0..19 {
            brake.fuse += brake.fuse_cost(1);
        }
        assert!(!brake.is_blown(7));
        brake.fuse += brake.fuse_cost(1);
        assert!(brake.is_blown(7) && !brake.is_blown(8));
        // Credits from other CPUs at that moment do not reset it.
        brake.fuse -= 100_000;
        assert!(brake.is_blown(7));
        assert_eq!(brake.fuse_cost(u32::MAX), 0);
        assert!(Brake::default().fuse_cost(u32::MAX) > Brake::BLOWN);
    }

    #[test]
    fn a_fuse_that_all_processors_blow_at_once_is_blown() {
        let seen = Brake {
            epoch: 7,
            fuse: Brake::FUSE - 1,
            ..Brake::default()
        };
        let mut brake = seen;
        for _ in 0..1024 {
            brake.fuse = brake.fuse.checked_add(seen.fuse_cost(u32::MAX)).unwrap();
        }
        assert!(brake.is_blown(7));
    }

    #[test]
    fn budget_is_spent_completely_and_holds_from_half() {
        let mut brake = Brake::default();
        for spent in (10..=50).step_by(10) {
            assert!(!brake.is_throttled(100), "{spent}");
            brake.budget += brake.budget_cost(100, 1);
            assert_eq!(brake.budget, spent);
        }
        assert!(brake.is_throttled(100));
        brake.budget += brake.budget_cost(100, u32::MAX);
        assert_eq!(brake.budget, 100);
        assert_eq!(brake.budget_cost(100, 1), 0);
        // A lower budget is already overspent.
        assert_eq!(brake.budget_cost(50, 1), 0);
    }
}
