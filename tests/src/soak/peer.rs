//! The peer: a server, and a client that the host starts and stops.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::Context as _;
use nix::sys::socket::{setsockopt, sockopt};
use rto_testbed::{
    wait::eventually,
    workload::counted::{Client, Command, CountedClient, CountedServer, Counts},
};

use super::network::{self, CONTROL_PORT, HOST, PORT, at};

/// Longest time for the other machine to boot.
const BOOT: Duration = Duration::from_secs(300);
/// Longest time for a reply: the reply to `Pause` is sent after the last connection has ended.
const REPLY: Duration = Duration::from_secs(150);
/// Pause between two connections of a client.
pub(super) const PAUSE: Duration = Duration::from_millis(40);

pub(super) fn run() -> anyhow::Result<()> {
    network::set_up_peer()?;
    let everywhere = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
    let _server = CountedServer::start(None, everywhere)?;
    let mut client = CountedClient::start(
        None,
        Client {
            to: network::all_at(&HOST, PORT)?,
            lost: Vec::new(),
            pause: PAUSE,
        },
    )?;
    let control = at(HOST[0], CONTROL_PORT)?;
    let mut control = eventually("host", BOOT, || Ok(TcpStream::connect(control).ok()))?;
    // Keepalive detects a host that was switched off.
    setsockopt(&control, sockopt::KeepAlive, &true)?;
    setsockopt(&control, sockopt::TcpKeepIdle, &30)?;
    setsockopt(&control, sockopt::TcpKeepInterval, &10)?;
    let mut commands = BufReader::new(control.try_clone()?);
    let mut line = String::new();
    // Ends with the control connection.
    while commands.read_line(&mut line)? > 0 {
        let counts = client.tell(serde_json::from_str(&line)?)?;
        writeln!(control, "{}", serde_json::to_string(&counts)?)?;
        line.clear();
    }
    Ok(())
}

/// The host's view of the peer.
pub(super) struct Peer {
    commands: TcpStream,
    replies: BufReader<TcpStream>,
}

impl Peer {
    /// Waits for the peer, on a socket that is outside of the agent's cgroup.
    pub(super) fn accept() -> anyhow::Result<Self> {
        let listener = TcpListener::bind(at(HOST[0], CONTROL_PORT)?)?;
        listener.set_nonblocking(true)?;
        let (commands, _) = eventually("peer", BOOT, || Ok(listener.accept().ok()))?;
        commands.set_nonblocking(false)?;
        commands.set_read_timeout(Some(REPLY))?;
        let replies = BufReader::new(commands.try_clone()?);
        Ok(Self { commands, replies })
    }

    /// Sends its client a command; returns the counts at the time of the reply.
    pub(super) fn tell(&mut self, command: Command) -> anyhow::Result<Counts> {
        writeln!(self.commands, "{}", serde_json::to_string(&command)?)?;
        let mut line = String::new();
        self.replies.read_line(&mut line).context("peer")?;
        serde_json::from_str(&line).with_context(|| format!("peer: {line:?}"))
    }
}
