//! An outage between two hosts: each drops what arrives from the other.

use std::{net::IpAddr, process::Command, time::Duration};

use anyhow::Context as _;

use super::LONGEST;
use crate::{names, process::run_with_input};

/// Longest outage; a header has room for no longer one.
pub const LONGEST_OUTAGE: Duration = Duration::from_millis(LONGEST as u64);

/// Drops arriving packets of one port, from peers for a time each. The kernel ends each outage, even if this process is
/// killed; the table is removed when dropped.
#[derive(Debug)]
pub struct Dropper {
    table: String,
}

impl Dropper {
    /// At the server: packets to this port.
    pub fn at_server(port: u16) -> anyhow::Result<Self> {
        Self::new(&format!("tcp dport {port}"))
    }

    /// At the client: packets from this port.
    pub fn at_client(port: u16) -> anyhow::Result<Self> {
        Self::new(&format!("tcp sport {port}"))
    }

    fn new(packets: &str) -> anyhow::Result<Self> {
        let table = names::unique().replace('-', "_");
        let dropper = Self { table };
        let at = format!("inet {}", dropper.table);
        let mut text = format!(
            "add table {at}\nadd chain {at} input {{ type filter hook input priority -300; }}\n"
        );
        for (set, family, kind) in [("v4", "ip", "ipv4_addr"), ("v6", "ip6", "ipv6_addr")] {
            text.push_str(&format!(
                "add set {at} {set} {{ type {kind}; flags timeout; }}\n\
                 add rule {at} input {packets} {family} saddr @{set} drop\n"
            ));
        }
        nft(&text).context("dropping packets needs root, nft(8) and nf_tables")?;
        Ok(dropper)
    }

    /// Drops the packets of this peer from now on.
    pub fn start(&self, peer: IpAddr, length: Duration) -> anyhow::Result<()> {
        let peer = peer.to_canonical();
        let set = if peer.is_ipv4() { "v4" } else { "v6" };
        nft(&format!(
            "add element inet {} {set} {{ {peer} timeout {}ms }}\n",
            self.table,
            length.as_millis()
        ))
    }
}

impl Drop for Dropper {
    fn drop(&mut self) {
        // Without elements it drops nothing, if this fails.
        let _left = nft(&format!("delete table inet {}\n", self.table));
    }
}

fn nft(text: &str) -> anyhow::Result<()> {
    run_with_input(Command::new("nft").args(["-f", "-"]), text).map(drop)
}
