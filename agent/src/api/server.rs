//! The daemon's side: routes to the engine's handle.

use std::{
    io,
    net::IpAddr,
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{
        ConnectInfo, DefaultBodyLimit, FromRequest, Query, Request, State,
        rejection::{JsonRejection, QueryRejection},
    },
    http::{Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, broadcast::error::RecvError, mpsc, oneshot},
    time::{Instant, timeout_at},
};
use tracing::warn;

use super::{
    MAX_BODY, body, connection, experiments,
    limit::{Limited, Limits, TimedIo},
    peer::{Allowed, Peer, peer_of},
    socket::RebindingListener,
    stream::SharedStream,
    tune,
};
use crate::{
    engine::{
        EngineError, Handle, Message, Reply, Snapshot,
        memory::{self, Need},
    },
    kernel::interference::Verdict,
    policy::{Cidr, PolicyName},
    wire::{
        events::StreamItem,
        tune::TuneAction,
        types::{
            AddRequest, ApplyRequest, Caller, DetachRequest, ErrorAnswer, ReloadRequest,
            RemoveRequest,
        },
    },
};

/// The daemon has at least 1,024 descriptors, and needs them for its maps: connections take half.
pub(crate) const LIMITS: Limits = Limits {
    connections: 512,
    for_root: 128,
    idle_timeout: Duration::from_secs(5),
    // Longer than the CLI waits for an answer.
    lifetime: Duration::from_secs(180),
};
/// From this length, bytes, the number of concurrent bodies is limited.
pub(crate) const LARGE: usize = 64 << 10;
/// Concurrent large bodies of root, and of all other users: with [`MAX_BODY`], this bounds their
/// memory.
pub(crate) const LARGE_AT_ONCE: usize = 2;
/// Concurrent watchers of root, and of all other users: their connections have no deadline.
pub(crate) const WATCHES_AT_ONCE: usize = 64;

/// Concurrent lists of root, and of all other users. With a million entries, each takes a second of
/// processor time, and up to 24 MB for the hit counters.
pub(crate) const LISTS_AT_ONCE: usize = 2;
/// How long sending a list may take, as others wait for it.
pub(crate) const LIST_TIME: Duration = Duration::from_secs(30);

/// Serves until `stop` resolves.
///
/// # Errors
///
/// If the listener breaks.
pub async fn serve(
    listener: RebindingListener,
    engine: Handle,
    allowed: Allowed,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let info = |io: &TimedIo<SharedStream>| ConnectInfo(PeerInfo::of(io));
    let listener = Limited::new(listener, LIMITS);
    connection::serve(listener, router(engine, allowed), info, stop).await
}

/// The routes as served to one peer, without a socket; `None` is a peer with unreadable
/// credentials.
pub fn routes_for(peer: Option<Peer>, engine: Handle, allowed: Allowed) -> Router {
    let lasting = Lasting(Arc::default());
    router(engine, allowed).layer(Extension(ConnectInfo(PeerInfo { peer, lasting })))
}

fn router(engine: Handle, allowed: Allowed) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/stats", get(stats))
        .route("/v1/events", get(events))
        .route("/v1/entries", get(list).post(add))
        .route("/v1/entries/remove", post(remove))
        .route("/v1/lookup", get(lookup))
        .route("/v1/discover", get(discover))
        .route("/v1/reload", post(reload))
        .route("/v1/verify", post(verify))
        .route("/v1/detach", post(detach))
        .route("/v1/attach", post(attach))
        .route("/v1/experiments", get(experiments::show))
        .route("/v1/experiments/{policy}", post(experiments::start))
        .route(
            "/v1/experiments/{policy}/stop",
            experiments::on(Message::StopExperiment),
        )
        .route(
            "/v1/experiments/{policy}/clear",
            experiments::on(Message::ClearExperiment),
        )
        .route("/v1/tune", get(tune::show))
        .route("/v1/tune/freeze", tune::on(TuneAction::Freeze))
        .route("/v1/tune/resume", tune::on(TuneAction::Resume))
        .route("/v1/tune/reset", tune::on(TuneAction::Reset))
        .route("/v1/apply", get(walk).post(apply))
        .route("/v1/probe", post(probed))
        .fallback(|| async {
            answer(
                StatusCode::NOT_FOUND,
                "no such route; see docs/reference/api.md",
            )
        })
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(Lists(Turns::new(LISTS_AT_ONCE))))
        .layer(Extension(Watches(Turns::new(WATCHES_AT_ONCE))))
        .layer(middleware::from_fn_with_state(
            Turns::new(LARGE_AT_ONCE),
            read_body,
        ))
        .layer(middleware::from_fn_with_state(allowed, check_peer))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(engine)
}

