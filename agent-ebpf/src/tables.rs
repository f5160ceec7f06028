//! The maps. The loader provides sizes, pins and values.
//!
//! Counters are updated by atomic additions. The tries need them because all CPUs share an entry. The per-CPU
//! statistics need them because connect() runs the program in process context, where an interrupt that runs it for
//! another socket may come between the load and the store of an addition. The instruction returns no result
//! (`BPF_XADD`), because atomic instructions that do require Linux 5.12.

use core::{arch::asm, hint::cold_path, mem::offset_of};

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf, SkStorage},
    macros::btf_map,
};
use rto_agent_common::{
    CONTROL, Counters, EntryValue, FAST_COUNTERS, FastStatistics, HostDefaults, Policy, PolicySlot,
    Probe, RTO_STEPS, SLOTS, SocketState, Statistics, WalkControl, WalkCounts, arm, direction,
    discovery::{Discovered, Prefix},
    event::{self, Event, EventControl, LOST, RING_BYTES},
    fallback::{self, Fallback},
    features,
    histogram::{BUCKETS, Histogram, SHORT, SHORT_US, bucket_of, short},
    lasting, policy_flags, schedules, socket_flags, statistics, statistics_key,
};
use rto_agent_ebpf::counter::{Counter, Step};

use crate::socket::{constant_u8, read};

/// Size of the tries if the loader does not set it.
const ENTRIES: usize = 16384;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map]
pub(crate) static ENTRIES_V4: LpmTrie<[u8; 4], EntryValue, ENTRIES, NO_PREALLOC> = LpmTrie::new();

#[btf_map]
pub(crate) static ENTRIES_V6: LpmTrie<[u8; 16], EntryValue, ENTRIES, NO_PREALLOC> = LpmTrie::new();

#[btf_map]
static POLICIES: Array<PolicySlot, { SLOTS as usize }> = Array::new();

#[btf_map]
static HOST_DEFAULTS: Array<HostDefaults, 1> = Array::new();

#[btf_map]
pub(crate) static FALLBACKS: Array<Fallback, { (fallback::DIRECTIONS * SLOTS) as usize }> =
    Array::new();

#[btf_map]
pub(crate) static SCHEDULES: Array<u64, { schedules::LEN as usize }> = Array::new();

#[btf_map]
pub(crate) static DISCOVERED: LruHashMap<Prefix, Discovered, { Discovered::ROOM as usize }> =
    LruHashMap::new();

#[btf_map]
static LASTING: Array<u32, { lasting::LEN as usize }> = Array::new();

#[btf_map]
static COUNTERS: PerCpuArray<FastStatistics, { FAST_COUNTERS as usize }> = PerCpuArray::new();

#[btf_map]
static STATISTICS: PerCpuHashMap<u32, Statistics, STATISTICS_ROOM, NO_PREALLOC> =
    PerCpuHashMap::new();
/// The daemon creates the elements of existing policies only: each takes 2.5 kB per CPU.
const STATISTICS_ROOM: usize = arm::of(SLOTS).len() * SLOTS as usize * direction::ALL.len();

#[btf_map]
static EVENTS: RingBuf<(), { RING_BYTES as usize }> = RingBuf::new();

#[btf_map]
static EVENT_CONTROL: Array<EventControl, 2> = Array::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map]
static WALK_CONTROL: Array<WalkControl, 1> = Array::new();

#[btf_map]
static WALK_COUNTS: Array<WalkCounts, { SLOTS as usize }> = Array::new();

#[btf_map]
static PROBE: Array<Probe, 1> = Array::new();

#[btf_map]
pub(crate) static PROBE_STORAGE: SkStorage<u64> = SkStorage::new();

/// A policy's settings: the active copy, which the daemon does not write while it is active.
#[inline(always)]
pub(crate) fn policy(slot: u32) -> Option<&'static Policy> {
    let slot = POLICIES.get(slot)?;
    // SAFETY: a map value; the verifier checks the access.
    let active = unsafe { read(&raw const slot.active) };
    Some(&slot.copies[(active & 1) as usize])
}

/// The settings of an arm.
#[inline(always)]
pub(crate) fn settings(arm: u32) -> Option<&'static Policy> {
    let slot = if arm::is_control(arm) {
        CONTROL
    } else {
        arm::slot(arm)
    };
    policy(slot)
}

/// [`Policy::generation`] of the policy of an arm with these settings.
#[inline(always)]
pub(crate) fn generation(arm: u32, settings: &Policy) -> u32 {
    if !arm::is_control(arm) {
        return settings.generation;
    }
    policy(arm::slot(arm)).map_or(0, |policy| policy.generation)
}

/// The namespace defaults to assume if a socket cannot be read.
#[inline(always)]
pub(crate) fn host_defaults() -> HostDefaults {
    HOST_DEFAULTS.get(0).copied().unwrap_or_default()
}

