//! Statistics of policies: allocated with a slot, kept by a restart.

use std::collections::BTreeSet;

use rto_agent_common::{CONTROL, Policy, UNMATCHED, arm};
use rto_agent_core::policy::PolicyName;

use super::{
    slots::{Slots, control_policy, unmatched_policy},
    tables::Tables,
};
use crate::datapath::{DatapathError, StatisticsOptions};

/// Writes the settings of control arms and allocates statistics. Returns the policies for which
/// there was no memory.
pub(super) fn prepare(
    tables: &mut Tables,
    slots: &Slots,
    statistics: StatisticsOptions,
) -> Result<BTreeSet<PolicyName>, DatapathError> {
    let mut missing_stats = BTreeSet::new();
    tables.reset_retry_budget();
    let control = control_policy();
    if tables.read.policy(CONTROL)? != control {
        tables.set_policy(CONTROL, &control)?;
    }
    if statistics.counts_unmatched() {
        let former = tables.read.policy(UNMATCHED)?;
        if former.name().is_none() {
            let name = PolicyName::unmatched();
            if !begin_statistics(tables, &name, arm::treated(UNMATCHED)) {
                missing_stats.insert(name);
            }
        } else if !has_statistics(tables, &PolicyName::unmatched(), arm::treated(UNMATCHED)) {
            missing_stats.insert(PolicyName::unmatched());
        }
        let generation = former.generation;
        if former
            != (Policy {
                generation,
                ..unmatched_policy()
            })
        {
            // Sockets of the former generation must not be counted again.
            let generation = generation.wrapping_add(1);
            let unmatched = Policy {
                generation,
                ..unmatched_policy()
            };
            tables.set_policy(UNMATCHED, &unmatched)?;
        }
    }
    if statistics.on {
        for (name, slot) in slots.iter() {
            for arm in slot.arms() {
                if !has_statistics(tables, name, arm) {
                    missing_stats.insert(name.clone());
                }
            }
        }
    }
    Ok(missing_stats)
}

/// Makes sure that an arm has statistics, and keeps its counts. Returns false if that fails.
fn has_statistics(tables: &mut Tables, name: &PolicyName, arm: u32) -> bool {
    tables.read.has_statistics(arm) || is_counted(name, tables.add_statistics(arm))
}

/// Retires the slot in which connections without an entry were counted.
pub(super) fn retire_unmatched(tables: &mut Tables) -> Result<(), DatapathError> {
    let former = tables.read.policy(UNMATCHED)?;
    if former.name().is_some() {
        let free = Policy {
            generation: former.generation,
            ..Policy::EMPTY
        };
        tables.set_policy(UNMATCHED, &free)?;
        tables.remove_statistics(arm::treated(UNMATCHED))?;
    }
    Ok(())
}

/// Allocates statistics. Without memory for them the policy is still active, because timers matter
/// more than counts. Returns whether the policy is counted.
pub(super) fn begin_statistics(tables: &mut Tables, name: &PolicyName, arm: u32) -> bool {
    is_counted(name, tables.clear_statistics(arm))
}

/// Whether a policy's statistics were allocated; logs why not.
fn is_counted(name: &PolicyName, made: Result<(), DatapathError>) -> bool {
    match made {
        Ok(()) => true,
        Err(e) => {
            tracing::warn!(policy = %name, "not counted: {e}");
            false
        }
    }
}
