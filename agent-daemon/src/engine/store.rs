//! Persists runtime entries in `state_dir/manual.json`, below `/run` by default.
//!
//! They survive a restart of the daemon but not a reboot: the file contains the boot ID.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
};

use rto_agent_core::{
    config::{atomic_file::AtomicFile, regular_file},
    path_security,
    policy::{Cidr, PolicyName, Settings},
    progress::Stepwise,
};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::runtime::{RuntimeEntries, RuntimeEntry};
use crate::problem::Problem;

const FILE: &str = "manual.json";
const FORMAT: u32 = 1;
/// Longest file, bytes: more than the maximum number of entries takes.
const MAX_FILE: u64 = 1 << 30;
/// Bytes per write.
const PIECE: usize = 64 << 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    boot_id: String,
    entries: BTreeMap<Cidr, RuntimeEntry>,
    policies: BTreeMap<PolicyName, Settings>,
    masked: BTreeSet<Cidr>,
    departed: BTreeMap<PolicyName, u64>,
}

/// The file as it is written; [`File`] is the form that is read.
#[derive(Serialize)]
struct FileRef<'a> {
    format: u32,
    boot_id: String,
    entries: &'a BTreeMap<Cidr, RuntimeEntry>,
    policies: &'a BTreeMap<PolicyName, Settings>,
    masked: &'a BTreeSet<Cidr>,
    departed: &'a BTreeMap<PolicyName, u64>,
}

/// The store in the `state_dir` that the daemon started with, and whose lock it holds.
#[derive(Debug)]
pub struct RuntimeStore {
    dir: PathBuf,
    /// Why the file is older than the state in force.
    problem: Problem,
}

impl RuntimeStore {
    /// The store in this directory.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        let problem = Problem::default();
        Self { dir, problem }
    }

    /// Writes a draft of all entries beside the file.
    ///
    /// # Errors
    ///
    /// If the draft cannot be written. The error names the directory.
    pub fn stage(&self, runtime: &RuntimeEntries) -> io::Result<AtomicFile> {
        save(runtime, &self.dir).map_err(|e| self.named(&e))
    }

    /// Moves a draft into place.
    ///
    /// # Errors
    ///
    /// As [`RuntimeStore::stage`].
    pub fn commit(&mut self, draft: AtomicFile) -> io::Result<()> {
        draft.commit().map_err(|e| self.named(&e))?;
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
    pub fn problem(&self) -> Option<String> {
        self.problem.text().cloned()
    }

    /// Saves again after a failure, or if the file was removed.
    pub fn retry_save(&mut self, runtime: &RuntimeEntries) {
        let is_missing = || !runtime.is_empty() && !self.dir.join(FILE).exists();
        if self.problem.text().is_some() {
            self.save(runtime);
        } else if is_missing() {
            let dir = self.dir.display();
            warn!("{dir}: the saved runtime entries are missing; saving them again");
            self.save(runtime);
        }
    }

    fn named(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.dir.display()))
    }
}

/// Size of the file, bytes.
#[must_use]
pub fn size(state_dir: &Path) -> u64 {
    fs::metadata(state_dir.join(FILE)).map_or(0, |file| file.len())
}

/// Reads what an earlier run since boot left in `state_dir`. A file that cannot be parsed is moved
/// aside with a warning. Drafts of a killed run are removed.
///
/// # Errors
///
/// If the file exists and cannot be read.
pub fn load(state_dir: &Path) -> io::Result<(RuntimeEntries, Option<String>)> {
    let path = state_dir.join(FILE);
    if let Err(e) = AtomicFile::remove_stale(&path) {
        warn!(
            "a temporary file of {} cannot be removed: {e}",
            path.display()
        );
    }
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let text = match regular_file::read(&path, MAX_FILE) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Ok((RuntimeEntries::default(), None));
        }
        Err(e) if e.kind() == io::ErrorKind::InvalidData => String::new(),
        Err(e) => return Err(named(e)),
    };
    match parse(&text, &boot_id()) {
        Ok(runtime) => Ok((runtime, None)),
        Err(reason) => {
            let aside = path.with_extension("json.unreadable");
            fs::rename(&path, &aside)?;
            let aside = aside.display();
            let warning = format!(
                "runtime entries were lost: {} {reason}; it was moved to {aside}",
                path.display()
            );
            Ok((RuntimeEntries::default(), Some(warning)))
        }
    }
}

