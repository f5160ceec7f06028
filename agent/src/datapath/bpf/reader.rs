//! Reading on any thread: handles of its own, and what they mean since the last change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::Arc,
};

use rto_agent_common::{Statistics, UNMATCHED};

use super::{
    Attachment, BpfKernel, DatapathError, KernelReader, RtoMinTiming,
    link::{Link, attached},
    pins,
    slots::{Slot, Slots},
    tables::ReadTables,
};
use crate::policy::{Cidr, PolicyName, plan::MapState};

/// A [`BpfKernel`], to be read.
pub(super) struct Reader {
    tables: Arc<ReadTables>,
    placement: Placement,
    slots: Vec<(PolicyName, Slot)>,
    missing_stats: BTreeSet<PolicyName>,
    limited: Option<String>,
}

/// Where program and pins should be.
pub(super) struct Placement {
    pub(super) cgroup: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) program_id: Option<u32>,
    pub(super) accepted: Option<RtoMinTiming>,
}

impl Placement {
    pub(super) fn attachment(&self) -> Attachment {
        let problem = match self.program_id {
            None => Some("the program is not attached".to_owned()),
            Some(id) => match attached(&self.cgroup, id) {
                Ok(true) if self.dir.join(pins::LINK).exists() => None,
                Ok(true) => Some(format!("the pins in {} are gone", self.dir.display())),
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
            program_id: self.program_id,
            accepted: self.accepted.clone(),
        }
    }

    /// The same, or that of another program of ours that is in force: a change may be about to replace this one.
    fn attachment_during_change(&self) -> Attachment {
        /// A set of pins may be given its name between being listed and being opened.
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
    pub(super) fn new(kernel: &BpfKernel) -> Self {
        let slots = kernel.slots.iter();
        let slots = slots.map(|(name, slot)| (name.clone(), slot));
        Self {
            tables: kernel.tables.read.clone(),
            placement: kernel.placement(),
            slots: slots.chain(unmatched(kernel)).collect(),
            missing_stats: kernel.missing_stats.clone(),
            limited: kernel.link.as_ref().and_then(|link| link.limited.clone()),
        }
    }
}

/// The slot for what no entry covers, where that is counted.
fn unmatched(kernel: &BpfKernel) -> Option<(PolicyName, Slot)> {
    if !kernel.options.statistics.counts_unmatched() {
        return None;
    }
    let slot = Slot {
        index: UNMATCHED,
        generation: kernel.tables.read.policy(UNMATCHED).ok()?.generation,
    };
    Some((PolicyName::unmatched(), slot))
}

impl KernelReader for Reader {
    fn attachment(&self) -> Attachment {
        self.placement.attachment()
    }

    fn attachment_during_change(&self) -> Attachment {
        self.placement.attachment_during_change()
    }

    fn holds(&self, desired: &MapState) -> Result<bool, DatapathError> {
        let policies = self.tables.policies()?;
        let slots = Slots::read(policies.iter().copied());
        let names = slots.by_index();
        let held = policies.into_iter().filter_map(|(index, mut policy)| {
            policy.generation = 0;
            Some(((*names.get(&index)?).clone(), policy))
        });
        if held.collect::<BTreeMap<_, _>>() != desired.policies {
            return Ok(false);
        }
        let names: HashMap<u32, &PolicyName> = names.into_iter().collect();
        let (mut count, mut differs) = (0, false);
        self.tables.tries.each(|cidr, value| {
            count += 1;
            let entry = desired.entries.get(&cidr);
            let wanted = entry.map(|entry| entry.policy);
            differs |= wanted.is_none() || wanted != names.get(&value.policy).copied();
        })?;
        Ok(!differs && count == desired.entries.len())
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

    fn statistics(&self) -> Result<BTreeMap<PolicyName, [Statistics; 3]>, DatapathError> {
        self.slots
            .iter()
            .map(|(name, slot)| Ok((name.clone(), self.tables.statistics(slot.index)?)))
            .collect()
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
