//! The metrics endpoint: read-only, without secrets, and for every client that can reach it.

use std::{
    future::pending,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Extension, Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{Html, IntoResponse as _, Response},
    routing::get,
};
use nix::sys::socket::{setsockopt, sockopt::IpFreebind};
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use rto_agent_kernel::kernel::bpf;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Semaphore,
    task::spawn_blocking,
    time::sleep,
};
use tracing::info;

use super::metrics::{Scrape, render};
use crate::{
    api::{
        body,
        connection::{self, Limits},
    },
    engine::{EngineError, Handle, Message, Readiness, status},
};

/// How long a readiness request waits for the comparison of the kernel's maps.
pub const VERIFY: Duration = Duration::from_secs(5);

/// Enough for a few collectors and a person; the other file descriptors are reserved for the
/// daemon's maps.
pub const LIMITS: Limits = Limits {
    connections: 16,
    for_root: 0,
    per_address: 8,
    head_timeout: Duration::from_secs(10),
    lifetime: Duration::from_secs(30),
};
/// Connections that wait to be accepted, as in the standard library.
const BACKLOG: u32 = 128;
/// Requests need no body.
pub const MAX_BODY: usize = 4 << 10;

/// How often an address that cannot be used is tried again.
const RETRY: Duration = if cfg!(test) {
    Duration::from_millis(20)
} else {
    Duration::from_secs(2)
};

/// Listens on an address, even if this host does not have it yet (DHCP, a virtual address).
///
/// # Errors
///
/// If the port is taken.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    setsockopt(&socket, IpFreebind, &true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves at an address until the daemon ends. While that is not possible, the status has a warning.
pub async fn serve_at(address: SocketAddr, first: io::Result<TcpListener>, engine: Handle) {
    let mut bound = first;
    let listener = loop {
        match bound {
            Ok(listener) => break listener,
            Err(e) => {
                let problem = format!(
                    "metrics are not served: cannot listen on {address}: {e}; end the process that \
                     uses it, or set [agent] metrics to another address"
                );
                engine.notify(Message::Metrics(Some(problem)));
            }
        }
        sleep(RETRY).await;
        bound = listen(address);
    };
    info!(%address, "serving metrics");
    let until_configured = async {
        while !is_of_host(address.ip()) {
            let problem = format!(
                "metrics are not served yet: this host does not have the address {}",
                address.ip()
            );
            engine.notify(Message::Metrics(Some(problem)));
            sleep(RETRY).await;
        }
        engine.notify(Message::Metrics(None));
        pending::<()>().await;
    };
    tokio::select! {
        () = serve(listener, engine.clone()) => {}
        () = until_configured => {}
    }
}

/// Whether this host has an address.
pub fn is_of_host(address: IpAddr) -> bool {
    let bound = std::net::UdpSocket::bind((address, 0));
    !bound.is_err_and(|e| e.kind() == io::ErrorKind::AddrNotAvailable)
}

/// Serves until the daemon ends.
pub async fn serve(listener: TcpListener, engine: Handle) {
    let app = router(engine);
    connection::serve(listener, LIMITS, |_, _| app.clone(), pending()).await;
}

fn router(engine: Handle) -> Router {
    Router::new()
        .route("/", get(landing))
        .route("/metrics", get(metrics))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .layer(middleware::from_fn(read_body))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(Verifying(Arc::new(Semaphore::new(1)))))
        .with_state(engine)
}

async fn read_body(request: Request, next: Next) -> Response {
    match body::read(request, MAX_BODY).await {
        Ok((request, _)) => next.run(request).await,
        Err((status, text)) => (status, text + "\n").into_response(),
    }
}

async fn landing() -> Html<&'static str> {
    Html(
        "<!DOCTYPE html><html \
         lang=\"en\"><head><title>rto-agent</title></head><body><h1>rto-agent</h1><p>Per-CIDR TCP \
         retransmission timers.</p><ul><li><a href=\"/metrics\">metrics</a></li><li><a \
         href=\"/healthz\">healthz</a>: whether the daemon answers</li><li><a \
         href=\"/readyz\">readyz</a>: whether the program is attached and the kernel's maps match \
         the desired state</li></ul></body></html>",
    )
}

