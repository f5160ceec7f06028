//! How long it takes to make connections, by a child process that has both their ends.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, ensure};

use crate::{
    netns::sysctl,
    process::{Dialogue, command_in},
};

/// The child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Rate(Dialogue);

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
        let mut child = Dialogue::start(&mut command)?;
        ensure!(child.reply()? == "listening", "the child did not start");
        Ok(Self(child))
    }

    /// Makes, uses and ends so many connections one after the other; how long that took.
    ///
    /// # Errors
    ///
    /// If one fails.
    pub fn connections(&mut self, count: u32) -> anyhow::Result<Duration> {
        let reply = self.0.ask(&count.to_string())?;
        let nanos = reply.parse().with_context(|| reply.clone())?;
        Ok(Duration::from_nanos(nanos))
    }
}
