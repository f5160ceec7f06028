//! Persists what was learnt: in `persistent_dir/tuning.json`, over a reboot; if that cannot be
//! written, in `state_dir/tuning.json`, until reboot.

use rto_agent_core::{config::AgentConfig, wire::types::now_ms};
use rto_agent_kernel::kernel::clock::boottime_ms;
use tracing::warn;

use super::{
    document::{Document, LastingDocument},
    store::boot_id,
};
use crate::tuning::{Moment, Stored, Tuning};

pub(super) const FILE: &str = "tuning.json";
const FORMAT: u32 = 1;
/// The files, and the clock of the times in them.
#[derive(Debug)]
pub(super) struct TuningStore {
    boot_id: String,
    document: LastingDocument,
    /// Start values of the tuner's clock and of CLOCK_BOOTTIME, milliseconds.
    began: (u64, u64),
    /// Files of an earlier run that could not be read or parsed, and how to fix that.
    unreadable: Vec<String>,
}

impl TuningStore {
    /// Reads what an earlier run left. Moves a file that cannot be parsed aside, with a warning.
    pub(super) fn open(agent: &AgentConfig) -> (Self, Stored<'static>) {
        let mut document = LastingDocument::new(agent, FILE, FORMAT);
        let load = |document: &mut Document| {
            let loaded = document.load::<Stored<'_>>();
            let (stored, lost) = loaded.unwrap_or_else(|e| {
                (
                    None,
                    Some(format!("{e}; make it readable for root, or remove it")),
                )
            });
            match document.is_taken() {
                true => (stored, None, lost),
                false => (stored, lost, None),
            }
        };
        let (lasting, lost, taken) = load(&mut document.lasting);
        let (of_boot, also_lost, _) = load(&mut document.of_boot);
        let problem = taken
            .map(|why| format!("{why}; learnt values and proven harm do not survive a reboot"));
        document.problem.becomes(problem, |text| warn!("{text}"));
        let unreadable = lost.into_iter().chain(also_lost);
        let unreadable = unreadable.map(|why| {
            format!(
                "learnt values and proven harm are lost, and timers start learning again: {why}"
            )
        });
        let unreadable: Vec<_> = unreadable.inspect(|text| warn!("{text}")).collect();
        // Use the later one: `state_dir` was written while `persistent_dir` could not be.
        let stored = [lasting, of_boot].into_iter().flatten();
        let stored = stored.max_by_key(Stored::at_ms).unwrap_or_default();
        let (boot_id, boottime_ms) = (boot_id(), boottime_ms());
        let store = Self {
            began: (stored.now_ms(&boot_id, boottime_ms, now_ms()), boottime_ms),
            boot_id,
            document,
            unreadable,
        };
        (store, stored)
    }

    /// The current boot.
    pub(super) fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// The current time on the clocks the tuner uses.
    pub(super) fn now(&self) -> Moment {
        let (tuner_ms, began_ms) = self.began;
        let boottime_ms = boottime_ms();
        Moment {
            tuner_ms: tuner_ms.saturating_add(boottime_ms.saturating_sub(began_ms)),
            boottime_ms,
            unix_ms: now_ms(),
        }
    }

    /// Writes a transition at once, growing statistics once a minute.
    pub(super) fn save_if_due(&mut self, tuning: &mut Tuning) {
        let is_due = self.document.is_save_due();
        if tuning.has_changed() && (!self.document.is_lost || is_due)
            || tuning.has_grown() && is_due
        {
            self.save(tuning);
        }
    }

    /// Writes all that is not on disk yet.
    pub(super) fn save_last(&mut self, tuning: &mut Tuning) {
        if tuning.has_changed() || tuning.has_grown() {
            self.save(tuning);
        }
    }

    fn save(&mut self, tuning: &mut Tuning) {
        let stored = tuning.stored(&self.boot_id, self.now());
        let _is_problem = self.document.save(&stored, |unsaved| {
            let e = &unsaved.error;
            match &unsaved.of_boot {
                None => format!("{e}; learnt values and proven harm do not survive a reboot"),
                Some(also) => {
                    format!(
                        "{e}; {also}; learnt values and proven harm do not survive a restart of \
                         the daemon"
                    )
                }
            }
        });
        if !self.document.is_lost {
            tuning.was_stored();
        }
    }

    /// Files of an earlier run that could not be read or parsed, with the fix.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        self.unreadable.iter().cloned()
    }

    /// Why the learnt state does not survive a reboot.
    pub(super) fn problem(&self) -> Option<String> {
        self.document.problem.text().cloned()
    }
}
