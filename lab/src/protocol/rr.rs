//! Request/response of one byte and two bytes, and how TCP sees it at both ends.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context as _;
use rto_testbed::{
    tcp::TcpInfo,
    workload::rr::{Client, CloseMode, Options, Sizes, serve_connection},
};

use super::Times;

/// How TCP sees the connection at each request, by the client's port.
#[derive(Clone, Default)]
pub(super) struct Infos(Arc<Mutex<HashMap<u16, Vec<TcpInfo>>>>);

impl Infos {
    /// Answers a connection.
    pub(super) fn watch(&self, stream: TcpStream, options: Options) -> anyhow::Result<()> {
        let port = stream.peer_addr()?.port();
        serve_connection(stream, options, |stream| {
            if let Ok(info) = TcpInfo::of(stream) {
                let mut infos = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                infos.entry(port).or_default().push(info);
            }
        })
    }

    /// Removes the entry of a client; another client may use the port later.
    pub(super) fn take(&self, port: u16) -> anyhow::Result<Vec<TcpInfo>> {
        let mut infos = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_client = infos.remove(&port);
        of_client.context("no transactions of this client")
    }
}

/// Answers a connection whose TCP state is not requested.
pub(super) fn serve(stream: TcpStream, options: Options) -> anyhow::Result<()> {
    serve_connection(stream, options, |_| {})
}

/// Transactions over one connection.
pub(super) struct Transactions(Client);

impl Transactions {
    pub(super) fn connect(to: SocketAddr, request: u32, options: Options) -> anyhow::Result<Self> {
        let sizes = Sizes {
            request,
            ..Sizes::SMALL
        };
        Ok(Self(Client::connect(to, sizes, options)?))
    }
}

impl super::Client for Transactions {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let mut infos = Vec::new();
        while times.next() {
            let took = self.0.transact()?;
            times.add(took);
            infos.push(TcpInfo::of(self.0.stream())?);
            times.rest();
        }
        times.seen.tcp = Some((self.0.stream().local_addr()?.port(), infos));
        Ok(())
    }
}

/// One connection: connect, request, answer, close.
pub(super) fn check(to: SocketAddr, options: Options) -> anyhow::Result<()> {
    let (mut client, _) = Client::open(to, Sizes::SMALL, options, CloseMode::OneShot, &|| true)?;
    client.transact()?;
    Ok(client.wait_for_end(&|| true)?)
}
