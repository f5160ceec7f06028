//! The maps. The loader hands in sizes, pins and values.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, LpmTrie, PerCpuArray, SkStorage},
    macros::btf_map,
};
use rto_agent_common::{Counters, EntryValue, MAX_POLICIES, Policy, SocketState};

/// Room of the tries where the loader does not say.
const ENTRIES: usize = 16384;

#[btf_map]
pub(crate) static ENTRIES_V4: LpmTrie<[u8; 4], EntryValue, ENTRIES, { BPF_F_NO_PREALLOC as usize }> =
    LpmTrie::new();

#[btf_map]
pub(crate) static ENTRIES_V6: LpmTrie<[u8; 16], EntryValue, ENTRIES, { BPF_F_NO_PREALLOC as usize }> =
    LpmTrie::new();

#[btf_map]
static POLICIES: Array<Policy, { MAX_POLICIES as usize }> = Array::new();

#[btf_map]
static COUNTERS: PerCpuArray<Counters, { MAX_POLICIES as usize }> = PerCpuArray::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

/// A policy's settings.
#[inline(always)]
pub(crate) fn policy(index: u32) -> Option<&'static Policy> {
    POLICIES.get(index)
}

/// This CPU's counters of a policy.
#[inline(always)]
pub(crate) fn counters(index: u32) -> Option<&'static mut Counters> {
    let counters = COUNTERS.get_ptr_mut(index)?;
    // SAFETY: a pointer into this CPU's element, which no other program touches while this one
    // runs (sock_ops programs are not preempted by each other on one CPU), and the verifier
    // checks every access through it.
    Some(unsafe { &mut *counters })
}
