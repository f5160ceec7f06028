//! Other programs of rto-agent at the attached cgroup or above it: of another `pin_dir`, for example
//! because a daemon was killed and its `pin_dir` changed.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use rto_agent_common::PROGRAM;
use rto_agent_core::{path_security, printable};

use super::{link::Link, pins};
use crate::kernel::{cgroup, pinned::is_agents, programs};

/// Where BPF file systems are mounted by default.
const BPF_FS: &str = "/sys/fs/bpf";
/// How deep below the root of a BPF file system pin directories are looked for.
const DEPTH: usize = 4;

/// A program of rto-agent that does not belong to this `pin_dir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherProgram {
    /// The kernel's id.
    pub id: u32,
    /// The cgroup it is attached to.
    pub cgroup: PathBuf,
    /// Its `pin_dir`, if it can be found.
    pub pin_dir: Option<PathBuf>,
    /// A daemon seems to manage it: another process has locked the pin directory, or the pins are
    /// not visible here.
    pub is_managed: bool,
}

impl fmt::Display for OtherProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cgroup = printable::path(&self.cgroup);
        write!(
            f,
            "another program of rto-agent is attached to {cgroup} (id {}",
            self.id
        )?;
        match &self.pin_dir {
            Some(pin_dir) => write!(f, ", pins in {})", printable::path(pin_dir)),
            None => f.write_str(", its pins are not visible here)"),
        }
    }
}

/// The programs of other pin directories. `own` is this one's program, whose pins may be lost.
pub fn other_programs(pin_dir: &Path, own: Option<u32>, cgroup: &Path) -> Vec<OtherProgram> {
    let attached = programs::in_ancestry(cgroup::top_of(cgroup), cgroup, &[]);
    if attached.iter().all(|program| Some(program.id) == own) {
        return Vec::new();
    }
    let own_dir = path_security::resolved(pin_dir);
    let mut dirs = Vec::new();
    let roots = root_of(&own_dir).into_iter().chain([BPF_FS.into()]);
    for root in BTreeSet::from_iter(roots) {
        pin_dirs(&root, DEPTH, &mut dirs);
    }
    dirs.sort();
    dirs.dedup();
    let mut pinned = Vec::new();
    for dir in dirs {
        for set in pins::pin_sets(&dir).unwrap_or_default() {
            pinned.extend(Link::at(&set.path).map(|link| (link.program_id, dir.clone(), set.path)));
        }
    }
    let mut found = Vec::new();
    for program in attached
        .into_iter()
        .filter(|program| Some(program.id) != own)
    {
        let pins = pinned.iter().find(|(id, ..)| *id == program.id);
        let pin_dir = match pins {
            Some((_, dir, _)) if *dir == own_dir => continue,
            Some((id, dir, set)) if is_agents(*id, PROGRAM, &set.join(pins::PROGRAM)) => {
                Some(dir.clone())
            }
            // Without CAP_SYS_ADMIN the kernel does not report the name.
            None if program.name == PROGRAM => None,
            _ => continue,
        };
        found.push(OtherProgram {
            id: program.id,
            cgroup: program.cgroup,
            is_managed: pin_dir.as_deref().is_none_or(is_locked),
            pin_dir,
        });
    }
    found
}

/// The highest directory of the BPF file system that a path is in.
fn root_of(path: &Path) -> Option<PathBuf> {
    let is_bpf =
        |dir: &&Path| statfs(*dir).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC);
    let existing = path.ancestors().skip_while(|dir| !dir.exists());
    existing.take_while(is_bpf).last().map(Path::to_owned)
}

/// The directories below `dir` that contain pin sets.
fn pin_dirs(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if pins::pin_sets(dir).is_ok_and(|sets| !sets.is_empty()) {
        found.push(dir.to_owned());
        return;
    }
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if depth > 1 {
            pin_dirs(&entry.path(), depth - 1, found);
        }
    }
}

/// Whether another process has locked a pin directory, as a daemon does.
fn is_locked(pin_dir: &Path) -> bool {
    let lock = |dir| Flock::lock(dir, FlockArg::LockExclusiveNonblock);
    File::open(pin_dir).is_ok_and(|dir| lock(dir).is_err())
}
