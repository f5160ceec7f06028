//! The program's brakes (`rto_agent_common::brake`) on one processor, as `agent-ebpf` implements
//! them.

use rto_agent_common::brake::Brake;

/// A budget and a fuse.
#[derive(Clone, Copy, Debug)]
pub(super) struct Brakes {
    brake: Brake,
    epoch: u32,
    /// The budget, in tenths of a retransmission.
    budget: u32,
}

impl Brakes {
    /// A budget of this many retransmissions, none of which is spent yet.
    pub(super) fn new(budget: u32) -> Self {
        let mut brakes = Self {
            brake: Brake::default(),
            epoch: 0,
            budget: 0,
        };
        brakes.resize(budget);
        brakes
    }

    /// Sets the size of the budget; spent retransmissions stay spent.
    pub(super) const fn resize(&mut self, budget: u32) {
        self.budget = budget.saturating_mul(Brake::BUDGET_COST.cast_unsigned());
    }

    /// A new epoch starts with a new fuse.
    pub(super) const fn begin(&mut self, epoch: u32) {
        if self.epoch != epoch {
            (self.epoch, self.brake.epoch, self.brake.fuse) = (epoch, epoch, 0);
        }
    }

    /// Counts an established connection.
    pub(super) fn established(&mut self) {
        self.brake.budget -= i32::from(self.brake.budget > 0);
    }

    /// Credits a connection established without a retransmission.
    pub(super) fn clean(&mut self) {
        self.brake.fuse -= i32::from(self.brake.fuse > 0);
    }

    pub(super) fn retransmitted(&mut self) {
        self.brake.budget += self.brake.budget_cost(self.budget, 1);
    }

    pub(super) fn spurious(&mut self, retransmissions: u32) {
        self.brake.fuse += self.brake.fuse_cost(retransmissions);
    }

    pub(super) const fn is_throttled(&self) -> bool {
        self.brake.is_throttled(self.budget)
    }

    pub(super) const fn is_blown(&self) -> bool {
        self.brake.is_blown(self.epoch)
    }
}
