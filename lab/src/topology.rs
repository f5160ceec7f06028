//! Two namespaces with a link between them, and the processes at its ends.

use std::{
    fs::Permissions,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::ValueEnum;
use rto_testbed::{
    channel::ControlChannel,
    link::{Link, nft::Veth, relay::Relay},
    names,
    netns::{Pair, sysctl},
    process::run,
    workload::{Program, Role},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tempfile::TempDir;

/// Port of the servers.
pub const PORT: u16 = 4700;
/// The command of this program that plays a role, so that no other program is needed.
pub const WORKLOAD: &str = "workload";

/// The kind of link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkBackend {
    /// Emulated: two TUN devices and a relay
    #[default]
    Relay,
    /// A veth, with nftables to drop packets
    Nft,
}

impl LinkBackend {
    /// Creates a link between two namespaces. The number distinguishes links by address; random choices follow from the
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
    /// The link; its devices are removed before the namespaces that they are in.
    pub link: Box<dyn Link>,
    /// The namespaces.
    pub net: Pair,
    /// The cgroup of the processes at its ends.
    pub cgroup: Option<PathBuf>,
    /// Their temporary directory.
    pub dir: TempDir,
}

impl Topology {
    /// Creates a topology; processes at its ends start in this cgroup, which an agent may cover.
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

    /// The same over an existing link.
    pub fn over(net: Pair, link: Box<dyn Link>, cgroup: Option<&Path>) -> anyhow::Result<Self> {
        for netns in [&net.client, &net.server] {
            // Every kernel has this congestion control.
            sysctl(netns, "net.ipv4.tcp_congestion_control", "reno")?;
        }
        let mut dir = tempfile::Builder::new();
        // A server may run as another user.
        dir.permissions(Permissions::from_mode(0o755));
        Ok(Self {
            net,
            link,
            cgroup: cgroup.map(Path::to_owned),
            dir: dir.prefix(&names::unique()).tempdir()?,
        })
    }

    /// The emulated link, if it is one.
    pub fn relay(&self) -> Option<&Relay> {
        self.link.relay()
    }

    /// Address of the server.
    pub fn server_address(&self) -> SocketAddr {
        (self.link.server(false), PORT).into()
    }

    /// Gives both ends a route to the other one with this minimum RTO, in milliseconds as in ip(8).
    pub fn set_route_rto_min(&self, rto_min: Duration) -> anyhow::Result<()> {
        let metric = format!("rto_min {}ms", rto_min.as_millis());
        self.set_client_route(&metric)?;
        set_route(&self.net.server, self.link.client(false), &metric)
    }

    /// Gives the client a route to the server with this metric.
    pub fn set_client_route(&self, metric: &str) -> anyhow::Result<()> {
        set_route(&self.net.client, self.link.server(false), metric)
    }

    /// Starts a server, and waits until it listens.
    pub fn serve(&self, role: &Role) -> anyhow::Result<ControlChannel> {
        Ok(self.server::<()>(role)?.0)
    }

    /// Starts a server, of the testbed or of the lab, and waits for its first reply.
    pub fn server<T: DeserializeOwned>(
        &self,
        role: &impl Serialize,
    ) -> anyhow::Result<(ControlChannel, T)> {
        let mut server = start(&self.net.server, self.cgroup.as_deref(), role)?;
        let first = server.recv()?;
        Ok((server, first))
    }

    /// The other end, as a place for clients.
    pub fn server_end(&self) -> ClientEnd {
        ClientEnd {
            netns: self.net.server.clone(),
            cgroup: None,
            dir: self.dir.path().to_owned(),
        }
    }

    /// The place for clients that another thread starts.
    pub fn client_end(&self, is_covered: bool) -> ClientEnd {
        ClientEnd {
            netns: self.net.client.clone(),
            cgroup: self.cgroup.clone().filter(|_| is_covered),
            dir: self.dir.path().to_owned(),
        }
    }
}

/// Gives a namespace a route to a peer with a metric, as in ip(8).
fn set_route(netns: &str, peer: IpAddr, metric: &str) -> anyhow::Result<()> {
    let route = run(&format!("ip -n {netns} route get {peer}"))?;
    let mut device = route.split_whitespace().skip_while(|word| *word != "dev");
    let device = device.nth(1).context("no device to the peer")?;
    run(&format!(
        "ip -n {netns} route replace {peer}/32 dev {device} {metric}"
    ))?;
    Ok(())
}

/// The place where clients are started; namespaces stay with the thread that created them.
#[derive(Clone, Debug)]
pub struct ClientEnd {
    netns: String,
    cgroup: Option<PathBuf>,
    dir: PathBuf,
}

impl ClientEnd {
    /// Its namespace.
    pub fn netns(&self) -> &str {
        &self.netns
    }

    /// Round trips of ping(8), milliseconds.
    pub fn ping(&self, to: IpAddr) -> anyhow::Result<Vec<f64>> {
        let netns = &self.netns;
        let text = run(&format!("ip netns exec {netns} ping -n -c 10 -i 0.02 {to}"))?;
        let time = |line: &str| {
            line.split_once("time=")?
                .1
                .strip_suffix(" ms")?
                .parse()
                .ok()
        };
        Ok(text.lines().filter_map(time).collect())
    }

    /// Starts a client.
    pub fn start(&self, role: &impl Serialize) -> anyhow::Result<ControlChannel> {
        let program = Program::own(WORKLOAD)?;
        let mut command = program.command(&*self.netns, self.cgroup.as_deref(), role)?;
        ControlChannel::start(command.env("TMPDIR", &self.dir))
    }
}

/// Starts a child process of this program in a namespace, and in a cgroup that an agent may cover.
pub(crate) fn start(
    netns: &str,
    cgroup: Option<&Path>,
    role: &impl Serialize,
) -> anyhow::Result<ControlChannel> {
    ControlChannel::start(&mut Program::own(WORKLOAD)?.command(netns, cgroup, role)?)
}
