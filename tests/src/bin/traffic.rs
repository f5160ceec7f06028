//! Makes one connection, or listens; driven by the tests.

use std::{
    io::{self, Write as _},
    net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, connect, getsockopt, socket, sockopt,
    },
};

#[derive(Parser)]
enum Cli {
    /// connect(), print how it ended, keep the connection
    Connect {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        mapped: bool,
        #[arg(long)]
        syn_retries: Option<u8>,
        #[arg(long)]
        first: Option<SocketAddr>,
    },
    /// Accept and keep connections
    Serve {
        #[arg(long)]
        on: SocketAddr,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Connect {
            to,
            mapped,
            syn_retries,
            first,
        } => {
            let socket = make_socket(to.is_ipv6() || mapped)?;
            if let Some(n) = syn_retries {
                set_tcp(&socket, libc::TCP_SYNCNT, n.into())?;
            }
            if let Some(first) = first {
                try_first(&socket, first)?;
            }
            let to = if mapped { map(to) } else { to };
            let begin = Instant::now();
            let result = connect(socket.as_raw_fd(), &SockaddrStorage::from(to));
            let took = begin.elapsed().as_micros();
            let result = result.map_or_else(|e| format!("{e:?}"), |()| "connected".to_owned());
            say(&format!("{result} {took}"))?;
            keep();
            drop(socket);
        }
        Cli::Serve { on } => {
            let listener = TcpListener::bind(on)?;
            say("listening")?;
            let mut kept = Vec::new();
            for connection in listener.incoming() {
                kept.push(connection?);
            }
        }
    }
    Ok(())
}

fn make_socket(v6: bool) -> nix::Result<OwnedFd> {
    let family = if v6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
}

/// Begins to connect, gives up after 50 ms, and makes the socket fit to connect again.
fn try_first(socket: &OwnedFd, to: SocketAddr) -> anyhow::Result<()> {
    let flags = nix::fcntl::OFlag::from_bits_retain(nix::fcntl::fcntl(
        socket,
        nix::fcntl::FcntlArg::F_GETFL,
    )?);
    let set = |flags| nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_SETFL(flags));
    set(flags | nix::fcntl::OFlag::O_NONBLOCK)?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
        Err(Errno::EINPROGRESS) => {}
        other => anyhow::bail!("first connect: {other:?}"),
    }
    let mut fds = [PollFd::new(
        std::os::fd::AsFd::as_fd(socket),
        PollFlags::POLLOUT,
    )];
    let ready = poll(&mut fds, PollTimeout::from(50u16))?;
    anyhow::ensure!(
        ready == 0,
        "the first address answered: {:?}",
        getsockopt(socket, sockopt::SocketError)
    );
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
    anyhow::ensure!(done == 0, "disconnect: {}", io::Error::last_os_error());
    set(flags)?;
    Ok(())
}

fn set_tcp(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is a live c_int of the size given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            length::<libc::c_int>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn length<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

fn map(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) => SocketAddrV6::new(v4.to_ipv6_mapped(), address.port(), 0, 0).into(),
        IpAddr::V6(_) => address,
    }
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Until the test kills this process.
fn keep() {
    thread::sleep(Duration::from_secs(600));
}
