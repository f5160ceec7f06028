//! Logs and metrics. (stdout is for data; logs go to the journal or to stderr.)

pub mod http;
pub mod metrics;

use std::{
    io::{self, Write},
    os::{fd::AsFd as _, unix::net::UnixDatagram},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde_json::{Map, Value};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    filter::Targets, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// The journal if stderr is connected to it, else text.
    #[default]
    Auto,
    /// Lines of text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Lines that were dropped because the log was not read fast enough.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// The number of lines that were dropped because the log was not read fast enough.
#[must_use]
pub fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Installs the log. Logging never blocks: see `Lossy`. `RTO_AGENT_LOG` sets the level (`info` by default), also by
/// target, in the syntax of [`Targets`].
pub fn init(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var("RTO_AGENT_LOG") {
        Ok(text) => text
            .parse::<Targets>()
            .map_err(|e| anyhow::anyhow!("RTO_AGENT_LOG={text:?}: {e}; for instance debug"))?,
        // aya logs its internals through the `log` crate.
        Err(_) => Targets::new().with_default(LevelFilter::INFO),
    };
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer();
    let stderr = || Lossy(Stderr);
    match format {
        LogFormat::Auto if stderr_is_journal() => {
            let journal = Journal::at("/run/systemd/journal/socket")?;
            let journal = move || Lossy(journal.clone());
            let layer = layer.json().flatten_event(true).with_writer(journal);
            registry.with(layer).try_init()?;
        }
        LogFormat::Auto | LogFormat::Text => {
            let color = io::IsTerminal::is_terminal(&io::stderr());
            let layer = layer.with_target(false).with_ansi(color);
            registry.with(layer.with_writer(stderr)).try_init()?;
        }
        LogFormat::Json => {
            let layer = layer.with_target(false).json();
            registry.with(layer.with_writer(stderr)).try_init()?;
        }
    }
    Ok(())
}

/// Reports success for every line, and counts lines that could not be written.
struct Lossy<W>(W);

impl<W: Write> Write for Lossy<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.0.write_all(line).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to stderr as much as it accepts without blocking. (The descriptor itself stays blocking,
/// because other processes may share it.)
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        // Until the write, no other thread of this process can use up the free space.
        let mut locked = stderr.lock();
        let mut ready = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        if poll(&mut ready, PollTimeout::ZERO)? == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // If poll reports a pipe as writable, it has room for PIPE_BUF bytes (pipe(7)).
        locked.write(&text[..text.len().min(libc::PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends lines of JSON to the journal, with their fields (systemd.io/JOURNAL_NATIVE_PROTOCOL). A
/// line too long for a datagram goes to stderr, which leads to the journal as well.
#[derive(Clone)]
struct Journal {
    socket: Arc<UnixDatagram>,
    path: Arc<Path>,
}

impl Journal {
    fn at(path: &str) -> io::Result<Self> {
        let socket = Arc::new(UnixDatagram::unbound()?);
        socket.set_nonblocking(true)?;
        let path = Path::new(path).into();
        Ok(Self { socket, path })
    }
}

impl Write for Journal {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let sent = match serde_json::from_slice(line) {
            Ok(fields) => self.socket.send_to(&journal_entry(&fields), &self.path),
            Err(e) => Err(e.into()),
        };
        match sent {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Stderr.write_all(line)?,
            sent => drop(sent?),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An event's fields in the journal's format: the level as a syslog(3) priority, names in capitals.
fn journal_entry(fields: &Map<String, Value>) -> Vec<u8> {
    let mut entry = b"SYSLOG_IDENTIFIER=rto-agent\n".to_vec();
    for (name, value) in fields {
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let (name, text) = match (&**name, &*text) {
            ("timestamp", _) => continue,
            ("level", "ERROR") => ("PRIORITY", "3"),
            ("level", "WARN") => ("PRIORITY", "4"),
            ("level", "INFO") => ("PRIORITY", "5"),
            ("level", "DEBUG") => ("PRIORITY", "6"),
            ("level", _) => ("PRIORITY", "7"),
            other => other,
        };
        let name = name.to_ascii_uppercase().replace('.', "_");
        entry.extend_from_slice(name.trim_start_matches('_').as_bytes());
        entry.push(b'\n');
        entry.extend_from_slice(&(text.len() as u64).to_le_bytes());
        entry.extend_from_slice(text.as_bytes());
        entry.push(b'\n');
    }
    entry
}

/// Whether stderr is the journal's stream: systemd.exec(5), `$JOURNAL_STREAM` = device:inode.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let Ok(stat) = nix::sys::stat::fstat(io::stderr().as_fd()) else {
        return false;
    };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_journal_drops_lines_and_counts_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let reader = UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        let mut journal = Journal::at(path.to_str().unwrap()).unwrap();
        let mut taken = 0;
        while journal.write_all(b"{}").is_ok() {
            taken += 1;
        }
        assert!(taken > 0);
        let before = dropped_lines();
        let line = br#"{"message":"later"}"#;
        let mut log = Lossy(journal);
        assert_eq!(log.write(line).unwrap(), line.len());
        assert!(dropped_lines() > before);
        let mut buffer = [0; 256];
        for _ in 0..taken {
            reader.recv(&mut buffer).unwrap();
        }
        assert!(reader.recv(&mut buffer).is_err(), "nothing else was kept");
        log.write_all(line).unwrap();
        let length = reader.recv(&mut buffer).unwrap();
        assert!(buffer[..length].ends_with(b"later\n"));
    }

    #[test]
    fn journal_entry_has_fields_of_any_text() {
        let line = r#"{"timestamp":"t","level":"WARN","message":"a\nb","audit":true,"map.id":7}"#;
        let entry = journal_entry(&serde_json::from_str(line).unwrap());
        let field = |name: &str, value: &str| {
            let length = (value.len() as u64).to_le_bytes();
            [name.as_bytes(), b"\n", &length, value.as_bytes(), b"\n"].concat()
        };
        let mut wanted = b"SYSLOG_IDENTIFIER=rto-agent\n".to_vec();
        // serde_json's maps are sorted by key.
        for (name, value) in [
            ("AUDIT", "true"),
            ("PRIORITY", "4"),
            ("MAP_ID", "7"),
            ("MESSAGE", "a\nb"),
        ] {
            wanted.extend(field(name, value));
        }
        assert_eq!(entry, wanted);
    }
}
