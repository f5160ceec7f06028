//! Makes one connection, or listens; driven by the tests.

use std::{
    io::{self, BufRead as _, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, SocketAddrV6, TcpListener, TcpStream},
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, getsockopt,
        listen, setsockopt, socket, sockopt,
    },
};
use rto_tests::{
    emulated::scaled,
    prober::{LOOKS, LOOKS_EMULATED, NEAR},
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
        /// Send a request in the SYN
        #[arg(long)]
        fast_open: bool,
        /// IPPROTO_MPTCP
        #[arg(long)]
        mptcp: bool,
        #[arg(long)]
        first: Option<SocketAddr>,
    },
    /// connect(), then do what stdin says, one line an order, one line an answer
    Talk {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        mapped: bool,
        /// IPPROTO_MPTCP
        #[arg(long)]
        mptcp: bool,
        /// Send the first request in the SYN
        #[arg(long)]
        fast_open: bool,
        /// TCP_USER_TIMEOUT the application sets itself, milliseconds
        #[arg(long)]
        user_timeout: Option<i32>,
    },
    /// Accept connections, and answer each request of a talk that wants an answer
    Answer {
        #[arg(long)]
        on: SocketAddr,
        /// IPPROTO_MPTCP
        #[arg(long)]
        mptcp: bool,
    },
    /// Begin many connections at once, and keep trying
    Knock {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        count: usize,
    },
    /// Accept and keep connections
    Serve {
        #[arg(long)]
        on: SocketAddr,
        /// TCP_DEFER_ACCEPT, seconds; then each connection that is accepted is told
        #[arg(long)]
        defer_accept: Option<i32>,
        #[arg(long)]
        syn_retries: Option<u8>,
    },
    /// From the order "begin" to the order "end" begin connections, one after another, and see what initial
    /// RTO the kernel has chosen; then say how many there were, those with another than expected, the
    /// first of these (microseconds), and the longest time between two connections (microseconds)
    Sample {
        /// Where SYNs get lost; each in turn
        #[arg(long)]
        to: Vec<SocketAddr>,
        /// Microseconds that are as they should be
        #[arg(long)]
        expect: Vec<u32>,
    },
    /// As often as stdin says, one line a number, make a connection to itself and end it; print how many
    /// nanoseconds that took
    Rate {
        #[arg(long)]
        on: SocketAddr,
        /// A cgroup to join once it listens: the accepted sockets stay with the listener
        #[arg(long)]
        join: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Connect {
            to,
            mapped,
            syn_retries,
            fast_open,
            mptcp,
            first,
        } => {
            let socket = make_socket(to.is_ipv6() || mapped, mptcp)?;
            if let Some(n) = syn_retries {
                set_tcp(&socket, libc::TCP_SYNCNT, n.into())?;
            }
            if let Some(first) = first {
                try_first(&socket, first)?;
            }
            let to = if mapped { map(to) } else { to };
            let begin = Instant::now();
            if fast_open {
                set_tcp(&socket, libc::TCP_FASTOPEN_CONNECT, 1)?;
            }
            let mut result = connect(socket.as_raw_fd(), &SockaddrStorage::from(to));
            if fast_open && result.is_ok() {
                // The SYN goes with the first write.
                result = nix::unistd::write(&socket, &[ANSWER; REQUEST]).map(drop);
            }
            let took = begin.elapsed().as_micros();
            let result = result.map_or_else(|e| format!("{e:?}"), |()| "connected".to_owned());
            say(&format!("{result} {took}"))?;
            keep();
            drop(socket);
        }
        Cli::Talk {
            to,
            mapped,
            mptcp,
            fast_open,
            user_timeout,
        } => {
            let socket = make_socket(to.is_ipv6() || mapped, mptcp)?;
            if let Some(millis) = user_timeout {
                set_tcp(&socket, libc::TCP_USER_TIMEOUT, millis)?;
            }
            if fast_open {
                set_tcp(&socket, libc::TCP_FASTOPEN_CONNECT, 1)?;
            }
            let to = if mapped { map(to) } else { to };
            connect(socket.as_raw_fd(), &SockaddrStorage::from(to))?;
            talk(TcpStream::from(socket))?;
        }
        Cli::Knock { to, count } => {
            let sockets = (0..count)
                .map(|_| {
                    let socket = make_socket(to.is_ipv6(), false)?;
                    nix::fcntl::fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
                        Ok(()) | Err(Errno::EINPROGRESS) => Ok(socket),
                        Err(e) => Err(e.into()),
                    }
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            say("begun")?;
            keep();
            drop(sockets);
        }
        Cli::Answer { on, mptcp } => {
            let socket = make_socket(on.is_ipv6(), mptcp)?;
            setsockopt(&socket, sockopt::ReuseAddr, &true)?;
            bind(socket.as_raw_fd(), &SockaddrStorage::from(on))?;
            listen(&socket, Backlog::new(64)?)?;
            say("listening")?;
            for connection in TcpListener::from(socket).incoming() {
                let connection = connection?;
                thread::spawn(move || answer(connection));
            }
        }
        Cli::Serve {
            on,
            defer_accept,
            syn_retries,
        } => {
            let listener = TcpListener::bind(on)?;
            if let Some(seconds) = defer_accept {
                set_tcp(&listener, libc::TCP_DEFER_ACCEPT, seconds)?;
            }
            if let Some(n) = syn_retries {
                set_tcp(&listener, libc::TCP_SYNCNT, n.into())?;
            }
            say("listening")?;
            let mut kept = Vec::new();
            for connection in listener.incoming() {
                kept.push(connection?);
                if defer_accept.is_some() {
                    say("accepted")?;
                }
            }
        }
        Cli::Sample { to, expect } => sample(to, expect)?,
        Cli::Rate { on, join } => {
            let listener = TcpListener::bind(on)?;
            if let Some(cgroup) = join {
                // "0" is the writing process itself.
                std::fs::write(cgroup.join("cgroup.procs"), "0")?;
            }
            say("listening")?;
            for line in io::stdin().lock().lines() {
                let count: u32 = line?.parse()?;
                let begin = Instant::now();
                for _ in 0..count {
                    converse(&listener, on)?;
                }
                say(&begin.elapsed().as_nanos().to_string())?;
            }
        }
    }
    Ok(())
}

