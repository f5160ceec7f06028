//! Connections without TLS.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use rto_testbed::workload::rr::{Client, CloseMode, Options, Sizes};

/// Has each connection served by a thread of its own; returns when the listener fails.
pub(super) fn serve<E>(
    listener: &TcpListener,
    connection: impl Fn(TcpStream) -> Result<(), E> + Clone + Send + 'static,
) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        let connection = connection.clone();
        // A client that breaks off is no error of the server's.
        let _detached = thread::Builder::new().spawn(move || connection(stream).is_ok());
    }
}

/// A connection, one request, its answer, and the end of the connection.
pub(super) fn check(to: SocketAddr) -> anyhow::Result<()> {
    let (sizes, close) = (Sizes::SMALL, CloseMode::OneShot);
    let (mut client, _) = Client::open(to, sizes, Options::default(), close, &|| true)?;
    client.transact()?;
    Ok(client.wait_for_end(&|| true)?)
}
