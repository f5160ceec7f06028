//! A Unix socket that is re-created if its path is removed.

use std::{
    fs, io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use axum::serve::Listener;
use nix::{
    sys::{
        socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket},
        stat::{Mode, fchmod},
    },
    unistd::{Gid, chown},
};
use rto_agent_core::path_security;
use tokio::{
    net::{UnixListener, UnixStream, unix::SocketAddr},
    time::{Interval, interval, sleep},
};
use tracing::warn;

use crate::problem::Problem;

/// Interval between checks that the path still leads to the socket.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Pause after a failed accept(), for example when descriptors are short.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The listener.
#[derive(Debug)]
pub struct RebindingListener {
    listener: UnixListener,
    path: PathBuf,
    group: Gid,
    inode: Arc<AtomicU64>,
    checks: Interval,
    problem: Problem,
}

/// The socket's file, removed when dropped (unless another daemon has put its own there).
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: Arc<AtomicU64>,
}

impl RebindingListener {
    /// Binds the socket with mode 0660 for root and `group`. Replaces a socket left by a killed
    /// daemon: the caller holds the instance lock, so it is not another daemon's.
    pub fn bind(path: &Path, group: Gid) -> anyhow::Result<(Self, Socket)> {
        check_directory(path)?;
        match fs::symlink_metadata(path) {
            Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path)?,
            Ok(_) => anyhow::bail!(
                "{} exists and is not a socket; move it away, or set [agent] socket to another \
                 path",
                path.display()
            ),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| path.display().to_string()),
        }
        let (listener, inode) = create(path, group)?;
        let inode = Arc::new(AtomicU64::new(inode));
        let file = Socket {
            path: path.to_owned(),
            inode: inode.clone(),
        };
        let bound = Self {
            listener,
            path: path.to_owned(),
            group,
            inode,
            checks: interval(CHECK_INTERVAL),
            problem: Problem::default(),
        };
        Ok((bound, file))
    }

    /// Re-creates the socket if it or its directory was removed. Does not touch another file at its
    /// path.
    fn ensure_bound(&mut self) {
        let problem = match fs::symlink_metadata(&self.path) {
            Ok(meta) if meta.ino() == self.inode.load(Ordering::Relaxed) => None,
            Ok(_) => Some("another file has its path".to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => match self.recreate() {
                Ok(()) => {
                    warn!(socket = %self.path.display(), "the socket was removed, and has been \
                                                          created again");
                    None
                }
                Err(e) => Some(format!(
                    "it was removed, and cannot be created again: {e:#}"
                )),
            },
            Err(e) => Some(e.to_string()),
        };
        let socket = self.path.display();
        self.problem.becomes(problem, |problem| {
            warn!(%socket, "clients cannot connect to the socket: {problem}");
        });
    }

    fn recreate(&mut self) -> anyhow::Result<()> {
        if let Some(dir) = self.path.parent() {
            path_security::make(dir, 0o755)?;
        }
        check_directory(&self.path)?;
        let (listener, inode) = create(&self.path, self.group)?;
        self.listener = listener;
        self.inode.store(inode, Ordering::Relaxed);
        Ok(())
    }
}

impl Listener for RebindingListener {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok(accepted) => return accepted,
                    Err(e) => {
                        warn!("a client's connection cannot be accepted: {e}");
                        sleep(RETRY_PAUSE).await;
                    }
                },
                _ = self.checks.tick() => self.ensure_bound(),
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Other users must not be able to put their own socket there.
fn check_directory(path: &Path) -> anyhow::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    path_security::check_shared(dir).with_context(|| format!("socket {}", path.display()))
}

/// The failed command, and how to fix it.
fn chgrp(path: &Path, group: Gid) -> String {
    format!(
        "chgrp {group} {}: this needs CAP_CHOWN, which the daemon drops after its start, or \
         membership in that group; restart the daemon with CAP_CHOWN (as root, or with the systemd \
         unit), or set [agent] group to a group that the daemon is in",
        path.display()
    )
}

/// Creates a socket at the path; returns its inode too.
fn create(path: &Path, group: Gid) -> anyhow::Result<(UnixListener, u64)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // Bound without any permission (unix_bind() takes the socket's mode), so that no client
    // connects before the group is set.
    fchmod(&socket, Mode::empty())?;
    UnixAddr::new(path)
        .and_then(|address| bind(socket.as_raw_fd(), &address))
        .with_context(|| format!("cannot listen on {}", path.display()))?;
    let inode = fs::symlink_metadata(path)?.ino();
    let ready = || -> anyhow::Result<UnixListener> {
        chown(path, None, Some(group)).with_context(|| chgrp(path, group))?;
        listen(&socket, Backlog::MAXCONN)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
        Ok(UnixListener::from_std(socket.try_clone()?.into())?)
    };
    match ready() {
        Ok(listener) => Ok((listener, inode)),
        Err(e) => {
            let _ = fs::remove_file(path);
            Err(e)
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let inode = self.inode.load(Ordering::Relaxed);
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == inode) {
            // If it cannot be removed, the next start replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::getegid;

    use super::*;

    #[test]
    fn socket_is_recreated_and_removed_at_the_end() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/s");
        runtime.block_on(async {
            fs::create_dir(dir.path().join("run")).unwrap();
            let (mut bound, file) = RebindingListener::bind(&path, getegid()).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
            fs::remove_dir_all(dir.path().join("run")).unwrap();
            bound.ensure_bound();
            let client = UnixStream::connect(&path);
            let (accepted, connected) = tokio::join!(bound.accept(), client);
            drop((accepted, connected.unwrap()));
            // Another file at the path is left alone.
            fs::remove_file(&path).unwrap();
            fs::write(&path, "").unwrap();
            bound.ensure_bound();
            assert!(bound.problem.text().is_some());
            drop(file);
            assert!(path.exists());
        });
    }
}
