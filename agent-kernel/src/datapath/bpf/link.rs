//! The sock_ops program's link: adopted, created, or updated with another program.

use std::{fs::File, io, os::fd::AsFd as _, path::Path};

use aya::programs::{CgroupAttachMode, SockOps, links::FdLink};
use rto_agent_common::PROGRAM;
use tracing::warn;

use super::{
    object,
    object::{LoadParams, program},
    pins,
};
use crate::{
    datapath::{
        Cause, DatapathError, Options,
        error::{attach_error, errno, pin_error},
    },
    kernel::{
        btf::Btf,
        link,
        pinned::{ObjectId, Pinned, is_agents},
        programs::attached_ids,
    },
};

/// The link, and the id of its program.
pub(super) struct Link {
    /// Keeps the program attached even if its pin is removed.
    handle: link::Link,
    /// The kernel's id of the link.
    pub(super) id: u32,
    pub(super) program_id: u32,
    /// Why the program reads less of sockets than it could; `None` if it reads everything, or was
    /// loaded by another daemon.
    pub(super) limited: Option<String>,
}

impl Link {
    /// The link pinned in `dir`, if it can be opened.
    pub(super) fn at(dir: &Path) -> Option<Self> {
        Self::open(dir).ok()
    }

    /// The link pinned in `dir`.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let handle = link::Link::from_pin(&dir.join(pins::LINK))?;
        Ok(Self {
            id: handle.id()?,
            program_id: handle.program_id()?,
            handle,
            limited: None,
        })
    }

    /// The link pinned in `dir`, if it is attached to `cgroup` and has an agent's program.
    pub(super) fn in_force(dir: &Path, cgroup: &Path) -> Option<Self> {
        let link = Self::at(dir)?;
        if !link.is_agents(dir) {
            let path = dir.join(pins::LINK);
            warn!(
                "the pin {} is the link of another program; it is not used",
                path.display()
            );
            return None;
        }
        attached(cgroup, link.program_id).ok()?.then_some(link)
    }

    /// Detaches its program, see [`detach`].
    pub(super) fn detach(&self) {
        detach(&self.handle);
    }

    /// Whether its program belongs to an agent of any version.
    fn is_agents(&self, dir: &Path) -> bool {
        is_agents(self.program_id, PROGRAM, &dir.join(pins::PROGRAM))
    }

    /// Whether it is attached to any cgroup.
    pub(super) fn is_attached(&self) -> io::Result<bool> {
        self.handle.is_attached()
    }

    /// Whether its program is pinned in `dir`, and so uses the maps there. After a crash, a link
    /// may be pinned beside maps that its program no longer uses.
    pub(super) fn is_of(&self, dir: &Path) -> bool {
        let pinned = Pinned::open(&dir.join(pins::PROGRAM));
        pinned.is_ok_and(|program| program.id() == ObjectId::Program(self.program_id))
    }

    /// Loads the program over the maps pinned in `dir`, attaches it, and pins program and link
    /// there. If `former` is an attached link, it gets the new program. So the program keeps its
    /// position among other owners' programs, of which the last to write `reply` decides, and each
    /// connection sees exactly one program of the agent.
    pub(super) fn put_in_force(
        options: &Options,
        dir: &Path,
        former: Option<&Self>,
    ) -> Result<Self, DatapathError> {
        let (mut ebpf, limited) = load(options, dir)?;
        let program = program!(ebpf, PROGRAM, SockOps)?;
        let program_id = program.info().map_err(object::load_error)?.id();
        let path = dir.join(pins::PROGRAM);
        program.pin(&path).map_err(|e| pin_error(&path, e))?;
        let path = dir.join(pins::LINK);
        let Some(former) = former else {
            attach(options, program, &path)?;
            let handle = link::Link::from_pin(&path).map_err(|e| pin_error(&path, e))?;
            return Ok(Self {
                id: handle.id().map_err(|e| pin_error(&path, e))?,
                handle,
                program_id,
                limited,
            });
        };
        // Steps that can fail come first, because the update cannot be undone.
        former.handle.pin(&path).map_err(|e| pin_error(&path, e))?;
        let updated = link::Link::from_pin(&path).and_then(|handle| {
            let fd = program.fd().map_err(io::Error::other)?;
            handle.update(fd.as_fd()).map(|()| handle)
        });
        match updated {
            Ok(handle) => Ok(Self {
                id: former.id,
                handle,
                program_id,
                limited,
            }),
            Err(e) => {
                // Its other pins stay.
                let _ = std::fs::remove_file(&path);
                Err(attach_error(&options.cgroup, e))
            }
        }
    }
}