/// A socket's arm, if its slot still belongs to the same policy; otherwise [`arm::NONE`].
#[inline(always)]
pub(crate) fn owner(state: &SocketState) -> u32 {
    owner_of(state.arm, state.generation)
}

#[inline(always)]
fn owner_of(arm: u32, generation: u32) -> u32 {
    match policy(arm::slot(arm)) {
        // A freed slot keeps its generation until another policy gets it.
        Some(policy)
            if policy.generation == generation && policy.flags & policy_flags::IN_USE != 0 =>
        {
            arm
        }
        _ => arm::NONE,
    }
}

/// Whether any policy has set an option ([`lasting`]) to this value, microseconds.
#[inline(always)]
pub(crate) fn was_set(option: u32, us: u32) -> bool {
    LASTING
        .get(lasting::index(us))
        .is_some_and(|options| options & option != 0)
}

/// Counts a hit of an entry, up to [`EntryValue::HITS_MAX`]. (The room above the maximum keeps the number from wrapping
/// when all CPUs count the last hit at the same moment.) All CPUs share the entry. To avoid contention, above
/// [`EntryValue::HITS_EXACT`] only one hit in [`EntryValue::HITS_SHARE`], chosen by `random`, is counted, with the
/// weight of all of them.
#[inline(always)]
pub(crate) fn count_hit(entry: *mut EntryValue, random: impl FnOnce() -> u32) {
    const HITS_SHIFT: u32 = u32::BITS - EntryValue::HITS_SHARE.ilog2();
    // SAFETY: a map value; the verifier checks both accesses, and four-byte alignment.
    unsafe {
        let hits = &raw mut (*entry).hits;
        let so_far = read(hits);
        let mut n = 1u64;
        if so_far >= EntryValue::HITS_EXACT {
            n = EntryValue::HITS_SHARE.into();
            if so_far >= EntryValue::HITS_MAX || random() >> HITS_SHIFT != 0 {
                return;
            }
        }
        asm!("lock *(u32 *)({hits} + 0) += {n}", hits = in(reg) hits, n = in(reg) n);
    }
}

/// The task of the walk.
#[inline(always)]
pub(crate) fn walk_control() -> Option<&'static WalkControl> {
    WALK_CONTROL.get(0)
}

/// The outcomes for a socket on a walk: the fields of [`WalkCounts`].
#[derive(Clone, Copy)]
pub(crate) enum Walked {
    Seen,
    Changed,
    Kept,
    Refused,
}

