//! Connections begun all the time, and the initial RTO the kernel has chosen for each: whether there was
//! a moment without policy.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};

use crate::{
    agent::World,
    process::{Dialogue, beside, command_in},
};

/// Looks this near to each other leave little time for a moment that nobody sees: they are made at the pace of
/// [`LOOKS`], and what is between is other processes' turn.
pub const NEAR: Duration = Duration::from_millis(20);
/// Connections in a second, but for the time that each takes.
pub const LOOKS: u32 = 2000;
/// The same on an emulated processor, which would have no time left for what is looked at.
pub const LOOKS_EMULATED: u32 = 250;

/// A process in the agent's cgroup; ended when dropped.
#[derive(Debug)]
pub struct Prober {
    dialogue: Dialogue,
}

/// What it saw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Connections.
    pub count: u64,
    /// Of these, those with another initial RTO than expected.
    pub wrong: u64,
    /// The first of these.
    pub first_wrong: Duration,
    /// The longest time without a look.
    pub longest_gap: Duration,
    /// Of the time of looking, that between looks no further apart than [`NEAR`].
    pub covered: Duration,
    /// The time of looking.
    pub lasted: Duration,
}

impl Prober {
    /// Starts it; nothing is looked at yet.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(world: &World, to: &[SocketAddr], expect: &[Duration]) -> anyhow::Result<Self> {
        let program = beside("rto-traffic")?;
        let mut command = command_in(Some(&world.net.client), Some(world.cgroup.path()), program)?;
        command.arg("sample");
        for to in to {
            command.args(["--to", &to.to_string()]);
        }
        for expect in expect {
            command.args(["--expect", &expect.as_micros().to_string()]);
        }
        let mut dialogue = Dialogue::start(&mut command)?;
        ensure!(dialogue.reply()? == "ready");
        Ok(Self { dialogue })
    }

    /// Looks from now on.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        self.dialogue.ask("begin").map(drop)
    }

    /// Looks no more; what was seen.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn end(&mut self) -> anyhow::Result<Seen> {
        let reply = self.dialogue.ask("end")?;
        let mut numbers = reply.split(' ').map(str::parse::<u64>);
        let mut next = || anyhow::Ok(numbers.next().context("too few numbers")??);
        Ok(Seen {
            count: next()?,
            wrong: next()?,
            first_wrong: Duration::from_micros(next()?),
            longest_gap: Duration::from_micros(next()?),
            covered: Duration::from_micros(next()?),
            lasted: Duration::from_micros(next()?),
        })
    }
}
