//! The server's side: any number of connections, each in a thread of its own.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};

use super::{Ending, HEADER, Info, Opening, Options, TICK, TICK_MS};

/// A peer that has not been heard of for this long is asked whether it is there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// What a server has done.
#[derive(Debug, Default)]
pub struct Tally {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Requests answered, of connections that have ended.
    pub transactions: AtomicU64,
    /// Connections of peers that speak something else.
    pub foreign: AtomicU64,
}

/// A listening socket; one for `::` takes IPv4 as well.
///
/// # Errors
///
/// If the address cannot be had.
pub fn listen(on: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(on), Type::STREAM, None)?;
    if on.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&on.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// Answers connections; returns when the listener fails.
///
/// # Errors
///
/// Those of accept(2).
pub fn serve(listener: &TcpListener, options: Options) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that breaks off is no error of the server's.
        let _detached = thread::Builder::new().spawn(move || answer(stream, options, |_| {}));
    }
}

/// Answers connections as long as `go_on` says so. What a connection fails with is told to `complain`.
///
/// # Errors
///
/// Those of accept(2) that more patience does not mend.
pub fn serve_while(
    listener: &TcpListener,
    options: Options,
    tally: &Arc<Tally>,
    go_on: &dyn Fn() -> bool,
    complain: fn(SocketAddr, &anyhow::Error),
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    while go_on() {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                match poll(&mut fds, PollTimeout::from(TICK_MS)) {
                    Ok(_) | Err(Errno::EINTR) => continue,
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
            // Out of descriptors or memory: until connections end.
            Err(e) if short(&e) => {
                thread::sleep(TICK);
                continue;
            }
            Err(e) => return Err(e),
        };
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
        // A connection that is gone already refuses it.
        let _set = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        tally.connections.fetch_add(1, Ordering::Relaxed);
        let tally = Arc::clone(tally);
        let _detached = thread::Builder::new().spawn(move || {
            let mut answered = 0;
            let done = answer(stream, options, |_| answered += 1);
            tally.transactions.fetch_add(answered, Ordering::Relaxed);
            if let Err(error) = done {
                if error.downcast_ref::<io::Error>().is_none() {
                    tally.foreign.fetch_add(1, Ordering::Relaxed);
                }
                complain(peer, &error);
            }
        });
    }
    Ok(())
}

fn short(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(
        errno,
        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
    )
}

/// Answers one connection until its client ends it. `each` sees the socket with each request, before the answer:
/// the request's ACK has been taken into account by then.
///
/// # Errors
///
/// If the peer speaks something else, or breaks off.
pub fn answer(
    mut stream: TcpStream,
    options: Options,
    mut each: impl FnMut(&TcpStream),
) -> anyhow::Result<()> {
    options.apply(&stream)?;
    let mut header = [0; HEADER];
    if !whole(&mut stream, &mut header)? {
        // It only looked whether somebody listens.
        return Ok(());
    }
    let Opening { sizes, ending } = Opening::parse(header)?;
    let mut request = vec![0; sizes.request as usize];
    let response = vec![super::RESPONSE; sizes.response as usize];
    while whole(&mut stream, &mut request)? {
        each(&stream);
        stream.write_all(&response)?;
        if ending == Ending::Once {
            return Ok(());
        }
    }
    if ending == Ending::Told {
        let info = serde_json::to_vec(&Info::of(&stream)?)?;
        // It may have gone without waiting for this.
        let _heard = stream
            .write_all(&info)
            .and_then(|()| stream.shutdown(Shutdown::Write));
    }
    Ok(())
}

/// Whether there was another message, and not an end between two of them.
fn whole(stream: &mut TcpStream, message: &mut [u8]) -> io::Result<bool> {
    match stream.read_exact(message) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        done => done.map(|()| true),
    }
}
