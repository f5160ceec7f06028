//! Everything a test needs: an agent and two namespaces, removed with it.

use std::{
    net::SocketAddr,
    ops::{Deref, DerefMut},
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
    netns::{CLIENT_LINK, Pair, SERVER_LINK},
    timing::{Sample, assert_samples},
    wait::TIMEOUT,
    workload::{
        conversation::{self, Conversation},
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

    /// Runs a command that must fail as a usage error (exit status 2), and returns its stderr.
    pub fn usage_error(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.try_cli(args)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_usage = output.status.code() == Some(2);
        ensure!(is_usage, "{args:?}: {}: {said}", output.status);
        Ok(said)
    }

    /// Starts to connect, in the client's namespace and the agent's cgroup.
    pub fn connect(&self, to: SocketAddr, options: &Connect) -> anyhow::Result<Traffic> {
        Traffic::connect(&self.net.client, Some(self.cgroup.path()), to, options)
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
    pub fn converse(
        &self,
        to: SocketAddr,
        options: conversation::Options,
    ) -> anyhow::Result<Conversation> {
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

    /// The first `count` gaps between the SYNs of a new connection to a black hole.
    pub fn syn_gaps(
        &self,
        to: SocketAddr,
        options: &Connect,
        count: usize,
    ) -> anyhow::Result<Vec<Duration>> {
        let capture = Capture::start(&self.net.client, CLIENT_LINK)?;
        let _traffic = self.connect(to, options)?;
        let enough = |all: &[Segment]| syns(all, to).len() > count;
        Ok(gaps(&syns(&capture.wait_for(TIMEOUT, enough)?, to)))
    }

    /// The first `count` gaps between the SYNs of each of several new connections to a black hole, made at the same
    /// time.
    pub fn many_syn_gaps(
        &self,
        to: SocketAddr,
        options: &Connect,
        connections: usize,
        count: usize,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        self.many(CLIENT_LINK, syns, (to, options), connections, count)
    }

    /// The first `count` gaps between the SYN-ACKs to each of several simultaneous clients whose ACKs get lost.
    pub fn many_syn_ack_gaps(
        &self,
        to: SocketAddr,
        options: &Connect,
        connections: usize,
        count: usize,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        self.many(SERVER_LINK, syn_acks, (to, options), connections, count)
    }

    fn many(
        &self,
        link: &str,
        kind: fn(&[Segment], SocketAddr) -> Vec<Segment>,
        (to, options): (SocketAddr, &Connect),
        connections: usize,
        count: usize,
    ) -> anyhow::Result<Vec<Vec<Duration>>> {
        let netns = match link {
            SERVER_LINK => &self.net.server,
            _ => &self.net.client,
        };
        let capture = Capture::start(netns, link)?;
        // The first packet waits for neighbour discovery, up to a second, and is therefore not measured.
        let first = self.connect(to, options)?;
        let first_of = by_connection(&capture.wait_for(TIMEOUT, |all| !kind(all, to).is_empty())?);
        drop(first);
        let traffic = (0..connections).map(|_| self.connect(to, options));
        let _traffic = traffic.collect::<anyhow::Result<Vec<_>>>()?;
        let of = |all: &[Segment]| {
            let mut all = by_connection(&kind(all, to));
            all.retain(|of| of.len() > count && !first_of.iter().any(|first| first[0] == of[0]));
            all
        };
        let all = capture.wait_for(TIMEOUT, |all| of(all).len() >= connections)?;
        Ok(of(&all).iter().map(|segments| gaps(segments)).collect())
    }

    /// Asserts that new connections to a black hole use this initial RTO.
    ///
    /// # Panics
    ///
    /// If they use another.
    pub fn assert_syn_gap(
        &self,
        to: SocketAddr,
        options: &Connect,
        timer: Duration,
    ) -> anyhow::Result<()> {
        self.assert_syn_gaps(to, options, &[timer])
    }

    /// Asserts that the SYNs of new connections to a black hole have these intervals.
    ///
    /// # Panics
    ///
    /// If they have other intervals.
    pub fn assert_syn_gaps(
        &self,
        to: SocketAddr,
        options: &Connect,
        timers: &[Duration],
    ) -> anyhow::Result<()> {
        assert_timers(timers, |connections, count| {
            self.many_syn_gaps(to, options, connections, count)
        })
    }

    /// Asserts that a server uses this SYN-ACK RTO for clients whose ACKs get lost.
    ///
    /// # Panics
    ///
    /// If it uses another.
    pub fn assert_syn_ack_gap(
        &self,
        to: SocketAddr,
        options: &Connect,
        timer: Duration,
    ) -> anyhow::Result<()> {
        self.assert_syn_ack_gaps(to, options, &[timer])
    }

    /// Asserts that the SYN-ACKs of a server whose clients' ACKs get lost have these intervals.
    ///
    /// # Panics
    ///
    /// If they have other intervals.
    pub fn assert_syn_ack_gaps(
        &self,
        to: SocketAddr,
        options: &Connect,
        timers: &[Duration],
    ) -> anyhow::Result<()> {
        assert_timers(timers, |connections, count| {
            self.many_syn_ack_gaps(to, options, connections, count)
        })
    }
}

/// Asserts that gaps match their timers. `gaps` measures a number of connections, and a number of gaps of each.
fn assert_timers(
    timers: &[Duration],
    mut gaps: impl FnMut(usize, usize) -> anyhow::Result<Vec<Vec<Duration>>>,
) -> anyhow::Result<()> {
    assert_samples(|connections| {
        let all = gaps(connections, timers.len())?.into_iter();
        Ok(all.map(|gaps| Sample::of_timers(timers, gaps)).collect())
    })
}
