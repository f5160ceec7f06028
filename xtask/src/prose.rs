//! Refuses phrases that read as translated: `xtask/prose/phrases`, except where `xtask/prose/exceptions` has the file
//! and the phrase, as "PATH: PHRASE".

use std::{fs, process::Command};

use anyhow::ensure;

use crate::root;

const PHRASES: &str = "xtask/prose/phrases";
const EXCEPTIONS: &str = include_str!("../prose/exceptions");
/// The files that are checked.
const FILES: &str =
    "*.rs *.md *.toml *.yaml *.yml *.sh *.service *.1 :!xtask/prose :!xtask/src/prose.rs";
/// Names of functions that begin with a pronoun have no subject.
const NAMES: &str = "fn (it|what|who|one|that|those|which|nobody)_[a-z0-9_]*";

pub(crate) fn check() -> anyhow::Result<()> {
    let mut hits = grep(&["-i", "-w", "-E", "-f", PHRASES], FILES)?;
    hits.extend(grep(&["-E", "-e", NAMES], "*.rs :!xtask/src/prose.rs")?);
    let exceptions: Vec<&str> = EXCEPTIONS.lines().filter(|l| !l.starts_with('#')).collect();
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
    phrase: String,
}

impl Hit {
    /// "PATH:LINE:COLUMN:PHRASE", as git prints it. Of Rust only comments, strings and names are read.
    fn of(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, ':');
        let path = parts.next()?.to_owned();
        let line: usize = parts.next()?.parse().ok()?;
        let column: usize = parts.next()?.parse().ok()?;
        let phrase = parts.next()?.to_lowercase();
        if path.ends_with(".rs") && !phrase.starts_with("fn ") {
            let text = fs::read_to_string(root().join(&path)).ok()?;
            let before = text.lines().nth(line - 1)?.get(..column - 1)?;
            if !before.contains("//") && !before.contains('"') {
                return None;
            }
        }
        let phrase = phrase.trim_start_matches("fn ").to_owned();
        Some(Self { path, line, phrase })
    }

    fn exception(&self) -> String {
        format!("{}: {}", self.path, self.phrase)
    }
}

fn grep(options: &[&str], files: &str) -> anyhow::Result<Vec<Hit>> {
    let output = Command::new("git")
        .current_dir(root())
        .args(["grep", "--line-number", "--column", "--only-matching"])
        .args(options)
        .arg("--")
        .args(files.split(' '))
        .output()?;
    // Status 1: nothing was found.
    let is_good = output.status.code().is_some_and(|code| code <= 1);
    ensure!(is_good, "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().filter_map(Hit::of).collect())
}
