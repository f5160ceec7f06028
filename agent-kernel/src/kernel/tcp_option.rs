//! Options of a TCP socket, as an application reads them.

use std::os::fd::{AsFd, AsRawFd as _};

use nix::{errno::Errno, libc};

/// A numeric option of a TCP socket.
pub fn get(socket: &impl AsFd, option: libc::c_int) -> nix::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut length: libc::socklen_t = 4;
    // SAFETY: buffer and length are on the stack, and the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    Errno::result(done).map(|_| value)
}
