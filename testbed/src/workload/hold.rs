//! Many open connections, held by child processes that own both ends.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

use super::{
    Program, Role,
    stdio::{commands, reply},
};
use crate::channel::ControlChannel;

/// Connections per process: their descriptors fit the hard limit of most hosts, and their number is well below that of
/// local ports.
const PER_PROCESS: u32 = 5000;
/// Descriptors of a process that are not connections.
const OWN_DESCRIPTORS: u64 = 64;

/// The child processes, each with its own address in 127.0.0.0/8. They are killed and reaped when dropped, which ends
/// their connections.
#[derive(Debug)]
pub struct Hold {
    processes: Vec<ControlChannel>,
    /// Connections of all processes together.
    connections: u32,
}

impl Hold {
    /// Starts as many `rto-workload`s from this path as `connections` need, in a namespace and a cgroup. They listen on
    /// this port, and have no connections yet.
    pub fn start(
        program: &Path,
        netns: &str,
        cgroup: &Path,
        port: u16,
        connections: u32,
    ) -> anyhow::Result<Self> {
        let start = |i| {
            let address = Ipv4Addr::from_bits(Ipv4Addr::LOCALHOST.to_bits() + i);
            let on = SocketAddr::from((address, port));
            Program::at(program).ready(netns, Some(cgroup), &Role::Hold { on })
        };
        let processes = (0..connections.div_ceil(PER_PROCESS)).map(start);
        Ok(Self {
            processes: processes.collect::<anyhow::Result<_>>()?,
            connections,
        })
    }

    /// Opens the connections.
    pub fn open(&mut self) -> anyhow::Result<()> {
        let mut left = self.connections;
        for process in &mut self.processes {
            let share = left.min(PER_PROCESS);
            process.send(&share)?;
            left -= share;
        }
        self.wait()
    }

    /// Ends all connections.
    pub fn close(&mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.send(&0)?;
        }
        self.wait()
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().try_for_each(ControlChannel::recv)
    }
}

pub(super) fn run(on: SocketAddr) -> anyhow::Result<()> {
    let listener = super::listen(on)?;
    reply(&())?;
    let mut held = Vec::new();
    commands(|count: u32| {
        held.clear();
        allow_descriptors(2 * u64::from(count) + OWN_DESCRIPTORS)?;
        for i in 0..count {
            let ends = connect(&listener, on);
            held.push(ends.with_context(|| format!("connection {i}"))?);
        }
        Ok(())
    })
}

/// Makes a connection and returns both ends, the client's first.
fn connect(listener: &TcpListener, on: SocketAddr) -> io::Result<[TcpStream; 2]> {
    let client = TcpStream::connect(on)?;
    // The connection ends with a reset, which leaves nothing in TIME_WAIT.
    SockRef::from(&client).set_linger(Some(Duration::ZERO))?;
    let (server, _) = listener.accept()?;
    Ok([client, server])
}

/// Raises the limit of open files if it is lower. Raising it above the hard limit requires CAP_SYS_RESOURCE.
fn allow_descriptors(count: u64) -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < count {
        setrlimit(Resource::RLIMIT_NOFILE, count, hard.max(count))
            .with_context(|| format!("{count} open files"))?;
    }
    Ok(())
}
