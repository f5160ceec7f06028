//! Entries added by hand: what `rto-agent add` and `remove` said since the boot.
//!
//! They live in `state_dir/manual.json` (below `/run` by default), survive a restart of the
//! daemon and end with the boot: the file names the boot it belongs to. Expiry is kept on
//! CLOCK_BOOTTIME, so that setting the wall clock neither shortens nor stretches a `--ttl`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::{
    config::atomic_file::AtomicFile,
    path_security,
    policy::{Cidr, Entry, Policy, PolicyName, PolicySet, Settings},
    problem::Problem,
    wire::types::{Caller, FamiliesView},
};

const FILE: &str = "manual.json";
const FORMAT: u32 = 1;

/// What was said by hand. Cheap to clone: changes are tried on a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manual {
    entries: BTreeMap<Cidr, ManualEntry>,
    /// Settings of every policy the entries name, as last seen: they outlive the policy's file.
    policies: BTreeMap<PolicyName, Settings>,
    /// Entries of the files that are switched off.
    masked: BTreeSet<Cidr>,
}

/// One entry added by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManualEntry {
    /// Its policy.
    pub policy: PolicyName,
    /// Who added it.
    pub by: Caller,
    /// When it ends, milliseconds of CLOCK_BOOTTIME; `None`: with the boot.
    pub expires_ms: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    boot_id: String,
    entries: BTreeMap<Cidr, ManualEntry>,
    policies: BTreeMap<PolicyName, Settings>,
    masked: BTreeSet<Cidr>,
}

/// What [`Manual::remove`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// An entry added by hand is gone.
    Entry,
    /// An entry of the files is switched off.
    Masked,
}

