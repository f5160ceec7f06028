//! Both ends of small HTTP/1.1 transfers.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use super::tcp::Fetch;

/// Bytes of a body. With its head of 41 bytes it takes segments of 1448, 1448 and 1321 bytes where the MTU is
/// 1500 and timestamps are on.
pub const BODY: usize = 4176;
/// Bytes of data in the last segment of a response.
pub const LAST_SEGMENT: u32 = 1321;
/// A request that waits this long for one thing is given up.
pub const PATIENCE: Duration = Duration::from_secs(10);

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: rto-lab\r\n\r\n";
/// Requests under way at once on a pipelined connection.
const PIPELINED: u32 = 2;
/// Attempts to connect, where that is not what is measured.
const CONNECTS: u32 = 5;

pub(super) fn answer(stream: TcpStream) -> io::Result<()> {
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

/// Orders: `fetch N MICROS` (so many requests, each over a connection of its own, with a pause after each),
/// `keep N` (over one connection), `pipeline N` (the same, the next request sent before the last is answered).
/// Says how long each took, microseconds, with a `!` where it was given up.
#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn fetch(args: &Fetch) -> anyhow::Result<()> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let took = match words.as_slice() {
            ["fetch", count, pause] => {
                let pause = Duration::from_micros(pause.parse()?);
                one_by_one(args.to, count.parse()?, pause)?
            }
            ["keep", count] => over_one(args.to, count.parse()?, 1)?,
            ["pipeline", count] => over_one(args.to, count.parse()?, PIPELINED)?,
            _ => bail!("{line}: fetch N MICROS, keep N or pipeline N"),
        };
        println!("{}", took.join(" "));
        io::stdout().flush()?;
    }
    Ok(())
}

fn one_by_one(to: SocketAddr, count: u32, pause: Duration) -> anyhow::Result<Vec<String>> {
    let mut took = Vec::new();
    for _ in 0..count {
        let begun = Instant::now();
        let done = Client::connect(to).and_then(|mut client| {
            client.request()?;
            client.response()
        });
        took.push(said(begun.elapsed(), done)?);
        thread::sleep(pause);
    }
    Ok(took)
}

/// With so many requests under way at once; after one that was given up, over another connection.
fn over_one(to: SocketAddr, count: u32, at_once: u32) -> anyhow::Result<Vec<String>> {
    let mut client = Client::at_last(to)?;
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
        took.push(said(begun.elapsed(), done)?);
        if failed {
            for begun in sent.drain(..) {
                took.push(format!("{}!", begun.elapsed().as_micros()));
            }
            client = Client::at_last(to)?;
        }
    }
    Ok(took)
}

/// How a request ended; an error if not by loss.
fn said(took: Duration, done: anyhow::Result<()>) -> anyhow::Result<String> {
    let us = took.as_micros();
    let Err(error) = done else {
        return Ok(us.to_string());
    };
    if lost_patience(&error) {
        return Ok(format!("{us}!"));
    }
    Err(error)
}

fn lost_patience(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(
        kind,
        Some(io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
    )
}

struct Client {
    stream: TcpStream,
    responses: BufReader<TcpStream>,
}

impl Client {
    /// Connects, and tries again while only patience was lost.
    fn at_last(to: SocketAddr) -> anyhow::Result<Self> {
        for _ in 1..CONNECTS {
            match Self::connect(to) {
                Err(error) if lost_patience(&error) => {}
                connected => return connected,
            }
        }
        Self::connect(to)
    }

    fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let responses = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, responses })
    }

    fn request(&mut self) -> anyhow::Result<()> {
        Ok(self.stream.write_all(REQUEST)?)
    }

    fn response(&mut self) -> anyhow::Result<()> {
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
                thread::spawn(|| answer(stream.unwrap()));
            }
        });
        assert_eq!(one_by_one(to, 3, Duration::ZERO).unwrap().len(), 3);
        for at_once in [1, PIPELINED] {
            let took = over_one(to, 5, at_once).unwrap();
            assert_eq!(took.len(), 5);
            assert!(took.iter().all(|us| us.parse::<u64>().is_ok()), "{took:?}");
        }
    }

    #[test]
    fn lost_patience_is_told_from_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Client::connect(listener.local_addr().unwrap()).unwrap();
        client
            .stream
            .set_read_timeout(Some(Duration::from_millis(10)))
            .unwrap();
        client.request().unwrap();
        let took = said(Duration::from_micros(7), client.response()).unwrap();
        assert_eq!(took, "7!");
        drop(listener.accept());
        assert!(said(Duration::ZERO, client.response()).is_err());
    }

    #[test]
    fn segments_of_a_response() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n");
        assert_eq!(head.len() + BODY, 2 * 1448 + LAST_SEGMENT as usize);
    }
}
