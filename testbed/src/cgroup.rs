//! A private cgroup for a test, so that an agent never affects the host's connections.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context as _;

use crate::{
    names,
    wait::{TIMEOUT, eventually},
};

/// A child of the root of the cgroup2 hierarchy; removed when dropped.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Creates one.
    pub fn new() -> anyhow::Result<Self> {
        let path = root()?.join(names::unique());
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    /// The cgroup's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The mount point of the cgroup2 hierarchy.
pub fn root() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let point = fields.next()?;
            (fields.next()? == "cgroup2").then(|| PathBuf::from(point))
        })
        .next()
        .context("no cgroup2 hierarchy is mounted")
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was just reaped may still be accounted to the cgroup for a moment.
        let removed = eventually("end of it", TIMEOUT, || {
            let removed = remove(&self.path).is_ok() || !self.path.exists();
            Ok(removed.then_some(()))
        });
        if removed.is_err() {
            let (path, processes) = (self.path.display(), processes(&self.path));
            let current = thread::current();
            let thread = current.name().unwrap_or_default();
            eprintln!(
                "{thread}: {path} cannot be removed; in it run {processes:?}, to be dropped before it"
            );
        }
    }
}

/// The ids and names of the processes in a cgroup.
fn processes(cgroup: &Path) -> Vec<String> {
    let pids = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let name = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    pids.lines()
        .map(|pid| format!("{pid} {}", name(pid).trim()))
        .collect()
}

/// Removes a cgroup, and the children that an agent leaves when it is killed while it probes the kernel.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _in_use = fs::remove_dir(entry.path());
        }
    }
    fs::remove_dir(path)
}
