//! A listener that limits concurrent connections and their lifetime.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep, sleep_until},
};

use tracing::warn;

use super::connection::Transport;
use crate::wire::types::ErrorAnswer;

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Concurrent connections; more wait until one ends.
    pub connections: usize,
    /// Connections reserved for root, if the kernel reports the peer's user. When the others are in
    /// use, other users are refused.
    pub for_root: usize,
    /// How long a client may send nothing after connecting, and how long it may leave its answer
    /// unread.
    pub idle_timeout: Duration,
    /// Lifetime of a connection; the client then opens another.
    pub lifetime: Duration,
}

/// A listener that stops accepting while the limit is reached.
#[derive(Debug)]
pub struct Limited<L> {
    listener: L,
    limits: Limits,
    slots: Arc<Semaphore>,
    /// Slots for users other than root.
    others: Arc<Semaphore>,
    /// Users other than root are being refused, and that is logged.
    is_refusing: bool,
}

impl<L> Limited<L> {
    /// Limits a listener.
    pub fn new(listener: L, limits: Limits) -> Self {
        Self {
            listener,
            limits,
            slots: Arc::new(Semaphore::new(limits.connections)),
            others: Arc::new(Semaphore::new(limits.connections - limits.for_root)),
            is_refusing: false,
        }
    }
}

