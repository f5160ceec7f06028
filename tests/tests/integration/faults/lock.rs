//! The locks of a daemon that was killed while a child that it had forked had not yet called exec.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use nix::{libc, unistd::Pid};

use crate::prelude::*;

/// The daemon's message while it waits.
const WAITS: &str = "waiting for the lock";

test!(a_child_has_the_lock_of_a_killed_daemon);
fn a_child_has_the_lock_of_a_killed_daemon() -> anyhow::Result<()> {
    start_while_inherited(|env| env.dir().join("state/lock"))
}

test!(a_child_has_the_lock_on_the_pins);
fn a_child_has_the_lock_on_the_pins() -> anyhow::Result<()> {
    start_while_inherited(|env| env.pin_dir())
}

/// A start right after SIGKILL waits while another process still holds the killed daemon's open file, and no longer.
fn start_while_inherited(locked: fn(&TestEnv) -> PathBuf) -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    // While the first daemon runs, another one is refused at once, even if the file is shared.
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

/// Duplicates a process's open file, as a child shares it after fork(2).
fn inherit(pid: Pid, path: &Path) -> anyhow::Result<OwnedFd> {
    let mut open = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let fd = open
        .find(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path))
        .with_context(|| format!("{} is not open", path.display()))?;
    let number: i32 = fd.file_name().to_string_lossy().parse()?;
    // SAFETY: the call takes integers; no other code owns the descriptor that it returns.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) })?;
    // SAFETY: as above.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// Takes ownership of the descriptor that a system call returned.
fn owned(returned: libc::c_long) -> anyhow::Result<OwnedFd> {
    let fd = nix::errno::Errno::result(returned)?;
    // SAFETY: the caller's system call has just created the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}
