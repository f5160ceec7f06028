//! Persists what was learnt: in `persistent_dir/tuning.json`, over a reboot; if that cannot be
//! written, in `state_dir/tuning.json`, until reboot.

use std::time::{Duration, Instant};

use tracing::warn;

use super::{
    document::{Document, LastingDocument},
    store::boot_id,
};
use crate::{
    config::AgentConfig,
    kernel::clock::boottime_ms,
    problem::Problem,
    tuning::{Moment, Restored, Stored, Tuning},
    wire::types::now_ms,
};

pub(super) const FILE: &str = "tuning.json";
const FORMAT: u32 = 1;
/// How often growing statistics are written.
const INTERVAL: Duration = Duration::from_secs(60);

/// The files, and the clock of the times in them.
#[derive(Debug)]
pub(super) struct TuningStore {
    boot_id: String,
    document: LastingDocument,
    /// Start values of the tuner's clock and of CLOCK_BOOTTIME, milliseconds.
    began: (u64, u64),
    written: Instant,
    /// The last change could not be written to either file.
    is_lost: bool,
    /// Files of an earlier run that could not be read or parsed, and how to fix that.
    unreadable: Vec<String>,
    /// Why the learnt state does not survive a reboot.
    problem: Problem,
    /// Less is remembered than configured.
    memory: Problem,
}

impl TuningStore {
    /// Reads what an earlier run left. Moves a file that cannot be parsed aside, with a warning.
    pub(super) fn open(agent: &AgentConfig) -> (Self, Restored) {
        let mut store = Self {
            boot_id: boot_id(),
            document: LastingDocument::new(agent, FILE, FORMAT),
            began: (0, boottime_ms()),
            written: Instant::now(),
            is_lost: false,
            unreadable: Vec::new(),
            problem: Problem::default(),
            memory: Problem::default(),
        };
        let (lasting, lost) = read(&mut store.document.lasting, &store.boot_id);
        let (of_boot, also_lost) = read(&mut store.document.of_boot, &store.boot_id);
        let is_taken = store.document.lasting.is_taken();
        let taken = lost.clone().filter(|_| is_taken);
        let problem = taken.map(|why| format!("{why}; learnt values do not survive a reboot"));
        store.problem.becomes(problem, |text| warn!("{text}"));
        let unreadable = [
            lost.filter(|_| !is_taken),
            also_lost.filter(|_| !store.document.of_boot.is_taken()),
        ];
        for why in unreadable.into_iter().flatten() {
            let text = format!("learnt values are lost, and timers start learning again: {why}");
            warn!("{text}");
            store.unreadable.push(text);
        }
        // Use the later one: `state_dir` was written while `persistent_dir` could not be.
        let restored = [lasting, of_boot].into_iter().flatten();
        let restored = restored.max_by_key(Restored::at_ms).unwrap_or_default();
        store.began.0 = restored.now_ms(store.began.1, now_ms());
        (store, restored)
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
        let is_due = || self.written.elapsed() >= INTERVAL;
        if tuning.has_changed() && (!self.is_lost || is_due()) || tuning.has_grown() && is_due() {
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
        self.written = Instant::now();
        let limited = tuning.limit_memory().map(|hours| {
            format!(
                "because of the number of learnt and guarded timers, each remembers at most \
                 {hours} hours, less than its configured memory"
            )
        });
        self.memory.becomes(limited, |text| warn!("{text}"));
        let kept = tuning.kept(&self.boot_id, self.now());
        let Err(unsaved) = self.document.write(&kept) else {
            self.problem = Problem::default();
            self.is_lost = false;
            tuning.was_stored();
            return;
        };
        let e = unsaved.error;
        self.is_lost = unsaved.of_boot.is_some();
        let problem = match unsaved.of_boot {
            None => {
                tuning.was_stored();
                format!("{e}; learnt values do not survive a reboot")
            }
            Some(also) => format!(
                "{e}; {also}; learnt values do not survive a restart of the \
                                   daemon"
            ),
        };
        self.problem.becomes(Some(problem), |text| warn!("{text}"));
    }

    /// Files of an earlier run that could not be read or parsed, with the fix; and whether less is
    /// remembered than configured.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let memory = self.memory.text().into_iter();
        self.unreadable.iter().chain(memory).cloned()
    }

    /// Why the learnt state does not survive a reboot.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.text().cloned()
    }
}

/// The content of a file, and why it was lost.
fn read(document: &mut Document, boot_id: &str) -> (Option<Restored>, Option<String>) {
    let (stored, lost) = match document.load::<Stored>() {
        Ok(read) => read,
        Err(e) => (
            None,
            Some(format!("{e}; make it readable for root, or remove it")),
        ),
    };
    (stored.map(|stored| Restored::of(stored, boot_id)), lost)
}
