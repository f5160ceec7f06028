//! Connections that start at fixed intervals, whatever happens to earlier ones: an open loop, like many independent
//! clients.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{getsockopt, sockopt},
    },
    unistd::{read, write},
};
use serde::{Deserialize, Serialize};

use super::{
    Program, Role,
    conversation::{REQUEST, WANTS_ANSWER},
    socket,
    stdio::{commands, reply},
};
use crate::{channel::ControlChannel, wait::TIMEOUT};

/// Connections to an echo server ([`super::traffic::Traffic::echo_server`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clients {
    /// The server's address.
    pub to: SocketAddr,
    /// Source addresses, in turn; if empty, the kernel chooses.
    pub from: Vec<IpAddr>,
    /// From the start of one connection to the start of the next.
    pub interval: Duration,
    /// Sequential requests and answers of each connection.
    pub rounds: u32,
    /// Pauses between an answer and the next request, in turn; if empty, the next request follows at once.
    pub pauses: Vec<Duration>,
    /// A connection that takes longer is given up.
    pub patience: Duration,
}

impl Clients {
    /// Clients that make a connection and send nothing.
    #[must_use]
    pub const fn new(to: SocketAddr, interval: Duration) -> Self {
        Self {
            to,
            from: Vec::new(),
            interval,
            rounds: 0,
            pauses: Vec::new(),
            patience: TIMEOUT,
        }
    }
}

/// The outcomes.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Connections that completed all rounds.
    pub complete: u32,
    /// Connections that failed with a socket error.
    pub failed: u32,
    /// Connections that were given up.
    pub given_up: u32,
    /// How long each connect() took that succeeded, in the order of their ends.
    pub connects: Vec<Duration>,
}

/// Without the times, of which there are thousands.
impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [complete, failed, given_up] = [self.complete, self.failed, self.given_up];
        write!(
            f,
            "{complete} complete, {failed} failed, {given_up} given up"
        )
    }
}

impl Done {
    /// Number of connections.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.complete + self.failed + self.given_up
    }
}

/// The child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Arrivals(ControlChannel);

impl Arrivals {
    /// Starts it in a namespace and a cgroup; nothing is sent yet.
    pub fn start(netns: &str, cgroup: Option<&Path>, clients: &Clients) -> anyhow::Result<Self> {
        let role = Role::Arrivals(clients.clone());
        Program::built()?.ready(netns, cgroup, &role).map(Self)
    }

    /// Starts `count` connections; [`Arrivals::done`] waits for them.
    pub fn begin(&mut self, count: u32) -> anyhow::Result<()> {
        self.0.send(&count)
    }

    /// Whether all have ended.
    pub fn are_done(&self) -> anyhow::Result<bool> {
        self.0.has_reply()
    }

    /// Waits until all connections that were started have ended.
    pub fn done(&mut self) -> anyhow::Result<Done> {
        self.0.recv()
    }

    /// [`Arrivals::begin`] and [`Arrivals::done`].
    pub fn run(&mut self, count: u32) -> anyhow::Result<Done> {
        self.begin(count)?;
        self.done()
    }
}

pub(super) fn run(clients: &Clients) -> anyhow::Result<()> {
    reply(&())?;
    let mut places = clients.from.iter().cycle();
    commands(|count: u32| {
        let mut open = Open::new(clients)?;
        let begin = Instant::now();
        let mut begun = 0;
        while begun < count || !open.all.is_empty() {
            let due = begin + clients.interval * begun;
            let now = Instant::now();
            if begun < count && due <= now {
                open.connect(places.next().copied())?;
                begun += 1;
                continue;
            }
            let due = match begun < count {
                true => due - now,
                false => Duration::MAX,
            };
            let overdue = open.until_overdue(now);
            let request = open.until_request(now);
            open.advance(due.min(overdue).min(request))?;
        }
        Ok(open.done)
    })
}

/// Connections that have not ended.
struct Open<'a> {
    clients: &'a Clients,
    events: Epoll,
    all: HashMap<u64, Client>,
    /// Requests that follow a pause: when, and of which connection.
    requests: BinaryHeap<Reverse<(Instant, u64)>>,
    next: u64,
    /// The oldest connection that may still be open.
    oldest: u64,
    done: Done,
}

struct Client {
    socket: OwnedFd,
    begun: Instant,
    /// Answers that are still missing; `None` while it connects.
    left: Option<u32>,
}

