//! The desired state: functions from one state to the next, and to the content of the maps. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rto_agent_common::{EntryValue, MAX_POLICIES};
use rto_agent_core::{
    config::Config,
    policy::{
        Adjustment, Adjustments, Cidr, Entry, HostFacts, MAX_ENTRIES_LIMIT, Policy, PolicyName,
        PolicySet, Settings,
        compile::{
            Compiled, EffectiveSetting, PolicyError, check_is_counted, check_prefix_width, compile,
            compile_adjusted,
        },
        plan::MapState,
    },
    printable::counted,
    progress::stepping,
};

use super::{
    error::EngineError,
    runtime::{Override, Removal, RuntimeEntries, RuntimeEntry},
};

/// The files, and the host they were checked for.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// Their content.
    pub config: Config,
    /// [`rto_agent_core::config::Files::fingerprint`] of these files.
    pub fingerprint: u64,
    /// The host they were checked for.
    pub host: HostFacts,
}

/// The desired state, by source. Cheap to clone: a change is tried on a copy.
#[derive(Clone, Debug)]
pub struct Desired {
    /// The last good configuration.
    pub files: Arc<LoadedConfig>,
    /// Entries added and removed at run time.
    pub runtime: RuntimeEntries,
    /// The host that values are computed for.
    pub host: HostFacts,
    /// The daemon's decisions about policies beyond their settings.
    pub adjustments: Arc<Adjustments>,
}

impl Desired {
    /// The files, overlaid with the runtime entries.
    #[must_use]
    pub fn new(files: Arc<LoadedConfig>, runtime: RuntimeEntries, host: HostFacts) -> Self {
        let mut runtime = runtime;
        runtime.adopt_settings(&files.config.set);
        Self {
            files,
            runtime,
            host,
            adjustments: Arc::default(),
        }
    }

    /// Replaces the files. A policy that the new files lack is kept for a while, without entries.
    #[must_use]
    pub fn with_files(&self, files: Arc<LoadedConfig>, now_ms: u64) -> Self {
        let mut runtime = self.runtime.clone();
        runtime.keep_retired(&self.files.config.set, &files.config.set, now_ms);
        Self {
            adjustments: self.adjustments.clone(),
            ..Self::new(files, runtime, self.host)
        }
    }

    /// Settings of all policies. The files override runtime policies.
    #[must_use]
    pub fn policies(&self) -> BTreeMap<&PolicyName, &Settings> {
        let of_files = self.files.config.set.policies.iter();
        let of_files = of_files.map(|(name, policy)| (name, &policy.settings));
        self.runtime.policies.iter().chain(of_files).collect()
    }

    /// Why a request for this policy is refused: the files do not have it.
    pub(super) fn unknown_policy(&self, name: &PolicyName) -> String {
        let policies = self.files.config.set.policies.keys();
        let known: Vec<&str> = policies.map(PolicyName::as_str).collect();
        if known.is_empty() {
            format!(
                "unknown policy {name}: the configuration has no policies; give settings instead"
            )
        } else {
            format!(
                "unknown policy {name}; the configuration has: {}",
                known.join(", ")
            )
        }
    }

    /// Replaces the decisions about policies.
    #[must_use]
    pub fn with_adjustments(&self, adjustments: Adjustments) -> Self {
        Self {
            adjustments: Arc::new(adjustments),
            ..self.clone()
        }
    }

    /// Replaces the host's settings.
    #[must_use]
    pub fn with_host(&self, host: HostFacts) -> Self {
        Self {
            host,
            ..self.clone()
        }
    }

    /// Adds runtime entries of one policy.
    #[must_use]
    pub fn with_entries(&self, cidrs: &[Cidr], entry: &RuntimeEntry, settings: &Settings) -> Self {
        let mut next = self.clone();
        next.runtime.add(cidrs, entry, settings);
        next
    }

    /// Ends what overrides the files' entries of these CIDRs, and says what it was.
    #[must_use]
    pub fn without_overrides(&self, cidrs: &[Cidr]) -> (Self, Vec<Option<Override>>) {
        let mut next = self.clone();
        let ended = stepping(cidrs).map(|cidr| next.runtime.stop_overriding(cidr));
        let ended = ended.collect();
        next.runtime.forget_unused();
        (next, ended)
    }

