//! Links between two namespaces, with programmable losses.
//!
//! The emulated link ([`relay::Relay`]) delays packets, adds jitter, limits the rate, drops packets at random, for a
//! period or by exact rules, and records every packet. It needs TUN devices only. netem is not used, because not every
//! kernel has it and it cannot drop "the last segment of a flow". The other link ([`nft::Veth`]) is the kernel's veth
//! with nftables rules; it serves to validate the emulated one.
//!
//! Times are taken when the link reads a packet from the device. Packets that wait in the sender's device queue have
//! not been read yet ([`relay::TimingStats`] shows how late packets were delivered).

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

/// Identifies an active rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(u64);

/// An outage that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    rule: RuleId,
    from: Instant,
    length: Duration,
}

impl Outage {
    /// Sleeps until the outage ends.
    fn sleep(&self) {
        thread::sleep((self.from + self.length).saturating_duration_since(Instant::now()));
    }
}

/// An outage that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blackout {
    /// When it began.
    pub from: Instant,
    /// When it ended.
    pub until: Instant,
    /// How many packets were dropped.
    pub dropped: u64,
}

/// The operations that both kinds of link support.
pub trait Link: Send + Sync {
    /// The emulated link, which can do more; `None` for another kind.
    fn relay(&self) -> Option<&relay::Relay> {
        None
    }

    /// Address of the client's end.
    fn client(&self, v6: bool) -> IpAddr;

    /// Address of the server's end.
    fn server(&self, v6: bool) -> IpAddr;

    /// Starts to drop packets.
    fn drops(&self, rule: Rule) -> anyhow::Result<RuleId>;

    /// The number of packets that a rule has dropped.
    fn dropped(&self, rule: RuleId) -> anyhow::Result<u64>;

    /// Removes a rule; returns the number of packets it has dropped.
    fn remove(&self, rule: RuleId) -> anyhow::Result<u64>;

    /// Starts to drop all packets that match, for `length`.
    fn start_outage(&self, filter: PacketFilter, length: Duration) -> anyhow::Result<Outage>;

    /// Waits until the outage is over.
    fn end_outage(&self, outage: Outage) -> anyhow::Result<Blackout>;
}
