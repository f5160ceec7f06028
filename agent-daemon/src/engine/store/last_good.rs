//! The last good configuration, kept in `persistent_dir` as the texts of its files. A start whose
//! files are rejected uses it.

use std::{
    borrow::Cow,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::Context as _;
use rto_agent_core::{
    config::{Config, ConfigErrors, Files, FilesReader, atomic_file::AtomicFile},
    path_security,
    policy::{HostFacts, PolicySet},
    printable::counted,
    wire::types::now_s,
};
use serde::{Deserialize, Serialize};
use tracing::{error, warn};

use super::{LAST_GOOD, document::Document};
use crate::{
    engine::memory::{self, Need},
    problem::Problem,
};

/// The document.
#[derive(Serialize, Deserialize)]
struct StoredFiles<'a> {
    /// When it was read, Unix seconds.
    at_s: u64,
    /// [`Files::fingerprint`].
    fingerprint: u64,
    /// Path and text of each file, the main one first.
    files: Vec<(Cow<'a, Path>, Cow<'a, str>)>,
}

/// The stored configuration.
#[derive(Debug)]
pub struct LastGood {
    document: Document,
    /// The fingerprint of the stored files.
    stored: Option<u64>,
    /// A staged draft and its fingerprint: moved into place once the files are in force.
    draft: Option<(AtomicFile, u64)>,
    /// Why the stored configuration is older than the active configuration.
    problem: Problem,
}

impl LastGood {
    /// Opens the document in a `persistent_dir`, for the daemon of this configuration file. Moves a
    /// file that cannot be parsed aside, with a warning.
    #[must_use]
    pub fn open(dir: &Path, config_path: &Path) -> Self {
        let mut document = document(dir, config_path);
        let stored = document.load::<StoredFiles<'_>>();
        let (stored, lost) = stored.unwrap_or_else(|e| (None, Some(e.to_string())));
        // If the file belongs to another daemon, storing this daemon's configuration fails, and
        // that is reported.
        if let Some(why) = lost.filter(|_| !document.is_taken()) {
            warn!("the saved last good configuration is lost: {why}");
        }
        Self {
            document,
            stored: stored.map(|stored| stored.fingerprint),
            draft: None,
            problem: Problem::default(),
        }
    }

    /// Writes a draft of good files, unless they are stored already. Staged early, as their texts
    /// are dropped before they are in force.
    pub fn stage(&mut self, files: &Files) {
        self.draft = None;
        let fingerprint = files.fingerprint();
        if self.stored == Some(fingerprint) {
            self.problem = Problem::default();
            return;
        }
        let texts = files.texts();
        let staged = self.document.stage(&StoredFiles {
            at_s: now_s(),
            fingerprint,
            files: texts
                .map(|(path, text)| (path.into(), text.into()))
                .collect(),
        });
        match staged {
            Ok(draft) => self.draft = Some((draft, fingerprint)),
            Err(e) => self.is_not_stored(&e),
        }
    }

    /// Whether the stored configuration was removed; it must be staged again.
    pub(in crate::engine) fn is_gone(&mut self) -> bool {
        let is_gone = self.stored.is_some() && !self.document.path().exists();
        if is_gone {
            self.stored = None;
        }
        is_gone
    }

    /// The staged files are in force: moves the draft into place.
    pub(in crate::engine) fn commit(&mut self) {
        let Some((draft, fingerprint)) = self.draft.take() else {
            return;
        };
        match self.document.commit(draft) {
            Ok(()) => {
                self.stored = Some(fingerprint);
                self.problem = Problem::default();
            }
            Err(e) => self.is_not_stored(&e),
        }
    }

    /// The staged files are not in force: drops the draft.
    pub(in crate::engine) fn discard(&mut self) {
        self.draft = None;
    }

    fn is_not_stored(&mut self, error: &std::io::Error) {
        let text = format!(
            "the configuration cannot be saved as the last good one: {error}; a start with an \
             invalid configuration uses the one saved before, if any"
        );
        self.problem.becomes(Some(text), |text| warn!("{text}"));
    }

    /// Why the stored configuration is older than the active configuration.
    pub(in crate::engine) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }
}

fn document(dir: &Path, config_path: &Path) -> Document {
    let owner = config_path.to_string_lossy().into_owned();
    Document::new(dir, &LAST_GOOD, owner)
}

/// Files that were rejected at the start.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The errors, as text.
    pub errors: String,
    /// Their [`Files::fingerprint`], if they could be read.
    pub fingerprint: Option<u64>,
    /// When the configuration used instead was stored, Unix seconds.
    pub kept_at_s: u64,
}

