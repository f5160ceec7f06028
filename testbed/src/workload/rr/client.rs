//! The client: one connection.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde::de::DeserializeOwned;
use socket2::{Domain, SockRef, Socket, Type};

use super::{CloseMode, Opening, Options, RESPONSE, Sizes, TICK, TICK_MS};
use crate::{facts::HostFacts, tcp::TcpInfo};

/// Longest wait for the server's last message.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// More bytes than a server ever sends in that message.
const LONGEST_WORDS: u64 = 16 << 10;

/// Why a transaction failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The wait was stopped by `go_on`.
    #[error("no response yet")]
    Stopped,
    /// The peer ended the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer is not an rto-lab server.
    #[error("the peer does not speak rto-lab's request/response protocol")]
    UnexpectedProtocol,
    /// An error of the kernel.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => error,
            other => Self::other(other),
        }
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
    /// Connects and sends the lengths.
    pub fn connect(to: SocketAddr, sizes: Sizes, options: Options) -> anyhow::Result<Self> {
        sizes.check()?;
        let opened = Self::open(to, sizes, options, CloseMode::ByClient, &|| true);
        Ok(opened.with_context(|| format!("connect to {to}"))?.0)
    }

    /// Connects while `go_on` returns true, and sends the lengths and the close mode. Also returns how long connect(2)
    /// took.
    pub fn open(
        to: SocketAddr,
        sizes: Sizes,
        options: Options,
        close: CloseMode,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(Self, Duration), Error> {
        let begin = Instant::now();
        let stream = connected(to, go_on)?;
        let took = begin.elapsed();
        options.apply(&stream)?;
        // A wait must wake up regularly to check `go_on`.
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        let mut client = Self {
            stream,
            request: Vec::new(),
            response: vec![0; sizes.response as usize],
        };
        let header = Opening { sizes, close }.header();
        if close == CloseMode::OneShot {
            // The header goes into one segment with the only request.
            client.request.extend(header);
        } else {
            client.send(&header, go_on)?;
        }
        let length = client.request.len() + sizes.request as usize;
        client.request.resize(length, b'q');
        Ok((client, took))
    }

    /// The socket.
    #[must_use]
    pub const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Makes a transaction; returns how long it took.
    pub fn transact(&mut self) -> io::Result<Duration> {
        Ok(self.transact_while(&|| true)?)
    }

    /// Makes a transaction, waiting while `go_on` returns true; returns how long it took. The client is unusable after
    /// an error.
    pub fn transact_while(&mut self, go_on: &dyn Fn() -> bool) -> Result<Duration, Error> {
        let begin = Instant::now();
        let request = std::mem::take(&mut self.request);
        let sent = self.send(&request, go_on);
        self.request = request;
        sent?;
        let mut filled = 0;
        while filled < self.response.len() {
            match self.stream.read(&mut self.response[filled..]) {
                Ok(0) => return Err(Error::Closed),
                Ok(more) => {
                    filled += more;
                    // A peer that sends a byte from time to time gets no more time than a silent one.
                    if filled < self.response.len() && !go_on() {
                        return Err(Error::Stopped);
                    }
                }
                Err(e) => patient(e, go_on)?,
            }
        }
        let took = begin.elapsed();
        if self.response.iter().any(|byte| *byte != RESPONSE) {
            return Err(Error::UnexpectedProtocol);
        }
        Ok(took)
    }

    /// Waits until the server has closed an [`CloseMode::OneShot`] connection.
    pub fn wait_for_end(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), Error> {
        loop {
            match self.stream.read(&mut [0]) {
                Ok(0) => return Ok(()),
                Ok(_) => return Err(Error::UnexpectedProtocol),
                Err(e) => patient(e, go_on)?,
            }
        }
    }

    /// Closes an [`CloseMode::WithTcpInfo`] connection; returns the server's view of it.
    ///
    /// # Errors
    ///
    /// If the server does not send it within two seconds or `go_on` returns false ([`Error::Stopped`]), or if it sends
    /// something else or too much ([`Error::UnexpectedProtocol`]).
    pub fn close_with_tcp_info(self, go_on: &dyn Fn() -> bool) -> Result<TcpInfo, Error> {
        self.stream.shutdown(Shutdown::Write)?;
        self.last_words(go_on)
    }

    /// The facts about the server's host, requested over a separate connection.
    pub fn facts(to: SocketAddr, go_on: &dyn Fn() -> bool) -> Result<HostFacts, Error> {
        let options = Options::default();
        let (client, _) = Self::open(to, Sizes::SMALL, options, CloseMode::Facts, go_on)?;
        client.last_words(go_on)
    }

    /// Asks the server to drop this host's packets for `length`, after `delay`, over a separate connection; returns why
    /// it does not.
    pub fn outage(
        to: SocketAddr,
        length: Duration,
        delay: Duration,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<String>, Error> {
        let ms = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1);
        let sizes = Sizes {
            request: ms(length),
            response: ms(delay),
        };
        let mode = CloseMode::Outage;
        let (client, _) = Self::open(to, sizes, Options::default(), mode, go_on)?;
        client.last_words(go_on)
    }

    /// Closes the connection with a reset, which leaves no state at either end.
    pub fn reset(self) -> Result<(), Error> {
        Ok(SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))?)
    }

    /// Reads the JSON that the server sends before it closes the connection.
    fn last_words<T: DeserializeOwned>(self, go_on: &dyn Fn() -> bool) -> Result<T, Error> {
        let end = Instant::now() + LAST_WORDS;
        let patience = || go_on() && Instant::now() < end;
        let mut text = Vec::new();
        let mut buffer = [0; 1024];
        // One byte more than allowed, to detect a message that is too long.
        let mut stream = (&self.stream).take(LONGEST_WORDS + 1);
        while stream.limit() > 0 {
            match stream.read(&mut buffer) {
                Ok(0) if text.is_empty() => return Err(Error::Closed),
                Ok(0) => {
                    return serde_json::from_slice(&text).map_err(|_| Error::UnexpectedProtocol);
                }
                Ok(more) => {
                    text.extend(&buffer[..more]);
                    if !patience() {
                        return Err(Error::Stopped);
                    }
                }
                Err(e) => patient(e, &patience)?,
            }
        }
        Err(Error::UnexpectedProtocol)
    }

    fn send(&mut self, bytes: &[u8], go_on: &dyn Fn() -> bool) -> Result<(), Error> {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.stream.write(&bytes[sent..]) {
                Ok(more) => {
                    sent += more;
                    if sent < bytes.len() && !go_on() {
                        return Err(Error::Stopped);
                    }
                }
                Err(e) => patient(e, go_on)?,
            }
        }
        Ok(())
    }
}

/// Decides whether to retry after an error.
fn patient(error: io::Error, go_on: &dyn Fn() -> bool) -> Result<(), Error> {
    match error.kind() {
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {
            if go_on() {
                Ok(())
            } else {
                Err(Error::Stopped)
            }
        }
        _ => Err(error.into()),
    }
}

/// connect(2) that `go_on` can stop.
fn connected(to: SocketAddr, go_on: &dyn Fn() -> bool) -> Result<TcpStream, Error> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&to.into()) {
        Err(e) if e.raw_os_error() == Some(Errno::EINPROGRESS as i32) => {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
            loop {
                match poll(&mut fds, PollTimeout::from(TICK_MS)) {
                    Ok(0) | Err(Errno::EINTR) if go_on() => {}
                    Ok(0) | Err(Errno::EINTR) => return Err(Error::Stopped),
                    Ok(_) => break,
                    Err(e) => return Err(io::Error::from(e).into()),
                }
            }
            if let Some(error) = socket.take_error()? {
                return Err(error.into());
            }
        }
        done => done?,
    }
    socket.set_nonblocking(false)?;
    Ok(socket.into())
}
