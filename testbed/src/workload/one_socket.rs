//! One socket whose connections a test begins and ends step by step, and whose options it reads in between.

use std::{
    net::SocketAddr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        MsgFlags, Shutdown, SockaddrStorage, bind, getsockopt, recv, send, setsockopt, shutdown,
        sockopt,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Program, Role, socket,
    stdio::{commands, reply},
};
use crate::{
    channel::ControlChannel,
    tcp::{TcpInfo, get_option, set_option},
};

/// The socket, in a child process.
#[derive(Debug)]
pub struct OneSocket(ControlChannel);

/// A command to the child.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Replace the socket by a new one, an MPTCP one if the value is true.
    Renew(bool),
    /// bind(2), with SO_REUSEADDR.
    Bind(SocketAddr),
    /// Start to connect and wait at most this long; reply with "connected", "connecting" or the errno's name.
    Connect(SocketAddr, Duration),
    /// connect(2) to AF_UNSPEC.
    Disconnect,
    /// Send this many bytes.
    Send(usize),
    /// Close the sending side; not an error if the connection has ended.
    ShutDown,
    /// Read until the connection ends; reply with "end" or the errno's name.
    WaitForEnd,
    /// Set a TCP option.
    Set(i32, i32),
    /// Reply with the value of a TCP option; `null` if the kernel does not know it.
    Option(i32),
}

impl OneSocket {
    /// Makes an IPv4 socket in a namespace and a cgroup.
    pub fn new(netns: &str, cgroup: &Path) -> anyhow::Result<Self> {
        let program = Program::built()?;
        program
            .ready(netns, Some(cgroup), &Role::OneSocket)
            .map(Self)
    }

    /// Executes a command; the reply is `null` for those without one.
    pub fn tell(&mut self, command: Command) -> anyhow::Result<Value> {
        self.0.request(&command)
    }

    /// [`Command::Connect`].
    pub fn connect(&mut self, to: SocketAddr, at_most: Duration) -> anyhow::Result<String> {
        self.0.request(&Command::Connect(to, at_most))
    }

    /// [`Command::Option`].
    pub fn option(&mut self, number: i32) -> anyhow::Result<Option<i32>> {
        self.0.request(&Command::Option(number))
    }
}

pub(super) fn run() -> anyhow::Result<()> {
    let mut one = made(false)?;
    reply(&())?;
    commands(|command| execute(&mut one, command))
}

fn made(mptcp: bool) -> anyhow::Result<OwnedFd> {
    let made = socket::make(false, mptcp)?;
    fcntl(&made, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(made)
}

fn execute(one: &mut OwnedFd, command: Command) -> anyhow::Result<Value> {
    match command {
        Command::Renew(mptcp) => *one = made(mptcp)?,
        Command::Bind(address) => {
            setsockopt(one, sockopt::ReuseAddr, &true)?;
            bind(one.as_raw_fd(), &SockaddrStorage::from(address))?;
        }
        Command::Connect(to, at_most) => {
            return Ok(json!(match socket::connect(one, to) {
                Err(Errno::EINPROGRESS) => wait(one, at_most)?,
                Ok(()) => "connected".to_owned(),
                Err(e) => format!("{e:?}"),
            }));
        }
        Command::Disconnect => socket::disconnect(one)?,
        Command::Send(bytes) => {
            // A connection that has failed meanwhile is what some tests wait for.
            let _ = send(one.as_raw_fd(), &vec![0; bytes], MsgFlags::MSG_NOSIGNAL);
        }
        Command::ShutDown => {
            let _ = shutdown(one.as_raw_fd(), Shutdown::Write); // It may have ended.
        }
        Command::WaitForEnd => {
            let mut fds = [PollFd::new(one.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE)?;
            return Ok(json!(
                match recv(one.as_raw_fd(), &mut [0], MsgFlags::empty()) {
                    Ok(_) => "end".to_owned(),
                    Err(e) => format!("{e:?}"),
                }
            ));
        }
        Command::Set(number, value) => set_option(one, number, value)?,
        Command::Option(number) => {
            // poll() sees the end of a connection before the sock_ops program does. TCP_INFO waits for the socket's lock,
            // which the kernel holds until the program has run. (It fails for an MPTCP socket without a subflow.)
            let _ = TcpInfo::of(one);
            return Ok(json!(get_option(one, number).ok()));
        }
    }
    Ok(Value::Null)
}

fn wait(one: &OwnedFd, at_most: Duration) -> anyhow::Result<String> {
    let mut fds = [PollFd::new(one.as_fd(), PollFlags::POLLOUT)];
    let millis = PollTimeout::try_from(at_most)?;
    if poll(&mut fds, millis)? == 0 {
        return Ok("connecting".to_owned());
    }
    Ok(match getsockopt(one, sockopt::SocketError)? {
        0 => "connected".to_owned(),
        errno => format!("{:?}", Errno::from_raw(errno)),
    })
}