/// The configuration that a daemon starts with.
pub struct StartConfig {
    /// A good configuration.
    pub config: Config,
    /// Its files.
    pub files: Files,
    /// Why it is not the configuration of the current files.
    pub refused: Option<Refused>,
}

impl StartConfig {
    /// Reads and checks the files. If they are rejected, uses the last good configuration.
    ///
    /// # Errors
    ///
    /// The errors of the files, if there is no last good configuration that this host supports.
    pub fn read(config_path: &Path, host: &HostFacts) -> anyhow::Result<Self> {
        let files = FilesReader::default().read(config_path);
        let files = files.map_err(ConfigErrors::from);
        let mut read = match files.as_ref().map(|files| check(files, host)) {
            Ok(read) => read,
            Err(errors) => Err(errors.clone().into()),
        };
        if read
            .as_ref()
            .is_ok_and(|config| !config.set.policies.is_empty())
        {
            return Ok(Self {
                config: read?,
                files: files?,
                refused: None,
            });
        }
        let dir = files.as_ref().map_or_else(
            // Without a main file `persistent_dir` is the default.
            |_| rto_agent_core::config::AgentConfig::default().persistent_dir,
            Files::persistent_dir,
        );
        let last_good = last_good(&dir, config_path, host);
        if let (Ok(files), Ok(Some((.., stored)))) = (&read, &last_good)
            && let Some(error) = emptied(&files.set, &stored.set)
        {
            read = Err(anyhow::Error::msg(error));
        }
        let errors = match read {
            Ok(config) => {
                return Ok(Self {
                    config,
                    files: files?,
                    refused: None,
                });
            }
            Err(errors) => errors,
        };
        match last_good {
            Ok(Some((kept_at_s, stored, config))) => {
                let errors = errors.to_string();
                let at = UNIX_EPOCH + Duration::from_secs(kept_at_s);
                let at = humantime::format_rfc3339_seconds(at);
                error!("configuration rejected; using the last good one, saved {at}:\n{errors}");
                Ok(Self {
                    config,
                    files: stored,
                    refused: Some(Refused {
                        errors,
                        fingerprint: files.ok().map(|files| files.fingerprint()),
                        kept_at_s,
                    }),
                })
            }
            Ok(None) => Err(errors),
            Err(why) => {
                warn!("the last good configuration cannot be used: {why:#}");
                Err(errors)
            }
        }
    }
}

/// Why files without any policy do not replace files with policies: a redirection from a slow
/// command, or a full disk, leaves a file empty for a moment.
pub(in crate::engine) fn emptied(files: &PolicySet, former: &PolicySet) -> Option<String> {
    let (now, before) = (files.policies.len(), former.policies.len());
    (now == 0 && before != 0).then(|| {
        format!(
            "the files no longer have any of the {}; if this is intended, run rto-agent reload \
             --allow-empty",
            counted(before, "policy", "policies")
        )
    })
}

fn check(files: &Files, host: &HostFacts) -> anyhow::Result<Config> {
    memory::check(&Need::of_files(files.cidrs()))?;
    Ok(Config::of(files, host)?)
}

