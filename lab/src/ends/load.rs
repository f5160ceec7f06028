//! Load on a link, at random times, so that queues vary.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

use super::socket_address;

/// A server that takes everything.
#[derive(Debug, Args)]
pub struct Sink {
    #[arg(long, value_parser = socket_address)]
    on: SocketAddr,
}

/// What both kinds of senders take.
#[derive(Debug, Args)]
struct Sender {
    #[arg(long, value_parser = socket_address)]
    to: SocketAddr,
    /// Bytes at once
    #[arg(long)]
    bytes: usize,
    /// Mean time between two sends; they are as random as calls to an exchange
    #[arg(long)]
    mean_us: u64,
    #[arg(long)]
    for_ms: u64,
    #[arg(long)]
    seed: u64,
}

/// A TCP sender.
#[derive(Debug, Args)]
pub struct Bursts {
    #[command(flatten)]
    sender: Sender,
}

/// A UDP sender.
#[derive(Debug, Args)]
pub struct Flood {
    #[command(flatten)]
    sender: Sender,
}

#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn sink(args: &Sink) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.on).with_context(|| args.on.to_string())?;
    // Not read: what does not fit is dropped, and nobody is told that the port is closed.
    let _packets = UdpSocket::bind(args.on).with_context(|| args.on.to_string())?;
    println!("listening");
    io::stdout().flush()?;
    loop {
        let (mut stream, _) = listener.accept()?;
        let _detached = thread::Builder::new().spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while stream.read(&mut buffer).is_ok_and(|length| length > 0) {}
        });
    }
}

pub(super) fn bursts(args: &Bursts) -> anyhow::Result<()> {
    let sender = &args.sender;
    let mut stream = TcpStream::connect(sender.to)?;
    stream.set_nodelay(true)?;
    // What the link does not take is waited for until the end; the parent kills what takes longer.
    sender.each(|bytes| stream.write_all(bytes))
}

pub(super) fn flood(args: &Flood) -> anyhow::Result<()> {
    let sender = &args.sender;
    let any: SocketAddr = if sender.to.is_ipv6() {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    } else {
        (std::net::Ipv4Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(sender.to)?;
    // Lost if a queue is full.
    sender.each(|bytes| socket.send(bytes).map(drop).or(Ok(())))
}

impl Sender {
    /// Sends until the time is over; then says so.
    #[expect(clippy::print_stdout, reason = "its parent reads it")]
    fn each(&self, mut send: impl FnMut(&[u8]) -> io::Result<()>) -> anyhow::Result<()> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let bytes = vec![0; self.bytes];
        let begin = Instant::now();
        let end = begin + Duration::from_millis(self.for_ms);
        let mean = Duration::from_micros(self.mean_us);
        let mut next = begin;
        loop {
            // Between 0 and 1, but never 0.
            let uniform: f64 = 1.0 - rng.random::<f64>();
            next += mean.mul_f64(-uniform.ln());
            if next >= end {
                break;
            }
            thread::sleep(next.saturating_duration_since(Instant::now()));
            send(&bytes)?;
        }
        println!("done");
        io::stdout().flush()?;
        Ok(())
    }
}
