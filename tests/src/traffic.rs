//! Connections made by a child process in a namespace and a cgroup.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::process::{Guard, beside, command_in};

/// A child process; killed by its pid and reaped when dropped.
#[derive(Debug)]
pub struct Traffic {
    child: Guard,
}

/// How a connect() ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// "connected" or the errno's name.
    pub result: String,
    /// How long connect() took.
    pub took: Duration,
}

/// Options of a connection.
#[derive(Clone, Debug, Default)]
pub struct Connect {
    /// Use an AF_INET6 socket and the IPv4-mapped address.
    pub mapped: bool,
    /// TCP_SYNCNT the application sets itself.
    pub syn_retries: Option<u8>,
    /// Send a request in the SYN.
    pub fast_open: bool,
    /// Use MPTCP.
    pub mptcp: bool,
    /// Connect the same socket to this address first, and give up on that after 50 ms.
    pub first: Option<SocketAddr>,
}

/// Options of a listener.
#[derive(Clone, Copy, Debug, Default)]
pub struct Listen {
    /// TCP_DEFER_ACCEPT, seconds; 0: not set.
    pub defer_accept_s: u32,
    /// TCP_SYNCNT, which is how often it sends a SYN-ACK again.
    pub syn_retries: Option<u8>,
}

impl Traffic {
    /// connect() in a child, which keeps the connection until it is dropped.
    ///
    /// # Errors
    ///
    /// If the child cannot be started.
    pub fn connect(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        options: &Connect,
    ) -> anyhow::Result<Self> {
        let mut command = command_in(Some(netns), cgroup, helper()?)?;
        command.arg("connect").arg("--to").arg(to.to_string());
        if options.mapped {
            command.arg("--mapped");
        }
        if let Some(n) = options.syn_retries {
            command.arg("--syn-retries").arg(n.to_string());
        }
        if options.fast_open {
            command.arg("--fast-open");
        }
        if options.mptcp {
            command.arg("--mptcp");
        }
        if let Some(first) = options.first {
            command.arg("--first").arg(first.to_string());
        }
        Ok(Self {
            child: spawn(command)?,
        })
    }

    /// A listener that accepts and keeps connections; returns once it listens.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn serve(netns: &str, cgroup: Option<&Path>, on: SocketAddr) -> anyhow::Result<Self> {
        Self::serve_with(netns, cgroup, on, Listen::default())
    }

    /// As [`Traffic::serve`], with options of its own.
    ///
    /// # Errors
    ///
    /// If it does not listen.
    pub fn serve_with(
        netns: &str,
        cgroup: Option<&Path>,
        on: SocketAddr,
        options: Listen,
    ) -> anyhow::Result<Self> {
        let mut command = command_in(Some(netns), cgroup, helper()?)?;
        command.arg("serve").arg("--on").arg(on.to_string());
        if options.defer_accept_s != 0 {
            let seconds = options.defer_accept_s.to_string();
            command.arg("--defer-accept").arg(seconds);
        }
        if let Some(n) = options.syn_retries {
            command.arg("--syn-retries").arg(n.to_string());
        }
        let mut traffic = Self {
            child: spawn(command)?,
        };
        ensure!(traffic.line()? == "listening", "the listener did not start");
        Ok(traffic)
    }

    /// A listener that answers conversations ([`crate::talk`]); returns once it listens.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn answer(
        netns: &str,
        cgroup: Option<&Path>,
        on: SocketAddr,
        mptcp: bool,
    ) -> anyhow::Result<Self> {
        let mut command = command_in(Some(netns), cgroup, helper()?)?;
        command.arg("answer").arg("--on").arg(on.to_string());
        if mptcp {
            command.arg("--mptcp");
        }
        let mut traffic = Self {
            child: spawn(command)?,
        };
        ensure!(traffic.line()? == "listening", "the listener did not start");
        Ok(traffic)
    }

    /// Begins so many connections at once, without waiting for any; returns once all are begun.
    ///
    /// # Errors
    ///
    /// If they cannot be begun.
    pub fn knock(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        count: usize,
    ) -> anyhow::Result<Self> {
        Self::knock_by(&helper()?, netns, cgroup, to, count)
    }

    /// As [`Traffic::knock`], by this helper binary.
    ///
    /// # Errors
    ///
    /// If they cannot be begun.
    pub fn knock_by(
        helper: &Path,
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        count: usize,
    ) -> anyhow::Result<Self> {
        let mut command = command_in(Some(netns), cgroup, helper)?;
        command.arg("knock").arg("--to").arg(to.to_string());
        command.arg("--count").arg(count.to_string());
        let mut traffic = Self {
            child: spawn(command)?,
        };
        ensure!(traffic.line()? == "begun", "the connections were not begun");
        Ok(traffic)
    }

    /// Waits for connect() to end.
    ///
    /// # Errors
    ///
    /// If the child fails.
    pub fn outcome(mut self) -> anyhow::Result<Outcome> {
        let line = self.line()?;
        let (result, micros) = line.split_once(' ').with_context(|| line.clone())?;
        Ok(Outcome {
            result: result.to_owned(),
            took: Duration::from_micros(micros.parse()?),
        })
    }

    /// Waits until a listener with TCP_DEFER_ACCEPT accepts a connection.
    ///
    /// # Errors
    ///
    /// If it ends instead.
    pub fn accepted(&mut self) -> anyhow::Result<()> {
        let line = self.line()?;
        ensure!(line == "accepted", "{line:?}");
        Ok(())
    }

    /// Whether connect() has ended.
    ///
    /// # Errors
    ///
    /// If the child cannot be asked.
    pub fn has_ended(&self) -> anyhow::Result<bool> {
        let stdout = self.child.0.stdout.as_ref().context("no stdout")?;
        let mut fds = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut fds, PollTimeout::ZERO)? > 0)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let stdout = self.child.0.stdout.as_mut().context("no stdout")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

fn spawn(mut command: Command) -> anyhow::Result<Guard> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(Guard(command.spawn()?))
}

/// The helper binary, built with the tests.
fn helper() -> anyhow::Result<PathBuf> {
    beside("rto-traffic")
}
