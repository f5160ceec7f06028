//! The difference between two states of the kernel's maps, ordered so that each step is safe.

use std::collections::{BTreeMap, BTreeSet};

use rto_agent_common::Policy;
use serde::{Deserialize, Serialize};

use super::{Cidr, Entries, PolicyName};

/// What the maps hold, or should hold. Policies have generation 0 here: the datapath assigns
/// generations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapState {
    /// Policies in the kernel's form.
    pub policies: BTreeMap<PolicyName, Policy>,
    /// Entries and their policies.
    pub entries: Entries,
    /// Expiry of entries ([`rto_agent_common::EntryValue::end`]), after which the programs ignore
    /// them.
    pub ends: BTreeMap<Cidr, u32>,
}

impl MapState {
    /// The expiry of an entry; 0: none.
    pub fn end_of(&self, cidr: &Cidr) -> u32 {
        self.ends.get(cidr).copied().unwrap_or(0)
    }

    /// Sets the end of an entry; 0: none.
    pub fn set_end(&mut self, cidr: Cidr, end: u32) {
        if end == 0 {
            self.ends.remove(&cidr);
        } else {
            self.ends.insert(cidr, end);
        }
    }
}

/// Steps, from top to bottom. At each step every entry points to an existing policy, and an address
/// with a policy both before and after has one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// New and changed policies.
    pub policies_write: Vec<(PolicyName, Policy)>,
    /// New entries, and entries that point to another policy.
    pub entries_write: Vec<(Cidr, PolicyName)>,
    /// How many of `entries_write` exist and point to another policy.
    pub entries_repointed: usize,
    /// Entries of which only the expiry changes.
    pub entries_end: Vec<(Cidr, PolicyName)>,
    /// Entries to remove.
    pub entries_remove: Vec<Cidr>,
    /// Policies to remove, after the last entry that points to them.
    pub policies_remove: Vec<PolicyName>,
}

/// Numbers of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ChangeSummary {
    /// Entries added.
    pub added: usize,
    /// Entries that point at another policy, or whose policy changed.
    pub changed: usize,
    /// Entries removed.
    pub removed: usize,
    /// Policies added.
    pub policies_added: usize,
    /// Policies whose settings changed.
    pub policies_changed: usize,
    /// Policies removed.
    pub policies_removed: usize,
}

impl Plan {
    /// The plan that turns `current` into `desired`.
    pub fn between(current: &MapState, desired: &MapState) -> Self {
        let differs =
            |name: &PolicyName, policy: &Policy| current.policies.get(name) != Some(policy);
        let policies_write = desired.policies.iter().filter(|(n, p)| differs(n, p));
        let unused = |name: &&PolicyName| !desired.policies.contains_key(*name);
        let mut plan = Self {
            policies_write: policies_write.map(|(n, p)| (n.clone(), *p)).collect(),
            policies_remove: current.policies.keys().filter(unused).cloned().collect(),
            ..Self::default()
        };
        let diff = |cidr, before: Option<&PolicyName>, after: Option<&PolicyName>| match after {
            Some(name) => {
                plan.entries_repointed += usize::from(before.is_some());
                plan.entries_write.push((cidr, name.clone()));
            }
            None => plan.entries_remove.push(cidr),
        };
        current.entries.differences(&desired.entries, diff);
        let with_end = current.ends.keys().chain(desired.ends.keys());
        plan.entries_end = with_end
            .filter(|cidr| current.end_of(cidr) != desired.end_of(cidr))
            .filter_map(|cidr| {
                let before = current.entries.get(cidr)?.policy;
                let after = desired.entries.get(cidr)?.policy;
                (before == after).then(|| (*cidr, after.clone()))
            })
            .collect();
        plan
    }

