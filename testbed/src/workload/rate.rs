//! Measures how long connections take to make, in a child process that owns both ends.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::{
    Program, Role,
    stdio::{commands, reply},
};
use crate::{channel::ControlChannel, process::run_before_ordinary};

/// Both ends of the connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Both {
    /// An address of the namespace itself.
    pub on: SocketAddr,
    /// A cgroup that the child joins after it listens: accepted sockets stay in the cgroup of the listener.
    pub join: Option<PathBuf>,
}

/// The child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Rate(ControlChannel);

impl Rate {
    /// Starts `rto-workload` from this path; `on` is an address of the namespace itself. It connects in `cgroup`, and
    /// accepts there or, if given, in `accepts_in`. It switches TIME_WAIT off in the namespace.
    pub fn start(
        program: &Path,
        netns: &str,
        cgroup: &Path,
        accepts_in: Option<&Path>,
        on: SocketAddr,
    ) -> anyhow::Result<Self> {
        let begins_in = accepts_in.unwrap_or(cgroup);
        let join = accepts_in.map(|_| cgroup.to_owned());
        let role = Role::Rate(Both { on, join });
        let program = Program::at(program);
        program.ready(netns, Some(begins_in), &role).map(Self)
    }

    /// Makes, uses and ends `count` connections; returns how long that took.
    pub fn connections(&mut self, count: u32) -> anyhow::Result<Duration> {
        self.0.request(&count)
    }
}

pub(super) fn run(both: &Both) -> anyhow::Result<()> {
    run_before_ordinary();
    keep_no_time_wait()?;
    let listener = super::listen(both.on)?;
    if let Some(cgroup) = &both.join {
        // "0" is the writing process itself (cgroups(7)).
        fs::write(cgroup.join("cgroup.procs"), "0")?;
    }
    reply(&())?;
    commands(|count: usize| {
        let begin = Instant::now();
        for _ in 0..count {
            converse(&listener)?;
        }
        Ok(begin.elapsed())
    })
}

/// Tens of thousands of sockets in TIME_WAIT would slow later connections down. Some kernels have this sysctl in the
/// initial namespace only, where a test must not change it. There the sockets accumulate, but equally in all
/// measurements that are compared.
fn keep_no_time_wait() -> anyhow::Result<()> {
    // /proc/sys/net shows the namespace of the reading process.
    let path = "/proc/sys/net/ipv4/tcp_max_tw_buckets";
    match fs::write(path, "0") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.context(path),
    }
}

/// One connection: a request and an answer of one byte each, then an orderly close that the client begins. Both ends are
/// in one thread; with two threads the result would depend on the CPUs that the scheduler chooses.
fn converse(listener: &TcpListener) -> io::Result<()> {
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.write_all(b"R")?;
    server.read_exact(&mut [0])?;
    server.write_all(b"A")?;
    client.read_exact(&mut [0])?;
    client.shutdown(Shutdown::Write)?;
    // The server closes first, after it has read the client's FIN.
    for mut end in [server, client] {
        if end.read(&mut [0])? > 0 {
            return Err(io::Error::other("unexpected data before the close"));
        }
    }
    Ok(())
}
