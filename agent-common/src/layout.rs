//! The layout of everything that maps hold.

use crate::{
    Counters, EntryValue, FastStatistics, HostDefaults, Policy, PolicySlot, Probe, SocketState,
    Statistics, WalkControl, WalkCounts,
    discovery::{Discovered, Prefix},
    event::{Event, EventControl},
    fallback::Fallback,
    histogram::BUCKETS,
};

/// Version of every struct and map of this crate; part of the name of the pins' directory.
pub const LAYOUT_VERSION: u32 = 18;

macro_rules! layout {
    ($($type:ty: $size:expr,)*) => {
        const _: () = {
            $(assert!(size_of::<$type>() == $size, "layout changed: raise LAYOUT_VERSION");)*
        };
    };
}

// Sizes without implicit padding: the sum of the fields'.
layout! {
    EntryValue: 8,
    Policy: 15 * 4 + 64 + 64,
    PolicySlot: 8 + 2 * size_of::<Policy>(),
    HostDefaults: 12,
    Counters: 352,
    FastStatistics: 352 + HISTOGRAM,
    Statistics: 352 + 3 * HISTOGRAM,
    Fallback: 16,
    Prefix: 20,
    Discovered: 16 + HISTOGRAM,
    Event: 104,
    EventControl: 24,
    SocketState: 16 + 40 + (5 * 8 + 16) + 24 + 40,
    WalkControl: 48,
    WalkCounts: 16,
    Probe: 8 * 23,
}

const HISTOGRAM: usize = 8 + 8 * BUCKETS;

const _: () = {
    use core::mem::offset_of;
    // Together with the kernel's header (72 bytes, `struct bpf_local_storage_elem`, Linux 6.18) it still fits the
    // 256-byte allocation class.
    assert!(size_of::<SocketState>() <= 184);
    assert!(size_of::<Counters>().is_multiple_of(32));
    assert!(offset_of!(FastStatistics, path_rtt) == offset_of!(Statistics, path_rtt));
    // The loader writes, and the program reads, these by their place.
    assert!(offset_of!(Policy, generation) == 4);
    assert!(offset_of!(Statistics, counters) == 0);
    assert!(offset_of!(Counters, setsockopt_failures) == 64);
    assert!(offset_of!(SocketState, arm) == 0);
};
