//! Request and response, one transaction at a time, over one connection.
//!
//! The client says once, before its first request, how long requests and responses are; the server answers
//! each request of that length with a response of that length.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use socket2::SockRef;

/// What a connection begins with.
const MAGIC: [u8; 4] = *b"rto1";
const HEADER: usize = MAGIC.len() + 2 * size_of::<u32>();
/// The longest request and response, bytes.
pub const LONGEST: u32 = 1 << 20;

/// Bytes of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Of a request, at least 1.
    pub request: u32,
    /// Of a response, at least 1.
    pub response: u32,
}

impl Sizes {
    /// As in the published measurements: 1 byte out, 2 bytes back.
    pub const SMALL: Self = Self {
        request: 1,
        response: 2,
    };

    fn header(self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        header[4..8].copy_from_slice(&self.request.to_be_bytes());
        header[8..].copy_from_slice(&self.response.to_be_bytes());
        header
    }

    fn parse(header: [u8; HEADER]) -> anyhow::Result<Self> {
        let [m0, m1, m2, m3, q0, q1, q2, q3, s0, s1, s2, s3] = header;
        ensure!(
            [m0, m1, m2, m3] == MAGIC,
            "the peer does not speak rto-lab's request/response protocol"
        );
        let sizes = Self {
            request: u32::from_be_bytes([q0, q1, q2, q3]),
            response: u32::from_be_bytes([s0, s1, s2, s3]),
        };
        sizes.check()?;
        Ok(sizes)
    }

    /// Refuses what neither side takes.
    ///
    /// # Errors
    ///
    /// If a length is 0 or above [`LONGEST`].
    pub fn check(self) -> anyhow::Result<()> {
        for (what, bytes) in [("request", self.request), ("response", self.response)] {
            ensure!(
                (1..=LONGEST).contains(&bytes),
                "a {what} of {bytes} bytes: 1 to {LONGEST} can be sent"
            );
        }
        Ok(())
    }
}

/// Options of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// TCP_THIN_LINEAR_TIMEOUTS; `None` leaves it.
    pub thin_linear: Option<bool>,
}

impl Options {
    fn apply(self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        if let Some(thin) = self.thin_linear {
            SockRef::from(stream).set_tcp_thin_linear_timeouts(thin)?;
        }
        Ok(())
    }
}

/// A client.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl Client {
    /// Connects, and says the lengths.
    ///
    /// # Errors
    ///
    /// If the connection cannot be made, or the lengths are refused.
    pub fn connect(to: SocketAddr, sizes: Sizes, options: Options) -> anyhow::Result<Self> {
        sizes.check()?;
        let mut stream = TcpStream::connect(to).with_context(|| format!("connect to {to}"))?;
        options.apply(&stream)?;
        stream.write_all(&sizes.header())?;
        Ok(Self {
            stream,
            request: vec![b'q'; sizes.request as usize],
            response: vec![0; sizes.response as usize],
        })
    }

    /// The socket.
    #[must_use]
    pub const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// One transaction; how long it took.
    ///
    /// # Errors
    ///
    /// If the connection ends.
    pub fn transact(&mut self) -> io::Result<Duration> {
        let begin = Instant::now();
        self.stream.write_all(&self.request)?;
        self.stream.read_exact(&mut self.response)?;
        Ok(begin.elapsed())
    }
}

/// Answers connections, each in a thread of its own; returns when the listener fails.
///
/// # Errors
///
/// Those of accept(2).
pub fn serve(listener: &TcpListener, options: Options) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that breaks off is no error of the server's.
        let _detached = thread::Builder::new().spawn(move || answer(stream, options));
    }
}

/// Answers one connection until its client ends it.
///
/// # Errors
///
/// If the peer speaks something else.
pub fn answer(mut stream: TcpStream, options: Options) -> anyhow::Result<()> {
    options.apply(&stream)?;
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let sizes = Sizes::parse(header)?;
    let mut request = vec![0; sizes.request as usize];
    let response = vec![b's'; sizes.response as usize];
    loop {
        match stream.read_exact(&mut request) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            done => done?,
        }
        stream.write_all(&response)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, Options::default()));
        for (request, response) in [(1, 2), (2000, 1), (1, 100_000)] {
            let sizes = Sizes { request, response };
            let mut client = Client::connect(to, sizes, Options::default()).unwrap();
            for _ in 0..3 {
                client.transact().unwrap();
            }
        }
        let sizes = Sizes {
            request: 0,
            response: 1,
        };
        let error = Client::connect(to, sizes, Options::default()).unwrap_err();
        assert!(error.to_string().contains("1 to 1048576"), "{error}");
    }

    #[test]
    fn headers() {
        let sizes = Sizes {
            request: 1,
            response: LONGEST,
        };
        assert_eq!(Sizes::parse(sizes.header()).unwrap(), sizes);
        let mut foreign = sizes.header();
        foreign[0] = b'G';
        assert!(Sizes::parse(foreign).is_err());
        let mut long = sizes.header();
        long[4] = 0xff;
        let error = Sizes::parse(long).unwrap_err();
        assert!(error.to_string().contains("bytes"), "{error}");
    }
}
