//! Bodies of requests. Each is read before its request is answered, even if no route needs it:
//! closing a connection with unread data causes an error at a client that still writes (EPIPE) or
//! reads (ECONNRESET).

use std::error::Error;

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{StatusCode, header},
};
use http_body_util::{BodyExt as _, LengthLimitError};

/// Why a body could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// It is longer than the limit. A body that declares such a length is not read.
    TooLong,
    /// It ended early, or is not valid HTTP.
    Broken,
}

impl BodyError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken => StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn text(self, limit: usize) -> String {
        match self {
            Self::TooLong => format!("a request has at most {limit} bytes"),
            Self::Broken => "the request's body ended early".to_owned(),
        }
    }
}

/// The length that the headers declare.
pub(crate) fn told_length(request: &Request) -> Option<usize> {
    let length = request.headers().get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Reads the body, and returns the request with it and its length, bytes.
pub(crate) async fn read(request: Request, limit: usize) -> Result<(Request, usize), BodyError> {
    if told_length(&request).is_some_and(|length| length > limit) {
        return Err(BodyError::TooLong);
    }
    let (head, body) = request.into_parts();
    match to_bytes(body, limit).await {
        Ok(bytes) => {
            let length = bytes.len();
            Ok((Request::from_parts(head, Body::from(bytes)), length))
        }
        Err(e) if e.source().is_some_and(<dyn Error>::is::<LengthLimitError>) => {
            Err(BodyError::TooLong)
        }
        Err(_) => Err(BodyError::Broken),
    }
}

/// Reads and drops a body, up to `limit` bytes. A client that waits for 100 Continue has not sent
/// one.
pub(crate) async fn discard(request: Request, limit: usize) {
    if request.headers().contains_key(header::EXPECT) {
        return;
    }
    let mut body = request.into_body();
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read >= limit {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, thread};

    use rto_agent_core::wire::types::{Caller, ChangeAnswer, DetachAnswer, VerifyAnswer, WalkView};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::super::{
        MAX_BODY,
        peer::{Allowed, Peer},
        server::routes_for,
    };
    use crate::engine::{EngineConfig, EngineError, Handle, Message};

    const ROUTES: [&str; 18] = [
        "GET /v1/status",
        "GET /v1/stats",
        "GET /v1/events",
        "GET /v1/entries",
        "GET /v1/lookup?address=10.0.0.1",
        "GET /v1/discover",
        "GET /v1/apply",
        "POST /v1/entries",
        "POST /v1/entries/remove",
        "POST /v1/reload",
        "POST /v1/verify",
        "POST /v1/detach",
        "POST /v1/apply",
        "POST /v1/probe",
        "HEAD /v1/events",
        "PUT /v1/status",
        "POST /v1/nothing",
        "GET /",
    ];

    /// A handle whose engine answers every message.
    fn engine() -> Handle {
        let (handle, messages) = Handle::disconnected(&EngineConfig::for_tests());
        thread::spawn(move || {
            for message in messages {
                let no = || EngineError::Refused("no".to_owned());
                match message {
                    Message::Add(_, _, reply) => drop(reply.send(Err(no()))),
                    Message::Remove(_, _, reply) => drop(reply.send(Err(no()))),
                    Message::Reload(_, _, reply) => drop(reply.send(Ok(ChangeAnswer::default()))),
                    Message::Detach(_, _, reply) => drop(reply.send(Ok(DetachAnswer::default()))),
                    Message::Apply(_, _, reply) => drop(reply.send(Ok(WalkView::default()))),
                    Message::Verify(reply) => drop(reply.send(Ok(VerifyAnswer::default()))),
                    Message::Watch(_, reply) => drop(reply.send(Err(no()))),
                    _ => {}
                }
            }
        });
        handle
    }

    /// Serves for this user, and runs a test with a function that connects.
    fn served(uid: u32, test: impl AsyncFnOnce(&dyn Fn() -> io::Result<std::net::TcpStream>)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let peer = Peer {
                caller: Caller { uid, pid: 1 },
                groups: Vec::new(),
            };
            let allowed = Allowed { group: 0.into() };
            let routes = routes_for(Some(peer), engine(), allowed);
            let serving = tokio::spawn(async { axum::serve(listener, routes).await });
            test(&|| {
                let stream = std::net::TcpStream::connect(address)?;
                stream.set_nonblocking(true)?;
                Ok(stream)
            })
            .await;
            serving.abort();
        });
    }

    fn head(route: &str, more: &str) -> Vec<u8> {
        format!("{route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}\r\n\r\n")
            .into_bytes()
    }

    /// The status of the last answer before the connection is closed.
    async fn last_answer(stream: &mut TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let status = text.split(' ').nth(1);
        status.unwrap_or_default().to_owned()
    }

    /// A route that did not wait for its body would answer before the second request is answered,
    /// as one thread and one engine handle both in turn.
    fn no_route_answers_before_its_body_is_there(uid: u32, turn: &str) {
        served(uid, async |connect| {
            for route in ROUTES {
                let mut stream = TcpStream::from_std(connect().unwrap()).unwrap();
                let asked = head(route, "connection: close\r\ncontent-length: 2");
                stream.write_all(&asked).await.unwrap();
                for _ in 0..2 {
                    let mut other = TcpStream::from_std(connect().unwrap()).unwrap();
                    let asked = head("POST /v1/reload", "connection: close\r\ncontent-length: 0");
                    other.write_all(&asked).await.unwrap();
                    assert_eq!(last_answer(&mut other).await, turn);
                }
                let early = stream.try_read(&mut [0; 64]);
                let early = early.map_err(|e| e.kind());
                assert_eq!(early, Err(io::ErrorKind::WouldBlock), "{route}");
                stream.write_all(b"{}").await.unwrap();
                let status = last_answer(&mut stream).await;
                assert_eq!(status.len(), 3, "{route}: {status}");
            }
        });
    }

    #[test]
    fn every_route_reads_its_body() {
        no_route_answers_before_its_body_is_there(0, "200");
    }

    #[test]
    fn refusal_waits_for_the_body() {
        no_route_answers_before_its_body_is_there(65_534, "403");
    }

    #[test]
    fn refused_client_gets_no_100_continue() {
        served(65_534, async |connect| {
            let mut stream = TcpStream::from_std(connect().unwrap()).unwrap();
            let more = "connection: close\r\nexpect: 100-continue\r\ncontent-length: 2";
            let asked = head("POST /v1/reload", more);
            stream.write_all(&asked).await.unwrap();
            assert_eq!(last_answer(&mut stream).await, "403");
        });
    }

    #[test]
    fn every_route_has_a_limit() {
        served(0, async |connect| {
            for route in ROUTES {
                let mut stream = TcpStream::from_std(connect().unwrap()).unwrap();
                let length = MAX_BODY + 1;
                let asked = head(route, &format!("content-length: {length}"));
                stream.write_all(&asked).await.unwrap();
                let mut status = [0; 12];
                stream.read_exact(&mut status).await.unwrap();
                assert_eq!(&status, b"HTTP/1.1 413", "{route}");
                // A body without a declared length is read up to the limit.
                let mut stream = TcpStream::from_std(connect().unwrap()).unwrap();
                let asked = head(route, "transfer-encoding: chunked");
                stream.write_all(&asked).await.unwrap();
                let chunk = [format!("{length:x}\r\n").as_bytes(), &vec![b' '; length]].concat();
                // The server closes the connection instead of reading the rest.
                let _closed = stream.write_all(&chunk).await;
                stream.read_exact(&mut status).await.unwrap();
                assert_eq!(&status, b"HTTP/1.1 413", "{route}");
            }
        });
    }
}