    /// Removes entries, and says what happened to each: a runtime entry is removed, an entry of the
    /// files is masked, or there is neither (`None`).
    #[must_use]
    pub fn without_entries(&self, cidrs: &[Cidr]) -> (Self, Vec<Option<Removal>>) {
        let mut next = self.clone();
        let files = &self.files.config.set;
        let removals = stepping(cidrs).map(|cidr| next.runtime.remove(cidr, files));
        let removals = removals.collect();
        next.runtime.forget_unused();
        (next, removals)
    }

    /// Unmasks entries of the files, and returns the first CIDR that was not masked.
    #[must_use]
    pub fn with_unmasked(&self, cidrs: &[Cidr]) -> (Self, Option<Cidr>) {
        let mut next = self.clone();
        let mut unmask = |cidr: &&Cidr| !next.runtime.unmask(cidr);
        let not_masked = cidrs.iter().find(&mut unmask).copied();
        (next, not_masked)
    }

    /// Removes expired entries; `None` if no entry has expired.
    #[must_use]
    pub fn expired(&self, now_ms: u64) -> Option<Self> {
        if self.runtime.next_expiry_ms().is_none_or(|end| end > now_ms) {
            return None;
        }
        let mut next = self.clone();
        next.runtime.expire(now_ms);
        Some(next)
    }

    /// Computes what the kernel should hold. Policies that were compiled when the files were read
    /// are not compiled again.
    ///
    /// The files take precedence. A runtime entry is checked like an entry of the files. It is left
    /// out while its policy or its prefix fails a check, or while there is no room: policies are
    /// taken in the order of their names (policies without entries last), entries in the order of
    /// their addresses.
    ///
    /// # Errors
    ///
    /// If this host does not support a policy of the files.
    pub fn resolve(self) -> Result<Resolved, EngineError> {
        let files = &self.files.config;
        let mut set = files.set.clone();
        for cidr in stepping(&self.runtime.masked) {
            set.entries.remove(cidr);
        }
        let (mut policies, mut conflicting) = (BTreeMap::new(), BTreeSet::new());
        let mut errors = Vec::new();
        for (name, policy) in &set.policies {
            match self.compile(name, policy, &mut conflicting) {
                Ok(compiled) => drop(policies.insert(name.clone(), compiled)),
                Err(all) => errors.extend(all),
            }
        }
        if !errors.is_empty() {
            return Err(EngineError::Policies(errors));
        }
        let used: BTreeSet<_> = self.runtime.entries.values().map(|e| &e.policy).collect();
        let runtime = &self.runtime.policies;
        let (mut wanted, unused): (Vec<_>, Vec<_>) =
            runtime.iter().partition(|(n, _)| used.contains(n));
        wanted.extend(unused);
        let mut refused: BTreeMap<&PolicyName, Arc<str>> = BTreeMap::new();
        for (name, settings) in wanted {
            if set.policies.contains_key(name) {
                continue;
            }
            let policy = Policy::from(settings.clone());
            match self.compile(name, &policy, &mut conflicting) {
                _ if set.policies.len() >= MAX_POLICIES as usize => {
                    let full = format!("the limit is {MAX_POLICIES} policies");
                    refused.insert(name, full.into());
                }
                Ok(compiled) => {
                    policies.insert(name.clone(), compiled);
                    set.policies.insert(name.clone(), policy);
                }
                Err(errors) => {
                    let why = EngineError::Policies(errors).to_string();
                    refused.insert(name, why.into());
                }
            }
        }
        let (mut left_out, mut maps) = (BTreeMap::new(), MapState::default());
        for (cidr, entry) in stepping(&self.runtime.entries) {
            let checked = match (refused.get(&entry.policy), set.policies.get(&entry.policy)) {
                (None, Some(policy)) => {
                    check_prefix_width(cidr, &policy.settings).map_err(|e| e.to_string().into())
                }
                (refused, _) => Err(refused.cloned().unwrap_or_default()),
            };
            let has_room =
                || set.entries.len() < MAX_ENTRIES_LIMIT as usize || set.entries.contains_key(cidr);
            match checked {
                Ok(()) if has_room() => {
                    maps.set_end(*cidr, entry.expires_ms.map_or(0, EntryValue::end_at));
                    let entry = Entry {
                        policy: entry.policy.clone(),
                        location: None,
                    };
                    set.entries.insert(*cidr, entry);
                }
                Ok(()) => {
                    let full = format!("the limit is {MAX_ENTRIES_LIMIT} entries");
                    left_out.insert(*cidr, full.into());
                }
                Err(reason) => drop(left_out.insert(*cidr, reason)),
            }
        }
        let kernel = policies.iter();
        let kernel = kernel.map(|(name, compiled)| (name.clone(), compiled.kernel));
        maps.policies = kernel.collect();
        maps.entries = set.entries.clone();
        Ok(Resolved {
            desired: self,
            set,
            policies,
            conflicting,
            left_out,
            maps,
        })
    }

