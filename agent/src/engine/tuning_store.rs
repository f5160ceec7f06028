//! Where what was learnt is kept: `persistent_dir/tuning.json`, over a reboot; `state_dir/tuning.json` where that cannot
//! be written, for this boot.

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
/// How often what only grew is written.
const INTERVAL: Duration = Duration::from_secs(60);

/// The files, and the clock that times in them are of.
#[derive(Debug)]
pub(super) struct TuningStore {
    boot_id: String,
    document: LastingDocument,
    /// Where the tuner's clock began, and the boot's at that moment.
    began: (u64, u64),
    written: Instant,
    /// The last change is on no disk.
    is_lost: bool,
    /// Which files of an earlier run could not be read or understood, and how to fix it.
    unreadable: Vec<String>,
    /// Why it does not outlive the boot.
    problem: Problem,
    /// Less is remembered than was asked for.
    memory: Problem,
}

impl TuningStore {
    /// Reads what an earlier run has left. What cannot be understood is moved aside and said.
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
        let problem = taken.map(|why| format!("{why}; what is learnt does not outlive this boot"));
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
        // The other one is of a time at which the first could not be written.
        let restored = [lasting, of_boot].into_iter().flatten();
        let restored = restored.max_by_key(Restored::at_ms).unwrap_or_default();
        store.began.0 = restored.now_ms(store.began.1, now_ms());
        (store, restored)
    }

    /// What the clocks say.
    pub(super) fn now(&self) -> Moment {
        let (tuner_ms, began_ms) = self.began;
        let boottime_ms = boottime_ms();
        Moment {
            tuner_ms: tuner_ms.saturating_add(boottime_ms.saturating_sub(began_ms)),
            boottime_ms,
            unix_ms: now_ms(),
        }
    }

    /// Writes a transition at once, and what only grew once a minute.
    pub(super) fn save_if_due(&mut self, tuning: &mut Tuning) {
        let is_due = || self.written.elapsed() >= INTERVAL;
        if tuning.has_changed() && (!self.is_lost || is_due()) || tuning.has_grown() && is_due() {
            self.save(tuning);
        }
    }

    /// Writes what is not on the disk yet.
    pub(super) fn save_last(&mut self, tuning: &mut Tuning) {
        if tuning.has_changed() || tuning.has_grown() {
            self.save(tuning);
        }
    }

    fn save(&mut self, tuning: &mut Tuning) {
        self.written = Instant::now();
        let limited = tuning.limit_memory().map(|hours| {
            format!(
                "because of the number of learnt and guarded timers each remembers {hours} hours at most, and not all of its memory"
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
                format!("{e}; what is learnt does not outlive this boot")
            }
            Some(also) => format!("{e}; {also}; what is learnt does not outlive the daemon"),
        };
        self.problem.becomes(Some(problem), |text| warn!("{text}"));
    }

    /// Which files of an earlier run could not be read or understood, and how to fix it; and whether less is remembered
    /// than was asked for.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let memory = self.memory.text().into_iter();
        self.unreadable.iter().chain(memory).cloned()
    }

    /// Why what is learnt does not outlive the boot.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.text().cloned()
    }
}

/// What a file has, or why nothing is known of it.
fn read(document: &mut Document, boot_id: &str) -> (Option<Restored>, Option<String>) {
    let (stored, lost) = match document.load::<Stored>() {
        Ok(read) => read,
        Err(e) => (None, Some(format!("{e}; let root read it, or remove it"))),
    };
    (stored.map(|stored| Restored::of(stored, boot_id)), lost)
}
