//! Both ends of a request/response connection with pauses, and how TCP sees it at each.

use std::{
    collections::HashMap,
    io::{self, BufRead as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::socket_address;
use crate::rr::{Client, Info, Options, Sizes, answer, measure::Times};

/// A server. Orders: the port of a client; says the [`Info`] of the connection, as its transactions saw it.
#[derive(Debug, Args)]
pub struct WatchServer {
    #[arg(long, value_parser = socket_address)]
    on: SocketAddr,
    /// Transactions of each connection that are left out of it
    #[arg(long)]
    skip: usize,
}

/// A client: transactions with pauses; says what came of them, and keeps the connection until its stdin ends.
#[derive(Debug, Args)]
pub struct WatchClient {
    #[arg(long, value_parser = socket_address)]
    to: SocketAddr,
    #[arg(long)]
    pause_ms: u64,
    /// Transactions that are left out
    #[arg(long)]
    skip: usize,
    /// Transactions after them
    #[arg(long)]
    count: usize,
}

/// What a client says.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Watched {
    /// Its port.
    pub port: u16,
    /// How long transactions took.
    pub latency: Times,
    /// How its kernel sees the connection.
    pub info: Info,
}

/// By the client's port.
type Seen = Arc<Mutex<HashMap<u16, Vec<Info>>>>;

#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn server(args: &WatchServer) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.on).with_context(|| args.on.to_string())?;
    println!("listening");
    io::stdout().flush()?;
    let seen = Seen::default();
    let all = Arc::clone(&seen);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let all = Arc::clone(&all);
            thread::spawn(move || watched(stream, &all));
        }
    });
    for line in io::stdin().lock().lines() {
        let line = line?;
        let port: u16 = line.parse().with_context(|| line.clone())?;
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let infos = seen.get(&port).map_or(&[][..], Vec::as_slice);
        let typical = Info::typical(infos.get(args.skip..).unwrap_or_default());
        let typical = typical.context("no transactions of this client")?;
        println!("{}", serde_json::to_string(&typical)?);
        io::stdout().flush()?;
    }
    Ok(())
}

fn watched(stream: TcpStream, seen: &Seen) -> anyhow::Result<()> {
    let port = stream.peer_addr()?.port();
    answer(stream, Options::default(), |stream| {
        if let Ok(info) = Info::of(stream) {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.entry(port).or_default().push(info);
        }
    })
}

#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn client(args: &WatchClient) -> anyhow::Result<()> {
    let mut client = Client::connect(args.to, Sizes::SMALL, Options::default())?;
    let mut latencies = Histogram::<u64>::new(3)?;
    let mut infos = Vec::with_capacity(args.count);
    for number in 0..args.skip + args.count {
        let took = client.transact()?;
        if number >= args.skip {
            latencies.record(u64::try_from(took.as_micros())?)?;
            infos.push(Info::of(client.stream())?);
        }
        if args.pause_ms > 0 {
            thread::sleep(Duration::from_millis(args.pause_ms));
        }
    }
    let watched = Watched {
        port: client.stream().local_addr()?.port(),
        latency: Times::of(&latencies).context("nothing to measure")?,
        info: Info::typical(&infos).context("nothing to measure")?,
    };
    println!("{}", serde_json::to_string(&watched)?);
    io::stdout().flush()?;
    // Its parent asks the server next.
    io::stdin().lock().lines().for_each(drop);
    Ok(())
}
