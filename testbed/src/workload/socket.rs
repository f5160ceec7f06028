//! Sockets that are made in single steps, which the standard library does not offer.

use std::{
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, bind, getsockopt, socket, sockopt,
    },
};

use crate::tcp::length;

/// A TCP socket, or an MPTCP one.
pub(super) fn make(v6: bool, mptcp: bool) -> nix::Result<OwnedFd> {
    // nix has no constant for it.
    const IPPROTO_MPTCP: libc::c_int = 262;
    let family = if v6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    if !mptcp {
        return socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes three numbers.
    let raw = Errno::result(unsafe { libc::socket(family as libc::c_int, kind, IPPROTO_MPTCP) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// connect(2).
pub(super) fn connect(socket: &OwnedFd, to: SocketAddr) -> nix::Result<()> {
    nix::sys::socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(to))
}

/// Starts to connect, without waiting.
pub(super) fn begin(to: SocketAddr) -> anyhow::Result<OwnedFd> {
    let socket = make(to.is_ipv6(), false)?;
    begin_on(&socket, to)?;
    Ok(socket)
}

/// Starts to connect from a given address.
pub(super) fn begin_from(from: SocketAddr, to: SocketAddr) -> anyhow::Result<OwnedFd> {
    let socket = make(to.is_ipv6(), false)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(from))?;
    begin_on(&socket, to)?;
    Ok(socket)
}

/// Starts to connect an existing socket, without waiting.
pub(super) fn begin_on(socket: &OwnedFd, to: SocketAddr) -> anyhow::Result<()> {
    fcntl(socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    match connect(socket, to) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Starts to connect, gives up after 50 ms, and makes the socket usable for another connect().
pub(super) fn try_first(socket: &OwnedFd, to: SocketAddr) -> anyhow::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    let set = |flags| fcntl(socket, FcntlArg::F_SETFL(flags));
    set(flags | OFlag::O_NONBLOCK)?;
    match connect(socket, to) {
        Err(Errno::EINPROGRESS) => {}
        other => anyhow::bail!("first connect: {other:?}"),
    }
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
    let ready = poll(&mut fds, PollTimeout::from(50u16))?;
    anyhow::ensure!(
        ready == 0,
        "the first address answered: {:?}",
        getsockopt(socket, sockopt::SocketError)
    );
    disconnect(socket)?;
    set(flags)?;
    Ok(())
}

/// Ends the connection of a socket, which may then connect again.
pub(super) fn disconnect(socket: &OwnedFd) -> io::Result<()> {
    // connect() to AF_UNSPEC dissolves the association (connect(2)).
    let unspecified = libc::sockaddr {
        sa_family: 0,
        sa_data: [0; 14],
    };
    // SAFETY: the address is a live sockaddr of the size given.
    let done = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            &raw const unspecified,
            length::<libc::sockaddr>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Waits until a connect() that was started ends; fails with its errno.
pub(super) fn wait(socket: &OwnedFd) -> nix::Result<()> {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
    poll(&mut fds, PollTimeout::NONE)?;
    match getsockopt(socket, sockopt::SocketError)? {
        0 => Ok(()),
        errno => Err(Errno::from_raw(errno)),
    }
}

/// The IPv4-mapped address for an AF_INET6 socket.
pub(super) fn map(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) => SocketAddrV6::new(v4.to_ipv6_mapped(), address.port(), 0, 0).into(),
        IpAddr::V6(_) => address,
    }
}
