//! Reads the kernel on any thread: separate handles, and their meaning since the last change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use rto_agent_common::{
    CONTROL, EntryValue, HostDefaults, Policy, UNMATCHED, arm,
    discovery::{Discovered, Prefix},
    fallback::Fallback,
};
use rto_agent_core::{
    policy::{
        Cidr, PolicyName,
        differences::{Cursor, Difference, Differences},
        plan::MapState,
    },
    wire::{
        kernel::{Attachment, RtoMinTiming},
        stats::ArmStatistics,
    },
};

use super::{
    link::{Link, attached},
    pin_check::{Pins, has_frozen},
    pins,
    slots::{Slot, control_policy, unmatched_policy},
    tables::{PerCpu, ReadTables, TRIES},
};
use crate::{
    datapath::{DatapathError, KernelReader, error::map as map_error},
    kernel::cgroup,
};

/// A reader of a [`BpfKernel`](super::BpfKernel).
pub(super) struct Reader {
    pub(super) tables: Arc<ReadTables>,
    pub(super) placement: Placement,
    /// Sorted by name.
    pub(super) slots: Vec<(PolicyName, Slot)>,
    pub(super) by_index: HashMap<u32, PolicyName>,
    /// Whether anything is counted.
    pub(super) has_statistics: bool,
    pub(super) missing_stats: BTreeSet<PolicyName>,
    pub(super) host_defaults: HostDefaults,
    pub(super) limited: Option<String>,
}

/// Where the program and the pins should be.
pub(super) struct Placement {
    pub(super) cgroup: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) program_id: Option<u32>,
    pub(super) pins: Pins,
    pub(super) accepted: Option<RtoMinTiming>,
}

impl Placement {
    pub(super) fn attachment(&self) -> Attachment {
        let problem = match self.program_id {
            None => Some("the program is not attached".to_owned()),
            Some(id) => match attached(&self.cgroup, id) {
                Ok(true) if self.dir.exists() => self.pins.problem(&self.dir),
                Ok(true) => Some(format!("the pins in {} are missing", self.dir.display())),
                Ok(false) => {
                    Some("the kernel no longer lists the program at the cgroup".to_owned())
                }
                Err(e) => Some(format!("{}: {e}", self.cgroup.display())),
            },
        };
        Attachment {
            attached: problem.is_none(),
            problem,
            cgroup: self.cgroup.clone(),
            is_root: cgroup::is_root(&self.cgroup),
            program_id: self.program_id,
            accepted: self.accepted.clone(),
        }
    }

    /// The attachment of this program, or of another attached program of the agent: a change may be
    /// about to replace this one.
    fn attachment_during_change(&self) -> Attachment {
        /// Attempts, because a pin set may be renamed between being listed and being opened.
        const LOOKS: usize = 3;
        let attachment = self.attachment();
        if attachment.attached {
            return attachment;
        }
        let sets = || self.dir.parent().and_then(|dir| pins::pin_sets(dir).ok());
        let mut sets = (0..LOOKS).filter_map(|_| sets()).flatten();
        match sets.find_map(|set| Link::in_force(&set.path, &self.cgroup)) {
            Some(link) => Attachment {
                attached: true,
                problem: None,
                program_id: Some(link.program_id),
                ..attachment
            },
            None => attachment,
        }
    }
}

impl Reader {
    /// Whether a slot contains the desired policy.
    fn holds_policy(
        &self,
        desired: &MapState,
        name: &PolicyName,
        slot: Slot,
    ) -> Result<bool, DatapathError> {
        let unmatched = unmatched_policy();
        let wanted = match slot.index {
            UNMATCHED => Some(&unmatched),
            _ => desired.policies.get(name),
        };
        let in_kernel = self.tables.policy(slot.index)?;
        let generation = slot.generation;
        Ok(wanted.is_some_and(|wanted| {
            in_kernel
                == Policy {
                    generation,
                    ..*wanted
                }
        }))
    }

    fn slot_of(&self, policy: &PolicyName) -> Option<Slot> {
        let place = self.slots.binary_search_by(|(name, _)| name.cmp(policy));
        place.ok().map(|place| self.slots[place].1)
    }

    fn arms_of(&self, slot: Slot, buffers: &mut PerCpu) -> Result<ArmStatistics, DatapathError> {
        let mut read = |arm| self.tables.statistics(arm, buffers);
        Ok(ArmStatistics {
            treated: read(arm::treated(slot.index))?,
            control: match slot.has_control {
                true => Some(read(arm::control(slot.index))?),
                false => None,
            },
        })
    }

    /// The policy that an entry points to; `None` if the entry ends at a different time than
    /// desired.
    fn policy_of(&self, desired: &MapState, cidr: &Cidr, value: EntryValue) -> Option<&PolicyName> {
        (value.end() == desired.end_of(cidr)).then(|| self.by_index.get(&value.slot()))?
    }
}

