//! A listener for strangers: so many connections at once, and each for so long.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};

/// Connections at once: a few collectors and a person. The daemon's descriptors are for its maps.
const CONNECTIONS: usize = 16;
/// How long one may last; a collector then makes another.
const LIFETIME: Duration = Duration::from_secs(30);

/// A listener that waits with accepting while there are enough connections.
#[derive(Debug)]
pub(super) struct Limited<L> {
    listener: L,
    slots: Arc<Semaphore>,
}

impl<L> Limited<L> {
    /// Around a listener.
    pub(super) fn new(listener: L) -> Self {
        Self {
            listener,
            slots: Arc::new(Semaphore::new(CONNECTIONS)),
        }
    }
}

impl<L: Listener> Listener for Limited<L> {
    type Io = Guarded<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // Closed it is never.
        let slot = self.slots.clone().acquire_owned().await.ok();
        let (io, address) = self.listener.accept().await;
        let guarded = Guarded {
            io,
            end: Box::pin(sleep(LIFETIME)),
            _slot: slot,
        };
        (guarded, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with an end.
#[derive(Debug)]
pub(super) struct Guarded<I> {
    io: I,
    end: Pin<Box<Sleep>>,
    _slot: Option<OwnedSemaphorePermit>,
}

impl<I> Guarded<I> {
    /// Whether its time is over; else whoever waits is woken when it is.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        self.end.as_mut().poll(context).is_ready()
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Guarded<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Guarded<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncReadExt as _,
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;

    #[test]
    fn connections_are_limited() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut limited = Limited::new(listener);
            let mut clients = Vec::new();
            let mut accepted = Vec::new();
            for _ in 0..CONNECTIONS {
                clients.push(TcpStream::connect(address).await.unwrap());
                accepted.push(limited.accept().await.0);
            }
            clients.push(TcpStream::connect(address).await.unwrap());
            let soon = Duration::from_millis(50);
            assert!(timeout(soon, limited.accept()).await.is_err());
            accepted.pop();
            let (mut last, _) = timeout(soon * 100, limited.accept()).await.unwrap();
            // Time is over: reading ends.
            last.end = Box::pin(sleep(Duration::ZERO));
            let error = last.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}
