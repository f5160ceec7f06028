//! The maps. The loader hands in sizes, pins and values.
//!
//! Counts are added by the processor's atomic addition. For the tries that is needed because all
//! CPUs share an entry. For the per-CPU counters it is because connect() runs the program in
//! process context, where an interrupt that runs it for another socket may come between the load
//! and the store of an addition. The instruction is the one without a result (`BPF_XADD`), as the
//! others came with Linux 5.12.

use core::{arch::asm, ptr::NonNull};

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, LpmTrie, PerCpuArray, SkStorage},
    macros::btf_map,
};
use rto_agent_common::{
    Counters, EntryValue, MAX_POLICIES, NO_POLICY, Policy, Probe, RTO_STEPS, SocketState,
    WalkControl, WalkCounts,
};
use rto_agent_ebpf::counter::{Counter, Step};

use crate::socket::read;

/// Room of the tries where the loader does not say.
const ENTRIES: usize = 16384;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map]
pub(crate) static ENTRIES_V4: LpmTrie<[u8; 4], EntryValue, ENTRIES, NO_PREALLOC> = LpmTrie::new();

#[btf_map]
pub(crate) static ENTRIES_V6: LpmTrie<[u8; 16], EntryValue, ENTRIES, NO_PREALLOC> = LpmTrie::new();

#[btf_map]
static POLICIES: Array<Policy, { MAX_POLICIES as usize }> = Array::new();

#[btf_map]
static COUNTERS: PerCpuArray<Counters, { MAX_POLICIES as usize }> = PerCpuArray::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map]
static WALK_CONTROL: Array<WalkControl, 1> = Array::new();

#[btf_map]
static WALK_COUNTS: Array<WalkCounts, { MAX_POLICIES as usize }> = Array::new();

#[btf_map]
static PROBE: Array<Probe, 1> = Array::new();

#[btf_map]
pub(crate) static PROBE_STORAGE: SkStorage<u64> = SkStorage::new();

/// A policy's settings.
#[inline(always)]
pub(crate) fn policy(index: u32) -> Option<&'static Policy> {
    POLICIES.get(index)
}

/// The slot of a socket's policy, if it still belongs to that policy; else [`NO_POLICY`].
#[inline(always)]
pub(crate) fn owner(state: &SocketState) -> u32 {
    match policy(state.policy) {
        // A freed slot keeps its generation until it gets another owner, and has no name.
        Some(policy) if policy.generation == state.generation && policy.name[0] != 0 => {
            state.policy
        }
        _ => NO_POLICY,
    }
}

/// One more hit of an entry, up to [`EntryValue::HITS_MAX`]. (The room above it is for CPUs that
/// all see the last hit missing at the same time: the number never wraps.)
#[inline(always)]
pub(crate) fn count_hit(entry: *mut EntryValue) {
    // SAFETY: a map value; the verifier checks both accesses, and four-byte alignment.
    unsafe {
        let hits = &raw mut (*entry).hits;
        if read(hits) < EntryValue::HITS_MAX {
            asm!("lock *(u32 *)({hits} + 0) += {one}", hits = in(reg) hits, one = in(reg) 1u64);
        }
    }
}

/// What the walk is to do.
#[inline(always)]
pub(crate) fn walk_control() -> Option<&'static WalkControl> {
    WALK_CONTROL.get(0)
}

/// What can be said of a socket on a walk: the fields of [`WalkCounts`].
#[derive(Clone, Copy)]
pub(crate) enum Walked {
    Seen,
    Changed,
    Kept,
    Refused,
}

/// Counts one socket of a walk. (One walk at a time has the map, and a walk is one thread.)
#[inline(always)]
pub(crate) fn count_walked(policy: u32, what: Walked) {
    let Some(counts) = WALK_COUNTS.get_ptr_mut(policy) else {
        return;
    };
    // SAFETY: a map value; the verifier checks the access.
    unsafe {
        let field = match what {
            Walked::Seen => &raw mut (*counts).seen,
            Walked::Changed => &raw mut (*counts).changed,
            Walked::Kept => &raw mut (*counts).kept,
            Walked::Refused => &raw mut (*counts).refused,
        };
        *field = read(field).wrapping_add(1);
    }
}

/// Where the probe's answers go.
#[inline(always)]
pub(crate) fn probe() -> Option<&'static mut Probe> {
    // SAFETY: a map value or null; one probe at a time has the map.
    unsafe { PROBE.get_ptr_mut(0)?.as_mut() }
}

/// This CPU's counters of one policy.
#[derive(Clone, Copy)]
pub(crate) struct Tally(NonNull<Counters>);

impl Tally {
    /// Of a policy just looked up.
    #[inline(always)]
    pub(crate) fn of(index: u32) -> Option<Self> {
        COUNTERS.get_ptr_mut(index).and_then(NonNull::new).map(Self)
    }

    /// Of a socket's policy, if its slot still belongs to that policy.
    #[inline(always)]
    pub(crate) fn of_socket(state: &SocketState) -> Option<Self> {
        match owner(state) {
            NO_POLICY => None,
            _ if state.uncounted != 0 => None,
            index => Self::of(index),
        }
    }

    /// Adds to a counter.
    #[inline(always)]
    pub(crate) fn add(self, counter: Counter, n: u64) {
        // SAFETY: within a map value, at a u64; the verifier checks the access.
        unsafe {
            let counter = self.0.as_ptr().byte_add(counter.offset());
            asm!("lock *(u64 *)({counter} + 0) += {n}", counter = in(reg) counter, n = in(reg) n);
        }
    }
}

/// Which step of the backoff a timeout is, with a bound that the verifier sees (the compiler would
/// compute the place of the counter from the unbounded number).
#[inline(always)]
pub(crate) fn step(before: u32) -> Step {
    let mut index = Step::of(before).index();
    // SAFETY: arithmetic on one register.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const RTO_STEPS - 1,
            options(pure, nomem, nostack));
    }
    Step::with_index(index)
}

const _: () = assert!(RTO_STEPS.is_power_of_two());

/// Adds to a counter, if there is somebody to count for.
#[inline(always)]
pub(crate) fn add(tally: Option<Tally>, counter: Counter, n: u64) {
    if let Some(tally) = tally {
        tally.add(counter, n);
    }
}
