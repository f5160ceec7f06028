//! The locks of a daemon that was killed while a child that it had forked had not called exec yet.

use std::{
    fs,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use nix::{libc, sys::signal::Signal, unistd::Pid};
use rto_testbed::{
    env::TestEnv,
    wait::{TIMEOUT, eventually_seen},
};

use super::super::near;

/// What the daemon logs while it waits.
const WAITS: &str = "waiting for the lock";

test!(a_child_has_the_lock_of_a_killed_daemon);
fn a_child_has_the_lock_of_a_killed_daemon() -> anyhow::Result<()> {
    start_while_inherited(|env| env.dir().join("state/lock"))
}

test!(a_child_has_the_lock_on_the_pins);
fn a_child_has_the_lock_on_the_pins() -> anyhow::Result<()> {
    start_while_inherited(|env| env.pin_dir())
}

/// A start right after kill -9 waits for as long as somebody still has the killed daemon's open file, and no longer.
fn start_while_inherited(locked: fn(&TestEnv) -> PathBuf) -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    // With it another daemon is refused at once, while the first runs.
    let child = inherit(env.pid()?, &locked(&env))?;
    let second = env
        .command(&["run", "--log-format", "text"])
        .env_remove("NOTIFY_SOCKET")
        .output()?;
    let said = String::from_utf8_lossy(&second.stderr);
    ensure!(
        second.status.code() == Some(1) && said.contains("another rto-agent"),
        "{said}"
    );
    ensure!(!said.contains(WAITS), "{said}");
    env.end(Signal::SIGKILL)?;
    env.spawn_under(&[])?;
    eventually_seen(WAITS, TIMEOUT, || Ok(env.log()), |log| log.contains(WAITS))?;
    drop(child);
    env.notified("READY=1")?;
    env.wait_status("the policy", |status| status["healthy"] == true)?;
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
