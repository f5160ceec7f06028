//! Locks that allow only one daemon for one set of pins.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc::{O_NOFOLLOW, SIGKILL, major, minor},
    sys::signal::kill,
    unistd::Pid,
};
use rto_agent_core::{config::regular_file, path_security};
use tracing::{info, warn};

const FILE: &str = "lock";
/// How long a start waits for a lock whose holder has ended. A child forked by the holder shares
/// the open file, and with it the lock, until it calls exec (flock(2)); on a busy machine the child
/// may wait for a processor before that.
pub const PATIENCE: Duration = Duration::from_secs(5);
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
        /// " (pid N)" if it is known, with a remark if the pid is from another pid namespace.
        holder: String,
        /// The lock's path.
        path: PathBuf,
    },
    /// The state directory cannot be used.
    #[error("state_dir {path}: {reason}")]
    StateDir {
        /// Its path.
        path: PathBuf,
        /// The error of the system call.
        reason: io::Error,
    },
    /// The pin directory cannot be used.
    #[error("pin_dir {path}: {reason}")]
    PinDir {
        /// Its path.
        path: PathBuf,
        /// The error of the system call.
        reason: io::Error,
    },
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
        Self::of_state_after(state_dir, &mut patience())
    }

    fn of_state_after(state_dir: &Path, wait: &mut dyn FnMut() -> bool) -> Result<Self, LockError> {
        let state_error = |reason| LockError::StateDir {
            path: state_dir.to_owned(),
            reason,
        };
        path_security::make_private(state_dir).map_err(state_error)?;
        let path = state_dir.join(FILE);
        let file = open(&path).map_err(|e| {
            let why = format!("{FILE}: {e}");
            state_error(io::Error::new(e.kind(), why))
        })?;
        let mut state = lock(file, &path, read_holder, wait)?;
        // The pid is only informative, and the lock is held already: a full disk must not prevent
        // the start.
        let _unsaid = state
            .set_len(0)
            .and_then(|()| state.rewind())
            .and_then(|()| state.write_all(Holder::this().text().as_bytes()));
        Ok(Self {
            state_dir: state_dir.to_owned(),
            state,
            pins: None,
        })
    }

    /// Also locks `pin_dir`, if it exists: two agents with different state directories must not
    /// share pins.
    pub fn and_pins(mut self, pin_dir: &Path) -> Result<Self, LockError> {
        self.follow_after(pin_dir, &mut patience())?;
        Ok(self)
    }

    /// Makes sure that the locks are on the current files. The file in `state_dir` may have been
    /// removed. `pin_dir` may have been removed and created again, or its file system unmounted,
    /// which an open directory would keep alive with all its pins.
    pub fn follow(&mut self, pin_dir: &Path) -> Result<(), LockError> {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let now = fs::symlink_metadata(self.state_dir.join(FILE))
            .ok()
            .map(identity);
        if now != self.state.metadata().ok().map(identity) {
            let again = Self::of_state_after(&self.state_dir, &mut || false)?;
            self.state = again.state;
            warn!(
                "{}: the lock file was removed, and has been created again",
                self.state_dir.display()
            );
        }
        self.follow_after(pin_dir, &mut || false)
    }

    fn follow_after(
        &mut self,
        pin_dir: &Path,
        wait: &mut dyn FnMut() -> bool,
    ) -> Result<(), LockError> {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let now = fs::metadata(pin_dir).ok().map(identity);
        let held = self.pins.as_ref().and_then(|dir| dir.metadata().ok());
        if now == held.map(identity) {
            return Ok(());
        }
        path_security::check_private(pin_dir).map_err(|reason| LockError::PinDir {
            path: pin_dir.to_owned(),
            reason,
        })?;
        self.pins = None;
        // The directory may be missing: bpffs may not even be mounted.
        if let Ok(dir) = File::open(pin_dir) {
            self.pins = Some(lock(dir, pin_dir, |_| None, wait)?);
        }
        Ok(())
    }
}

/// Opens the lock's file, and creates it if it is missing.
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
        .mode(0o644)
        .custom_flags(O_NOFOLLOW | regular_file::FLAGS)
        .open(path)?;
    // It may have been replaced since the check.
    regular_file::check(&file.metadata()?)?;
    Ok(file)
}