    /// The first `limit` changes of `before` in words, and the number of further ones: "added
    /// 10.0.0.0/24 (policy near, initial_rto 60ms), 10.1.0.0/24 (policy near), removed 10.2.0.0/24".
    /// `settings`: a policy's settings in words.
    pub fn describe(
        &self,
        limit: usize,
        before: &MapState,
        settings: impl Fn(&PolicyName) -> String,
    ) -> String {
        // Settings are named once.
        let mut named = BTreeSet::new();
        let mut with_settings = |name: &PolicyName, of: &str| {
            let settings = match named.insert(name.clone()) {
                true => settings(name),
                false => String::new(),
            };
            let parts = [of, &settings].into_iter().filter(|part| !part.is_empty());
            match parts.collect::<Vec<_>>().join(", ") {
                none if none.is_empty() => none,
                parts => format!(" ({parts})"),
            }
        };
        let mut all = Vec::new();
        for (name, _) in self.policies_write.iter().take(limit) {
            let verb = match before.policies.contains_key(name) {
                true => "changed",
                false => "added",
            };
            all.push((verb, format!("policy {name}{}", with_settings(name, ""))));
        }
        for (cidr, name) in self.entries_write.iter().take(limit - all.len()) {
            let verb = match before.entries.contains_key(cidr) {
                true => "changed",
                false => "added",
            };
            let of = with_settings(name, &format!("policy {name}"));
            all.push((verb, format!("{cidr}{of}")));
        }
        let removed = self.entries_remove.iter().map(ToString::to_string);
        let freed = self.policies_remove.iter();
        let removed = removed.chain(freed.map(|name| format!("policy {name}")));
        all.extend(
            removed
                .take(limit - all.len())
                .map(|text| ("removed", text)),
        );
        let mut text = String::new();
        let mut last = "";
        for (i, (verb, what)) in all.iter().enumerate() {
            text.push_str(if i == 0 { "" } else { ", " });
            if *verb != last {
                text.push_str(verb);
                text.push(' ');
            }
            text.push_str(what);
            last = verb;
        }
        let count = self.policies_write.len()
            + self.entries_write.len()
            + self.entries_remove.len()
            + self.policies_remove.len();
        if count > limit {
            text.push_str(&format!(" and {} more", count - limit));
        }
        text
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl ChangeSummary {
    /// The difference between two states in the user's terms: an entry whose policy has other
    /// settings has changed.
    pub fn between(before: &MapState, after: &MapState) -> Self {
        Self::of(&Plan::between(before, after), before, after)
    }

    /// As [`Self::between`], given the plan from `before` to `after`.
    pub fn of(plan: &Plan, before: &MapState, after: &MapState) -> Self {
        let rewritten: BTreeSet<&PolicyName> =
            plan.policies_write.iter().map(|(name, _)| name).collect();
        let new_policy = |name: &PolicyName| !before.policies.contains_key(name);
        let policies_added = rewritten.iter().filter(|name| new_policy(name)).count();
        // No existing entry points to a new policy.
        let resettled = if policies_added == rewritten.len() {
            0
        } else {
            let written: BTreeSet<&Cidr> = plan.entries_write.iter().map(|(c, _)| c).collect();
            let entries = after.entries.iter();
            let of_them = entries.filter(|(_, entry)| rewritten.contains(entry.policy));
            of_them.filter(|(cidr, _)| !written.contains(cidr)).count()
        };
        Self {
            added: plan.entries_write.len() - plan.entries_repointed,
            changed: plan.entries_repointed + resettled,
            removed: plan.entries_remove.len(),
            policies_added,
            policies_changed: rewritten.len() - policies_added,
            policies_removed: plan.policies_remove.len(),
        }
    }
}

impl std::fmt::Display for ChangeSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            added,
            changed,
            removed,
            ..
        } = self;
        if (added, changed, removed) == (&0, &0, &0) {
            return f.write_str("nothing changed");
        }
        write!(f, "{added} added, {changed} changed, {removed} removed")
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::policy::Entry;

    fn entry(name: &PolicyName) -> Entry {
        Entry {
            policy: name.clone(),
            location: None,
        }
    }

    /// Every prefix of [`image`] contains one of these.
    fn addresses() -> impl Iterator<Item = IpAddr> {
        (0..=u8::MAX).map(|first| IpAddr::from([first, 255, 0, 1]))
    }

    /// Applies a plan to an image and checks each step: entries must point to existing policies,
    /// and addresses with a policy both before and after must have one.
    fn apply(image: &MapState, plan: &Plan, desired: &MapState) -> MapState {
        let mut now = image.clone();
        let has = |image: &MapState, address| !image.entries.covering(address).is_empty();
        let kept: Vec<IpAddr> = addresses()
            .filter(|address| has(image, *address) && has(desired, *address))
            .collect();
        let sound = |now: &MapState| {
            assert!(
                now.entries
                    .iter()
                    .all(|(_, entry)| now.policies.contains_key(entry.policy))
            );
            assert!(kept.iter().all(|address| has(now, *address)));
        };
        for (name, policy) in &plan.policies_write {
            now.policies.insert(name.clone(), *policy);
        }
        for (cidr, name) in plan.entries_write.iter().chain(&plan.entries_end) {
            now.entries.insert(*cidr, entry(name));
            now.set_end(*cidr, desired.end_of(cidr));
            sound(&now);
        }
        for cidr in &plan.entries_remove {
            assert!(now.entries.remove(cidr));
            now.set_end(*cidr, 0);
            sound(&now);
        }
        for name in &plan.policies_remove {
            assert!(now.policies.remove(name).is_some());
            sound(&now);
        }
        now
    }

