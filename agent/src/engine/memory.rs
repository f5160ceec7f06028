//! Memory that a large change needed for a moment.

/// Gives the kernel back what the allocator keeps for the next time: after a million entries were read it is
/// as much as is in use.
pub(super) fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator's own function, safe at any time and on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
