//! A TCP socket whose lock is held for as long as a test needs.

use std::{
    io::{self, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    thread::JoinHandle,
};

use nix::libc;

const PAGE: usize = 4096;
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;

/// One end of a connection over the loopback interface of the calling thread's network namespace. It sends a page that
/// is never populated (userfaultfd(2)), so that sendmsg() blocks with the socket lock held until this is dropped.
pub struct LockedSocket {
    faults: Option<OwnedFd>,
    sending: Option<JoinHandle<()>>,
    page: *mut libc::c_void,
    _peer: TcpStream,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

impl LockedSocket {
    /// Creates such a socket.
    pub fn new() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        // SAFETY: a new mapping, to which no other reference exists.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut locked = Self {
            faults: Some(faults_of(page)?),
            sending: None,
            page,
            _peer: peer,
        };
        let address = page as usize;
        locked.sending = Some(std::thread::spawn(move || {
            // SAFETY: the mapping exists until this thread has ended; after its release it reads as zeroes.
            let never = unsafe { std::slice::from_raw_parts(address as *const u8, PAGE) };
            let _sent = socket.write_all(never);
        }));
        Ok(locked)
    }
}

impl Drop for LockedSocket {
    fn drop(&mut self) {
        // After the descriptor is closed, faults are resolved as for ordinary memory.
        drop(self.faults.take());
        if let Some(sending) = self.sending.take() {
            let _ended = sending.join();
        }
        // SAFETY: the only thread that used the mapping has ended.
        let _unmapped = unsafe { libc::munmap(self.page, PAGE) };
    }
}

/// A userfaultfd for the page; accesses block until they are answered or it is closed.
fn faults_of(page: *mut libc::c_void) -> io::Result<OwnedFd> {
    // SAFETY: the call takes flags and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
    let fd = fd.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just created this descriptor.
    let faults = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = Api {
        api: UFFD_API,
        features: 0,
        ioctls: 0,
    };
    let mut register = Register {
        start: page as u64,
        len: PAGE as u64,
        mode: UFFDIO_REGISTER_MODE_MISSING,
        ioctls: 0,
    };
    // SAFETY: struct uffdio_api, as the request has it.
    let agreed = unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_API, &raw mut api) };
    // SAFETY: struct uffdio_register, as the request has it.
    let registered = unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
    if agreed < 0 || registered < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(faults)
}
