//! A second link between the two namespaces, which delays packets and drops selected ones.

use std::time::Duration;

use rto_testbed::{
    capture::{Capture, round_trips},
    link::relay::Relay,
    netns::Pair,
    wait::TIMEOUT,
};

/// Address of the client's end.
pub const RELAY_CLIENT_V4: &str = "10.89.0.1";
/// Address of the server's end.
pub const RELAY_SERVER_V4: &str = "10.89.0.2";
/// IPv6 address of the server's end.
pub const RELAY_SERVER_V6: &str = "fd89::2";

/// The link, without delay or loss.
pub fn relay(pair: &Pair) -> anyhow::Result<Relay> {
    Relay::new(pair, 0, 0)
}

/// Captures of both ends of the link.
#[derive(Debug)]
pub struct BothEnds {
    client: Capture,
    server: Capture,
}

impl BothEnds {
    /// Starts both captures.
    pub fn of(pair: &Pair, relay: &Relay) -> anyhow::Result<Self> {
        Ok(Self {
            client: Capture::start(&pair.client, &relay.client_device())?,
            server: Capture::start(&pair.server, &relay.server_device())?,
        })
    }

    /// The round-trip times of at least `connections` IPv4 connections, with at least `each` samples per connection, as
    /// seen on the client's wire and on the server's.
    pub fn round_trips(
        &self,
        connections: usize,
        each: usize,
    ) -> anyhow::Result<[Vec<Vec<Duration>>; 2]> {
        let of = |capture: &Capture, end: &str| {
            let end = end.parse()?;
            let all = capture.wait_for(TIMEOUT, |all| {
                let full = round_trips(all, end);
                full.iter().filter(|of| of.len() >= each).count() >= connections
            })?;
            anyhow::Ok(round_trips(&all, end))
        };
        Ok([
            of(&self.client, RELAY_CLIENT_V4)?,
            of(&self.server, RELAY_SERVER_V4)?,
        ])
    }
}
