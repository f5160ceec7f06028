//! Connections that are made one after the other while the process runs, and counted, as a reference for the agent's
//! own counters.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    ops::AddAssign,
    os::fd::OwnedFd,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
};
use serde::{Deserialize, Serialize};

use super::{
    Program, Role, listen, socket,
    stdio::{commands, reply},
};
use crate::{
    channel::ControlChannel,
    tcp::{TcpInfo, option, set_option},
};

/// Configuration of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Servers ([`Role::CountedServer`]), in turn. Each connection is a request and an answer, followed by an orderly
    /// close.
    pub to: Vec<SocketAddr>,
    /// Addresses that do not answer, in turn. A connection ends after [`SYN_RETRIES`], which a policy must not change.
    pub lost: Vec<SocketAddr>,
    /// Pause between the end of one connection and the start of the next.
    pub pause: Duration,
}

/// A command to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Make connections.
    Run,
    /// Start no more; the reply follows when those under way have ended.
    Pause,
}

/// The connections so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Connections established.
    pub established: u64,
    /// Established connections that got no answer or had no orderly close.
    pub unanswered: u64,
    /// Connections to a server that could not be established.
    pub refused: u64,
    /// Connections to addresses that do not answer.
    pub lost: u64,
    /// Retransmitted SYNs, from TCP_INFO.
    pub syn_retransmissions: u64,
    /// The last error.
    pub error: Option<String>,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.established += other.established;
        self.unanswered += other.unanswered;
        self.refused += other.refused;
        self.lost += other.lost;
        self.syn_retransmissions += other.syn_retransmissions;
        self.error = other.error.or(self.error.take());
    }
}

/// TCP_SYNCNT of connections to addresses that do not answer. Since Linux 6.5 the kernel adds
/// `net.ipv4.tcp_syn_linear_timeouts` to it (`tcp_write_timeout()`).
pub const SYN_RETRIES: i32 = 2;
/// Longest time that a connection waits for data: emulated processors are slow, and a SYN may be retransmitted.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const REQUEST: [u8; 64] = [b'R'; 64];

/// The child process with a client; killed and reaped when dropped.
#[derive(Debug)]
pub struct CountedClient(ControlChannel);

impl CountedClient {
    /// Starts `rto-workload` in a cgroup, initially paused.
    pub fn start(cgroup: Option<&std::path::Path>, client: Client) -> anyhow::Result<Self> {
        let role = Role::CountedClient(client);
        Program::built()?.ready(None, cgroup, &role).map(Self)
    }

    /// Sends a command; returns the counts at the time of its reply.
    pub fn tell(&mut self, command: Command) -> anyhow::Result<Counts> {
        self.0.request(&command)
    }
}

/// The child process with a server; killed and reaped when dropped.
#[derive(Debug)]
pub struct CountedServer(ControlChannel);

impl CountedServer {
    /// Starts `rto-workload` in a cgroup.
    pub fn start(cgroup: Option<&std::path::Path>, on: SocketAddr) -> anyhow::Result<Self> {
        let role = Role::CountedServer { on };
        Program::built()?.ready(None, cgroup, &role).map(Self)
    }

    /// Connections accepted so far.
    pub fn accepted(&mut self) -> anyhow::Result<u64> {
        self.0.request(&())
    }
}

/// Whether connections are made, how many are under way, and the counts of all that have ended.
#[derive(Default)]
struct State {
    runs: bool,
    busy: u32,
    counts: Counts,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, is: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.changed.wait_while(self.state(), |state| !is(state));
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one connection after the other while the client runs.
    fn connections(&self, to: &[SocketAddr], pause: Duration, one: impl Fn(SocketAddr) -> Counts) {
        for to in to.iter().cycle() {
            self.wait_until(|state| state.runs).busy += 1;
            let counts = one(*to);
            let mut state = self.state();
            state.counts += counts;
            state.busy -= 1;
            self.changed.notify_all();
            drop(state);
            thread::sleep(pause);
        }
    }
}

pub(super) fn run(client: &Client) -> anyhow::Result<()> {
    // The threads live until the process ends.
    let shared: &'static Shared = Box::leak(Box::default());
    for (to, one) in [
        (client.to.clone(), answered as fn(SocketAddr) -> Counts),
        (client.lost.clone(), lost),
    ] {
        let pause = client.pause;
        thread::Builder::new().spawn(move || shared.connections(&to, pause, one))?;
    }
    reply(&())?;
    commands(|command: Command| {
        shared.state().runs = command == Command::Run;
        shared.changed.notify_all();
        let state = match command {
            Command::Run => shared.state(),
            Command::Pause => shared.wait_until(|state| state.busy == 0),
        };
        Ok(state.counts.clone())
    })
}

