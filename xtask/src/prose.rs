//! Refuses phrases that read as translated: `xtask/prose/phrases`, except where `xtask/prose/exceptions` has the file
//! and the phrase, as "PATH: PHRASE".

use std::{fs, process::Command};

use anyhow::{Context as _, ensure};

use crate::root;

const PHRASES: &str = "xtask/prose/phrases";
const EXCEPTIONS: &str = include_str!("../prose/exceptions");
/// The files that are checked.
const FILES: [&str; 10] = [
    "*.rs",
    "*.md",
    "*.toml",
    "*.yaml",
    "*.yml",
    "*.sh",
    "*.service",
    "*.1",
    ":!xtask/prose",
    ":!xtask/src/prose.rs",
];
/// Names of functions that begin with a pronoun have no subject.
const NAMES: &str = "fn (it|what|who|one|that|those|which|nobody)_[a-z0-9_]*";

pub(crate) fn check() -> anyhow::Result<()> {
    let mut hits = grep(&["-i", "-w", "-F", "-f", PHRASES], &FILES)?;
    hits.retain(Hit::is_prose);
    hits.extend(grep(
        &["-E", "-e", NAMES],
        &["*.rs", ":!xtask/src/prose.rs"],
    )?);
    let is_comment = |line: &&str| line.starts_with('#');
    let exceptions: Vec<&str> = EXCEPTIONS.lines().filter(|l| !is_comment(l)).collect();
    let refused = hits
        .iter()
        .filter(|hit| !exceptions.contains(&hit.exception().as_str()))
        .map(|hit| format!("{}:{}: {}", hit.path, hit.line, hit.phrase));
    let unused = exceptions
        .iter()
        .filter(|exception| !hits.iter().any(|hit| hit.exception() == **exception))
        .map(|exception| format!("xtask/prose/exceptions: {exception}: not found"));
    let wrong: Vec<String> = refused.chain(unused).collect();
    ensure!(
        wrong.is_empty(),
        "rewrite these sentences, or add \"PATH: PHRASE\" to xtask/prose/exceptions:\n{}",
        wrong.join("\n")
    );
    println!("no phrase of xtask/prose");
    Ok(())
}

struct Hit {
    path: String,
    line: usize,
    column: usize,
    phrase: String,
}

impl Hit {
    /// "PATH:LINE:COLUMN:PHRASE", as git prints it.
    fn of(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, ':');
        Some(Self {
            path: parts.next()?.to_owned(),
            line: parts.next()?.parse().ok()?,
            column: parts.next()?.parse().ok()?,
            phrase: parts.next()?.trim_start_matches("fn ").to_lowercase(),
        })
    }

    fn exception(&self) -> String {
        format!("{}: {}", self.path, self.phrase)
    }

    /// Of Rust only comments and strings are read.
    fn is_prose(&self) -> bool {
        let text = fs::read_to_string(root().join(&self.path)).unwrap_or_default();
        let line = text.lines().nth(self.line - 1).unwrap_or_default();
        let before = line.get(..self.column - 1).unwrap_or(line);
        !self.path.ends_with(".rs") || before.contains("//") || before.contains('"')
    }
}

fn grep(options: &[&str], files: &[&str]) -> anyhow::Result<Vec<Hit>> {
    let output = Command::new("git")
        .current_dir(root())
        .args(["grep", "--line-number", "--column", "--only-matching"])
        .args(options)
        .arg("--")
        .args(files)
        .output()?;
    // Status 1: nothing was found.
    let is_good = output.status.code().is_some_and(|code| code <= 1);
    ensure!(is_good, "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let hits = text.lines().map(|line| Hit::of(line).context("git grep"));
    hits.collect()
}
