//! Many open connections, by a child process that has both their ends.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, TcpStream},
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

/// Connections to one address: less than half of the kernel's range of local ports, so that it finds one at once.
const PER_ADDRESS: u32 = 10_000;
/// Descriptors of the process itself.
const OWN_DESCRIPTORS: u64 = 64;

/// The child process; killed and reaped when dropped, which ends its connections.
#[derive(Debug)]
pub struct Hold(ControlChannel);

impl Hold {
    /// Starts `rto-workload` at this path in a namespace and a cgroup. It listens on this port.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(program: &Path, netns: &str, cgroup: &Path, port: u16) -> anyhow::Result<Self> {
        let role = Role::Hold { port };
        let mut command = Program::at(program).command(netns, Some(cgroup), &role)?;
        let mut channel = ControlChannel::start(&mut command)?;
        channel.recv::<()>()?;
        Ok(Self(channel))
    }

    /// Ends the connections it has, and opens so many over 127.0.0.0/8.
    ///
    /// # Errors
    ///
    /// If one fails, or the process may not have as many descriptors.
    pub fn open(&mut self, count: u32) -> anyhow::Result<()> {
        self.0.request(&count)
    }
}

pub(super) fn run(port: u16) -> anyhow::Result<()> {
    let listener = super::listen((Ipv4Addr::UNSPECIFIED, port).into())?;
    reply(&())?;
    let mut held = Vec::new();
    commands(|count: u32| {
        held.clear();
        allow_descriptors(2 * u64::from(count) + OWN_DESCRIPTORS)?;
        for i in 0..count {
            let ends = connect(&listener, port, i / PER_ADDRESS);
            held.push(ends.with_context(|| format!("connection {i}"))?);
        }
        Ok(())
    })
}

/// Both ends of a new connection, the client's first.
fn connect(listener: &TcpListener, port: u16, address: u32) -> io::Result<[TcpStream; 2]> {
    let to = Ipv4Addr::from_bits(Ipv4Addr::LOCALHOST.to_bits() + address);
    let client = TcpStream::connect((to, port))?;
    // A reset ends it: nothing of it is left in TIME_WAIT.
    SockRef::from(&client).set_linger(Some(Duration::ZERO))?;
    let (server, _) = listener.accept()?;
    Ok([client, server])
}

/// Raises the limit of open files where it is lower. Above the hard limit that takes CAP_SYS_RESOURCE.
fn allow_descriptors(count: u64) -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < count {
        setrlimit(Resource::RLIMIT_NOFILE, count, hard.max(count))
            .with_context(|| format!("{count} open files"))?;
    }
    Ok(())
}
