//! Where what was learnt is kept: `persistent_dir/tuning.json`, over a reboot; `state_dir/tuning.json` where that cannot
//! be written, for this boot.

use std::{
    fs,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tracing::warn;

use super::{runtime::boottime_ms, store::boot_id};
use crate::{
    config::{AgentConfig, atomic_file::AtomicFile, regular_file},
    path_security, printable,
    problem::Problem,
    progress::Stepwise,
    tuning::{Kept, Moment, ParseError, Restored, Tuning},
    wire::types::now_ms,
};

const FILE: &str = "tuning.json";
/// Longest file, bytes: more than a thousand policies take.
const MAX_FILE: u64 = 1 << 28;
/// How often what only grew is written.
const INTERVAL: Duration = Duration::from_secs(60);
/// Bytes that are written at once.
const PIECE: usize = 64 << 10;

/// The files, and the clock that times in them are of.
#[derive(Debug)]
pub(super) struct TuningStore {
    /// What names this daemon among several.
    owner: String,
    boot_id: String,
    persistent_dir: PathBuf,
    state_dir: PathBuf,
    /// The persistent file is another daemon's.
    is_taken: bool,
    /// Where the tuner's clock began, and the boot's at that moment.
    began: (u64, u64),
    written: Instant,
    /// The last change is on no disk.
    is_lost: bool,
    /// Why it does not outlive the boot.
    problem: Problem,
}

impl TuningStore {
    /// Reads what an earlier run has left. What cannot be understood is moved aside and said.
    pub(super) fn open(agent: &AgentConfig) -> (Self, Restored) {
        let mut store = Self {
            owner: agent.pin_dir.to_string_lossy().into_owned(),
            boot_id: boot_id(),
            persistent_dir: agent.persistent_dir.clone(),
            state_dir: agent.state_dir.clone(),
            is_taken: false,
            began: (0, boottime_ms()),
            written: Instant::now(),
            is_lost: false,
            problem: Problem::default(),
        };
        let lasting = store.read(&store.persistent_dir.join(FILE));
        let of_boot = store.read(&store.state_dir.join(FILE));
        store.is_taken = matches!(lasting, Err(ParseError::Owner(_)));
        if let Err(e) = &lasting
            && store.is_taken
        {
            let text = format!(
                "{} {e}: give this one a persistent_dir of its own; what is learnt does not outlive this boot",
                printable::path(&store.persistent_dir.join(FILE))
            );
            store.problem.becomes(Some(text), |text| warn!("{text}"));
        }
        // The other one is of a time at which the first could not be written.
        let restored = [lasting, of_boot].into_iter().flatten();
        let restored = restored.max_by_key(Restored::at_ms).unwrap_or_default();
        store.began.0 = restored.now_ms(store.began.1, now_ms());
        (store, restored)
    }

    fn read(&self, path: &Path) -> Result<Restored, ParseError> {
        if let Err(e) = AtomicFile::remove_stale(path) {
            warn!("a draft of {} cannot be removed: {e}", path.display());
        }
        let text = match regular_file::read(path, MAX_FILE) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Restored::default()),
            Err(e) => {
                warn!("{}: {e}; timers are learnt anew", printable::path(path));
                return Ok(Restored::default());
            }
        };
        let parsed = Restored::parse(&text, &self.owner, &self.boot_id);
        if let Err(e @ (ParseError::Json(_) | ParseError::Format(_))) = &parsed {
            let aside = path.with_extension("json.unreadable");
            let moved = match fs::rename(path, &aside) {
                Ok(()) => format!("it was moved to {}", printable::path(&aside)),
                Err(e) => format!("it cannot be moved aside: {e}"),
            };
            warn!(
                "{} {e}; timers are learnt anew, and {moved}",
                printable::path(path)
            );
            return Ok(Restored::default());
        }
        parsed
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
        let kept = tuning.kept(&self.owner, &self.boot_id, self.now());
        let lasting = match self.is_taken {
            true => Err(io::Error::other("it is another daemon's")),
            false => write(&kept, &self.persistent_dir),
        };
        let Err(e) = lasting else {
            // What was written there instead is older now.
            let _gone = fs::remove_file(self.state_dir.join(FILE));
            self.problem = Problem::default();
            self.is_lost = false;
            tuning.was_stored();
            return;
        };
        let dir = printable::path(&self.persistent_dir);
        let of_boot = write(&kept, &self.state_dir);
        self.is_lost = of_boot.is_err();
        let problem = match of_boot {
            Ok(()) => {
                tuning.was_stored();
                format!("{dir}: {e}; what is learnt does not outlive this boot")
            }
            Err(also) => format!(
                "{dir}: {e}; {}: {also}; what is learnt does not outlive the daemon",
                printable::path(&self.state_dir)
            ),
        };
        self.problem.becomes(Some(problem), |text| warn!("{text}"));
    }

    /// Why what is learnt does not outlive the boot.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.text().cloned()
    }
}

fn write(kept: &Kept<'_>, dir: &Path) -> io::Result<()> {
    path_security::make_private(dir)?;
    let draft = AtomicFile::write_with(&dir.join(FILE), 0o600, |to| {
        let mut to = BufWriter::with_capacity(PIECE, Stepwise(to));
        serde_json::to_writer(&mut to, kept)?;
        to.flush()
    })?;
    draft.commit()
}
