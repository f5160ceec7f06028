//! A request/response protocol: one transaction at a time over one connection.
//!
//! Before its first request the client sends the lengths of requests and responses and the close mode; the server
//! answers each request of that length with a response of that length.

mod client;
mod outage;
mod server;

use std::{io, net::TcpStream, time::Duration};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};
use socket2::SockRef;

pub use client::{Client, Error};
pub use outage::{Dropper, LONGEST_OUTAGE};
pub use server::{Limits, Tally, listen, serve, serve_connection, serve_while};

/// The first bytes of a connection; the close mode follows.
const MAGIC: [u8; 3] = *b"rto";
const HEADER: usize = MAGIC.len() + 1 + 2 * size_of::<u32>();
/// The byte that responses consist of.
const RESPONSE: u8 = b's';
/// The longest request and response, bytes.
pub const LONGEST: u32 = 1 << 20;
/// How often a wait checks whether to continue.
const TICK_MS: u8 = 50;
/// The same as a duration.
pub const TICK: Duration = Duration::from_millis(TICK_MS as u64);

/// Bytes of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Length of a request, at least 1.
    pub request: u32,
    /// Length of a response, at least 1.
    pub response: u32,
}

impl Sizes {
    /// As in the published measurements: a request of 1 byte, a response of 2.
    pub const SMALL: Self = Self {
        request: 1,
        response: 2,
    };

    /// Checks that both ends accept the lengths.
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

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseMode {
    /// The client closes it.
    ByClient,
    /// The client closes its half; the server then sends its [`TcpInfo`](crate::tcp::TcpInfo) as JSON and closes the
    /// other.
    WithTcpInfo,
    /// The server closes it after one response.
    OneShot,
    /// There are no requests: the server sends its [`HostFacts`](crate::facts::HostFacts) as JSON and closes.
    Facts,
    /// There are no requests, and the lengths are milliseconds: the server drops the client's packets for the first of
    /// them, after the second. It sends why it does not as JSON, or `null`, and closes before.
    Outage,
}

impl CloseMode {
    const fn letter(self) -> u8 {
        match self {
            Self::ByClient => b'1',
            Self::WithTcpInfo => b't',
            Self::OneShot => b'o',
            Self::Facts => b'f',
            Self::Outage => b'd',
        }
    }
}

/// The first message of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opening {
    sizes: Sizes,
    close: CloseMode,
}

impl Opening {
    fn header(self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..3].copy_from_slice(&MAGIC);
        header[3] = self.close.letter();
        header[4..8].copy_from_slice(&self.sizes.request.to_be_bytes());
        header[8..].copy_from_slice(&self.sizes.response.to_be_bytes());
        header
    }

    fn parse(header: [u8; HEADER]) -> anyhow::Result<Self> {
        let [m0, m1, m2, e, q0, q1, q2, q3, s0, s1, s2, s3] = header;
        let modes = [
            CloseMode::ByClient,
            CloseMode::WithTcpInfo,
            CloseMode::OneShot,
            CloseMode::Facts,
            CloseMode::Outage,
        ];
        let close = modes.into_iter().find(|close| close.letter() == e);
        let (MAGIC, Some(close)) = ([m0, m1, m2], close) else {
            bail!(Error::UnexpectedProtocol);
        };
        let sizes = Sizes {
            request: u32::from_be_bytes([q0, q1, q2, q3]),
            response: u32::from_be_bytes([s0, s1, s2, s3]),
        };
        sizes.check()?;
        Ok(Self { sizes, close })
    }
}

/// Options of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// TCP_THIN_LINEAR_TIMEOUTS; `None`: unchanged.
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

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{SocketAddr, TcpListener},
        thread,
    };

    use super::*;
    use crate::facts::HostFacts;

    const SIZES: Sizes = Sizes {
        request: 1,
        response: LONGEST,
    };

    fn server() -> SocketAddr {
        let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, Options::default()));
        to
    }

    #[test]
    fn connection_repeats_transactions() {
        let to = server();
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
    fn each_close_mode_works() {
        let to = server();
        let open = |close| {
            Client::open(to, Sizes::SMALL, Options::default(), close, &|| true)
                .unwrap()
                .0
        };
        let mut with_info = open(CloseMode::WithTcpInfo);
        with_info.transact().unwrap();
        assert!(with_info.close_with_tcp_info(&|| true).unwrap().delivered >= 1);
        let mut once = open(CloseMode::OneShot);
        once.transact().unwrap();
        once.wait_for_end(&|| true).unwrap();
        let facts = Client::facts(to, &|| true).unwrap();
        assert_eq!(facts, HostFacts::towards(to.ip()).unwrap());
        let refused = Client::outage(to, TICK, TICK, &|| true).unwrap();
        assert!(refused.unwrap().contains("--outages"));
        let error = once.transact_while(&|| true).unwrap_err();
        assert!(matches!(error, Error::Closed | Error::Io(_)), "{error:?}");
    }

    #[test]
    fn foreign_peers_are_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let connect = || Client::connect(to, Sizes::SMALL, Options::default()).unwrap();

        let mut client = connect();
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(b"SSH-2.0-OpenSSH\r\n").unwrap();
        let error = client.transact().unwrap_err();
        assert!(error.to_string().contains("does not speak"), "{error}");

        let mut client = connect();
        let (mut peer, _) = listener.accept().unwrap();
        peer.read_exact(&mut [0; HEADER]).unwrap();
        drop(peer);
        let error = client.transact().unwrap_err();
        assert!(error.to_string().contains("closed"), "{error}");

        // A silent peer, until the client gives up.
        let mut client = connect();
        let (_peer, _) = listener.accept().unwrap();
        let error = client.transact_while(&|| false).unwrap_err();
        assert!(matches!(error, Error::Stopped), "{error:?}");
    }

    #[test]
    fn headers_round_trip() {
        for close in [
            CloseMode::ByClient,
            CloseMode::WithTcpInfo,
            CloseMode::OneShot,
            CloseMode::Facts,
            CloseMode::Outage,
        ] {
            let opening = Opening {
                sizes: SIZES,
                close,
            };
            assert_eq!(Opening::parse(opening.header()).unwrap(), opening);
        }
        let opening = Opening {
            sizes: SIZES,
            close: CloseMode::ByClient,
        };
        for at in [0, 3] {
            let mut foreign = opening.header();
            foreign[at] = b'G';
            let error = Opening::parse(foreign).unwrap_err();
            assert!(error.to_string().contains("does not speak"), "{error}");
        }
        let mut long = opening.header();
        long[4] = 0xff;
        let error = Opening::parse(long).unwrap_err();
        assert!(error.to_string().contains("bytes"), "{error}");
    }
}
