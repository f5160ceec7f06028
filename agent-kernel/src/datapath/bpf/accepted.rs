//! Sets rto_min of accepted sockets before their first RTT sample, if the kernel allows it.

use std::{fs::File, path::Path};

use aya::{
    Btf, Ebpf,
    programs::{LsmCgroup, links::FdLink},
};
use rto_agent_common::PROGRAM_CLONE;
use rto_agent_core::wire::kernel::RtoMinTiming;

use super::{
    link, object,
    object::{LoadParams, program},
    pins,
};
use crate::{
    datapath::{
        Cause, DatapathError, Options,
        error::{attach_error, pin_error},
    },
    kernel::{
        btf,
        link::Link,
        pinned::{ObjectId, is_pinned},
        privileges,
    },
};

/// The hook; its function in the kernel's BTF is `bpf_lsm_<hook>`.
const HOOK: &str = "inet_csk_clone";

/// The program's link, or the reason for its absence.
pub(super) enum Hook {
    Attached {
        /// Keeps the program attached even if its pin is removed.
        link: Link,
        /// The kernel's id of the link.
        id: u32,
        program_id: u32,
    },
    Unavailable(String),
}

impl Hook {
    /// Adopts a link pinned in `dir`, or attaches the program over the maps pinned there. This
    /// second program is optional: if it is unavailable, the reason is stored and the caller
    /// continues.
    pub(super) fn adopt_or_attach(options: &Options, dir: &Path) -> Self {
        if let Some(hook) = adopt(dir) {
            return hook;
        }
        let paths = [pins::CLONE_LINK, pins::CLONE_PROGRAM].map(|name| dir.join(name));
        // All are recognised before any is removed: the program's pin shows whose the link is.
        let paths = paths.map(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            let is_own = name.is_some_and(|name| pins::is_own(dir, name));
            (path, is_own)
        });
        for (path, is_own) in paths.iter().filter(|(path, _)| path.exists()) {
            let path_shown = path.display();
            tracing::warn!(
                "the pin {path_shown} is not a link to the agent's program: re-creating \
                            it"
            );
            // If it stays, pinning reports the error.
            let _ = if *is_own {
                std::fs::remove_file(path)
            } else {
                std::fs::rename(path, pins::unique(dir, "foreign", ""))
            };
        }
        if let Some(reason) = &options.without_clone {
            return Self::Unavailable(reason.clone());
        }
        match active().and_then(|()| attach(options, dir).map_err(|e| e.to_string())) {
            Ok(hook) => hook,
            Err(reason) => Self::Unavailable(reason),
        }
    }

    /// The expected objects by the names of their pins.
    pub(super) fn pins(&self) -> Vec<(&'static str, ObjectId)> {
        match self {
            Self::Attached { id, program_id, .. } => vec![
                (pins::CLONE_LINK, ObjectId::Link(*id)),
                (pins::CLONE_PROGRAM, ObjectId::Program(*program_id)),
            ],
            Self::Unavailable(_) => Vec::new(),
        }
    }

    /// Detaches the program, see [`link::detach`].
    pub(super) fn detach(&self) {
        if let Self::Attached { link, .. } = self {
            link::detach(link);
        }
    }

    pub(super) fn view(&self) -> RtoMinTiming {
        match self {
            Self::Attached { .. } => RtoMinTiming::BeforeFirstSample,
            Self::Unavailable(reason) => RtoMinTiming::AfterFirstSample {
                reason: reason.clone(),
            },
        }
    }
}

/// Adopts the link pinned in `dir`, if it belongs to the agent's program.
fn adopt(dir: &Path) -> Option<Hook> {
    let link = Link::from_pin(&dir.join(pins::CLONE_LINK)).ok()?;
    let program_id = link.program_id().ok()?;
    let pin = dir.join(pins::CLONE_PROGRAM);
    is_pinned(program_id, PROGRAM_CLONE, &pin).then_some(Hook::Attached {
        id: link.id().ok()?,
        link,
        program_id,
    })
}

/// Whether the kernel runs programs at LSM hooks: it may accept attachments and still not run them.
pub(super) fn active() -> Result<(), String> {
    match privileges::lsms(&privileges::securityfs()) {
        Some(lsms) if lsms.iter().any(|lsm| lsm == "bpf") => Ok(()),
        Some(lsms) => Err(format!(
            "\"bpf\" is not among the active LSMs ({}); boot with lsm=...,bpf to enable it",
            lsms.join(",")
        )),
        None => Err(
            "the active LSMs are unknown; mount securityfs (in a container: mount the host's \
             /sys/kernel/security at any path)"
                .to_owned(),
        ),
    }
}

fn attach(options: &Options, dir: &Path) -> Result<Hook, DatapathError> {
    let mut ebpf = object::load(
        Some(dir),
        &LoadParams {
            offsets: offsets()?,
            ..options.load_params()
        },
    )?;
    let program = program!(ebpf, PROGRAM_CLONE, LsmCgroup)?;
    program
        .load(HOOK, &object::kernel_types()?)
        .map_err(object::load_error)?;
    let cgroup = File::open(&options.cgroup).map_err(|e| attach_error(&options.cgroup, e))?;
    let id = program
        .attach(cgroup)
        .map_err(|e| attach_error(&options.cgroup, e))?;
    let link: FdLink = program
        .take_link(id)
        .map_err(|e| attach_error(&options.cgroup, e))?
        .into();
    let path = dir.join(pins::CLONE_PROGRAM);
    program.pin(&path).map_err(|e| pin_error(&path, e))?;
    let path = dir.join(pins::CLONE_LINK);
    link.pin(&path).map_err(|e| pin_error(&path, e))?;
    let gone = || pin_error(&path, std::io::Error::other("the link is missing"));
    adopt(dir).ok_or_else(gone)
}

/// Loads the program without attaching it, to see whether this kernel accepts it.
pub(super) fn try_load(ebpf: &mut Ebpf, types: &Btf) -> Result<(), DatapathError> {
    program!(ebpf, PROGRAM_CLONE, LsmCgroup)?
        .load(HOOK, types)
        .map_err(object::load_error)
}

pub(super) fn request_offsets() -> Result<rto_agent_common::Offsets, DatapathError> {
    btf::Btf::vmlinux()
        .and_then(|btf| btf.request_offsets())
        .map_err(|e| DatapathError::Load(Cause::new(e)))
}

pub(super) fn offsets() -> Result<rto_agent_common::Offsets, DatapathError> {
    btf::Btf::vmlinux()
        .and_then(|btf| btf.offsets())
        .map_err(|e| DatapathError::Load(Cause::new(e)))
}
