//! Runtime entries: the effect of `rto-agent add` and `remove` since boot. Pure.
//!
//! Expiry uses CLOCK_BOOTTIME, so that setting the wall clock neither shortens nor extends a
//! `--ttl`.

use std::collections::{BTreeMap, BTreeSet};

use rto_agent_core::{
    policy::{Cidr, PolicyName, PolicySet, Settings, entries::FamilyCounts},
    progress::stepping,
    wire::types::Caller,
};
use serde::{Deserialize, Serialize};

/// Entries added at run time, and masked entries of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct RuntimeEntries {
    pub(super) entries: BTreeMap<Cidr, RuntimeEntry>,
    /// Last known settings of every policy that `entries` or `retired` names: they outlive the
    /// policy's file.
    pub(super) policies: BTreeMap<PolicyName, Settings>,
    /// Policies that the files no longer have, and until when they are kept (CLOCK_BOOTTIME,
    /// milliseconds).
    #[serde(rename = "departed")]
    pub(super) retired: BTreeMap<PolicyName, u64>,
    /// Entries of the files that are masked.
    pub(super) masked: BTreeSet<Cidr>,
}

/// [`RuntimeEntries`] as they were saved.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    entries: BTreeMap<Cidr, RuntimeEntry>,
    policies: BTreeMap<PolicyName, Settings>,
    #[serde(rename = "departed")]
    retired: BTreeMap<PolicyName, u64>,
    masked: BTreeSet<Cidr>,
}

impl TryFrom<Unchecked> for RuntimeEntries {
    type Error = String;

    fn try_from(saved: Unchecked) -> Result<Self, String> {
        let Unchecked {
            mut entries,
            policies,
            retired,
            masked,
        } = saved;
        for (cidr, entry) in &mut entries {
            let Some((name, _)) = policies.get_key_value(&entry.policy) else {
                return Err(format!("no settings for policy {} of {cidr}", entry.policy));
            };
            // Share one name between all entries of a policy.
            entry.policy = name.clone();
        }
        Ok(Self {
            entries,
            policies,
            retired,
            masked,
        })
    }
}

/// One entry added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeEntry {
    /// Its policy.
    pub policy: PolicyName,
    /// Who added it.
    pub by: Caller,
    /// When it expires, milliseconds of CLOCK_BOOTTIME; `None`: at reboot.
    pub expires_ms: Option<u64>,
}

impl RuntimeEntry {
    fn is_over(&self, now_ms: u64) -> bool {
        self.expires_ms.is_some_and(|end| end <= now_ms)
    }
}

/// What [`RuntimeEntries::remove`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// A runtime entry was removed.
    Entry,
    /// An entry of the files was masked, and a runtime entry that overrode it removed.
    Masked,
}

/// What [`RuntimeEntries::stop_overriding`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Override {
    /// A runtime entry.
    Entry,
    /// A mask.
    Mask,
}

/// How long a policy that left the files is kept, with its counters, learnt values and proven harm,
/// in milliseconds.
const RETIRED_MS: u64 = 10 * 60 * 1000;

impl RuntimeEntries {
    /// Keeps policies that have left the files, without entries, for `RETIRED_MS`.
    pub fn keep_retired(&mut self, before: &PolicySet, now: &PolicySet, now_ms: u64) {
        self.retired
            .retain(|name, _| !now.policies.contains_key(name));
        let gone = before.policies.iter();
        for (name, policy) in gone.filter(|(name, _)| !now.policies.contains_key(*name)) {
            self.policies.insert(name.clone(), policy.settings.clone());
            self.retired.insert(name.clone(), now_ms + RETIRED_MS);
        }
        self.forget_unused();
    }

    /// Adds or replaces runtime entries of one policy.
    pub fn add(&mut self, cidrs: &[Cidr], entry: &RuntimeEntry, settings: &Settings) {
        self.policies.insert(entry.policy.clone(), settings.clone());
        for cidr in stepping(cidrs) {
            self.entries.insert(*cidr, entry.clone());
            self.masked.remove(cidr);
        }
        self.forget_unused();
    }

    /// Removes a runtime entry and masks the files' entry, so that neither is in force; `None` if
    /// neither was.
    pub fn remove(&mut self, cidr: &Cidr, files: &PolicySet) -> Option<Removal> {
        let is_removed = self.entries.remove(cidr).is_some();
        if files.entries.contains_key(cidr) && self.masked.insert(*cidr) {
            Some(Removal::Masked)
        } else {
            is_removed.then_some(Removal::Entry)
        }
    }

    /// Ends what overrides the files' entry of a CIDR.
    pub fn stop_overriding(&mut self, cidr: &Cidr) -> Option<Override> {
        if self.entries.remove(cidr).is_some() {
            Some(Override::Entry)
        } else {
            self.masked.remove(cidr).then_some(Override::Mask)
        }
    }

