//! The documents that outlive the daemon. Each has a format and an owner, is replaced atomically, and
//! has one writer: the engine, or a command that holds the lock of an engine that does not run. One
//! that cannot be used is moved aside, with a warning that says what is lost.

use std::path::PathBuf;

use rto_agent_core::{config::AgentConfig, wire::types::Caller};

use self::document::Kind;
use super::runtime::RuntimeEntries;
use crate::tuning::Stored;

mod document;
mod last_good;
mod mark;
mod runtime;
mod tuning;

pub(super) use self::{
    document::boot_id, last_good::emptied, mark::NOT_ACTIVE, tuning::TuningStore,
};
pub use self::{
    document::{MAX_FILE as MAX_STATE_FILE, aside as state_file_aside},
    last_good::{LastGood, Refused, StartConfig},
    mark::DetachMark,
    runtime::RuntimeStore,
};

const RUNTIME: Kind = Kind {
    file: "manual.json",
    format: 1,
};
pub(super) const TUNING: Kind = Kind {
    file: "tuning.json",
    format: 1,
};
const LAST_GOOD: Kind = Kind {
    file: "last-good.json",
    format: 1,
};
const DETACHED: Kind = Kind {
    file: "detached.json",
    format: 2,
};

/// All documents of a daemon.
pub(super) struct Store {
    pub(super) runtime: RuntimeStore,
    pub(super) tuning: TuningStore,
    pub(super) last_good: LastGood,
    pub(super) mark: DetachMark,
}

impl Store {
    /// Opens the documents in the directories that the daemon starts with, and reads what an earlier
    /// run has learnt.
    pub(super) fn open(agent: &AgentConfig, last_good: LastGood) -> (Self, Stored<'static>) {
        let (tuning, learnt) = TuningStore::open(agent);
        let store = Self {
            runtime: RuntimeStore::new(&agent.state_dir),
            tuning,
            last_good,
            mark: DetachMark::new(agent),
        };
        (store, learnt)
    }

    /// Saves again what could not be saved, or was removed.
    pub(super) fn retry(&mut self, runtime: &RuntimeEntries, detached_by: Option<Caller>) {
        self.runtime.retry_save(runtime);
        self.mark.retry(detached_by);
    }

    /// What is not on disk as it should be, and what was lost.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let problems = [
            self.runtime.problem(),
            self.mark.problem(),
            self.last_good.problem(),
            self.tuning.problem(),
        ];
        let unreadable = self.tuning.unreadable();
        problems.into_iter().flatten().chain(unreadable).cloned()
    }
}

/// Files that keep state of the daemon, with the consequence of losing each.
#[must_use]
pub fn state_files(agent: &AgentConfig) -> Vec<(PathBuf, &'static str)> {
    let (lasting, of_boot) = (&agent.persistent_dir, &agent.state_dir);
    let learnt = "timers start learning again, and proven harm is forgotten";
    let detached = "no policy is active until rto-agent attach";
    vec![
        (lasting.join(TUNING.file), learnt),
        (of_boot.join(TUNING.file), learnt),
        (lasting.join(DETACHED.file), detached),
        (of_boot.join(DETACHED.file), detached),
        (
            lasting.join(LAST_GOOD.file),
            "a start with an invalid configuration has no last good one to use instead",
        ),
    ]
}
