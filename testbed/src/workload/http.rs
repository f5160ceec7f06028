//! Both ends of small HTTP/1.1 transfers.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::stdio::{commands, reply};

/// Bytes of a body. With its head of 41 bytes it takes segments of 1448, 1448 and 1321 bytes where the MTU is
/// 1500 and timestamps are on.
pub const BODY: usize = 4176;
/// Bytes of data in the last segment of a response.
pub const LAST_SEGMENT: u32 = 1321;
/// A request that waits this long for one thing is timed out.
pub const TIMEOUT: Duration = Duration::from_secs(10);

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: rto-lab\r\n\r\n";
/// Requests under way at once on a pipelined connection.
const PIPELINED: u32 = 2;
/// Attempts to connect, where that is not what is measured.
const CONNECTS: u32 = 5;

/// What the client is told; it says how long each request took ([`Took`]).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Each request over a connection of its own.
    NewConnections {
        /// How many.
        count: u32,
        /// After each.
        pause: Duration,
    },
    /// So many over one connection.
    KeepAlive(u32),
    /// The same, the next request sent before the last is answered.
    Pipelined(u32),
}

/// How long a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Took {
    /// Microseconds.
    pub us: u64,
    /// It was not answered in that time.
    pub timed_out: bool,
}

/// Answers the requests of a connection until its client ends it.
///
/// # Errors
///
/// If it breaks off.
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

pub(super) fn run(to: SocketAddr) -> anyhow::Result<()> {
    reply(&())?;
    commands(|command| match command {
        Command::NewConnections { count, pause } => new_connections(to, count, pause),
        Command::KeepAlive(count) => over_one(to, count, 1),
        Command::Pipelined(count) => over_one(to, count, PIPELINED),
    })
}

fn new_connections(to: SocketAddr, count: u32, pause: Duration) -> anyhow::Result<Vec<Took>> {
    let mut took = Vec::new();
    for _ in 0..count {
        let begun = Instant::now();
        let done = Client::connect(to).and_then(|mut client| {
            client.request()?;
            client.response()
        });
        took.push(Took::of(begun, done)?);
        thread::sleep(pause);
    }
    Ok(took)
}

/// With so many requests under way at once; after one that timed out, over another connection.
fn over_one(to: SocketAddr, count: u32, at_once: u32) -> anyhow::Result<Vec<Took>> {
    let mut client = Client::connect_patiently(to)?;
    let mut took = Vec::new();
    // When each that is under way was sent.
    let mut sent = std::collections::VecDeque::new();
    let mut left = count;
    while left > 0 || !sent.is_empty() {
        while left > 0 && sent.len() < at_once as usize {
            sent.push_back(Instant::now());
            client.request()?;
            left -= 1;
        }
        let done = client.response();
        let failed = done.is_err();
        let begun: Instant = sent.pop_front().context("nothing was asked for")?;
        took.push(Took::of(begun, done)?);
        if failed {
            for begun in sent.drain(..) {
                took.push(Took::timed_out(begun));
            }
            client = Client::connect_patiently(to)?;
        }
    }
    Ok(took)
}

impl Took {
    /// How a request ended; an error if not by loss.
    fn of(begun: Instant, done: anyhow::Result<()>) -> anyhow::Result<Self> {
        match done {
            Ok(()) => Ok(Self {
                timed_out: false,
                ..Self::timed_out(begun)
            }),
            Err(error) if is_timeout(&error) => Ok(Self::timed_out(begun)),
            Err(error) => Err(error),
        }
    }

    fn timed_out(begun: Instant) -> Self {
        Self {
            us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            timed_out: true,
        }
    }
}

fn is_timeout(error: &anyhow::Error) -> bool {
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
    /// Connects, and tries again after timeouts.
    fn connect_patiently(to: SocketAddr) -> anyhow::Result<Self> {
        for _ in 1..CONNECTS {
            match Self::connect(to) {
                Err(error) if is_timeout(&error) => {}
                connected => return connected,
            }
        }
        Self::connect(to)
    }

    /// Connects; what takes longer than [`TIMEOUT`] fails.
    ///
    /// # Errors
    ///
    /// If the connection cannot be made.
    pub fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let responses = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, responses })
    }

    /// Sends one.
    ///
    /// # Errors
    ///
    /// If the connection ends.
    pub fn request(&mut self) -> anyhow::Result<()> {
        Ok(self.stream.write_all(REQUEST)?)
    }

    /// Reads the response to the oldest request.
    ///
    /// # Errors
    ///
    /// If it does not come in time, or is none.
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
    fn a_conversation() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(|| serve_connection(stream.unwrap()));
            }
        });
        assert_eq!(new_connections(to, 3, Duration::ZERO).unwrap().len(), 3);
        for at_once in [1, PIPELINED] {
            let took = over_one(to, 5, at_once).unwrap();
            assert_eq!(took.len(), 5);
            assert!(took.iter().all(|took| !took.timed_out), "{took:?}");
        }
    }

    #[test]
    fn timeouts_are_told_from_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Client::connect(listener.local_addr().unwrap()).unwrap();
        client
            .stream
            .set_read_timeout(Some(Duration::from_millis(10)))
            .unwrap();
        client.request().unwrap();
        let took = Took::of(Instant::now(), client.response()).unwrap();
        assert!(took.timed_out, "{took:?}");
        drop(listener.accept());
        assert!(Took::of(Instant::now(), client.response()).is_err());
    }

    #[test]
    fn segments_of_a_response() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n");
        assert_eq!(head.len() + BODY, 2 * 1448 + LAST_SEGMENT as usize);
    }
}
