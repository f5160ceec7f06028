//! Serves connections. A client may close its sending half after its request, like `nc -N` and some
//! proxies, and is still answered. A client that has closed the whole connection is dropped, if
//! that can be detected.

use std::{
    io,
    pin::{Pin, pin},
};

use axum::{Router, extract::Request, serve::Listener};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
};

use super::limit::{Limited, TimedIo};

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
    mut listener: Limited<L>,
    app: Router,
    info: impl Fn(&TimedIo<L::Io>) -> I,
    stop: impl Future<Output = ()>,
) -> io::Result<()>
where
    L: Listener<Io: Transport>,
    I: Clone + Send + Sync + 'static,
{
    let (stopping, _) = watch::channel(());
    let mut stop = pin!(stop);
    loop {
        let (connection, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let info = info(&connection);
        tokio::spawn(serve_one(
            connection,
            app.clone(),
            info,
            stopping.subscribe(),
        ));
    }
    drop(listener);
    stopping.send_replace(());
    stopping.closed().await;
    Ok(())
}

async fn serve_one<S: Transport, I: Clone + Send + Sync + 'static>(
    stream: TimedIo<S>,
    app: Router,
    info: I,
    mut stopping: watch::Receiver<()>,
) {
    // hyper does not read while a request is being answered, so it does not notice that the client
    // is gone or that its time is over.
    let mut gone = stream.io().gone();
    let mut over = pin!(stream.over());
    let app = TowerToHyperService::new(app);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(info.clone());
        app.call(request)
    });
    let mut builder = http1::Builder::new();
    builder.half_close(true);
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
    use std::{
        path::Path,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        time::Duration,
    };

    use axum::routing::{get, post};
    use nix::unistd::getegid;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixStream,
        time::timeout,
    };

    use super::*;
    use crate::api::{limit::Limits, socket::RebindingListener};

    const LONG: Duration = Duration::from_secs(60);
    const LIMITS: Limits = Limits {
        connections: 8,
        for_root: 0,
        idle_timeout: LONG,
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

    /// A server of `/echo`, which answers after a moment, and of `/never`, which does not.
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
            let never = move || async move {
                let _waiting = Waiting::begin(&count);
                std::future::pending::<()>().await;
            };
            let echo = |body: String| async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                body
            };
            let app = Router::new()
                .route("/echo", post(echo))
                .route("/never", get(never));
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let serving = serve(Limited::new(listener, limits), app, |_| (), async {
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
            tokio::time::sleep(Duration::from_millis(10)).await;
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
                let request = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n";
                client.write_all(request).await.unwrap();
                if is_half_closed {
                    client.shutdown().await.unwrap();
                }
                until("it is not asked", || waiting.load(Ordering::Relaxed) == 1).await;
                // The client is still connected, and its request pending.
                tokio::time::sleep(Duration::from_millis(600)).await;
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
    fn an_answer_that_does_not_come_ends_with_the_connections_time() {
        let limits = Limits {
            lifetime: Duration::from_millis(300),
            ..LIMITS
        };
        served_with(limits, async |path, waiting| {
            let mut client = UnixStream::connect(path).await.unwrap();
            let request = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n";
            client.write_all(request).await.unwrap();
            client.shutdown().await.unwrap();
            let mut answer = Vec::new();
            let read = timeout(LONG, client.read_to_end(&mut answer));
            read.await.unwrap().unwrap();
            assert!(answer.is_empty());
            until("it still waits", || waiting.load(Ordering::Relaxed) == 0).await;
        });
    }
}
