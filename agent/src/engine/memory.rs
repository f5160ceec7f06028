//! Memory that a large change needed for a moment.

/// Gives the kernel back what the allocator keeps for the next time: after a million entries were read it is
/// as much as is in use.
pub(super) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator's own function, safe at any time and on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has what is large come from the kernel and go back to it at once. Without this, the allocator takes the
/// first large piece that is given back for a sign to keep such ones (mallopt(3), M_MMAP_THRESHOLD), and what a
/// reload needs for a moment lies beside what is needed for good.
pub fn set_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    {
        const LARGE: libc::c_int = 1 << 20;
        // SAFETY: the allocator's own function, safe on any thread.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        }
    }
}
