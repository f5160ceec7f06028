//! Single requests to an HTTP server of the agent, made as a client other than the CLI would.

use std::io::{self, Read, Write};

use anyhow::Context as _;

/// The response.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Sends a request with a JSON body and returns the response.
pub fn request(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Answer> {
    send(&mut stream, method, path, body)?;
    receive(stream)
}

/// Requests a page.
pub fn get(mut stream: impl Read + Write, path: &str) -> anyhow::Result<Answer> {
    let text = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(text.as_bytes())?;
    receive(stream)
}

/// Sends a request in one write.
pub fn send(mut stream: impl Write, method: &str, path: &str, body: &str) -> io::Result<()> {
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(text.as_bytes())
}

/// Sends a request in chunks of this many bytes, so that no header states its length.
pub fn send_chunked(
    mut stream: impl Write,
    method: &str,
    path: &str,
    body: &str,
    chunk: usize,
) -> io::Result<()> {
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )?;
    for chunk in body.as_bytes().chunks(chunk) {
        write!(stream, "{:x}\r\n", chunk.len())?;
        stream.write_all(chunk)?;
        stream.write_all(b"\r\n")?;
    }
    stream.write_all(b"0\r\n\r\n")
}

/// Reads the response until the connection ends.
pub fn receive(mut stream: impl Read) -> anyhow::Result<Answer> {
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
