//! Writes a plan: in place, or with new tries and a new program if more capacity is needed.

use std::{collections::HashMap, path::Path};

use rto_agent_common::{EntryValue, Policy, arm};
use rto_agent_core::policy::{
    Cidr, PolicyName,
    plan::{MapState, Plan},
};

use super::{
    attach::{promote, put_in_force},
    kernel::{BpfKernel, kernel_entries},
    link::Link,
    object,
    open::new_staging,
    pins,
    removal::wait_for_end,
    statistics,
    tables::Tables,
    tries,
};
use crate::datapath::{DatapathError, Options, fallbacks_begin};

/// Whether the tries have room for all their entries before a plan removes any.
pub(super) fn has_room_for(kernel: &BpfKernel, current: &MapState, plan: &Plan) -> bool {
    let mut most = current.entries.families();
    let written = plan.entries_write.iter().map(|(cidr, _)| cidr);
    for cidr in written.filter(|cidr| !current.entries.contains_key(cidr)) {
        *most.of(cidr) += 1;
    }
    let room = kernel_entries(kernel.options.max_entries) as usize;
    most.ipv4.max(most.ipv6) <= room
}

/// Writes a plan from `current` to `desired` in its order: policies, entries, removals, freed
/// slots.
///
/// # Errors
///
/// The first write that fails; earlier writes stay.
pub(super) fn write(
    kernel: &mut BpfKernel,
    current: &MapState,
    plan: &Plan,
    desired: &MapState,
) -> Result<(), DatapathError> {
    kernel.tables.reset_retry_budget();
    for (name, policy) in &plan.policies_write {
        write_policy(kernel, name, policy)?;
    }
    let tries = &kernel.tables.read.tries;
    let slots = kernel.slots.indices();
    let written = plan.entries_write.iter().chain(&plan.entries_end);
    tries.write(written.map(|(cidr, name)| {
        let former = if current.entries.contains_key(cidr) {
            tries.get(cidr)?.map(|value| value.hits)
        } else {
            kernel.former_hits.get(cidr).copied()
        };
        let value = EntryValue {
            hits: former.unwrap_or(0),
            ..EntryValue::new(slot_of(&slots, cidr, name)?, desired.end_of(cidr))
        };
        Ok((*cidr, value))
    }))?;
    tries.remove(&plan.entries_remove)?;
    // Entries added later start at 0.
    kernel.former_hits = HashMap::new();
    free(kernel, plan)
}

fn free(kernel: &mut BpfKernel, plan: &Plan) -> Result<(), DatapathError> {
    for name in &plan.policies_remove {
        if let Some(slot) = kernel.slots.release(name) {
            let free = Policy {
                generation: slot.generation,
                ..Policy::EMPTY
            };
            kernel.tables.set_policy(slot.index, &free)?;
            for arm in arm::of(slot.index) {
                kernel.tables.remove_statistics(arm)?;
            }
            kernel.missing_stats.remove(name);
        }
    }
    Ok(())
}

/// Applies `plan` by creating tries for `max_entries` with the contents of `desired`, and
/// attaching the program over them before the former program goes. All other maps stay, and so
/// do the hits of entries (except hits during the change).
///
/// # Errors
///
/// As [`write`] and [`put_in_force`]; the active program stays.
pub(super) fn grow(
    kernel: &mut BpfKernel,
    max_entries: u32,
    plan: &Plan,
    desired: &MapState,
) -> Result<(), DatapathError> {
    let options = Options {
        max_entries,
        ..kernel.options.clone()
    };
    kernel.tables.reset_retry_budget();
    for (name, policy) in &plan.policies_write {
        write_policy(kernel, name, policy)?;
    }
    let staging = new_staging(&options.pin_dir)?;
    let former_tries = kernel.tables.read.tries.clone();
    let former_program = kernel.link.as_ref().map(|link| link.program_id);
    match fill(kernel, &options, &staging, desired) {
        Ok((tables, link)) => {
            if kernel.link.is_none() {
                // It was never attached, so no other code removes its pins.
                let _ = pins::remove_pin_set(&kernel.dir); // The next start removes it.
            }
            kernel.dir = staging;
            kernel.link = link;
            kernel.hook = None;
            kernel.tables = tables;
            kernel.options = options;
            kernel.former_hits = HashMap::new();
            if kernel.link.is_some() {
                promote(kernel);
            }
        }
        Err(e) => {
            let _ = pins::remove_pin_set(&staging); // The next start removes it.
            return Err(e);
        }
    }
    if kernel.link.is_some() {
        put_in_force(kernel)?;
        let cgroup = kernel.options.cgroup.clone();
        tries::empty_later(former_tries, move || wait_for_end(&cgroup, former_program));
    }
    free(kernel, plan)
}

