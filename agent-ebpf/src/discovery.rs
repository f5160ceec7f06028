//! Notes peers that no entry covers: [`rto_agent_common::discovery`].

use core::mem::offset_of;

use aya_ebpf::{bindings::BPF_NOEXIST, programs::SockOpsContext};
use rto_agent_common::{
    discovery::{Discovered, Prefix},
    histogram::{BUCKETS, Histogram},
};

use crate::{
    lookup, socket,
    tables::{self, DISCOVERED},
};

/// The initial value of a prefix. It is static because it is larger than a program's stack.
static NOTHING_SEEN: Discovered = Discovered {
    connections: 0,
    recovered: 0,
    times: Histogram {
        sum_us: 0,
        buckets: [0; BUCKETS],
    },
};

/// Records an established connection that no entry covers, if it is sampled.
#[inline(always)]
pub(crate) fn note(ctx: &SockOpsContext, retransmissions: u32) {
    const CHOSEN: u32 = Discovered::ONE_IN - 1;
    if (socket::sequence_hash(ctx) >> 16) & CHOSEN == 0
        && let Some(peer) = lookup::peer(ctx)
    {
        let Prefix { family, address } = Prefix::of(&peer);
        let srtt_us = socket::srtt_us(ctx);
        rto_discover(family, address[0], address[1], srtt_us, retransmissions);
    }
}

/// A global function: see `tables`. The address is that of a prefix; its other words are 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_discover(
    family: u32,
    first: u32,
    second: u32,
    srtt_us: u32,
    retransmissions: u32,
) -> u32 {
    let prefix = Prefix {
        family,
        address: [first, second, 0, 0],
    };
    let place = match DISCOVERED.get_ptr_mut(&prefix) {
        Some(place) => place,
        None => {
            // Another CPU may have inserted it first.
            let _made = DISCOVERED.insert(&prefix, &NOTHING_SEEN, BPF_NOEXIST.into());
            match DISCOVERED.get_ptr_mut(&prefix) {
                Some(place) => place,
                None => return 0,
            }
        }
    };
    add(place, offset_of!(Discovered, connections), 1);
    if retransmissions != 0 {
        add(place, offset_of!(Discovered, recovered), 1);
        return 0;
    }
    if srtt_us != 0 {
        tables::count_time(place, offset_of!(Discovered, times), srtt_us.into(), 1);
    }
    0
}

#[inline(always)]
fn add(place: *mut Discovered, offset: usize, n: u64) {
    // SAFETY: a u64 of a map value; the verifier checks the access.
    unsafe { tables::add_at(place, offset, n) }
}
