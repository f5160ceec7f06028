//! The few bpf(2) commands that aya does not offer: querying attached programs, reading information
//! about objects, and opening pins.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use nix::libc;

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_CGROUP_SOCK_OPS: u32 = 3;
/// `BPF_F_ALLOW_OVERRIDE` and `BPF_F_ALLOW_MULTI`, as BPF_PROG_QUERY reports them.
const BPF_F_ALLOW_OVERRIDE: u32 = 1;
const BPF_F_ALLOW_MULTI: u32 = 2;
/// The most programs of one type that a cgroup takes (`BPF_CGROUP_MAX_PROGS`, Linux 6.12); one more
/// fails with E2BIG.
pub const MAX_PROGRAMS: usize = 64;

/// How programs share a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// The only program in this cgroup, and none below it (flags 0 of the old call).
    #[default]
    Exclusive,
    /// The only program in this cgroup; a cgroup below may have its own instead.
    Override,
    /// Any number of programs, here and below. Links always attach in this mode.
    Multi,
}

/// The programs attached to one cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    /// Program ids, in the order they run.
    pub ids: Vec<u32>,
    /// How they are attached.
    pub mode: AttachMode,
}

/// `attr` of BPF_PROG_QUERY (include/uapi/linux/bpf.h), with the length that 5.10 knows.
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

/// `attr` of BPF_OBJ_PIN and BPF_OBJ_GET.
#[repr(C)]
#[derive(Default)]
pub(super) struct ObjectAttr {
    pub(super) path: u64,
    pub(super) fd: u32,
    pub(super) flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    length: u32,
    info: u64,
}

/// `struct bpf_prog_info` up to the last field that is read here.
#[repr(C)]
#[derive(Default)]
struct ProgInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; 16],
    ifindex: u32,
    flags: u32,
    netns_dev: u64,
    netns_ino: u64,
    /// Counts, lengths and pointers from `nr_jited_ksyms` to `prog_tags`, which are not requested.
    between: [u32; 22],
    run_time_ns: u64,
    run_cnt: u64,
    recursion_misses: u64,
    verified_insns: u32,
    padding: u32,
}

/// Run statistics of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// How often it ran.
    pub count: u64,
    /// The total time of the runs.
    pub time: std::time::Duration,
}

/// Run statistics of a program; `None` if the kernel does not count them
/// (`kernel.bpf_stats_enabled`) or refuses to show them (CAP_SYS_ADMIN).
pub fn runs(id: u32) -> Option<Runs> {
    let enabled = std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").ok()?;
    if enabled.trim() != "1" {
        return None;
    }
    let info = info(id).ok()?;
    Some(Runs {
        count: info.run_cnt,
        time: std::time::Duration::from_nanos(info.run_time_ns),
    })
}

/// What identifies a program, and what it cost to load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramInfo {
    /// At most 15 bytes, the kernel's limit.
    pub name: String,
    /// Hash of its instructions, hexadecimal.
    pub tag: String,
    /// Instructions that the verifier processed; `None` before Linux 5.16.
    pub verified_instructions: Option<u32>,
}

/// The sock_ops programs attached to exactly this cgroup (not to its ancestors).
pub fn query_sock_ops(cgroup: BorrowedFd<'_>) -> io::Result<Attached> {
    let mut ids = [0u32; MAX_PROGRAMS];
    let mut attr = QueryAttr {
        target_fd: fd_number(cgroup),
        attach_type: BPF_CGROUP_SOCK_OPS,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: u32::try_from(ids.len()).unwrap_or(0),
        ..QueryAttr::default()
    };
    bpf(BPF_PROG_QUERY, &mut attr)?;
    let mode = match attr.attach_flags {
        flags if flags & BPF_F_ALLOW_MULTI != 0 => AttachMode::Multi,
        flags if flags & BPF_F_ALLOW_OVERRIDE != 0 => AttachMode::Override,
        _ => AttachMode::Exclusive,
    };
    let count = (attr.prog_cnt as usize).min(ids.len());
    Ok(Attached {
        ids: ids[..count].to_vec(),
        mode,
    })
}

/// Name and tag of a loaded program; needs CAP_SYS_ADMIN.
pub fn program_info(id: u32) -> io::Result<ProgramInfo> {
    Ok(ProgramInfo::from(info(id)?))
}

impl From<ProgInfo> for ProgramInfo {
    fn from(info: ProgInfo) -> Self {
        let end = info.name.iter().position(|b| *b == 0);
        let name = &info.name[..end.unwrap_or(info.name.len())];
        Self {
            name: String::from_utf8_lossy(name).into_owned(),
            tag: info.tag.iter().map(|b| format!("{b:02x}")).collect(),
            verified_instructions: Some(info.verified_insns).filter(|count| *count != 0),
        }
    }
}

/// Name of an open program, and the ids of the maps it uses.
pub(super) fn name_and_maps(program: BorrowedFd<'_>) -> io::Result<(String, Vec<u32>)> {
    let count = object_info::<ProgInfo>(program)?.nr_map_ids;
    let mut ids = vec![0u32; count as usize];
    let request = ProgInfo {
        nr_map_ids: count,
        map_ids: ids.as_mut_ptr() as u64,
        ..ProgInfo::default()
    };
    let info = object_info_into(program, request)?;
    Ok((ProgramInfo::from(info).name, ids))
}

/// The instructions of a program as the kernel runs or compiles them.
pub(super) fn translated(id: u32) -> io::Result<Vec<u64>> {
    let program = open_program(id)?;
    let bytes = object_info::<ProgInfo>(program.as_fd())?.xlated_prog_len;
    let mut instructions = vec![0u64; bytes as usize / size_of::<u64>()];
    let request = ProgInfo {
        xlated_prog_len: bytes,
        xlated_prog_insns: instructions.as_mut_ptr() as u64,
        ..ProgInfo::default()
    };
    object_info_into(program.as_fd(), request)?;
    Ok(instructions)
}

fn info(id: u32) -> io::Result<ProgInfo> {
    object_info(open_program(id)?.as_fd())
}

fn open_program(id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    let raw = bpf(BPF_PROG_GET_FD_BY_ID, &mut attr)?;
    // SAFETY: the kernel has just created this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The kernel's information about a program, map or link: its struct up to the length of `I`, which
/// is repr(C).
pub(super) fn object_info<I: Default>(object: BorrowedFd<'_>) -> io::Result<I> {
    object_info_into(object, I::default())
}

/// The same; `info` may contain pointers to arrays.
fn object_info_into<I>(object: BorrowedFd<'_>, mut info: I) -> io::Result<I> {
    let mut attr = InfoAttr {
        fd: fd_number(object),
        length: u32::try_from(size_of::<I>()).unwrap_or(0),
        info: (&raw mut info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Opens a pinned program, map or link.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjectAttr {
        path: path.as_ptr() as u64,
        ..ObjectAttr::default()
    };
    let raw = bpf(BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just created this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Pins a map, program or link.
pub fn pin_fd(fd: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjectAttr {
        path: path.as_ptr() as u64,
        fd: fd_number(fd.as_fd()),
        ..ObjectAttr::default()
    };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

pub(super) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

pub(super) fn fd_number(fd: BorrowedFd<'_>) -> u32 {
    u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX)
}

pub(super) fn bpf<A>(command: libc::c_int, attr: &mut A) -> io::Result<libc::c_int> {
    // SAFETY: `attr` is a live repr(C) struct of the given size, and each pointer in it is to a
    // buffer that outlives the call and has the length that the attr gives.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<A>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    libc::c_int::try_from(result).map_err(io::Error::other)
}
