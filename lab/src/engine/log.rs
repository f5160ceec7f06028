//! The log of an experiment: a manifest, and a line for each finished run.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{facts::HostFacts, machine::Machine};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::Design;

/// The measurements at some levels of the factors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Level of each factor.
    pub factors: BTreeMap<String, String>,
    /// Number of the run among the runs with the same levels.
    #[serde(default)]
    pub run: u32,
    /// Values of each measure. A reference may have only a statistic, such as "latency p50".
    pub values: BTreeMap<String, Vec<f64>>,
    /// Number of measured values that each value of a measure represents, if it is not one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, f64>,
}

impl Record {
    /// A record without values.
    pub fn new<'a>(factors: impl IntoIterator<Item = (&'a str, &'a str)>, run: u32) -> Self {
        let own = |(name, level): (&str, &str)| (name.to_owned(), level.to_owned());
        Self {
            factors: factors.into_iter().map(own).collect(),
            run,
            ..Self::default()
        }
    }

    /// Adds a value.
    #[must_use]
    pub fn with(self, measure: &str, value: f64) -> Self {
        self.with_all(measure, [value])
    }

    /// Adds these values of a measure.
    #[must_use]
    pub fn with_all(mut self, measure: &str, values: impl IntoIterator<Item = f64>) -> Self {
        self.values
            .insert(measure.to_owned(), values.into_iter().collect());
        self
    }

    /// Sets the number of measured values that each value of a measure represents.
    #[must_use]
    pub fn weighing(mut self, measure: &str, weight: f64) -> Self {
        self.weights.insert(measure.to_owned(), weight);
        self
    }

    /// Values of a measure, each with its weight.
    pub(crate) fn weighted(&self, measure: &str) -> impl Iterator<Item = Weighted> {
        let weight = self.weights.get(measure).copied().unwrap_or(1.0);
        let values = self.values.get(measure).into_iter().flatten();
        values.map(move |value| (*value, weight))
    }

    /// The level of a factor; empty if the factor does not vary.
    pub fn level(&self, factor: &str) -> &str {
        self.factors.get(factor).map_or("", String::as_str)
    }
}

/// A value and its weight.
pub type Weighted = (f64, f64);

/// Values of a measure, of all records together.
pub(super) fn values<'a>(
    records: impl Iterator<Item = &'a Record>,
    measure: &str,
) -> Vec<Weighted> {
    records
        .flat_map(|record| record.weighted(measure))
        .collect()
}

/// Facts that must be the same for runs to be in one table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The machine.
    pub machine: Machine,
    /// Seed of the order and of all random choices.
    pub seed: u64,
    /// Hash of the list of runs.
    pub plan: u64,
    /// The design of its report.
    pub design: Design,
    /// The hosts, if it was measured between hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<(String, HostFacts)>,
}

#[derive(Serialize, Deserialize)]
struct Line<R> {
    run: R,
    records: Vec<Record>,
}

/// A run and its records.
type Done<R> = (R, Vec<Record>);

/// The file.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
}

impl Log {
    /// The file of an experiment in a directory.
    pub fn path(dir: &Path, experiment: &str) -> PathBuf {
        dir.join(format!("{experiment}.jsonl"))
    }

    /// Opens or creates the log of an experiment in a directory, which it creates; returns the finished runs. `fresh`
    /// discards them. An incomplete line, which a killed process may leave at the end, is ignored. A log without runs,
    /// which a rejected definition may leave, is replaced.
    pub(crate) fn open<R: DeserializeOwned>(
        dir: &Path,
        manifest: &Manifest,
        fresh: bool,
    ) -> anyhow::Result<(Self, Vec<Done<R>>)> {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let path = Self::path(dir, &manifest.design.name);
        let at = || path.display().to_string();
        if fresh && path.exists() {
            fs::remove_file(&path).with_context(at)?;
        }
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(at)?,
        };
        let mut whole = whole(&text);
        let mut done = Vec::new();
        let first = whole.lines().next();
        let before = first.and_then(|first| serde_json::from_str::<Manifest>(first).ok());
        if before.is_some() && whole.lines().count() == 1 {
            whole = "";
        }
        if !whole.is_empty() {
            ensure!(
                before.as_ref() == Some(manifest),
                "{} has runs of another plan, seed, link or machine: give another directory with \
                 --out, or discard these runs with --fresh",
                path.display()
            );
            done = lines(whole, &path)?;
        }
        let file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(at)?;
        // Cuts an incomplete line, so that nothing is appended to it.
        file.set_len(whole.len() as u64).with_context(at)?;
        let mut log = Self { file, path };
        if whole.is_empty() {
            log.line(manifest)?;
        }
        Ok((log, done))
    }

    /// Reads the log of any experiment.
    pub fn read(path: &Path) -> anyhow::Result<(Manifest, Vec<Record>)> {
        let at = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(at)?;
        let first = text.lines().next().unwrap_or_default();
        let manifest: Manifest = serde_json::from_str(first)
            .with_context(|| format!("{}: not a log of rto-lab", at()))?;
        let done = lines::<serde_json::Value>(whole(&text), path)?;
        Ok((
            manifest,
            done.into_iter().flat_map(|(_, records)| records).collect(),
        ))
    }

    /// Adds a run.
    pub(crate) fn add(&mut self, run: &impl Serialize, records: &[Record]) -> anyhow::Result<()> {
        self.line(&Line {
            run,
            records: records.to_vec(),
        })
    }

    fn line(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let line = format!("{}\n", serde_json::to_string(value)?);
        let whole = self.file.metadata()?.len();
        let written = self.file.write_all(line.as_bytes());
        if written.is_err() {
            // Cuts the incomplete line: the disk may have room for the next one.
            let _ = self.file.set_len(whole);
        }
        written.with_context(|| self.path.display().to_string())
    }
}

