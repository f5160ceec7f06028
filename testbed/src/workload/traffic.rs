//! Connections that are made or accepted, and kept open.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{Backlog, SockaddrStorage, bind, listen, setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use super::{
    Program, Role,
    conversation::{REQUEST, WANTS_ANSWER},
    socket,
    stdio::{reply, until_closed},
};
use crate::{
    channel::ControlChannel,
    process::beside,
    tcp::{option, set_option},
};

/// A child process; killed by its pid and reaped when dropped.
#[derive(Debug)]
pub struct Traffic(ControlChannel);

/// How a connect() ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// "connected" or the name of the errno.
    pub result: String,
    /// How long connect() took.
    pub took: Duration,
}

impl Outcome {
    fn new(begin: Instant, result: nix::Result<()>) -> Self {
        Self {
            result: result.map_or_else(|e| format!("{e:?}"), |()| "connected".to_owned()),
            took: begin.elapsed(),
        }
    }
}

/// Options of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connect {
    /// Use an AF_INET6 socket and the IPv4-mapped address.
    pub mapped: bool,
    /// Use MPTCP.
    pub mptcp: bool,
    /// Send the first request in the SYN.
    pub fast_open: bool,
    /// An option of [`option`] that the application sets itself, and its value.
    pub own: Option<(i32, i32)>,
    /// Connect the socket to this address first, and end that connection.
    pub first: Option<SocketAddr>,
    /// Likewise to an address that does not answer, for 50 ms.
    pub first_unanswered: Option<SocketAddr>,
}

impl Connect {
    /// The defaults with some changes.
    pub fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut options = Self::default();
        change(&mut options);
        options
    }

    /// A socket with these options, and the address to connect it to.
    pub(super) fn socket(self, to: SocketAddr) -> anyhow::Result<(OwnedFd, SocketAddr)> {
        let socket = socket::make(to.is_ipv6() || self.mapped, self.mptcp)?;
        if let Some((number, value)) = self.own {
            set_option(&socket, number, value)?;
        }
        if let Some(first) = self.first_unanswered {
            socket::try_first(&socket, first)?;
        }
        if let Some(first) = self.first {
            socket::connect(&socket, first)?;
            socket::disconnect(&socket)?;
        }
        if self.fast_open {
            set_option(&socket, option::FASTOPEN_CONNECT, 1)?;
        }
        Ok((socket, if self.mapped { socket::map(to) } else { to }))
    }
}

/// Options of a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listen {
    /// TCP_DEFER_ACCEPT, seconds; 0: not set.
    pub defer_accept_s: u16,
    /// TCP_SYNCNT, which for a listener limits SYN-ACK retransmissions.
    pub syn_retries: Option<u8>,
}

impl Traffic {
    /// connect() in a child, which keeps the connection until it is dropped.
    pub fn connect(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        options: Connect,
    ) -> anyhow::Result<Self> {
        Self::start(netns, cgroup, &Role::Connect { to, options })
    }

    /// Starts a child in which two addresses of a namespace connect to each other. If the first one's SYN is lost, the
    /// other's crosses it. The outcome is that of the first.
    pub fn cross_syns(
        netns: &str,
        cgroup: Option<&Path>,
        one: SocketAddr,
        other: SocketAddr,
    ) -> anyhow::Result<Self> {
        Self::start(netns, cgroup, &Role::CrossSyns { one, other })
    }

    /// A listener that accepts and keeps connections; returns once it listens.
    pub fn serve(netns: &str, cgroup: Option<&Path>, on: SocketAddr) -> anyhow::Result<Self> {
        Self::serve_with(netns, cgroup, on, Listen::default())
    }

    /// As [`Traffic::serve`], with options.
    pub fn serve_with(
        netns: &str,
        cgroup: Option<&Path>,
        on: SocketAddr,
        options: Listen,
    ) -> anyhow::Result<Self> {
        let role = Role::Accept { on, options };
        Program::built()?.ready(netns, cgroup, &role).map(Self)
    }

    /// A listener that answers conversations ([`super::conversation`]); returns once it listens.
    pub fn echo_server(
        netns: &str,
        cgroup: Option<&Path>,
        on: SocketAddr,
        mptcp: bool,
    ) -> anyhow::Result<Self> {
        let role = Role::EchoServer { on, mptcp };
        Program::built()?.ready(netns, cgroup, &role).map(Self)
    }