impl KernelReader for Reader {
    fn attachment(&self) -> Attachment {
        self.placement.attachment()
    }

    fn has_frozen_map(&self) -> bool {
        has_frozen(&self.placement.dir)
    }

    fn attachment_during_change(&self) -> Attachment {
        self.placement.attachment_during_change()
    }

    fn compare_tables(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError> {
        let mut differences = Differences::default();
        for (name, slot) in &self.slots {
            if !self.holds_policy(desired, name, *slot)? {
                let policy = name.clone();
                differences.push(Difference::Policy { policy });
            }
        }
        let with_slots: HashSet<_> = self.slots.iter().map(|(name, _)| name).collect();
        let policies = desired.policies.keys();
        for policy in policies.filter(|name| !with_slots.contains(name)).cloned() {
            differences.push(Difference::Policy { policy });
        }
        if self.tables.policy(CONTROL)? != control_policy() {
            differences.push(Difference::ControlArm);
        }
        if self.tables.host_defaults()? != self.host_defaults {
            differences.push(Difference::HostDefaults);
        }
        if !self.has_statistics {
            cursor.policy = 0;
            return Ok(differences);
        }
        for (name, slot) in self.slots.iter().skip(cursor.policy).take(count) {
            let has_all = || slot.arms().all(|arm| self.tables.has_statistics(arm));
            if !self.missing_stats.contains(name) && !has_all() {
                let policy = name.clone();
                differences.push(Difference::Statistics { policy });
            }
        }
        let next = cursor.policy.saturating_add(count);
        cursor.policy = if next < self.slots.len() { next } else { 0 };
        Ok(differences)
    }

    fn compare_entries(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError> {
        let trie = TRIES[usize::from(cursor.is_ipv6)];
        let (found, is_last) = self.tables.tries.run(*cursor, count)?;
        let found = found.into_iter();
        let found: Vec<_> = found
            .map(|(cidr, value)| (cidr, self.policy_of(desired, &cidr, value)))
            .collect();
        let compared = cursor.compare(&found, is_last, &desired.entries);
        compared.map_err(|e| map_error(trie, e))
    }

    fn finds(
        &self,
        desired: &MapState,
        cidrs: &[Cidr],
        policy: &PolicyName,
    ) -> Result<bool, DatapathError> {
        let slot = self.slots.iter().find(|(name, _)| name == policy);
        if let Some((name, slot)) = slot
            && !self.holds_policy(desired, name, *slot)?
        {
            return Ok(false);
        }
        for cidr in cidrs {
            if let Some(entry) = desired.entries.get(cidr) {
                let tries = &self.tables.tries;
                let value = tries.get(cidr)?;
                let policy = value.and_then(|value| self.policy_of(desired, cidr, value));
                // For a missing entry, the lookup finds the next shorter one, which may have the
                // same policy.
                if policy != Some(entry.policy) || !tries.contains(cidr)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn hits(&self) -> Result<Vec<(Cidr, u32)>, DatapathError> {
        let mut hits = self.tables.tries.hits()?;
        hits.sort_unstable();
        Ok(hits)
    }

    fn hits_of(&self, cidr: &Cidr) -> Result<u32, DatapathError> {
        let value = self.tables.tries.get(cidr)?;
        Ok(value.map_or(0, |value| value.hits))
    }

    fn statistics(
        &self,
        each: &mut dyn FnMut(&PolicyName, &ArmStatistics),
    ) -> Result<(), DatapathError> {
        let mut buffers = PerCpu::default();
        for (name, slot) in &self.slots {
            each(name, &self.arms_of(*slot, &mut buffers)?);
        }
        Ok(())
    }

    fn statistics_of(&self, policy: &PolicyName) -> Result<Option<ArmStatistics>, DatapathError> {
        let slot = self.slot_of(policy);
        slot.map(|slot| self.arms_of(slot, &mut PerCpu::default()))
            .transpose()
    }

    fn fallbacks(&self, policy: &PolicyName) -> Result<[Fallback; 2], DatapathError> {
        let slot = self.slot_of(policy);
        slot.map_or(Ok(Default::default()), |slot| {
            self.tables.fallbacks(slot.index)
        })
    }

    fn discovered(&self) -> Result<Vec<(Prefix, Discovered)>, DatapathError> {
        self.tables.discovered()
    }

    fn discovered_since(&self) -> Option<SystemTime> {
        self.tables.discovered_since
    }

    fn owners(&self) -> BTreeMap<(u32, u32), PolicyName> {
        self.slots
            .iter()
            .map(|(name, slot)| ((slot.index, slot.generation), name.clone()))
            .collect()
    }

    fn missing_stats(&self) -> &BTreeSet<PolicyName> {
        &self.missing_stats
    }

    fn limited(&self) -> Option<&str> {
        self.limited.as_deref()
    }
}
