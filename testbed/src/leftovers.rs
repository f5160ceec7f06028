//! Finds and removes objects that tests and experiments have created under their names ([`names`]) and left behind.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::{cgroup, names, netns, process::alive};

/// A directory that contains such objects, and how one is removed.
type Kind = (PathBuf, fn(&Path));

/// Namespaces, pins, files and cgroups.
fn kinds() -> anyhow::Result<[Kind; 4]> {
    let remove: fn(&Path) = |path| {
        let _gone = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
    };
    Ok([
        ("/run/netns".into(), netns::remove),
        ("/sys/fs/bpf".into(), remove),
        (std::env::temp_dir(), remove),
        (cgroup::root()?, |path| drop(cgroup::remove(path))),
    ])
}

/// The objects in a directory whose names were made by a process for which `is` holds.
fn made(dir: &Path, is: impl Fn(u32) -> bool) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        // The directory exists only after the first namespace was created.
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| dir.display().to_string())?,
    };
    let mut made = Vec::new();
    for entry in entries {
        let entry = entry?;
        if names::owner(&entry.file_name().to_string_lossy()).is_some_and(&is) {
            made.push(entry.path());
        }
    }
    Ok(made)
}

/// Removes, as far as possible, the objects that killed runs left behind, even if a run had the same process id as this
/// one. Must be called before this process creates anything.
pub fn sweep() {
    let is_left = |pid| !alive(pid) || pid == std::process::id();
    for (dir, remove) in kinds().into_iter().flatten() {
        for path in made(&dir, is_left).into_iter().flatten() {
            remove(&path);
        }
    }
}

/// The objects that a process has created and not removed.
pub fn of(pid: u32) -> anyhow::Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    for (dir, _) in kinds()? {
        left.extend(made(&dir, |owner| owner == pid)?);
    }
    Ok(left)
}
