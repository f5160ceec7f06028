//! The service manager's end of sd_notify(3).

use std::{
    io,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::bail;

/// A socket for NOTIFY_SOCKET.
#[derive(Debug)]
pub struct NotifySocket {
    socket: UnixDatagram,
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
        Ok(Self { socket, path })
    }

    /// For the environment.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
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
        let mut messages = Vec::new();
        let mut buffer = [0u8; 4096];
        self.socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    let found = text.lines().any(|l| l.starts_with(line));
                    messages.push(text);
                    if found {
                        return Ok(messages);
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if let Some(how) = gone() {
                        bail!("no {line}: the process has ended: {how}");
                    }
                }
                Err(e) => return Err(e.into()),
            }
            if Instant::now() > end {
                bail!("no {line} within {limit:?}; there came {messages:?}");
            }
        }
    }
}
