//! Operations on BPF links that aya does not offer.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use nix::libc;

use super::{
    bpf::{bpf, fd_number, object_info, pin_fd},
    pinned::{ObjectId, Pinned},
};

const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// A program's attachment. It lasts as long as a handle or a pin exists.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// `attr` of BPF_LINK_UPDATE.
#[repr(C)]
#[derive(Default)]
struct UpdateAttr {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// `attr` of BPF_LINK_DETACH.
#[repr(C)]
struct DetachAttr {
    link_fd: u32,
}

/// `struct bpf_link_info` of a link to a cgroup.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    padding: u32,
    cgroup_id: u64,
    attach_type: u32,
    reserved: u32,
}

impl Link {
    /// Opens a pinned link.
    pub fn from_pin(path: &Path) -> io::Result<Self> {
        let pinned = Pinned::open(path)?;
        match pinned.id() {
            ObjectId::Link(_) => Ok(Self(pinned.into_fd())),
            other => Err(io::Error::other(format!("{other} is not a link"))),
        }
    }

    /// Pins the link at another path as well.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin_fd(&self.0, path)
    }

    /// The kernel's id of the link.
    pub fn id(&self) -> io::Result<u32> {
        Ok(object_info::<LinkInfo>(self.0.as_fd())?.id)
    }

    /// The kernel's id of the link's program.
    pub fn program_id(&self) -> io::Result<u32> {
        Ok(object_info::<LinkInfo>(self.0.as_fd())?.program_id)
    }

    /// Whether it is still attached to a cgroup. The kernel reports no cgroup for a link that was
    /// detached or whose cgroup is gone (`bpf_cgroup_link_fill_link_info()`, Linux 5.10).
    pub fn is_attached(&self) -> io::Result<bool> {
        Ok(object_info::<LinkInfo>(self.0.as_fd())?.cgroup_id != 0)
    }

    /// Replaces the program atomically; it keeps its position among the programs of other owners
    /// (`cgroup_bpf_replace()`, Linux 5.7).
    pub fn update(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let mut attr = UpdateAttr {
            link_fd: fd_number(self.0.as_fd()),
            new_prog_fd: fd_number(program),
            ..UpdateAttr::default()
        };
        bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
    }

    /// Detaches the program before it returns (`bpf_cgroup_link_detach()`, Linux 5.9), even if
    /// other handles hold the link. Dropping the last handle or pin detaches it later: after an RCU
    /// grace period, in a kernel worker.
    pub fn detach(&self) -> io::Result<()> {
        let mut attr = DetachAttr {
            link_fd: fd_number(self.0.as_fd()),
        };
        bpf(BPF_LINK_DETACH, &mut attr).map(drop)
    }
}
