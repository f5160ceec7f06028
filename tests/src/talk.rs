//! Conversations over an established connection, and how its two sockets are seen from outside.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, bail, ensure};

use crate::process::{Dialogue, beside, command_in, stdout_of};

/// Bytes of a request.
pub const REQUEST: usize = 100;

/// A client that does what it is told; ended by its pid when dropped.
#[derive(Debug)]
pub struct Talk {
    client: Dialogue,
    port: u16,
}

/// Options of a conversation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Use an AF_INET6 socket and the IPv4-mapped address.
    pub mapped: bool,
    /// Use MPTCP.
    pub mptcp: bool,
    /// Send the first request in the SYN.
    pub fast_open: bool,
    /// TCP_USER_TIMEOUT the application sets itself.
    pub user_timeout: Option<Duration>,
}

/// TCP options as getsockopt(2) knows them (include/uapi/linux/tcp.h).
pub mod option {
    /// TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR: i32 = 16;
    /// TCP_USER_TIMEOUT, milliseconds.
    pub const USER_TIMEOUT: i32 = 18;
    /// TCP_RTO_MAX_MS (Linux 6.15).
    pub const RTO_MAX_MS: i32 = 44;
    /// TCP_RTO_MIN_US (Linux 6.15).
    pub const RTO_MIN_US: i32 = 45;
    /// TCP_DELACK_MAX_US (Linux 6.15).
    pub const DELACK_MAX_US: i32 = 46;
}

impl Talk {
    /// Connects in a namespace and a cgroup; returns once connected.
    ///
    /// # Errors
    ///
    /// If it does not connect.
    pub fn to(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        options: Options,
    ) -> anyhow::Result<Self> {
        let mut command = command_in(Some(netns), cgroup, beside("rto-traffic")?)?;
        command.arg("talk").arg("--to").arg(to.to_string());
        for (flag, given) in [
            ("--mapped", options.mapped),
            ("--mptcp", options.mptcp),
            ("--fast-open", options.fast_open),
        ] {
            if given {
                command.arg(flag);
            }
        }
        if let Some(timeout) = options.user_timeout {
            command
                .arg("--user-timeout")
                .arg(timeout.as_millis().to_string());
        }
        let mut client = Dialogue::start(&mut command)?;
        let reply = client.reply()?;
        let port = reply.strip_prefix("connected ").context("not connected")?;
        let port = port.parse()?;
        Ok(Self { client, port })
    }

    /// The client's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// So many requests and answers, one after the other.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub fn rounds(&mut self, count: usize, pause: Duration) -> anyhow::Result<()> {
        self.client
            .ask(&format!("rounds {count} {}", pause.as_millis()))
            .map(drop)
    }

    /// Sends so many bytes that get no answer; a multiple of [`REQUEST`].
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub fn send(&mut self, bytes: usize) -> anyhow::Result<()> {
        self.client.ask(&format!("send {bytes}")).map(drop)
    }

    /// The value of an option of [`option`], as the application sees it.
    ///
    /// # Errors
    ///
    /// If the kernel does not know it.
    pub fn option(&mut self, number: i32) -> anyhow::Result<i32> {
        let reply = self.client.ask(&format!("option {number}"))?;
        reply.parse().with_context(|| reply.clone())
    }

    /// Sets an option of [`option`], as the application may.
    ///
    /// # Errors
    ///
    /// If the kernel does not take it.
    pub fn set_option(&mut self, number: i32, value: i32) -> anyhow::Result<()> {
        let reply = self.client.ask(&format!("set {number} {value}"))?;
        ensure!(reply == "set", "{reply}");
        Ok(())
    }

    /// Waits until the connection fails: the errno's name, and how long it took.
    ///
    /// # Errors
    ///
    /// If the child cannot be asked.
    pub fn fail(&mut self) -> anyhow::Result<(String, Duration)> {
        let reply = self.client.ask("fail")?;
        let (errno, micros) = reply.split_once(' ').with_context(|| reply.clone())?;
        Ok((errno.to_owned(), Duration::from_micros(micros.parse()?)))
    }
}

/// The retransmission timeout of the one established socket that `filter` (of ss(8)) matches in a
/// namespace, as `ss -tin` shows it.
///
/// # Errors
///
/// If there is none, or more than one.
pub fn rto(netns: &str, filter: &str) -> anyhow::Result<Duration> {
    let mut command = command_in(Some(netns), None, "ss")?;
    let output = command
        .args(["-tinHO", "state", "established"])
        .args(filter.split(' '))
        .output()?;
    let text = stdout_of("ss", output)?;
    let mut rtos = text
        .lines()
        .filter_map(|line| line.split(' ').find_map(|word| word.strip_prefix("rto:")));
    match (rtos.next(), rtos.next()) {
        (Some(millis), None) => Ok(Duration::from_secs_f64(millis.parse::<f64>()? / 1e3)),
        _ => bail!("not one socket {filter} in {netns}: {text:?}"),
    }
}
