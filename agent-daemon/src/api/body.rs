//! Bodies of requests. Each is read before its request is answered, even if no route needs it:
//! closing a connection with unread data causes an error at a client that still writes (EPIPE) or
//! reads (ECONNRESET).

use std::pin::pin;

use axum::{
    body::{Body, Bytes, HttpBody as _},
    extract::Request,
    http::StatusCode,
};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

/// The length that the headers declare, bytes; `None` for a chunked body.
pub(crate) fn declared_length(request: &Request) -> Option<usize> {
    let length = request.body().size_hint().exact()?;
    Some(usize::try_from(length).unwrap_or(usize::MAX))
}

/// Reads the body, and returns the request with it and its length, bytes; or the status and text of
/// the refusal. A body that declares a length above the limit is not read.
pub(crate) async fn read(
    request: Request,
    limit: usize,
) -> Result<(Request, usize), (StatusCode, String)> {
    let too_long = || {
        let text = format!("a request has at most {limit} bytes");
        (StatusCode::PAYLOAD_TOO_LARGE, text)
    };
    if declared_length(&request).is_some_and(|length| length > limit) {
        return Err(too_long());
    }
    let (head, body) = request.into_parts();
    match Limited::new(body, limit).collect().await {
        Ok(body) => {
            let bytes: Bytes = body.to_bytes();
            let length = bytes.len();
            Ok((Request::from_parts(head, Body::from(bytes)), length))
        }
        Err(e) if e.is::<LengthLimitError>() => Err(too_long()),
        Err(_) => {
            let text = "the request's body ended early".to_owned();
            Err((StatusCode::BAD_REQUEST, text))
        }
    }
}

/// Reads and drops a body, up to `limit` bytes.
pub(crate) async fn discard(request: Request, limit: usize) {
    let mut body = pin!(Limited::new(request.into_body(), limit));
    while let Some(Ok(_)) = body.frame().await {}
}