/// The stored configuration, if any: checked like files that were just read.
fn last_good(
    dir: &Path,
    config_path: &Path,
    host: &HostFacts,
) -> anyhow::Result<Option<(u64, Files, Config)>> {
    // A file in a directory that others can write may not be the daemon's.
    path_security::check_private(dir)?;
    let document = document(dir, config_path);
    // `peek()`: another daemon may run there, and moves bad files aside itself.
    let stored = document.peek::<StoredFiles<'_>>()?;
    let stored = stored.map_err(|unusable| anyhow::Error::msg(document.text_of(&unusable)))?;
    let Some(StoredFiles { at_s, files, .. }) = stored else {
        return Ok(None);
    };
    let texts = files.into_iter();
    let texts = texts.map(|(path, text)| (path.into_owned(), text.into_owned()));
    let files = Files::of_texts(texts.collect());
    let config = check(&files, host).with_context(|| document.path().display().to_string())?;
    Ok(Some((at_s, files, config)))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

    use rto_agent_core::testing::HOST;

    use super::*;

    /// A good configuration that a daemon has stored.
    struct Bed {
        dir: tempfile::TempDir,
        good: String,
    }

    impl Bed {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let lasting = dir.path().join("lasting");
            let good = format!(
                "[agent]\npersistent_dir = {lasting:?}\n[policy.near]\ninitial_rto = \"100ms\"\n\
                 cidrs = [\"10.1.0.0/16\"]\n"
            );
            let bed = Self { dir, good };
            bed.write(&bed.good);
            bed.keep();
            bed
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("config.toml")
        }

        fn path_of_stored(&self) -> PathBuf {
            self.dir.path().join("lasting").join(LAST_GOOD.file)
        }

        fn write(&self, text: &str) {
            fs::write(self.path(), text).unwrap();
        }

        fn start(&self) -> anyhow::Result<StartConfig> {
            StartConfig::read(&self.path(), &HOST)
        }

        fn keep(&self) -> LastGood {
            let start = self.start().unwrap();
            assert!(start.refused.is_none());
            let mut last_good = LastGood::open(&start.config.agent.persistent_dir, &self.path());
            last_good.stage(&start.files);
            last_good.commit();
            last_good
        }
    }

    #[test]
    fn start_with_refused_files_uses_last_good() {
        let bed = Bed::new();
        for (bad, error) in [
            (bed.good.replace("100ms", "100"), "a unit is missing"),
            // Not even TOML: `persistent_dir` is found nevertheless.
            (format!("{}[policy.x\n", bed.good), "unclosed table"),
        ] {
            bed.write(&bad);
            let start = bed.start().unwrap();
            assert_eq!(start.config.set.entries.len(), 1);
            let refused = start.refused.unwrap();
            assert!(refused.errors.contains(error), "{}", refused.errors);
            let read = Files::read(&bed.path()).fingerprint();
            assert_eq!(refused.fingerprint, Some(read));
            assert_ne!(start.files.fingerprint(), read);
        }
        bed.write(&bed.good);
        let start = bed.start().unwrap();
        assert!(start.refused.is_none());
        // The restored files are not written again.
        let mut last_good = LastGood::open(&start.config.agent.persistent_dir, &bed.path());
        last_good.stage(&start.files);
        assert!(last_good.draft.is_none() && last_good.problem().is_none());
    }

    #[test]
    fn damaged_or_foreign_last_good_is_not_used() {
        type Spoil = fn(&Bed);
        let cases: [Spoil; 5] = [
            |bed| fs::remove_file(bed.path_of_stored()).unwrap(),
            |bed| fs::write(bed.path_of_stored(), "{\"format\":1,").unwrap(),
            |bed| {
                let text = fs::read_to_string(bed.path_of_stored()).unwrap();
                let other = text.replacen("config.toml", "other.toml", 1);
                fs::write(bed.path_of_stored(), other).unwrap();
            },
            |bed| {
                let text = fs::read_to_string(bed.path_of_stored()).unwrap();
                fs::write(bed.path_of_stored(), text.replace("100ms", "100h")).unwrap();
            },
            |bed| {
                let mode = fs::Permissions::from_mode(0o777);
                fs::set_permissions(bed.path_of_stored().parent().unwrap(), mode).unwrap();
            },
        ];
        for (case, spoil) in cases.into_iter().enumerate() {
            let bed = Bed::new();
            bed.write(&bed.good.replace("100ms", "100"));
            assert!(bed.start().unwrap().refused.is_some());
            spoil(&bed);
            let error = bed.start().err().map(|e| e.to_string());
            let error = error.unwrap_or_default();
            assert!(error.contains("a unit is missing"), "{case}: {error}");
        }
    }

    #[test]
    fn refused_configuration_is_not_stored() {
        let bed = Bed::new();
        let before = fs::read_to_string(bed.path_of_stored()).unwrap();
        let mut last_good = bed.keep();
        let other = |text: &str| Files::of_texts(vec![(bed.path(), text.to_owned())]);
        last_good.stage(&other("a"));
        last_good.discard();
        last_good.commit();
        last_good.stage(&other("b"));
        drop(last_good);
        assert_eq!(fs::read_to_string(bed.path_of_stored()).unwrap(), before);
        let lasting = fs::read_dir(bed.path_of_stored().parent().unwrap()).unwrap();
        assert_eq!(lasting.count(), 1);
    }

    #[test]
    fn unwritable_last_good_is_reported_until_written() {
        let bed = Bed::new();
        let mut last_good = bed.keep();
        let files = Files::of_texts(vec![(bed.path(), "a".to_owned())]);
        fs::remove_dir_all(bed.path_of_stored().parent().unwrap()).unwrap();
        fs::write(bed.path_of_stored().parent().unwrap(), "not a directory").unwrap();
        last_good.stage(&files);
        let problem = last_good.problem().unwrap();
        assert!(problem.contains("last-good.json"), "{problem}");
        fs::remove_file(bed.path_of_stored().parent().unwrap()).unwrap();
        last_good.stage(&files);
        last_good.commit();
        assert_eq!(last_good.problem(), None);
    }
}
