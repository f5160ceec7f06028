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
/// The path of a document of [`BODY`] bytes after which the server closes the connection without announcing it, so that
/// a FIN follows its last segment at once.
pub const CLOSES: &str = "closes";
/// Timeout of connect and of each read.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Answers the requests of a connection until the client closes it: the document of a path, and whether to end the
/// connection after it, or else as many bytes as the path says.
pub fn serve_connection(
    stream: TcpStream,
    document: impl Fn(&str) -> Option<(String, bool)>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut requests = BufReader::new(&stream);
    while let Some(lines) = head(&mut requests)? {
        let path = lines.first().and_then(|line| line.split([' ', '?']).nth(1));
        let path = path.unwrap_or_default();
        let (body, ends) = document(path).unwrap_or_else(|| {
            let bytes = path.trim_start_matches('/').parse();
            (".".repeat(bytes.unwrap_or(BODY)), false)
        });
        let ending = if ends { "Connection: close\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 200 OK\r\n{ending}Content-Length: {}\r\n\r\n",
            body.len()
        );
        (&stream).write_all((head + &body).as_bytes())?;
        if ends || path.trim_start_matches('/') == CLOSES {
            break;
        }
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
    /// Bytes of all responses.
    pub received: u64,
}

impl Client {
    /// Connects; fails after [`TIMEOUT`].
    pub fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let responses = BufReader::new(stream.try_clone()?);
        Ok(Self {
            stream,
            responses,
            received: 0,
        })
    }

    /// Its port.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.stream.local_addr()?.port())
    }

    /// Sends a request and reads its response.
    pub fn transact(&mut self) -> anyhow::Result<()> {
        self.get("")
    }

    /// Sends a request for a path, without its first slash, and reads the response.
    pub fn get(&mut self, path: &str) -> anyhow::Result<()> {
        self.request(path)?;
        self.response()
    }

    /// Sends a request for a path, without its first slash.
    pub fn request(&mut self, path: &str) -> anyhow::Result<()> {
        let request = format!("GET /{path} HTTP/1.1\r\nHost: rto-lab\r\n\r\n");
        Ok(self.stream.write_all(request.as_bytes())?)
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
        let head: usize = lines.iter().map(|line| line.len() + 2).sum();
        self.received += (head + 2 + body.len()) as u64;
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
    fn server_closes_after_that_path_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Client::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        let served = std::thread::spawn(|| serve_connection(stream, |_| None));
        client.transact().unwrap();
        client.get(CLOSES).unwrap();
        // The server ends although the client has not closed its end.
        served.join().unwrap().unwrap();
        assert!(client.transact().is_err());
    }

    #[test]
    fn response_has_three_segments() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n");
        assert_eq!(head.len() + BODY, 2 * 1448 + 1321);
    }
}
