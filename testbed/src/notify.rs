//! The service manager's end of sd_notify(3).

use std::{
    io::{self, IoSliceMut},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::{bpf::made, wait::TIMEOUT};

/// A message that the socket sends to itself: messages before it in the queue have been read when it arrives.
const SENTINEL: &str = "DRAINED=1";

/// A socket for NOTIFY_SOCKET. A thread reads it all the time, as a service manager does; a full queue would block the
/// daemon.
#[derive(Debug)]
pub struct NotifySocket {
    messages: mpsc::Receiver<String>,
    path: PathBuf,
    store: Arc<Mutex<FdStore>>,
}

/// The file descriptor store of a service (systemd.service(5), FileDescriptorStoreMax=).
#[derive(Debug, Default)]
struct FdStore {
    max: usize,
    kept: Vec<(String, OwnedFd)>,
}

impl FdStore {
    /// Descriptors that are not kept are closed, BARRIER=1 among them: its sender waits until its descriptor is closed.
    fn receive(&mut self, text: &str, fds: Vec<OwnedFd>) {
        let has = |line: &str| text.lines().any(|l| l == line);
        let name = text.lines().find_map(|l| l.strip_prefix("FDNAME="));
        let name = name.unwrap_or("stored");
        if has("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| kept != name);
        }
        if has("FDSTORE=1") {
            let room = self.max.saturating_sub(self.kept.len());
            let fds = fds.into_iter().take(room);
            self.kept.extend(fds.map(|fd| (name.to_owned(), fd)));
        }
    }
}

impl NotifySocket {
    /// Binds the socket in a directory.
    pub fn new(dir: &Path) -> io::Result<Self> {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        let (sender, messages) = mpsc::channel();
        let bound = path.clone();
        let store = Arc::<Mutex<FdStore>>::default();
        let shared = Arc::clone(&store);
        thread::spawn(move || {
            // Ends after the test has removed its directory.
            while bound.exists() {
                if let Ok((text, fds)) = receive(&socket) {
                    let mut store = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    store.receive(&text, fds);
                    drop(store);
                    if sender.send(text).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Self {
            messages,
            path,
            store,
        })
    }

    /// Sets the capacity of the store, and closes surplus descriptors.
    pub fn keep(&self, max: usize) {
        let mut store = self.store();
        store.max = max;
        store.kept.truncate(max);
    }

    /// The names of the descriptors that are kept.
    #[must_use]
    pub fn kept(&self) -> Vec<String> {
        let store = self.store();
        store.kept.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Copies of the descriptors that are kept, for a start; the store keeps its own.
    pub(crate) fn handed_over(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let store = self.store();
        let copy = |(name, fd): &(String, OwnedFd)| Ok((name.clone(), fd.try_clone()?));
        store.kept.iter().map(copy).collect()
    }

    fn store(&self) -> std::sync::MutexGuard<'_, FdStore> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of NOTIFY_SOCKET.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The messages that were sent so far and not returned before. Messages of a process that has exited are included.
    pub fn drain(&self) -> anyhow::Result<Vec<String>> {
        UnixDatagram::unbound()?.send_to(SENTINEL.as_bytes(), &self.path)?;
        self.wait_for(SENTINEL, TIMEOUT, || None)
    }

    /// Waits for a message that has this line, and returns all messages up to it.
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
                        // Messages that the process sent before it exited are ahead of the sentinel.
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

/// One message, and the descriptors that came with it.
fn receive(socket: &UnixDatagram) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut buffer = [0u8; 4096];
    let mut control = nix::cmsg_space!([i32; 4]);
    let mut pieces = [IoSliceMut::new(&mut buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut pieces, Some(&mut control), flags)?;
    let mut fds = Vec::new();
    for one in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = one {
            fds.extend(raw.into_iter().map(made));
        }
    }
    let length = message.bytes;
    Ok((String::from_utf8_lossy(&buffer[..length]).into_owned(), fds))
}