/// Reads what a daemon has saved in `state_dir` since boot. Changes nothing there, as a daemon may
/// be starting.
///
/// # Errors
///
/// If the file exists but cannot be read or parsed.
pub fn peek(state_dir: &Path) -> io::Result<RuntimeEntries> {
    let path = state_dir.join(FILE);
    let text = match regular_file::read(&path, MAX_FILE) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(RuntimeEntries::default()),
        text => text,
    };
    let runtime = text.and_then(|text| parse(&text, &boot_id()).map_err(io::Error::other));
    runtime.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

fn parse(text: &str, boot_id: &str) -> Result<RuntimeEntries, String> {
    let file: File =
        serde_json::from_str(text).map_err(|e| format!("cannot be understood: {e}"))?;
    if file.format != FORMAT {
        return Err(format!(
            "has format {}, this version reads {FORMAT}",
            file.format
        ));
    }
    if file.boot_id != boot_id {
        return Ok(RuntimeEntries::default());
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
    let mut entries = file.entries;
    for entry in entries.values_mut() {
        // Share one name between all entries of a policy.
        if let Some((name, _)) = file.policies.get_key_value(&entry.policy) {
            entry.policy = name.clone();
        }
    }
    Ok(RuntimeEntries {
        entries,
        policies: file.policies,
        masked: file.masked,
        departed: file.departed,
    })
}

/// Writes a draft beside the file; re-creates the directory if it was removed.
///
/// # Errors
///
/// If it cannot be written.
fn save(runtime: &RuntimeEntries, state_dir: &Path) -> io::Result<AtomicFile> {
    let file = FileRef {
        format: FORMAT,
        boot_id: boot_id(),
        entries: &runtime.entries,
        policies: &runtime.policies,
        masked: &runtime.masked,
        departed: &runtime.departed,
    };
    path_security::make_private(state_dir)?;
    // Written in pieces: as one text, half a million entries take 50 MB.
    AtomicFile::write_with(&state_dir.join(FILE), 0o600, |to| {
        let mut to = BufWriter::with_capacity(PIECE, Stepwise(to));
        serde_json::to_writer(&mut to, &file)?;
        to.flush()
    })
}

pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rto_agent_core::wire::types::Caller;

    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn survives_a_restart_but_not_a_boot() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = RuntimeEntries::default();
        let settings = Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Settings::default()
        };
        let entry = RuntimeEntry {
            policy: "mine".parse().unwrap(),
            by: Caller { uid: 0, pid: 1 },
            expires_ms: Some(7),
        };
        runtime.add(&[cidr("10.1.0.0/16")], &entry, &settings);
        runtime.masked.insert(cidr("10.0.0.0/8"));
        save(&runtime, dir.path()).unwrap().commit().unwrap();
        assert_eq!(load(dir.path()).unwrap(), (runtime, None));

        let text = fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!(parse(&text, "another boot"), Ok(RuntimeEntries::default()));
    }

    #[test]
    fn removed_file_with_only_a_departed_policy_is_saved_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = RuntimeEntries::default();
        let near: PolicyName = "near".parse().unwrap();
        runtime.policies.insert(near.clone(), Settings::default());
        runtime.departed.insert(near, 7);
        let mut store = RuntimeStore::new(dir.path().to_owned());
        store.retry_save(&RuntimeEntries::default());
        assert!(!dir.path().join(FILE).exists());
        store.retry_save(&runtime);
        assert_eq!(load(dir.path()).unwrap(), (runtime, None));
    }

    #[test]
    fn an_unreadable_file_is_kept_aside_and_said() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{").unwrap();
        let (runtime, warning) = load(dir.path()).unwrap();
        assert!(runtime.is_empty());
        assert!(warning.unwrap().contains("manual.json.unreadable"));
        assert!(dir.path().join("manual.json.unreadable").exists());
    }
}
