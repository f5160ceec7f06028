//! The server: any number of connections, each in a separate thread.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};

use super::{
    CloseMode, Dropper, HEADER, LONGEST, Opening, Options, RESPONSE, Sizes, TICK, TICK_MS,
};
use crate::{facts::HostFacts, tcp::TcpInfo};

/// A peer that has been silent for this long gets a keepalive probe.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Shortest time between two reports that connections are refused.
const REFUSALS: Duration = Duration::from_secs(1);
/// Stack of a connection's thread, which makes few nested calls; the default would reserve 2 MiB each.
const STACK_BYTES: usize = 256 << 10;
/// How long the facts about the host are cached.
const FACTS: Duration = Duration::from_secs(60);
/// Maximum number of peers for which the facts are cached.
const FACTS_OF: usize = 1000;
/// Requests are read in pieces of this length.
const PIECE_BYTES: usize = 8 << 10;
/// Every response is a slice of this.
static RESPONSES: [u8; LONGEST as usize] = [RESPONSE; LONGEST as usize];

/// Limits for peers that the server does not trust.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time.
    pub connections: usize,
    /// Time from the start of a connection until its header is complete.
    pub header: Duration,
    /// Time without progress of a write.
    pub write: Duration,
    /// Time without progress of a read.
    pub read: Duration,
    /// Drops the packets of clients that ask for it; `None`: it refuses.
    pub outages: Option<Arc<Dropper>>,
}

impl Limits {
    /// Default of [`Limits::connections`]: twice as many as a client makes, because connections that the client has
    /// already seen end still count for a moment.
    pub const CONNECTIONS: u16 = 8192;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: Self::CONNECTIONS.into(),
            header: Duration::from_secs(10),
            write: Duration::from_secs(60),
            // A client pauses for at most an hour.
            read: Duration::from_secs(2 * 3600),
            outages: None,
        }
    }
}

/// Counters of a server.
#[derive(Debug, Default)]
pub struct Tally {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Requests answered, of connections that have ended.
    pub transactions: AtomicU64,
    /// Connections of peers that speak another protocol.
    pub unexpected_protocol: AtomicU64,
    /// Connections closed at once because there were too many.
    pub refused: AtomicU64,
}

/// One of the slots for simultaneous connections.
struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes a slot if one is free. The check is not atomic: only the accepting thread takes slots.
    fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        if taken.load(Ordering::Relaxed) >= most {
            return None;
        }
        taken.fetch_add(1, Ordering::Relaxed);
        Some(Self(Arc::clone(taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A listening socket; one on `::` also accepts IPv4.
pub fn listen(on: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(on), Type::STREAM, None)?;
    if on.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&on.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// Answers connections; returns when the listener fails.
pub fn serve(listener: &TcpListener, options: Options) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that breaks off is not an error of the server.
        let _detached =
            thread::Builder::new().spawn(move || serve_connection(stream, options, |_| {}));
    }
}

/// Answers connections within these limits while `go_on` returns true. `report` receives the error of each connection
/// that fails, and at most once a second that connections are refused.
pub fn serve_while(
    listener: &TcpListener,
    options: Options,
    limits: Limits,
    tally: &Arc<Tally>,
    go_on: &dyn Fn() -> bool,
    report: fn(SocketAddr, &anyhow::Error),
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let taken = Arc::default();
    let mut reported: Option<Instant> = None;
    let mut refuse = |peer, why: &str| {
        let all = tally.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if reported.is_none_or(|at| at.elapsed() >= REFUSALS) {
            reported = Some(Instant::now());
            report(
                peer,
                &anyhow::anyhow!("refused: {why} ({all} refused so far)"),
            );
        }
    };
    while go_on() {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                match poll(&mut fds, PollTimeout::from(TICK_MS)) {
                    Ok(_) | Err(Errno::EINTR) => continue,
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
            // Out of descriptors or memory: wait until connections end.
            Err(e) if short(&e) => {
                thread::sleep(TICK);
                continue;
            }
            Err(e) => return Err(e),
        };
        let Some(place) = Place::take(&taken, limits.connections) else {
            close_refused(&stream);
            refuse(
                peer,
                &format!("there are {} connections", limits.connections),
            );
            continue;
        };
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
        // Fails if the connection has already been reset.
        let _set = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        tally.connections.fetch_add(1, Ordering::Relaxed);
        let tally = Arc::clone(tally);
        let limits = limits.clone();
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            let _place = place;
            let mut answered = 0;
            let done = serve_within(stream, options, Some(limits), |_| answered += 1);
            tally.transactions.fetch_add(answered, Ordering::Relaxed);
            if let Err(error) = done {
                if error.downcast_ref::<io::Error>().is_none() {
                    tally.unexpected_protocol.fetch_add(1, Ordering::Relaxed);
                }
                report(peer, &error);
            }
        });
        if let Err(error) = spawned {
            refuse(peer, &format!("no thread for it: {error}"));
        }
    }
    Ok(())
}