/// What was seen since "begin".
#[derive(Default)]
struct Samples {
    on: bool,
    count: u64,
    wrong: u64,
    first_wrong_us: u32,
    longest_gap: Duration,
    /// See `rto_tests::prober::Seen`.
    covered: Duration,
    lasted: Duration,
    last: Option<Instant>,
}

impl Samples {
    /// Time has passed since the last look, or the beginning.
    fn pass(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            let gap = now - last;
            self.longest_gap = self.longest_gap.max(gap);
            self.lasted += gap;
            if gap <= NEAR {
                self.covered += gap;
            }
        }
    }
}

fn sample(to: Vec<SocketAddr>, expect: Vec<u32>) -> anyhow::Result<()> {
    let pause = Duration::from_secs(1) / scaled("looks a second", LOOKS, LOOKS_EMULATED);
    let samples = Arc::new(Mutex::new(Samples::default()));
    let shared = samples.clone();
    let sampler = thread::spawn(move || -> anyhow::Result<()> {
        for to in to.iter().cycle() {
            thread::sleep(pause);
            // Held over the connection: none is under way when "end" is answered.
            let mut samples = shared.lock().map_err(|e| anyhow::anyhow!("{e}"))?;
            if !samples.on {
                continue;
            }
            let socket = make_socket(to.is_ipv6(), false)?;
            nix::fcntl::fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            match connect(socket.as_raw_fd(), &SockaddrStorage::from(*to)) {
                Err(Errno::EINPROGRESS) => {}
                other => anyhow::bail!("connect to {to}: {other:?}"),
            }
            let rto_us = rto_us(&socket)?;
            samples.pass();
            samples.count += 1;
            if !expect.contains(&rto_us) {
                if samples.wrong == 0 {
                    samples.first_wrong_us = rto_us;
                }
                samples.wrong += 1;
            }
        }
        Ok(())
    });
    say("ready")?;
    for line in io::stdin().lock().lines() {
        let mut samples = samples.lock().map_err(|e| anyhow::anyhow!("{e}"))?;
        anyhow::ensure!(!sampler.is_finished(), "sampling has ended");
        match line?.as_str() {
            "begin" => {
                *samples = Samples {
                    on: true,
                    last: Some(Instant::now()),
                    ..Samples::default()
                };
                say("begun")?;
            }
            "end" => {
                samples.on = false;
                samples.pass();
                say(&format!(
                    "{} {} {} {} {} {}",
                    samples.count,
                    samples.wrong,
                    samples.first_wrong_us,
                    samples.longest_gap.as_micros(),
                    samples.covered.as_micros(),
                    samples.lasted.as_micros()
                ))?;
            }
            line => anyhow::bail!("{line:?} is no order"),
        }
    }
    Ok(())
}