/// Removes the pins of the agent's links in `dir`, and then detaches its programs.
pub(super) fn remove(dir: &Path) -> io::Result<()> {
    let own = [pins::LINK, pins::CLONE_LINK].map(|pin| {
        let link = link::Link::from_pin(&dir.join(pin)).ok()?;
        pins::is_own(dir, pin).then_some(link)
    });
    pins::remove_links(dir)?;
    own.iter().flatten().for_each(detach);
    Ok(())
}

/// Detaches a link's program at once; the link's pin must be gone already. If the kernel cannot
/// detach, the attachment ends some time after the last handle and pin.
pub(super) fn detach(link: &link::Link) {
    if let Err(e) = link.detach() {
        warn!("a link cannot be detached before its pin is removed: {e}");
    }
}

/// Whether the kernel lists a program at a cgroup.
pub(super) fn attached(cgroup: &Path, program_id: u32) -> io::Result<bool> {
    Ok(attached_ids(File::open(cgroup)?.as_fd())?.contains(&program_id))
}

/// The verified program. Reading socket fields beyond the context is optional: if the kernel
/// refuses that, loads a program without it, and also returns the reason.
fn load(options: &Options, dir: &Path) -> Result<(aya::Ebpf, Option<String>), DatapathError> {
    let values = options.load_params();
    let verified = |values: &LoadParams| -> Result<aya::Ebpf, DatapathError> {
        let mut ebpf = object::load(Some(dir), values)?;
        let program = program!(ebpf, PROGRAM, SockOps)?;
        program.load().map_err(object::load_error)?;
        Ok(ebpf)
    };
    let Ok(btf) = Btf::vmlinux() else {
        return Ok((verified(&values)?, None));
    };
    let all = LoadParams {
        socket_types: btf.socket_types(),
        kfuncs: btf.kfuncs(),
        ..values
    };
    let refusal = match verified(&all) {
        Ok(ebpf) => return Ok((ebpf, None)),
        Err(e) => e,
    };
    let limited =
        format!("the program cannot read listeners, nor detect MPTCP or TCP Fast Open: {refusal}");
    let ebpf = verified(&values)?;
    warn!("{limited}");
    Ok((ebpf, Some(limited)))
}

fn attach(options: &Options, program: &mut SockOps, path: &Path) -> Result<(), DatapathError> {
    let cgroup = &options.cgroup;
    let dir = File::open(cgroup).map_err(|e| attach_error(cgroup, e))?;
    // A BPF link is always multi-attach. The kernel refuses any flags but 0, aya's `Single`, with
    // EINVAL.
    let id = program.attach(dir, CgroupAttachMode::Single);
    let id = id.map_err(|e| match errno(&e) {
        Some(libc::EPERM) => DatapathError::Excluded {
            cgroup: cgroup.clone(),
            cause: Cause::new(e),
        },
        _ => attach_error(cgroup, e),
    })?;
    let link: FdLink = program
        .take_link(id)
        .map_err(|e| attach_error(cgroup, e))?
        .try_into()
        .map_err(|_| attach_error(cgroup, "the kernel has no BPF links (Linux 5.7 and later)"))?;
    link.pin(path).map_err(|e| pin_error(path, e))?;
    Ok(())
}
