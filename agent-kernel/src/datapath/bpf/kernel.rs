//! [`BpfKernel`]: the state of an open kernel, and [`Kernel`] by its parts.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
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

use super::{
    accepted, events,
    link::Link,
    object::{LoadParams, OBJECT},
    pin_check::Pins,
    pins,
    reader::{Placement, Reader},
    slots::{Slot, Slots},
    statistics::prepare,
    tables::Tables,
    walk,
};
use crate::datapath::{DatapathError, Kernel, KernelReader, Options, StatisticsOptions};

/// The program and its maps.
pub struct BpfKernel {
    pub(super) options: Options,
    pub(super) dir: PathBuf,
    pub(super) found: Found,
    pub(super) tables: Tables,
    pub(super) slots: Slots,
    /// Policies without statistics, because there was no memory.
    pub(super) missing_stats: BTreeSet<PolicyName>,
    /// Hits of entries in the tries being replaced, until the new tries are filled.
    pub(super) former_hits: HashMap<Cidr, u32>,
    pub(super) link: Option<Link>,
    /// An attached link of an earlier run, until it gets this run's program.
    pub(super) former_link: Option<Link>,
    /// Whether the program is or was attached.
    pub(super) was_in_force: bool,
    /// Whether [`Kernel::unlink`] detached the program.
    pub(super) unlinked: bool,
    /// The program for accepted sockets.
    pub(super) hook: Option<accepted::Hook>,
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
        let policies = plan.policies_write.iter();
        let features = policies.fold(self.options.features, |all, (_, p)| all | p.features());
        let former = std::mem::replace(&mut self.options.features, features);
        let is_replaced = features != former && self.link.is_some();
        let replaced = if grows {
            self.grow(room, plan, desired)
        } else if is_replaced {
            self.attach_again()
        } else {
            Ok(())
        };
        if replaced.is_err() {
            self.options.features = former;
        }
        replaced?;
        if !grows {
            self.write(current, plan, desired)?;
        }
        Ok(grows || is_replaced)
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        if self.was_in_force && !self.placement().attachment().attached {
            self.attach_again()
        } else {
            self.put_in_force()
        }
    }

    fn reader(&self) -> Arc<dyn KernelReader> {
        Arc::new(self.new_reader())
    }

    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.options.host_defaults = host;
        self.tables.set_host_defaults(host)
    }

    fn retry_statistics(&mut self) {
        for name in std::mem::take(&mut self.missing_stats) {
            let arms: Vec<_> = if name == PolicyName::unmatched() {
                vec![arm::treated(UNMATCHED)]
            } else {
                let slot = self.slots.get(&name);
                slot.into_iter().flat_map(Slot::arms).collect()
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
        self.tables.resume_shaping()?;
        let statistics = self.options.statistics;
        self.missing_stats = prepare(&mut self.tables, &self.slots, statistics)?;
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
    fn new_reader(&self) -> Reader {
        let slots = self.slots.iter();
        let slots = slots.map(|(name, slot)| (name.clone(), slot));
        let mut slots: Vec<_> = slots.chain(self.unmatched()).collect();
        slots.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        Reader {
            tables: self.tables.read.clone(),
            placement: self.placement(),
            by_index: slots
                .iter()
                .map(|(n, slot)| (slot.index, n.clone()))
                .collect(),
            slots,
            has_statistics: self.options.statistics.on,
            missing_stats: self.missing_stats.clone(),
            host_defaults: self.options.host_defaults,
            limited: self.link.as_ref().and_then(|link| link.limited.clone()),
        }
    }

    /// The slot of connections that no entry covers, if these are counted.
    fn unmatched(&self) -> Option<(PolicyName, Slot)> {
        if !self.options.statistics.counts_unmatched() {
            return None;
        }
        let slot = Slot {
            index: UNMATCHED,
            generation: self.tables.read.policy(UNMATCHED).ok()?.generation,
            has_control: false,
        };
        Some((PolicyName::unmatched(), slot))
    }

    pub(super) fn placement(&self) -> Placement {
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
            let _ = pins::remove_pin_set(&self.dir); // The next start removes it.
        }
    }
}

impl StatisticsOptions {
    pub(super) fn counts_unmatched(self) -> bool {
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
    pub(super) fn load_params(&self) -> LoadParams {
        LoadParams {
            trie_entries: Some(kernel_entries(self.max_entries)),
            discovers: self.statistics.counts_unmatched(),
            hz: self.hz,
            statistics_mode: self.statistics.mode(),
            features: self.features,
            sampling: self.statistics.sampling,
            rtt_interval_ns: self.statistics.rtt_interval_ns(),
            shapes_syns: self.shapes_syns.into(),
            ..LoadParams::default()
        }
    }

    /// Path of this program's pin set.
    pub(super) fn pin_set(&self) -> PathBuf {
        let name = pins::pin_set_name(OBJECT, &self.constants(), self.max_entries);
        self.pin_dir.join(name)
    }

    /// The constants written into the program, without the capacity.
    pub(super) fn constants(&self) -> Vec<u8> {
        let constants = [
            &[self.statistics.mode()][..],
            &self.statistics.sampling.to_le_bytes(),
            &self.statistics.rtt_interval_ns().to_le_bytes(),
            &self.hz.to_le_bytes(),
            &[self.shapes_syns.into(), self.features],
        ];
        constants.concat()
    }
}

/// Capacity of a trie for `max_entries`: during a reload that replaces every entry, it holds both
/// the old and the new entries. The kernel charges a trie's memory by its entries, not by its
/// capacity.
pub(super) fn kernel_entries(max_entries: u32) -> u32 {
    max_entries.saturating_mul(2)
}
