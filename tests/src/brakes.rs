//! The program's copy of a policy, its brakes and the lease, read from the pinned maps.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::time::{ClockId, clock_gettime};
use rto_agent_common::{
    Policy,
    brake::{Brake, key},
    maps::{BRAKES, LEASE},
};
use rto_testbed::{env::TestEnv, machine::jiffy};

use crate::pinned;

/// A policy as the program sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InKernel {
    slot: u32,
    /// The policy.
    pub policy: Policy,
}

impl InKernel {
    /// The policy with this name.
    pub fn of(env: &TestEnv, name: &str) -> anyhow::Result<Self> {
        let mut all = pinned::policies(env)?.into_iter();
        let found = all.find(|(_, policy)| policy.name() == Some(name));
        let (slot, policy) = found.with_context(|| format!("the program has no policy {name}"))?;
        Ok(Self { slot, policy })
    }

    /// The policy's initial RTO for SYNs; `None`: the kernel's default.
    #[must_use]
    pub fn initial_rto(&self) -> Option<Duration> {
        let jiffies = self.policy.initial_rto_jiffies;
        (jiffies != 0).then(|| jiffy() * jiffies)
    }

    /// The policy's `rto_min`; `None`: the kernel's default.
    #[must_use]
    pub fn rto_min(&self) -> Option<Duration> {
        let us = self.policy.rto_min_us;
        (us != 0).then(|| Duration::from_micros(us.into()))
    }

    /// The epoch of a direction; 0: no brakes.
    #[must_use]
    pub const fn epoch(&self, direction: u32) -> u32 {
        self.policy.epochs[direction as usize]
    }

    /// The budget of a direction, in tenths of a retransmission.
    #[must_use]
    pub const fn budget(&self, direction: u32) -> u32 {
        self.policy.budgets[direction as usize]
    }

    /// The state of the policy's brakes in a direction.
    pub fn brake(&self, env: &TestEnv, direction: u32) -> anyhow::Result<Brake> {
        pinned::get(env, BRAKES, key(self.slot, direction))
    }

    /// Blows the fuse of a direction.
    pub fn blow(&self, env: &TestEnv, direction: u32) -> anyhow::Result<()> {
        let epoch = self.epoch(direction);
        ensure!(epoch != 0, "no brakes");
        let blown = Brake {
            epoch,
            fuse: Brake::BLOWN,
            ..Brake::default()
        };
        pinned::set(env, BRAKES, key(self.slot, direction), &blown)?;
        let holds = self
            .brake(env, direction)?
            .holds(epoch, self.budget(direction));
        ensure!(holds, "it does not hold");
        Ok(())
    }
}

/// The end of the lease of automatic values, nanoseconds of CLOCK_MONOTONIC.
pub fn lease_ns(env: &TestEnv) -> anyhow::Result<u64> {
    pinned::get(env, LEASE, 0)
}

/// Ends the lease now.
pub fn end_lease(env: &TestEnv) -> anyhow::Result<()> {
    let now = now_ns()?;
    ensure!(lease_ns(env)? > now, "it is over already");
    pinned::set(env, LEASE, 0, &now)
}

/// CLOCK_MONOTONIC, nanoseconds.
pub fn now_ns() -> anyhow::Result<u64> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(u64::try_from(now.as_nanos())?)
}

/// Whether a budget, in tenths of a retransmission, is for at least half this rate of connections per
/// second. It covers four seconds.
#[must_use]
pub const fn is_budget_for(budget: u32, per_s: u32) -> bool {
    budget >= Brake::BUDGET_COST.cast_unsigned() * 4 * per_s / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_of_start_is_for_no_high_rate() {
        let tenths = Brake::BUDGET_COST.cast_unsigned();
        // 50 retransmissions at the start, 416 after a second with 100 connections.
        assert!(!is_budget_for(50 * tenths, 100));
        assert!(is_budget_for(416 * tenths, 100));
        assert!(is_budget_for(416 * tenths, 200) && !is_budget_for(416 * tenths, 240));
    }
}