    /// The values of a decision that the settings do not allow are left out: no decision blocks a
    /// requested change.
    fn compile(
        &self,
        name: &PolicyName,
        policy: &Policy,
        conflicting: &mut BTreeSet<PolicyName>,
    ) -> Result<Arc<Compiled>, Vec<PolicyError>> {
        let files = &self.files;
        let known = (files.host == self.host).then_some(&files.config.compiled);
        let compiled = match (
            self.adjustments.get(name),
            known.and_then(|known| known.get(name)),
        ) {
            (None, Some(compiled)) => return Ok(compiled.clone()),
            (None, None) => compile(name, &policy.settings, &self.host),
            (Some(adjustment), _) => {
                let with = |decided: &Adjustment| {
                    compile_adjusted(name, &policy.settings, decided, &self.host)
                };
                with(adjustment).or_else(|_| {
                    conflicting.insert(name.clone());
                    with(&adjustment.without_values())
                })
            }
        };
        let counted = || match files.config.agent.statistics {
            true => Ok(()),
            false => check_is_counted(&policy.settings),
        };
        let checked =
            compiled.and_then(|compiled| counted().map(|()| compiled).map_err(|e| vec![e]));
        checked.map(Arc::new).map_err(|errors| {
            let errors = errors.into_iter().map(|error| PolicyError {
                policy: name.clone(),
                location: policy.location.clone(),
                error,
            });
            errors.collect()
        })
    }
}

/// A desired state, resolved for its host.
#[derive(Debug)]
pub struct Resolved {
    /// The state it was resolved from.
    pub desired: Desired,
    /// Policies and entries, from all sources.
    pub set: PolicySet,
    /// The policies as the kernel holds them.
    pub policies: BTreeMap<PolicyName, Arc<Compiled>>,
    /// Policies whose settings do not allow the values that the daemon has decided.
    pub conflicting: BTreeSet<PolicyName>,
    /// Runtime entries that are not in `set`, with the reasons.
    pub left_out: BTreeMap<Cidr, Arc<str>>,
    /// What the maps should hold.
    pub maps: MapState,
}

impl Resolved {
    /// The effective value of each setting of a policy.
    #[must_use]
    pub fn effects(&self, policy: &PolicyName) -> &[EffectiveSetting] {
        self.policies.get(policy).map_or(&[], |p| &p.effects)
    }

