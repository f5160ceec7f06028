//! The interface to the kernel. [`Kernel`] is what the engine needs, and [`KernelReader`] what
//! other threads may read during a change. `bpf` implements both with eBPF, and is the only module
//! that uses aya.
//!
//! A kernel is opened in two steps, so that a program never runs over an empty map and a running
//! program never loses an entry. Opening finds or creates the maps (the program of an earlier run
//! keeps working) and the caller writes their contents. Then [`Kernel::attach`] attaches
//! the program and removes the pins it replaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use rto_agent_common::{
    HostDefaults, Policy,
    discovery::{Discovered, Prefix},
    fallback::Fallback,
};
use rto_agent_core::{
    config::RttSampling,
    policy::{
        Cidr, MAX_ENTRIES_LIMIT, PolicyName,
        differences::{Cursor, Differences},
        plan::{MapState, Plan},
    },
    wire::{
        kernel::{Attachment, Found, Removed},
        stats::ArmStatistics,
    },
};

use crate::kernel::version;

mod bpf;
mod error;

pub use bpf::{
    BpfKernel, OBJECT, OtherProgram, PinnedEntry, PinnedMaps, connecting, drain, events, handover,
    left_set, make_pin_dir, open, other_programs, pinned_maps, pinned_policy, pinned_program_ids,
    probe, remove_kept_pins, remove_links, remove_pins, until_connected, walk,
};
pub use error::{Cause, DatapathError};

/// The maps and the program in the kernel, for the engine, which is their only writer. Dropping it
/// closes the handles, and leaves active policies active.
pub trait Kernel: Send {
    /// The options it was opened with, and the current capacity.
    fn options(&self) -> &Options;

    /// What the start found of an earlier run.
    fn found(&self) -> Found;

    /// The state of the maps.
    fn read(&self) -> Result<MapState, DatapathError>;

    /// Writes `plan`, which turns `current` into `desired`, in its order. Makes sure that the tries
    /// have a capacity of at least `room` entries, and that the program has the features that the
    /// policies need; returns whether this took a new program.
    ///
    /// # Errors
    ///
    /// The first write that fails; earlier writes stay. The caller reads the actual state with
    /// [`Kernel::read`], and decides whether to roll back or to try again.
    fn apply(
        &mut self,
        room: u32,
        current: &MapState,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<bool, DatapathError>;

    /// Attaches the program with all its pins if it is not attached, and removes the pins it
    /// replaces. The maps stay.
    ///
    /// # Errors
    ///
    /// If the program cannot be loaded, attached or pinned; the program attached before stays.
    fn attach(&mut self) -> Result<(), DatapathError>;

    /// A reader for other threads, which sees the state after the last change.
    fn reader(&self) -> Arc<dyn KernelReader>;

    /// Changes the defaults that programs assume if they cannot read a socket's values.
    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError>;

    /// Retries to allocate statistics for which there was no memory.
    fn retry_statistics(&mut self);

    /// Rewrites tables outside of plans that another process removed or overwrote: statistics and
    /// the host's defaults.
    fn restore_tables(&mut self) -> Result<(), DatapathError>;

    /// A reader of events, and what it needs to report SYN-ACKs when they are retransmitted.
    fn events(&self) -> Result<(events::Reader, events::SynAcks), DatapathError>;

    /// A walker over open sockets, with the current policies.
    fn walker(&self, mode: walk::Mode) -> Result<walk::Walker, DatapathError>;

    /// Detaches the programs. Maps and pins stay, with the counters and the former options of
    /// sockets.
    /// [`Kernel::attach`] attaches the programs again.
    fn unlink(&mut self) -> Result<(), DatapathError>;

    /// Detaches the program and removes every pin.
    ///
    /// # Errors
    ///
    /// If a pin cannot be removed; all others are still removed.
    fn detach(self: Box<Self>) -> Result<Removed, DatapathError>;
}

/// The directions (active, passive) whose fallbacks are reset when a slot gets this policy: those
/// that had none so far ([`Policy::epochs`]), or both if the policy is new.
pub fn fallbacks_begin(before: Option<&Policy>, next: &Policy) -> [bool; 2] {
    let Some(before) = before else {
        return [true; 2];
    };
    std::array::from_fn(|direction| before.epochs[direction] == 0 && next.epochs[direction] != 0)
}

/// Reads the kernel on any thread, with separate handles. As long as it exists, the kernel keeps
/// the maps.
pub trait KernelReader: Send + Sync {
    /// Whether another process has made a map read-only, so that it must be created again.
    fn has_frozen_map(&self) -> bool {
        false
    }

    /// Queries whether the program is attached and its pins exist.
    fn attachment(&self) -> Attachment;

    /// The same during a change, which may replace this program by another one of the agent.
    fn attachment_during_change(&self) -> Attachment;