    /// Unmasks an entry of the files; returns whether it was masked.
    pub fn unmask(&mut self, cidr: &Cidr) -> bool {
        self.masked.remove(cidr)
    }

    /// The runtime entry for exactly this CIDR.
    #[must_use]
    pub fn get(&self, cidr: &Cidr) -> Option<&RuntimeEntry> {
        self.entries.get(cidr)
    }

    /// How many of these CIDRs have a runtime entry with another expiry.
    #[must_use]
    pub fn other_expiries(&self, cidrs: &[Cidr], expires_ms: Option<u64>) -> usize {
        let known = cidrs.iter().filter_map(|cidr| self.entries.get(cidr));
        known.filter(|e| e.expires_ms != expires_ms).count()
    }

    /// CIDRs of the files that are masked.
    #[must_use]
    pub fn masked(&self) -> &BTreeSet<Cidr> {
        &self.masked
    }

    /// The number of runtime entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The number of runtime entries, by address family.
    #[must_use]
    pub fn families(&self) -> FamilyCounts {
        let ipv4 = self.entries.keys().filter(|cidr| cidr.is_ipv4()).count();
        FamilyCounts {
            ipv4,
            ipv6: self.entries.len() - ipv4,
        }
    }

    /// Whether there is nothing to keep: no entries, masked ones, policies.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Removes expired entries and retired policies, and returns the expired CIDRs.
    pub fn expire(&mut self, now_ms: u64) -> Vec<Cidr> {
        let gone: Vec<Cidr> = self
            .entries
            .iter()
            .filter(|(_, e)| e.is_over(now_ms))
            .map(|(cidr, _)| *cidr)
            .collect();
        for cidr in &gone {
            self.entries.remove(cidr);
        }
        self.retired.retain(|_, end| *end > now_ms);
        self.forget_unused();
        gone
    }

    /// Whether the CIDR has an entry that is over, and about to be removed.
    #[must_use]
    pub fn is_over(&self, cidr: &Cidr, now_ms: u64) -> bool {
        self.get(cidr).is_some_and(|entry| entry.is_over(now_ms))
    }

    /// When the next entry or retired policy expires.
    #[must_use]
    pub fn next_expiry_ms(&self) -> Option<u64> {
        let entries = self.entries.values().filter_map(|e| e.expires_ms);
        entries.chain(self.retired.values().copied()).min()
    }

    /// The last known settings of a policy that a runtime entry names.
    #[must_use]
    pub fn policy(&self, name: &PolicyName) -> Option<&Settings> {
        self.policies.get(name)
    }

    /// Updates known policies to the files' current settings. A policy whose name is derived from
    /// its settings keeps them; if a file has other settings under that name, the runtime policy
    /// gets a longer one.
    pub fn adopt_settings(&mut self, files: &PolicySet) {
        for (name, policy) in &files.policies {
            let Some(settings) = self.policies.get_mut(name) else {
                continue;
            };
            if *settings == policy.settings {
                continue;
            }
            if !name.is_made_of(settings) {
                settings.clone_from(&policy.settings);
                continue;
            }
            let own = settings.clone();
            let other = PolicyName::for_settings(&own, |name| {
                let is_other = |known: &Settings| *known != own;
                files
                    .policies
                    .get(name)
                    .is_some_and(|p| is_other(&p.settings))
                    || self.policies.get(name).is_some_and(is_other)
            });
            let of_this = self
                .entries
                .values_mut()
                .filter(|entry| entry.policy == *name);
            of_this.for_each(|entry| entry.policy = other.clone());
            self.policies.remove(name);
            self.policies.insert(other, own);
        }
    }