impl Manual {
    /// Reads what an earlier run of this boot left in `state_dir`. A file that cannot be
    /// understood is moved aside, and a warning says so. What a killed run had half written goes.
    ///
    /// # Errors
    ///
    /// If the file exists and cannot be read.
    pub fn load(state_dir: &Path) -> io::Result<(Self, Option<String>)> {
        let path = state_dir.join(FILE);
        if let Err(e) = AtomicFile::remove_stale(&path) {
            warn!("a draft of {} cannot be removed: {e}", path.display());
        }
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Self::default(), None)),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => String::new(),
            Err(e) => return Err(e),
        };
        match Self::parse(&text, &boot_id()) {
            Ok(manual) => Ok((manual, None)),
            Err(reason) => {
                let aside = path.with_extension("json.unreadable");
                fs::rename(&path, &aside)?;
                let aside = aside.display();
                let warning = format!(
                    "entries added by hand were lost: {} {reason}; it was moved to {aside}",
                    path.display()
                );
                Ok((Self::default(), Some(warning)))
            }
        }
    }

    fn parse(text: &str, boot_id: &str) -> Result<Self, String> {
        let file: File =
            serde_json::from_str(text).map_err(|e| format!("cannot be understood: {e}"))?;
        if file.format != FORMAT {
            return Err(format!(
                "has format {}, this version reads {FORMAT}",
                file.format
            ));
        }
        if file.boot_id != boot_id {
            return Ok(Self::default());
        }
        if let Some((cidr, entry)) = file
            .entries
            .iter()
            .find(|(_, e)| !file.policies.contains_key(&e.policy))
        {
            return Err(format!(
                "has no settings for policy {} of {cidr}",
                entry.policy
            ));
        }
        Ok(Self {
            entries: file.entries,
            policies: file.policies,
            masked: file.masked,
        })
    }

    /// Whether there is a file in `state_dir`.
    #[must_use]
    pub fn is_saved(state_dir: &Path) -> bool {
        state_dir.join(FILE).exists()
    }

    /// Writes everything beside its place; the directory is made where somebody has removed it.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn save(&self, state_dir: &Path) -> io::Result<AtomicFile> {
        let file = File {
            format: FORMAT,
            boot_id: boot_id(),
            entries: self.entries.clone(),
            policies: self.policies.clone(),
            masked: self.masked.clone(),
        };
        let text = serde_json::to_vec(&file)?;
        path_security::make_private(state_dir)?;
        AtomicFile::write(&state_dir.join(FILE), 0o600, &text)
    }

    /// Adds or replaces an entry.
    pub fn add(&mut self, cidr: Cidr, entry: ManualEntry, settings: Settings) {
        self.policies.insert(entry.policy.clone(), settings);
        self.entries.insert(cidr, entry);
        self.masked.remove(&cidr);
        self.forget_unused();
    }

    /// Removes an entry added by hand, or else switches the files' entry off; `None` if there is neither.
    pub fn remove(&mut self, cidr: &Cidr, files: &PolicySet) -> Option<Removal> {
        if self.entries.remove(cidr).is_some() {
            self.forget_unused();
            Some(Removal::Entry)
        } else if files.entries.contains_key(cidr) && self.masked.insert(*cidr) {
            Some(Removal::Masked)
        } else {
            None
        }
    }

    /// Switches the files' entry on again; whether it was off.
    pub fn unmask(&mut self, cidr: &Cidr) -> bool {
        self.masked.remove(cidr)
    }

    /// The entry added by hand for exactly this CIDR.
    #[must_use]
    pub fn get(&self, cidr: &Cidr) -> Option<&ManualEntry> {
        self.entries.get(cidr)
    }

    /// CIDRs of the files that are switched off.
    #[must_use]
    pub fn masked(&self) -> &BTreeSet<Cidr> {
        &self.masked
    }

    /// How many entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// How many, by address family.
    #[must_use]
    pub fn families(&self) -> FamiliesView {
        let ipv4 = self.entries.keys().filter(|cidr| cidr.is_ipv4()).count();
        FamiliesView {
            ipv4,
            ipv6: self.entries.len() - ipv4,
        }
    }

    /// Whether nothing was said by hand.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.masked.is_empty()
    }

    /// Removes the entries whose time has come.
    pub fn expire(&mut self, now_ms: u64) -> Vec<Cidr> {
        let over = |e: &ManualEntry| e.expires_ms.is_some_and(|end| end <= now_ms);
        let gone: Vec<Cidr> = self
            .entries
            .iter()
            .filter(|(_, e)| over(e))
            .map(|(cidr, _)| *cidr)
            .collect();
        for cidr in &gone {
            self.entries.remove(cidr);
        }
        self.forget_unused();
        gone
    }

    /// When the next entry ends.
    #[must_use]
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.entries.values().filter_map(|e| e.expires_ms).min()
    }

    /// Settings of a policy that only entries added by hand still name.
    #[must_use]
    pub fn policy(&self, name: &PolicyName) -> Option<&Settings> {
        self.policies.get(name)
    }

    /// The files' set with everything said by hand over it. Takes over the files' present
    /// settings of the policies it names.
    pub fn over(&mut self, files: &PolicySet) -> PolicySet {
        let mut set = files.clone();
        for cidr in &self.masked {
            set.entries.remove(cidr);
        }
        for (name, settings) in &mut self.policies {
            match files.policies.get(name) {
                Some(policy) => settings.clone_from(&policy.settings),
                None => {
                    let policy = Policy {
                        settings: settings.clone(),
                        location: None,
                    };
                    set.policies.insert(name.clone(), policy);
                }
            }
        }
        for (cidr, entry) in &self.entries {
            let entry = Entry {
                policy: entry.policy.clone(),
                location: None,
            };
            set.entries.insert(*cidr, entry);
        }
        set
    }

    fn forget_unused(&mut self) {
        let used: BTreeSet<&PolicyName> = self.entries.values().map(|e| &e.policy).collect();
        self.policies.retain(|name, _| used.contains(name));
    }
}

/// Where it is kept: the `state_dir` that the daemon started with, whose lock it has.
#[derive(Debug)]
pub struct Shelf {
    dir: PathBuf,
    /// Why what is there is older than what is in force.
    problem: Problem,
}

impl Shelf {
    /// In a directory.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        let problem = Problem::default();
        Self { dir, problem }
    }

    /// Writes everything beside its place.
    ///
    /// # Errors
    ///
    /// If it cannot be written; names the directory.
    pub fn draft(&self, manual: &Manual) -> io::Result<AtomicFile> {
        manual.save(&self.dir).map_err(|e| self.named(&e))
    }

    /// Puts a draft in its place.
    ///
    /// # Errors
    ///
    /// As [`Shelf::draft`].
    pub fn commit(&mut self, draft: AtomicFile) -> io::Result<()> {
        draft.commit().map_err(|e| self.named(&e))?;
        self.problem = Problem::default();
        Ok(())
    }

    /// Saves what is in force already. Where that fails it is said, and [`Shelf::look`] tries again.
    pub fn save(&mut self, manual: &Manual) {
        let saved = self.draft(manual).and_then(|draft| self.commit(draft));
        let Err(e) = saved else { return };
        let problem =
            format!("{e}; until it is saved a restart may bring what was said by hand before");
        self.problem.becomes(Some(problem), |text| warn!("{text}"));
    }

    /// What is amiss with it, for people.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.text().cloned()
    }

    /// Saves again what somebody has removed, or could not be saved.
    pub fn look(&mut self, manual: &Manual) {
        let is_missing = || !manual.is_empty() && !Manual::is_saved(&self.dir);
        if self.problem.text().is_some() {
            self.save(manual);
        } else if is_missing() {
            let dir = self.dir.display();
            warn!("{dir}: what was said by hand is gone; saving it again");
            self.save(manual);
        }
    }

    fn named(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.dir.display()))
    }
}

