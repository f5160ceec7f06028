//! An agent, a link whose delay and losses a test changes, and many clients of a server behind it.

use std::time::{Duration, Instant};

use rto_testbed::{
    env::TestEnv,
    link::relay::Relay,
    wait::{TIMEOUT, eventually},
    workload::{
        arrivals::{Arrivals, Clients},
        traffic::Traffic,
    },
};

use crate::{
    handshakes::Handshake,
    relay::{RELAY_SERVER_V4, relay},
};

/// The server's port.
pub const PORT: u16 = 5300;

/// Where the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// In the agent's cgroup.
    Inside,
    /// Outside of the agent's cgroup, so that only the clients' connections are counted.
    Outside,
}

/// The environment, and the daemon if it runs.
#[derive(Debug)]
pub struct Path {
    /// Declared before `env`, as fields are dropped in order and it runs in that cgroup.
    _server: Traffic,
    /// The link.
    pub relay: Relay,
    /// The agent and the namespaces.
    pub env: TestEnv,
}

impl Path {
    /// A link with this round-trip time, and the server outside of the cgroup.
    pub fn new(env: TestEnv, round_trip: Duration) -> anyhow::Result<Self> {
        let server = Server::Outside;
        Self::with(env, round_trip, server)
    }

    /// The same with the server in the given place.
    pub fn with(env: TestEnv, round_trip: Duration, server: Server) -> anyhow::Result<Self> {
        let relay = relay(&env.net)?;
        relay.set_delay(round_trip / 2);
        let on = (RELAY_SERVER_V4.parse::<std::net::IpAddr>()?, PORT).into();
        let cgroup = match server {
            Server::Inside => Some(env.cgroup.path()),
            Server::Outside => None,
        };
        let server = Traffic::echo_server(&env.net.server, cgroup, on, false)?;
        Ok(Self {
            _server: server,
            relay,
            env,
        })
    }

    /// Clients in the agent's cgroup, `per_s` connections a second.
    pub fn clients(&self, per_s: u32, rounds: u32, patience: Duration) -> anyhow::Result<Arrivals> {
        let clients = Clients {
            interval: Duration::from_secs(1) / per_s,
            rounds,
            patience,
            ..self.peers()?
        };
        Arrivals::start(&self.env.net.client, Some(self.env.cgroup.path()), &clients)
    }

    /// Clients that make one connection a second and send nothing.
    pub fn peers(&self) -> anyhow::Result<Clients> {
        let to = (RELAY_SERVER_V4.parse::<std::net::IpAddr>()?, PORT).into();
        Ok(Clients::new(to, Duration::from_secs(1)))
    }

    /// All handshakes on the link so far.
    #[must_use]
    pub fn handshakes(&self) -> Vec<Handshake> {
        Handshake::all(&self.relay.log(), PORT)
    }

    /// Waits until this many connections have begun.
    pub fn begun(&self, count: usize) -> anyhow::Result<Instant> {
        eventually("connections", TIMEOUT, || {
            let all = self.handshakes();
            Ok((all.len() >= count).then(Instant::now))
        })
    }
}
