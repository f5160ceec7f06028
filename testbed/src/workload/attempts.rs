//! Many simultaneous connect() calls. Records how long each takes on the client's clock, and socket options before and
//! after.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{SockaddrStorage, bind, getsockopt, setsockopt, sockopt},
};
use serde::{Deserialize, Serialize};

use super::{
    Program, Role, socket,
    stdio::{reply, until_closed},
};
use crate::{
    channel::ControlChannel,
    tcp::{TcpInfo, get_option, option, set_option},
};

/// Options that the application sets itself, by number ([`option`]).
pub type Own = Vec<(i32, i32)>;

/// A connection's own address (`None`: the kernel chooses) and the server's.
pub type Ends = (Option<SocketAddr>, SocketAddr);

/// The time between two groups of connections. The timers of many that begin at once expire in the same jiffies, and the
/// backlog of a veth interface takes 1,000 packets.
const PAUSE: Duration = Duration::from_millis(10);

/// The options that a SYN schedule changes, in the order of [`Attempt::before`].
const WATCHED: [i32; 3] = [option::RTO_MAX_MS, option::USER_TIMEOUT, option::SYNCNT];

/// One connect().
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// "connected" or the name of the errno.
    pub result: String,
    /// Duration of the attempt.
    pub took: Duration,
    /// TCP_RTO_MAX_MS, TCP_USER_TIMEOUT and TCP_SYNCNT before connect(); `None` if the kernel does not know the option.
    pub before: [Option<i32>; 3],
    /// The same options after the attempt.
    pub after: [Option<i32>; 3],
    /// The congestion window after the attempt, segments.
    pub cwnd: u32,
}

/// A child that connects.
pub struct Attempts(ControlChannel);

impl Attempts {
    /// Starts `count` connections to each of these addresses at once, in turn; returns when all are started.
    pub fn begin(
        netns: &str,
        cgroup: Option<&Path>,
        to: &[SocketAddr],
        count: usize,
        own: Own,
    ) -> anyhow::Result<Self> {
        Self::begin_role(netns, cgroup, in_turn(to, count), own, false)
    }

    fn begin_role(
        netns: &str,
        cgroup: Option<&Path>,
        ends: Vec<Vec<Ends>>,
        own: Own,
        is_read: bool,
    ) -> anyhow::Result<Self> {
        let role = Role::Attempts { ends, own, is_read };
        let mut attempts = Program::built()?.ready(netns, cgroup, &role).map(Self)?;
        attempts.start()?;
        Ok(attempts)
    }

    /// Starts the program, which will start these groups of connections with these options.
    pub fn load(
        program: &Program,
        netns: &str,
        cgroup: Option<&Path>,
        ends: Vec<Vec<Ends>>,
        own: Own,
    ) -> anyhow::Result<Self> {
        let is_read = false;
        let role = Role::Attempts { ends, own, is_read };
        program.ready(netns, cgroup, &role).map(Self)
    }

    /// The same; another thread of the client reads the sockets' options all the time. Reading TCP_INFO holds the lock of
    /// the socket, so that timers expire while it is held.
    pub fn begin_read(
        netns: &str,
        cgroup: Option<&Path>,
        to: &[SocketAddr],
        count: usize,
    ) -> anyhow::Result<Self> {
        Self::begin_role(netns, cgroup, in_turn(to, count), Own::new(), true)
    }

    /// Makes it start all connections.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.0.request(&())
    }

    /// Whether all have ended.
    pub fn have_ended(&self) -> anyhow::Result<bool> {
        self.0.has_reply()
    }

    /// Waits until all have ended.
    pub fn outcomes(mut self) -> anyhow::Result<Vec<Attempt>> {
        self.0.recv()
    }
}

/// One group of connections.
fn in_turn(to: &[SocketAddr], count: usize) -> Vec<Vec<Ends>> {
    let each = to.iter().map(|to| (None, *to)).collect::<Vec<_>>();
    vec![each.repeat(count)]
}

pub(super) fn run(ends: &[Vec<Ends>], own: &Own, is_read: bool) -> anyhow::Result<()> {
    reply(&())?;
    io::stdin().read_line(&mut String::new())?;
    let mut begun = Vec::new();
    for group in ends {
        if !begun.is_empty() {
            thread::sleep(PAUSE);
        }
        for (from, to) in group {
            let socket = made(*from, *to, own)?;
            let before = watched(&socket);
            let at = Instant::now();
            socket::begin_on(&socket, *to)?;
            begun.push((socket, at, before));
        }
    }
    let count = begun.len();
    if is_read {
        let sockets = begun.iter().map(|(socket, ..)| socket.try_clone());
        let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
        thread::spawn(move || read_forever(&sockets));
    }
    reply(&())?;
    let mut attempts: Vec<Option<Attempt>> = vec![None; count];
    while attempts.iter().any(Option::is_none) {
        let open: Vec<usize> = (0..count).filter(|i| attempts[*i].is_none()).collect();
        let fd = |i: &usize| PollFd::new(begun[*i].0.as_fd(), PollFlags::POLLOUT);
        let mut fds: Vec<_> = open.iter().map(fd).collect();
        poll(&mut fds, PollTimeout::NONE)?;
        let ended: Vec<usize> = open
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| fd.revents().is_some_and(|events| !events.is_empty()))
            .map(|(i, _)| *i)
            .collect();
        for i in ended {
            let (socket, at, before) = &begun[i];
            let took = at.elapsed();
            let result = match getsockopt(socket, sockopt::SocketError)? {
                0 => "connected".to_owned(),
                errno => format!("{:?}", Errno::from_raw(errno)),
            };
            // poll() may see ESTABLISHED before the sock_ops program does. TCP_INFO waits for the socket's lock, which
            // the kernel holds until the program has run; other options are read without it.
            let cwnd = TcpInfo::of(socket)?.snd_cwnd;
            attempts[i] = Some(Attempt {
                result,
                took,
                before: *before,
                after: watched(socket),
                cwnd,
            });
        }
    }
    reply(&attempts)?;
    until_closed();
    Ok(())
}

fn made(from: Option<SocketAddr>, to: SocketAddr, own: &Own) -> anyhow::Result<OwnedFd> {
    let socket = socket::make(to.is_ipv6(), false)?;
    if let Some(from) = from {
        // Connections to two servers may have the same port.
        setsockopt(&socket, sockopt::ReuseAddr, &true)?;
        bind(socket.as_raw_fd(), &SockaddrStorage::from(from))?;
    }
    for (number, value) in own {
        set_option(&socket, *number, *value)?;
    }
    Ok(socket)
}

/// Reads options, with the lock of the socket and without.
fn read_forever(sockets: &[OwnedFd]) {
    loop {
        for socket in sockets {
            let _ = TcpInfo::of(socket); // Only that the kernel locks the socket counts.
            watched(socket);
        }
        // Without it, the client's other thread waits for seconds.
        thread::yield_now();
    }
}

fn watched(socket: &OwnedFd) -> [Option<i32>; 3] {
    WATCHED.map(|number| get_option(socket, number).ok())
}
