//! Every sock_ops program attached anywhere in the cgroup tree.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::bpf::{AttachMode, Attached, program_info, query_sock_ops};

/// A program at a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachedProgram {
    /// The kernel's id.
    pub id: u32,
    /// Its name; empty if it has none or may not be asked.
    pub name: String,
    /// Hash of its instructions.
    pub tag: String,
    /// Where it is attached.
    pub cgroup: PathBuf,
    /// Attached so that no other may be here or below.
    pub exclusive: bool,
    /// Attached so that a program of a cgroup below runs instead.
    pub overridable: bool,
    /// Ours.
    pub ours: bool,
}

/// Ids of the sock_ops programs at this very cgroup.
pub fn attached_ids(cgroup: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    Ok(query_sock_ops(cgroup)?.ids)
}

/// Walks the tree from `root` down. Cgroups that vanish during the walk are skipped.
pub fn in_tree(root: &Path, ours: &[u32]) -> io::Result<Vec<AttachedProgram>> {
    let mut found = Vec::new();
    visit(root, ours, &mut found)?;
    let mut below = vec![root.to_owned()];
    while let Some(dir) = below.pop() {
        let Ok(entries) = fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let path = entry.path();
                // It may have been removed since it was listed.
                let _gone = visit(&path, ours, &mut found);
                below.push(path);
            }
        }
    }
    Ok(found)
}

/// The programs between the hierarchy's root and `cgroup`, both included: they decide
/// whether a link can be made there.
pub fn in_ancestry(root: &Path, cgroup: &Path, ours: &[u32]) -> Vec<AttachedProgram> {
    let mut found = Vec::new();
    for dir in cgroup.ancestors().take_while(|dir| dir.starts_with(root)) {
        // If the kernel cannot be asked, the attempt to attach will tell.
        let _unknown = visit(dir, ours, &mut found);
    }
    found
}

fn visit(cgroup: &Path, ours: &[u32], found: &mut Vec<AttachedProgram>) -> io::Result<()> {
    let dir = File::open(cgroup)?;
    let Attached { ids, mode } = query_sock_ops(dir.as_fd())?;
    for id in ids {
        let info = program_info(id).unwrap_or_default();
        found.push(AttachedProgram {
            id,
            name: info.name,
            tag: info.tag,
            cgroup: cgroup.to_owned(),
            exclusive: mode == AttachMode::Exclusive,
            overridable: mode == AttachMode::Override,
            ours: ours.contains(&id),
        });
    }
    Ok(())
}