fn short(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(
        errno,
        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
    )
}

/// Closes a connection without an answer. Unread data would turn the close into a reset, so it is read first.
fn close_refused(mut stream: &TcpStream) {
    // Errors are ignored: the connection is closed in any case.
    let _closed = stream
        .shutdown(Shutdown::Write)
        .and_then(|()| stream.set_nonblocking(true))
        .and_then(|()| stream.read(&mut [0; HEADER + 1]));
}

/// Answers one connection until the client closes it, however long that takes. `each` receives the socket after each
/// request and before its answer; the kernel has processed the request's ACK by then.
pub fn serve_connection(
    stream: TcpStream,
    options: Options,
    each: impl FnMut(&TcpStream),
) -> anyhow::Result<()> {
    serve_within(stream, options, None, each)
}

fn serve_within(
    mut stream: TcpStream,
    options: Options,
    limits: Option<Limits>,
    mut each: impl FnMut(&TcpStream),
) -> anyhow::Result<()> {
    options.apply(&stream)?;
    let limits = limits.as_ref();
    let Some(header) = header(&mut stream, limits.map(|limits| limits.header))? else {
        // The peer only checked that the port is open.
        return Ok(());
    };
    let Opening { sizes, close } = Opening::parse(header)?;
    if close == CloseMode::Facts {
        return Ok(stream.write_all(&facts(stream.peer_addr()?.ip())?)?);
    }
    if close == CloseMode::Outage {
        return outage(
            stream,
            sizes,
            limits.and_then(|limits| limits.outages.as_deref()),
        );
    }
    stream.set_read_timeout(limits.map(|limits| limits.read))?;
    stream.set_write_timeout(limits.map(|limits| limits.write))?;
    let response = &RESPONSES[..sizes.response as usize];
    while request(&mut stream, sizes.request as usize).map_err(timed_out("no request"))? {
        each(&stream);
        let written = stream.write_all(response);
        written.map_err(timed_out("the peer does not read the response"))?;
        if close == CloseMode::OneShot {
            return Ok(());
        }
    }
    if close == CloseMode::WithTcpInfo {
        let info = serde_json::to_vec(&TcpInfo::of(&stream)?)?;
        // The client may have closed without waiting for it.
        let _heard = stream
            .write_all(&info)
            .and_then(|()| stream.shutdown(Shutdown::Write));
    }
    Ok(())
}

/// Drops the packets of a client as it asks, or says why not.
fn outage(mut stream: TcpStream, sizes: Sizes, dropper: Option<&Dropper>) -> anyhow::Result<()> {
    let refused = match dropper {
        Some(_) => None,
        None => Some("it was started without --outages"),
    };
    let begin = Instant::now();
    stream.write_all(&serde_json::to_vec(&refused)?)?;
    let peer = stream.peer_addr()?.ip();
    drop(stream);
    let [length, delay] =
        [sizes.request, sizes.response].map(|ms| Duration::from_millis(ms.into()));
    if let Some(dropper) = dropper {
        thread::sleep(delay.saturating_sub(begin.elapsed()));
        dropper.start(peer, length)?;
    }
    Ok(())
}

