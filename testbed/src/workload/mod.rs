//! Child processes at the ends of a connection. `rto-workload` receives its task, a [`Role`], as JSON.
//!
//! The first reply of a child reports that it is ready, or the result of its only task. A role that takes commands
//! replies to each ([`crate::channel`]).

pub mod arrivals;
pub mod attempts;
pub mod conversation;
pub mod counted;
pub mod flow;
pub mod hold;
pub mod http;
pub mod load;
pub mod one_socket;
pub mod prober;
pub mod rate;
pub mod rr;
mod socket;
pub mod stdio;
pub mod traffic;

use std::{
    fs, io,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::{
    channel::ControlChannel,
    netns,
    process::{beside, run_in_real_time},
};

/// The task of a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Role {
    /// Connects and keeps the connection; its only reply is a [`traffic::Outcome`].
    Connect {
        /// The server's address.
        to: SocketAddr,
        /// Options.
        options: traffic::Connect,
    },
    /// Connects two addresses to each other, so that their SYNs cross if the first one's SYN is lost; its only reply is
    /// the [`traffic::Outcome`] of the first.
    CrossSyns {
        /// The address whose connect() is reported.
        one: SocketAddr,
        /// The other end.
        other: SocketAddr,
    },
    /// Starts many connections at once, and keeps them trying.
    ConnectMany {
        /// The server's address.
        to: SocketAddr,
        /// Number of connections.
        count: usize,
    },
    /// On `null`, starts many connections at once, replies, and later replies with an [`attempts::Attempt`] for each.
    Attempts {
        /// Groups of connections; those of a group start together.
        ends: Vec<Vec<attempts::Ends>>,
        /// Options that the application sets itself.
        own: attempts::Own,
        /// Whether another thread reads options of the sockets all the time.
        is_read: bool,
    },
    /// Accepts and keeps connections.
    Accept {
        /// The address to listen on.
        on: SocketAddr,
        /// Options.
        options: traffic::Listen,
    },
    /// For each number, starts that many connections to an echo server.
    Arrivals(arrivals::Clients),
    /// Answers the requests of conversations.
    EchoServer {
        /// The address to listen on.
        on: SocketAddr,
        /// Whether to use MPTCP.
        mptcp: bool,
    },
    /// Connects, replies with its port, and takes [`conversation::Command`]s.
    Conversation {
        /// The server's address.
        to: SocketAddr,
        /// Options.
        options: traffic::Connect,
    },
    /// Takes [`one_socket::Command`]s.
    OneSocket,
    /// Takes [`prober::Command`]s.
    Prober(prober::Probes),
    /// For each number, makes that many connections to itself and replies with how long that took.
    Rate(rate::Both),
    /// For each number, ends its connections to itself and opens that many.
    Hold {
        /// An address of the namespace itself.
        on: SocketAddr,
    },
    /// Answers requests with flows of the requested length.
    FlowServer {
        /// The address to listen on.
        on: SocketAddr,
    },
    /// Takes [`flow::Command`]s.
    FlowClient {
        /// The server's address.
        to: SocketAddr,
    },
    /// Makes connections one after the other, and counts them; takes [`counted::Command`]s.
    CountedClient(counted::Client),
    /// Answers these connections; replies to each line with the number it has accepted.
    CountedServer {
        /// The address to listen on.
        on: SocketAddr,
    },
    /// Receives anything, over TCP and UDP.
    Sink {
        /// The address to listen on.
        on: SocketAddr,
    },
    /// Sends bursts over a TCP connection, at random times.
    TcpBursts(load::Sender),
    /// Sends UDP packets at random times, and ignores losses.
    UdpFlood(load::Sender),
}

impl Role {
    /// Whether the times of its packets are measured. Such roles run at real-time priority; load generators do not.
    fn is_timed(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::CrossSyns { .. }
            | Self::Accept { .. }
            | Self::Arrivals(_)
            | Self::Attempts { .. }
            | Self::EchoServer { .. }
            | Self::Conversation { .. }
            | Self::OneSocket
            | Self::Prober(_)
            | Self::FlowServer { .. }
            | Self::FlowClient { .. } => true,
            Self::ConnectMany { .. }
            | Self::Rate(_)
            | Self::Hold { .. }
            | Self::CountedClient(_)
            | Self::CountedServer { .. }
            | Self::Sink { .. }
            | Self::TcpBursts(_)
            | Self::UdpFlood(_) => false,
        }
    }

    /// Plays the role in the calling process until its work or its stdin ends.
    fn run(self) -> anyhow::Result<()> {
        if self.is_timed() {
            run_in_real_time();
        }
        match self {
            Self::Connect { to, options } => traffic::connect(to, options),
            Self::CrossSyns { one, other } => traffic::cross_syns(one, other),
            Self::ConnectMany { to, count } => traffic::connect_many(to, count),
            Self::Attempts { ends, own, is_read } => attempts::run(&ends, &own, is_read),
            Self::Accept { on, options } => traffic::accept(on, options),
            Self::Arrivals(clients) => arrivals::run(&clients),
            Self::EchoServer { on, mptcp } => traffic::echo_server(on, mptcp),
            Self::Conversation { to, options } => conversation::run(to, options),
            Self::OneSocket => one_socket::run(),
            Self::Prober(probes) => prober::run(probes),
            Self::Rate(both) => rate::run(&both),
            Self::Hold { on } => hold::run(on),
            Self::FlowServer { on } => serve(on, flow::serve_connection),
            Self::FlowClient { to } => flow::run(to),
            Self::CountedClient(client) => counted::run(&client),
            Self::CountedServer { on } => counted::serve(on),
            Self::Sink { on } => load::sink(on),
            Self::TcpBursts(sender) => sender.bursts(),
            Self::UdpFlood(sender) => sender.flood(),
        }
    }
}

