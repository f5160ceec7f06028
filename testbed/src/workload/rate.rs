//! Measures how long connections take to make, in a child process that owns both ends.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
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
    /// Number of connections open at the same time. They are spread over the processors, with a thread and a listener
    /// each; a connection stays in one thread.
    pub at_once: usize,
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
        Self::start_parallel(program, netns, cgroup, accepts_in, on, 1)
    }

    /// As [`Rate::start`], with this many connections at the same time ([`Both::at_once`]).
    pub fn start_parallel(
        program: &Path,
        netns: &str,
        cgroup: &Path,
        accepts_in: Option<&Path>,
        on: SocketAddr,
        at_once: usize,
    ) -> anyhow::Result<Self> {
        let begins_in = accepts_in.unwrap_or(cgroup);
        let join = accepts_in.map(|_| cgroup.to_owned());
        let role = Role::Rate(Both { on, join, at_once });
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
    let threads = thread::available_parallelism()?.get().min(both.at_once);
    let mut listeners = vec![super::listen(both.on)?];
    for _ in 1..threads {
        listeners.push(super::listen((both.on.ip(), 0).into())?);
    }
    if let Some(cgroup) = &both.join {
        // "0" is the writing process itself (cgroups(7)).
        fs::write(cgroup.join("cgroup.procs"), "0")?;
    }
    reply(&())?;
    let at_once = both.at_once / threads;
    commands(|count: usize| {
        let begin = Instant::now();
        thread::scope(|scope| {
            let others: Vec<_> = listeners[1..]
                .iter()
                .map(|listener| scope.spawn(|| converse(listener, count / threads, at_once)))
                .collect();
            let own = count - count / threads * others.len();
            converse(&listeners[0], own, at_once)?;
            others
                .into_iter()
                .try_for_each(|other| other.join().map_err(|_| io::Error::other("a panic"))?)
        })?;
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

/// Makes `count` connections, of which `at_once` are open at the same time: a request and an answer of one byte each,
/// then an orderly close that the client begins. Both ends are in one thread; with two threads the result would depend
/// on the CPUs that the scheduler chooses.
fn converse(listener: &TcpListener, count: usize, at_once: usize) -> io::Result<()> {
    let on = listener.local_addr()?;
    let mut left = count;
    while left > 0 {
        let open = left.min(at_once);
        let connect = |_| TcpStream::connect(on);
        let mut clients = (0..open).map(connect).collect::<io::Result<Vec<_>>>()?;
        let accept = |_| listener.accept().map(|(server, _)| server);
        let mut servers = (0..open).map(accept).collect::<io::Result<Vec<_>>>()?;
        for client in &mut clients {
            client.write_all(b"R")?;
        }
        for server in &mut servers {
            server.read_exact(&mut [0])?;
            server.write_all(b"A")?;
        }
        for client in &mut clients {
            client.read_exact(&mut [0])?;
            client.shutdown(Shutdown::Write)?;
        }
        // The servers close first, each after it has read the client's FIN.
        for mut end in servers.into_iter().chain(clients) {
            if end.read(&mut [0])? > 0 {
                return Err(io::Error::other("unexpected data before the close"));
            }
        }
        left -= open;
    }
    Ok(())
}
