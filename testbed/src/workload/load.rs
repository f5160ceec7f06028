//! Background load on a link at random times, so that its queues vary.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use serde::{Deserialize, Serialize};

use super::stdio::reply;

/// A sender. Its only reply is sent when it has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// The receiver's address.
    pub to: SocketAddr,
    /// Bytes per send.
    pub bytes: usize,
    /// Mean time between two sends; sends are a Poisson process.
    pub mean: Duration,
    /// Duration of the load.
    pub duration: Duration,
    /// Seed of the random times.
    pub seed: u64,
}

pub(super) fn sink(on: SocketAddr) -> anyhow::Result<()> {
    let listener = super::listen(on)?;
    // Never read: packets that do not fit are dropped, and an open port sends no ICMP errors.
    let _packets = UdpSocket::bind(on).with_context(|| on.to_string())?;
    reply(&())?;
    loop {
        let (mut stream, _) = listener.accept()?;
        let _detached = thread::Builder::new().spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while stream.read(&mut buffer).is_ok_and(|length| length > 0) {}
        });
    }
}

impl Sender {
    pub(super) fn bursts(&self) -> anyhow::Result<()> {
        let mut stream = TcpStream::connect(self.to)?;
        stream.set_nodelay(true)?;
        // A write may block until the end of the run; the parent kills a sender that takes longer.
        self.each(|bytes| stream.write_all(bytes))
    }

    pub(super) fn flood(&self) -> anyhow::Result<()> {
        let any: SocketAddr = if self.to.is_ipv6() {
            (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
        } else {
            (std::net::Ipv4Addr::UNSPECIFIED, 0).into()
        };
        let socket = UdpSocket::bind(any)?;
        socket.connect(self.to)?;
        // Packets are lost if a queue is full.
        self.each(|bytes| socket.send(bytes).map(drop).or(Ok(())))
    }

    /// Sends until the duration is over, then replies.
    fn each(&self, mut send: impl FnMut(&[u8]) -> io::Result<()>) -> anyhow::Result<()> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let bytes = vec![0; self.bytes];
        let begin = Instant::now();
        let end = begin + self.duration;
        let mut next = begin;
        loop {
            // Greater than 0 and at most 1.
            let uniform: f64 = 1.0 - rng.random::<f64>();
            next += self.mean.mul_f64(-uniform.ln());
            if next >= end {
                break;
            }
            thread::sleep(next.saturating_duration_since(Instant::now()));
            send(&bytes)?;
        }
        reply(&())
    }
}
