//! Locks that allow only one daemon for one set of pins.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc::{O_NOFOLLOW, major, minor},
};
use rto_agent_core::{config::regular_file, path_security};
use tracing::{info, warn};

const FILE: &str = "lock";
/// How long a start waits for a lock. A process closes its files some time after SIGKILL, and a
/// child that it has forked shares the lock until the child calls exec (flock(2)); on a busy machine
/// the child may wait for a processor before that.
pub const TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(100)
} else {
    Duration::from_secs(5)
};
const RETRY: Duration = Duration::from_millis(5);

/// Why the lock was not acquired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another daemon holds the lock.
    #[error(
        "another rto-agent{holder} holds {path}; stop that one first, or give this one its own \
         state_dir, socket, pin_dir and cgroup"
    )]
    Held {
        /// " (pid N)" if it is visible from here: not in another PID namespace.
        holder: String,
        /// The lock's path.
        path: PathBuf,
    },
    /// A directory cannot be used.
    #[error("{setting} {path}: {reason}")]
    Dir {
        /// `state_dir` or `pin_dir`.
        setting: &'static str,
        /// Its path.
        path: PathBuf,
        /// The error of the system call.
        reason: io::Error,
    },
}

impl LockError {
    fn dir(setting: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |reason| Self::Dir {
            setting,
            path: path.to_owned(),
            reason,
        }
    }
}

/// The lock. It is released when dropped; otherwise by the kernel when the process has ended, and
/// every child that it had forked has ended or called exec.
///
/// flock(2) is used rather than a record lock (fcntl(2)), though a child does not share the latter:
/// a directory cannot have a record lock for writing, and a BPF file system has no regular files.
#[derive(Debug)]
pub struct InstanceLock {
    state_dir: PathBuf,
    state: Flock<File>,
    pins: Option<Flock<File>>,
}

impl InstanceLock {
    /// Takes both locks.
    pub fn take(state_dir: &Path, pin_dir: &Path) -> Result<Self, LockError> {
        Self::of_state(state_dir)?.and_pins(pin_dir)
    }

    /// Takes the lock on `state_dir`, which is created if missing.
    pub fn of_state(state_dir: &Path) -> Result<Self, LockError> {
        Ok(Self {
            state_dir: state_dir.to_owned(),
            state: lock_state(state_dir, TIMEOUT)?,
            pins: None,
        })
    }

    /// Also locks `pin_dir`, if it exists: two agents with different state directories must not
    /// share pins.
    pub fn and_pins(mut self, pin_dir: &Path) -> Result<Self, LockError> {
        self.lock_pins(pin_dir, TIMEOUT)?;
        Ok(self)
    }

    /// Makes sure that the locks are on the current files. The file in `state_dir` may have been
    /// removed. `pin_dir` may have been removed and created again, or its file system unmounted,
    /// which an open directory would keep alive with all its pins.
    pub fn follow(&mut self, pin_dir: &Path) -> Result<(), LockError> {
        let file = fs::symlink_metadata(self.state_dir.join(FILE));
        if identity(file) != identity(self.state.metadata()) {
            self.state = lock_state(&self.state_dir, Duration::ZERO)?;
            warn!(
                "{}: the lock file was removed, and has been created again",
                self.state_dir.display()
            );
        }
        self.lock_pins(pin_dir, Duration::ZERO)
    }

    fn lock_pins(&mut self, pin_dir: &Path, timeout: Duration) -> Result<(), LockError> {
        let known = self.pins.as_ref().map(|dir| dir.metadata());
        if identity(fs::metadata(pin_dir)) == known.and_then(identity) {
            return Ok(());
        }
        let failed = LockError::dir("pin_dir", pin_dir);
        path_security::check_private(pin_dir).map_err(&failed)?;
        self.pins = None;
        // The directory may be missing: bpffs may not even be mounted.
        if let Ok(dir) = File::open(pin_dir) {
            self.pins = Some(lock(dir, pin_dir, timeout, failed)?);
        }
        Ok(())
    }
}

