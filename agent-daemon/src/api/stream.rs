//! A Unix stream on which another task can wait for the peer to disconnect.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{MsgFlags, Shutdown, getsockopt, recv, send, shutdown, sockopt::PeerCredentials},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::UnixStream,
    time::sleep,
};

use super::connection::{Gone, Transport};

/// Poll interval of a half-closed connection, for which epoll reports no further event.
const LOOK: Duration = Duration::from_millis(250);
/// Polls after which the unread data of a disconnected client is dropped.
const LOOKS: usize = 20;

/// The stream. Clones are not used for reading or writing.
#[derive(Clone, Debug)]
pub struct SharedStream(Arc<UnixStream>);

impl From<UnixStream> for SharedStream {
    fn from(stream: UnixStream) -> Self {
        Self(Arc::new(stream))
    }
}

impl AsFd for SharedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl SharedStream {
    /// Whether the peer has closed both directions: only then does unix_poll() set EPOLLHUP, even
    /// after a shutdown() of one direction (net/unix/af_unix.c, Linux 6.12).
    fn is_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(self.as_fd(), PollFlags::empty())];
        match poll(&mut polled, PollTimeout::ZERO) {
            Ok(_) => polled[0]
                .revents()
                .is_some_and(|events| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR)),
            Err(_) => false,
        }
    }

    /// Returns 1 if there is data, 0 at the end, `WouldBlock` if there is no data yet.
    fn peek(&self) -> io::Result<usize> {
        self.0.try_io(Interest::READABLE, || {
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            Ok(recv(self.0.as_raw_fd(), &mut [0], flags)?)
        })
    }
}

impl Transport for SharedStream {
    fn uid(&self) -> Option<u32> {
        let credentials = getsockopt(&self.as_fd(), PeerCredentials);
        // If credentials cannot be read, not root.
        Some(credentials.map_or(u32::MAX, |credentials| credentials.uid()))
    }

    fn gone(&self) -> Gone {
        let stream = self.clone();
        Box::pin(async move {
            let mut looks = 0;
            // An error means that the reactor is gone.
            while stream.0.ready(Interest::READABLE).await.is_ok() {
                match stream.peek() {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                    Ok(1..) if looks < LOOKS => {}
                    Ok(_) | Err(_) if stream.is_hung_up() => return,
                    Ok(_) | Err(_) => {}
                }
                looks = if stream.is_hung_up() { looks + 1 } else { 0 };
                sleep(LOOK).await;
            }
        })
    }

    fn send_last(&self, bytes: &[u8]) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // The connection is closed anyway.
        let _sent = send(self.0.as_raw_fd(), bytes, flags);
    }
}

impl AsyncRead for SharedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(context))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|count| buffer.advance(count))),
            }
        }
    }
}

impl AsyncWrite for SharedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            match self.0.try_write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match shutdown(self.0.as_raw_fd(), Shutdown::Write) {
            // The peer may be gone.
            Ok(()) | Err(Errno::ENOTCONN) => Poll::Ready(Ok(())),
            Err(e) => Poll::Ready(Err(e.into())),
        }
    }
}