    /// Compares the tables other than the entries: policies, the host's defaults, and whether the
    /// next `count` policies have statistics. Moves the cursor past these policies.
    fn compare_tables(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError>;

    /// Compares the next entries, up to `count`, and moves the cursor past them.
    fn compare_entries(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError>;

    /// Compares the next part: up to `count` entries, and the tables beside them. Moves the cursor
    /// past them. Every comparison of the kernel with the desired state is made of such parts.
    fn compare(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError> {
        /// Entries for each policy whose statistics are checked, as each of their values has a part
        /// per processor.
        const ENTRIES_PER_POLICY: usize = 128;
        /// Entries per system call.
        const PIECE: usize = 4096;
        let policies = count.div_ceil(ENTRIES_PER_POLICY);
        let mut differences = self.compare_tables(desired, cursor, policies)?;
        let mut left = count;
        loop {
            differences.append(self.compare_entries(desired, cursor, left.min(PIECE))?);
            left = left.saturating_sub(PIECE);
            if cursor.is_at_start() || left == 0 {
                return Ok(differences);
            }
        }
    }

    /// Whether the kernel has this policy, and each of these entries, as desired.
    fn finds(
        &self,
        desired: &MapState,
        cidrs: &[Cidr],
        policy: &PolicyName,
    ) -> Result<bool, DatapathError>;

    /// The hits of every entry with at least one, in order.
    fn hits(&self) -> Result<Vec<(Cidr, u32)>, DatapathError>;

    /// The hits of one entry that is known to exist.
    fn hits_of(&self, cidr: &Cidr) -> Result<u32, DatapathError>;

    /// Passes on the statistics of every policy, summed over the CPUs. [`PolicyName::unmatched`]
    /// counts connections that no entry covers.
    fn statistics(
        &self,
        each: &mut dyn FnMut(&PolicyName, &ArmStatistics),
    ) -> Result<(), DatapathError>;

    /// Statistics of one policy; `None` if it has no slot.
    fn statistics_of(&self, policy: &PolicyName) -> Result<Option<ArmStatistics>, DatapathError>;

    /// The fallbacks of a policy, by direction (active, passive); zeroed without a slot.
    fn fallbacks(&self, policy: &PolicyName) -> Result<[Fallback; 2], DatapathError>;

    /// The counts of peers that no entry covers, if these are counted.
    fn discovered(&self) -> Result<Vec<(Prefix, Discovered)>, DatapathError>;

    /// Start of these counts, if known; restarts of the daemon keep the map.
    fn discovered_since(&self) -> Option<SystemTime>;

    /// The policies of slots by index and generation, to find the policy of an event.
    fn owners(&self) -> BTreeMap<(u32, u32), PolicyName>;

    /// Policies without statistics, because there was no memory.
    fn missing_stats(&self) -> &BTreeSet<PolicyName>;

    /// Why the program reads less of sockets than this kernel allows; `None` if it reads
    /// everything.
    fn limited(&self) -> Option<&str>;
}

/// Options for opening a kernel.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup2 directory to attach to.
    pub cgroup: PathBuf,
    /// Directory on a BPF file system, used only by this agent.
    pub pin_dir: PathBuf,
    /// Capacity for entries; [`Kernel::apply`] increases it as needed.
    pub max_entries: u32,
    /// What the program counts.
    pub statistics: StatisticsOptions,
    /// Bits of [`rto_agent_common::features`] that the program has; [`Kernel::apply`] adds the bits
    /// that a policy needs.
    pub features: u8,
    /// Why a program cannot be attached to `lsm_cgroup/inet_csk_clone`, if that is already known.
    pub without_clone: Option<String>,
    /// Jiffies per second.
    pub hz: u32,
    /// Whether the kernel runs TIMEOUT_INIT after it has armed a SYN's timer, so that timers can be shaped.
    pub shapes_syns: bool,
    /// Assumed where the kernel does not let the program read the socket's values.
    pub host_defaults: HostDefaults,
}

/// What the program counts. Each choice is a separate program, so that disabled statistics cost
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatisticsOptions {
    /// Whether anything is counted.
    pub on: bool,
    /// Whether connections that no entry covers are counted.
    pub unmatched: bool,
    /// Samples 1 in N loss-free connections until they close.
    pub sampling: u32,
    /// When smoothed RTTs are sampled.
    pub rtt: RttSampling,
    /// Whether the kernel lets the program read the current process.
    pub process: bool,
}

/// The capacity for this number of entries, if `configured` is set. Since Linux 5.11 the default is the limit, because the
/// kernel charges a trie's memory as it is filled; before, it charges the whole capacity at once.
pub fn room_for(entries: usize, configured: Option<u32>) -> u32 {
    let is_charged_by_content = || version::running().is_ok_and(|kernel| kernel.at_least((5, 11)));
    let capacity = configured.unwrap_or_else(|| match is_charged_by_content() {
        true => MAX_ENTRIES_LIMIT,
        false => 16384,
    });
    match u32::try_from(entries) {
        Ok(entries) if entries <= capacity => capacity,
        Ok(entries) => entries.checked_next_power_of_two().unwrap_or(u32::MAX),
        Err(_) => u32::MAX,
    }
}