async fn wrong_method() -> Response {
    let text = "this path does not support this method; see docs/reference/api.md";
    answer(StatusCode::METHOD_NOT_ALLOWED, text)
}

/// Slots for a scarce resource: `count` for root, and `count` for all other users together.
#[derive(Clone)]
struct Turns([Arc<Semaphore>; 2]);

impl Turns {
    fn new(count: usize) -> Self {
        Self([count; 2].map(|count| Arc::new(Semaphore::new(count))))
    }

    /// The slots that a caller shares.
    fn of(&self, caller: Caller) -> Arc<Semaphore> {
        self.0[usize::from(caller.uid != 0)].clone()
    }

    /// Waits for a slot; `None` only if the semaphore is closed, which never happens.
    async fn next(&self, caller: Caller) -> Option<OwnedSemaphorePermit> {
        self.of(caller).acquire_owned().await.ok()
    }
}

#[derive(Clone)]
struct Lists(Turns);
#[derive(Clone)]
struct Watches(Turns);

#[derive(Clone)]
struct PeerInfo {
    peer: Option<Peer>,
    lasting: Lasting,
}

/// See [`super::limit::TimedIo::no_deadline`].
#[derive(Clone)]
struct Lasting(Arc<AtomicBool>);

impl PeerInfo {
    fn of(connection: &TimedIo<SharedStream>) -> Self {
        let peer = peer_of(connection.io().as_fd());
        Self {
            peer: peer
                .inspect_err(|e| warn!("a client's credentials cannot be read: {e}"))
                .ok(),
            lasting: Lasting(connection.no_deadline()),
        }
    }
}

/// Reads the body before any route answers. Large requests wait for a slot.
async fn read_body(
    State(large): State<Turns>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    let length = body::told_length(&request);
    let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
    let _slot = if chunked || length.is_some_and(|length| (LARGE + 1..=MAX_BODY).contains(&length))
    {
        large.next(caller).await
    } else {
        None
    };
    if let Some(length) = length.filter(|length| *length <= MAX_BODY)
        && let Err(e) = memory::check(&Need::of_body(length))
    {
        body::discard(request, MAX_BODY).await;
        return error(&e);
    }
    let (request, read) = match body::read(request, MAX_BODY).await {
        Ok(read) => read,
        Err(e) => return answer(e.status(), &e.text(MAX_BODY)),
    };
    // The length of a chunked body is known now: parsing it takes several times as much memory.
    if length.is_none()
        && let Err(e) = memory::check(&Need::of_body(read))
    {
        return error(&e);
    }
    next.run(request).await
}

/// The socket's mode already excludes other users; this check holds even if the mode was changed.
async fn check_peer(
    State(allowed): State<Allowed>,
    ConnectInfo(PeerInfo { peer, lasting }): ConnectInfo<PeerInfo>,
    mut request: Request,
    next: Next,
) -> Response {
    match peer {
        Some(peer) if allowed.permits(&peer) => {
            request.extensions_mut().insert(peer.caller);
            request.extensions_mut().insert(lasting);
            next.run(request).await
        }
        Some(peer) => {
            let caller = peer.caller;
            body::discard(request, MAX_BODY).await;
            warn!(audit = true, %caller, "request refused: the client is neither root nor in the \
                                          socket's group");
            let text = format!("{caller} is neither root nor in the group set in [agent] group");
            answer(StatusCode::FORBIDDEN, &text)
        }
        None => {
            body::discard(request, MAX_BODY).await;
            answer(
                StatusCode::FORBIDDEN,
                "the credentials of this client cannot be read",
            )
        }
    }
}

