//! Brakes that work without the daemon: a budget for copies, and a fuse. The program has its own
//! (`rto_agent_common::brake`), for many processors at a time; on one of them it does what is here.
//!
//! The budget is the retry budget of RPC libraries: copies may be a tenth as many as established connections, beyond
//! a reserve for short outages. With half of the reserve spent new connections get the kernel's own timer, so that what is
//! left is for those under way. The fuse is for a timer that has become too short: it counts what was judged spurious.
//!
//! Established connections refill both, not attempts: a flood of handshakes that nobody completes refills nothing, and in
//! an outage nothing does.

/// Copies of SYNs or SYN-ACKs that may still be sent; counted in tenths of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tenths; above the capacity after that was lowered.
    spent: u32,
    /// Tenths.
    capacity: u32,
}

impl Budget {
    /// The least capacity, copies.
    pub const LEAST_CAPACITY: u32 = 50;
    /// The largest, copies: the program counts tenths in an `i32`.
    pub const LARGEST_CAPACITY: u32 = 1 << 27;
    /// The capacity is that of so many seconds of connections, or more.
    pub const SECONDS: u32 = 4;
    /// Established connections that pay for a copy.
    pub const CONNECTIONS: u32 = 10;
    const COPY: u32 = Self::CONNECTIONS;
    const CONNECTION: u32 = 1;

    /// The capacity for this many connections a second at the peak, copies: the least, or one of eight to each power of
    /// two, as each change of it is written to the program.
    #[must_use]
    pub const fn capacity_for(peak_per_s: u32) -> u32 {
        let wanted = peak_per_s.saturating_mul(Self::SECONDS);
        if wanted <= Self::LEAST_CAPACITY {
            Self::LEAST_CAPACITY
        } else if wanted >= Self::LARGEST_CAPACITY {
            Self::LARGEST_CAPACITY
        } else {
            wanted.next_multiple_of(wanted.next_power_of_two() / 16)
        }
    }

    /// One of so many copies, of which none is spent.
    #[must_use]
    pub const fn full(capacity: u32) -> Self {
        Self {
            spent: 0,
            capacity: capacity.saturating_mul(Self::COPY),
        }
    }

    /// Changes the capacity, copies; what was spent stays spent.
    pub const fn resize(&mut self, capacity: u32) {
        self.capacity = capacity.saturating_mul(Self::COPY);
    }

    /// A connection was established, with whichever timer, and with copies or without.
    pub const fn established(&mut self) {
        self.spent = self.spent.saturating_sub(Self::CONNECTION);
    }

    /// So many copies were sent, by whichever timer. No more than all of it is spent.
    pub const fn copies(&mut self, copies: u32) {
        let left = self.capacity.saturating_sub(self.spent);
        let cost = copies.saturating_mul(Self::COPY);
        self.spent += if cost < left { cost } else { left };
    }

    /// Whether new connections get the kernel's own timer: half of it or more is spent.
    #[must_use]
    pub const fn is_throttled(&self) -> bool {
        self.spent >= self.capacity.div_ceil(2)
    }

    /// What is left, percent.
    #[must_use]
    pub const fn percent_left(&self) -> u32 {
        let left = self.capacity.saturating_sub(self.spent);
        #[expect(clippy::cast_possible_truncation, reason = "at most a hundred")]
        match (left as u64 * 100).checked_div(self.capacity as u64) {
            Some(percent) => percent as u32,
            None => 0,
        }
    }
}

/// Blows when too many copies are judged spurious, and stays blown until the daemon has set another timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fuse {
    /// Hundredths of a copy.
    spent: u32,
}

impl Fuse {
    /// Spurious copies that blow it.
    pub const COPIES: u32 = 20;
    const COPY: u32 = 100;
    const CONNECTION: u32 = 1;
    const ALL: u32 = Self::COPIES * Self::COPY;

