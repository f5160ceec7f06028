//! The seam to the kernel. [`Kernel`] is what the engine needs, and [`KernelReader`] what other threads may read during
//! a change; `bpf` implements both with eBPF and alone touches aya.
//!
//! A kernel is opened in two steps, so that a program never runs over an empty map and a running one never loses an
//! entry: opening finds or makes the maps (an earlier run's keep working during this), the caller writes what
//! should be in them, and [`Kernel::attach`] puts the link in force and removes what it replaced.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use rto_agent_common::{
    HostDefaults, Policy, Statistics,
    brake::Brake,
    discovery::{Discovered, Prefix},
};
use serde::{Deserialize, Serialize};

use crate::{
    config::RttSampling,
    kernel::version,
    policy::{
        Cidr, MAX_ENTRIES_LIMIT, PolicyName,
        differences::{Differences, Disorder, Run},
        plan::{MapState, Plan},
    },
    printable,
};

mod bpf;
mod error;
#[cfg(test)]
pub(crate) mod fake;

pub use bpf::{
    BpfKernel, NewConnections, OBJECT, PinnedEntry, PinnedMaps, RtoMinTiming, events,
    forget_schedules, handover, make_pin_dir, pinned_initial_rto, pinned_maps, pinned_program_ids,
    probe, remove_kept_pins, remove_links, remove_pins, resume_schedules, schedules,
    stop_schedules, walk,
};
pub use error::{Cause, DatapathError};

/// The maps and the program in the kernel, as the engine, their one writer, sees them. Dropping it closes the handles
/// and leaves in force what is in force.
pub trait Kernel: Send {
    /// What it was opened for, with the room there is now.
    fn options(&self) -> &Options;

    /// What an earlier run had left.
    fn found(&self) -> Found;

    /// The state of the maps.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    fn read(&self) -> Result<MapState, DatapathError>;

    /// Writes `plan`, which turns `current` into `desired`, in its order. There is to be room for `room` entries at
    /// least; says whether that took new tries and a new program.
    ///
    /// # Errors
    ///
    /// The first write that fails; what came before it stays written. The caller decides, with [`Kernel::read`] as
    /// the truth, whether to go back or to try again.
    fn apply(
        &mut self,
        room: u32,
        current: &MapState,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<bool, DatapathError>;

    /// Attaches the program with all its pins if it is not attached, and removes the pins of what it replaces. The
    /// maps stay.
    ///
    /// # Errors
    ///
    /// If the program cannot be loaded, attached or pinned; what was in force before stays.
    fn attach(&mut self) -> Result<(), DatapathError>;

    /// What reads it on other threads, as it is after the last change.
    fn reader(&self) -> Arc<dyn KernelReader>;

    /// Changes what programs assume where a socket cannot be asked.
    ///
    /// # Errors
    ///
    /// If the map cannot be written.
    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError>;

    /// Keeps automatic values in force until then, nanoseconds of CLOCK_MONOTONIC.
    ///
    /// # Errors
    ///
    /// If the map cannot be written.
    fn renew_lease(&mut self, until_ns: u64) -> Result<(), DatapathError>;

    /// Tries again to allocate the statistics that there was no memory for.
    fn retry_statistics(&mut self);

    /// Rewrites what is not part of a plan if another process removed or overwrote it: statistics and the host's
    /// defaults.
    ///
    /// # Errors
    ///
    /// If a map cannot be read or written.
    fn restore_tables(&mut self) -> Result<(), DatapathError>;

    /// What reads events, and what such a reader needs to report SYN-ACKs as they are retransmitted.
    ///
    /// # Errors
    ///
    /// If the maps cannot be opened.
    fn events(&self) -> Result<(events::Reader, events::SynAcks), DatapathError>;

    /// What walks over open sockets, with the policies as they are now.
    ///
    /// # Errors
    ///
    /// If the kernel does not take the iterator.
    fn walker(&self, mode: walk::Mode) -> Result<walk::Walker, DatapathError>;

    /// Detaches the programs; maps and pins stay, with the counters and the sockets' former options.
    /// [`Kernel::attach`] attaches them again.
    ///
    /// # Errors
    ///
    /// If a link's pin cannot be removed.
    fn unlink(&mut self) -> Result<(), DatapathError>;

    /// Takes the program out of force and removes every pin.
    ///
    /// # Errors
    ///
    /// If a pin cannot be removed; the others are removed all the same.
    fn detach(self: Box<Self>) -> Result<Removed, DatapathError>;
}

/// The directions (active, passive) whose brakes start afresh when a slot gets this policy: directions that had no brake
/// in force ([`Policy::epochs`]), because earlier spending says nothing about the future; both if the policy is new.
fn brakes_begin(held: Option<&Policy>, next: &Policy) -> [bool; 2] {
    let Some(held) = held else {
        return [true; 2];
    };
    std::array::from_fn(|direction| held.epochs[direction] == 0 && next.epochs[direction] != 0)
}

/// Handles of its own on the maps, for any thread. While it lives the kernel keeps the maps.
pub trait KernelReader: Send + Sync {
    /// Asks the kernel whether the program is in force and its pins are there.
    fn attachment(&self) -> Attachment;

