//! One daemon for one set of pins.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc::O_NOFOLLOW,
};

use super::trusted;

const FILE: &str = "lock";

/// Why the lock was not had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another daemon runs.
    #[error(
        "another rto-agent{holder} holds {path}; stop it first, or give this one its own \
         state_dir, socket, pin_dir and cgroup"
    )]
    Held {
        /// " (pid N)" where it is known.
        holder: String,
        /// The lock.
        path: PathBuf,
    },
    /// The state directory cannot be used.
    #[error("state_dir {path}: {reason}")]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// The directory of the pins cannot be used.
    #[error("pin_dir {path}: {reason}")]
    PinDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

/// The lock; released when dropped, and by the kernel when the process dies.
#[derive(Debug)]
pub struct InstanceLock {
    _state: Flock<File>,
    pins: Option<Flock<File>>,
}

impl InstanceLock {
    /// Takes the locks on both.
    ///
    /// # Errors
    ///
    /// As [`InstanceLock::of_state`].
    pub fn take(state_dir: &Path, pin_dir: &Path) -> Result<Self, LockError> {
        Self::of_state(state_dir)?.and_pins(pin_dir)
    }

    /// Takes the lock on `state_dir` (made if missing).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] names the process that has it.
    pub fn of_state(state_dir: &Path) -> Result<Self, LockError> {
        let state_error = |reason| LockError::StateDir {
            path: state_dir.to_owned(),
            reason,
        };
        trusted::make_own(state_dir).map_err(state_error)?;
        let path = state_dir.join(FILE);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .custom_flags(O_NOFOLLOW)
            .open(&path)
            .map_err(state_error)?;
        let holder = read_pid(&mut file);
        let mut state = lock(file, &path, holder)?;
        // For people, and the lock is had already: a full disk is no reason not to start.
        let _unsaid = state
            .set_len(0)
            .and_then(|()| state.rewind())
            .and_then(|()| writeln!(state, "{}", std::process::id()));
        Ok(Self {
            _state: state,
            pins: None,
        })
    }

    /// Takes the one on `pin_dir` as well, where that exists: two agents with state directories of
    /// their own must not share pins either.
    ///
    /// # Errors
    ///
    /// As [`InstanceLock::of_state`].
    pub fn and_pins(mut self, pin_dir: &Path) -> Result<Self, LockError> {
        self.follow(pin_dir)?;
        Ok(self)
    }

    /// Sees to it that the lock is on what `pin_dir` is now: the directory may have been removed and made
    /// again, and its file system unmounted, which an open directory would keep alive with all its pins.
    ///
    /// # Errors
    ///
    /// If another daemon has the new one.
    pub fn follow(&mut self, pin_dir: &Path) -> Result<(), LockError> {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let now = fs::metadata(pin_dir).ok().map(identity);
        let held = self.pins.as_ref().and_then(|dir| dir.metadata().ok());
        if now == held.map(identity) {
            return Ok(());
        }
        trusted::own(pin_dir).map_err(|reason| LockError::PinDir {
            path: pin_dir.to_owned(),
            reason,
        })?;
        self.pins = None;
        // It may not exist: bpffs may not even be mounted.
        if let Ok(dir) = File::open(pin_dir) {
            self.pins = Some(lock(dir, pin_dir, None)?);
        }
        Ok(())
    }
}

fn lock(file: File, path: &Path, holder: Option<u32>) -> Result<Flock<File>, LockError> {
    let inode = file.metadata().map(|m| m.ino()).ok();
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => {
            let holder = holder.or_else(|| inode.and_then(holder_by_proc));
            let holder = holder
                .map(|pid| format!(" (pid {pid})"))
                .unwrap_or_default();
            LockError::Held {
                holder,
                path: path.to_owned(),
            }
        }
        errno => LockError::StateDir {
            path: path.to_owned(),
            reason: errno.into(),
        },
    })
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// The holder of a flock on this inode, from `/proc/locks` (proc(5)).
fn holder_by_proc(inode: u64) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let suffix = format!(":{inode}");
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        (fields.next()? == "FLOCK").then_some(())?;
        let pid = fields.nth(2)?.parse().ok()?;
        fields.next()?.ends_with(&suffix).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_taker_learns_who_has_it() {
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
    fn shared_pins_are_noticed_though_the_states_differ() {
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
    fn pins_made_again_are_locked_again() {
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

    #[test]
    fn a_symbolic_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(FILE)).unwrap();
        assert!(InstanceLock::take(dir.path(), &dir.path().join("none")).is_err());
        assert_eq!(fs::read_to_string(victim).unwrap(), "precious");
    }
}