/// Counts a socket of a walk. (The map belongs to one walk at a time, and a walk runs in one thread.)
#[inline(always)]
pub(crate) fn count_walked(arm: u32, what: Walked) {
    let Some(counts) = WALK_COUNTS.get_ptr_mut(arm::slot(arm)) else {
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

/// The map value for the probe's answers.
#[inline(always)]
pub(crate) fn probe() -> Option<&'static mut Probe> {
    // SAFETY: a map value or null; the map belongs to one probe at a time.
    unsafe { PROBE.get_ptr_mut(0)?.as_mut() }
}

/// Bits of [`statistics`]: what is counted. The loader writes it before the program is loaded, so the verifier removes
/// the code of statistics that are off.
#[unsafe(no_mangle)]
static STATISTICS_MODE: u8 = statistics::ON;

/// Whether these statistics are counted.
#[inline(always)]
pub(crate) fn counts(what: u8) -> bool {
    constant_u8(&STATISTICS_MODE) & what != 0
}

/// Bits of [`features`]: what the policies need. The loader writes it before the program is loaded, so the verifier
/// removes the code of features that no policy has.
#[unsafe(no_mangle)]
static FEATURES: u8 = features::ALL;

/// Whether a policy may need this feature.
#[inline(always)]
pub(crate) fn has(feature: u8) -> bool {
    constant_u8(&FEATURES) & feature != 0
}

/// The statistics to update: the key of an arm and a direction.
///
/// Not an `Option`: the compiler also loads the payload of `None`, from stack that verifiers before Linux 6.3 reject as
/// uninitialised.
#[derive(Clone, Copy)]
pub(crate) struct Tally(u32);

impl Tally {
    /// Nothing is counted.
    pub(crate) const NOBODY: Self = Self(0);

    /// Whether nothing is counted.
    #[inline(always)]
    pub(crate) fn is_nobody(self) -> bool {
        !counts(statistics::ON) || self.0 == 0
    }

    /// The statistics of an arm that was just looked up.
    #[inline(always)]
    pub(crate) fn of(arm: u32, direction: u32) -> Self {
        Self(statistics_key(arm, direction))
    }

    /// As the argument of a global function, and from such an argument.
    #[inline(always)]
    pub(crate) fn key(self) -> u32 {
        self.0
    }

    #[inline(always)]
    pub(crate) fn of_key(key: u32) -> Self {
        Self(key)
    }

    /// The statistics of a socket's policy, if its slot still belongs to that policy.
    #[inline(always)]
    pub(crate) fn of_socket(state: &SocketState) -> Self {
        Self(rto_tally(
            state.arm,
            state.generation,
            state.direction,
            state.flags,
        ))
    }

    /// Adds to a counter.
    #[inline(always)]
    pub(crate) fn add(self, counter: Counter, n: u64) {
        if !self.is_nobody() {
            rto_count(self.0, counter.offset() as u64, n);
        }
    }

    /// Adds a gain to the first counter, or a loss to the second.
    #[inline(always)]
    pub(crate) fn add_gain(self, [saved, lost]: [Counter; 2], us: i64) {
        self.add(if us >= 0 { saved } else { lost }, us.unsigned_abs());
    }

    /// Adds 1 to a counter without a function call, for events that happen once in each connection.
    #[inline(always)]
    pub(crate) fn add_one(self, counter: Counter) {
        if self.is_nobody() {
            return;
        }
        match COUNTERS.get_ptr_mut(self.0) {
            // SAFETY: a u64 of its own for each counter.
            Some(counters) => unsafe { add_at(counters, counter.offset(), 1) },
            None => {
                cold_path();
                self.add(counter, 1);
            }
        }
    }

    /// Counts a connection that was established without a loss, by its path RTT (0: unknown). Like [`Self::add_one`],
    /// it makes no function call in the common case.
    #[inline(always)]
    pub(crate) fn established_one(self, us: u32) {
        if self.is_nobody() {
            return;
        }
        if us == 0 {
            cold_path();
            self.add(Counter::UNTIMED, 1);
            return;
        }
        if us < SHORT_US
            && let Some(fast) = COUNTERS.get_ptr_mut(self.0)
        {
            let bucket = short_bucket_of(us);
            count_in(
                fast,
                offset_of!(FastStatistics, path_rtt),
                bucket,
                us.into(),
                1,
            );
        } else {
            cold_path();
            self.time(Times::PathRtt, us.into(), 1);
        }
    }

    /// Counts a time (0: none) `weight` times in a histogram.
    #[inline(always)]
    pub(crate) fn time(self, times: Times, us: u64, weight: u32) {
        if !self.is_nobody() && us != 0 {
            rto_time(self.0, times as u32, us, weight.into());
        }
    }

    /// Removes a time (0: none) from a histogram.
    #[inline(always)]
    pub(crate) fn take_back(self, times: Times, us: u64) {
        if !self.is_nobody() && us != 0 {
            rto_time(self.0, times as u32, us, u64::MAX);
        }
    }
}

/// A histogram of [`Statistics`].
#[derive(Clone, Copy)]
pub(crate) enum Times {
    PathRtt = 0,
    Srtt = 1,
    Lossy = 2,
}

/// [`Tally::of_socket`] for the fields of a [`SocketState`]. A global function: see [`rto_count`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_tally(arm: u32, generation: u32, direction: u32, flags: u32) -> u32 {
    if !counts(statistics::ON) || flags & socket_flags::UNCOUNTED != 0 {
        return Tally::NOBODY.0;
    }
    match owner_of(arm, generation) {
        arm::NONE => Tally::NOBODY.0,
        arm => Tally::of(arm, direction).0,
    }
}

/// Adds to a counter, by its offset. Like every global function (a function with a symbol), it is verified once, and
/// not again at each call. A global function takes only numbers and the context, and returns a number.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_count(key: u32, offset: u64, n: u64) -> u32 {
    let Some(counters) = fast(key) else {
        return 0;
    };
    let offset = offset & ALIGNED;
    if offset <= LAST_COUNTER {
        // SAFETY: a u64 at each aligned offset, and none beyond the last.
        unsafe { add_at(counters, offset as usize, n) };
    }
    0
}

/// The part of a key's statistics that any connection may update.
#[inline(always)]
fn fast(key: u32) -> Option<*mut FastStatistics> {
    match COUNTERS.get_ptr_mut(key) {
        // `FastStatistics` are the first fields of `Statistics` (asserted).
        None => STATISTICS.get_ptr_mut(&key).map(<*mut _>::cast),
        fast => fast,
    }
}

/// The offset of the last counter, and a mask that shows the verifier that an offset is aligned.
const LAST_COUNTER: u64 = (size_of::<Counters>() - size_of::<u64>()) as u64;
const ALIGNED: u64 = size_of::<Counters>().next_power_of_two() as u64 - size_of::<u64>() as u64;