    /// Forgets policies that no entry names, except retired ones.
    pub fn forget_unused(&mut self) {
        let used = self.entries.values().map(|e| &e.policy);
        let used: BTreeSet<&PolicyName> = used.chain(self.retired.keys()).collect();
        self.policies.retain(|name, _| used.contains(name));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rto_agent_core::{
        config::Config,
        policy::{Entry, Policy},
        testing::HOST,
    };

    use super::*;
    use crate::engine::desired::{
        Desired, LoadedConfig,
        tests::{cidr, entry, settings},
    };

    /// The policies and entries in force with these runtime entries.
    fn overlay(runtime: &RuntimeEntries, set: PolicySet) -> PolicySet {
        let config = Config {
            set,
            ..Config::default()
        };
        let files = LoadedConfig {
            config,
            fingerprint: 0,
            host: HOST,
        };
        let desired = Desired::new(Arc::new(files), runtime.clone(), HOST);
        desired.resolve().unwrap().set
    }

    fn files() -> PolicySet {
        let mut set = PolicySet::default();
        let policy: PolicyName = "near".parse().unwrap();
        set.policies
            .insert(policy.clone(), Policy::from(settings(50)));
        set.entries.insert(
            cidr("10.0.0.0/8"),
            Entry {
                policy,
                location: None,
            },
        );
        set
    }

    #[test]
    fn missing_entry_is_not_removed() {
        let mut runtime = RuntimeEntries::default();
        assert_eq!(runtime.remove(&cidr("11.0.0.0/8"), &files()), None);
        assert!(runtime.masked().is_empty() && runtime.is_empty());
        assert!(!runtime.unmask(&cidr("10.0.0.0/8")));
        // Masked entries are kept as well.
        runtime.remove(&cidr("10.0.0.0/8"), &files());
        assert!(!runtime.is_empty());
        assert_eq!(runtime.len(), 0);
    }

    #[test]
    fn entries_are_counted_by_family_and_expiry() {
        let mut runtime = RuntimeEntries::default();
        let cidrs = ["10.1.0.0/16", "10.2.0.0/16", "fd00::/48"].map(cidr);
        runtime.add(&cidrs, &entry("mine", Some(7)), &settings(100));
        let FamilyCounts { ipv4, ipv6 } = runtime.families();
        assert_eq!((ipv4, ipv6, runtime.len()), (2, 1, 3));
        assert_eq!(runtime.get(&cidrs[2]).unwrap().expires_ms, Some(7));
        assert!(runtime.get(&cidr("10.3.0.0/16")).is_none());
        for (end, others) in [(Some(7), 0), (Some(8), 3), (None, 3)] {
            assert_eq!(runtime.other_expiries(&cidrs, end), others);
        }
        assert_eq!(runtime.expire(6), []);
        assert_eq!(runtime.expire(7), cidrs);
    }

    /// An attacker needs 0.2 s to find settings whose name has the same 32 bits.
    #[test]
    fn generated_name_in_file_does_not_replace_runtime_policy() {
        let own = PolicyName::for_settings(&settings(100), |_| false);
        let mut runtime = RuntimeEntries::default();
        let entry = |policy: &PolicyName| entry(policy.as_str(), None);
        runtime.add(&[cidr("10.1.0.0/16")], &entry(&own), &settings(100));
        let mut files = files();
        for same in [true, false] {
            let policy = settings(if same { 100 } else { 5 }).into();
            files.policies.insert(own.clone(), policy);
            runtime.adopt_settings(&files);
            let set = overlay(&runtime, files.clone());
            let entry = set.entries.get(&cidr("10.1.0.0/16")).unwrap();
            assert_eq!(*entry.policy == own, same);
            assert!(entry.policy.is_made_of(&settings(100)));
            assert_eq!(set.policies[entry.policy].settings, settings(100));
        }
        // A policy of the files with such a name, not derived from its settings, is followed.
        let named = "adhoc-00000000".parse::<PolicyName>().unwrap();
        runtime.add(&[cidr("10.2.0.0/16")], &entry(&named), &settings(100));
        files.policies.insert(named.clone(), settings(7).into());
        runtime.adopt_settings(&files);
        assert_eq!(runtime.policy(&named), Some(&settings(7)));
    }

    #[test]
    fn policy_that_left_files_is_kept_for_ten_minutes() {
        let near: PolicyName = "near".parse().unwrap();
        let (with, without) = (files(), PolicySet::default());
        let mut runtime = RuntimeEntries::default();
        runtime.keep_retired(&with, &without, 1000);
        let set = overlay(&runtime, without.clone());
        assert!(set.policies.contains_key(&near) && set.entries.is_empty());
        assert!(!runtime.is_empty());
        assert_eq!(runtime.next_expiry_ms(), Some(601_000));
        // Another reload does not extend the period, and the policy's return ends it.
        runtime.keep_retired(&without, &without, 2000);
        assert_eq!(runtime.next_expiry_ms(), Some(601_000));
        let mut back = runtime.clone();
        back.keep_retired(&without, &with, 3000);
        assert_eq!(back, RuntimeEntries::default());
        runtime.expire(600_999);
        assert!(
            overlay(&runtime, without.clone())
                .policies
                .contains_key(&near)
        );
        runtime.expire(601_000);
        assert!(runtime.is_empty());
    }

    #[test]
    fn expire_removes_due_entries() {
        let mut runtime = RuntimeEntries::default();
        runtime.add(
            &[cidr("10.1.0.0/16")],
            &entry("mine", Some(7)),
            &settings(100),
        );
        runtime.add(
            &[cidr("10.2.0.0/16")],
            &entry("mine", Some(9)),
            &settings(100),
        );
        runtime.add(&[cidr("10.3.0.0/16")], &entry("mine", None), &settings(100));
        assert_eq!(runtime.next_expiry_ms(), Some(7));
        assert_eq!(runtime.expire(8), vec![cidr("10.1.0.0/16")]);
        assert_eq!(runtime.next_expiry_ms(), Some(9));
        assert_eq!(runtime.len(), 2);
    }
}