/// One connection: a request and an answer of a byte each, then an orderly end that the client begins.
/// Both ends are in one thread: with two, what is measured is on which CPUs the scheduler puts them.
fn converse(listener: &TcpListener, on: SocketAddr) -> io::Result<()> {
    let mut client = TcpStream::connect(on)?;
    let (mut server, _) = listener.accept()?;
    client.write_all(&[ANSWER])?;
    server.read_exact(&mut [0])?;
    server.write_all(b"A")?;
    client.read_exact(&mut [0])?;
    client.shutdown(Shutdown::Write)?;
    let more = server.read(&mut [0])?;
    drop(server);
    match more + client.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::other("bytes where an end was due")),
    }
}

/// Length of a request.
const REQUEST: usize = 100;
/// First byte of a request that wants an answer of one byte.
const ANSWER: u8 = b'R';
/// Of one that does not.
const SILENT: u8 = b'S';

fn talk(mut stream: TcpStream) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    say(&format!("connected {}", stream.local_addr()?.port()))?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let reply = match words[..] {
            // So many requests and answers, with a pause of so many milliseconds before each.
            ["rounds", count, pause] => {
                for _ in 0..count.parse()? {
                    thread::sleep(Duration::from_millis(pause.parse()?));
                    stream.write_all(&[ANSWER; REQUEST])?;
                    stream.read_exact(&mut [0])?;
                }
                "done".to_owned()
            }
            // So many bytes that get no answer.
            ["send", bytes] => {
                stream.write_all(&vec![SILENT; bytes.parse()?])?;
                "done".to_owned()
            }
            // Until the connection fails: with what, and after how many microseconds.
            ["fail"] => {
                let begin = Instant::now();
                let error = stream.read(&mut [0]).err().and_then(|e| e.raw_os_error());
                let error =
                    error.map_or("none".to_owned(), |e| format!("{:?}", Errno::from_raw(e)));
                format!("{error} {}", begin.elapsed().as_micros())
            }
            // The value of a TCP option.
            ["option", number] => get_tcp(&stream, number.parse()?)
                .map_or_else(|e| e.to_string(), |value| value.to_string()),
            ["set", number, value] => set_tcp(&stream, number.parse()?, value.parse()?)
                .map_or_else(|e| e.to_string(), |()| "set".to_owned()),
            _ => anyhow::bail!("{line:?} is no order"),
        };
        say(&reply)?;
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; REQUEST];
    loop {
        stream.read_exact(&mut request)?;
        if request[0] == ANSWER {
            stream.write_all(b"A")?;
        }
    }
}

fn get_tcp(stream: &TcpStream, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut size = length::<libc::c_int>();
    // SAFETY: buffer and length are on the stack, the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut size,
        )
    };
    if done == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The RTO in force, microseconds.
fn rto_us(socket: &OwnedFd) -> io::Result<u32> {
    // SAFETY: plain numbers, for which 0 is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut size = length::<libc::tcp_info>();
    // SAFETY: buffer and length are on the stack, the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut size,
        )
    };
    if done == 0 {
        Ok(info.tcpi_rto)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn make_socket(v6: bool, mptcp: bool) -> nix::Result<OwnedFd> {
    let family = if v6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    if !mptcp {
        return socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
    }
    // nix has no name for it.
    const IPPROTO_MPTCP: libc::c_int = 262;
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes three numbers.
    let raw = Errno::result(unsafe { libc::socket(family as libc::c_int, kind, IPPROTO_MPTCP) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Begins to connect, gives up after 50 ms, and makes the socket fit to connect again.
fn try_first(socket: &OwnedFd, to: SocketAddr) -> anyhow::Result<()> {
    let flags = OFlag::from_bits_retain(nix::fcntl::fcntl(socket, FcntlArg::F_GETFL)?);
    let set = |flags| nix::fcntl::fcntl(socket, FcntlArg::F_SETFL(flags));
    set(flags | OFlag::O_NONBLOCK)?;
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

fn set_tcp(socket: &impl AsRawFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
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
