//! One request to an HTTP server of the agent's, as another client than the CLI would make it.

use std::io::{Read, Write};

use anyhow::Context as _;

/// What came back.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Makes a request, with a JSON body if there is one.
///
/// # Errors
///
/// If what comes back is no HTTP.
pub fn request(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Answer> {
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no body")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok(Answer {
        status,
        head: head.to_lowercase(),
        body: body.to_owned(),
    })
}