    /// A connection was established without a copy.
    pub const fn established(&mut self) {
        if !self.is_blown() {
            self.spent = self.spent.saturating_sub(Self::CONNECTION);
        }
    }

    /// So many copies of a connection were judged spurious.
    pub const fn spurious(&mut self, copies: u32) {
        let spent = self.spent.saturating_add(copies.saturating_mul(Self::COPY));
        self.spent = if spent < Self::ALL { spent } else { Self::ALL };
    }

    /// Whether new connections get the kernel's own timer.
    #[must_use]
    pub const fn is_blown(&self) -> bool {
        self.spent >= Self::ALL
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_budget_pays_for_a_tenth_of_a_copy_a_connection() {
        let mut budget = Budget::full(50);
        // Half of it, and new connections have the kernel's timer.
        for copies in 0..25 {
            assert!(!budget.is_throttled(), "{copies}");
            budget.copies(1);
        }
        assert!(budget.is_throttled());
        budget.established();
        assert!(!budget.is_throttled());
        (1..10).for_each(|_| budget.established());
        assert_eq!(budget.percent_left(), 52);
        // One copy to ten connections: for ever.
        let mut budget = Budget::full(50);
        for _ in 0..1_000 {
            budget.copies(1);
            (0..10).for_each(|_| budget.established());
            assert_eq!(budget.percent_left(), 100);
        }
        // Nobody completes a handshake.
        budget.copies(u32::MAX);
        assert_eq!(budget.percent_left(), 0);
        let nothing = Budget::full(0);
        assert!(nothing.is_throttled() && nothing.percent_left() == 0);
    }

    #[test]
    fn capacities_are_an_eighth_apart() {
        for (peak_per_s, capacity) in [
            (0, 50),
            (12, 50),
            (13, 52),
            (16, 64),
            (17, 72),
            (100, 416),
            (u32::MAX, Budget::LARGEST_CAPACITY),
        ] {
            assert_eq!(Budget::capacity_for(peak_per_s), capacity, "{peak_per_s}");
        }
        assert!(i32::try_from(Budget::LARGEST_CAPACITY * Budget::COPY).is_ok());
    }

    #[test]
    fn another_capacity_keeps_what_was_spent() {
        let mut budget = Budget::full(50);
        budget.copies(20);
        budget.resize(400);
        assert_eq!(budget.percent_left(), 95);
        budget.resize(10);
        assert_eq!(budget.percent_left(), 0);
        budget.copies(1);
        budget.resize(50);
        assert_eq!(budget.percent_left(), 60);
    }

    #[test]
    fn a_fuse_blows_for_good() {
        let mut fuse = Fuse::default();
        fuse.spurious(19);
        assert!(!fuse.is_blown());
        fuse.spurious(1);
        assert!(fuse.is_blown());
        (0..10_000).for_each(|_| fuse.established());
        assert!(fuse.is_blown());
        // One in a hundred never blows it.
        let mut fuse = Fuse::default();
        for _ in 0..1_000 {
            fuse.spurious(1);
            (0..100).for_each(|_| fuse.established());
        }
        assert!(!fuse.is_blown());
        fuse.spurious(u32::MAX);
        assert!(fuse.is_blown());
    }

    proptest! {
        #[test]
        fn copies_are_never_more_than_the_budget(
            // Of less the last copy is not paid for in full.
            capacity in 2u32..500,
            steps in prop::collection::vec(any::<bool>(), 0..2_000),
        ) {
            // Sent only while it allows: never more than half the capacity beyond a tenth of the connections.
            let mut budget = Budget::full(capacity);
            let (mut connections, mut copies) = (0u32, 0u32);
            for is_connection in steps {
                if is_connection {
                    budget.established();
                    connections += 1;
                } else if !budget.is_throttled() {
                    budget.copies(1);
                    copies += 1;
                }
                prop_assert!(10 * copies <= connections + 5 * capacity + 10);
            }
        }
    }
}