async fn status(State(engine): State<Handle>) -> Response {
    let status = read(engine.snapshot(), |snapshot| Ok(snapshot.status()));
    respond(status.await)
}

async fn stats(State(engine): State<Handle>) -> Response {
    let stats = read(engine.snapshot(), |snapshot| Ok(snapshot.stats()?));
    match stats.await {
        Ok(stats) => Json(&*stats).into_response(),
        Err(e) => error(&e),
    }
}

/// Reads a snapshot, and the kernel through it, on a thread that may block.
pub(super) async fn read<T: Send + 'static>(
    snapshot: Arc<Snapshot>,
    read: impl FnOnce(&Snapshot) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let reading = tokio::task::spawn_blocking(move || read(&snapshot));
    reading.await.unwrap_or(Err(EngineError::Stopping))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    #[serde(default)]
    policy: Option<String>,
    /// Separated by commas.
    #[serde(default)]
    cidr: Option<String>,
}

/// Suspends the connection's deadline while a client watches; notifies the engine when the client
/// is gone.
struct Watching(
    Handle,
    Lasting,
    #[expect(dead_code, reason = "released when dropped")] OwnedSemaphorePermit,
);

impl Drop for Watching {
    fn drop(&mut self) {
        self.1.0.store(false, Ordering::Relaxed);
        self.0.notify(Message::Unwatched);
    }
}

