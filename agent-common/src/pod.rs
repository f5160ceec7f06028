//! Types that aya reads from and writes to maps.

macro_rules! pod {
    ($($type:ty),+ $(,)?) => {$(
        // SAFETY: repr(C), fixed-width integers only, sizes asserted in `lib.rs` to be free of
        // padding.
        unsafe impl aya::Pod for $type {}
    )+};
}

pod! {
    crate::EntryValue,
    crate::PolicySlot,
    crate::HostDefaults,
    crate::Statistics,
    crate::FastStatistics,
    crate::event::EventControl,
    crate::SocketState,
    crate::WalkControl,
    crate::WalkCounts,
    crate::Probe,
    crate::fallback::Fallback,
    crate::discovery::Prefix,
    crate::discovery::Discovered,
}