    /// The same while a change is under way, which may put another program of the agent in the place of this one.
    fn attachment_during_change(&self) -> Attachment;

    /// Compares the tables beside the entries: policies, the host's defaults, and whether the `count` policies from `first`
    /// have statistics. `first` becomes the index to continue at (0: those were
    /// the last).
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    fn compare_tables(
        &self,
        desired: &MapState,
        first: &mut usize,
        count: usize,
    ) -> Result<Differences, DatapathError>;

    /// Compares the next entries, up to `count`; `cursor` becomes the position to continue at.
    ///
    /// # Errors
    ///
    /// If a map cannot be read, or changes during the read.
    fn compare_entries(
        &self,
        desired: &MapState,
        cursor: &mut TrieCursor,
        count: usize,
    ) -> Result<Differences, DatapathError>;

    /// Where anything is other than this.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    fn differences(&self, desired: &MapState) -> Result<Differences, DatapathError> {
        /// A map that changes during the read is read again.
        const ATTEMPTS: usize = 3;
        let mut differences = self.compare_tables(desired, &mut 0, usize::MAX)?;
        let mut attempt = 1;
        let entries = loop {
            match self.compare_all_entries(desired) {
                Err(_) if attempt < ATTEMPTS => attempt += 1,
                compared => break compared?,
            }
        };
        differences.append(entries);
        Ok(differences)
    }

    /// The same of entries.
    ///
    /// # Errors
    ///
    /// As [`KernelReader::compare_entries`].
    fn compare_all_entries(&self, desired: &MapState) -> Result<Differences, DatapathError> {
        let mut cursor = TrieCursor::default();
        let mut differences = Differences::default();
        loop {
            differences.append(self.compare_entries(desired, &mut cursor, usize::MAX)?);
            if cursor == TrieCursor::default() {
                return Ok(differences);
            }
        }
    }

    /// Whether this policy and each of these entries, if desired, are in the kernel as they should be.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    fn finds(
        &self,
        desired: &MapState,
        cidrs: &[Cidr],
        policy: &PolicyName,
    ) -> Result<bool, DatapathError>;

    /// What every entry has counted that has counted anything, in order.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    fn hits(&self) -> Result<Vec<(Cidr, u32)>, DatapathError>;

    /// The same of one entry that is known to exist.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    fn hits_of(&self, cidr: &Cidr) -> Result<u32, DatapathError>;

    /// Statistics of every policy, summed over the CPUs; [`PolicyName::unmatched`] has the connections that no entry
    /// covers.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    fn statistics(&self) -> Result<BTreeMap<PolicyName, ArmStatistics>, DatapathError>;

    /// Statistics of one policy; `None` if it has no slot.
    ///
    /// # Errors
    ///
    /// As above.
    fn statistics_of(&self, policy: &PolicyName) -> Result<Option<ArmStatistics>, DatapathError>;

    /// Addresses with which connections of this network namespace ended in the last hour, as far as the kernel has cached
    /// them (`ip tcp_metrics`).
    fn recent_peers(&self) -> Vec<IpAddr>;

    /// The brakes of a policy, by direction (active, passive); nothing is spent where it has no slot.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    fn brakes(&self, policy: &PolicyName) -> Result<[Brake; 2], DatapathError>;

    /// What was seen of peers that no entry covers, where these are counted.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    fn discovered(&self) -> Result<Vec<(Prefix, Discovered)>, DatapathError>;

    /// Since when these are counted, where that is known: restarts of the daemon keep the map.
    fn discovered_since(&self) -> Option<SystemTime>;

    /// The policies of slots and their generations, for telling whose an event is.
    fn owners(&self) -> BTreeMap<(u32, u32), PolicyName>;

    /// Policies without statistics, as there was no memory.
    fn missing_stats(&self) -> &BTreeSet<PolicyName>;

    /// Why the program reads less of sockets than this kernel has, if it does.
    fn limited(&self) -> Option<&str>;
}

/// Where a comparison of the tries stands: before the first entry, or after one of either family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrieCursor {
    /// Before the first.
    #[default]
    Begin,
    /// After this entry.
    After(Cidr),
    /// Before the first of IPv6.
    BeginV6,
}

