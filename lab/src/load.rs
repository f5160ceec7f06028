//! Traffic that fills a bottleneck: TCP flows that share it with UDP packets, as their sender's host sees them.

use std::{
    fs,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rto_testbed::{
    channel::ControlChannel,
    link::{
        config::LinkConfig,
        packet::Direction,
        relay::{Relay, Relayed},
    },
    netns::Pair,
    workload::{Role, load::Sender},
};

use crate::{
    capture::{self, Flow},
    interrupt,
    summary::{f, micros},
    topology::{ClientEnd, PORT, Topology},
};

/// Port of a sink at the client's end.
const SINK: u16 = 4800;
/// TCP flows.
const FLOWS: u16 = 8;
/// Bytes of a burst of a TCP flow: ten segments, an initial window.
const BURST: u64 = 10 * 1448;
/// Bytes of data of a UDP packet.
const PACKET: u64 = 1200;
/// Headers of IP and UDP.
const HEADERS: u64 = 28;
/// Additional time in which flows may send their backlog.
const MORE: Duration = Duration::from_secs(2);
/// Interval at which the load checks whether to continue.
const STEP: Duration = Duration::from_millis(100);

/// Traffic on a bottleneck: bursts of ten segments over all TCP flows, and UDP packets, at random times.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Rate of the bottleneck, bits per second.
    pub rate: u64,
    /// One-way delay without the queue.
    pub delay: Duration,
    /// Time that a packet waits in a full queue.
    pub queue: Duration,
    /// Offered load, as a share of the rate.
    pub load: f64,
    /// The part of it that TCP offers, as a share of the rate; the rest are UDP packets.
    pub tcp: f64,
    /// Duration.
    pub length: Duration,
    /// Seed of the random times.
    pub seed: u64,
}

impl Load {
    /// Load in percent of the bottleneck.
    pub fn name(&self) -> String {
        format!("{:.0}", self.load * 100.0)
    }

    /// Duration including the backlog.
    pub fn takes(&self) -> Duration {
        self.length + MORE
    }

    /// Description of the traffic.
    pub fn traffic(&self) -> String {
        format!(
            "{FLOWS} TCP flows, bursts of ten segments at random times, {:.0} % of the rate; the rest UDP packets \
             at random times; for {}",
            self.tcp * 100.0,
            humantime::format_duration(self.length)
        )
    }

    /// Description of the bottleneck.
    pub fn bottleneck(&self) -> String {
        format!(
            "{} Mbit/s, {} one way, a full queue takes {}",
            self.rate / 1_000_000,
            humantime::format_duration(self.delay),
            humantime::format_duration(self.queue)
        )
    }

    /// Size of the queue, bytes.
    fn queue_bytes(&self) -> u64 {
        self.rate * micros(self.queue) / 8_000_000
    }

    /// Mean time between sends of `bytes` each, for this share of the rate.
    fn mean(&self, bytes: u64, share: f64) -> Duration {
        Duration::from_secs_f64(f(bytes) * 8.0 / (f(self.rate) * share))
    }

    /// Generates the traffic; returns the TCP flows as their sender's host sees them.
    pub fn run(&self, number: u8) -> anyhow::Result<Vec<Flow>> {
        let net = Pair::new()?;
        let relay = self.relay(&net, number)?;
        relay.record(false);
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("client.pcap");
        relay.capture(&file)?;
        let topology = Topology::over(net, Box::new(relay), None)?;
        let on = topology.server_address();
        let _sink = topology.serve(&Role::Sink { on })?;
        let _senders = self.senders(&topology.client_end(true), on)?;
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

    /// The direction with the bottleneck.
    pub(crate) fn link(&self) -> LinkConfig {
        LinkConfig {
            delay: self.delay,
            rate: Some(self.rate),
            queue: self.queue_bytes(),
            ..LinkConfig::default()
        }
    }

    /// A link with this bottleneck from the client to the server.
    pub(crate) fn relay(&self, net: &Pair, number: u8) -> anyhow::Result<Relay> {
        let relay = Relay::new(net, number, self.seed)?;
        relay.set_delay(self.delay);
        relay.set_towards(Direction::ToServer, self.link());
        Ok(relay)
    }

    /// Whether a packet belongs to [`Self::towards_client`].
    pub(crate) fn is_background(relayed: &Relayed) -> bool {
        relayed
            .packet
            .is_none_or(|packet| packet.client_port == SINK)
    }

    /// Starts the traffic from the server's end to a sink at the client's; both end when dropped.
    pub(crate) fn towards_client(
        &self,
        topology: &Topology,
    ) -> anyhow::Result<(ControlChannel, Vec<ControlChannel>)> {
        let on = SocketAddr::new(topology.link.client(false), SINK);
        let mut sink = topology.client_end(false).start(&Role::Sink { on })?;
        sink.recv::<()>()?;
        Ok((sink, self.senders(&topology.server_end(), on)?))
    }

    /// Starts the traffic from this end to a sink.
    pub(crate) fn senders(
        &self,
        end: &ClientEnd,
        to: SocketAddr,
    ) -> anyhow::Result<Vec<ControlChannel>> {
        let sender = |bytes: u64, mean: Duration, n: u64| {
            anyhow::Ok(Sender {
                to,
                bytes: usize::try_from(bytes)?,
                mean,
                duration: self.length,
                seed: self.seed ^ (n << 32),
            })
        };
        let mut senders = Vec::new();
        for n in 0..FLOWS {
            let bursts = sender(
                BURST,
                self.mean(BURST, self.tcp / f64::from(FLOWS)),
                n.into(),
            )?;
            senders.push(end.start(&Role::TcpBursts(bursts))?);
        }
        let mean = self.mean(PACKET + HEADERS, (self.load - self.tcp).max(0.01));
        let flood = sender(PACKET, mean, FLOWS.into())?;
        senders.push(end.start(&Role::UdpFlood(flood))?);
        Ok(senders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_load_matches_requested_load() {
        let load = Load {
            rate: 10_000_000,
            delay: Duration::from_millis(10),
            queue: Duration::from_millis(1000),
            load: 1.25,
            tcp: 0.15,
            length: Duration::from_secs(1),
            seed: 1,
        };
        assert_eq!(load.queue_bytes(), 1_250_000);
        // A burst of 14480 bytes at a quarter of the rate.
        assert_eq!(load.mean(BURST, 0.25), Duration::from_micros(46_336));
        assert_eq!(load.name(), "125");
    }
}