/// A stream of lines, until the client disconnects or the daemon ends.
async fn events(
    method: Method,
    State(engine): State<Handle>,
    Extension(lasting): Extension<Lasting>,
    Extension(Watches(turns)): Extension<Watches>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Response {
    if method == Method::HEAD {
        return wrong_method().await;
    }
    let query = match query {
        Ok(Query(query)) => query,
        Err(e) => return answer(e.status(), &e.body_text()),
    };
    let policy = match query.policy.as_deref().map(str::parse::<PolicyName>) {
        None => None,
        Some(Ok(policy)) => Some(policy),
        Some(Err(e)) => return answer(StatusCode::BAD_REQUEST, &e.to_string()),
    };
    let texts = query.cidr.as_deref().unwrap_or_default().split(',');
    let cidrs: Result<Vec<Cidr>, _> = texts.filter(|t| !t.is_empty()).map(str::parse).collect();
    let cidrs = match cidrs {
        Ok(cidrs) => cidrs,
        Err(e) => return answer(StatusCode::BAD_REQUEST, &e.to_string()),
    };
    let Ok(turn) = turns.of(caller).try_acquire_owned() else {
        let text = format!(
            "{WATCHES_AT_ONCE} clients watch already, the limit; stop one of them \
                            first"
        );
        return answer(StatusCode::UNPROCESSABLE_ENTITY, &text);
    };
    let asked = policy.clone();
    let lines = match engine.call(|reply| Message::Watch(asked, reply)).await {
        Ok(lines) => lines,
        Err(e) => return error(&e),
    };
    lasting.0.store(true, Ordering::Relaxed);
    let state = (lines, Watching(engine, lasting, turn), policy, cidrs);
    let stream = futures_util::stream::unfold(state, |mut state| async {
        let (lines, _, policy, cidrs) = &mut state;
        let text = loop {
            let line = match lines.recv().await {
                Ok(line) => line,
                Err(RecvError::Lagged(lost)) => Arc::new(StreamItem::Lost { lost }),
                Err(RecvError::Closed) => return None,
            };
            let wanted = match &*line {
                StreamItem::Event(event) => event.matches(policy.as_ref(), cidrs),
                // An experiment has no peer address.
                StreamItem::Experiment(event) => {
                    cidrs.is_empty() && policy.as_ref().is_none_or(|asked| *asked == event.policy)
                }
                StreamItem::Tuned(tuned) => {
                    cidrs.is_empty() && policy.as_ref().is_none_or(|asked| *asked == tuned.policy)
                }
                StreamItem::Lost { .. } => true,
            };
            if wanted && let Ok(mut text) = serde_json::to_string(&*line) {
                text.push('\n');
                break text;
            }
        };
        Some((Ok::<_, std::convert::Infallible>(text), state))
    });
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson")];
    (headers, Body::from_stream(stream)).into_response()
}

/// Built on a blocking thread, and sent while it is built.
async fn list(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Response {
    /// Pieces that are buffered for a slow reader.
    const WAITING: usize = 4;

    let turn = Arc::new(turns.next(caller).await);
    let snapshot = match engine.started().await {
        Ok(snapshot) => snapshot,
        Err(e) => return error(&e),
    };
    let (counted, hits) = oneshot::channel();
    let (pieces, rest) = mpsc::channel::<io::Result<Bytes>>(WAITING);
    let runtime = tokio::runtime::Handle::current();
    let telling = turn.clone();
    tokio::task::spawn_blocking(move || {
        let _telling = telling;
        let hits = match snapshot.hits() {
            Ok(hits) => hits,
            Err(e) => return drop(counted.send(Err(e))),
        };
        drop(counted.send(Ok(())));
        let end = Instant::now() + LIST_TIME;
        let send = |piece| runtime.block_on(timeout_at(end, pieces.send(piece)));
        let mut is_slow = false;
        let told = snapshot.list(&hits, |piece| {
            let sent = send(Ok(piece.into()));
            is_slow |= sent.is_err();
            matches!(sent, Ok(Ok(())))
        });
        let cut = match told {
            Ok(()) if !is_slow => return,
            Ok(()) => "a client read its list too slowly and was disconnected".to_owned(),
            Err(e) => format!("a list could not be sent to a client: {e}"),
        };
        warn!("{cut}");
        // An error, so that the client does not take a part for the whole list.
        drop(hits);
        runtime.spawn(async move { pieces.send(Err(io::Error::other(cut))).await });
    });
    match hits.await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return error(&e),
        Err(_) => return error(&EngineError::Stopping),
    }
    // The slot is released when the list is sent, or its reader is gone.
    let stream = futures_util::stream::unfold((rest, turn), |(mut rest, turn)| async {
        let piece = rest.recv().await?;
        Some((piece, (rest, turn)))
    });
    let headers = [(header::CONTENT_TYPE, "application/json")];
    (headers, Body::from_stream(stream)).into_response()
}

/// JSON that may be large: half a million CIDRs take a tenth of a second, during which this thread
/// would serve no other client.
struct LargeJson<T>(T);

impl<S: Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for LargeJson<T> {
    type Rejection = (StatusCode, String);

    async fn from_request(request: Request, _state: &S) -> Result<Self, Self::Rejection> {
        let runtime = tokio::runtime::Handle::current();
        let read = move || {
            let read = <Json<T> as FromRequest<()>>::from_request(request, &());
            runtime.block_on(read)
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(Ok(Json(value))) => Ok(Self(value)),
            Ok(Err(e)) => Err((e.status(), e.body_text())),
            Err(_) => {
                let stopping = EngineError::Stopping.to_string();
                Err((StatusCode::SERVICE_UNAVAILABLE, stopping))
            }
        }
    }
}

/// JSON without required fields: older clients send nothing, or null.
struct OptionalJson<T>(T);

/// The parsed body, or the status and text of the error answer.
type Read<T> = Result<T, (StatusCode, String)>;

/// Passes the parsed body to the engine.
async fn ask<B, T: Serialize>(
    engine: &Handle,
    body: Read<B>,
    message: impl FnOnce(B, Reply<T>) -> Message,
) -> Response {
    match body {
        Ok(body) => respond(engine.call(|reply| message(body, reply)).await),
        Err((status, text)) => answer(status, &text),
    }
}

impl<S: Sync, T: DeserializeOwned + Default> FromRequest<S> for OptionalJson<T> {
    type Rejection = (StatusCode, String);

    async fn from_request(request: Request, _state: &S) -> Result<Self, Self::Rejection> {
        let body = <Bytes as FromRequest<()>>::from_request(request, &()).await;
        let body = body.map_err(|e| (e.status(), e.body_text()))?;
        let value = match &body[..] {
            [] => Ok(None),
            text => serde_json::from_slice::<Option<T>>(text),
        };
        let value = value.map_err(|e| (StatusCode::BAD_REQUEST, e.to_string()))?;
        Ok(Self(value.unwrap_or_default()))
    }
}

async fn add(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Read<LargeJson<AddRequest>>,
) -> Response {
    ask(&engine, body, |LargeJson(request), reply| {
        Message::Add(Box::new(request), caller, reply)
    })
    .await
}

async fn remove(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Read<LargeJson<RemoveRequest>>,
) -> Response {
    ask(&engine, body, |LargeJson(request), reply| {
        Message::Remove(request, caller, reply)
    })
    .await
}

#[derive(Deserialize)]
struct LookupQuery {
    address: String,
}

async fn lookup(
    State(engine): State<Handle>,
    query: Result<Query<LookupQuery>, QueryRejection>,
) -> Response {
    let address = match query {
        Ok(Query(query)) => query.address,
        Err(e) => return answer(e.status(), &e.body_text()),
    };
    match address.parse::<IpAddr>() {
        Ok(address) => match engine.started().await {
            Ok(snapshot) => respond(read(snapshot, move |s| s.lookup(address)).await),
            Err(e) => error(&e),
        },
        Err(_) => answer(
            StatusCode::BAD_REQUEST,
            &format!("{address:?} is not an IPv4 or IPv6 address (host names are not resolved)"),
        ),
    }
}

/// Reads on a blocking thread, with a slot for lists: there may be several thousand prefixes.
async fn discover(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let turn = turns.next(caller).await;
    let snapshot = match engine.started().await {
        Ok(snapshot) => snapshot,
        Err(e) => return error(&e),
    };
    let answered = read(snapshot, move |snapshot| {
        let response = respond(snapshot.discovered());
        drop(turn);
        Ok(response)
    });
    answered.await.unwrap_or_else(|e| error(&e))
}

async fn reload(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Read<OptionalJson<ReloadRequest>>,
) -> Response {
    ask(&engine, body, |OptionalJson(request), reply| {
        Message::Reload(request, caller, reply)
    })
    .await
}

/// Compares on a blocking thread, with a slot for lists; the engine repairs differences.
async fn verify(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let turn = turns.next(caller).await;
    let snapshot = match engine.started().await {
        Ok(snapshot) => snapshot,
        Err(e) => return error(&e),
    };
    let compared = read(snapshot, move |snapshot| Ok((snapshot.verify(), turn)));
    let (found, _turn) = match compared.await {
        Ok((Some(answer), _)) if answer.ok => return Json(answer).into_response(),
        Ok((found, turn)) => (found, turn),
        Err(e) => return error(&e),
    };
    let mut answer = match engine.call(Message::Verify).await {
        Ok(answer) => answer,
        Err(e) => return error(&e),
    };
    // Another client's request has repaired the differences in between.
    if let Some(found) = found
        && answer.ok
        && !(found.differences.is_empty() && found.problems.is_empty())
    {
        answer = found;
        (answer.ok, answer.repaired) = (false, true);
    }
    Json(answer).into_response()
}

async fn detach(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Read<OptionalJson<DetachRequest>>,
) -> Response {
    ask(&engine, body, |OptionalJson(request), reply| {
        Message::Detach(request, caller, reply)
    })
    .await
}

async fn attach(State(engine): State<Handle>, Extension(caller): Extension<Caller>) -> Response {
    respond(engine.call(|reply| Message::Attach(caller, reply)).await)
}

async fn walk(State(engine): State<Handle>) -> Response {
    Json(&*engine.snapshot().walk()).into_response()
}

async fn apply(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Read<OptionalJson<ApplyRequest>>,
) -> Response {
    ask(&engine, body, |OptionalJson(request), reply| {
        Message::Apply(request, caller, reply)
    })
    .await
}

/// A verdict is shown to all users as a fact: only root may report one.
async fn probed(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    body: Result<Json<Verdict>, JsonRejection>,
) -> Response {
    match body {
        Ok(_) if caller.uid != 0 => answer(StatusCode::FORBIDDEN, "only root may report a probe"),
        Ok(Json(verdict)) => {
            let asked = engine.call(|reply| Message::Probed(verdict, caller, reply));
            respond(asked.await)
        }
        Err(e) => answer(e.status(), &e.body_text()),
    }
}

pub(super) fn respond<T: Serialize>(result: Result<T, EngineError>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(e) => error(&e),
    }
}