/// Takes the lock. If its holder has ended, `wait` decides whether to try again.
fn lock(
    mut file: File,
    path: &Path,
    told: impl Fn(&mut File) -> Option<Holder>,
    wait: &mut dyn FnMut() -> bool,
) -> Result<Flock<File>, LockError> {
    let state_error = |reason| LockError::StateDir {
        path: path.to_owned(),
        reason,
    };
    let metadata = file.metadata().map_err(state_error)?;
    let identity = proc_identity(metadata.dev(), metadata.ino());
    let mut has_waited = false;
    loop {
        let errno;
        (file, errno) = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err(failed) => failed,
        };
        if errno != Errno::EWOULDBLOCK {
            return Err(state_error(errno.into()));
        }
        // Read again at each attempt: the holder writes its pid just after it has taken the lock.
        let told = told(&mut file);
        let (own, foreign) = match told {
            Some(holder) if holder.is_here() => (Some(holder.pid), None),
            // A holder that is visible from here has a different pid in this namespace.
            other => (holder_by_proc(&identity), other),
        };
        if own.is_some_and(is_running) || !wait() {
            let holder = match (own, foreign) {
                (Some(pid), _) => format!(" (pid {pid})"),
                (None, Some(there)) => format!(
                    " (pid {} in another PID namespace, for example of a container)",
                    there.pid
                ),
                (None, None) => String::new(),
            };
            return Err(LockError::Held {
                holder,
                path: path.to_owned(),
            });
        }
        if !has_waited {
            has_waited = true;
            info!(path = %path.display(), holder = own, "the process that held it has ended; \
                                                         waiting for the lock");
        }
    }
}

/// Returns true until the timeout has passed.
fn patience() -> impl FnMut() -> bool {
    let end = Instant::now() + PATIENCE;
    move || {
        std::thread::sleep(RETRY);
        Instant::now() < end
    }
}

/// Whether the process exists and is not about to end. A process closes its files some time after
/// SIGKILL, and before its parent waits for it.
fn is_running(pid: u32) -> bool {
    is_running_by(fs::read_to_string(format!("/proc/{pid}/stat")), || {
        // 0 and negative numbers mean process groups.
        let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0);
        kill(Pid::from_raw(pid.ok_or(Errno::ESRCH)?), None)
    })
}

/// `/proc/PID/stat` may be unreadable: under hidepid= (ProtectProc=invisible) for a process with
/// more capabilities. Then kill(2) with signal 0 shows whether the process exists.
fn is_running_by(stat: io::Result<String>, signal: impl FnOnce() -> nix::Result<()>) -> bool {
    match stat {
        Ok(stat) => !is_ending(&stat),
        Err(_) => matches!(signal(), Ok(()) | Err(Errno::EPERM)),
    }
}

/// From `/proc/PID/stat` (proc(5)): the process is a zombie, has PF_EXITING, or a SIGKILL is
/// pending.
fn is_ending(stat: &str) -> bool {
    const PF_EXITING: u64 = 4;
    // The name, in brackets, may contain any character. The third field follows it.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |field: usize| -> u64 {
        let text = fields.get(field - 3).copied();
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    let is_zombie = fields
        .first()
        .is_some_and(|state| ["Z", "X"].contains(state));
    let is_killed = number(31) & (1 << (SIGKILL - 1)) != 0;
    is_zombie || number(9) & PF_EXITING != 0 || is_killed
}

/// The lock's holder, from the lock's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    /// The pid in the holder's own pid namespace.
    pid: u32,
    /// The inode of that namespace (namespaces(7)); absent if it was unknown.
    namespace: Option<u64>,
}

impl Holder {
    fn this() -> Self {
        let namespace = fs::metadata("/proc/self/ns/pid").ok();
        Self {
            pid: std::process::id(),
            namespace: namespace.map(|meta| meta.ino()),
        }
    }

    fn text(self) -> String {
        let namespace = self.namespace.map(|inode| format!("{inode}\n"));
        format!("{}\n{}", self.pid, namespace.unwrap_or_default())
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        Some(Self {
            pid: lines.next()?.trim().parse().ok()?,
            namespace: lines.next().and_then(|line| line.parse().ok()),
        })
    }

    /// Whether the holder's pid is in this process's namespace.
    fn is_here(self) -> bool {
        let here = Self::this().namespace;
        self.namespace.is_none() || here.is_none() || self.namespace == here
    }
}

fn read_holder(file: &mut File) -> Option<Holder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(64).read_to_string(&mut text).ok()?;
    Holder::parse(&text)
}

/// Names a file as `/proc/locks` does: the device number of its file system in hexadecimal, and its
/// inode. (For a btrfs subvolume stat(2) returns another device, so there only the pid in the file
/// shows the holder.)
fn proc_identity(device: u64, inode: u64) -> String {
    format!("{:02x}:{:02x}:{inode}", major(device), minor(device))
}

/// The holder of a flock on this file ([`proc_identity`]), from `/proc/locks` (proc(5)).
fn holder_by_proc(identity: &str) -> Option<u32> {
    holder_in(&fs::read_to_string("/proc/locks").ok()?, identity)
}

