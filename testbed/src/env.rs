//! Everything a test needs: an agent and two namespaces, removed with it.

use std::{
    net::SocketAddr,
    ops::{Deref, DerefMut, Range},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{
    agent::{Agent, find},
    capture::{Capture, Segment, by_connection, gaps, syn_acks, syns},
    http,
    kernel::Map,
    netns::{CLIENT_LINK, Pair, SERVER_LINK},
    timing::{Sample, assert_samples},
    wait::TIMEOUT,
    workload::{
        conversation::Conversation,
        prober::{Prober, Probes},
        traffic::{Connect, Traffic},
    },
};

/// An agent and two namespaces.
#[derive(Debug)]
pub struct TestEnv {
    agent: Agent,
    /// Client and server.
    pub net: Pair,
}

impl Deref for TestEnv {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.agent
    }
}

impl DerefMut for TestEnv {
    fn deref_mut(&mut self) -> &mut Agent {
        &mut self.agent
    }
}

impl TestEnv {
    /// Creates both; no daemon runs yet.
    pub fn new() -> anyhow::Result<Self> {
        Self::of(find(None)?)
    }

    /// As [`TestEnv::new`], for another binary of the agent.
    pub fn of(binary: PathBuf) -> anyhow::Result<Self> {
        Self::of_in(binary, &tempfile::env::temp_dir())
    }