/// Creates the maps for [`grow`] in `staging`, and the new link over them if there
/// was a link before.
fn fill(
    kernel: &BpfKernel,
    options: &Options,
    staging: &Path,
    desired: &MapState,
) -> Result<(Tables, Option<Link>), DatapathError> {
    kernel.tables.pin_all_but_tries(staging)?;
    object::load(Some(staging), &options.load_params())?;
    let tables = Tables::open(staging)?;
    let mut former = kernel.former_hits.clone();
    former.extend(kernel.tables.read.tries.hits()?);
    let slots = kernel.slots.indices();
    tables
        .read
        .tries
        .write(desired.entries.iter().map(|(cidr, entry)| {
            let slot = slot_of(&slots, &cidr, entry.policy)?;
            let value = EntryValue {
                hits: former.get(&cidr).copied().unwrap_or(0),
                ..EntryValue::new(slot, desired.end_of(&cidr))
            };
            Ok((cidr, value))
        }))?;
    if kernel.link.is_none() {
        return Ok((tables, None));
    }
    let link = Link::put_in_force(options, staging, kernel.link.as_ref())?;
    Ok((tables, Some(link)))
}

fn write_policy(
    kernel: &mut BpfKernel,
    name: &PolicyName,
    policy: &Policy,
) -> Result<(), DatapathError> {
    let (slot, before) = match kernel.slots.get(name) {
        Some(slot) => (slot, Some(kernel.tables.read.policy(slot.index)?)),
        None => {
            let slot = kernel
                .slots
                .take(name)
                .ok_or_else(|| DatapathError::PolicyTableFull(name.clone()))?;
            begin_statistics(kernel, name, arm::treated(slot.index));
            (slot, None)
        }
    };
    // Reset before these policies are active: a program does not change the fallback of
    // a direction without an epoch.
    let begins = fallbacks_begin(before.as_ref(), policy);
    kernel.tables.clear_fallbacks(slot.index, begins)?;
    let (had_control, has_control) = (slot.has_control, policy.control_below != 0);
    if has_control && !had_control {
        begin_statistics(kernel, name, arm::control(slot.index));
    }
    kernel.tables.set_policy(
        slot.index,
        &Policy {
            generation: slot.generation,
            ..*policy
        },
    )?;
    kernel.slots.set_control(name, has_control);
    if had_control && !has_control {
        kernel.tables.remove_statistics(arm::control(slot.index))?;
    }
    Ok(())
}

fn begin_statistics(kernel: &mut BpfKernel, name: &PolicyName, arm: u32) {
    if kernel.options.statistics.on && !statistics::begin_statistics(&mut kernel.tables, name, arm)
    {
        kernel.missing_stats.insert(name.clone());
    }
}

fn slot_of(
    slots: &HashMap<&PolicyName, u32>,
    cidr: &Cidr,
    name: &PolicyName,
) -> Result<u32, DatapathError> {
    slots
        .get(name)
        .copied()
        .ok_or_else(|| DatapathError::UnknownPolicy {
            cidr: *cidr,
            policy: name.clone(),
        })
}