/// Counts a time `weight` times in a histogram, by its number; `u64::MAX` removes it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_time(key: u32, times: u32, us: u64, weight: u64) -> u32 {
    const PATH_RTT: u32 = Times::PathRtt as u32;
    const SRTT: u32 = Times::Srtt as u32;
    // Computed once here, because the verifier would follow it again in each branch below.
    let Some(bucket) = bounded_bucket_of(us) else {
        return 0;
    };
    if times == PATH_RTT {
        if let Some(fast) = fast(key) {
            let histogram = offset_of!(FastStatistics, path_rtt);
            count_in(fast, histogram, bucket, us, weight);
        }
    } else if let Some(sheet) = STATISTICS.get_ptr_mut(&key) {
        let histogram = match times {
            SRTT => offset_of!(Statistics, srtt),
            _ => offset_of!(Statistics, lossy),
        };
        count_in(sheet, histogram, bucket, us, weight);
    }
    0
}

/// Counts a time `weight` times in the [`Histogram`] at an offset.
#[inline(always)]
pub(crate) fn count_time<T>(place: *mut T, histogram: usize, us: u64, weight: u64) {
    if let Some(bucket) = bounded_bucket_of(us) {
        count_in(place, histogram, bucket, us, weight);
    }
}

/// [`bucket_of`], if it is in a histogram. (The compiler knows that it is, and would remove a plain check.)
#[inline(always)]
fn bounded_bucket_of(us: u64) -> Option<usize> {
    let bucket = bounded::<{ BUCKETS.next_power_of_two() }>(bucket_of(us));
    (bucket < BUCKETS).then_some(bucket)
}

/// [`bounded_bucket_of`] for a time below [`SHORT_US`].
#[inline(always)]
fn short_bucket_of(us: u32) -> usize {
    const { assert!(bucket_of(SHORT_US as u64) < 64 && 64 < BUCKETS) };
    let (index, further_up) = short(us);
    // SAFETY: an index within the table.
    let bucket = unsafe {
        let index = bounded::<{ SHORT.len() }>(index);
        usize::from(read((&raw const SHORT).cast::<u8>().add(index)))
    };
    bounded::<64>(bucket + further_up)
}

/// An index below `N`, a power of two, with a bound that the verifier sees: the compiler would remove a mask that
/// changes nothing, or check another copy of the value.
#[inline(always)]
pub(crate) fn bounded<const N: usize>(index: usize) -> usize {
    const { assert!(N.is_power_of_two()) };
    let mut index = index;
    // SAFETY: arithmetic on one register.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const N - 1,
            options(pure, nomem, nostack));
    }
    index
}

/// As [`count_time`], in a bucket known to be in the histogram.
#[inline(always)]
fn count_in<T>(place: *mut T, histogram: usize, bucket: usize, us: u64, weight: u64) {
    let sum_us = histogram + offset_of!(Histogram, sum_us);
    let buckets = histogram + offset_of!(Histogram, buckets);
    // SAFETY: both within the histogram.
    unsafe {
        add_at(place, sum_us, us.wrapping_mul(weight));
        add_at(place, buckets + bucket * size_of::<u64>(), weight);
    }
}

/// # Safety
///
/// A u64 must lie at the offset.
#[inline(always)]
pub(crate) unsafe fn add_at<T>(sheet: *mut T, offset: usize, n: u64) {
    // SAFETY: by the contract; the verifier checks the access.
    unsafe {
        let word = sheet.byte_add(offset);
        asm!("lock *(u64 *)({word} + 0) += {n}", word = in(reg) word, n = in(reg) n);
    }
}

/// The control block of events: whether a client listens.
#[inline(always)]
pub(crate) fn event_control() -> Option<*mut EventControl> {
    EVENT_CONTROL.get_ptr_mut(event::CONTROL)
}

/// Sends an event; if the ring buffer is full, the event is counted as lost.
#[inline(always)]
pub(crate) fn tell(fill: impl FnOnce(*mut Event)) {
    match EVENTS.reserve_untyped::<Event>(0) {
        Some(mut entry) => {
            fill(entry.as_mut_ptr());
            entry.submit(0);
        }
        None => {
            // The daemon never writes this element.
            if let Some(counts) = EVENT_CONTROL.get_ptr_mut(LOST) {
                // SAFETY: a map value; the verifier checks the access.
                unsafe {
                    let lost = &raw mut (*counts).lost;
                    asm!("lock *(u64 *)({lost} + 0) += {one}", lost = in(reg) lost,
                        one = in(reg) 1u64);
                }
            }
        }
    }
}

/// The step of the backoff, with a bound that the verifier sees.
#[inline(always)]
pub(crate) fn step(before: u32) -> Step {
    Step::with_index(bounded::<RTO_STEPS>(Step::of(before).index()))
}
