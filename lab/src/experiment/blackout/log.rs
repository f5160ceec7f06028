//! The runs that are done, line by line in a file, so that an experiment which was broken off goes on.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rto_testbed::machine::Machine;
use serde::{Deserialize, Serialize};

use super::plan::{Plan, Run};
use crate::topology::LinkBackend;

/// What has to be the same, so that runs may testbed in one table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// On what.
    pub machine: Machine,
    /// Over what.
    pub link: LinkBackend,
    /// Seed of the order.
    pub seed: u64,
    /// Of what.
    pub plan: Plan,
}

/// A run that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// Which.
    pub run: Run,
    /// The longest time between two responses, microseconds.
    pub idle_us: u64,
    /// How long all was lost, microseconds.
    pub blackout_us: u64,
    /// Packets lost.
    pub dropped: u64,
    /// Attempts that did not count, as nothing was lost in them.
    pub repeated: u32,
}

/// The file.
#[derive(Debug)]
pub(super) struct Log {
    file: File,
    path: PathBuf,
}

impl Log {
    /// Opens or makes it; what was done before. A line that is not whole, as the last one of a killed process may
    /// be, is not taken.
    ///
    /// # Errors
    ///
    /// If it is of another experiment, or cannot be read or written.
    pub(super) fn open(path: &Path, manifest: &Manifest) -> anyhow::Result<(Self, Vec<RunRecord>)> {
        let at = || path.display().to_string();
        let text = match fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(at)?,
        };
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut lines = whole.lines();
        if let Some(first) = lines.next() {
            let before: Manifest = serde_json::from_str(first).with_context(at)?;
            ensure!(
                before == *manifest,
                "{} has runs of another plan, seed, link or machine: name another directory by --out, or \
                 begin anew by --fresh",
                path.display()
            );
        }
        let mut done = Vec::new();
        for (number, line) in lines.enumerate() {
            let one = serde_json::from_str(line);
            done.push(one.with_context(|| format!("{}, line {}", path.display(), number + 2))?);
        }
        let file = File::options()
            .create(true)
            .append(true)
            .open(path)
            .with_context(at)?;
        // Nothing is added to half a line.
        file.set_len(whole.len() as u64).with_context(at)?;
        let mut log = Self {
            file,
            path: path.to_owned(),
        };
        if whole.is_empty() {
            log.line(manifest)?;
        }
        Ok((log, done))
    }

    /// Adds a run.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub(super) fn add(&mut self, done: &RunRecord) -> anyhow::Result<()> {
        self.line(done)
    }

    fn line(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let line = format!("{}\n", serde_json::to_string(value)?);
        self.file
            .write_all(line.as_bytes())
            .with_context(|| self.path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::plan::*, *};

    fn manifest(seed: u64) -> Manifest {
        Manifest {
            machine: Machine {
                kernel: "6.18".to_owned(),
                hz: 250,
                architecture: "x86_64".to_owned(),
                processor: "one".to_owned(),
                cores: 2,
            },
            link: LinkBackend::Relay,
            seed,
            plan: Plan {
                mechanisms: vec![Mechanism::Kernel],
                settings: Vec::new(),
                disruptions_us: vec![10_000],
                runs: 2,
                control_runs: 0,
            },
        }
    }

    fn done(number: u32) -> RunRecord {
        let cell = manifest(1).plan.cells()[0];
        RunRecord {
            run: Run { cell, number },
            idle_us: 208_000,
            blackout_us: 10_000,
            dropped: 1,
            repeated: 0,
        }
    }

    #[test]
    fn what_was_done_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("runs");
        let (mut log, before) = Log::open(&path, &manifest(1)).unwrap();
        assert_eq!(before, []);
        log.add(&done(0)).unwrap();
        drop(log);
        // Killed in the middle of a line.
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"run\":").unwrap();
        let (mut log, before) = Log::open(&path, &manifest(1)).unwrap();
        assert_eq!(before, [done(0)]);
        log.add(&done(1)).unwrap();
        let (_, before) = Log::open(&path, &manifest(1)).unwrap();
        assert_eq!(before, [done(0), done(1)]);
    }

    #[test]
    fn runs_of_another_experiment_are_not_mixed_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("runs");
        let (mut log, _) = Log::open(&path, &manifest(1)).unwrap();
        log.add(&done(0)).unwrap();
        let before = fs::read_to_string(&path).unwrap();
        let error = Log::open(&path, &manifest(2)).unwrap_err().to_string();
        assert!(
            error.contains("--out") && error.contains("--fresh"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
        fs::write(&path, format!("{before}nonsense\n")).unwrap();
        let error = format!("{:#}", Log::open(&path, &manifest(1)).unwrap_err());
        assert!(error.contains("line 3"), "{error}");
    }
}
