//! Two namespaces with a link between them, and the processes at its ends.

use std::{net::SocketAddr, path::Path, path::PathBuf};

use clap::ValueEnum;
use rto_testbed::{
    channel::ControlChannel,
    link::{Link, nft::Veth, relay::Relay},
    netns::{Pair, sysctl},
    workload::{Program, Role},
};
use serde::{Deserialize, Serialize};

/// Port of the servers.
pub const PORT: u16 = 4700;
/// The verb of this program that plays a role: it needs no other beside it.
pub const WORKLOAD: &str = "workload";

/// Which link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkBackend {
    /// Emulated: two TUN devices and a relay
    #[default]
    Relay,
    /// A veth that drops by nftables
    Nft,
}

impl LinkBackend {
    /// Makes a link between two namespaces. The number tells links apart by address; chance begins with the
    /// seed.
    fn link(self, pair: &Pair, number: u8, seed: u64) -> anyhow::Result<Box<dyn Link>> {
        Ok(match self {
            Self::Relay => Box::new(Relay::new(pair, number, seed)?),
            Self::Nft => Box::new(Veth::new(pair)?),
        })
    }
}

/// Two namespaces with a link between them.
pub struct Topology {
    /// The link; its devices go before the namespaces that they are in.
    pub link: Box<dyn Link>,
    /// The namespaces.
    pub net: Pair,
    cgroup: Option<PathBuf>,
}

impl Topology {
    /// Makes it; the ends' processes will be in this cgroup, which an agent may cover.
    ///
    /// # Errors
    ///
    /// If something cannot be made.
    pub fn new(
        backend: LinkBackend,
        number: u8,
        seed: u64,
        cgroup: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let net = Pair::new()?;
        let link = backend.link(&net, number, seed)?;
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
    pub fn server_address(&self) -> SocketAddr {
        (self.link.server(false), PORT).into()
    }

    /// Starts a server, and waits until it listens.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn serve(&self, role: &Role) -> anyhow::Result<ControlChannel> {
        let mut server = start(&self.net.server, self.cgroup.as_deref(), role)?;
        server.recv::<()>()?;
        Ok(server)
    }

    /// Starts a client.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn client(&self, role: &Role) -> anyhow::Result<ControlChannel> {
        start(&self.net.client, self.cgroup.as_deref(), role)
    }

    /// As [`Self::client`], outside of the cgroup: an agent covers the server alone.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn uncovered_client(&self, role: &Role) -> anyhow::Result<ControlChannel> {
        start(&self.net.client, None, role)
    }
}

fn start(netns: &str, cgroup: Option<&Path>, role: &Role) -> anyhow::Result<ControlChannel> {
    ControlChannel::start(&mut Program::own(WORKLOAD)?.command(netns, cgroup, role)?)
}
