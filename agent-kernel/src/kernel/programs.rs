//! Finds every sock_ops program in the cgroup tree.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::bpf::{AttachMode, Attached, program_info, query_sock_ops};

/// A program attached to a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachedProgram {
    /// The kernel's id.
    pub id: u32,
    /// Its name; empty if it has none or this process may not read it.
    pub name: String,
    /// Hash of its instructions, hexadecimal.
    pub tag: String,
    /// Instructions that the verifier processed; `None` before Linux 5.16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified_instructions: Option<u32>,
    /// The cgroup it is attached to.
    pub cgroup: PathBuf,
    /// Attached so that no other program may be attached here or below.
    pub exclusive: bool,
    /// Attached so that a program attached to a cgroup below runs instead.
    pub overridable: bool,
    /// Whether it belongs to this agent.
    pub ours: bool,
}

/// Ids of the sock_ops programs attached to exactly this cgroup.
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
                // The cgroup may have been removed since it was listed.
                let _ = visit(&path, ours, &mut found);
                below.push(path);
            }
        }
    }
    Ok(found)
}

/// The programs between the hierarchy's root and `cgroup`, both included. They decide whether a
/// link can be created there.
pub fn in_ancestry(root: &Path, cgroup: &Path, ours: &[u32]) -> Vec<AttachedProgram> {
    let mut found = Vec::new();
    for dir in cgroup.ancestors().take_while(|dir| dir.starts_with(root)) {
        // If the kernel refuses the query, the attempt to attach reports the reason.
        let _ = visit(dir, ours, &mut found);
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
            verified_instructions: info.verified_instructions,
            cgroup: cgroup.to_owned(),
            exclusive: mode == AttachMode::Exclusive,
            overridable: mode == AttachMode::Override,
            ours: ours.contains(&id),
        });
    }
    Ok(())
}