/// Locks the file in `state_dir`, and creates both if missing.
fn lock_state(state_dir: &Path, timeout: Duration) -> Result<Flock<File>, LockError> {
    let failed = LockError::dir("state_dir", state_dir);
    path_security::make_private(state_dir).map_err(&failed)?;
    lock_file(&state_dir.join(FILE), timeout, failed)
}

/// Locks a file, which is created if missing, for root only.
fn lock_file(
    path: &Path,
    timeout: Duration,
    failed: impl Fn(io::Error) -> LockError,
) -> Result<Flock<File>, LockError> {
    let file = open_private(path).map_err(|e| {
        let name = path.file_name().unwrap_or_default().display();
        failed(io::Error::new(e.kind(), format!("{name}: {e}")))
    })?;
    lock(file, path, timeout, failed)
}

/// Serialises changes of a file that several daemons share.
pub(crate) fn lock_shared(path: &Path) -> io::Result<Flock<File>> {
    lock_file(path, TIMEOUT, LockError::dir("lock", path)).map_err(|e| match e {
        LockError::Held { holder, path } => io::Error::other(format!(
            "another rto-agent{holder} holds {} for more than {} s",
            path.display(),
            TIMEOUT.as_secs()
        )),
        LockError::Dir { reason, .. } => {
            let dir = path.parent().unwrap_or(path).display();
            io::Error::new(reason.kind(), format!("{dir}: {reason}"))
        }
    })
}