async fn metrics(State(engine): State<Handle>) -> Response {
    let snapshot = engine.snapshot();
    let rendered = spawn_blocking(move || {
        // The status reports why statistics cannot be read.
        let stats = snapshot.stats().unwrap_or_default();
        let status = status::status(&snapshot);
        let runs = status.attachment.program_id.and_then(bpf::runs);
        render(Scrape {
            status: &status,
            stats: &stats,
            tuned: &snapshot.tune(),
            runs,
            in_detail: snapshot.agent().metrics_detail,
        })
    });
    match rendered.await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Ok(Err(e)) => failed(&e),
        Err(e) => failed(&e),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

async fn alive() -> &'static str {
    "alive\n"
}

/// Only one client at a time can have the kernel's maps compared with the desired state.
#[derive(Clone)]
struct Verifying(Arc<Semaphore>);

/// Ready means: attached, and the kernel's maps equal the desired state.
async fn ready(
    State(engine): State<Handle>,
    Extension(verifying): Extension<Verifying>,
) -> Response {
    match tokio::time::timeout(VERIFY, readiness(&engine, &verifying)).await {
        Ok(Readiness::Ready) => "ready\n".into_response(),
        Ok(Readiness::Unready(problems)) => unready(problems.join("\n")),
        Ok(Readiness::Differs) => unready("the kernel's maps are being compared".to_owned()),
        Err(_) => unready(format!("no answer within {} s", VERIFY.as_secs())),
    }
}

async fn readiness(engine: &Handle, verifying: &Verifying) -> Readiness {
    // The semaphore is never closed. If the client disconnects, the permit stays with the thread
    // that still compares.
    let turn = verifying.0.clone().acquire_owned().await.ok();
    let snapshot = engine.snapshot();
    let comparing = spawn_blocking(move || (snapshot.readiness(), turn));
    let readiness = match comparing.await {
        Ok((Readiness::Differs, _turn)) => {
            // The engine records the result too, and then reports it.
            let verified = engine.call(Message::Verify).await;
            verified.map(|found| match engine.snapshot().known_readiness() {
                Readiness::Ready if !found.differences.is_empty() => {
                    let text = format!("the kernel's maps were repaired: {}", found.differences);
                    Readiness::Unready(vec![text])
                }
                readiness => readiness,
            })
        }
        Ok((readiness, _turn)) => Ok(readiness),
        Err(_) => Err(EngineError::Stopping),
    };
    readiness.unwrap_or_else(|e| Readiness::Unready(vec![e.to_string()]))
}

fn unready(why: String) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;

    /// The next report of a problem.
    fn problem(messages: &std::sync::mpsc::Receiver<Message>) -> Option<String> {
        match messages.recv_timeout(Duration::from_secs(30)) {
            Ok(Message::Metrics(problem)) => problem,
            _ => panic!("no report"),
        }
    }

    #[test]
    fn taken_port_is_reported_and_tried_again() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let (engine, messages) = Handle::disconnected(&EngineConfig::for_tests());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async { serve_at(address, listen(address), engine).await });
        });
        let text = problem(&messages).unwrap();
        assert!(
            text.contains(&format!("cannot listen on {address}")),
            "{text}"
        );
        drop(taken);
        while problem(&messages).is_some() {}
        std::net::TcpStream::connect(address).unwrap();
    }

    #[test]
    fn address_that_host_lacks_is_bound() {
        // TEST-NET-1 (RFC 5737) and the documentation prefix (RFC 3849).
        for address in ["192.0.2.1:9464", "[2001:db8::1]:9464"] {
            let address: SocketAddr = address.parse().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async { listen(address) }).unwrap();
            assert!(!is_of_host(address.ip()));
        }
    }
}
