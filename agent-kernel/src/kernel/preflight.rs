//! Checks before the daemon starts. Each error names its fix.

use std::{fs, io, path::Path, sync::Mutex, thread};

use anyhow::{Context as _, bail};
use nix::sys::signal::{SigHandler, Signal, signal};

use super::{descriptors, privileges, version};

/// Checks the kernel, capabilities and the limit of open files. (The cgroup and the BPF file system
/// are checked where they are used.)
pub fn check() -> anyhow::Result<()> {
    let kernel = version::running()?;
    if !kernel.at_least(version::MINIMUM) {
        let (major, minor) = version::MINIMUM;
        bail!(
            "kernel {kernel} is too old: {major}.{minor} or later is needed (socket storage and \
             TCP options from sock_ops programs)"
        );
    }
    let missing = privileges::missing(privileges::effective().unwrap_or_else(caps::all));
    if !missing.is_empty() {
        let why: Vec<String> = privileges::NEEDED
            .iter()
            .filter(|(_, name, _)| missing.contains(name))
            .map(|(_, name, why)| format!("{name} (to {why})"))
            .collect();
        bail!(
            "missing {}; run as root (sudo rto-agent run, or the systemd unit)",
            why.join(" and ")
        );
    }
    if let Some(link) = fs::read_link("/proc/self/ns/time")
        .ok()
        .filter(|link| !is_initial(link))
    {
        bail!(
            "this process is in a time namespace ({}), whose clocks differ from those of the eBPF \
             program, so that entries would expire at the wrong time; run it in the host's time \
             namespace (without unshare --time)",
            link.display()
        );
    }
    descriptors::ensure(descriptors::DAEMON)
}

/// Checks that the daemon's first threads can be started: libraries panic if that fails.
pub fn check_threads() -> anyhow::Result<()> {
    /// The thread of the file watcher, of a reader, and of the engine.
    const NEEDED: usize = 3;
    let gate = Mutex::new(());
    let closed = gate.lock();
    let started = thread::scope(|scope| {
        let wait = || drop(gate.lock());
        let threads = (0..NEEDED).map(|_| thread::Builder::new().spawn_scoped(scope, wait));
        let started = threads.collect::<io::Result<Vec<_>>>();
        drop(closed);
        started.map(drop)
    });
    started
        .context("no thread can be started; raise pids.max of the cgroup (TasksMax= of the unit)")
}

/// Whether a link of `/proc/PID/ns/time` refers to the host's time namespace: PROC_TIME_INIT_INO
/// (Linux 6.12, `include/linux/proc_ns.h`).
fn is_initial(link: &Path) -> bool {
    link == Path::new("time:[4026531834]")
}

/// Ignores signals that end a process by default and must not end the daemon before it handles
/// them: SIGHUP requests a reload, and after SIGXFSZ (RLIMIT_FSIZE) a write fails.
pub fn ignore_signals() -> nix::Result<()> {
    for ignored in [Signal::SIGHUP, Signal::SIGXFSZ] {
        // SAFETY: ignoring a signal installs no handler that could run code of this program.
        unsafe { signal(ignored, SigHandler::SigIgn) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_namespace_of_host_is_recognised() {
        assert!(is_initial(Path::new("time:[4026531834]")));
        assert!(!is_initial(Path::new("time:[4026532758]")));
    }
}
