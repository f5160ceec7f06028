//! Maps policies to slots of the `POLICIES` array.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rto_agent_common::{Policy, arm, policy_flags};
use rto_agent_core::policy::PolicyName;

/// One policy's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Index into `POLICIES`.
    pub(super) index: u32,
    /// The generation written there for this policy.
    pub(super) generation: u32,
    /// Whether its policy has a control arm.
    pub(super) has_control: bool,
}

impl Slot {
    /// Indices of the counted arms.
    pub(super) fn arms(self) -> impl Iterator<Item = u32> {
        let control = self.has_control.then(|| arm::control(self.index));
        std::iter::once(arm::treated(self.index)).chain(control)
    }
}

/// The slot of connections that no entry covers, without its generation.
pub(super) fn unmatched_policy() -> Policy {
    let policy = without_settings(&PolicyName::unmatched());
    Policy {
        flags: policy.flags | policy_flags::DISCOVERS,
        ..policy
    }
}

/// The slot with the settings of control arms. It counts no connections, so its generation is
/// always 0.
pub(super) fn control_policy() -> Policy {
    without_settings(&PolicyName::control())
}

/// A policy that keeps the kernel's own timers.
fn without_settings(name: &PolicyName) -> Policy {
    Policy {
        name: name.padded(),
        flags: policy_flags::IN_USE,
        // The kernel's default, TCP_TIMEOUT_INIT.
        initial_rto_us: 1_000_000,
        ..Policy::EMPTY
    }
}

/// The used and free slots.
///
/// A freed slot is reused only after all other free slots. Sockets that still name it are
/// recognised by its generation, and the longer the slot is free, the fewer such sockets remain.
#[derive(Debug)]
pub(super) struct Slots {
    used: BTreeMap<PolicyName, Slot>,
    free: VecDeque<Slot>,
}

impl Slots {
    /// Reads the slots in `policies` (every index from `FIRST_SLOT`, in order). A slot with a
    /// repeated name, or a name this version does not accept, counts as free.
    pub(super) fn read(policies: impl Iterator<Item = (u32, Policy)>) -> Self {
        let mut slots = Self {
            used: BTreeMap::new(),
            free: VecDeque::new(),
        };
        for (index, policy) in policies {
            let slot = Slot {
                index,
                generation: policy.generation,
                has_control: policy.control_below != 0,
            };
            match policy.name().and_then(|n| n.parse::<PolicyName>().ok()) {
                Some(name) if !slots.used.contains_key(&name) => {
                    slots.used.insert(name, slot);
                }
                _ => slots.free.push_back(slot),
            }
        }
        slots
    }

    /// The slot of a policy.
    pub(super) fn get(&self, name: &PolicyName) -> Option<Slot> {
        self.used.get(name).copied()
    }

    /// The policy of a slot.
    pub(super) fn by_index(&self) -> BTreeMap<u32, &PolicyName> {
        self.used
            .iter()
            .map(|(name, slot)| (slot.index, name))
            .collect()
    }

    /// The indices of all policies, for many lookups.
    pub(super) fn indices(&self) -> HashMap<&PolicyName, u32> {
        self.used
            .iter()
            .map(|(name, slot)| (name, slot.index))
            .collect()
    }

    /// Every policy and its slot.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&PolicyName, Slot)> {
        self.used.iter().map(|(name, slot)| (name, *slot))
    }

    /// Allocates a slot for a new policy, with a generation one above the former owner's; `None` if
    /// all slots are in use.
    pub(super) fn take(&mut self, name: &PolicyName) -> Option<Slot> {
        let former = self.free.pop_front()?;
        let slot = Slot {
            index: former.index,
            generation: former.generation.wrapping_add(1),
            has_control: false,
        };
        self.used.insert(name.clone(), slot);
        Some(slot)
    }

    /// Records whether a policy has a control arm; returns its slot.
    pub(super) fn set_control(&mut self, name: &PolicyName, has_control: bool) -> Option<Slot> {
        let slot = self.used.get_mut(name)?;
        slot.has_control = has_control;
        Some(*slot)
    }

    /// Frees a policy's slot.
    pub(super) fn release(&mut self, name: &PolicyName) -> Option<Slot> {
        let slot = self.used.remove(name)?;
        self.free.push_back(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{FIRST_SLOT, SLOTS};

    use super::*;

    fn name(n: &str) -> PolicyName {
        n.parse().unwrap()
    }

    #[test]
    fn freed_slot_is_reused_last_with_new_generation() {
        let mut slots = Slots::read((FIRST_SLOT..SLOTS).map(|index| (index, Policy::EMPTY)));
        let first = slots.take(&name("a")).unwrap();
        assert_eq!(
            first,
            Slot {
                index: FIRST_SLOT,
                generation: 1,
                has_control: false,
            }
        );
        slots.release(&name("a"));
        let mut last = None;
        for i in 0.. {
            match slots.take(&name(&format!("p{i}"))) {
                Some(slot) => last = Some(slot),
                None => break,
            }
        }
        assert_eq!(
            last,
            Some(Slot {
                index: FIRST_SLOT,
                generation: 2,
                has_control: false,
            })
        );
        assert_eq!(slots.iter().count(), (SLOTS - FIRST_SLOT) as usize);
    }

    #[test]
    fn reading_back_keeps_names_and_generations() {
        let mut policy = Policy::EMPTY;
        policy.name[..3].copy_from_slice(b"abc");
        policy.generation = 7;
        policy.control_below = 1;
        let twin = policy;
        let slots = Slots::read([(1, Policy::EMPTY), (2, policy), (3, twin)].into_iter());
        assert_eq!(
            slots.get(&name("abc")),
            Some(Slot {
                index: 2,
                generation: 7,
                has_control: true,
            })
        );
        assert_eq!(slots.free.len(), 2);
    }

    #[test]
    fn slot_has_arms_of_its_policy() {
        let mut slots = Slots::read((FIRST_SLOT..SLOTS).map(|index| (index, Policy::EMPTY)));
        let arms = |slot: Slot| slot.arms().collect::<Vec<_>>();
        let slot = slots.take(&name("a")).unwrap();
        assert_eq!(arms(slot), [arm::treated(FIRST_SLOT)]);
        let slot = slots.set_control(&name("a"), true).unwrap();
        assert_eq!(arms(slot), arm::of(FIRST_SLOT));
        assert_eq!(slots.get(&name("a")), Some(slot));
        assert_eq!(slots.set_control(&name("b"), true), None);
    }
}