/// The text without an incomplete last line.
fn whole(text: &str) -> &str {
    text.rfind('\n').map_or("", |end| &text[..=end])
}

/// The lines after the manifest.
fn lines<R: DeserializeOwned>(text: &str, path: &Path) -> anyhow::Result<Vec<Done<R>>> {
    let all = (2..).zip(text.lines().skip(1));
    let parsed = all.map(|(number, line)| {
        let one: Line<R> = serde_json::from_str(line)
            .with_context(|| format!("{}, line {number}", path.display()))?;
        Ok((one.run, one.records))
    });
    parsed.collect()
}

#[cfg(test)]
pub(super) mod tests {
    use tempfile::TempDir;

    use super::*;

    pub(in super::super) fn machine() -> Machine {
        Machine {
            kernel: "6.18".to_owned(),
            hz: 250,
            architecture: "x86_64".to_owned(),
            processor: "one".to_owned(),
            cores: 2,
        }
    }

    fn manifest(seed: u64) -> Manifest {
        Manifest {
            seed,
            ..manifest_of(Design {
                name: "trial".to_owned(),
                ..Design::default()
            })
        }
    }

    fn open(dir: &TempDir, seed: u64) -> anyhow::Result<(Log, Vec<Done<u32>>)> {
        Log::open(dir.path(), &manifest(seed), false)
    }

    pub(in super::super) fn manifest_of(design: Design) -> Manifest {
        Manifest {
            machine: machine(),
            seed: 1,
            plan: 1,
            design,
            hosts: Vec::new(),
        }
    }

    fn record(run: u32) -> Record {
        Record::new([("lost", "10")], run).with("idle", 208.125)
    }

    #[test]
    fn finished_runs_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = Log::path(dir.path(), "trial");
        let (mut log, before) = open(&dir, 1).unwrap();
        assert_eq!(before, []);
        log.add(&0, &[record(0)]).unwrap();
        drop(log);
        // Killed in the middle of a line.
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"run\":").unwrap();
        assert_eq!(Log::read(&path).unwrap().1, [record(0)]);
        let (mut log, before) = open(&dir, 1).unwrap();
        assert_eq!(before, [(0, vec![record(0)])]);
        log.add(&1, &[record(1)]).unwrap();
        let (_, before) = open(&dir, 1).unwrap();
        assert_eq!(before.len(), 2);
        assert_eq!(
            Log::read(&path).unwrap(),
            (manifest(1), vec![record(0), record(1)])
        );
    }

    #[test]
    fn log_without_runs_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = Log::path(dir.path(), "trial");
        drop(open(&dir, 1).unwrap());
        let (mut log, before) = open(&dir, 2).unwrap();
        assert_eq!(before, []);
        log.add(&0, &[record(0)]).unwrap();
        assert_eq!(Log::read(&path).unwrap(), (manifest(2), vec![record(0)]));
        // A file that is not a log is left alone.
        fs::write(&path, "nonsense\n").unwrap();
        assert!(open(&dir, 1).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "nonsense\n");
    }

    #[test]
    fn runs_of_another_experiment_are_not_mixed_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = Log::path(dir.path(), "trial");
        let (mut log, _) = open(&dir, 1).unwrap();
        log.add(&0, &[record(0)]).unwrap();
        let before = fs::read_to_string(&path).unwrap();
        let error = open(&dir, 2).unwrap_err().to_string();
        assert!(
            error.contains("--out") && error.contains("--fresh"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
        fs::write(&path, format!("{before}nonsense\n")).unwrap();
        let error = format!("{:#}", open(&dir, 1).unwrap_err());
        assert!(error.contains("line 3"), "{error}");
        fs::write(&path, "nonsense\n").unwrap();
        assert!(
            Log::read(&path)
                .unwrap_err()
                .to_string()
                .contains("not a log")
        );
    }
}
