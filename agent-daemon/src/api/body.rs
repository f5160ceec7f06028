//! Bodies of requests. Each is read before its request is answered, even if no route needs it:
//! closing a connection with unread data causes an error at a client that still writes (EPIPE) or
//! reads (ECONNRESET).

use axum::{
    body::{Bytes, HttpBody as _},
    extract::{FromRequest as _, Request},
    http::StatusCode,
};
use futures_util::StreamExt as _;

/// The length that the headers declare, bytes; `None` for a chunked body.
pub(crate) fn declared_length(request: &Request) -> Option<usize> {
    let length = request.body().size_hint().exact()?;
    Some(usize::try_from(length).unwrap_or(usize::MAX))
}

/// Reads the body, and returns the request with it and its length, bytes; or the status and text of
/// the refusal. `limit` is the router's `DefaultBodyLimit`; a body that declares more is not read.
pub(crate) async fn read(
    request: Request,
    limit: usize,
) -> Result<(Request, usize), (StatusCode, String)> {
    if declared_length(&request).is_some_and(|length| length > limit) {
        let text = format!("a request has at most {limit} bytes");
        return Err((StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    let (head, body) = request.into_parts();
    let request = Request::from_parts(head.clone(), body);
    let body = Bytes::from_request(request, &()).await;
    let body = body.map_err(|e| (e.status(), e.body_text()))?;
    let length = body.len();
    Ok((Request::from_parts(head, body.into()), length))
}

/// Reads and drops a body, up to `limit` bytes.
pub(crate) async fn discard(request: Request, limit: usize) {
    let mut left = limit;
    let mut chunks = request.into_body().into_data_stream();
    while let Some(Ok(chunk)) = chunks.next().await {
        let Some(rest) = left.checked_sub(chunk.len()) else {
            return;
        };
        left = rest;
    }
}
