//! bpf(2), as far as tests and benchmarks need it. It uses no code of the agent.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use nix::{
    libc,
    sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit},
};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;

/// One instruction (Documentation/bpf/standardization/instruction-set.rst).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

pub(crate) const fn instruction(
    code: u8,
    dst: u8,
    src: u8,
    offset: i16,
    immediate: i32,
) -> Instruction {
    Instruction {
        code,
        registers: src << 4 | dst,
        offset,
        immediate,
    }
}

/// `union bpf_attr` of BPF_PROG_LOAD (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Default)]
pub(crate) struct ProgramAttr {
    pub(crate) prog_type: u32,
    pub(crate) insn_cnt: u32,
    pub(crate) insns: u64,
    pub(crate) license: u64,
    pub(crate) log_level: u32,
    pub(crate) log_size: u32,
    pub(crate) log_buf: u64,
    pub(crate) kern_version: u32,
    pub(crate) prog_flags: u32,
    pub(crate) prog_name: [u8; 16],
    pub(crate) prog_ifindex: u32,
    pub(crate) expected_attach_type: u32,
}

pub(crate) fn load(instructions: &[Instruction], kind: ProgramAttr) -> io::Result<OwnedFd> {
    let mut log = vec![0u8; 1 << 16];
    let mut attr = ProgramAttr {
        insn_cnt: u32::try_from(instructions.len()).unwrap_or(0),
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 1,
        log_size: u32::try_from(log.len()).unwrap_or(0),
        log_buf: log.as_mut_ptr() as u64,
        ..kind
    };
    match unlimited(|| call(BPF_PROG_LOAD, &mut attr)) {
        Ok(fd) => Ok(made(fd)),
        Err(e) => {
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches('\0');
            Err(io::Error::new(e.kind(), format!("{e}: {log}")))
        }
    }
}

/// Lifts RLIMIT_MEMLOCK for one call: before Linux 5.11 programs and maps count against it. The limit is restored at
/// once, because agents inherit it and must work with it. If this process may not lift it (CAP_SYS_RESOURCE), the call
/// is made nevertheless, because newer kernels do not check the limit.
pub(crate) fn unlimited<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_err() {
        return call();
    }
    let called = call();
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard)?;
    called
}

/// Creates a map: type, size of a key and of a value, number of entries, flags (the first fields of BPF_MAP_CREATE).
pub(crate) fn create_map(mut definition: [u32; 5]) -> io::Result<OwnedFd> {
    Ok(made(unlimited(|| call(BPF_MAP_CREATE, &mut definition))?))
}

/// `union bpf_attr` of BPF_OBJ_PIN and BPF_OBJ_GET.
#[repr(C)]
struct PinAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Opens a pinned program or map.
pub fn pinned(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        pathname: path.as_ptr() as u64,
        bpf_fd: 0,
        file_flags: 0,
    };
    Ok(made(call(BPF_OBJ_GET, &mut attr)?))
}

/// Pins a program or map.
pub(crate) fn pin(object: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        pathname: path.as_ptr() as u64,
        bpf_fd: object.as_raw_fd().unsigned_abs(),
        file_flags: 0,
    };
    call(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Whether a map holds a key. The value is written to `value`, which must have room for it.
pub fn lookup(map: &OwnedFd, key: &[u8], value: &mut [u64]) -> io::Result<bool> {
    element(
        BPF_MAP_LOOKUP_ELEM,
        map,
        key.as_ptr() as u64,
        value.as_mut_ptr() as u64,
    )
}

/// Whether there is a key after `key`, or a first key if that is `None`. It is written to `next`, which must have room.
pub(crate) fn next_key(map: &OwnedFd, key: Option<&[u8]>, next: &mut [u8]) -> io::Result<bool> {
    let key = key.map_or(0, |key| key.as_ptr() as u64);
    element(BPF_MAP_GET_NEXT_KEY, map, key, next.as_mut_ptr() as u64)
}

/// Writes an element; `value` must be as long as the map's values.
pub(crate) fn update(map: &OwnedFd, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key, value) = (key.as_ptr() as u64, value.as_ptr() as u64);
    element(BPF_MAP_UPDATE_ELEM, map, key, value).map(drop)
}

/// Removes an element; returns whether there was one.
pub(crate) fn delete(map: &OwnedFd, key: &[u8]) -> io::Result<bool> {
    element(BPF_MAP_DELETE_ELEM, map, key.as_ptr() as u64, 0)
}

/// Runs an element command; returns whether the element exists.
fn element(command: libc::c_int, map: &OwnedFd, key: u64, value: u64) -> io::Result<bool> {
    #[repr(C)]
    struct Attr {
        map_fd: u32,
        _pad: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut attr = Attr {
        map_fd: map.as_raw_fd().unsigned_abs(),
        _pad: 0,
        key,
        value,
        flags: 0,
    };
    match call(command, &mut attr) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Takes ownership of a descriptor that a system call has returned.
pub(crate) fn made(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Calls bpf(2) and returns its result.
pub(crate) fn call<A>(command: libc::c_int, attr: &mut A) -> io::Result<i32> {
    // SAFETY: `attr` is a live repr(C) struct of the size given; what it points to outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<A>(),
        )
    };
    match i32::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}