/// Makes a connection to a server.
fn answered(to: SocketAddr) -> Counts {
    let connected = connect(to);
    let mut counts = Counts::default();
    match connected {
        Ok((stream, copies)) => {
            counts.established = 1;
            counts.syn_retransmissions = copies.into();
            if let Err(error) = converse(stream) {
                counts.unanswered = 1;
                counts.error = Some(format!("{to}: {error:#}"));
            }
        }
        Err(error) => {
            counts.refused = 1;
            counts.error = Some(format!("{to}: {error:#}"));
        }
    }
    counts
}

/// Connects; returns the connection and how often its SYN was retransmitted, as nothing else has been sent yet.
fn connect(to: SocketAddr) -> anyhow::Result<(TcpStream, u32)> {
    let socket = socket::begin(to)?;
    socket::wait(&socket)?;
    let copies = TcpInfo::of(&socket)?.total_retrans;
    fcntl(&socket, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok((socket.into(), copies))
}

fn converse(mut stream: TcpStream) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    stream.write_all(&REQUEST)?;
    stream.read_exact(&mut [0]).context("answer")?;
    stream.shutdown(Shutdown::Write)?;
    let left = stream.read(&mut [0]).context("end")?;
    ensure!(left == 0, "unexpected data before the close");
    Ok(())
}

/// Makes a connection to an address that does not answer. The kernel ends it, so that no SYN is retransmitted after its
/// retransmissions were read.
fn lost(to: SocketAddr) -> Counts {
    let mut counts = Counts::default();
    let ended = begin_few_copies(to).and_then(|socket| {
        let ended = socket::wait(&socket);
        counts.syn_retransmissions = TcpInfo::of(&socket)?.total_retrans.into();
        Ok(ended)
    });
    match ended {
        Ok(Err(Errno::ETIMEDOUT)) => counts.lost = 1,
        other => {
            counts.refused = 1;
            counts.error = Some(format!("{to}: {other:?}"));
        }
    }
    counts
}

fn begin_few_copies(to: SocketAddr) -> anyhow::Result<OwnedFd> {
    let socket = socket::make(to.is_ipv6(), false)?;
    set_option(&socket, option::SYNCNT, SYN_RETRIES)?;
    socket::begin_on(&socket, to)?;
    Ok(socket)
}

pub(super) fn serve(on: SocketAddr) -> anyhow::Result<()> {
    let listener = listen(on)?;
    let accepted: &'static std::sync::atomic::AtomicU64 = Box::leak(Box::default());
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    thread::Builder::new().spawn(move || {
        for stream in listener.incoming().flatten() {
            accepted.fetch_add(1, relaxed);
            // A client that breaks off counts that itself.
            let _detached = thread::Builder::new().spawn(move || answer(stream).is_ok());
        }
    })?;
    reply(&())?;
    commands(|(): ()| Ok(accepted.load(relaxed)))
}

fn answer(mut stream: TcpStream) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    stream.read_exact(&mut REQUEST.clone())?;
    stream.write_all(b"A")?;
    // The client closes first, so that TIME_WAIT is on its side.
    let left = stream.read(&mut [0])?;
    ensure!(left == 0, "unexpected data before the close");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn each_connection_counts_once() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            answer(listener.accept().unwrap().0).unwrap();
            // The second connection is closed without an answer, together with the listener.
            drop(listener.accept().unwrap());
        });
        let mut all = answered(to);
        assert_eq!((all.established, all.error.clone()), (1, None), "{all:?}");
        all += answered(to);
        server.join().unwrap();
        all += answered(to);
        let error = all.error.take();
        assert!(error.is_some_and(|error| error.contains("ECONNREFUSED")));
        let expected = Counts {
            established: 2,
            unanswered: 1,
            refused: 1,
            ..Counts::default()
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn pause_waits_for_running_connections() {
        let shared: &'static Shared = Box::leak(Box::default());
        let one = |_| {
            thread::sleep(Duration::from_millis(50));
            Counts {
                established: 1,
                ..Counts::default()
            }
        };
        let to = [SocketAddr::from((Ipv4Addr::LOCALHOST, 1))];
        thread::spawn(move || shared.connections(&to, Duration::ZERO, one));
        shared.state().runs = true;
        shared.changed.notify_all();
        drop(shared.wait_until(|state| state.busy == 1));
        shared.state().runs = false;
        let counted = shared
            .wait_until(|state| state.busy == 0)
            .counts
            .established;
        assert!(counted > 0);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(shared.state().counts.established, counted);
    }
}
