//! [`BpfKernel`]: the state of an open kernel.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
};

use rto_agent_common::{UNMATCHED, statistics};
use rto_agent_core::{
    config::RttSampling,
    policy::{Cidr, PolicyName},
    wire::kernel::Found,
};

use super::{
    accepted,
    link::Link,
    object::{LoadParams, OBJECT},
    pin_check::Pins,
    pins,
    reader::{Placement, Reader},
    slots::{Slot, Slots},
    tables::Tables,
};
use crate::datapath::{Options, StatisticsOptions};

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
    /// Whether [`unlink`](crate::datapath::Kernel::unlink) detached the program.
    pub(super) unlinked: bool,
    /// The program for accepted sockets.
    pub(super) hook: Option<accepted::Hook>,
}

impl BpfKernel {
    pub(super) fn new_reader(&self) -> Reader {
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