    /// As [`TestEnv::of`], with the agent's files and state below `parent`.
    pub fn of_in(binary: PathBuf, parent: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            agent: Agent::new_in(binary, parent)?,
            net: Pair::new()?,
        })
    }

    /// Creates both, writes the policies and starts the daemon.
    pub fn with(policies: &str) -> anyhow::Result<Self> {
        let mut env = Self::new()?;
        env.configure(policies)?;
        env.start()?;
        Ok(env)
    }

    /// Sends a request to the daemon's socket, as a client other than the CLI would, and returns the answer.
    pub fn socket_request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<Value> {
        let stream = UnixStream::connect(self.socket())?;
        let answer = http::request(stream, method, path, body)?;
        serde_json::from_str(&answer.body).with_context(|| format!("{answer:?}"))
    }

    /// Starts to connect, in the client's namespace and the agent's cgroup.
    pub fn connect(&self, to: impl Into<To>) -> anyhow::Result<Traffic> {
        let To(to, options) = to.into();
        Traffic::connect(&self.net.client, Some(self.cgroup.path()), to, options)
    }

    /// Connects, which must succeed, and closes the connection.
    pub fn connect_and_close(&self, to: SocketAddr) -> anyhow::Result<()> {
        let outcome = self.connect(to)?.outcome()?;
        ensure!(outcome.result == "connected", "{outcome:?}");
        Ok(())
    }

    /// Listens in the server's namespace and the agent's cgroup.
    pub fn serve(&self, on: SocketAddr) -> anyhow::Result<Traffic> {
        Traffic::serve(&self.net.server, Some(self.cgroup.path()), on)
    }

    /// Answers conversations in the server's namespace and the agent's cgroup.
    pub fn echo_server(&self, on: SocketAddr) -> anyhow::Result<Traffic> {
        Traffic::echo_server(&self.net.server, Some(self.cgroup.path()), on, false)
    }

    /// As [`TestEnv::echo_server`], with MPTCP.
    pub fn echo_server_mptcp(&self, on: SocketAddr) -> anyhow::Result<Traffic> {
        Traffic::echo_server(&self.net.server, Some(self.cgroup.path()), on, true)
    }

    /// Starts a conversation in the client's namespace and the agent's cgroup.
    pub fn converse(&self, to: SocketAddr) -> anyhow::Result<Conversation> {
        self.converse_with(to, Connect::default())
    }

    /// The same with options.
    pub fn converse_with(&self, to: SocketAddr, options: Connect) -> anyhow::Result<Conversation> {
        Conversation::start(&self.net.client, Some(self.cgroup.path()), to, options)
    }

    /// Starts a process that samples the initial RTO of connections in the client's namespace and the agent's cgroup.
    pub fn prober(&self, to: &[SocketAddr], expected: &[Duration]) -> anyhow::Result<Prober> {
        let probes = Probes {
            to: to.to_vec(),
            expected: expected.to_vec(),
        };
        Prober::start(&self.net.client, self.cgroup.path(), probes)
    }

    /// Ends the fallback (outage) of all policies, as an established connection would: a black hole is an outage, and
    /// measurements follow each other. Does nothing without the agent's maps.
    fn end_outages(&self) -> anyhow::Result<()> {
        // The lost attempts of `rto_agent_common::fallback::Fallback`, and the states of the first 64 policies.
        const LOST: Range<usize> = 8..12;
        const STATES: u32 = 128;
        let Ok(map) = self
            .pins()
            .and_then(|pins| Ok(Map::open(&pins.join("FALLBACKS"))?))
        else {
            return Ok(());
        };
        for key in (0..STATES).map(u32::to_ne_bytes) {
            // A small map has fewer.
            let Some(mut state) = map.get(&key)? else {
                break;
            };
            if state[LOST] != [0; 4] {
                state[LOST].fill(0);
                map.set(&key, &state)?;
            }
        }
        Ok(())
    }

    /// The first `count` gaps between the SYNs of a new connection to a black hole.
    pub fn syn_gaps(&self, to: impl Into<To>, count: usize) -> anyhow::Result<Vec<Duration>> {
        let to = to.into();
        let address = to.0;
        self.end_outages()?;
        let capture = Capture::start(&self.net.client, CLIENT_LINK)?;
        let _traffic = self.connect(to)?;
        let enough = |all: &[Segment]| syns(all, address).len() > count;
        Ok(gaps(&syns(&capture.wait_for(TIMEOUT, enough)?, address)))
    }

    /// The first `count` gaps between the SYNs of each of several new connections to a black hole, made at the same
    /// time.
    pub fn many_syn_gaps(
        &self,
        to: impl Into<To>,
        connections: usize,
        count: usize,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        let link = (self.net.client.as_str(), CLIENT_LINK);
        self.many(link, syns, to.into(), connections, count)
    }

    /// The first `count` gaps between the packets of one kind of several simultaneous connections.
    fn many(
        &self,
        (netns, link): (&str, &str),
        kind: fn(&[Segment], SocketAddr) -> Vec<Segment>,
        to: To,
        connections: usize,
        count: usize,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        self.end_outages()?;
        let capture = Capture::start(netns, link)?;
        // The first packet waits for neighbour discovery, up to a second, and is therefore not measured.
        let first = self.connect(to)?;
        let seen = |all: &[Segment]| !kind(all, to.0).is_empty();
        let first_of = by_connection(&capture.wait_for(TIMEOUT, seen)?);
        drop(first);
        let traffic = (0..connections).map(|_| self.connect(to));
        let _traffic = traffic.collect::<anyhow::Result<Vec<_>>>()?;
        let of = |all: &[Segment]| {
            let mut all = by_connection(&kind(all, to.0));
            all.retain(|of| of.len() > count && !first_of.iter().any(|first| first[0] == of[0]));
            all
        };
        let all = capture.wait_for(TIMEOUT, |all| of(all).len() >= connections)?;
        Ok(of(&all).iter().map(|segments| gaps(segments)).collect())
    }

    /// Asserts that new connections to a black hole use this initial RTO.
    pub fn assert_syn_gap(&self, to: impl Into<To>, timer: Duration) -> anyhow::Result<()> {
        self.assert_syn_gaps(to, &[timer])
    }

    /// Asserts that the SYNs of new connections to a black hole have these intervals.
    pub fn assert_syn_gaps(&self, to: impl Into<To>, timers: &[Duration]) -> anyhow::Result<()> {
        let link = (self.net.client.as_str(), CLIENT_LINK);
        self.assert_timers(link, syns, to.into(), timers)
    }

    /// Asserts that a server uses this SYN-ACK RTO for clients whose ACKs get lost.
    pub fn assert_syn_ack_gap(&self, to: SocketAddr, timer: Duration) -> anyhow::Result<()> {
        self.assert_syn_ack_gaps(to, &[timer])
    }

    /// Asserts that the SYN-ACKs of a server whose clients' ACKs get lost have these intervals.
    pub fn assert_syn_ack_gaps(&self, to: SocketAddr, timers: &[Duration]) -> anyhow::Result<()> {
        let link = (self.net.server.as_str(), SERVER_LINK);
        self.assert_timers(link, syn_acks, to.into(), timers)
    }

    /// Asserts that the packets of one kind have these intervals.
    fn assert_timers(
        &self,
        link: (&str, &str),
        kind: fn(&[Segment], SocketAddr) -> Vec<Segment>,
        to: To,
        timers: &[Duration],
    ) -> anyhow::Result<()> {
        assert_samples(|connections| {
            let all = self.many(link, kind, to, connections, timers.len())?;
            let samples = all.into_iter();
            Ok(samples
                .map(|gaps| Sample::of_timers(timers, gaps))
                .collect())
        })
    }
}

/// Where to connect, and how.
#[derive(Clone, Copy, Debug)]
pub struct To(SocketAddr, Connect);

impl From<SocketAddr> for To {
    fn from(to: SocketAddr) -> Self {
        Self(to, Connect::default())
    }
}

impl From<(SocketAddr, Connect)> for To {
    fn from((to, options): (SocketAddr, Connect)) -> Self {
        Self(to, options)
    }
}
