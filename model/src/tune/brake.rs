//! Brakes that work without the daemon: a budget for copies, and a fuse. Integers alone and no memory of their own, as
//! a BPF program runs them (`core` only).
//!
//! The budget is the retry budget of RPC libraries: copies may be as many as half the attempts, beyond a reserve for
//! short outages. At half the reserve new connections get the kernel's own timer, so that what is left is for those
//! under way. The fuse is for a timer that has become too short: it counts what was judged spurious.

use serde::{Deserialize, Serialize};

/// Copies of SYNs that may still be sent; counted in halves of one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// What is left, halves.
    left: u32,
    /// The most that may be left, halves.
    capacity: u32,
}

impl Budget {
    /// The least capacity, copies.
    pub const LEAST_CAPACITY: u32 = 50;
    /// The capacity is that of so many seconds of connections.
    pub const SECONDS: u32 = 4;
    const COPY: u32 = 2;
    const ATTEMPT: u32 = 1;

    /// The capacity for this many connections a second at the peak, copies.
    #[must_use]
    pub const fn capacity_for(peak_per_s: u32) -> u32 {
        let capacity = peak_per_s.saturating_mul(Self::SECONDS);
        if capacity < Self::LEAST_CAPACITY {
            Self::LEAST_CAPACITY
        } else {
            capacity
        }
    }

    /// A full one of so many copies.
    #[must_use]
    pub const fn full(capacity: u32) -> Self {
        let capacity = capacity.saturating_mul(Self::COPY);
        Self {
            left: capacity,
            capacity,
        }
    }

    /// Changes the capacity, copies; what was taken stays taken.
    pub const fn resize(&mut self, capacity: u32) {
        let taken = self.capacity - self.left;
        self.capacity = capacity.saturating_mul(Self::COPY);
        self.left = self.capacity.saturating_sub(taken);
    }

    /// A connection begins; tells whether it may have the policy's timer.
    pub const fn attempt(&mut self) -> bool {
        let allowed = self.allows();
        if self.left < self.capacity {
            self.left += Self::ATTEMPT;
        }
        allowed
    }

    /// A copy is sent, by whichever timer.
    pub const fn copy(&mut self) {
        self.left = self.left.saturating_sub(Self::COPY);
    }

    /// Whether more than half is left.
    #[must_use]
    pub const fn allows(&self) -> bool {
        self.left > self.capacity / 2
    }

    /// What is left, percent.
    #[must_use]
    pub const fn percent_left(&self) -> u32 {
        // Not above a hundred, as no more is left than there may be.
        #[expect(clippy::cast_possible_truncation, reason = "at most a hundred")]
        match (self.left as u64 * 100).checked_div(self.capacity as u64) {
            Some(percent) => percent as u32,
            None => 0,
        }
    }
}

/// Blows when too many copies are judged spurious, and stays blown until the daemon has set another timer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fuse {
    /// What is left, hundredths of a copy.
    left: u32,
}

impl Fuse {
    /// Spurious copies that blow it.
    pub const COPIES: u32 = 20;
    const COPY: u32 = 100;
    const CLEAN: u32 = 1;
    const FULL: u32 = Self::COPIES * Self::COPY;

    /// A new one.
    #[must_use]
    pub const fn new() -> Self {
        Self { left: Self::FULL }
    }

    /// A connection was judged: so many of its copies were spurious.
    pub const fn judged(&mut self, spurious_copies: u32) {
        if self.is_blown() {
            return;
        }
        self.left = if spurious_copies > 0 {
            self.left
                .saturating_sub(spurious_copies.saturating_mul(Self::COPY))
        } else if self.left < Self::FULL {
            self.left + Self::CLEAN
        } else {
            self.left
        };
    }

    /// Whether new connections get the kernel's own timer.
    #[must_use]
    pub const fn is_blown(&self) -> bool {
        self.left == 0
    }
}

impl Default for Fuse {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_budget_pays_for_half_a_copy_an_attempt() {
        assert_eq!(Budget::capacity_for(0), 50);
        assert_eq!(Budget::capacity_for(100), 400);
        assert_eq!(Budget::capacity_for(u32::MAX), u32::MAX);
        let mut budget = Budget::full(50);
        // Half of it, and new connections have the kernel's timer.
        for copies in 0..25 {
            assert!(budget.allows(), "{copies}");
            budget.copy();
        }
        assert!(!budget.allows() && !budget.attempt());
        assert!(budget.attempt());
        assert_eq!(budget.percent_left(), 52);
        // One copy to two attempts: for ever.
        let mut budget = Budget::full(50);
        for _ in 0..1_000 {
            assert!(budget.attempt() && budget.attempt());
            budget.copy();
        }
        assert_eq!(budget.percent_left(), 98);
        budget = Budget::full(1);
        for _ in 0..5 {
            budget.copy();
        }
        assert_eq!(budget.percent_left(), 0);
        assert_eq!(Budget::full(0).percent_left(), 0);
    }

    #[test]
    fn another_capacity_keeps_what_was_taken() {
        let mut budget = Budget::full(50);
        (0..20).for_each(|_| budget.copy());
        budget.resize(400);
        assert_eq!(budget.percent_left(), 95);
        budget.resize(50);
        assert_eq!(budget.percent_left(), 60);
        budget.resize(10);
        assert_eq!(budget.percent_left(), 0);
    }

    #[test]
    fn a_fuse_blows_for_good() {
        let mut fuse = Fuse::new();
        (0..19).for_each(|_| fuse.judged(1));
        assert!(!fuse.is_blown());
        fuse.judged(1);
        assert!(fuse.is_blown());
        (0..10_000).for_each(|_| fuse.judged(0));
        assert!(fuse.is_blown());
        // One in a hundred never blows it.
        let mut fuse = Fuse::new();
        for _ in 0..1_000 {
            fuse.judged(1);
            (0..100).for_each(|_| fuse.judged(0));
        }
        assert!(!fuse.is_blown());
        fuse.judged(u32::MAX);
        assert!(fuse.is_blown());
    }

    proptest! {
        #[test]
        fn copies_are_never_more_than_the_budget(
            capacity in 1u32..500,
            steps in prop::collection::vec(any::<bool>(), 0..2_000),
        ) {
            // Sent only while it allows: never more than half the capacity beyond half the attempts.
            let mut budget = Budget::full(capacity);
            let (mut attempts, mut copies) = (0u32, 0u32);
            for attempt in steps {
                if attempt {
                    let _allowed = budget.attempt();
                    attempts += 1;
                } else if budget.allows() {
                    budget.copy();
                    copies += 1;
                }
                prop_assert!(2 * copies <= attempts + capacity + 2);
            }
        }
    }
}
