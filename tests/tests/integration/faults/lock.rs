//! The locks of a daemon that was killed while a child that it had forked had not called exec yet.

use std::{
    fs,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{libc, sys::signal::Signal, unistd::Pid};
use rto_tests::agent::{SOON, World};

use super::super::near;

/// What the daemon logs while it waits.
const WAITS: &str = "waiting for the lock";

pub(super) fn state() -> anyhow::Result<()> {
    start_while_inherited(|world| world.dir().join("state/lock"))
}

pub(super) fn pins() -> anyhow::Result<()> {
    start_while_inherited(|world| world.pin_dir())
}

/// A start right after kill -9 waits for as long as somebody still has the killed daemon's open file, and no longer.
fn start_while_inherited(locked: fn(&World) -> PathBuf) -> anyhow::Result<()> {
    let mut world = World::with(&near("\"10.88.0.0/24\""))?;
    // With it another daemon is refused at once, while the first runs.
    let child = inherit(world.pid()?, &locked(&world))?;
    let second = world
        .command(&["run", "--log-format", "text"])
        .env_remove("NOTIFY_SOCKET")
        .output()?;
    let said = String::from_utf8_lossy(&second.stderr);
    ensure!(
        second.status.code() == Some(1) && said.contains("another rto-agent"),
        "{said}"
    );
    ensure!(!said.contains(WAITS), "{said}");
    world.end(Signal::SIGKILL)?;
    world.spawn_under(&[])?;
    let end = Instant::now() + SOON;
    while !world.log().contains(WAITS) {
        ensure!(Instant::now() < end, "it does not wait: {}", world.log());
        thread::sleep(Duration::from_millis(5));
    }
    drop(child);
    world.notified("READY=1")?;
    world.wait_status("the policy", |status| status["healthy"] == true)?;
    Ok(())
}

/// A process's open file, which is shared as it is with a child after fork(2).
fn inherit(pid: Pid, path: &Path) -> anyhow::Result<OwnedFd> {
    let mut open = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let fd = open
        .find(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path))
        .with_context(|| format!("{} is not open", path.display()))?;
    let number: i32 = fd.file_name().to_string_lossy().parse()?;
    // SAFETY: integers only; the descriptor it returns is owned by nobody else.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) })?;
    // SAFETY: as above.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// The descriptor that a system call returned.
fn owned(returned: libc::c_long) -> anyhow::Result<OwnedFd> {
    let fd = nix::errno::Errno::result(returned)?;
    // SAFETY: the callers' system calls have just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}