/// Milliseconds of CLOCK_BOOTTIME, which counts through suspend and cannot be set.
#[must_use]
pub fn boottime_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(|t| u64::try_from(Duration::from(t).as_millis()).unwrap_or(u64::MAX))
        .unwrap_or(0)
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn settings(ms: u64) -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(ms)),
            ..Settings::default()
        }
    }

    fn entry(policy: &str, expires_ms: Option<u64>) -> ManualEntry {
        ManualEntry {
            policy: policy.parse().unwrap(),
            by: Caller { uid: 0, pid: 1 },
            expires_ms,
        }
    }

    fn files() -> PolicySet {
        let mut set = PolicySet::default();
        let policy: PolicyName = "near".parse().unwrap();
        set.policies.insert(
            policy.clone(),
            Policy {
                settings: settings(50),
                location: None,
            },
        );
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
    fn survives_a_restart_but_not_a_boot() {
        let dir = tempfile::tempdir().unwrap();
        let mut manual = Manual::default();
        manual.add(cidr("10.1.0.0/16"), entry("mine", Some(7)), settings(100));
        assert_eq!(
            manual.remove(&cidr("10.0.0.0/8"), &files()),
            Some(Removal::Masked)
        );
        manual.save(dir.path()).unwrap().commit().unwrap();
        assert_eq!(Manual::load(dir.path()).unwrap(), (manual, None));

        let text = fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!(Manual::parse(&text, "another boot"), Ok(Manual::default()));
    }

    #[test]
    fn an_unreadable_file_is_kept_aside_and_said() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{").unwrap();
        let (manual, warning) = Manual::load(dir.path()).unwrap();
        assert!(manual.is_empty());
        assert!(warning.unwrap().contains("manual.json.unreadable"));
        assert!(dir.path().join("manual.json.unreadable").exists());
    }

    #[test]
    fn by_hand_overrides_masks_and_gives_back() {
        let mut manual = Manual::default();
        manual.add(cidr("10.0.0.0/8"), entry("mine", None), settings(100));
        let set = manual.over(&files());
        assert_eq!(
            set.entries
                .get(&cidr("10.0.0.0/8"))
                .unwrap()
                .policy
                .as_str(),
            "mine"
        );
        assert_eq!(
            manual.remove(&cidr("10.0.0.0/8"), &files()),
            Some(Removal::Entry)
        );
        assert_eq!(manual.over(&files()), files());
        assert_eq!(
            manual.remove(&cidr("10.0.0.0/8"), &files()),
            Some(Removal::Masked)
        );
        assert!(manual.over(&files()).entries.is_empty());
        assert_eq!(manual.remove(&cidr("10.0.0.0/8"), &files()), None);
        assert!(manual.unmask(&cidr("10.0.0.0/8")));
        assert_eq!(manual.over(&files()), files());
    }

    #[test]
    fn a_policy_that_left_the_files_stays_for_entries_by_hand() {
        let mut manual = Manual::default();
        manual.add(cidr("10.9.0.0/16"), entry("near", None), settings(50));
        let set = manual.over(&PolicySet::default());
        assert_eq!(
            set.policies[&"near".parse().unwrap()].settings,
            settings(50)
        );
    }

    #[test]
    fn expiry_takes_what_is_due() {
        let mut manual = Manual::default();
        manual.add(cidr("10.1.0.0/16"), entry("mine", Some(7)), settings(100));
        manual.add(cidr("10.2.0.0/16"), entry("mine", Some(9)), settings(100));
        manual.add(cidr("10.3.0.0/16"), entry("mine", None), settings(100));
        assert_eq!(manual.next_expiry_ms(), Some(7));
        assert_eq!(manual.expire(8), vec![cidr("10.1.0.0/16")]);
        assert_eq!(manual.next_expiry_ms(), Some(9));
        assert_eq!(manual.len(), 2);
    }
}
