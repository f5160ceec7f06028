//! What this kernel can do, found out by doing it: on a socket of our own, and with programs that
//! are loaded and not attached.
//!
//! The probing program is attached to this process's own cgroup for the moment of one connect()
//! to a closed port of the loopback interface, and touches the socket with the right cookie only.

use std::{
    fs::File,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use aya::{
    maps::Array,
    programs::{CgroupAttachMode, SockOps},
};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket},
};
use rto_agent_common::{Offsets, PROGRAM_PROBE, Probe, maps};

use super::{
    DatapathError, accepted,
    object::{self, Values, program},
    tables::describe,
    walk,
};
use crate::kernel::{
    cgroup,
    features::{Asked, NOT_ASKED},
    privileges,
};

/// A closed port: tcpmux, which nobody has.
const PORT: u16 = 1;

/// Asks the kernel. Takes some milliseconds.
#[must_use]
pub fn run() -> Asked {
    let missing = privileges::missing(privileges::effective().unwrap_or(u64::MAX));
    if !missing.is_empty() {
        return Asked::nothing(&format!("{NOT_ASKED}needs {}", missing.join(", ")));
    }
    let options = match cgroup::own() {
        Some(cgroup) => ask(&cgroup).map_err(|e| e.to_string()),
        None => Err(format!(
            "{NOT_ASKED}this process's own cgroup is not below a cgroup2 mount"
        )),
    };
    let offsets = accepted::offsets();
    let load = |what: fn(&mut aya::Ebpf) -> Result<(), DatapathError>| {
        let offsets = offsets.as_ref().map_err(ToString::to_string)?;
        let mut ebpf = object::load(None, &values(0, *offsets)).map_err(|e| e.to_string())?;
        what(&mut ebpf).map_err(|e| e.to_string())
    };
    Asked {
        options,
        clone: load(accepted::try_load),
        lsm_active: accepted::active(),
        walk: load(walk::try_load),
    }
}

fn values(probe_cookie: u64, offsets: Offsets) -> Values {
    Values {
        trie_entries: Some(1),
        without_policies: true,
        probe_cookie,
        offsets,
        ..Values::default()
    }
}

fn ask(cgroup: &Path) -> Result<Probe, DatapathError> {
    // A program of somebody else that stands in the way says nothing about the kernel.
    let failed = |reason: String| {
        let cgroup = cgroup.display();
        DatapathError::Load(format!("{NOT_ASKED}cannot attach to {cgroup}: {reason}"))
    };
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(|e| failed(e.to_string()))?;
    let cookie = cookie(&socket).map_err(|e| failed(format!("SO_COOKIE: {e}")))?;
    let mut ebpf = object::load(None, &values(cookie, Offsets::default()))?;
    let program = program!(ebpf, PROGRAM_PROBE, SockOps)?;
    program.load().map_err(|e| object::load_error(&e))?;
    let dir = File::open(cgroup).map_err(|e| failed(e.to_string()))?;
    let link = program
        .attach(dir, CgroupAttachMode::Single)
        .map_err(|e| failed(describe(&e)))?;
    let address = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT));
    // What comes of it does not matter: the program runs before the SYN is sent.
    let connected = connect(socket.as_raw_fd(), &address);
    program.detach(link).map_err(|e| failed(describe(&e)))?;
    let map = ebpf
        .map(maps::PROBE)
        .ok_or_else(|| super::error::map(maps::PROBE, "is not in the object".to_owned()))?;
    let answers = Array::<_, Probe>::try_from(map)
        .and_then(|map| map.get(&0, 0))
        .map_err(|e| super::error::map(maps::PROBE, describe(&e)))?;
    if answers.ran == 0 {
        let outcome = connected.err().map_or("it succeeded", Errno::desc);
        return Err(DatapathError::Load(format!(
            "{NOT_ASKED}the probe's connect() to {}:{PORT} was not seen by the program ({outcome})",
            Ipv4Addr::LOCALHOST
        )));
    }
    Ok(answers)
}

/// SO_COOKIE, which nix does not have for reading.
fn cookie(socket: &OwnedFd) -> Result<u64, Errno> {
    let mut value = 0u64;
    let mut length: libc::socklen_t = 8;
    // SAFETY: buffer and length are on the stack, the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if done == 0 {
        Ok(value)
    } else {
        Err(Errno::last())
    }
}
