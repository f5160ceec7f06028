//! How long it takes to make connections, by a child process that has both their ends.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};

use crate::{netns::sysctl, process::command_in};

/// The child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Rate {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Rate {
    /// Starts the helper binary `program`; `on` is an address of the namespace itself. It connects in
    /// `cgroup`, and accepts there or, if given, in `accepts_in`. From now on
    /// the namespace keeps no TIME_WAIT: tens of thousands of them would slow later connections down.
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
        // Before what else runs on the host.
        let begins_in = accepts_in.unwrap_or(cgroup);
        let mut command = command_in(Some(netns), Some(begins_in), "nice")?;
        command.args(["-n", "-20"]).arg(program).arg("rate");
        command.arg("--on").arg(on.to_string());
        if accepts_in.is_some() {
            command.arg("--join").arg(cgroup);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().context("no stdin")?;
        let replies = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut rate = Self {
            child,
            orders,
            replies,
        };
        ensure!(rate.reply()? == "listening", "the child did not start");
        Ok(rate)
    }

    /// Makes, uses and ends so many connections one after the other; how long that took.
    ///
    /// # Errors
    ///
    /// If one fails.
    pub fn connections(&mut self, count: u32) -> anyhow::Result<Duration> {
        writeln!(self.orders, "{count}")?;
        let reply = self.reply()?;
        let nanos = reply.parse().with_context(|| reply.clone())?;
        Ok(Duration::from_nanos(nanos))
    }

    fn reply(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the child ended");
        Ok(line.trim().to_owned())
    }
}

impl Drop for Rate {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}
