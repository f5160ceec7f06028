//! What servers and clients of small transfers have in common.

use std::{
    io::{self, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::Context as _;
use clap::Args;

use super::socket_address;

/// A server.
#[derive(Debug, Args)]
pub struct Serve {
    #[arg(long, value_parser = socket_address)]
    on: SocketAddr,
}

/// A client.
#[derive(Debug, Args)]
pub struct Fetch {
    #[arg(long, value_parser = socket_address)]
    pub(super) to: SocketAddr,
}

/// Has each connection answered by a thread of its own, for as long as this process runs.
#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn serve(args: &Serve, answer: fn(TcpStream) -> io::Result<()>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.on).with_context(|| args.on.to_string())?;
    println!("listening");
    io::stdout().flush()?;
    loop {
        let (stream, _) = listener.accept()?;
        // A client that breaks off is no error of the server's.
        let _detached = thread::Builder::new().spawn(move || answer(stream));
    }
}
