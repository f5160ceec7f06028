//! How long it takes to make connections, by a child process that has both their ends.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    Program, Role,
    stdio::{commands, reply},
};
use crate::{channel::ControlChannel, netns::sysctl};

/// Both ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Both {
    /// An address of the namespace itself.
    pub on: SocketAddr,
    /// A cgroup to join once it listens: the accepted sockets stay with the listener.
    pub join: Option<PathBuf>,
}

/// The child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Rate(ControlChannel);

impl Rate {
    /// Starts `rto-workload` at this path; `on` is an address of the namespace itself. It connects in `cgroup`, and accepts there or, if given,
    /// in `accepts_in`. From now on the namespace keeps no TIME_WAIT: tens of thousands of them would slow later
    /// connections down.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(
        program: &Path,
        netns: &str,
        cgroup: &Path,
        accepts_in: Option<&Path>,
        on: SocketAddr,
    ) -> anyhow::Result<Self> {
        sysctl(netns, "net.ipv4.tcp_max_tw_buckets", "0")?;
        let begins_in = accepts_in.unwrap_or(cgroup);
        let join = accepts_in.map(|_| cgroup.to_owned());
        let role = Role::Rate(Both { on, join });
        let mut command = Program::at(program).urgent_command(netns, Some(begins_in), &role)?;
        let mut channel = ControlChannel::start(&mut command)?;
        channel.recv::<()>()?;
        Ok(Self(channel))
    }

    /// Makes, uses and ends so many connections one after the other; how long that took.
    ///
    /// # Errors
    ///
    /// If one fails.
    pub fn connections(&mut self, count: u32) -> anyhow::Result<Duration> {
        self.0.request(&count)
    }
}

pub(super) fn run(both: &Both) -> anyhow::Result<()> {
    let listener = super::listen(both.on)?;
    if let Some(cgroup) = &both.join {
        // "0" is the writing process itself.
        std::fs::write(cgroup.join("cgroup.procs"), "0")?;
    }
    reply(&())?;
    commands(|count: u32| {
        let begin = Instant::now();
        for _ in 0..count {
            converse(&listener, both.on)?;
        }
        Ok(begin.elapsed())
    })
}

/// One connection: a request and an answer of a byte each, then an orderly end that the client begins.
/// Both ends are in one thread: with two, what is measured is on which CPUs the scheduler puts them.
fn converse(listener: &TcpListener, on: SocketAddr) -> io::Result<()> {
    let mut client = TcpStream::connect(on)?;
    let (mut server, _) = listener.accept()?;
    client.write_all(b"R")?;
    server.read_exact(&mut [0])?;
    server.write_all(b"A")?;
    client.read_exact(&mut [0])?;
    client.shutdown(Shutdown::Write)?;
    let more = server.read(&mut [0])?;
    drop(server);
    match more + client.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::other("bytes where an end was due")),
    }
}
