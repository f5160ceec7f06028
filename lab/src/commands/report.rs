//! `rto-lab report` and `rto-lab compare`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use super::publish;
use crate::{
    engine::{self, Log},
    report,
};

/// `rto-lab report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Directory with the logs of experiments (EXPERIMENT.jsonl)
    dir: PathBuf,
    /// Also write the tables between the markers of this page
    #[arg(long, value_name = "FILE.md")]
    page: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// `rto-lab compare`.
#[derive(Debug, Args)]
pub struct Compare {
    /// The base of the comparison
    one: PathBuf,
    /// The logs to compare with it
    other: PathBuf,
    /// Directory of the report
    #[arg(long, value_name = "DIR", default_value = "rto-lab-report")]
    out: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ReportArgs) -> anyhow::Result<()> {
    for path in logs(&args.dir)? {
        let (manifest, records) = Log::read(&path)?;
        let report = engine::report(&manifest, &records);
        if let Some(page) = &args.page {
            report::write_tables(page, &report)?;
        }
        let dir = path.parent().unwrap_or(&args.dir);
        publish(&report, dir, args.json)?;
    }
    Ok(())
}

pub(super) fn compare(args: &Compare) -> anyhow::Result<()> {
    let mut none = true;
    for path in logs(&args.one)? {
        let other = match path.file_name() {
            Some(name) if args.other.is_dir() => args.other.join(name),
            _ => args.other.clone(),
        };
        if !other.exists() {
            continue;
        }
        none = false;
        let (one, other) = (Log::read(&path)?, Log::read(&other)?);
        let [name, other_name] = [&args.one, &args.other].map(|path| path.display().to_string());
        let report = engine::compare((&name, &one.0, &one.1), (&other_name, &other.0, &other.1))?;
        publish(&report, &args.out, args.json)?;
    }
    if none {
        bail!(
            "no common experiment in {} and {}",
            args.one.display(),
            args.other.display()
        );
    }
    Ok(())
}

/// The logs of a directory, or the named log.
fn logs(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let at = || path.display().to_string();
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let mut logs = Vec::new();
    for entry in fs::read_dir(path).with_context(at)? {
        let entry = entry?.path();
        if entry.extension().is_some_and(|ending| ending == "jsonl") {
            logs.push(entry);
        }
    }
    ensure!(
        !logs.is_empty(),
        "{}: does not contain a log of an experiment",
        at()
    );
    logs.sort();
    Ok(logs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_current() {
        let mut found = Vec::new();
        for page in ["lab", "published", "results", "workloads"] {
            let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/research");
            let text = fs::read_to_string(format!("{docs}/{page}.md")).unwrap();
            for part in text.split("<!-- ").skip(1) {
                let (marker, rest) = part.split_once(" -->\n").unwrap();
                let (kind, table) = marker.split_once(": ").unwrap();
                if kind != "end" {
                    let lines = rest.lines().filter(|line| line.starts_with('|')).count();
                    assert!(lines > 2, "{page}: {marker} was never measured");
                    let title = rest.lines().next().unwrap();
                    assert!(title.contains("rto_min"), "{page}, {marker}: {title}");
                    let begin = format!("<!-- end: {table} -->");
                    assert!(text.contains(&begin), "{page}: no {begin}");
                    found.push(kind.to_owned());
                }
            }
        }
        found.sort();
        found.dedup();
        assert_eq!(
            found,
            [
                "blackout",
                "estimator",
                "file",
                "loss",
                "outage",
                "pages",
                "programs",
                "rtt",
                "sampler",
                "tail",
                "workloads"
            ]
        );
    }
}
