//! Serves connections: a limited number, each for a limited time. A client may close its sending
//! half after its request, like `nc -N` and some proxies, and is still answered. A client that has
//! closed the whole connection is dropped, if that can be detected.

use std::{
    io, mem,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::Request, serve::Listener};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rto_agent_core::wire::types::ErrorAnswer;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
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
    /// How long a client may take to send the head of a request.
    pub head_timeout: Duration,
    /// Lifetime of a connection; the client then opens another.
    pub lifetime: Duration,
}

/// Suspends the deadline of its connection, for an endless answer.
#[derive(Clone, Debug, Default)]
pub struct Lasting(Arc<AtomicBool>);

impl Lasting {
    /// Sets whether the connection may outlive [`Limits::lifetime`].
    pub fn set(&self, is_lasting: bool) {
        self.0.store(is_lasting, Ordering::Relaxed);
    }
}

/// Resolves once the client has closed its connection.
pub type Gone = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection's stream.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// The user at the other end, if the kernel reports it.
    fn uid(&self) -> Option<u32> {
        None
    }

    /// Resolves when the other end is closed in both directions; never if that looks the same as
    /// one direction.
    fn gone(&self) -> Gone {
        Box::pin(std::future::pending())
    }

    /// Sends as much as possible without blocking, before the connection is closed.
    fn send_last(&self, _bytes: &[u8]) {}
}

/// TCP sends the same FIN for both.
impl Transport for TcpStream {}

/// Serves until `stop` resolves, and then until the pending requests are answered. Each request has
/// the result of `info` for its connection among its extensions.
///
/// # Errors
///
/// Never fails: a broken listener retries.
pub(crate) async fn serve<L, I>(
    mut listener: L,
    limits: Limits,
    app: Router,
    info: impl Fn(&L::Io, Lasting) -> I,
    stop: impl Future<Output = ()>,
) -> io::Result<()>
where
    L: Listener<Io: Transport>,
    I: Clone + Send + Sync + 'static,
{
    let mut slots = Slots {
        limits,
        free: Arc::new(Semaphore::new(limits.connections)),
        is_refusing: false,
    };
    let (stopping, _) = watch::channel(());
    let mut stop = pin!(stop);
    loop {
        let (stream, slot) = tokio::select! {
            accepted = slots.accept(&mut listener) => accepted,
            () = &mut stop => break,
        };
        let lasting = Lasting::default();
        let info = info(&stream, lasting.clone());
        let serving = serve_one(
            stream,
            limits,
            lasting,
            app.clone(),
            info,
            stopping.subscribe(),
        );
        tokio::spawn(async {
            serving.await;
            drop(slot);
        });
    }
    drop(listener);
    stopping.send_replace(());
    stopping.closed().await;
    Ok(())
}

/// The connections that may still be accepted.
struct Slots {
    limits: Limits,
    free: Arc<Semaphore>,
    /// Users other than root are being refused, and that is logged.
    is_refusing: bool,
}

