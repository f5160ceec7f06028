//! Links between two namespaces that lose what they are told to lose.
//!
//! The emulated one ([`relay::Relay`]) delays, jitters, limits the rate, loses by chance, for a
//! while or exactly, and records every packet; it needs TUN devices and nothing else (not netem, which not
//! every kernel has, and which cannot drop "the last segment of a flow"). The other ([`nft::Veth`]) is the
//! kernel's own veth with nftables rules, to check the first against.
//!
//! Times are those at which the link reads a packet from the device: what the sender's kernel has in the
//! device's queue is not read yet ([`relay::TimingStats`] says how late packets were delivered).

pub mod config;
pub mod nft;
pub mod packet;
mod pcap;
pub mod relay;
pub mod retransmits;
pub mod rule;
mod tun;

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use rule::{PacketFilter, Rule};

/// A rule in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(u64);

/// A time without packets that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    rule: RuleId,
    from: Instant,
    length: Duration,
}

impl Outage {
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
    fn start_outage(&self, filter: PacketFilter, length: Duration) -> anyhow::Result<Outage>;

    /// Waits until it is over.
    ///
    /// # Errors
    ///
    /// If this link cannot end it.
    fn end_outage(&self, outage: Outage) -> anyhow::Result<Blackout>;
}