    /// The last good configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.desired.files.config
    }

    /// Why a change would leave out a runtime entry that it adds, or that was in force before.
    pub(super) fn leaves_out(&self, before: &Self) -> Option<String> {
        let (now, former) = (&self.desired.runtime, &before.desired.runtime);
        let is_new =
            |cidr: &Cidr| now.get(cidr) != former.get(cidr) || !before.left_out.contains_key(cidr);
        let mut left_out = self.left_out.iter();
        let (_, reason) = left_out.find(|(cidr, _)| is_new(cidr))?;
        Some(reason.to_string())
    }

    /// The runtime entries that are left out, a line for each reason.
    #[must_use]
    pub fn left_out_text(&self) -> Option<String> {
        let mut reasons: BTreeMap<&str, Vec<&Cidr>> = BTreeMap::new();
        for (cidr, reason) in &self.left_out {
            reasons.entry(reason).or_default().push(cidr);
        }
        let lines = reasons.iter().map(|(reason, cidrs)| {
            let count = counted(cidrs.len(), "runtime entry is", "runtime entries are");
            let more = if cidrs.len() > 1 { ", ..." } else { "" };
            format!("{count} left out ({}{more}): {reason}", cidrs[0])
        });
        let lines: Vec<_> = lines.collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// Decisions that are not applied, in words.
    pub(super) fn conflicting_text(&self) -> Option<String> {
        let names: Vec<_> = self.conflicting.iter().map(PolicyName::as_str).collect();
        (!names.is_empty()).then(|| {
            format!(
                "the learnt values conflict with the settings of {} and are not applied",
                names.join(", ")
            )
        })
    }

    /// The number of entries to make room for.
    pub(super) fn room(&self) -> u32 {
        rto_agent_kernel::datapath::room_for(
            self.set.entries.len(),
            self.config().agent.max_entries,
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{path::Path, time::Duration};

    use rto_agent_core::{testing::HOST, wire::types::Caller};

    use super::*;

    /// Files with this text.
    pub(in crate::engine) fn files(text: &str) -> Arc<LoadedConfig> {
        let config = Config::from_text(Path::new("/config.toml"), text.to_owned(), &HOST);
        Arc::new(LoadedConfig {
            config: config.unwrap(),
            fingerprint: 0,
            host: HOST,
        })
    }

    pub(in crate::engine) const NEAR: &str =
        "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.0.0/16\", \"fd00:1::/48\"]\n";

    pub(in crate::engine) fn desired(text: &str) -> Desired {
        Desired::new(files(text), RuntimeEntries::default(), HOST)
    }

    pub(in crate::engine) fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    pub(in crate::engine) fn entry(policy: &str, expires_ms: Option<u64>) -> RuntimeEntry {
        RuntimeEntry {
            policy: policy.parse().unwrap(),
            by: Caller { uid: 0, pid: 1 },
            expires_ms,
        }
    }

    pub(in crate::engine) fn settings(ms: u64) -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(ms).into()),
            ..Settings::default()
        }
    }

    #[test]
    fn policies_compiled_with_files_are_reused() {
        let desired = desired(NEAR);
        let near: PolicyName = "near".parse().unwrap();
        let resolved = desired.clone().resolve().unwrap();
        let of_files = &desired.files.config.compiled[&near];
        assert!(Arc::ptr_eq(&resolved.policies[&near], of_files));
        // For a host with another HZ they are compiled again.
        let host = HostFacts { hz: 1000, ..HOST };
        let resolved = desired.with_host(host).resolve().unwrap();
        assert!(!Arc::ptr_eq(&resolved.policies[&near], of_files));
        assert_eq!(resolved.maps.policies[&near].initial_rto_jiffies, 100);
    }

    #[test]
    fn reversed_change_restores_maps() {
        let before = desired(NEAR);
        let maps = |desired: &Desired| desired.clone().resolve().unwrap().maps;
        let own = cidr("10.2.0.0/16");
        let added = before.with_entries(&[own], &entry("own", Some(9)), &settings(50));
        assert_eq!(maps(&added).entries.len(), 3);
        assert_eq!(maps(&before).entries.len(), 2);
        let (removed, removals) = added.without_entries(&[own]);
        assert_eq!(removals, [Some(Removal::Entry)]);
        assert_eq!(maps(&removed), maps(&before));
        assert!(added.expired(8).is_none());
        assert_eq!(maps(&added.expired(9).unwrap()), maps(&before));
        let of_files = [cidr("10.1.0.0/16")];
        let (masked, removals) = before.without_entries(&of_files);
        assert_eq!(removals, [Some(Removal::Masked)]);
        assert_eq!(maps(&masked).entries.len(), 1);
        assert_eq!(masked.without_entries(&of_files).1, [None]);
        let (unmasked, not_masked) = masked.with_unmasked(&of_files);
        assert_eq!((maps(&unmasked), not_masked), (maps(&before), None));
        assert_eq!(before.with_unmasked(&of_files).1, Some(of_files[0]));
        assert_eq!(before.without_entries(&[own]).1, [None]);
    }

    #[test]
    fn changed_files_change_settings_of_runtime_entries() {
        let before = desired(NEAR);
        let own = cidr("10.2.0.0/16");
        let added = before.with_entries(&[own], &entry("near", None), &settings(100));
        let next = added.with_files(files(&NEAR.replace("100ms", "200ms")), 0);
        let near: PolicyName = "near".parse().unwrap();
        assert_eq!(next.runtime.policy(&near), Some(&settings(200)));
        // The policy outlives its file, with its last settings.
        let alone = next.with_files(files(""), 0);
        let resolved = alone.resolve().unwrap();
        assert_eq!(resolved.set.policies[&near].settings, settings(200));
        assert_eq!(resolved.maps.entries.len(), 1);
    }

    #[test]
    fn unsupported_policy_is_named() {
        let host = HostFacts {
            has_rto_max: false,
            shapes_syns: true,
            ..HOST
        };
        let settings = Settings {
            rto_max: Some(Duration::from_secs(10)),
            ..settings(100)
        };
        let before = Desired::new(files(""), RuntimeEntries::default(), host);
        let next = before.with_entries(&[cidr("10.2.0.0/16")], &entry("own", None), &settings);
        let next = next.resolve().unwrap();
        let why = next.leaves_out(&before.resolve().unwrap()).unwrap();
        assert!(why.contains("policy own: rto_max"), "{why}");
        // An entry that is already left out blocks no other change.
        assert_eq!(next.leaves_out(&next), None);
    }

    #[test]
    fn runtime_entries_are_checked_like_files_at_each_change() {
        let auto = "[policy.near]\ninitial_rto = \"300ms\"\nguard = \"on\"\n";
        let counts = desired(auto).with_entries(
            &[cidr("10.2.0.0/16")],
            &entry("own", None),
            &Settings {
                guard: Some(rto_agent_core::policy::Guard::On),
                ..settings(100)
            },
        );
        let counts =
            counts.with_entries(&[cidr("8.0.0.0/6")], &entry("near", None), &settings(300));
        let in_force = counts.clone().resolve().unwrap();
        assert!(in_force.left_out.is_empty() && in_force.left_out_text().is_none());
        // The later files have statistics off, and a timer that is too short for the wide prefix.
        let later = "[agent]\nstatistics = false\n[policy.near]\ninitial_rto = \"100ms\"\n";
        let later = counts.with_files(files(later), 0).resolve().unwrap();
        assert!(later.set.entries.is_empty());
        let text = later.left_out_text().unwrap();
        for why in [
            "1 runtime entry is left out (10.2.0.0/16): policy own: guard",
            "too short for 8.0.0.0/6",
        ] {
            assert!(text.contains(why), "{text}");
        }
        // The entries return as soon as the files allow them.
        let back = later.desired.with_files(files(auto), 0).resolve().unwrap();
        assert_eq!((back.set.entries.len(), back.left_out.len()), (2, 0));
    }

    #[test]
    fn runtime_policies_yield_to_files_without_room() {
        let text: String = (0..MAX_POLICIES - 1)
            .map(|n| {
                format!(
                    "[policy.p{n}]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.{}.{}\"]\n",
                    n / 256,
                    n % 256
                )
            })
            .collect();
        let mut desired = desired(&text.replacen("[policy.p0]", "[policy.gone]", 1));
        for name in ["b", "a"] {
            let own = format!("10.2.0.{}", name.len() + usize::from(name == "a"));
            desired = desired.with_entries(&[cidr(&own)], &entry(name, None), &settings(100));
        }
        let full = desired.with_files(files(&text), 0).resolve().unwrap();
        assert_eq!(full.set.policies.len(), MAX_POLICIES as usize);
        let left: Vec<_> = full.left_out.keys().map(ToString::to_string).collect();
        assert_eq!(
            left,
            ["10.2.0.1/32"],
            "the policies' names decide: a before b, and gone, without an entry, last"
        );
        assert_eq!(full.leaves_out(&full), None);
    }
}
