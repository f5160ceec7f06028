//! Brakes on a short initial RTO that hold without the daemon: a budget for retransmissions, and a fuse.
//!
//! The budget is the retry budget of RPC libraries: SYNs and SYN-ACKs may be retransmitted a tenth as often as connections
//! are established, beyond a reserve for short outages. (With more a server near its capacity stays overloaded after a
//! short stall, by `rto-lab tune`.) At half the reserve new connections get the kernel's own timer,
//! so that what is left is for those under way. The fuse is for a timer that has become too short: it counts
//! retransmissions that were judged spurious, and stays blown until the daemon has set another value.

use crate::direction;

/// The brakes of one policy and direction. All zero, nothing is spent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Brake {
    /// [`crate::Policy::epochs`] that `fuse` and `spurious` are of.
    pub epoch: u32,
    /// Of [`Brake::FUSE`]: spent, hundredths of a retransmission. Processors that credit at the same time can take it
    /// below 0.
    pub fuse: i32,
    /// Of [`crate::Policy::budgets`]: spent, tenths of a retransmission; as above.
    pub budget: i32,
    /// Connections with a spurious retransmission.
    pub spurious: u32,
}

/// Places in `BRAKES` for a slot: the active and the passive direction.
pub const DIRECTIONS: u32 = 2;

/// The place in `BRAKES` of a slot and a direction, active or passive.
#[inline(always)]
#[must_use]
pub const fn key(slot: u32, direction: u32) -> u32 {
    slot * DIRECTIONS + (direction & direction::PASSIVE)
}

impl Brake {
    /// Spurious retransmissions that blow the fuse.
    pub const SPURIOUS: i32 = 20;
    /// What a spurious retransmission spends of the fuse. A clean connection credits 1.
    pub const FUSE_COST: i32 = 100;
    /// Spent by so much the fuse is blown.
    pub const FUSE: i32 = Self::SPURIOUS * Self::FUSE_COST;
    /// Spent in addition when it blows, so that credits of other processors do not mend it. A thousand processors that
    /// blow it at the same time do not exceed the number's range.
    pub const BLOWN: i32 = 1 << 20;
    /// What a retransmission spends of the budget. A connection credits 1.
    pub const BUDGET_COST: i32 = 10;

    /// Whether new connections get the kernel's own timer.
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

    /// What so many spurious retransmissions add to [`Brake::fuse`].
    #[inline(always)]
    #[must_use]
    pub const fn fuse_cost(&self, retransmissions: u32) -> i32 {
        if self.fuse >= Self::FUSE {
            return 0;
        }
        // More blow any fuse.
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

    /// What so many retransmissions add to [`Brake::budget`]: no more than all of it is spent.
    #[inline(always)]
    #[must_use]
    pub const fn budget_cost(&self, budget: u32, retransmissions: u32) -> i32 {
        let left = budget.cast_signed() - self.budget;
        if left <= 0 {
            return 0;
        }
        // More cost all of it; within the range of the product.
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
        // A budget of nothing allows nothing.
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
        // What other processors credit at that moment does not mend it.
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
    fn a_budget_is_spent_to_its_end_and_holds_from_half_on() {
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
        // A lower capacity is overspent.
        assert_eq!(brake.budget_cost(50, 1), 0);
    }
}