/// The state of a connection after an event.
enum Step {
    Goes,
    /// Its next request follows after a pause.
    Pauses(Duration),
    Complete,
    Failed,
}

impl<'a> Open<'a> {
    fn new(clients: &'a Clients) -> anyhow::Result<Self> {
        Ok(Self {
            clients,
            events: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            all: HashMap::new(),
            requests: BinaryHeap::new(),
            next: 0,
            oldest: 0,
            done: Done::default(),
        })
    }

    fn connect(&mut self, from: Option<IpAddr>) -> anyhow::Result<()> {
        let begun = Instant::now();
        let socket = match from {
            Some(from) => socket::begin_from((from, 0).into(), self.clients.to),
            None => socket::begin(self.clients.to),
        };
        let socket = socket.context("connect")?;
        let event = EpollEvent::new(EpollFlags::EPOLLOUT, self.next);
        self.events.add(&socket, event)?;
        let client = Client {
            socket,
            begun,
            left: None,
        };
        self.all.insert(self.next, client);
        self.next += 1;
        Ok(())
    }

    fn take(&mut self, id: u64, step: Step) {
        match step {
            Step::Goes => return,
            Step::Pauses(pause) => {
                let at = Instant::now() + pause;
                self.requests.push(Reverse((at, id)));
                return;
            }
            Step::Complete => self.done.complete += 1,
            Step::Failed => self.done.failed += 1,
        }
        self.all.remove(&id);
    }

    /// Time until the oldest connection is given up.
    fn until_overdue(&mut self, now: Instant) -> Duration {
        while self.oldest < self.next && !self.all.contains_key(&self.oldest) {
            self.oldest += 1;
        }
        let oldest = self.all.get(&self.oldest);
        oldest.map_or(Duration::MAX, |client| {
            (client.begun + self.clients.patience).saturating_duration_since(now)
        })
    }

    /// How long until the next request after a pause.
    fn until_request(&self, now: Instant) -> Duration {
        let next = self.requests.peek();
        next.map_or(Duration::MAX, |Reverse((at, _))| {
            at.saturating_duration_since(now)
        })
    }

    /// Waits for at most `limit`, and advances the connections that are ready.
    fn advance(&mut self, limit: Duration) -> anyhow::Result<()> {
        // Rounded up: without that it would spin for the last millisecond.
        let ms = u16::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.events.wait(&mut events, EpollTimeout::from(ms)) {
            Err(Errno::EINTR) => 0,
            other => other?,
        };
        for event in &events[..count] {
            let id = event.data();
            let Some(client) = self.all.get_mut(&id) else {
                continue;
            };
            let connects = client.left.is_none();
            let step = client.step(self.clients, &self.events, id)?;
            if connects && client.left.is_some() {
                self.done.connects.push(client.begun.elapsed());
            }
            self.take(id, step);
        }
        let now = Instant::now();
        while let Some(Reverse((at, id))) = self.requests.peek().copied()
            && at <= now
        {
            self.requests.pop();
            if let Some(client) = self.all.get(&id) {
                let step = client.request();
                self.take(id, step);
            }
        }
        while self.until_overdue(now).is_zero() {
            self.all.remove(&self.oldest);
            self.done.given_up += 1;
        }
        Ok(())
    }
}

impl Client {
    fn step(&mut self, clients: &Clients, events: &Epoll, id: u64) -> anyhow::Result<Step> {
        let left = match self.left {
            None => {
                if getsockopt(&self.socket, sockopt::SocketError)? != 0 {
                    return Ok(Step::Failed);
                }
                let mut event = EpollEvent::new(EpollFlags::EPOLLIN, id);
                events.modify(&self.socket, &mut event)?;
                clients.rounds
            }
            Some(left) => match read(&self.socket, &mut [0]) {
                Ok(1) => left - 1,
                Err(Errno::EAGAIN) => return Ok(Step::Goes),
                _ => return Ok(Step::Failed),
            },
        };
        self.left = Some(left);
        if left == 0 {
            return Ok(Step::Complete);
        }
        // Each connection begins with another pause.
        let turn = left as usize + usize::try_from(id)?;
        let pause = clients.pauses.get(turn % clients.pauses.len().max(1));
        Ok(pause.map_or_else(|| self.request(), |pause| Step::Pauses(*pause)))
    }

    fn request(&self) -> Step {
        // A request fits into an empty socket buffer.
        match write(&self.socket, &[WANTS_ANSWER; REQUEST]) {
            Ok(REQUEST) => Step::Goes,
            _ => Step::Failed,
        }
    }
}