impl TrieCursor {
    /// Which family is next, and the entry before.
    #[must_use]
    pub fn start(self) -> (bool, Option<Cidr>) {
        match self {
            Self::Begin => (true, None),
            Self::BeginV6 => (false, None),
            Self::After(cidr) => (cidr.is_ipv4(), Some(cidr)),
        }
    }

    /// Compares a run of entries found at the cursor, each with its policy, and moves the cursor behind it.
    ///
    /// # Errors
    ///
    /// If the run is out of order: another process changed the trie during the read.
    fn compare(
        &mut self,
        found: &[(Cidr, Option<&PolicyName>)],
        is_last: bool,
        desired: &MapState,
    ) -> Result<Differences, Disorder> {
        let (is_ipv4, after) = self.start();
        let run = Run {
            is_ipv4,
            after,
            found,
            is_last,
        };
        *self = match (is_ipv4, found.last()) {
            (true, _) if is_last => Self::BeginV6,
            (false, _) if is_last => Self::Begin,
            (_, Some((last, _))) => Self::After(*last),
            (_, None) => *self,
        };
        run.compare(&desired.entries)
    }
}

/// What a kernel is opened for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup2 directory to attach to.
    pub cgroup: PathBuf,
    /// Directory on a BPF file system, for this agent alone.
    pub pin_dir: PathBuf,
    /// Entries there is room for; [`Kernel::apply`] makes more.
    pub max_entries: u32,
    /// What is counted.
    pub statistics: StatisticsOptions,
    /// Why there can be no program at `lsm_cgroup/inet_csk_clone`, where that was found out already.
    pub without_clone: Option<String>,
    /// Jiffies a second.
    pub hz: u32,
    /// The kernel takes TCP_RTO_MAX_MS, and a walk over open sockets can restore it.
    pub syn_cap: bool,
    /// What to assume where the kernel does not let the program ask the socket.
    pub host_defaults: HostDefaults,
}

/// What the program counts. Another choice is another program: what is off costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatisticsOptions {
    /// Whether anything is counted.
    pub on: bool,
    /// Connections that no entry covers.
    pub unmatched: bool,
    /// Samples 1 in N loss-free connections until they close.
    pub sampling: u32,
    /// When smoothed RTTs are sampled.
    pub rtt: RttSampling,
    /// The kernel tells the program the current process.
    pub process: bool,
}

/// What was counted of a policy, in each arm by [`rto_agent_common::direction::ALL`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArmStatistics {
    /// Of the connections that have its settings.
    pub treated: [Statistics; 3],
    /// Of connections with the kernel's own timers; `None` if there is no control arm.
    pub control: Option<[Statistics; 3]>,
}

/// What opening found of an earlier run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// Nothing: maps and program are new.
    #[default]
    Nothing,
    /// The same program in force: adopted as it is.
    Adopted,
    /// Maps of the same layout: kept, under a new program.
    MapsKept,
    /// Only pins of another layout: replaced.
    Replaced,
}

/// Whether the program is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Attachment {
    /// The kernel lists the program at the cgroup, and each pin is of the object it should be.
    pub attached: bool,
    /// What is wrong, if anything.
    pub problem: Option<String>,
    /// The cgroup.
    #[serde(serialize_with = "printable::serialize_path")]
    pub cgroup: PathBuf,
    /// It is the hierarchy's root: every socket of the host is covered.
    #[serde(default)]
    pub is_root: bool,
    /// The kernel's id of the program.
    pub program_id: Option<u32>,
    /// When accepted sockets get `rto_min`; absent while nothing is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<RtoMinTiming>,
}

/// What [`remove_pins`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Removed {
    /// Generations of pins.
    #[serde(serialize_with = "printable::serialize_paths")]
    pub generations: Vec<PathBuf>,
    /// Of these, how many held a link.
    pub links: usize,
    /// Things in the directory that are not ours and were left.
    #[serde(serialize_with = "printable::serialize_paths")]
    pub left: Vec<PathBuf>,
}

/// The capacity for a number of entries if `asked` is configured. By default it is the limit where the memory of a trie is
/// charged as it is filled (Linux 5.11); before, the kernel charges it at the creation.
#[must_use]
pub fn room_for(entries: usize, asked: Option<u32>) -> u32 {
    let is_charged_by_content = || version::running().is_ok_and(|kernel| kernel.at_least((5, 11)));
    let asked = asked.unwrap_or_else(|| match is_charged_by_content() {
        true => MAX_ENTRIES_LIMIT,
        false => 16384,
    });
    match u32::try_from(entries) {
        Ok(entries) if entries <= asked => asked,
        Ok(entries) => entries.checked_next_power_of_two().unwrap_or(u32::MAX),
        Err(_) => u32::MAX,
    }
}
