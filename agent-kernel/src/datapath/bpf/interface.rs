//! [`Kernel`] for [`BpfKernel`], by its parts.

use std::{collections::HashMap, sync::Arc};

use rto_agent_common::{HostDefaults, UNMATCHED, arm};
use rto_agent_core::{
    policy::{
        PolicyName,
        entries::Builder,
        plan::{MapState, Plan},
    },
    wire::kernel::{Found, Removed},
};

use super::{attach, events, kernel::BpfKernel, slots::Slot, statistics::prepare, walk, write};
use crate::datapath::{DatapathError, Kernel, KernelReader, Options};

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
        let grows = room > self.options.max_entries || !write::has_room_for(self, current, plan);
        let policies = plan.policies_write.iter();
        let features = policies.fold(self.options.features, |all, (_, p)| all | p.features());
        let former = std::mem::replace(&mut self.options.features, features);
        let is_replaced = features != former && self.link.is_some();
        let replaced = if grows {
            write::grow(self, room, plan, desired)
        } else if is_replaced {
            attach::attach_again(self)
        } else {
            Ok(())
        };
        if replaced.is_err() {
            self.options.features = former;
        }
        replaced?;
        if !grows {
            write::write(self, current, plan, desired)?;
        }
        Ok(grows || is_replaced)
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        if self.was_in_force && !self.placement().attachment().attached {
            attach::attach_again(self)
        } else {
            attach::put_in_force(self)
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
        attach::take_out_of_force(self)
    }

    fn detach(self: Box<Self>) -> Result<Removed, DatapathError> {
        attach::remove(self)
    }
}
