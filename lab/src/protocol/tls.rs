//! TLS 1.3 handshakes with a self-made certificate; no session is resumed.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, Stream,
    client::Resumption,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName},
};

/// The name in the certificate.
const NAME: &str = "lab.invalid";
/// Time after which a step of a handshake has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Creates a certificate and the server's configuration; returns the certificate as DER.
pub(super) fn server() -> anyhow::Result<(Arc<ServerConfig>, Vec<u8>)> {
    let own = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let certificate = own.cert.der().clone();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der());
    let key = key.map_err(anyhow::Error::msg)?;
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)?;
    Ok((Arc::new(config), certificate.to_vec()))
}

/// A client that trusts only this certificate.
pub(super) fn client(certificate: &[u8]) -> anyhow::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(certificate.to_vec()))?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Performs a handshake, and echoes each byte of the client.
pub(super) fn serve_connection(
    mut stream: TcpStream,
    config: &Arc<ServerConfig>,
) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut connection = ServerConnection::new(Arc::clone(config))?;
    let mut secured = Stream::new(&mut connection, &mut stream);
    let mut byte = [0];
    while secured.read(&mut byte)? > 0 {
        secured.write_all(&byte)?;
    }
    Ok(())
}

/// Connects, performs the handshake, and exchanges one byte.
pub(super) fn handshake(to: SocketAddr, config: &Arc<ClientConfig>) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let name = ServerName::try_from(NAME).context("the certificate's name")?;
    let mut connection = ClientConnection::new(Arc::clone(config), name)?;
    let mut secured = Stream::new(&mut connection, &mut stream);
    secured.write_all(b"q")?;
    let mut byte = [0];
    secured.read_exact(&mut byte)?;
    ensure!(byte == *b"q", "the server echoed a different byte");
    connection.send_close_notify();
    // The server may already have closed the connection.
    let _told: io::Result<usize> = connection.write_tls(&mut stream);
    Ok(())
}
