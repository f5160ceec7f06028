//! The program's copy of a policy and its fallbacks, read from the pinned maps.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rto_agent_common::{
    Policy,
    fallback::{Fallback, key},
    maps::FALLBACKS,
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

    /// The epoch of a direction; 0: no fallbacks.
    #[must_use]
    pub const fn epoch(&self, direction: u32) -> u32 {
        self.policy.epochs[direction as usize]
    }

    /// The state of the policy's fallbacks in a direction.
    pub fn fallback(&self, env: &TestEnv, direction: u32) -> anyhow::Result<Fallback> {
        pinned::get(env, FALLBACKS, key(self.slot, direction))
    }

    /// Begins fallback (spurious) of a direction.
    pub fn begin_fallback(&self, env: &TestEnv, direction: u32) -> anyhow::Result<()> {
        let epoch = self.epoch(direction);
        ensure!(epoch != 0, "the policy has no guard");
        let begun = Fallback {
            epoch,
            spurious: Fallback::BEGUN,
            ..Fallback::default()
        };
        pinned::set(env, FALLBACKS, key(self.slot, direction), &begun)?;
        let holds = self.fallback(env, direction)?.is_spurious(epoch);
        ensure!(holds, "it is not in force");
        Ok(())
    }
}
