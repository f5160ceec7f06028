//! Child processes at the ends of a link: `rto-lab end ROLE`, told what to do on stdin, a line an order, an
//! answer on stdout for each.

mod flow;
pub mod http;
mod load;
mod rr;
mod rtt;
mod tcp;

use std::{net::SocketAddr, path::PathBuf};

use clap::Subcommand;

use crate::ground::process::beside;
pub use rtt::Watched;

/// What an end does.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// Answer request/response clients; says "listening"
    Answer(rr::Answer),
    /// Take whatever is sent, by TCP and UDP; says "listening"
    Sink(load::Sink),
    /// Send bursts over a TCP connection, at random times
    Bursts(load::Bursts),
    /// Send UDP packets at random times, whatever becomes of them
    Flood(load::Flood),
    /// Be a request/response client that does what it is told
    Ask(rr::Ask),
    /// Answer request/response clients, and say how TCP sees them; says "listening"
    WatchServer(rtt::WatchServer),
    /// Be such a client, with pauses
    WatchClient(rtt::WatchClient),
    /// Answer HTTP/1.1 requests; says "listening"
    HttpServe(tcp::Serve),
    /// Be an HTTP/1.1 client that does what it is told
    HttpFetch(tcp::Fetch),
    /// Answer with flows of the length that is asked for; says "listening"
    FlowServe(tcp::Serve),
    /// Fetch flows as it is told
    FlowFetch(tcp::Fetch),
}

/// Runs a role until its work or its stdin ends.
///
/// # Errors
///
/// Those of the role.
pub fn run(role: &Role) -> anyhow::Result<()> {
    match role {
        Role::Answer(args) => rr::answer(args),
        Role::Ask(args) => rr::ask(args),
        Role::Sink(args) => load::sink(args),
        Role::Bursts(args) => load::bursts(args),
        Role::Flood(args) => load::flood(args),
        Role::WatchServer(args) => rtt::server(args),
        Role::WatchClient(args) => rtt::client(args),
        Role::HttpServe(args) => tcp::serve(args, http::answer),
        Role::HttpFetch(args) => http::fetch(args),
        Role::FlowServe(args) => tcp::serve(args, flow::answer),
        Role::FlowFetch(args) => flow::fetch(args),
    }
}

/// This program, also from within a test: RTO_LAB_BIN, or itself, or beside the test.
///
/// # Errors
///
/// If it was not built.
pub fn binary() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("RTO_LAB_BIN") {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    if own.file_stem().is_some_and(|name| name == "rto-lab") {
        return Ok(own);
    }
    beside("rto-lab")
}

/// Where to listen, or to connect to.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("{text}: not an address and port, such as 10.89.0.2:4700"))
}
