//! The daemon's side: routes to the engine's handle.

use std::{convert::Infallible, io, net::IpAddr, os::fd::AsFd as _, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{
        DefaultBodyLimit, FromRequest, Query, Request, State,
        rejection::{JsonRejection, QueryRejection},
    },
    http::{Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use rto_agent_core::{
    policy::{Cidr, PolicyName},
    wire::{
        events::StreamItem,
        kernel::Verdict,
        tune::{TuneAction, TuneRequest},
        types::{AddRequest, Caller, ErrorAnswer, RemoveRequest},
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore, broadcast::error::RecvError, mpsc, oneshot},
    task::spawn_blocking,
    time::{Instant, timeout_at},
};
use tracing::warn;

use super::{
    MAX_BODY, body,
    connection::{self, Lasting, Limits},
    peer::{Allowed, Peer, peer_of},
    socket::RebindingListener,
};
use crate::engine::{
    EngineError, Handle, Message, Reply, Snapshot, discover, listing,
    memory::{self, Need},
    status,
};

/// The daemon has at least 1,024 descriptors, and needs them for its maps: connections take half.
pub const LIMITS: Limits = Limits {
    connections: 512,
    for_root: 128,
    per_address: 0,
    head_timeout: Duration::from_secs(5),
    // Longer than the CLI waits for an answer.
    lifetime: Duration::from_secs(180),
};
/// From this length, bytes, the number of concurrent bodies is limited.
pub const LARGE: usize = 64 << 10;
/// Concurrent large bodies of root, and of all other users: with [`MAX_BODY`], this bounds their
/// memory.
pub const LARGE_AT_ONCE: usize = 2;
/// Concurrent watchers of root, and of all other users: their connections have no deadline.
pub const WATCHES_AT_ONCE: usize = 64;

/// After this time without a wanted event, a watcher gets an empty line. hyper notices only by a
/// write that a client has gone that sent bytes behind its request.
const EMPTY_LINE: Duration = Duration::from_secs(60);

/// Concurrent lists of root, and of all other users. With a million entries, each takes a second of
/// processor time, and up to 24 MB for the hit counters.
pub const LISTS_AT_ONCE: usize = 2;
/// How long sending a list may take, as others wait for it.
pub const LIST_TIME: Duration = Duration::from_secs(30);

/// Serves until `stop` resolves.
pub async fn serve(
    listener: RebindingListener,
    engine: Handle,
    allowed: Allowed,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let routes = router(engine);
    let app = |stream: &UnixStream, lasting| {
        let peer = peer_of(stream.as_fd());
        let peer = peer.inspect_err(|e| warn!("a client's credentials cannot be read: {e}"));
        for_peer(routes.clone(), peer.ok(), allowed, lasting)
    };
    connection::serve(listener, LIMITS, app, stop).await;
}

/// The routes as served to one peer, without a socket; `None` is a peer with unreadable
/// credentials.
pub fn routes_for(peer: Option<Peer>, engine: Handle, allowed: Allowed) -> Router {
    for_peer(router(engine), peer, allowed, Lasting::default())
}

/// The socket's mode already excludes other users; this check holds even if the mode was changed.
fn for_peer(routes: Router, peer: Option<Peer>, allowed: Allowed, lasting: Lasting) -> Router {
    let text = match peer {
        Some(peer) if allowed.permits(&peer) => {
            return routes
                .layer(Extension(peer.caller))
                .layer(Extension(lasting));
        }
        Some(Peer { caller, .. }) => {
            warn!(audit = true, %caller, "connection refused: the client is neither root nor in the \
                                          socket's group");
            format!("{caller} is neither root nor in the group set in [agent] group")
        }
        None => "the credentials of this client cannot be read".to_owned(),
    };
    Router::new().fallback(async |request| {
        body::discard(request, MAX_BODY).await;
        Refusal(StatusCode::FORBIDDEN, text)
    })
}

fn router(engine: Handle) -> Router {
    let add = request(|LargeJson(request): LargeJson<AddRequest>, caller, reply| {
        Message::Add(Box::new(request), caller, reply)
    });
    let remove = request(
        |LargeJson(request): LargeJson<RemoveRequest>, caller, reply| {
            Message::Remove(request, caller, reply)
        },
    );
    let reload =
        request(|OptionalJson(request), caller, reply| Message::Reload(request, caller, reply));
    let detach =
        request(|OptionalJson(request), caller, reply| Message::Detach(request, caller, reply));
    let apply =
        request(|OptionalJson(request), caller, reply| Message::Apply(request, caller, reply));
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/stats", get(stats))
        .route("/v1/events", get(events))
        .route("/v1/entries", add.get(list))
        .route("/v1/entries/remove", remove)
        .route("/v1/lookup", get(lookup))
        .route("/v1/discover", get(discover))
        .route("/v1/reload", reload)
        .route("/v1/verify", post(verify))
        .route("/v1/detach", detach)
        .route("/v1/attach", post(attach))
        .route("/v1/tune", get(tuned))
        .route("/v1/tune/freeze", tune(TuneAction::Freeze))
        .route("/v1/tune/resume", tune(TuneAction::Resume))
        .route("/v1/tune/reset", tune(TuneAction::Reset))
        .route("/v1/apply", apply.get(walk))
        .route("/v1/probe", post(probed))
        .fallback(|| async {
            let text = "no such route; see docs/reference/api.md";
            Refusal::new(StatusCode::NOT_FOUND, text)
        })
        .method_not_allowed_fallback(|| async { wrong_method() })
        .layer(Extension(Lists(Turns::new(LISTS_AT_ONCE))))
        .layer(Extension(Watches(Turns::new(WATCHES_AT_ONCE))))
        .layer(middleware::from_fn_with_state(
            Turns::new(LARGE_AT_ONCE),
            read_body,
        ))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(engine)
}

/// An error answer.
#[derive(Debug)]
struct Refusal(StatusCode, String);

/// A handler's result.
type Answer = Result<Response, Refusal>;

impl Refusal {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self(status, text.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(ErrorAnswer { error: self.1 })).into_response()
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        let status = match &error {
            error if error.is_interrupted() => StatusCode::SERVICE_UNAVAILABLE,
            EngineError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            error if error.is_refusal() => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl From<JsonRejection> for Refusal {
    fn from(error: JsonRejection) -> Self {
        Self(error.status(), error.body_text())
    }
}

impl From<QueryRejection> for Refusal {
    fn from(error: QueryRejection) -> Self {
        Self(error.status(), error.body_text())
    }
}

/// Refuses a parameter that cannot be parsed.
fn bad(error: impl ToString) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, error.to_string())
}

fn wrong_method() -> Refusal {
    let text = "this path does not support this method; see docs/reference/api.md";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text)
}

fn json(value: impl Serialize) -> Answer {
    Ok(Json(value).into_response())
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

/// Reads the body before any route answers. Large requests wait for a slot.
async fn read_body(
    State(large): State<Turns>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Answer {
    let length = body::declared_length(&request);
    let _slot = match length {
        Some(..=LARGE) => None,
        Some(length) if length > MAX_BODY => None,
        _ => large.next(caller).await,
    };
    if let Some(length) = length.filter(|length| *length <= MAX_BODY)
        && let Err(e) = memory::check(&Need::of_body(length))
    {
        body::discard(request, MAX_BODY).await;
        return Err(e.into());
    }
    let (request, read) = body::read(request, MAX_BODY)
        .await
        .map_err(|(status, text)| Refusal(status, text))?;
    // The length of a chunked body is known now: parsing it takes several times as much memory.
    if length.is_none() {
        memory::check(&Need::of_body(read))?;
    }
    Ok(next.run(request).await)
}

/// Reads a snapshot, and the kernel through it, on a thread that may block.
async fn read<T: Send + 'static>(
    snapshot: Arc<Snapshot>,
    read: impl FnOnce(&Snapshot) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let reading = spawn_blocking(move || read(&snapshot));
    reading.await.unwrap_or(Err(EngineError::Stopping))
}

async fn status(State(engine): State<Handle>) -> Answer {
    json(read(engine.snapshot(), |snapshot| Ok(status::status(snapshot))).await?)
}

async fn stats(State(engine): State<Handle>) -> Answer {
    json(&*read(engine.snapshot(), |snapshot| Ok(snapshot.stats()?)).await?)
}

async fn walk(State(engine): State<Handle>) -> Answer {
    json(&*engine.snapshot().walk())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    policy: Option<PolicyName>,
    /// Separated by commas.
    #[serde(default)]
    cidr: String,
}

/// Notifies the engine when the client is gone.
struct Watching(
    Handle,
    #[expect(dead_code, reason = "released when dropped")] OwnedSemaphorePermit,
);

impl Drop for Watching {
    fn drop(&mut self) {
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
) -> Answer {
    if method == Method::HEAD {
        return Err(wrong_method());
    }
    let Query(query) = query?;
    let policy = query.policy;
    let texts = query.cidr.split(',').filter(|text| !text.is_empty());
    let cidrs: Result<Vec<Cidr>, _> = texts.map(str::parse).collect();
    let cidrs = cidrs.map_err(bad)?;
    let Ok(turn) = turns.of(caller).try_acquire_owned() else {
        let text =
            format!("{WATCHES_AT_ONCE} clients watch already, the limit; stop one of them first");
        return Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, text));
    };
    let wanted = policy.clone();
    let lines = engine.call(|reply| Message::Watch(wanted, reply)).await?;
    lasting.set();
    let state = (lines, Watching(engine, turn), policy, cidrs);
    let stream = futures_util::stream::unfold(state, |mut state| async {
        let (lines, _, policy, cidrs) = &mut state;
        // A verdict and a timer have no peer address.
        let is_of = |name: &PolicyName| {
            cidrs.is_empty() && policy.as_ref().is_none_or(|policy| policy == name)
        };
        let end = Instant::now() + EMPTY_LINE;
        let text = loop {
            let line = match timeout_at(end, lines.recv()).await {
                Err(_) => break "\n".to_owned(),
                Ok(Ok(line)) => line,
                Ok(Err(RecvError::Lagged(lost))) => Arc::new(StreamItem::Lost { lost }),
                Ok(Err(RecvError::Closed)) => return None,
            };
            let wanted = match &*line {
                StreamItem::Event(event) => event.matches(policy.as_ref(), cidrs),
                StreamItem::Verdict(event) => is_of(&event.policy),
                StreamItem::Tuned(tuned) => is_of(&tuned.policy),
                StreamItem::Lost { .. } => true,
            };
            if wanted && let Ok(mut text) = serde_json::to_string(&*line) {
                text.push('\n');
                break text;
            }
        };
        Some((Ok::<_, Infallible>(text), state))
    });
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// Built on a blocking thread, and sent while it is built.
async fn list(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Answer {
    /// Pieces that are buffered for a slow reader.
    const WAITING: usize = 4;

    let turn = turns.next(caller).await;
    let snapshot = engine.started().await?;
    let (counted, hits) = oneshot::channel();
    let (pieces, rest) = mpsc::channel::<io::Result<Bytes>>(WAITING);
    let runtime = tokio::runtime::Handle::current();
    spawn_blocking(move || {
        // Released when the list is sent, its reader is gone, or its time is over.
        let _turn = turn;
        let hits = match listing::hits(&snapshot) {
            Ok(hits) => hits,
            Err(e) => return drop(counted.send(Err(e))),
        };
        drop(counted.send(Ok(())));
        let end = Instant::now() + LIST_TIME;
        let send = |piece| runtime.block_on(timeout_at(end, pieces.send(piece)));
        let mut is_slow = false;
        let sent = listing::list(&snapshot, &hits, |piece| {
            let sent = send(Ok(piece.into()));
            is_slow |= sent.is_err();
            matches!(sent, Ok(Ok(())))
        });
        let cut = match sent {
            Ok(()) if !is_slow => return,
            Ok(()) => "a client read its list too slowly and was disconnected".to_owned(),
            Err(e) => format!("a list could not be sent to a client: {e}"),
        };
        warn!("{cut}");
        // An error, so that the client does not take a part for the whole list.
        drop(hits);
        runtime.spawn(async move { pieces.send(Err(io::Error::other(cut))).await });
    });
    hits.await.unwrap_or(Err(EngineError::Stopping))?;
    let stream = futures_util::stream::unfold(rest, async |mut rest| {
        let piece = rest.recv().await?;
        Some((piece, rest))
    });
    let headers = [(header::CONTENT_TYPE, "application/json")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// JSON that may be large: half a million CIDRs take a tenth of a second, during which this thread
/// would serve no other client.
struct LargeJson<T>(T);

impl<S: Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for LargeJson<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Refusal> {
        let runtime = tokio::runtime::Handle::current();
        let read = move || runtime.block_on(Json::<T>::from_request(request, &()));
        let Json(value) = spawn_blocking(read)
            .await
            .map_err(|_| EngineError::Stopping)??;
        Ok(Self(value))
    }
}

/// JSON without required fields: older clients send nothing, or null.
struct OptionalJson<T>(T);

impl<S: Sync, T: DeserializeOwned + Default> FromRequest<S> for OptionalJson<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Refusal> {
        let bad = |text| Refusal(StatusCode::BAD_REQUEST, text);
        let body = Bytes::from_request(request, &()).await;
        let body = body.map_err(|e| Refusal(e.status(), e.body_text()))?;
        let value = match &body[..] {
            [] => None,
            text => serde_json::from_slice::<Option<T>>(text).map_err(|e| bad(e.to_string()))?,
        };
        Ok(Self(value.unwrap_or_default()))
    }
}

/// `POST` of a body that is passed to the engine.
fn request<B, T>(
    message: impl Fn(B, Caller, Reply<T>) -> Message + Clone + Send + Sync + 'static,
) -> MethodRouter<Handle>
where
    B: FromRequest<Handle, Rejection = Refusal> + Send + 'static,
    T: Serialize + Send + 'static,
{
    post(
        async move |State(engine): State<Handle>, Extension(caller): Extension<Caller>, body: B| {
            json(engine.call(|reply| message(body, caller, reply)).await?)
        },
    )
}

/// `POST /v1/tune/freeze`, `resume` and `reset`.
fn tune(action: TuneAction) -> MethodRouter<Handle> {
    request(move |LargeJson(TuneRequest { policy }), caller, reply| {
        Message::Tune(action, policy, caller, reply)
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TuneQuery {
    policy: Option<PolicyName>,
}

async fn tuned(
    State(engine): State<Handle>,
    query: Result<Query<TuneQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    let tuned = engine.started().await?.tune();
    let Some(policy) = query.policy else {
        return json(&*tuned);
    };
    let only = tuned.only(&policy);
    if only.policies.is_empty() {
        let text = format!("policy {policy} learns no value, and has no guard and no holdout");
        return Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, text));
    }
    json(only)
}

#[derive(Deserialize)]
struct LookupQuery {
    address: String,
}

async fn lookup(
    State(engine): State<Handle>,
    query: Result<Query<LookupQuery>, QueryRejection>,
) -> Answer {
    let Query(LookupQuery { address }) = query?;
    let Ok(address) = address.parse::<IpAddr>() else {
        let text =
            format!("{address:?} is not an IPv4 or IPv6 address (host names are not resolved)");
        return Err(Refusal(StatusCode::BAD_REQUEST, text));
    };
    let snapshot = engine.started().await?;
    json(read(snapshot, move |s| listing::lookup(s, address)).await?)
}

/// Reads on a blocking thread, with a slot for lists: there may be several thousand prefixes.
async fn discover(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Answer {
    let turn = turns.next(caller).await;
    let snapshot = engine.started().await?;
    let answered = read(snapshot, move |snapshot| {
        let _turn = turn;
        Ok(json(discover::discovered(snapshot)?))
    });
    answered.await?
}

/// Compares on a blocking thread, with a slot for lists; the engine repairs differences.
async fn verify(
    State(engine): State<Handle>,
    Extension(Lists(turns)): Extension<Lists>,
    Extension(caller): Extension<Caller>,
) -> Answer {
    let turn = turns.next(caller).await;
    let snapshot = engine.started().await?;
    let compared = read(snapshot, move |snapshot| Ok((snapshot.verify(), turn)));
    let (found, _turn) = compared.await?;
    if let Some(answer) = &found
        && answer.ok
    {
        return json(answer);
    }
    let mut answer = engine.call(Message::Verify).await?;
    // Another client's request has repaired the differences in between.
    if let Some(found) = found
        && answer.ok
        && !(found.differences.is_empty() && found.problems.is_empty())
    {
        answer = found;
        (answer.ok, answer.repaired) = (false, true);
    }
    json(answer)
}

async fn attach(State(engine): State<Handle>, Extension(caller): Extension<Caller>) -> Answer {
    json(engine.call(|reply| Message::Attach(caller, reply)).await?)
}

/// A verdict is shown to all users as a fact: only root may report one.
async fn probed(
    State(engine): State<Handle>,
    Extension(caller): Extension<Caller>,
    LargeJson(verdict): LargeJson<Verdict>,
) -> Answer {
    if caller.uid != 0 {
        let text = "only root may report a probe";
        return Err(Refusal::new(StatusCode::FORBIDDEN, text));
    }
    let message = |reply| Message::Probed(verdict, caller, reply);
    json(engine.call(message).await?)
}

#[cfg(test)]
mod tests;
