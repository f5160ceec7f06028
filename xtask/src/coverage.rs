//! `cargo xtask coverage`: runs what `cargo xtask test` runs, with counters compiled in, and prints the lines of each crate
//! that were run, also by the programs that the integration tests start.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::Context as _;
use serde::Deserialize;

use crate::{
    process::{output, run as run_command},
    root,
    tools::{self, cargo},
};

/// `cargo xtask coverage`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this
    filter: Option<String>,
    /// Skip the integration tests
    #[arg(long)]
    unprivileged: bool,
}

const CARGO_LLVM_COV: &str = "0.9.1";

/// What `cargo llvm-cov report` exports.
#[derive(Deserialize)]
struct Export {
    data: Vec<Data>,
}

#[derive(Deserialize)]
struct Data {
    files: Vec<File>,
}

#[derive(Deserialize)]
struct File {
    filename: String,
    summary: Summary,
}

#[derive(Deserialize)]
struct Summary {
    lines: Lines,
}

#[derive(Default, Deserialize)]
struct Lines {
    count: u64,
    covered: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let path = tools::ensure(
        "cargo-llvm-cov",
        CARGO_LLVM_COV,
        &[],
        "cargo xtask coverage",
    )?;
    // Reads the profiles; of the toolchain, as each LLVM has a form of its own.
    run_command(Command::new("rustup").current_dir(root()).args([
        "--quiet",
        "component",
        "add",
        "llvm-tools",
    ]))?;
    let target = root().join("target/coverage");
    // Where cargo llvm-cov says how to build and to run, and everything below it does.
    let instrumented = |program: &Path| {
        let mut sh = Command::new("sh");
        sh.current_dir(root())
            .args(["-c", ENVIRONMENT])
            .arg(program)
            .env("PATH", &path)
            .env("CARGO_TARGET_DIR", &target)
            // Thousands of processes add to a few files; each has megabytes.
            .env("LLVM_PROFILE_FILE_NAME", "rto-agent-%4m.profraw")
            // Lines are found without it.
            .env("CARGO_PROFILE_DEV_DEBUG", "false");
        sh
    };
    let cargo = cargo();
    let cargo = Path::new(cargo.get_program());
    take_libraries(&root().join("target/debug"), &target.join("debug"))?;
    // Programs without counters, and profiles and programs of an earlier run; the libraries stay.
    run_command(instrumented(cargo).args(["llvm-cov", "clean", "--workspace"]))?;
    let mut test = instrumented(&std::env::current_exe()?);
    test.arg("test").args(args.filter.as_slice());
    if args.unprivileged {
        test.arg("--unprivileged");
    }
    let tested = run_command(&mut test);
    let json =
        output(instrumented(cargo).args(["llvm-cov", "report", "--json", "--summary-only"]))?;
    println!("\n{}", table(&crates(&json, &root())?));
    // A test that fails has run lines all the same.
    tested
}

/// Runs a program in the environment of an instrumented build. The option leaves the lints as they are, which know no
/// `cfg(coverage)`.
const ENVIRONMENT: &str =
    r#"eval "$(cargo llvm-cov show-env --sh --no-cfg-coverage)" && exec "$0" "$@""#;

/// Puts what `cargo xtask test` has built into a directory where nothing has been built yet: libraries have no counters,
/// and are the same. cargo sees by their times that they are fresh.
fn take_libraries(built: &Path, target: &Path) -> anyhow::Result<()> {
    if target.exists() || !built.join("deps").exists() {
        return Ok(());
    }
    fs::create_dir_all(target)?;
    let copy = || {
        let mut copy = Command::new("cp");
        copy.arg("--archive");
        copy
    };
    // rustc replaces these files, while cargo and build scripts write into those of the other directories.
    run_command(copy().arg("--link").args([&built.join("deps"), target]))?;
    let others = [".fingerprint", "build"].map(|part| built.join(part));
    run_command(copy().args(others).arg(target))
}

/// The lines of each crate's files, by directory.
fn crates(json: &str, root: &Path) -> anyhow::Result<BTreeMap<String, Lines>> {
    let export: Export = serde_json::from_str(json).context("cargo llvm-cov report")?;
    let mut crates = BTreeMap::<String, Lines>::new();
    for file in export.data.into_iter().flat_map(|data| data.files) {
        let Ok(path) = Path::new(&file.filename).strip_prefix(root) else {
            continue;
        };
        let Some(first) = path.iter().next() else {
            continue;
        };
        let lines = crates
            .entry(first.to_string_lossy().into_owned())
            .or_default();
        lines.count += file.summary.lines.count;
        lines.covered += file.summary.lines.covered;
    }
    Ok(crates)
}

fn table(crates: &BTreeMap<String, Lines>) -> String {
    let mut text = "crate          covered    lines  percent".to_owned();
    for (name, Lines { count, covered }) in crates {
        let tenths = (covered * 1000).checked_div(*count).unwrap_or(0);
        text.push_str(&format!(
            "\n{name:<14} {covered:>7} {count:>8} {:>6}.{}",
            tenths / 10,
            tenths % 10
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_up_by_crate() {
        let json = r#"{"data": [{"files": [
            {"filename": "/w/model/src/a.rs", "summary": {"lines": {"count": 30, "covered": 20}}},
            {"filename": "/w/model/src/b/c.rs", "summary": {"lines": {"count": 10, "covered": 9}}},
            {"filename": "/w/agent/src/lib.rs", "summary": {"lines": {"count": 1, "covered": 0}}},
            {"filename": "/elsewhere/model/src/a.rs", "summary": {"lines": {"count": 7, "covered": 7}}}
        ], "totals": {}}], "type": "llvm.coverage.json.export"}"#;
        let text = table(&crates(json, Path::new("/w")).unwrap());
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[1..],
            [["agent", "0", "1", "0.0"], ["model", "29", "40", "72.5"]]
        );
    }
}
