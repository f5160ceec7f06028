//! Reads objects pinned in a BPF file system. This needs only permission to open the pin, whereas a
//! query by id needs CAP_SYS_ADMIN.

use std::{
    fmt, fs, io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
};

use super::bpf::{name_and_maps, open_pin, program_info};

/// The kernel's id of a map, program or link; each kind has its own ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectId {
    /// A map.
    Map(u32),
    /// A program.
    Program(u32),
    /// A link.
    Link(u32),
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map(id) => write!(f, "map {id}"),
            Self::Program(id) => write!(f, "program {id}"),
            Self::Link(id) => write!(f, "link {id}"),
        }
    }
}

/// A pinned map, program or link.
#[derive(Debug)]
pub struct Pinned {
    fd: OwnedFd,
    id: ObjectId,
    is_frozen: bool,
}

impl Pinned {
    /// Opens the pinned object at a path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = open_pin(path)?;
        // BPF_OBJ_GET_INFO_BY_FD does not return the object's kind.
        let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let id =
            id(&fdinfo).ok_or_else(|| io::Error::other("the kernel does not return its ID"))?;
        let is_frozen = is_frozen(&fdinfo);
        Ok(Self { fd, id, is_frozen })
    }

    /// Its kind and id.
    pub const fn id(&self) -> ObjectId {
        self.id
    }

    /// Whether it is a map that processes can no longer write (`BPF_MAP_FREEZE`).
    pub const fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// For a program: its name, and the ids of the maps it uses. These include all maps that its
    /// instructions name, even in code that is dead on this kernel (`resolve_pseudo_ldimm64()`,
    /// Linux 5.10). `ProgramInfo::map_ids()` of aya opens the program by its id, for which the
    /// kernel wants CAP_SYS_ADMIN.
    pub fn program(&self) -> io::Result<(String, Vec<u32>)> {
        match self.id {
            ObjectId::Program(_) => name_and_maps(self.fd.as_fd()),
            ObjectId::Map(_) | ObjectId::Link(_) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Its file descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

/// Parses the object's kind and id from the kernel's description of its file.
fn id(fdinfo: &str) -> Option<ObjectId> {
    let field = |name: &str| {
        let value = fdinfo.lines().find_map(|line| line.strip_prefix(name));
        value?.trim().parse().ok()
    };
    // A link's description contains the id of its program as well.
    let link = field("link_id:").map(ObjectId::Link);
    let map = || field("map_id:").map(ObjectId::Map);
    let program = || field("prog_id:").map(ObjectId::Program);
    link.or_else(map).or_else(program)
}

fn is_frozen(fdinfo: &str) -> bool {
    let value = fdinfo.lines().find_map(|line| line.strip_prefix("frozen:"));
    value.is_some_and(|value| value.trim() != "0")
}

/// Whether a link's program is the agent's program of this name: a foreign link, pinned under our
/// name, is left alone. Without CAP_SYS_ADMIN the kernel reports only the names of open programs,
/// so the program must then be the one pinned beside the link.
pub fn is_agents(program_id: u32, name: &str, pin: &Path) -> bool {
    match program_info(program_id) {
        Ok(info) => info.name == name,
        Err(_) => is_pinned(program_id, name, pin),
    }
}

/// Whether this program, with this name, is pinned at the path.
pub fn is_pinned(program_id: u32, name: &str, pin: &Path) -> bool {
    let info = aya::programs::ProgramInfo::from_pin(pin);
    info.is_ok_and(|info| info.id() == program_id && info.name() == name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_gives_kind_id_and_frozen_flag() {
        for (fdinfo, expected) in [
            (
                "pos:\t0\nmap_type:\t11\nmap_id:\t7\nfrozen:\t0\n",
                Some(ObjectId::Map(7)),
            ),
            (
                "prog_type:\t13\nprog_id:\t8\nrun_cnt:\t0\n",
                Some(ObjectId::Program(8)),
            ),
            (
                "link_type:\tcgroup\nlink_id:\t9\nprog_id:\t8\n",
                Some(ObjectId::Link(9)),
            ),
            ("pos:\t0\nflags:\t02\n", None),
        ] {
            assert_eq!(id(fdinfo), expected, "{fdinfo}");
            assert!(!is_frozen(fdinfo));
            assert!(is_frozen(&format!("{fdinfo}frozen:\t1\n")) == !fdinfo.contains("frozen"));
        }
    }
}