impl<L: Listener<Io: Transport>> Listener for Limited<L> {
    type Io = TimedIo<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // `acquire_owned()` only fails on a closed semaphore, and this one is never closed.
        let slot = self.slots.clone().acquire_owned().await.ok();
        // Some connections are reserved for root, so that other users cannot take all.
        let (io, address, share) = loop {
            let (io, address) = self.listener.accept().await;
            let Some(uid) = io.uid().filter(|uid| *uid != 0) else {
                break (io, address, None);
            };
            if let Ok(share) = self.others.clone().try_acquire_owned() {
                self.is_refusing = false;
                break (io, address, Some(share));
            }
            let text = format!(
                "users other than root already have {} connections to this socket, the limit; try \
                 again",
                self.limits.connections - self.limits.for_root
            );
            if !std::mem::replace(&mut self.is_refusing, true) {
                warn!(audit = true, uid, "connections are refused: {text}");
            }
            io.send_last(&unavailable(text));
        };
        let guarded = TimedIo {
            io,
            accepted: Instant::now(),
            idle_timeout: self.limits.idle_timeout,
            lifetime: self.limits.lifetime,
            silent: true,
            unread: None,
            end: Box::pin(sleep(self.limits.idle_timeout)),
            no_deadline: Arc::default(),
            _slot: slot,
            _share: share,
        };
        (guarded, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with a limited lifetime.
#[derive(Debug)]
pub struct TimedIo<I> {
    io: I,
    accepted: Instant,
    idle_timeout: Duration,
    lifetime: Duration,
    /// Nothing has been received yet.
    silent: bool,
    /// When a write that makes no progress is given up.
    unread: Option<Pin<Box<Sleep>>>,
    end: Pin<Box<Sleep>>,
    no_deadline: Arc<AtomicBool>,
    _slot: Option<OwnedSemaphorePermit>,
    _share: Option<OwnedSemaphorePermit>,
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

impl<I> TimedIo<I> {
    /// The underlying connection.
    pub fn io(&self) -> &I {
        &self.io
    }

    /// Setting this to true suspends the deadline, for an endless answer.
    pub fn no_deadline(&self) -> Arc<AtomicBool> {
        self.no_deadline.clone()
    }

    /// Resolves when the lifetime is over, even without reads or writes.
    pub(super) fn over(&self) -> impl Future<Output = ()> + Send + use<I> {
        let (mut end, lifetime) = (self.accepted + self.lifetime, self.lifetime);
        let no_deadline = self.no_deadline();
        async move {
            loop {
                sleep_until(end).await;
                if !no_deadline.load(Ordering::Relaxed) {
                    return;
                }
                end += lifetime;
            }
        }
    }

    /// Whether the deadline has passed; otherwise registers the waker for it.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        !self.has_no_deadline() && self.end.as_mut().poll(context).is_ready()
    }

    fn has_no_deadline(&self) -> bool {
        self.no_deadline.load(Ordering::Relaxed)
    }

    /// The same for a write that makes no progress.
    fn is_left_unread(&mut self, context: &mut Context<'_>) -> bool {
        let idle_timeout = self.idle_timeout;
        let unread = self
            .unread
            .get_or_insert_with(|| Box::pin(sleep(idle_timeout)));
        let is_over = unread.as_mut().poll(context).is_ready();
        is_over && !self.has_no_deadline()
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for TimedIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let polled = Pin::new(&mut self.io).poll_read(context, buffer);
        if self.silent && polled.is_ready() {
            self.silent = false;
            let end = self.accepted + self.lifetime;
            self.end.as_mut().reset(end);
        }
        polled
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for TimedIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let polled = Pin::new(&mut self.io).poll_write(context, bytes);
        if polled.is_ready() {
            self.unread = None;
        } else if self.is_left_unread(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;

    const SOON: Duration = Duration::from_millis(250);
    const LIMITS: Limits = Limits {
        connections: 4,
        for_root: 0,
        idle_timeout: SOON,
        lifetime: Duration::from_secs(3600),
    };

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(test);
    }

    #[test]
    fn connections_are_limited() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut limited = Limited::new(listener, LIMITS);
            let mut clients = Vec::new();
            let mut accepted = Vec::new();
            for _ in 0..LIMITS.connections {
                clients.push(TcpStream::connect(address).await.unwrap());
                accepted.push(limited.accept().await.0);
            }
            clients.push(TcpStream::connect(address).await.unwrap());
            assert!(timeout(SOON, limited.accept()).await.is_err());
            accepted.pop();
            let (mut last, _) = timeout(SOON * 100, limited.accept()).await.unwrap();
            // The client sends nothing, so its time is soon over.
            let error = last.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn client_that_stops_reading_is_dropped_slow_one_kept() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut limited = Limited::new(listener, LIMITS);
            let much = vec![0; 64 << 20];
            let mut client = TcpStream::connect(address).await.unwrap();
            let (mut accepted, _) = limited.accept().await;
            client.write_all(b"x").await.unwrap();
            accepted.read_exact(&mut [0]).await.unwrap();
            let error = timeout(SOON * 100, accepted.write_all(&much))
                .await
                .unwrap();
            assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);

            // Each pause is shorter than idle_timeout, all together are longer. Repeated if the
            // host made a pause too long.
            loop {
                let mut client = TcpStream::connect(address).await.unwrap();
                let (mut accepted, _) = limited.accept().await;
                client.write_all(b"x").await.unwrap();
                accepted.read_exact(&mut [0]).await.unwrap();
                let reading = async {
                    let (mut some, mut longest) = (vec![0; 1 << 16], Duration::ZERO);
                    let mut last = Instant::now();
                    for part in 0..512 {
                        if part % 64 == 0 {
                            sleep(SOON / 3).await;
                        }
                        let read = client.read_exact(&mut some).await;
                        longest = longest.max(last.elapsed());
                        last = Instant::now();
                        if read.is_err() {
                            break;
                        }
                    }
                    longest
                };
                // Dropped at its end, so that no reader waits for more.
                let written = async move { accepted.write_all(&vec![0; 32 << 20]).await };
                let (longest, written) = tokio::join!(reading, written);
                if longest < SOON {
                    break written.unwrap();
                }
            }
        });
    }

    #[test]
    fn connection_ends_after_its_lifetime_unless_lasting() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let lifetime = SOON * 4;
            let mut limited = Limited::new(listener, Limits { lifetime, ..LIMITS });
            let mut client = TcpStream::connect(address).await.unwrap();
            let (mut accepted, _) = limited.accept().await;
            client.write_all(b"x").await.unwrap();
            accepted.read_exact(&mut [0]).await.unwrap();
            let begin = Instant::now();
            assert!(accepted.read(&mut [0]).await.is_err());
            assert!(begin.elapsed() > SOON * 2);
            accepted.no_deadline().store(true, Ordering::Relaxed);
            assert!(timeout(SOON * 6, accepted.read(&mut [0])).await.is_err());
        });
    }

    /// Reads until the end, or until this many bytes.
    async fn drained(client: &mut TcpStream) -> usize {
        let (mut buffer, mut sum) = (vec![0; 1 << 16], 0);
        while let Ok(count @ 1..) = client.read(&mut buffer).await {
            sum += count;
        }
        sum
    }

    /// The daemon's limits, with shorter times.
    #[test]
    fn slow_clients_are_dropped_and_others_served() {
        const SIZE: usize = 64 << 20;
        const REQUEST: &[u8] = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n";
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let lifetime = SOON * 10;
            let limits = Limits {
                connections: 3,
                idle_timeout: lifetime,
                lifetime,
                ..LIMITS
            };
            let app = axum::Router::new()
                .route("/large", axum::routing::get(|| async { vec![b'x'; SIZE] }))
                .route("/", axum::routing::get(|| async { "here" }));
            let serving = axum::serve(Limited::new(listener, limits), app);
            let serving = tokio::spawn(serving.into_future());
            let begin = Instant::now();
            let connect = async || TcpStream::connect(address).await.unwrap();
            let (mut asking, mut reading) = (connect().await, connect().await);
            reading.write_all(REQUEST).await.unwrap();
            let other = async {
                let mut client = connect().await;
                let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
                client.write_all(request).await.unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                assert!(answer.ends_with("here"), "{answer}");
                begin.elapsed()
            };
            // A byte at a time, without an end: the request is not even complete when the lifetime
            // is over.
            let slow = async {
                for byte in REQUEST.iter().chain(std::iter::repeat(&b'x')) {
                    if asking.write_all(&[*byte]).await.is_err() {
                        break;
                    }
                    sleep(lifetime / 20).await;
                }
                begin.elapsed()
            };
            let (answered, let_go) = tokio::join!(other, timeout(lifetime * 100, slow));
            assert!(answered < lifetime * 100, "{answered:?}");
            assert!(let_go.expect("it may continue for ever") >= lifetime / 2);
            // The answer ends where the sockets' buffers were full.
            let read = timeout(lifetime * 100, drained(&mut reading))
                .await
                .unwrap();
            assert!((1..SIZE).contains(&read), "{read} of {SIZE}");
            serving.abort();
        });
    }
}