/// The facts about this host towards a peer, as JSON. They are cached for a minute and collected by one thread at a
/// time, because each collection runs several processes (ip(8), ethtool(8)) and any host may connect.
fn facts(peer: IpAddr) -> anyhow::Result<Vec<u8>> {
    static ASKED: Mutex<BTreeMap<IpAddr, (Instant, Vec<u8>)>> = Mutex::new(BTreeMap::new());
    let mut asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    asked.retain(|_, (at, _)| at.elapsed() < FACTS);
    if let Some((_, facts)) = asked.get(&peer) {
        return Ok(facts.clone());
    }
    let facts = serde_json::to_vec(&HostFacts::towards(peer)?)?;
    if asked.len() < FACTS_OF {
        asked.insert(peer, (Instant::now(), facts.clone()));
    }
    Ok(facts)
}

/// Reads the header; `None` if the connection ends before. It must be complete within this time, whatever the number of
/// pieces.
fn header(stream: &mut TcpStream, within: Option<Duration>) -> io::Result<Option<[u8; HEADER]>> {
    let begin = Instant::now();
    let mut header = [0; HEADER];
    let mut filled = 0;
    while filled < HEADER {
        let left = within.map(|within| within.saturating_sub(begin.elapsed()));
        if left == Some(Duration::ZERO) {
            return Err(timed_out("no header")(io::ErrorKind::WouldBlock.into()));
        }
        stream.set_read_timeout(left)?;
        match stream.read(&mut header[filled..]) {
            Ok(0) => return Ok(None),
            Ok(more) => filled += more,
            // The loop ends when no time is left.
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted) => {}
            // A client that only measures connections ends them like this.
            Err(e) if filled == 0 && e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(e) if within.is_some() && e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(Some(header))
}

/// Reads a request of this length; returns false if the connection ends before it is complete.
fn request(stream: &mut TcpStream, length: usize) -> io::Result<bool> {
    let mut piece = [0; PIECE_BYTES];
    let mut left = length;
    while left > 0 {
        match stream.read(&mut piece[..left.min(PIECE_BYTES)]) {
            Ok(0) => return Ok(false),
            Ok(more) => left -= more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Names the operation of a socket timeout, which the kernel reports as "Resource temporarily unavailable".
fn timed_out(what: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, format!("{what} in time"))
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{wait::TIMEOUT, workload::rr::Sizes};

    const SHORT: Limits = Limits {
        connections: 2,
        header: Duration::from_millis(300),
        write: Duration::from_millis(300),
        read: Duration::from_millis(300),
        outages: None,
    };

    /// The error with which the server ends a connection with this peer, which must not take long. `request` is sent
    /// before the server reads, so that the peer's thread cannot be late; the peer closes the connection after the
    /// server.
    fn ended(request: &[u8], peer: impl FnOnce(&mut TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        client.write_all(request).unwrap();
        let peer = thread::spawn(move || {
            peer(&mut client);
            client
        });
        let begin = Instant::now();
        let error = serve_within(stream, Options::default(), Some(SHORT), |_| {}).unwrap_err();
        assert!(begin.elapsed() >= SHORT.header);
        assert!(begin.elapsed() < TIMEOUT);
        peer.join().unwrap();
        error.to_string()
    }

    /// Collecting the facts takes some milliseconds and runs four processes.
    #[test]
    fn facts_are_read_once_per_host() {
        let peer = IpAddr::from([127, 0, 0, 3]);
        let asking = Instant::now();
        let first = facts(peer).unwrap();
        let asked = asking.elapsed();
        let begin = Instant::now();
        for _ in 0..2000 {
            assert_eq!(facts(peer).unwrap(), first);
        }
        assert!(begin.elapsed() < 500 * asked);
        assert_ne!(facts([127, 0, 0, 4].into()).unwrap(), first);
    }

    fn opening(request: u32, response: u32) -> [u8; HEADER] {
        let close = CloseMode::ByClient;
        let sizes = Sizes { request, response };
        Opening { sizes, close }.header()
    }

    #[test]
    fn stalling_peers_time_out() {
        let text = ended(&[], |stream| {
            for byte in opening(1, 1) {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
        assert_eq!(text, "no header in time");
        let text = ended(&opening(LONGEST, 1), |_| {});
        assert_eq!(text, "no request in time");
        // More responses than fit into the socket buffers.
        let asks = [&opening(1, LONGEST)[..], &[b'q'; 64]].concat();
        let text = ended(&asks, |_| {});
        assert_eq!(text, "the peer does not read the response in time");
    }
}
