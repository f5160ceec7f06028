//! What tests and experiments make under names of their own ([`names`]), and what of it is left.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{cgroup, names, netns, process::alive};

/// A kind of them.
struct Kind {
    dir: PathBuf,
    remove: fn(&Path),
}

/// Namespaces, cgroups, pins, and directories for files.
fn kinds() -> Vec<Kind> {
    let kind = |dir: &Path, remove: fn(&Path)| {
        let dir = dir.to_owned();
        Kind { dir, remove }
    };
    let remove_dir: fn(&Path) = |path| drop(fs::remove_dir_all(path));
    let mut kinds = vec![
        kind(Path::new("/run/netns"), netns::remove),
        kind(Path::new("/sys/fs/bpf"), remove_dir),
        kind(&std::env::temp_dir(), remove_dir),
    ];
    if let Ok(root) = cgroup::root() {
        kinds.push(kind(&root, |path| drop(cgroup::remove(path))));
    }
    kinds
}

impl Kind {
    fn made(&self) -> impl Iterator<Item = (i32, PathBuf)> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| {
            let owner = names::owner(&entry.file_name().to_string_lossy())?;
            Some((owner, entry.path()))
        })
    }
}

/// Removes what a killed run left behind.
pub fn sweep() {
    for kind in kinds() {
        for (_, path) in kind.made().filter(|(owner, _)| !alive(*owner)) {
            (kind.remove)(&path);
        }
    }
}

/// What a process has made and not removed.
#[must_use]
pub fn of(pid: u32) -> Vec<PathBuf> {
    let is_its = |owner| u32::try_from(owner) == Ok(pid);
    kinds()
        .iter()
        .flat_map(Kind::made)
        .filter_map(|(owner, path)| is_its(owner).then_some(path))
        .collect()
}
