//! The kernel's own view of BPF objects, through bpf(2). It uses neither code of the agent nor bpftool.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
};

use nix::libc;

use crate::bpf::{call, create_map, delete, lookup, made, next_key, pin, pinned, update};

/// BPF_CGROUP_SOCK_OPS, an attach type.
pub const SOCK_OPS: u32 = 3;

const PROG_GET_NEXT_ID: libc::c_int = 11;
const MAP_GET_NEXT_ID: libc::c_int = 12;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;
const LINK_GET_FD_BY_ID: libc::c_int = 30;
const LINK_GET_NEXT_ID: libc::c_int = 31;

const LINK_TYPE_CGROUP: u32 = 3;
const MANY: usize = 64;

#[repr(C)]
#[derive(Default)]
struct QueryAttr {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    length: u32,
    info: u64,
}

/// The beginning of struct bpf_link_info, with the union's fields for a cgroup.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    cgroup: u64,
    attach_type: u32,
    more: u32,
}

/// The beginning of struct bpf_map_info.
#[repr(C)]
#[derive(Debug, Default)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

/// The beginning of struct bpf_prog_info.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    lengths: [u32; 2],
    instructions: [u64; 2],
    load_time: u64,
    uid: u32,
    maps: u32,
    map_ids: u64,
}

/// The ids of the programs that are attached to this cgroup itself, not to its ancestors.
pub fn programs_at(cgroup: &Path, attach_type: u32) -> io::Result<Vec<u32>> {
    let dir = File::open(cgroup)?;
    let mut ids = [0u32; MANY];
    let mut attr = QueryAttr {
        target_fd: number(&dir),
        attach_type,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: 64,
        ..QueryAttr::default()
    };
    call(PROG_QUERY, &mut attr)?;
    Ok(ids.into_iter().take(attr.prog_cnt as usize).collect())
}

/// The programs behind all links to a cgroup, of any attach type.
pub fn links_at(cgroup: &Path) -> io::Result<Vec<u32>> {
    let cgroup = cgroup.metadata()?.ino();
    let mut programs = Vec::new();
    for link in every(LINK_GET_NEXT_ID, LINK_GET_FD_BY_ID) {
        let mut info = LinkInfo::default();
        inform(&link?, &mut info)?;
        if info.kind == LINK_TYPE_CGROUP && info.cgroup == cgroup {
            programs.push(info.program);
        }
    }
    Ok(programs)
}

/// The programs that use one of these maps.
pub fn programs_using(maps: &[u32]) -> io::Result<Vec<u32>> {
    let mut programs = Vec::new();
    for program in every(PROG_GET_NEXT_ID, PROG_GET_FD_BY_ID) {
        let mut ids = [0u32; MANY];
        let mut info = ProgramInfo {
            maps: 64,
            map_ids: ids.as_mut_ptr() as u64,
            ..ProgramInfo::default()
        };
        inform(&program?, &mut info)?;
        if ids.iter().any(|id| *id != 0 && maps.contains(id)) {
            programs.push(info.id);
        }
    }
    Ok(programs)
}

/// The number of BPF objects on this machine, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Objects {
    /// Maps.
    pub maps: u64,
    /// Programs of any type.
    pub programs: u64,
    /// Links.
    pub links: u64,
}

impl Objects {
    /// Counts them.
    pub fn count() -> io::Result<Self> {
        let [maps, programs, links] =
            [MAP_GET_NEXT_ID, PROG_GET_NEXT_ID, LINK_GET_NEXT_ID].map(ids);
        Ok(Self {
            maps: maps?,
            programs: programs?,
            links: links?,
        })
    }
}

/// The number of ids of a kind.
fn ids(next: libc::c_int) -> io::Result<u64> {
    let (mut last, mut count) = (0, 0);
    while let Some(id) = id_after(next, last)? {
        (last, count) = (id, count + 1);
    }
    Ok(count)
}

/// The next id of a kind.
fn id_after(next: libc::c_int, id: u32) -> io::Result<Option<u32>> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    match call(next, &mut attr) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        called => called.map(|_| Some(attr.next_id)),
    }
}

/// A pinned map.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    /// The kernel's id of the map.
    pub id: u32,
    info: MapInfo,
}

impl Map {
    /// Opens a pinned map.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(pinned(path)?)
    }

    /// Creates an empty map of the same type and sizes. Map types that need BTF (socket storage) are not supported.
    pub fn twin(&self) -> io::Result<Self> {
        let info = &self.info;
        let sizes = [info.key_size, info.value_size, info.max_entries];
        let [key, value, entries] = sizes;
        Self::of(create_map([info.kind, key, value, entries, info.flags])?)
    }

    /// Pins the map.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    fn of(fd: OwnedFd) -> io::Result<Self> {
        let mut info = MapInfo::default();
        inform(&fd, &mut info)?;
        let id = info.id;
        Ok(Self { fd, id, info })
    }

    const fn key_size(&self) -> usize {
        self.info.key_size as usize
    }

    const fn value_size(&self) -> usize {
        self.info.value_size as usize
    }

    /// Writes a value. Not for per-CPU maps.
    pub fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        if (key.len(), value.len()) != (self.key_size(), self.value_size()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        update(&self.fd, key, value)
    }

    /// Removes a key; returns whether it existed.
    pub fn remove(&self, key: &[u8]) -> io::Result<bool> {
        if key.len() != self.key_size() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        delete(&self.fd, key)
    }

    /// All keys and values. Not for per-CPU maps.
    pub fn dump(&self) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut all = Vec::new();
        let mut key: Option<Vec<u8>> = None;
        loop {
            let mut next = vec![0; self.key_size()];
            if !next_key(&self.fd, key.as_deref(), &mut next)? {
                return Ok(all);
            }
            let value = self.get(&next)?;
            let value = value.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
            all.push((next.clone(), value));
            key = Some(next);
        }
    }

    /// The value of a key, or of its longest matching prefix in a trie. Not for per-CPU maps.
    pub fn get(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        if key.len() != self.key_size() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut words = vec![0; self.value_size().div_ceil(size_of::<u64>())];
        let found = lookup(&self.fd, key, &mut words)?;
        Ok(found.then(|| bytes_of(&words, self.value_size())))
    }
}

/// The first bytes of these words. It copies whole words, as tests read values by the hundred thousand, unoptimised.
fn bytes_of(words: &[u64], size: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(words));
    for word in words {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// Descriptors of all objects of a kind. Objects that are removed during the iteration are skipped.
fn every(next: libc::c_int, by_id: libc::c_int) -> impl Iterator<Item = io::Result<OwnedFd>> {
    let mut last = 0;
    std::iter::from_fn(move || {
        loop {
            last = match id_after(next, last) {
                Ok(id) => id?,
                Err(e) => return Some(Err(e)),
            };
            let mut attr = IdAttr {
                id: last,
                ..IdAttr::default()
            };
            match call(by_id, &mut attr).map(made) {
                // EAGAIN: another test is creating it at this moment.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EAGAIN)) => {}
                result => return Some(result),
            }
        }
    })
}

fn inform<I>(object: &OwnedFd, info: &mut I) -> io::Result<()> {
    let mut attr = InfoAttr {
        fd: number(object),
        length: u32::try_from(size_of::<I>()).unwrap_or(0),
        info: std::ptr::from_mut(info) as u64,
    };
    call(OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

fn number(fd: &impl AsRawFd) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}