    #[test]
    fn change_summary_is_shown() {
        let text = |added, changed, removed| {
            let summary = ChangeSummary {
                added,
                changed,
                removed,
                ..ChangeSummary::default()
            };
            summary.to_string()
        };
        assert_eq!(text(0, 0, 0), "nothing changed");
        assert_eq!(text(0, 2, 0), "0 added, 2 changed, 0 removed");
    }

    prop_compose! {
        fn image()(
            settings in prop::collection::btree_map(0u8..6, 1u32..4, 1..6),
            entries in prop::collection::btree_map((0u8..8, 8u8..12), any::<prop::sample::Index>(), 0..12),
            ends in prop::collection::vec(0u32..3, 12),
        ) -> MapState {
            let names: Vec<PolicyName> =
                settings.keys().map(|n| format!("p{n}").parse().unwrap()).collect();
            let policies = names
                .iter()
                .zip(settings.values())
                .map(|(name, jiffies)| {
                    (name.clone(), Policy { initial_rto_jiffies: *jiffies, ..Policy::EMPTY })
                })
                .collect();
            let entries: Entries = entries
                .into_iter()
                .map(|((net, prefix), index)| {
                    let cidr = format!("{}.0.0.0/{prefix}", net * 16).parse().unwrap();
                    (cidr, entry(index.get(&names)))
                })
                .collect();
            let ends = entries.keys().zip(ends).filter(|(_, end)| *end != 0).collect();
            MapState { policies, entries, ends }
        }
    }

    proptest! {
        #[test]
        fn first_changes_and_number_of_others_are_described(
            current in image(),
            desired in image(),
        ) {
            let plan = Plan::between(&current, &desired);
            let described = |limit| plan.describe(limit, &current, |_| String::new());
            let all = described(usize::MAX);
            let changes: Vec<&str> = all.split(", ").filter(|change| !change.is_empty()).collect();
            for limit in 0..=changes.len() {
                let first = changes[..limit].join(", ");
                let more = match changes.len() - limit {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                prop_assert_eq!(described(limit), first + &more);
            }
            let new = desired.policies.keys().filter(|name| !current.policies.contains_key(*name));
            for name in new {
                let change = format!("policy {name}");
                prop_assert!(changes.iter().any(|text| text.ends_with(&change)), "{}", all);
            }
        }

        #[test]
        fn applied_plan_gives_desired_state(current in image(), desired in image()) {
            let plan = Plan::between(&current, &desired);
            prop_assert_eq!(apply(&current, &plan, &desired), desired.clone());
            prop_assert!(Plan::between(&desired, &desired).is_empty());
            prop_assert_eq!(plan.is_empty(), current == desired);
            // Entries that are unchanged are not written.
            for (cidr, name) in &plan.entries_write {
                prop_assert_ne!(current.entries.get(cidr).map(|e| e.policy), Some(name));
            }
            let summary = ChangeSummary::between(&current, &desired);
            prop_assert_eq!(
                current.entries.len() + summary.added - summary.removed,
                desired.entries.len()
            );
        }

        /// Counts entries by their former and current policies.
        #[test]
        fn summary_counts_entries_and_policies(current in image(), desired in image()) {
            let both = desired.entries.iter().filter_map(|(cidr, after)| {
                Some((current.entries.get(&cidr)?.policy, after.policy))
            });
            let changed = both.filter(|(before, after)| {
                before != after || current.policies[*before] != desired.policies[*after]
            });
            let is_in = |state: &MapState, cidr: &Cidr| state.entries.contains_key(cidr);
            let rewritten = desired.policies.iter().filter_map(|(name, after)| {
                Some((current.policies.get(name)?, after))
            });
            let without = |one: &MapState, other: &MapState| {
                one.policies.keys().filter(|name| !other.policies.contains_key(*name)).count()
            };
            let expected = ChangeSummary {
                added: desired.entries.keys().filter(|cidr| !is_in(&current, cidr)).count(),
                changed: changed.count(),
                removed: current.entries.keys().filter(|cidr| !is_in(&desired, cidr)).count(),
                policies_added: without(&desired, &current),
                policies_changed: rewritten.filter(|(before, after)| before != after).count(),
                policies_removed: without(&current, &desired),
            };
            prop_assert_eq!(ChangeSummary::between(&current, &desired), expected);
        }
    }
}