/// Device and inode.
fn identity(file: io::Result<fs::Metadata>) -> Option<(u64, u64)> {
    file.ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Opens the lock's file. A file that other users may open is replaced: any of them may have it
/// open and hold its lock, now or later. (The daemon's own file is for root only, so no daemon
/// holds such a lock.)
fn open_private(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    let meta = file.metadata()?;
    if meta.mode() & 0o077 == 0 && meta.uid() == nix::unistd::geteuid().as_raw() {
        return Ok(file);
    }
    warn!(
        "{}: other users could open it; it is replaced",
        path.display()
    );
    fs::remove_file(path)?;
    open(path)
}

/// Opens a file for root only, and creates it if it is missing.
fn open(path: &Path) -> io::Result<File> {
    match fs::symlink_metadata(path) {
        Ok(meta) => regular_file::check(&meta)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(O_NOFOLLOW | regular_file::FLAGS)
        .open(path)?;
    // It may have been replaced since the check.
    regular_file::check(&file.metadata()?)?;
    Ok(file)
}

/// Takes the lock, and tries again until the timeout if another process holds it.
fn lock(
    mut file: File,
    path: &Path,
    timeout: Duration,
    failed: impl Fn(io::Error) -> LockError,
) -> Result<Flock<File>, LockError> {
    let end = Instant::now() + timeout;
    let mut is_logged = false;
    loop {
        let errno;
        (file, errno) = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err(failed) => failed,
        };
        if errno != Errno::EWOULDBLOCK {
            return Err(failed(errno.into()));
        }
        if Instant::now() >= end {
            let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
            let holder = identity(file.metadata()).and_then(|file| holder_in(&locks, file));
            return Err(LockError::Held {
                holder: holder.map_or_else(String::new, |pid| format!(" (pid {pid})")),
                path: path.to_owned(),
            });
        }
        if !is_logged {
            is_logged = true;
            info!(path = %path.display(), "another process holds it; waiting for the lock");
        }
        thread::sleep(RETRY);
    }
}

/// The holder of a flock on the file with this device and inode, from the lines of `/proc/locks`
/// (proc(5)). They have no process of another PID namespace, and for a btrfs subvolume another
/// device than stat(2).
fn holder_in(locks: &str, (device, inode): (u64, u64)) -> Option<u32> {
    let identity = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        (fields.next()? == "FLOCK").then_some(())?;
        let pid = fields.nth(2)?.parse().ok()?;
        (fields.next()? == identity).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use nix::libc::makedev;

    use super::*;

    #[test]
    fn lock_error_names_holder() {
        let dir = tempfile::tempdir().unwrap();
        let (state, pins) = (dir.path().join("state"), dir.path().join("pins"));
        let first = InstanceLock::take(&state, &pins).unwrap();
        let message = InstanceLock::take(&state, &pins).unwrap_err().to_string();
        assert!(
            message.contains(&format!("(pid {})", std::process::id())),
            "{message}"
        );
        drop(first);
        InstanceLock::take(&state, &pins).unwrap();
    }

    #[test]
    fn start_waits_for_lock_until_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let held = InstanceLock::of_state(&state).unwrap();
        let begin = Instant::now();
        let error = InstanceLock::of_state(&state).unwrap_err();
        assert!(matches!(error, LockError::Held { .. }), "{error:?}");
        assert!(begin.elapsed() >= TIMEOUT);
        let release = thread::spawn(move || {
            thread::sleep(TIMEOUT / 10);
            drop(held);
        });
        let _lock = InstanceLock::of_state(&state).unwrap();
        release.join().unwrap();
    }

    #[test]
    fn lock_holder_matches_device_and_inode() {
        let locks = "\
1: POSIX  ADVISORY  WRITE 10 08:01:77 0 EOF
2: FLOCK  ADVISORY  WRITE 11 00:1a:77 0 EOF
3: FLOCK  ADVISORY  WRITE 12 08:01:177 0 EOF
4: FLOCK  ADVISORY  WRITE 13 08:01:77 0 EOF
4: -> FLOCK  ADVISORY  WRITE 14 08:01:78 0 EOF
";
        let holder = |major, minor, inode| holder_in(locks, (makedev(major, minor), inode));
        assert_eq!(holder(8, 1, 77), Some(13));
        assert_eq!(holder(0, 26, 77), Some(11));
        assert_eq!(holder(8, 1, 177), Some(12));
        assert_eq!(holder(0, 26, 177), None);
        assert_eq!(holder(8, 1, 78), None);
    }

    #[test]
    fn pins_lock_detects_daemon_with_other_state_dir() {
        let dir = tempfile::tempdir().unwrap();
        let pins = dir.path().join("pins");
        fs::create_dir(&pins).unwrap();
        let _first = InstanceLock::take(&dir.path().join("a"), &pins).unwrap();
        let message = InstanceLock::take(&dir.path().join("b"), &pins)
            .unwrap_err()
            .to_string();
        assert!(message.contains("pins"), "{message}");
    }

    #[test]
    fn recreated_pin_dir_is_locked_again() {
        let dir = tempfile::tempdir().unwrap();
        let pins = dir.path().join("pins");
        let mut first = InstanceLock::take(&dir.path().join("a"), &pins).unwrap();
        for _ in 0..2 {
            fs::create_dir(&pins).unwrap();
            first.follow(&pins).unwrap();
            assert!(InstanceLock::take(&dir.path().join("b"), &pins).is_err());
            fs::remove_dir(&pins).unwrap();
            first.follow(&pins).unwrap();
            assert!(first.pins.is_none());
        }
    }

    /// A file of an earlier root shell, or of an unprivileged user.
    #[test]
    fn lock_that_other_users_can_hold_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        for mode in [0o644, 0o640, 0o604] {
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let of_user = File::open(&path).unwrap();
            let _held = Flock::lock(of_user, FlockArg::LockExclusiveNonblock).unwrap();
            let lock = InstanceLock::of_state(dir.path()).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            // The lock holds against other daemons.
            assert!(InstanceLock::of_state(dir.path()).is_err());
            drop(lock);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn fifo_is_refused_as_lock() {
        let dir = tempfile::tempdir().unwrap();
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        nix::unistd::mkfifo(&dir.path().join(FILE), mode).unwrap();
        let error = InstanceLock::of_state(dir.path()).unwrap_err().to_string();
        assert!(error.contains("lock: this is a FIFO"), "{error}");
    }

    #[test]
    fn lock_does_not_follow_symlink() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(FILE)).unwrap();
        assert!(InstanceLock::take(dir.path(), &dir.path().join("none")).is_err());
        assert_eq!(fs::read_to_string(victim).unwrap(), "precious");
    }
}
