//! RTT samples of TCP flows that share a bottleneck with other traffic.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rto_model::capture;
use rto_testbed::{
    channel::ControlChannel,
    link::{config::LinkConfig, packet::Direction, relay::Relay},
    netns::Pair,
    workload::{Role, load::Sender},
};

use crate::{
    interrupt,
    topology::{PORT, Topology},
};

/// Bytes of a burst of a TCP flow: ten segments, an initial window.
const BURST: u64 = 10 * 1448;
/// Bytes of data of a UDP packet.
const PACKET: u64 = 1200;
/// Headers of IP and UDP.
const HEADERS: u64 = 28;
/// How long flows may take to get rid of what they could not send in time.
const MORE: Duration = Duration::from_secs(2);
/// Between two looks at whether to go on.
const STEP: Duration = Duration::from_millis(100);

/// Traffic on a bottleneck.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Load {
    /// Of the bottleneck, bits a second.
    pub(super) rate: u64,
    /// One way, without the queue.
    pub(super) delay: Duration,
    /// How long a packet waits in a full queue.
    pub(super) queue: Duration,
    /// Offered, as a share of the rate.
    pub(super) load: f64,
    /// Of which by TCP, in bursts of ten segments over all flows.
    pub(super) tcp: f64,
    /// TCP flows.
    pub(super) flows: u16,
    /// For how long.
    pub(super) length: Duration,
    /// Of what is random.
    pub(super) seed: u64,
}

impl Load {
    /// How long it takes.
    pub(super) fn takes(&self) -> Duration {
        self.length + MORE
    }

    /// Bytes that wait in a full queue.
    fn queue_bytes(&self) -> u64 {
        let bits = u128::from(self.rate) * self.queue.as_millis() / 1000;
        u64::try_from(bits / 8).unwrap_or(u64::MAX)
    }

    /// Mean time between sends of so many bytes each that make up this share of the rate, in whole microseconds.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "seconds at most"
    )]
    fn mean(&self, bytes: u64, share: f64) -> Duration {
        let us = bytes as f64 * 8.0 * 1e6 / (self.rate as f64 * share);
        Duration::from_micros(us.max(1.0) as u64)
    }

    /// Runs it; the TCP flows, as their sender's host sees them.
    pub(super) fn run(&self, number: u8) -> anyhow::Result<Vec<capture::Flow>> {
        let net = Pair::new()?;
        let relay = Relay::new(&net, number, self.seed)?;
        relay.set_delay(self.delay);
        relay.set_towards(
            Direction::ToServer,
            LinkConfig {
                delay: self.delay,
                rate: Some(self.rate),
                queue: self.queue_bytes(),
                ..LinkConfig::default()
            },
        );
        relay.record(false);
        let dir = tempfile::tempdir()?;
        let file: PathBuf = dir.path().join("client.pcap");
        relay.capture(&file)?;
        let topology = Topology::over(net, Box::new(relay), None)?;
        let on = topology.server_address();
        let _sink = topology.serve(&Role::Sink { on })?;
        let _senders = self.senders(&topology)?;
        let end = Instant::now() + self.takes();
        while Instant::now() < end {
            interrupt::check()?;
            thread::sleep(STEP);
        }
        topology.relay().context("no relay")?.end_capture()?;
        let mut flows = capture::read(&fs::read(&file)?)?.flows;
        flows.retain(|flow| flow.to.port() == PORT);
        Ok(flows)
    }

    fn senders(&self, topology: &Topology) -> anyhow::Result<Vec<ControlChannel>> {
        let sender = |bytes: u64, mean: Duration, n: u64| {
            anyhow::Ok(Sender {
                to: topology.server_address(),
                bytes: usize::try_from(bytes)?,
                mean,
                duration: self.length,
                seed: self.seed ^ (n << 32),
            })
        };
        let each = self.tcp / f64::from(self.flows.max(1));
        let mut senders = Vec::new();
        for n in 0..self.flows {
            let bursts = sender(BURST, self.mean(BURST, each), n.into())?;
            senders.push(topology.client(&Role::TcpBursts(bursts))?);
        }
        let mean = self.mean(PACKET + HEADERS, (self.load - self.tcp).max(0.01));
        let flood = sender(PACKET, mean, u64::from(self.flows))?;
        senders.push(topology.client(&Role::UdpFlood(flood))?);
        Ok(senders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_is_what_is_asked() {
        let load = Load {
            rate: 10_000_000,
            delay: Duration::from_millis(10),
            queue: Duration::from_millis(1000),
            load: 1.25,
            tcp: 0.25,
            flows: 4,
            length: Duration::from_secs(1),
            seed: 1,
        };
        assert_eq!(load.queue_bytes(), 1_250_000);
        // A burst of 14480 bytes at a quarter of the rate.
        assert_eq!(load.mean(BURST, 0.25), Duration::from_micros(46_336));
    }
}
