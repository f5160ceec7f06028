//! The CLI's side: one request over the Unix socket.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response,
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use rto_agent_core::wire::types::ErrorAnswer;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{net::UnixStream, runtime::Runtime, task::JoinHandle};

/// A daemon that takes longer to answer is stuck.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The head of an answer, and the task that drives its connection.
type Exchange = (Response<Incoming>, JoinHandle<hyper::Result<()>>);

/// Why a request got no answer. The text says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon listens on the socket.
    #[error(
        "no rto-agent daemon answers at {socket}: {reason}; start it (systemctl start rto-agent), \
         or give its socket with --socket or RTO_AGENT_SOCKET"
    )]
    NotRunning {
        /// The socket.
        socket: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// This user may not use the socket.
    #[error(
        "{socket}: permission denied; only root and the group set in [agent] group may use the \
         socket"
    )]
    NotPermitted {
        /// The socket.
        socket: PathBuf,
    },
    /// The daemon refused the request.
    #[error("{0}")]
    Refused(String),
    /// The daemon ended during a stream.
    #[error("the daemon at {socket} closed the connection before it answered")]
    Ended {
        /// The socket.
        socket: PathBuf,
    },
    /// The answer is invalid.
    #[error("the daemon at {socket} sent an invalid answer: {reason}")]
    Broken {
        /// The socket.
        socket: PathBuf,
        /// What is invalid.
        reason: String,
    },
}

/// A client of a daemon's socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    /// A client of the daemon at `socket`.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            timeout: TIMEOUT,
        }
    }

    /// Sets the time limit for an answer.
    pub fn within(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// `GET path`.
    pub fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ClientError> {
        self.request(Method::GET, path, Bytes::new())
    }

    /// `POST path` with a JSON body.
    pub fn post<A: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<A, ClientError> {
        let body = serde_json::to_vec(body).map_err(|e| self.broken(e))?;
        self.request(Method::POST, path, body.into())
    }

    /// `GET path` of an endless answer: passes each line to `take` until that fails or the daemon
    /// ends.
    ///
    /// # Errors
    ///
    /// A [`ClientError`], or the error of `take`; never `Ok`.
    pub fn lines<E: From<ClientError>>(
        &self,
        path: &str,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<std::convert::Infallible, E> {
        let runtime = self.runtime()?;
        runtime.block_on(async {
            let exchange = self.exchange(Method::GET, path, Bytes::new());
            let exchange = tokio::time::timeout(self.timeout, exchange).await;
            let (response, _driver) = exchange.unwrap_or_else(|_| Err(self.silent()))?;
            let mut body = response.into_body();
            let mut rest = Vec::new();
            while let Some(frame) = body.frame().await {
                // A killed daemon does not end the stream properly.
                let Ok(frame) = frame else {
                    break;
                };
                let Ok(data) = frame.into_data() else {
                    continue;
                };
                rest.extend_from_slice(&data);
                let whole = rest
                    .iter()
                    .rposition(|b| *b == b'\n')
                    .map_or(0, |at| at + 1);
                for line in rest[..whole].split(|b| *b == b'\n') {
                    if !line.is_empty() {
                        take(line)?;
                    }
                }
                rest.drain(..whole);
            }
            let socket = self.socket.clone();
            Err(ClientError::Ended { socket }.into())
        })
    }

    fn request<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<A, ClientError> {
        let answer = self.runtime()?.block_on(async {
            let whole = async {
                let (response, driver) = self.exchange(method, path, body).await?;
                let collected = response.into_body().collect().await;
                driver.abort();
                Ok(collected.map_err(|e| self.broken(e))?.to_bytes())
            };
            let whole = tokio::time::timeout(self.timeout, whole).await;
            whole.unwrap_or_else(|_| Err(self.silent()))
        })?;
        serde_json::from_slice(&answer).map_err(|e| self.broken(e))
    }

    fn runtime(&self) -> Result<Runtime, ClientError> {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| self.broken(e))
    }

    /// The head of a successful answer, whose body follows, and the task that drives the
    /// connection.
    ///
    /// A GET is repeated once if the connection breaks. If no daemon is running any more, the
    /// second attempt reports that. A running daemon may have dropped the client after
    /// [`LIMITS`](super::server::LIMITS)' `head_timeout`, for example because the whole machine was
    /// suspended.
    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Exchange, ClientError> {
        let is_reading = method == Method::GET;
        let first = self.attempt(method.clone(), path, body.clone()).await;
        match first {
            Err(ClientError::Broken { .. }) if is_reading => self.attempt(method, path, body).await,
            first => first,
        }
    }

    async fn attempt(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Exchange, ClientError> {
        let stream = self.connect().await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| self.broken(e))?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "rto-agent")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|e| self.broken(e))?;
        let response = sender.send_request(request).await;
        let response = response.map_err(|e| self.broken(e))?;
        let status = response.status();
        if status.is_success() {
            return Ok((response, driver));
        }
        let bytes = response.into_body().collect().await;
        let bytes = bytes.map_err(|e| self.broken(e))?.to_bytes();
        driver.abort();
        match serde_json::from_slice::<ErrorAnswer>(&bytes) {
            Ok(answer) => Err(ClientError::Refused(answer.error)),
            Err(_) => Err(self.broken(format!("HTTP status {status}"))),
        }
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        UnixStream::connect(&self.socket).await.map_err(|reason| {
            let socket = self.socket.clone();
            if reason.kind() == io::ErrorKind::PermissionDenied {
                ClientError::NotPermitted { socket }
            } else {
                ClientError::NotRunning { socket, reason }
            }
        })
    }

    fn silent(&self) -> ClientError {
        self.broken(format!("no answer within {} s", self.timeout.as_secs()))
    }

    fn broken(&self, reason: impl std::fmt::Display) -> ClientError {
        ClientError::Broken {
            socket: self.socket.clone(),
            reason: reason.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixListener,
        thread,
    };

    use super::*;

    /// The result of a request to a daemon that drops `dropped` connections, and then ends or
    /// answers.
    fn received(
        dropped: usize,
        does_answer: bool,
        request: impl FnOnce(&Client) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = thread::spawn(move || {
            let mut last = None;
            for _ in 0..dropped {
                drop(last.take());
                last = Some(listener.accept().unwrap());
            }
            if does_answer {
                drop(last.take());
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull";
                stream.write_all(answer).unwrap();
            }
            // The listener is closed by the time the last connection is answered.
            drop(listener);
            drop(last);
        });
        let answer = request(&Client::new(&socket));
        daemon.join().unwrap();
        answer
    }

    #[test]
    fn connection_closed_before_answer_is_error() {
        let get = |client: &Client| client.get::<()>("/v1/entries");
        let post = |client: &Client| client.post::<()>("/v1/reload", &());
        let broken = |answer| matches!(answer, Err(ClientError::Broken { .. }));
        assert!(matches!(
            received(1, false, get),
            Err(ClientError::NotRunning { .. })
        ));
        received(1, true, get).unwrap();
        assert!(broken(received(2, false, get)));
        // The daemon may have processed the request.
        assert!(broken(received(1, false, post)));
    }
}
