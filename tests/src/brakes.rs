//! The program's copy of a policy, its brakes and the lease, read from the pinned maps.

use std::{mem::offset_of, time::Duration};

use anyhow::{Context as _, ensure};
use nix::time::{ClockId, clock_gettime};
use rto_agent_common::{
    Policy,
    brake::{Brake, key},
    maps::{BRAKES, LEASE, POLICIES},
};
use rto_testbed::{env::TestEnv, kernel::Map, machine::jiffy};

use crate::policy_slot::policy_in;

/// Opens the pinned map with this name.
fn map(env: &TestEnv, name: &str) -> anyhow::Result<Map> {
    Map::open(&env.pins()?.join(name)).context(name.to_owned())
}

fn word(bytes: &[u8], offset: usize) -> anyhow::Result<u32> {
    let word = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    Ok(u32::from_ne_bytes(*word.context("too short")?))
}

/// A policy as the program sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InKernel {
    slot: u32,
    bytes: Vec<u8>,
}

impl InKernel {
    /// The policy with this name.
    pub fn of(env: &TestEnv, name: &str) -> anyhow::Result<Self> {
        for (slot, value) in map(env, POLICIES)?.dump()? {
            let bytes = policy_in(&value).context("no policy")?;
            let padded = bytes.get(offset_of!(Policy, name)..).context("no name")?;
            let known = padded.strip_prefix(name.as_bytes());
            if known.is_some_and(|rest| rest.first() == Some(&0)) {
                let slot = word(&slot, 0)?;
                let bytes = bytes.to_owned();
                return Ok(Self { slot, bytes });
            }
        }
        anyhow::bail!("the program has no policy {name}")
    }

    /// The policy's initial RTO for SYNs; `None`: the kernel's default.
    pub fn initial_rto(&self) -> anyhow::Result<Option<Duration>> {
        let jiffies = word(&self.bytes, offset_of!(Policy, initial_rto_jiffies))?;
        Ok((jiffies != 0).then(|| jiffy() * jiffies))
    }

    /// The policy's `rto_min`; `None`: the kernel's default.
    pub fn rto_min(&self) -> anyhow::Result<Option<Duration>> {
        let us = word(&self.bytes, offset_of!(Policy, rto_min_us))?;
        Ok((us != 0).then(|| Duration::from_micros(us.into())))
    }

    /// Peers whose hash is below this are in the control arm.
    pub fn control_below(&self) -> anyhow::Result<u32> {
        word(&self.bytes, offset_of!(Policy, control_below))
    }

    /// The epoch of a direction; 0: no brakes.
    pub fn epoch(&self, direction: u32) -> anyhow::Result<u32> {
        word(
            &self.bytes,
            offset_of!(Policy, epochs) + 4 * direction as usize,
        )
    }

    /// The budget of a direction, in tenths of a retransmission.
    pub fn budget(&self, direction: u32) -> anyhow::Result<u32> {
        word(
            &self.bytes,
            offset_of!(Policy, budgets) + 4 * direction as usize,
        )
    }

    /// The state of the policy's brakes in a direction.
    pub fn brake(&self, env: &TestEnv, direction: u32) -> anyhow::Result<Brake> {
        let key = key(self.slot, direction).to_ne_bytes();
        let bytes = map(env, BRAKES)?.get(&key)?.context("no brake")?;
        let word = |offset| word(&bytes, offset);
        Ok(Brake {
            epoch: word(offset_of!(Brake, epoch))?,
            fuse: word(offset_of!(Brake, fuse))?.cast_signed(),
            budget: word(offset_of!(Brake, budget))?.cast_signed(),
            spurious: word(offset_of!(Brake, spurious))?,
            losses: word(offset_of!(Brake, losses))?,
        })
    }

    /// Blows the fuse of a direction.
    pub fn blow(&self, env: &TestEnv, direction: u32) -> anyhow::Result<()> {
        let epoch = self.epoch(direction)?;
        ensure!(epoch != 0, "no brakes");
        let mut value = [0; size_of::<Brake>()];
        for (offset, word) in [
            (offset_of!(Brake, epoch), epoch),
            (offset_of!(Brake, fuse), Brake::BLOWN.cast_unsigned()),
        ] {
            value[offset..offset + 4].copy_from_slice(&word.to_ne_bytes());
        }
        map(env, BRAKES)?.set(&key(self.slot, direction).to_ne_bytes(), &value)?;
        ensure!(self.holds(env, direction)?, "it does not hold");
        Ok(())
    }

    /// Whether the brake is on, so that new connections of a direction get the kernel's timer.
    pub fn holds(&self, env: &TestEnv, direction: u32) -> anyhow::Result<bool> {
        let (epoch, budget) = (self.epoch(direction)?, self.budget(direction)?);
        Ok(epoch != 0 && self.brake(env, direction)?.holds(epoch, budget))
    }
}

/// The end of the lease of automatic values, nanoseconds of CLOCK_MONOTONIC.
pub fn lease_ns(env: &TestEnv) -> anyhow::Result<u64> {
    let value = map(env, LEASE)?.get(&[0; 4])?.context("no lease")?;
    let value = value.first_chunk().context("too short")?;
    Ok(u64::from_ne_bytes(*value))
}

/// Ends the lease now.
pub fn end_lease(env: &TestEnv) -> anyhow::Result<()> {
    let now = now_ns()?;
    ensure!(lease_ns(env)? > now, "it is over already");
    Ok(map(env, LEASE)?.set(&[0; 4], &now.to_ne_bytes())?)
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
