//! Both ends of small HTTP/1.1 transfers.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, ensure};

/// Bytes of a body. With its header of 41 bytes it takes segments of 1448, 1448 and 1321 bytes if the MTU is 1500 and
/// timestamps are on.
pub const BODY: usize = 4176;
/// Timeout of connect and of each read.
pub const TIMEOUT: Duration = Duration::from_secs(10);

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: rto-lab\r\n\r\n";

/// Answers the requests of a connection until the client closes it.
pub fn serve_connection(stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut response = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n").into_bytes();
    response.resize(response.len() + BODY, b'.');
    let mut requests = BufReader::new(&stream);
    while let Some(_head) = head(&mut requests)? {
        (&stream).write_all(&response)?;
    }
    Ok(())
}

/// The lines of a request or a response before its body; `None` at the end of the connection.
fn head(from: &mut impl io::BufRead) -> io::Result<Option<Vec<String>>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end();
        if line.is_empty() {
            return Ok(Some(lines));
        }
        lines.push(line.to_owned());
    }
}

/// Whether the error is a [`TIMEOUT`].
#[must_use]
pub fn is_timeout(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(
        kind,
        Some(io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
    )
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    responses: BufReader<TcpStream>,
}

impl Client {
    /// Connects; fails after [`TIMEOUT`].
    pub fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let responses = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, responses })
    }

    /// Sends a request and reads its response.
    pub fn transact(&mut self) -> anyhow::Result<()> {
        self.request()?;
        self.response()
    }

    /// Sends a request.
    pub fn request(&mut self) -> anyhow::Result<()> {
        Ok(self.stream.write_all(REQUEST)?)
    }

    /// Reads the response to the oldest request.
    pub fn response(&mut self) -> anyhow::Result<()> {
        let lines = head(&mut self.responses)?.context("the server ended the connection")?;
        let status = lines.first().context("an empty head")?;
        ensure!(status.ends_with("200 OK"), "the server said {status}");
        let length = lines
            .iter()
            .find_map(|line| line.strip_prefix("Content-Length: "))
            .context("a response without a length")?;
        let mut body = vec![0; length.parse()?];
        self.responses.read_exact(&mut body)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn timeouts_are_told_from_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Client::connect(listener.local_addr().unwrap()).unwrap();
        client
            .stream
            .set_read_timeout(Some(Duration::from_millis(10)))
            .unwrap();
        assert!(is_timeout(&client.transact().unwrap_err()));
        drop(listener.accept());
        assert!(!is_timeout(&client.response().unwrap_err()));
    }

    #[test]
    fn segments_of_a_response() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n");
        assert_eq!(head.len() + BODY, 2 * 1448 + 1321);
    }
}
