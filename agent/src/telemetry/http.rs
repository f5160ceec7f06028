//! The metrics endpoint: read-only, without secrets, and for whoever can reach it.

use std::{io, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{Html, IntoResponse as _, Response},
    routing::get,
};
use tokio::net::TcpListener;

use super::metrics::{CONTENT_TYPE, render};
use crate::{
    api::{
        body,
        limit::{Limited, Limits},
        socket::RebindingListener,
    },
    engine::{Handle, Message},
    kernel::bpf,
};

/// How long a scrape waits for fresh counters before it takes the last ones.
const FRESH: Duration = Duration::from_millis(200);
/// How long readiness waits for the kernel's maps to be compared.
const VERIFY: Duration = Duration::from_secs(5);

/// For strangers: a few collectors and a person. The daemon's descriptors are for its maps.
const LIMITS: Limits = Limits {
    connections: 16,
    idle_timeout: Duration::from_secs(30),
    lifetime: Duration::from_secs(30),
};
/// Nobody has anything to say in one.
const MAX_BODY: usize = 4 << 10;

/// Where it listens.
#[derive(Debug)]
pub enum Listener {
    /// An address and port.
    Tcp(TcpListener),
    /// A socket in the file system.
    Unix(RebindingListener),
}

/// Serves until the listener breaks.
///
/// # Errors
///
/// The listener's.
pub async fn serve(listener: Listener, engine: Handle) -> io::Result<()> {
    let app = router(engine);
    match listener {
        Listener::Tcp(listener) => axum::serve(Limited::new(listener, LIMITS), app).await,
        Listener::Unix(listener) => axum::serve(Limited::new(listener, LIMITS), app).await,
    }
}

fn router(engine: Handle) -> Router {
    Router::new()
        .route("/", get(landing))
        .route("/metrics", get(metrics))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .layer(middleware::from_fn(read_body))
        .with_state(engine)
}

async fn read_body(request: Request, next: Next) -> Response {
    match body::read(request, MAX_BODY).await {
        Ok(request) => next.run(request).await,
        Err(e) => (e.status(), e.text(MAX_BODY) + "\n").into_response(),
    }
}

async fn landing() -> Html<&'static str> {
    Html(
        "<!DOCTYPE html><html lang=\"en\"><head><title>rto-agent</title></head><body>\
         <h1>rto-agent</h1><p>Per-CIDR TCP retransmission timers.</p><ul>\
         <li><a href=\"/metrics\">metrics</a></li>\
         <li><a href=\"/healthz\">healthz</a>: the daemon answers</li>\
         <li><a href=\"/readyz\">readyz</a>: attached, and the kernel's maps are as they should be</li>\
         </ul></body></html>",
    )
}

async fn metrics(State(engine): State<Handle>) -> Response {
    // Under a long map write the engine is busy: counters a few seconds old beat none.
    let _stopping = engine.refresh(FRESH).await;
    let status = engine.status();
    let runs = status.attachment.program_id.and_then(bpf::runs);
    match render(&status, &engine.stats(), runs) {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

async fn alive() -> &'static str {
    "alive\n"
}

/// Attached and in step, by the kernel's own word.
async fn ready(State(engine): State<Handle>) -> Response {
    match tokio::time::timeout(VERIFY, engine.ask(Message::Verify)).await {
        Ok(Ok(problems)) if problems.is_empty() => "ready\n".into_response(),
        Ok(Ok(problems)) => unready(problems.join("\n")),
        Ok(Err(e)) => unready(e.to_string()),
        Err(_) => unready(format!("no answer within {} s", VERIFY.as_secs())),
    }
}

fn unready(why: String) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response()
}
