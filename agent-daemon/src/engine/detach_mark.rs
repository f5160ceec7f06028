//! Whether the daemon is detached: a detachment lasts over restarts, upgrades and reboots.

use std::path::Path;

use rto_agent_core::wire::types::Caller;
use tracing::warn;

use super::document::Document;
use crate::problem::Problem;

pub(super) const FILE: &str = "detached.json";
const FORMAT: u32 = 1;

/// Why a request that needs an attached program is refused.
pub(super) const DETACHED: &str = "no policy is active; run rto-agent attach to activate them";

/// Remembers in `persistent_dir` which user has detached the daemon of a configuration file.
pub struct DetachMark {
    document: Document,
    /// Why the file is older than the state in force.
    problem: Problem,
}

impl DetachMark {
    /// The mark in this `persistent_dir`.
    #[must_use]
    pub fn new(dir: &Path, config_path: &Path) -> Self {
        let owner = config_path.to_string_lossy().into_owned();
        Self {
            document: Document::new(dir, FILE, FORMAT, owner),
            problem: Problem::default(),
        }
    }

    /// The user that has detached the daemon, if any.
    pub(super) fn load(&mut self) -> std::io::Result<Option<Caller>> {
        let (by, lost) = self.document.load::<Option<Caller>>()?;
        if let Some(why) = lost {
            warn!("it is unknown whether the policies were detached on purpose: {why}");
        }
        Ok(by.flatten())
    }

    /// Stores which user has detached the daemon, or `None` for attached.
    pub fn set(&mut self, by: Option<Caller>) -> std::io::Result<()> {
        // Not stored: the next start reads `attach` from the configuration again.
        let saved = self
            .document
            .write(&by.filter(|by| *by != Caller::CONFIGURATION));
        let problem = saved.as_ref().err().map(|e| {
            format!("{e}; until it is saved, a restart returns to the state saved before")
        });
        self.problem.becomes(problem, |text| warn!("{text}"));
        saved
    }

    /// Stores the mark again if that failed or the file was removed.
    pub(super) fn retry(&mut self, by: Option<Caller>) {
        let is_gone =
            || by.is_some_and(|by| by != Caller::CONFIGURATION) && !self.document.path().exists();
        if self.problem().is_some() || is_gone() {
            let _said = self.set(by);
        }
    }

    /// Why the file is older than the state in force.
    pub(super) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }
}
