//! The service manager's end of sd_notify(3).

use std::{
    io,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;

/// What this socket sends itself, to have what came before it.
const SENTINEL: &str = "DRAINED=1";

/// A socket for NOTIFY_SOCKET, read all the time as a service manager does: a full one would
/// block the daemon.
#[derive(Debug)]
pub struct NotifySocket {
    messages: mpsc::Receiver<String>,
    path: PathBuf,
}

impl NotifySocket {
    /// Binds it in a directory.
    ///
    /// # Errors
    ///
    /// If it cannot be bound.
    pub fn new(dir: &Path) -> io::Result<Self> {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        let (sender, messages) = mpsc::channel();
        let bound = path.clone();
        thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            // Ends once the test has removed its directory.
            while bound.exists() {
                if let Ok(length) = socket.recv(&mut buffer) {
                    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    if sender.send(text).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Self { messages, path })
    }

    /// For the environment.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What has been sent until now and was not yet asked for, also by a process that has ended meanwhile.
    ///
    /// # Errors
    ///
    /// If it cannot be sent to.
    pub fn drain(&self) -> anyhow::Result<Vec<String>> {
        UnixDatagram::unbound()?.send_to(SENTINEL.as_bytes(), &self.path)?;
        self.wait_for(SENTINEL, Duration::from_secs(10), || None)
    }

    /// Waits for a message with this line and returns every message until then.
    ///
    /// # Errors
    ///
    /// If none comes in time, or `gone` says that the sender has ended.
    pub fn wait_for(
        &self,
        line: &str,
        limit: Duration,
        mut gone: impl FnMut() -> Option<String>,
    ) -> anyhow::Result<Vec<String>> {
        let end = Instant::now() + limit;
        let (mut messages, mut ended) = (Vec::new(), None);
        loop {
            match self.messages.recv_timeout(Duration::from_millis(20)) {
                Ok(text) => {
                    if let Some(how) = ended.as_ref().filter(|_| text == SENTINEL) {
                        bail!("no {line}: the process has ended: {how}");
                    }
                    let found = text.lines().any(|l| l.starts_with(line));
                    messages.push(text);
                    if found {
                        return Ok(messages);
                    }
                }
                Err(_) if ended.is_some() => {}
                Err(_) => {
                    ended = gone();
                    if ended.is_some() {
                        // What it sent before its end comes before this.
                        UnixDatagram::unbound()?.send_to(SENTINEL.as_bytes(), &self.path)?;
                    }
                }
            }
            if Instant::now() > end {
                bail!("no {line} within {limit:?}; there came {messages:?}");
            }
        }
    }
}
