//! The kernel by eBPF: loads, pins and attaches programs, and writes and reads their maps. The only
//! module that uses aya.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use rto_agent_common::{HostDefaults, UNMATCHED, arm, statistics};
use rto_agent_core::{
    config::RttSampling,
    policy::{
        Cidr, PolicyName,
        entries::Builder,
        plan::{MapState, Plan},
    },
    wire::kernel::{Found, Removed},
};

use super::{Cause, DatapathError, Kernel, KernelReader, Options, StatisticsOptions, error};

mod accepted;
mod attach;
pub mod events;
pub mod handover;
mod link;
mod object;
mod open;
mod pin_check;
mod pins;
pub mod probe;
mod reader;
mod removal;
mod schedules;
mod slots;
mod tables;
mod tries;
pub mod walk;
mod write;

use link::Link;
use object::LoadParams;
pub use object::OBJECT;
use pin_check::Pins;
use reader::{Placement, Reader};
pub use removal::{
    PinnedEntry, PinnedMaps, make_pin_dir, pinned_initial_rto, pinned_maps, pinned_program_ids,
    remove_kept_pins, remove_links, remove_pins,
};
pub use schedules::{
    NewConnections, forget_schedules, resume_schedules, schedules, stop_schedules,
};
use slots::Slots;
use tables::Tables;

/// The program and its maps.
pub struct BpfKernel {
    options: Options,
    dir: PathBuf,
    found: Found,
    tables: Tables,
    slots: Slots,
    /// Policies without statistics, because there was no memory.
    missing_stats: BTreeSet<PolicyName>,
    /// Hits of entries in the tries being replaced, until the new tries are filled.
    former_hits: HashMap<Cidr, u32>,
    link: Option<Link>,
    /// An attached link of an earlier run, until it gets this run's program.
    former_link: Option<Link>,
    /// Whether the program is or was attached.
    was_in_force: bool,
    /// Whether [`Kernel::unlink`] detached the program.
    unlinked: bool,
    /// The program for accepted sockets.
    hook: Option<accepted::Hook>,
}

impl Kernel for BpfKernel {
    fn options(&self) -> &Options {
        &self.options
    }

    fn found(&self) -> Found {
        self.found
    }

    fn read(&self) -> Result<MapState, DatapathError> {
        let names = self.slots.by_index();
        let mut image = MapState::default();
        let mut entries = Builder::default();
        // An entry whose slot has no policy has no effect; as "nameless" it is removed by any plan.
        let nameless = PolicyName::nameless();
        let mut numbers = HashMap::new();
        for (index, mut policy) in self.tables.read.policies()? {
            if let Some(name) = names.get(&index) {
                numbers.insert(index, entries.policy(name));
                // A different generation means a different policy.
                let own = self.slots.get(name).map_or(0, |slot| slot.generation);
                policy.generation = policy.generation.wrapping_sub(own);
                image.policies.insert((*name).clone(), policy);
            }
        }
        let all = self.tables.read.tries.all()?;
        entries.reserve(all.len());
        for (cidr, value) in all {
            image.set_end(cidr, value.end());
            let number = match numbers.get(&value.slot()) {
                Some(number) => *number,
                None => entries.policy(&nameless),
            };
            entries.push(cidr, number, None);
        }
        (image.entries, _) = entries.build();
        Ok(image)
    }

    fn apply(
        &mut self,
        room: u32,
        current: &MapState,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<bool, DatapathError> {
        let room = room.max(self.options.max_entries);
        let grows = room > self.options.max_entries || !self.has_room_for(current, plan);
        if grows {
            self.grow(room, plan, desired)?;
        } else {
            self.write(current, plan, desired)?;
        }
        Ok(grows)
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        if self.was_in_force && !self.placement().attachment().attached {
            self.attach_again()
        } else {
            self.put_in_force()
        }
    }

    fn reader(&self) -> Arc<dyn KernelReader> {
        Arc::new(Reader::new(self))
    }

    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.options.host_defaults = host;
        self.tables.set_host_defaults(host)
    }

    fn renew_lease(&mut self, until_ns: u64) -> Result<(), DatapathError> {
        self.tables.renew_lease(until_ns)
    }

    fn retry_statistics(&mut self) {
        for name in std::mem::take(&mut self.missing_stats) {
            let arms: Vec<_> = if name == PolicyName::unmatched() {
                vec![arm::treated(UNMATCHED)]
            } else {
                let slot = self.slots.get(&name);
                slot.into_iter().flat_map(slots::Slot::arms).collect()
            };
            for arm in arms {
                // One arm may already have statistics; these continue.
                if !self.tables.read.has_statistics(arm)
                    && self.tables.clear_statistics(arm).is_err()
                {
                    self.missing_stats.insert(name.clone());
                }
            }
        }
    }

