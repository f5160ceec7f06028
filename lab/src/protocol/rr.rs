//! Request/response of one byte and two bytes, and how TCP sees it at both ends.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpStream},
    panic,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::Context as _;
use rto_testbed::{
    tcp::TcpInfo,
    workload::rr::{Client, CloseMode, Options, Sizes, serve_connection},
};

use super::Times;
use crate::workload::Work;

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

/// Transactions over one connection, or over several at the same time.
pub(super) struct Transactions(Vec<Client>);

impl Transactions {
    pub(super) fn connect(to: SocketAddr, work: Work, options: Options) -> anyhow::Result<Self> {
        let sizes = Sizes {
            request: work.request,
            ..Sizes::SMALL
        };
        let connections = 0..work.connections;
        let connections = connections.map(|_| Client::connect(to, sizes, options));
        Ok(Self(connections.collect::<Result<_, _>>()?))
    }
}

impl super::Client for Transactions {
    /// The connections begin evenly over the pause. TCP's view is that of the first one.
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let all = u32::try_from(self.0.len())?;
        let (until, pause) = (times.until, times.pause);
        thread::scope(|scope| {
            let mut each = (0..all).zip(&mut self.0);
            let first = each.next().context("no connection")?.1;
            let others: Vec<_> = each
                .map(|(number, client)| {
                    scope.spawn(move || {
                        thread::sleep(pause * number / all);
                        let mut times = Times::new(until, pause);
                        transact(client, &mut times).map(|_| times.seen.us)
                    })
                })
                .collect();
            let infos = transact(first, times)?;
            for other in others {
                let joined = other.join();
                let us = joined.unwrap_or_else(|panic| panic::resume_unwind(panic))?;
                times.seen.us.extend(us);
            }
            times.seen.tcp = Some((first.stream().local_addr()?.port(), infos));
            Ok(())
        })
    }
}

fn transact(client: &mut Client, times: &mut Times) -> anyhow::Result<Vec<TcpInfo>> {
    let mut infos = Vec::new();
    while times.next() {
        let took = client.transact()?;
        times.add(took);
        infos.push(TcpInfo::of(client.stream())?);
        times.rest();
    }
    Ok(infos)
}

/// One connection: connect, request, answer, close.
pub(super) fn check(to: SocketAddr, options: Options) -> anyhow::Result<()> {
    let (mut client, _) = Client::open(to, Sizes::SMALL, options, CloseMode::OneShot, &|| true)?;
    client.transact()?;
    Ok(client.wait_for_end(&|| true)?)
}