pub(super) fn error(error: &EngineError) -> Response {
    let status = match error {
        error if error.is_interrupted() => StatusCode::SERVICE_UNAVAILABLE,
        EngineError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
        error if error.is_refusal() => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    answer(status, &error.to_string())
}

pub(super) fn answer(status: StatusCode, text: &str) -> Response {
    (
        status,
        Json(ErrorAnswer {
            error: text.to_owned(),
        }),
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;
    use crate::{engine::EngineConfig, wire::types::ChangeAnswer};

    /// The first line of an answer.
    async fn answered(stream: &mut TcpStream) -> String {
        let mut line = [0; 12];
        let read = timeout(Duration::from_secs(20), stream.read_exact(&mut line)).await;
        read.expect("an answer").unwrap();
        String::from_utf8_lossy(&line[9..]).into_owned()
    }

    #[test]
    fn turns_of_others_leave_root_its_own() {
        let turns = Turns::new(LISTS_AT_ONCE);
        let next = |uid| turns.next(Caller { uid, pid: 1 }).now_or_never().flatten();
        let mut held: Vec<_> = (0..LISTS_AT_ONCE).map(|_| next(1000)).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(next(1001).is_none(), "all others share theirs");
        let of_root: Vec<_> = (0..LISTS_AT_ONCE).map(|_| next(0)).collect();
        assert!(of_root.iter().all(Option::is_some));
        held.pop();
        assert!(next(1001).is_some());
    }

    #[test]
    fn others_leave_root_its_bodies_and_watches() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let (engine, messages) = Handle::disconnected(&EngineConfig::for_tests());
        let (lines, _) = tokio::sync::broadcast::channel(1);
        std::thread::spawn(move || {
            for message in messages {
                match message {
                    Message::Reload(_, _, reply) => drop(reply.send(Ok(ChangeAnswer::default()))),
                    Message::Watch(_, reply) => drop(reply.send(Ok(lines.subscribe()))),
                    _ => {}
                }
            }
        });
        runtime.block_on(async {
            let routes = router(engine, Allowed { group: 7.into() });
            let mut addresses = Vec::new();
            for uid in [0, 1000] {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                addresses.push(listener.local_addr().unwrap());
                let peer = Some(Peer {
                    caller: Caller { uid, pid: 1 },
                    groups: vec![7],
                });
                let lasting = Lasting(Arc::default());
                let info = Extension(ConnectInfo(PeerInfo { peer, lasting }));
                let routes = routes.clone().layer(info);
                tokio::spawn(async { axum::serve(listener, routes).await });
            }
            let (root, other) = (addresses[0], addresses[1]);
            let ask = async |address, text: &str| {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(text.as_bytes()).await.unwrap();
                stream
            };
            let watch = "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n";
            let length = LARGE + 1;
            let reload = format!(
                "POST /v1/reload HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{{}}"
            );
            let mut held = Vec::new();
            for _ in 0..LARGE_AT_ONCE {
                held.push(ask(other, &reload).await);
            }
            for _ in 0..WATCHES_AT_ONCE {
                let mut stream = ask(other, watch).await;
                assert_eq!(answered(&mut stream).await, "200");
                held.push(stream);
            }
            assert_eq!(answered(&mut ask(other, watch).await).await, "422");
            assert_eq!(answered(&mut ask(root, watch).await).await, "200");
            let whole = reload + &" ".repeat(length - 2);
            assert_eq!(answered(&mut ask(root, &whole).await).await, "200");
            // The third request of other users waits.
            let mut third = ask(other, &whole).await;
            assert_eq!(answered(&mut ask(root, &whole).await).await, "200");
            assert!(third.try_read(&mut [0; 1]).is_err());
            drop(held);
            assert_eq!(answered(&mut third).await, "200");
        });
    }
}