fn holder_in(locks: &str, identity: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        (fields.next()? == "FLOCK").then_some(())?;
        let pid = fields.nth(2)?.parse().ok()?;
        (fields.next()? == identity).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use nix::libc::makedev;

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

    /// The pid of a process that has ended.
    #[expect(
        clippy::disallowed_methods,
        reason = "a process that does nothing, for a test"
    )]
    fn ended() -> u32 {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    }

    /// The state of a killed daemon's child between fork and exec: it has the open file, which
    /// names the pid of no process.
    fn inherited(state: &Path) -> Flock<File> {
        fs::create_dir_all(state).unwrap();
        let path = state.join(FILE);
        fs::write(&path, format!("{}\n", ended())).unwrap();
        let file = OpenOptions::new().read(true).open(path).unwrap();
        Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap()
    }

    #[test]
    fn a_lock_that_a_dead_daemons_child_still_has_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut held = Some(inherited(&state));
        let mut waited = 0;
        let lock = InstanceLock::of_state_after(&state, &mut || {
            waited += 1;
            if waited == 3 {
                held = None;
            }
            true
        });
        lock.unwrap();
        assert_eq!(waited, 3);
    }

    #[test]
    fn start_waits_for_inherited_lock_not_for_living_holder() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let held = inherited(&state);
        let mut waited = 0;
        let error = InstanceLock::of_state_after(&state, &mut || {
            waited += 1;
            waited < 3
        });
        assert!(matches!(error, Err(LockError::Held { .. })), "{error:?}");
        assert_eq!(waited, 3);
        drop(held);
        let _held = InstanceLock::of_state(&state).unwrap();
        let error = InstanceLock::of_state_after(&state, &mut || panic!("it waits"));
        assert!(matches!(error, Err(LockError::Held { .. })), "{error:?}");
    }

    #[test]
    fn a_pid_of_another_namespace_is_told_as_such() {
        let here = Holder::this();
        assert_eq!(Holder::parse(&here.text()), Some(here));
        assert!(here.is_here() && Holder::parse("7\n").unwrap().is_here());
        let there = format!("1\n{}\n", here.namespace.unwrap() + 1);
        assert!(!Holder::parse(&there).unwrap().is_here());
        assert_eq!(Holder::parse("x\n1\n"), None);
    }

    #[test]
    fn a_process_that_ends_is_told_by_its_stat() {
        let stat = |state: &str, flags: u32, pending: u32| {
            let between = "1 ".repeat(21);
            format!("7 (a) Z (b) {state} 1 1 1 0 -1 {flags} {between}{pending} 0 0")
        };
        assert!(!is_ending(&stat("S", 0x0040_0000, 0)));
        assert!(is_ending(&stat("Z", 0x0040_0000, 0)));
        assert!(is_ending(&stat("R", 0x0040_0004, 0)));
        assert!(is_ending(&stat("R", 0x0040_0000, 1 << 8)));
        assert!(!is_ending(&stat("R", 0x0040_0000, 1 << 14)));
        assert!(is_running(std::process::id()));
        assert!(!is_running(ended()));
    }

    #[test]
    fn a_process_whose_stat_is_hidden_is_asked_for_by_a_signal() {
        let hidden = || Err(io::ErrorKind::NotFound.into());
        assert!(is_running_by(hidden(), || Ok(())));
        assert!(is_running_by(hidden(), || Err(Errno::EPERM)));
        assert!(!is_running_by(hidden(), || Err(Errno::ESRCH)));
        let zombie = || Ok("7 (a) Z 1".to_owned());
        assert!(!is_running_by(zombie(), || Ok(())));
        assert!(!is_running(u32::MAX));
        assert!(!is_running(0));
    }

    #[test]
    fn the_holder_has_the_same_inode_of_the_same_file_system() {
        let locks = "\
1: POSIX  ADVISORY  WRITE 10 08:01:77 0 EOF
2: FLOCK  ADVISORY  WRITE 11 00:1a:77 0 EOF
3: FLOCK  ADVISORY  WRITE 12 08:01:177 0 EOF
4: FLOCK  ADVISORY  WRITE 13 08:01:77 0 EOF
4: -> FLOCK  ADVISORY  WRITE 14 08:01:78 0 EOF
";
        let holder = |major, minor, inode| {
            let device = makedev(major, minor);
            holder_in(locks, &proc_identity(device, inode))
        };
        assert_eq!(holder(8, 1, 77), Some(13));
        assert_eq!(holder(0, 26, 77), Some(11));
        assert_eq!(holder(8, 1, 177), Some(12));
        assert_eq!(holder(0, 26, 177), None);
        assert_eq!(holder(8, 1, 78), None);
        // In the form this kernel uses.
        let file = tempfile::tempfile().unwrap();
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        let metadata = lock.metadata().unwrap();
        let identity = proc_identity(metadata.dev(), metadata.ino());
        assert_eq!(holder_by_proc(&identity), Some(std::process::id()));
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
    fn a_fifo_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        nix::unistd::mkfifo(&dir.path().join(FILE), mode).unwrap();
        let error = InstanceLock::of_state(dir.path()).unwrap_err().to_string();
        assert!(error.contains("lock: this is a FIFO"), "{error}");
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