    /// Starts `count` connections at once; returns when all are started, without waiting for any.
    pub fn connect_many(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        count: usize,
    ) -> anyhow::Result<Self> {
        Self::connect_many_by(&beside("rto-workload")?, netns, cgroup, to, count)
    }

    /// As [`Traffic::connect_many`], with the `rto-workload` at this path.
    pub fn connect_many_by(
        program: &Path,
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        count: usize,
    ) -> anyhow::Result<Self> {
        let role = Role::ConnectMany { to, count };
        Program::at(program).ready(netns, cgroup, &role).map(Self)
    }

    fn start(netns: &str, cgroup: Option<&Path>, role: &Role) -> anyhow::Result<Self> {
        let mut command = Program::built()?.command(netns, cgroup, role)?;
        Ok(Self(ControlChannel::start(&mut command)?))
    }

    /// Waits for connect() to end.
    pub fn outcome(mut self) -> anyhow::Result<Outcome> {
        self.0.recv()
    }

    /// Waits until a listener with TCP_DEFER_ACCEPT accepts a connection.
    pub fn accepted(&mut self) -> anyhow::Result<()> {
        self.0.recv()
    }

    /// Whether connect() has ended.
    pub fn has_ended(&self) -> anyhow::Result<bool> {
        self.0.has_reply()
    }
}

pub(super) fn connect(to: SocketAddr, options: Connect) -> anyhow::Result<()> {
    let (socket, to) = options.socket(to)?;
    let begin = Instant::now();
    let mut result = socket::connect(&socket, to);
    if options.fast_open && result.is_ok() {
        // The first write sends the SYN.
        result = nix::unistd::write(&socket, &[WANTS_ANSWER; REQUEST]).map(drop);
    }
    reply(&Outcome::new(begin, result))?;
    until_closed();
    drop(socket);
    Ok(())
}

pub(super) fn cross_syns(one: SocketAddr, other: SocketAddr) -> anyhow::Result<()> {
    let begin = Instant::now();
    let sockets = [
        socket::begin_from(one, other)?,
        socket::begin_from(other, one)?,
    ];
    let result = socket::wait(&sockets[0]);
    reply(&Outcome::new(begin, result))?;
    until_closed();
    drop(sockets);
    Ok(())
}

pub(super) fn connect_many(to: SocketAddr, count: usize) -> anyhow::Result<()> {
    let sockets = (0..count).map(|_| socket::begin(to));
    let sockets = sockets.collect::<anyhow::Result<Vec<_>>>()?;
    reply(&())?;
    until_closed();
    drop(sockets);
    Ok(())
}

pub(super) fn accept(on: SocketAddr, options: Listen) -> anyhow::Result<()> {
    let listener = super::listen(on)?;
    // Half-open requests beyond half of the backlog of 128 would expire earlier (`reqsk_timer_handler()`).
    listen(&listener, Backlog::MAXCONN)?;
    let defers = options.defer_accept_s != 0;
    if defers {
        set_option(
            &listener,
            option::DEFER_ACCEPT,
            options.defer_accept_s.into(),
        )?;
    }
    if let Some(n) = options.syn_retries {
        set_option(&listener, option::SYNCNT, n.into())?;
    }
    reply(&())?;
    let mut kept = Vec::new();
    for connection in listener.incoming() {
        kept.push(connection?);
        if defers {
            reply(&())?;
        }
    }
    Ok(())
}

pub(super) fn echo_server(on: SocketAddr, mptcp: bool) -> anyhow::Result<()> {
    let socket = socket::make(on.is_ipv6(), mptcp)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(on))?;
    // The backlog must hold all connections that arrive at once after an outage.
    listen(&socket, Backlog::MAXCONN)?;
    reply(&())?;
    for connection in TcpListener::from(socket).incoming() {
        let connection = connection?;
        thread::spawn(move || answer(connection));
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; REQUEST];
    loop {
        stream.read_exact(&mut request)?;
        if request[0] == WANTS_ANSWER {
            stream.write_all(b"A")?;
        }
    }
}