/// A program that plays roles.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    verb: Option<&'static str>,
}

impl Program {
    /// `rto-workload` beside this program.
    pub fn built() -> anyhow::Result<Self> {
        Ok(Self::at(&beside("rto-workload")?))
    }

    /// `rto-workload` at another path.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            verb: None,
        }
    }

    /// The current program, which calls [`main`] when run with this verb.
    pub fn own(verb: &'static str) -> anyhow::Result<Self> {
        Ok(Self {
            path: std::env::current_exe()?,
            verb: Some(verb),
        })
    }

    /// A child with this role (a [`Role`], or another value that the program accepts). It joins the namespace and the
    /// cgroup itself.
    pub fn command<'a>(
        &self,
        netns: impl Into<Option<&'a str>>,
        cgroup: Option<&Path>,
        role: &impl Serialize,
    ) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.path);
        command.args(self.verb).arg(serde_json::to_string(role)?);
        command.envs(netns.into().map(|name| (NETNS, name)));
        command.envs(cgroup.map(|dir| (CGROUP, dir)));
        Ok(command)
    }

    /// Starts a child with this role, and waits until it is ready.
    pub(crate) fn ready<'a>(
        &self,
        netns: impl Into<Option<&'a str>>,
        cgroup: Option<&Path>,
        role: &Role,
    ) -> anyhow::Result<ControlChannel> {
        let mut channel = ControlChannel::start(&mut self.command(netns, cgroup, role)?)?;
        channel.recv::<()>()?;
        Ok(channel)
    }
}

/// The main function of a program whose only argument is a role.
pub fn main(arguments: impl IntoIterator<Item = String>) -> ExitCode {
    let arguments: Vec<String> = arguments.into_iter().collect();
    let role = match &arguments[..] {
        [role] => serde_json::from_str::<Role>(role).context("not a role"),
        _ => Err(anyhow::anyhow!("one argument is taken: a role as JSON")),
    };
    child(|| role?.run())
}

/// Environment variables with the namespace and the cgroup that a child joins before it does anything else: a socket
/// stays in the network namespace and the cgroup of the process that created it.
const NETNS: &str = "RTO_WORKLOAD_NETNS";
const CGROUP: &str = "RTO_WORKLOAD_CGROUP";

/// Runs a child until its work is done or its parent exits. An error becomes the last reply.
pub fn child(run: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    stdio::end_with_parent();
    match join().and_then(|()| run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rto-workload: {error:#}");
            // The parent may have exited.
            let _told = stdio::fail(&error);
            ExitCode::FAILURE
        }
    }
}

/// Joins the cgroup and the namespace that [`Program::command`] has set.
fn join() -> anyhow::Result<()> {
    if let Some(cgroup) = std::env::var_os(CGROUP) {
        let procs = Path::new(&cgroup).join("cgroup.procs");
        // "0" is the writing process itself (cgroups(7)).
        fs::write(&procs, "0").with_context(|| procs.display().to_string())?;
    }
    if let Ok(netns) = std::env::var(NETNS) {
        netns::join(&netns)?;
    }
    Ok(())
}

/// Serves each connection in a separate thread until this process ends.
fn serve<E>(
    on: SocketAddr,
    connection: impl Fn(TcpStream) -> Result<(), E> + Copy + Send + 'static,
) -> anyhow::Result<()> {
    let listener = listen(on)?;
    stdio::reply(&())?;
    loop {
        let (stream, _) = listener.accept()?;
        // A client that breaks off is not an error of the server.
        let _detached = thread::Builder::new().spawn(move || connection(stream).is_ok());
    }
}

fn listen(on: SocketAddr) -> anyhow::Result<TcpListener> {
    let bound: io::Result<_> = TcpListener::bind(on);
    bound.with_context(|| on.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn roles_round_trip_as_json() {
        let on = SocketAddr::from(([10, 89, 0, 2], 4700));
        let roles = [
            Role::FlowServer { on },
            Role::Connect {
                to: on,
                options: traffic::Connect::default(),
            },
            Role::TcpBursts(load::Sender {
                to: on,
                bytes: 1,
                mean: Duration::from_micros(7),
                duration: Duration::from_secs(1),
                seed: 3,
            }),
        ];
        for role in roles {
            let json = serde_json::to_string(&role).unwrap();
            assert_eq!(serde_json::from_str::<Role>(&json).unwrap(), role, "{json}");
        }
        let json = serde_json::to_string(&Role::FlowServer { on }).unwrap();
        assert_eq!(json, r#"{"flow-server":{"on":"10.89.0.2:4700"}}"#);
        assert!(serde_json::from_str::<Role>(r#"{"flow-server":{"to":"1"}}"#).is_err());
    }
}
