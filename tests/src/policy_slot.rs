//! The layout of the map `POLICIES`.

use std::mem::offset_of;

use rto_agent_common::{Policy, PolicySlot};

/// The active policy in a value of the map `POLICIES`, as bytes.
#[must_use]
pub fn policy_in(slot: &[u8]) -> Option<&[u8]> {
    let active = u32::from_ne_bytes(*slot.first_chunk()?);
    let copy = offset_of!(PolicySlot, copies) + usize::try_from(active).ok()? * size_of::<Policy>();
    slot.get(copy..copy + size_of::<Policy>())
}