    fn restore_tables(&mut self) -> Result<(), DatapathError> {
        self.tables.set_host_defaults(self.options.host_defaults)?;
        self.tables.resume_schedules()?;
        let statistics = self.options.statistics;
        self.missing_stats = open::prepare(&mut self.tables, &self.slots, statistics)?;
        Ok(())
    }

    fn events(&self) -> Result<(events::Reader, events::SynAcks), DatapathError> {
        let syn_acks = events::SynAcks::new(&self.dir, &self.options);
        Ok((events::Reader::open(&self.dir)?, syn_acks))
    }

    fn walker(&self, mode: walk::Mode) -> Result<walk::Walker, DatapathError> {
        let cgroup = walk::filter(&self.options.cgroup)?;
        walk::Walker::load(&self.dir, Some(&self.options), cgroup, mode)
    }

    fn unlink(&mut self) -> Result<(), DatapathError> {
        self.take_out_of_force()
    }

    fn detach(self: Box<Self>) -> Result<Removed, DatapathError> {
        self.remove()
    }
}

impl BpfKernel {
    fn placement(&self) -> Placement {
        Placement {
            pins: Pins::of(&self.tables, self.link.as_ref(), self.hook.as_ref()),
            cgroup: self.options.cgroup.clone(),
            dir: self.dir.clone(),
            program_id: self.link.as_ref().map(|link| link.program_id),
            accepted: self.hook.as_ref().map(accepted::Hook::view),
        }
    }
}

impl Drop for BpfKernel {
    /// A program that was never attached leaves no pins behind.
    fn drop(&mut self) {
        if self.link.is_none() && !self.unlinked {
            let _swept = pins::remove_pin_set(&self.dir);
        }
    }
}

impl StatisticsOptions {
    fn counts_unmatched(self) -> bool {
        self.on && self.unmatched
    }

    fn mode(self) -> u8 {
        let bit = |bit: u8, on: bool| if on { bit } else { 0 };
        bit(statistics::ON, self.on)
            | bit(statistics::UNMATCHED, self.counts_unmatched())
            | bit(
                statistics::RTT_AT_END,
                self.on && self.rtt != RttSampling::Off,
            )
            | bit(statistics::PROCESS, self.on && self.process)
    }

    fn rtt_interval_ns(self) -> u64 {
        match self.rtt {
            RttSampling::Off | RttSampling::AtEnd => 0,
            RttSampling::Every(interval) => u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl Options {
    fn load_params(&self) -> LoadParams {
        LoadParams {
            trie_entries: Some(kernel_entries(self.max_entries)),
            discovers: self.statistics.counts_unmatched(),
            hz: self.hz,
            statistics_mode: self.statistics.mode(),
            sampling: self.statistics.sampling,
            rtt_interval_ns: self.statistics.rtt_interval_ns(),
            syn_cap: self.syn_cap.into(),
            ..LoadParams::default()
        }
    }

    /// Path of this program's pin set.
    fn pin_set(&self) -> PathBuf {
        let name = pins::pin_set_name(OBJECT, &self.constants(), self.max_entries);
        self.pin_dir.join(name)
    }

    /// The constants written into the program, without the capacity.
    fn constants(&self) -> Vec<u8> {
        let constants = [
            &[self.statistics.mode()][..],
            &self.statistics.sampling.to_le_bytes(),
            &self.statistics.rtt_interval_ns().to_le_bytes(),
            &self.hz.to_le_bytes(),
            &[self.syn_cap.into()],
        ];
        constants.concat()
    }
}

/// Capacity of a trie for `max_entries`: during a reload that replaces every entry, it holds both
/// the old and the new entries. The kernel charges a trie's memory by its entries, not by its
/// capacity.
fn kernel_entries(max_entries: u32) -> u32 {
    max_entries.saturating_mul(2)
}

/// Whether the attached program uses the maps pinned in `dir`.
fn is_in_use(dir: &Path) -> bool {
    Link::at(dir).is_some_and(|link| link.is_of(dir))
}

fn pin_error(path: &Path, cause: impl std::error::Error + Send + Sync + 'static) -> DatapathError {
    DatapathError::Pin {
        path: path.to_owned(),
        cause: Cause::new(cause),
    }
}

fn attach_error(
    cgroup: &Path,
    cause: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> DatapathError {
    DatapathError::Attach {
        cgroup: cgroup.to_owned(),
        cause: Cause::new(cause),
    }
}
