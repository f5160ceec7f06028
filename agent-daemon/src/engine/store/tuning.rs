//! Persists what was learnt: in `persistent_dir/tuning.json`, over a reboot; if that cannot be
//! written, in `state_dir/tuning.json`, until reboot.

use std::time::{Duration, Instant};

use rto_agent_core::{config::AgentConfig, path_security};
use tracing::warn;

use super::{
    TUNING,
    document::{Document, Unusable},
};
use crate::{problem::Problem, tuning::Stored};

/// How often statistics that only grow are saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// The files.
#[derive(Debug)]
pub(in crate::engine) struct TuningStore {
    lasting: Document,
    of_boot: Document,
    saved_at: Instant,
    /// Why it is not in `persistent_dir`.
    problem: Problem,
    /// The last state is in neither file.
    is_lost: bool,
    /// Files of an earlier run that could not be read or parsed, and how to fix that.
    unreadable: Vec<String>,
}

impl TuningStore {
    /// Reads what an earlier run left. Moves a file that cannot be parsed aside, with a warning.
    pub(super) fn open(agent: &AgentConfig) -> (Self, Stored<'static>) {
        let pin_dir = path_security::resolved(&agent.pin_dir);
        let document = |dir| Document::new(dir, &TUNING, pin_dir.to_string_lossy().into_owned());
        let mut store = Self {
            lasting: document(&agent.persistent_dir),
            of_boot: document(&agent.state_dir),
            saved_at: Instant::now(),
            problem: Problem::default(),
            is_lost: false,
            unreadable: Vec::new(),
        };
        let mut found = Vec::new();
        for document in [&mut store.lasting, &mut store.of_boot] {
            let (stored, lost) = document.load::<Stored<'_>>().unwrap_or_else(|e| {
                let fix = format!("{e}; make it readable for root, or remove it");
                (None, Some(fix))
            });
            found.extend(stored);
            store
                .unreadable
                .extend(lost.filter(|_| !document.is_taken()).map(|why| {
                format!(
                    "learnt values and proven harm are lost, and timers start learning again: {why}"
                )
            }));
        }
        store.unreadable.iter().for_each(|text| warn!("{text}"));
        if store.lasting.is_taken() {
            let why = store.lasting.text_of(&Unusable::Taken);
            let problem = format!("{why}; learnt values and proven harm do not survive a reboot");
            store.problem.becomes(Some(problem), |text| warn!("{text}"));
        }
        // Use the later one: `state_dir` was written while `persistent_dir` could not be.
        let stored = found.into_iter().max_by_key(Stored::at_ms);
        (store, stored.unwrap_or_default())
    }

    /// Whether statistics that only grow are to be saved.
    pub(in crate::engine) fn is_due(&self) -> bool {
        self.saved_at.elapsed() >= SAVE_INTERVAL
    }

    /// Whether a decision is to be saved at once: not while that fails.
    pub(in crate::engine) fn is_writable(&self) -> bool {
        !self.is_lost || self.is_due()
    }

    /// Writes the state to `persistent_dir`, or else to `state_dir`; returns whether it is in one.
    pub(in crate::engine) fn save(&mut self, stored: &Stored<'_>) -> bool {
        self.saved_at = Instant::now();
        self.is_lost = false;
        let problem = self.lasting.write(stored).err().map(|e| match self.of_boot.write(stored) {
            Ok(()) => format!("{e}; learnt values and proven harm do not survive a reboot"),
            Err(also) => {
                self.is_lost = true;
                format!(
                    "{e}; {also}; learnt values and proven harm do not survive a restart of the \
                     daemon"
                )
            }
        });
        if problem.is_none() {
            let _ = self.of_boot.remove(); // Outdated; the later one of both is read.
        }
        self.problem.becomes(problem, |text| warn!("{text}"));
        !self.is_lost
    }

    /// Files of an earlier run that could not be read or parsed, with the fix.
    pub(super) fn unreadable(&self) -> &[String] {
        &self.unreadable
    }

    /// Why the learnt state does not survive a reboot.
    pub(in crate::engine) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }
}
