//! Persists runtime entries in `state_dir/manual.json`, below `/run` by default.
//!
//! They survive a restart of the daemon but not a reboot: the file contains the boot ID.

use std::{borrow::Cow, fs, io, path::Path};

use rto_agent_core::config::atomic_file::AtomicFile;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{
    RUNTIME,
    document::{Document, boot_id},
};
use crate::{engine::runtime::RuntimeEntries, problem::Problem};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved<'a> {
    boot_id: Cow<'a, str>,
    runtime: Cow<'a, RuntimeEntries>,
}

impl Saved<'_> {
    /// What was saved since boot.
    fn since_boot(saved: Option<Self>) -> RuntimeEntries {
        let saved = saved.filter(|saved| saved.boot_id == boot_id());
        saved.map_or_else(RuntimeEntries::default, |saved| saved.runtime.into_owned())
    }
}

/// The store in the `state_dir` that the daemon started with, and whose lock it holds.
#[derive(Debug)]
pub struct RuntimeStore {
    document: Document,
    /// Why the file is older than the state in force.
    problem: Problem,
}

impl RuntimeStore {
    /// The store in this directory.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self {
            // The lock on the directory excludes other daemons.
            document: Document::new(state_dir, &RUNTIME, String::new()),
            problem: Problem::default(),
        }
    }

    /// Reads what an earlier run left since boot. A file that cannot be parsed is moved aside with a
    /// warning. Drafts of a killed run are removed.
    pub fn load(&mut self) -> io::Result<(RuntimeEntries, Option<String>)> {
        let (saved, lost) = self.document.load()?;
        let warning = lost.map(|why| format!("runtime entries were lost: {why}"));
        Ok((Saved::since_boot(saved), warning))
    }

    /// As [`RuntimeStore::load`], but changes nothing, as a daemon may be starting.
    pub fn peek(&self) -> io::Result<RuntimeEntries> {
        match self.document.peek()? {
            Ok(saved) => Ok(Saved::since_boot(saved)),
            Err(unusable) => Err(io::Error::other(self.document.text_of(&unusable))),
        }
    }

    /// Size of the file, bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        fs::metadata(self.document.path()).map_or(0, |file| file.len())
    }

    /// Writes a draft of all entries beside the file.
    ///
    /// # Errors
    ///
    /// If the draft cannot be written. The error names the file.
    pub fn stage(&self, runtime: &RuntimeEntries) -> io::Result<AtomicFile> {
        self.document.stage(&Saved {
            boot_id: boot_id().into(),
            runtime: Cow::Borrowed(runtime),
        })
    }

    /// Moves a draft into place.
    pub fn commit(&mut self, draft: AtomicFile) -> io::Result<()> {
        self.document.commit(draft)?;
        self.problem = Problem::default();
        Ok(())
    }

    /// Saves entries that are already in force. Reports a failure, which
    /// [`RuntimeStore::retry_save`] retries.
    pub fn save(&mut self, runtime: &RuntimeEntries) {
        let saved = self.stage(runtime).and_then(|draft| self.commit(draft));
        let Err(e) = saved else { return };
        let problem =
            format!("{e}; until they are saved, a restart may restore earlier runtime entries");
        self.problem.becomes(Some(problem), |text| warn!("{text}"));
    }

    /// Why the file is older than the state in force, in words.
    #[must_use]
    pub fn problem(&self) -> Option<&String> {
        self.problem.text()
    }

    /// Saves again after a failure, or if the file was removed.
    pub fn retry_save(&mut self, runtime: &RuntimeEntries) {
        let path = self.document.path();
        if self.problem.text().is_some() {
            self.save(runtime);
        } else if !runtime.is_empty() && !path.exists() {
            let path = path.display();
            warn!("{path}: the saved runtime entries are missing; saving them again");
            self.save(runtime);
        }
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_core::policy::{PolicyName, Settings};

    use super::*;
    use crate::engine::desired::tests::{cidr, entry, settings};

    #[test]
    fn runtime_store_survives_restart_but_not_boot() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = RuntimeEntries::default();
        runtime.add(
            &[cidr("10.1.0.0/16")],
            &entry("mine", Some(7)),
            &settings(100),
        );
        runtime.masked.insert(cidr("10.0.0.0/8"));
        let mut store = RuntimeStore::new(dir.path());
        store.save(&runtime);
        assert_eq!(store.load().unwrap(), (runtime.clone(), None));
        assert_eq!(store.peek().unwrap(), runtime);

        let path = store.document.path();
        let text = fs::read_to_string(&path).unwrap();
        let of_another = text.replace(&boot_id(), "another boot");
        fs::write(&path, of_another).unwrap();
        assert_eq!(store.load().unwrap(), (RuntimeEntries::default(), None));
    }

    #[test]
    fn removed_file_with_only_a_retired_policy_is_saved_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = RuntimeEntries::default();
        let near: PolicyName = "near".parse().unwrap();
        runtime.policies.insert(near.clone(), Settings::default());
        runtime.retired.insert(near, 7);
        let mut store = RuntimeStore::new(dir.path());
        store.retry_save(&RuntimeEntries::default());
        assert!(!dir.path().join(RUNTIME.file).exists());
        store.retry_save(&runtime);
        assert_eq!(store.load().unwrap(), (runtime, None));
    }

    #[test]
    fn entry_without_policy_settings_is_damage() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = RuntimeStore::new(dir.path());
        let text = serde_json::json!({"format": RUNTIME.format, "owner": "", "content": {
            "boot_id": boot_id(),
            "runtime": {
                "entries": {"10.0.0.0/8": {"policy": "near", "by": {"uid": 0, "pid": 1}}},
                "policies": {}, "departed": {}, "masked": [],
            },
        }});
        fs::write(dir.path().join(RUNTIME.file), text.to_string()).unwrap();
        assert!(store.peek().is_err());
        let (runtime, warning) = store.load().unwrap();
        let warning = warning.unwrap();
        assert!(runtime.is_empty() && warning.contains("policy near of 10.0.0.0/8"));
        assert!(dir.path().join("manual.json.unreadable").exists());
    }
}
