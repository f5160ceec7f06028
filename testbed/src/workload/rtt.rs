//! Both ends of a request/response connection with pauses, and how TCP sees it at each.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::{
    rr::{self, Options, Sizes, serve_connection},
    stdio::{commands, reply, until_closed},
};
use crate::tcp::TcpInfo;

/// Transactions with pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Where to.
    pub to: SocketAddr,
    /// After each transaction.
    pub pause: Duration,
    /// How many.
    pub count: usize,
}

/// What a client has seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Seen {
    /// Its port.
    pub port: u16,
    /// How long each transaction took, microseconds.
    pub latencies_us: Vec<u64>,
    /// How its kernel sees the connection at each response.
    pub infos: Vec<TcpInfo>,
}

/// By the client's port.
type Infos = Arc<Mutex<HashMap<u16, Vec<TcpInfo>>>>;

pub(super) fn serve(on: SocketAddr) -> anyhow::Result<()> {
    let listener = super::listen(on)?;
    reply(&())?;
    let infos = Infos::default();
    let all = Arc::clone(&infos);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let all = Arc::clone(&all);
            thread::spawn(move || watched(stream, &all));
        }
    });
    commands(|port: u16| {
        // The port may be another client's after this one.
        let mut infos = infos.lock().unwrap_or_else(PoisonError::into_inner);
        let of_client = infos.remove(&port);
        of_client.context("no transactions of this client")
    })
}

fn watched(stream: TcpStream, infos: &Infos) -> anyhow::Result<()> {
    let port = stream.peer_addr()?.port();
    serve_connection(stream, Options::default(), |stream| {
        if let Ok(info) = TcpInfo::of(stream) {
            let mut infos = infos.lock().unwrap_or_else(PoisonError::into_inner);
            infos.entry(port).or_default().push(info);
        }
    })
}

impl Client {
    /// Keeps the connection until its stdin ends: its parent asks the server next.
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let mut client = rr::Client::connect(self.to, Sizes::SMALL, Options::default())?;
        let mut latencies_us = Vec::with_capacity(self.count);
        let mut infos = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            let took = client.transact()?;
            latencies_us.push(took.as_micros().try_into()?);
            infos.push(TcpInfo::of(client.stream())?);
            if !self.pause.is_zero() {
                thread::sleep(self.pause);
            }
        }
        reply(&Seen {
            port: client.stream().local_addr()?.port(),
            latencies_us,
            infos,
        })?;
        until_closed();
        Ok(())
    }
}
