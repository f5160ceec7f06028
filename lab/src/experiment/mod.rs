//! The experiments, and what they have in common.

pub mod blackout;
pub mod estimator;
pub mod loss;
pub mod rtt;
pub mod tail;

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::ensure;

use crate::{
    ends,
    ground::{
        netns::{Pair, sysctl},
        process::{Dialogue, command_in},
    },
    link::{Link, Medium, relay::Relay},
};

/// Port of the servers.
pub const PORT: u16 = 4700;

/// Two namespaces with a link between them.
pub struct Field {
    /// The link; its devices go before the namespaces that they are in.
    pub link: Box<dyn Link>,
    /// The namespaces.
    pub net: Pair,
    cgroup: Option<PathBuf>,
}

impl Field {
    /// Makes it; the ends' processes will be in this cgroup, which an agent may cover.
    ///
    /// # Errors
    ///
    /// If something cannot be made.
    pub fn new(
        medium: Medium,
        number: u8,
        seed: u64,
        cgroup: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let net = Pair::new()?;
        let link = medium.link(&net, number, seed)?;
        Self::over(net, link, cgroup)
    }

    /// The same over a link that is there.
    ///
    /// # Errors
    ///
    /// If the namespaces cannot be prepared.
    pub fn over(net: Pair, link: Box<dyn Link>, cgroup: Option<&Path>) -> anyhow::Result<Self> {
        for netns in [&net.client, &net.server] {
            // The congestion control that every kernel has.
            sysctl(netns, "net.ipv4.tcp_congestion_control", "reno")?;
        }
        Ok(Self {
            net,
            link,
            cgroup: cgroup.map(Path::to_owned),
        })
    }

    /// The link, if it is an emulated one.
    #[must_use]
    pub fn relay(&self) -> Option<&Relay> {
        self.link.relay()
    }

    /// Where the server listens.
    #[must_use]
    pub fn server_address(&self, v6: bool) -> SocketAddr {
        let address: IpAddr = self.link.server(v6);
        (address, PORT).into()
    }

    /// A command of this program's, in the client's namespace.
    ///
    /// # Errors
    ///
    /// If the program was not built.
    pub fn client_command(&self, args: &[&str]) -> anyhow::Result<Command> {
        self.command(&self.net.client, args)
    }

    /// The same in the server's.
    ///
    /// # Errors
    ///
    /// If the program was not built.
    pub fn server_command(&self, args: &[&str]) -> anyhow::Result<Command> {
        self.command(&self.net.server, args)
    }

    fn command(&self, netns: &str, args: &[&str]) -> anyhow::Result<Command> {
        let mut command = command_in(Some(netns), self.cgroup.as_deref(), ends::binary()?)?;
        command.args(args);
        Ok(command)
    }

    /// Starts a server (`end ROLE --on ADDRESS ARGS`), and waits until it listens.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn serve(&self, role: &str, args: &[&str]) -> anyhow::Result<Dialogue> {
        let on = self.server_address(false).to_string();
        let all = [&["end", role, "--on", &on], args].concat();
        let mut server = Dialogue::start(&mut self.server_command(&all)?)?;
        let said = server.reply()?;
        ensure!(said == "listening", "the server said {said}");
        Ok(server)
    }

    /// Starts a client (`end ROLE --to ADDRESS ARGS`).
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn client(&self, role: &str, args: &[&str]) -> anyhow::Result<Dialogue> {
        let to = self.server_address(false).to_string();
        let all = [&["end", role, "--to", &to], args].concat();
        Dialogue::start(&mut self.client_command(&all)?)
    }

    /// As [`Self::client`], outside of the cgroup: an agent covers the server alone.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn uncovered_client(&self, role: &str, args: &[&str]) -> anyhow::Result<Dialogue> {
        let to = self.server_address(false).to_string();
        let mut command = command_in(Some(&self.net.client), None, ends::binary()?)?;
        command.args([&["end", role, "--to", &to], args].concat());
        Dialogue::start(&mut command)
    }
}
