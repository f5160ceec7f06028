//! Links between two namespaces that lose what they are told to lose.
//!
//! The emulated one ([`relay::Relay`]) delays, jitters, limits the rate, loses by chance, in bursts, for a
//! while or exactly, and records every packet; it needs TUN devices and nothing else (not netem, which not
//! every kernel has, and which cannot drop "the last segment of a flow"). The other ([`nft::Veth`]) is the
//! kernel's own veth with nftables rules, to check the first against.
//!
//! Times are those at which the link reads a packet from the device: what the sender's kernel has in the
//! device's queue is not read yet ([`relay::Quality`] says how late packets were delivered).

pub mod nft;
pub mod packet;
pub mod path;
mod pcap;
pub mod relay;
pub mod repeats;
pub mod rule;
mod tun;

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::ground::netns::Pair;
use rule::{Matching, Rule};

/// Which link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// Emulated: two TUN devices and a relay
    #[default]
    Relay,
    /// A veth that drops by nftables
    Nft,
}

impl Medium {
    /// Makes a link between two namespaces. The number tells links apart by address; chance begins with the
    /// seed.
    ///
    /// # Errors
    ///
    /// If the kernel or a program that it needs is missing.
    pub fn link(self, pair: &Pair, number: u8, seed: u64) -> anyhow::Result<Box<dyn Link>> {
        Ok(match self {
            Self::Relay => Box::new(relay::Relay::new(pair, number, seed)?),
            Self::Nft => Box::new(nft::Veth::new(pair)?),
        })
    }
}

/// A rule in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(u64);

/// A time without packets that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dark {
    rule: RuleId,
    from: Instant,
    length: Duration,
}

impl Dark {
    /// Sleeps until its end.
    fn sleep(&self) {
        thread::sleep((self.from + self.length).saturating_duration_since(Instant::now()));
    }
}

/// A time without packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blackout {
    /// Its begin.
    pub from: Instant,
    /// Its end.
    pub until: Instant,
    /// How many packets were dropped.
    pub dropped: u64,
}

/// What experiments need of a link, whichever it is.
pub trait Link: Send + Sync {
    /// Itself, if it is an emulated one, which can do more.
    fn relay(&self) -> Option<&relay::Relay> {
        None
    }

    /// Address of the client's end.
    fn client(&self, v6: bool) -> IpAddr;

    /// Address of the server's end.
    fn server(&self, v6: bool) -> IpAddr;

    /// Drops packets from now on.
    ///
    /// # Errors
    ///
    /// If this link cannot.
    fn drops(&self, rule: Rule) -> anyhow::Result<RuleId>;

    /// How many packets a rule has dropped.
    ///
    /// # Errors
    ///
    /// If it cannot be asked.
    fn dropped(&self, rule: RuleId) -> anyhow::Result<u64>;

    /// Ends a rule; how many packets it has dropped.
    ///
    /// # Errors
    ///
    /// If it cannot be ended.
    fn remove(&self, rule: RuleId) -> anyhow::Result<u64>;

    /// Begins to drop all of these, for so long.
    ///
    /// # Errors
    ///
    /// If this link cannot.
    fn darken(&self, matching: Matching, length: Duration) -> anyhow::Result<Dark>;

    /// Waits until it is over.
    ///
    /// # Errors
    ///
    /// If this link cannot end it.
    fn brighten(&self, dark: Dark) -> anyhow::Result<Blackout>;
}
