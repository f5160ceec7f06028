//! Serves connections: a limited number, each for a limited time.

use std::{
    mem,
    net::{IpAddr, Ipv6Addr},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use rto_agent_core::wire::types::ErrorAnswer;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
    time::sleep,
};
use tracing::warn;

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Concurrent connections; more wait until one ends.
    pub connections: usize,
    /// The last of them, which are reserved for root if the kernel reports the peer's user. Other
    /// users are refused when only these are left.
    pub for_root: usize,
    /// Concurrent connections of one peer address (of IPv6: of one /64), if it has one. One more
    /// closes the oldest of them, and if all connections are in use, the oldest of the address
    /// that has most: silent and slow clients keep no other client waiting.
    pub per_address: usize,
    /// How long a client may take to send the head of a request.
    pub head_timeout: Duration,
    /// Lifetime of a connection; the client then opens another.
    pub lifetime: Duration,
}

/// Suspends the deadline of its connection, for an endless answer.
#[derive(Clone, Debug, Default)]
pub struct Lasting(Arc<AtomicBool>);

impl Lasting {
    /// The connection may outlive [`Limits::lifetime`].
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns at the deadline, or never.
    async fn deadline(self, lifetime: Duration) {
        sleep(lifetime).await;
        if self.0.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

/// A connection's stream.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// The user at the other end, if the kernel reports it.
    fn uid(&self) -> Option<u32>;

    /// The address of the other end, if it has one.
    fn address(&self) -> Option<IpAddr>;
}

impl Transport for TcpStream {
    fn uid(&self) -> Option<u32> {
        None
    }

    fn address(&self) -> Option<IpAddr> {
        Some(self.peer_addr().ok()?.ip().to_canonical())
    }
}

impl Transport for UnixStream {
    fn uid(&self) -> Option<u32> {
        // If credentials cannot be read, not root.
        Some(self.peer_cred().map_or(u32::MAX, |peer| peer.uid()))
    }

    fn address(&self) -> Option<IpAddr> {
        None
    }
}

/// Serves until `stop` resolves, and then until the pending requests are answered. `app` returns the
/// routes for a connection.
pub(crate) async fn serve<L: Listener<Io: Transport>>(
    mut listener: L,
    limits: Limits,
    app: impl Fn(&L::Io, Lasting) -> Router,
    stop: impl Future<Output = ()>,
) {
    let mut slots = Slots {
        limits,
        free: Arc::new(Semaphore::new(limits.connections)),
        peers: Vec::new(),
        is_refusing: false,
    };
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new());
    builder.header_read_timeout(limits.head_timeout);
    let graceful = GracefulShutdown::new();
    let mut stop = pin!(stop);
    loop {
        let (stream, slot, peer) = tokio::select! {
            accepted = slots.accept(&mut listener) => accepted,
            () = &mut stop => break,
        };
        let lasting = Lasting::default();
        let service = TowerToHyperService::new(app(&stream, lasting.clone()));
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        let task = tokio::spawn(async move {
            let _slot = slot;
            tokio::select! {
                // An error means that the client does not speak HTTP, or has disconnected.
                _ended = connection => {}
                () = lasting.deadline(limits.lifetime) => {}
            }
        });
        slots
            .peers
            .extend(peer.map(|network| (network, task.abort_handle())));
    }
    drop(listener);
    graceful.shutdown().await;
}

/// The connections that may still be accepted.
struct Slots {
    limits: Limits,
    free: Arc<Semaphore>,
    /// Connections of peers with an address, the oldest first.
    peers: Vec<(IpAddr, AbortHandle)>,
    /// Users other than root are being refused, and that is logged.
    is_refusing: bool,
}

impl Slots {
    /// Accepts a connection once there is a slot for it, and makes one if the peer has an address.
    async fn accept<L: Listener<Io: Transport>>(
        &mut self,
        listener: &mut L,
    ) -> (L::Io, Option<OwnedSemaphorePermit>, Option<IpAddr>) {
        loop {
            let (mut stream, slot, peer) = if self.limits.per_address == 0 {
                let slot = self.free.clone().acquire_owned().await.ok();
                (listener.accept().await.0, slot, None)
            } else {
                let (stream, _) = listener.accept().await;
                let peer = stream.address().map(network);
                if let Some(peer) = peer {
                    self.make_room(peer);
                }
                let slot = self.free.clone().acquire_owned().await.ok();
                (stream, slot, peer)
            };
            let Some(uid) = stream.uid().filter(|uid| *uid != 0) else {
                return (stream, slot, peer);
            };
            if self.free.available_permits() >= self.limits.for_root {
                self.is_refusing = false;
                return (stream, slot, peer);
            }
            let text = format!(
                "the last {} connections to this socket are reserved for root; try again",
                self.limits.for_root
            );
            if !mem::replace(&mut self.is_refusing, true) {
                warn!(audit = true, uid, "connections are refused: {text}");
            }
            // The buffer of a new connection has room for it.
            let _ = stream.write_all(&unavailable(text)).await;
        }
    }

