//! The sock_ops program's link: adopted, made, or given another program.

use std::{
    fs::File,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::programs::{CgroupAttachMode, SockOps, links::FdLink};
use rto_agent_common::PROGRAM;
use tracing::warn;

use super::{
    DatapathError, Options,
    object::{self, Values, program},
    pins,
    tables::describe,
};
use crate::kernel::{btf::Btf, link, programs::attached_ids};

/// The link, and the program it has.
pub(super) struct Link {
    /// Keeps the link in force even where somebody removes its pin.
    handle: link::Link,
    pub(super) program_id: u32,
}

impl Link {
    /// The link pinned in `dir`.
    pub(super) fn at(dir: &Path) -> Option<Self> {
        let handle = link::Link::from_pin(&dir.join(pins::LINK)).ok()?;
        let program_id = handle.program_id().ok()?;
        Some(Self { handle, program_id })
    }

    /// The link pinned in `dir`, if it is in force at `cgroup`.
    pub(super) fn in_force(dir: &Path, cgroup: &Path) -> Option<Self> {
        let link = Self::at(dir)?;
        attached(cgroup, link.program_id).ok()?.then_some(link)
    }

    /// Loads the program over the maps pinned in `dir`, puts it in force and pins its link there. If `former` is
    /// a link in force, that gets the program: it keeps its place among the programs of others, of which the last
    /// to write `reply` decides, and no connection sees two of ours, or none.
    pub(super) fn put_in_force(
        options: &Options,
        dir: &Path,
        former: Option<&Self>,
    ) -> Result<Self, DatapathError> {
        let mut ebpf = load(options, dir)?;
        let program = program!(ebpf, PROGRAM, SockOps)?;
        let path = dir.join(pins::LINK);
        match former {
            Some(former) => {
                former.pin(&path)?;
                let fd = program.fd().map_err(|e| object::load_error(&e))?;
                if let Err(e) = former.handle.update(fd.as_fd()) {
                    // It was not there before.
                    let _unpinned = std::fs::remove_file(&path);
                    return Err(attach_error(options, e.to_string()));
                }
            }
            None => attach(options, program, &path)?,
        }
        Self::at(dir).ok_or_else(|| {
            attach_error(
                options,
                format!("the link pinned at {} is not to be had", path.display()),
            )
        })
    }

    fn pin(&self, path: &Path) -> Result<(), DatapathError> {
        self.handle.pin(path).map_err(|e| DatapathError::Pin {
            path: path.to_owned(),
            reason: e.to_string(),
        })
    }
}

/// Whether the kernel lists a program at a cgroup.
pub(super) fn attached(cgroup: &Path, program_id: u32) -> std::io::Result<bool> {
    Ok(attached_ids(File::open(cgroup)?.as_fd())?.contains(&program_id))
}

/// The program, verified. What it reads of sockets beyond its context is an addition: a kernel that has the
/// functions for it and does not take the calls gets the program without.
fn load(options: &Options, dir: &Path) -> Result<aya::Ebpf, DatapathError> {
    let values = options.values();
    let verified = |values: &Values| {
        let mut ebpf = object::load(Some(dir), values)?;
        let program = program!(ebpf, PROGRAM, SockOps)?;
        program.load().map_err(|e| object::load_error(&e))?;
        Ok(ebpf)
    };
    let Ok(btf) = Btf::vmlinux() else {
        return verified(&values);
    };
    let all = Values {
        socket_types: btf.socket_types(),
        kfuncs: btf.kfuncs(),
        ..values
    };
    verified(&all).or_else(|e| {
        warn!("{e}; the program reads nothing of listeners, MPTCP and TCP Fast Open");
        verified(&values)
    })
}

fn attach(options: &Options, program: &mut SockOps, path: &Path) -> Result<(), DatapathError> {
    let failed = |reason: String| attach_error(options, reason);
    let cgroup = File::open(&options.cgroup).map_err(|e| failed(e.to_string()))?;
    // A BPF link is always multi-attach; any flag but 0 is EINVAL, which aya spells `Single`.
    let id = program.attach(cgroup, CgroupAttachMode::Single).map_err(|e| {
        let mut reason = describe(&e);
        if reason.contains("os error 1)") {
            reason.push_str(
                "; another sock_ops program is attached exclusively here or above: see rto-agent doctor",
            );
        }
        failed(reason)
    })?;
    let link: FdLink = program
        .take_link(id)
        .map_err(|e| failed(describe(&e)))?
        .try_into()
        .map_err(|_| failed("the kernel is too old for BPF links (5.7)".to_owned()))?;
    link.pin(path).map_err(|e| DatapathError::Pin {
        path: path.to_owned(),
        reason: describe(&e),
    })?;
    Ok(())
}

fn attach_error(options: &Options, reason: String) -> DatapathError {
    DatapathError::Attach {
        cgroup: PathBuf::clone(&options.cgroup),
        reason,
    }
}