impl Slots {
    /// Accepts a connection once there is a slot for it; `None` only if the semaphore is closed,
    /// which never happens.
    async fn accept<L: Listener<Io: Transport>>(
        &mut self,
        listener: &mut L,
    ) -> (L::Io, Option<OwnedSemaphorePermit>) {
        loop {
            let slot = self.free.clone().acquire_owned().await.ok();
            let (stream, _) = listener.accept().await;
            let Some(uid) = stream.uid().filter(|uid| *uid != 0) else {
                return (stream, slot);
            };
            if self.free.available_permits() >= self.limits.for_root {
                self.is_refusing = false;
                return (stream, slot);
            }
            let text = format!(
                "the last {} connections to this socket are reserved for root; try again",
                self.limits.for_root
            );
            if !mem::replace(&mut self.is_refusing, true) {
                warn!(audit = true, uid, "connections are refused: {text}");
            }
            stream.send_last(&unavailable(text));
        }
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

async fn serve_one<S: Transport, I: Clone + Send + Sync + 'static>(
    stream: S,
    limits: Limits,
    lasting: Lasting,
    app: Router,
    info: I,
    mut stopping: watch::Receiver<()>,
) {
    // hyper does not read while a request is being answered, so it does not notice that the client
    // is gone, nor that its time is over.
    let mut gone = stream.gone();
    let mut over = pin!(async {
        sleep(limits.lifetime).await;
        while lasting.0.load(Ordering::Relaxed) {
            sleep(limits.lifetime).await;
        }
    });
    let app = TowerToHyperService::new(app);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(info.clone());
        app.call(request)
    });
    let mut builder = http1::Builder::new();
    builder.half_close(true).timer(TokioTimer::new());
    builder.header_read_timeout(limits.head_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut is_stopping = false;
    loop {
        tokio::select! {
            // Reads available data before checking whether the client is gone.
            biased;
            // An error means that the client does not speak HTTP, or has disconnected.
            _ended = connection.as_mut() => return,
            () = &mut gone => return,
            () = &mut over => return,
            _ = stopping.changed(), if !is_stopping => {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::atomic::AtomicUsize, time::Instant};

    use axum::{
        Extension,
        routing::{get, post},
    };
    use nix::unistd::getegid;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixStream,
        time::timeout,
    };

    use super::*;
    use crate::api::socket::RebindingListener;

    const LONG: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_millis(250);
    /// Larger than the buffers of a socket.
    const LARGE: usize = 64 << 20;
    const NEVER: &[u8] = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n";
    const LIMITS: Limits = Limits {
        connections: 8,
        for_root: 0,
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

    /// A server of `/echo`, which answers after a moment, of `/never` and `/lasting`, which do not,
    /// and of `/large`, whose answer fills the buffers of sockets.
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
                lasting.set(true);
                std::future::pending::<()>().await;
            };
            let echo = |body: String| async move {
                sleep(Duration::from_millis(20)).await;
                body
            };
            let app = Router::new()
                .route("/echo", post(echo))
                .route("/large", get(|| async { vec![b'x'; LARGE] }))
                .route("/lasting", get(lasting))
                .route("/never", get(never));
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let serving = serve(listener, limits, app, |_, lasting| lasting, async {
                let _stop = stopped.await;
            });
            let serving = tokio::spawn(serving);
            test(&path, waiting).await;
            drop(stop);
            timeout(LONG, serving).await.unwrap().unwrap().unwrap();
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
    fn client_with_half_closed_connection_is_answered() {
        served(async |path, _| {
            for body in ["", "x", &"long".repeat(1 << 16)] {
                let mut client = UnixStream::connect(path).await.unwrap();
                let length = body.len();
                let head =
                    format!("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
                client.write_all(head.as_bytes()).await.unwrap();
                client.write_all(body.as_bytes()).await.unwrap();
                client.shutdown().await.unwrap();
                let mut answer = String::new();
                // The answer ends with the connection.
                timeout(LONG, client.read_to_string(&mut answer))
                    .await
                    .unwrap()
                    .unwrap();
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer:.60}");
                assert!(answer.ends_with(body), "{answer:.60}");
            }
        });
    }

    #[test]
    fn client_that_breaks_off_its_request_is_disconnected() {
        served(async |path, _| {
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
        });
    }

    #[test]
    fn disconnect_is_noticed_also_after_half_close() {
        served(async |path, waiting| {
            for is_half_closed in [false, true] {
                let mut client = UnixStream::connect(path).await.unwrap();
                client.write_all(NEVER).await.unwrap();
                if is_half_closed {
                    client.shutdown().await.unwrap();
                }
                until("it is not asked", || waiting.load(Ordering::Relaxed) == 1).await;
                // The client is still connected, and its request pending.
                sleep(Duration::from_millis(600)).await;
                assert_eq!(waiting.load(Ordering::Relaxed), 1);
                drop(client);
                until("it was not noticed", || {
                    waiting.load(Ordering::Relaxed) == 0
                })
                .await;
            }
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
            client.shutdown().await.unwrap();
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

    #[test]
    fn slow_clients_are_dropped_and_others_served() {
        let limits = Limits {
            connections: 3,
            head_timeout: SOON * 4,
            lifetime: SOON * 8,
            ..LIMITS
        };
        served_with(limits, async |path, _| {
            let connect = async || UnixStream::connect(path).await.unwrap();
            let (mut sending, mut reading, mut other) =
                (connect().await, connect().await, connect().await);
            let request = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n";
            reading.write_all(request).await.unwrap();
            // A byte at a time, without an end: the head is not complete in time.
            let slow = async {
                let head = b"GET /never HTTP/1.1\r\nx: ";
                for byte in head.iter().chain(std::iter::repeat(&b'x')) {
                    if sending.write_all(&[*byte]).await.is_err() {
                        break;
                    }
                    sleep(SOON / 10).await;
                }
            };
            let asking = async {
                let request = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
                other.write_all(request).await.unwrap();
                let mut answer = String::new();
                other.read_to_string(&mut answer).await.unwrap();
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            };
            let both = async { tokio::join!(slow, asking) };
            timeout(LONG, both).await.unwrap();
            // The answer ends where the sockets' buffers were full when the lifetime was over.
            sleep(SOON * 8).await;
            let mut answer = Vec::new();
            let _reset = timeout(LONG, reading.read_to_end(&mut answer))
                .await
                .unwrap();
            assert!((1..LARGE).contains(&answer.len()), "{}", answer.len());
        });
    }
}