    /// Closes a connection if this peer may have no more, or there is none left.
    fn make_room(&mut self, peer: IpAddr) {
        self.peers.retain(|(_, task)| !task.is_finished());
        let of = |network: &IpAddr| {
            self.peers
                .iter()
                .filter(|(other, _)| other == network)
                .count()
        };
        let busiest = if of(&peer) >= self.limits.per_address {
            Some(peer)
        } else if self.peers.len() >= self.limits.connections {
            // Of several, the one whose connection is the oldest.
            let networks = self.peers.iter().map(|(network, _)| *network).rev();
            networks.max_by_key(of)
        } else {
            None
        };
        let oldest = busiest.and_then(|busiest| {
            self.peers
                .iter()
                .position(|(network, _)| *network == busiest)
        });
        if let Some(oldest) = oldest {
            self.peers.remove(oldest).1.abort();
        }
    }
}

/// The part of an address that a single host has: of IPv6, a /64.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
    }
}

/// The answer to a request that is not read.
fn unavailable(error: String) -> Vec<u8> {
    let body = serde_json::to_string(&ErrorAnswer { error }).unwrap_or_default();
    let length = body.len();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use std::{net::SocketAddr, path::Path, sync::atomic::AtomicUsize, time::Instant};

    use axum::{
        Extension,
        routing::{get, post},
    };
    use nix::unistd::getegid;
    use tokio::{
        io::AsyncReadExt as _,
        net::{TcpListener, TcpSocket, UnixStream},
        time::timeout,
    };

    use super::*;
    use crate::api::socket::RebindingListener;

    const LONG: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_millis(250);
    const NEVER: &[u8] = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n";
    const LIMITS: Limits = Limits {
        connections: 8,
        for_root: 0,
        per_address: 0,
        head_timeout: LONG,
        lifetime: LONG,
    };

    /// Counts requests that wait for an answer that never comes.
    struct Waiting(Arc<AtomicUsize>);

    impl Waiting {
        fn begin(count: &Arc<AtomicUsize>) -> Self {
            count.fetch_add(1, Ordering::Relaxed);
            Self(count.clone())
        }
    }

    impl Drop for Waiting {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A server of `/echo`, which answers after a moment, and of `/never` and `/lasting`, which do
    /// not.
    fn served(test: impl AsyncFnOnce(&Path, Arc<AtomicUsize>)) {
        served_with(LIMITS, test);
    }

    fn served_with(limits: Limits, test: impl AsyncFnOnce(&Path, Arc<AtomicUsize>)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        runtime.block_on(async {
            let (listener, _file) = RebindingListener::bind(&path, getegid()).unwrap();
            let waiting = Arc::<AtomicUsize>::default();
            let count = waiting.clone();
            let lasting_count = waiting.clone();
            let never = move || async move {
                let _waiting = Waiting::begin(&count);
                std::future::pending::<()>().await;
            };
            let lasting = move |Extension(lasting): Extension<Lasting>| async move {
                let _waiting = Waiting::begin(&lasting_count);
                lasting.set();
                std::future::pending::<()>().await;
            };
            let echo = |body: String| async move {
                sleep(Duration::from_millis(20)).await;
                body
            };
            let app = Router::new()
                .route("/echo", post(echo))
                .route("/lasting", get(lasting))
                .route("/never", get(never));
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let app = move |_: &_, lasting| app.clone().layer(Extension(lasting));
            let serving = serve(listener, limits, app, async {
                let _ = stopped.await;
            });
            let serving = tokio::spawn(serving);
            test(&path, waiting).await;
            drop(stop);
            timeout(LONG, serving).await.unwrap().unwrap();
        });
    }

    async fn until(what: &str, is: impl Fn() -> bool) {
        for _ in 0..6000 {
            if is() {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}");
    }

    #[test]
    fn disconnected_client_and_its_request_are_dropped() {
        served(async |path, waiting| {
            for part in [
                "",
                "POST /echo HT",
                "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf",
            ] {
                let mut client = UnixStream::connect(path).await.unwrap();
                client.write_all(part.as_bytes()).await.unwrap();
                client.shutdown().await.unwrap();
                let mut answer = Vec::new();
                let read = timeout(LONG, client.read_to_end(&mut answer));
                read.await.unwrap().unwrap();
            }
            let mut client = UnixStream::connect(path).await.unwrap();
            client.write_all(NEVER).await.unwrap();
            until("it is not asked", || waiting.load(Ordering::Relaxed) == 1).await;
            drop(client);
            until("it was not noticed", || {
                waiting.load(Ordering::Relaxed) == 0
            })
            .await;
        });
    }

    #[test]
    fn connection_ends_after_its_lifetime_unless_lasting() {
        let limits = Limits {
            lifetime: SOON,
            ..LIMITS
        };
        served_with(limits, async |path, waiting| {
            let mut client = UnixStream::connect(path).await.unwrap();
            client.write_all(NEVER).await.unwrap();
            let mut answer = Vec::new();
            let read = timeout(LONG, client.read_to_end(&mut answer));
            read.await.unwrap().unwrap();
            assert!(answer.is_empty());
            until("it still waits", || waiting.load(Ordering::Relaxed) == 0).await;
            let mut client = UnixStream::connect(path).await.unwrap();
            let request = b"GET /lasting HTTP/1.1\r\nhost: x\r\n\r\n";
            client.write_all(request).await.unwrap();
            let read = timeout(SOON * 4, client.read_to_end(&mut answer));
            assert!(read.await.is_err(), "{answer:?}");
            assert_eq!(waiting.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn connection_beyond_the_limit_waits_for_end_of_silent_one() {
        let limits = Limits {
            connections: 1,
            head_timeout: SOON,
            ..LIMITS
        };
        served_with(limits, async |path, _| {
            let begin = Instant::now();
            let mut silent = UnixStream::connect(path).await.unwrap();
            sleep(SOON / 4).await;
            let mut second = UnixStream::connect(path).await.unwrap();
            let request = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
            second.write_all(request).await.unwrap();
            let mut answer = String::new();
            let read = timeout(LONG, second.read_to_string(&mut answer));
            read.await.unwrap().unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            assert!(begin.elapsed() >= SOON, "{:?}", begin.elapsed());
            assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
        });
    }

    /// Clients that send nothing, of this address; more than may be open.
    async fn silent(to: SocketAddr, from: &str, count: usize) -> Vec<TcpStream> {
        let mut all = Vec::new();
        for _ in 0..count {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(from.parse().unwrap()).unwrap();
            all.push(socket.connect(to).await.unwrap());
        }
        all
    }

    #[test]
    fn silent_clients_keep_no_other_client_waiting() {
        let limits = Limits {
            connections: 6,
            per_address: 4,
            ..LIMITS
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let to = listener.local_addr().unwrap();
            let app = Router::new().route("/", get(|| async { "ok" }));
            let app = move |_: &_, _| app.clone();
            tokio::spawn(serve(listener, limits, app, std::future::pending()));
            let ask = async |client: &mut TcpStream| {
                let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
                client.write_all(request).await.unwrap();
                let mut answer = String::new();
                while !answer.ends_with("\r\n\r\nok") {
                    let mut piece = [0; 512];
                    let read = timeout(Duration::from_secs(5), client.read(&mut piece));
                    let length = read.await.unwrap().unwrap();
                    assert!(length > 0, "closed: {answer}");
                    answer += std::str::from_utf8(&piece[..length]).unwrap();
                }
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            };
            let mut first = TcpStream::connect(to).await.unwrap();
            ask(&mut first).await;
            // Of the same address, and of others, twice as many as may be open.
            let _same = silent(to, "127.0.0.1:0", 3).await;
            let _others = silent(to, "127.0.0.2:0", 12).await;
            let _more = silent(to, "127.0.0.3:0", 12).await;
            let mut second = TcpStream::connect(to).await.unwrap();
            ask(&mut second).await;
            let _again = silent(to, "127.0.0.2:0", 12).await;
            ask(&mut second).await;
        });
    }
}
