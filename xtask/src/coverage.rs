//! `cargo xtask coverage`: runs the tests of `cargo xtask test` with instrumented programs, and prints the covered
//! lines of each crate, including lines that programs run which integration tests start.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::Context as _;
use serde::Deserialize;

use crate::{
    process::{output, run as run_command},
    root, test,
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
    /// Only install and build what the tests need
    #[arg(long)]
    no_run: bool,
}

const CARGO_LLVM_COV: &str = "0.9.1";

/// The export of `cargo llvm-cov report`.
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
    // Reads the profiles. It must come from the toolchain, because each LLVM has its own format.
    run_command(Command::new("rustup").current_dir(root()).args([
        "--quiet",
        "component",
        "add",
        "llvm-tools",
    ]))?;
    let target = root().join("target/coverage");
    // cargo llvm-cov and all programs below it get the build's environment.
    let instrumented = |program: &Path| {
        let mut sh = Command::new("sh");
        sh.current_dir(root())
            .args(["-c", ENVIRONMENT])
            .arg(program)
            .env("PATH", &path)
            .env("CARGO_TARGET_DIR", &target)
            // Thousands of processes share a few files, because each file has megabytes.
            .env("LLVM_PROFILE_FILE_NAME", "rto-agent-%4m.profraw")
            // Coverage does not need debug information.
            .env("CARGO_PROFILE_DEV_DEBUG", "false");
        sh
    };
    let cargo = cargo();
    let cargo = Path::new(cargo.get_program());
    take_libraries(&root().join("target/debug"), &target.join("debug"))?;
    // Exists from a `--no-run` to the run that uses its programs.
    let built = target.join("built");
    if fs::remove_file(&built).is_err() || args.no_run {
        // Removes programs without counters, and profiles and programs of an earlier run; the libraries stay.
        run_command(instrumented(cargo).args(["llvm-cov", "clean", "--workspace"]))?;
    }
    if args.no_run {
        run_command(instrumented(cargo).args(test::BUILD))?;
        return Ok(fs::write(built, "")?);
    }
    let mut test = instrumented(&std::env::current_exe()?);
    test.arg("test").args(args.filter.as_slice());
    if args.unprivileged {
        test.arg("--unprivileged");
    }
    let tested = run_command(&mut test);
    let json =
        output(instrumented(cargo).args(["llvm-cov", "report", "--json", "--summary-only"]))?;
    println!("\n{}", table(&crates(&json, &root())?));
    // Lines that a failed test ran count as well.
    tested
}

/// Runs a program in the environment of an instrumented build. The option disables `cfg(coverage)`, which the lints do
/// not know.
const ENVIRONMENT: &str =
    r#"eval "$(cargo llvm-cov show-env --sh --no-cfg-coverage)" && exec "$0" "$@""#;

/// Copies the build of `cargo xtask test` into a directory without any build. Libraries are not instrumented, so both
/// builds have the same ones; cargo recognises them as fresh by their times.
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
    // These may be hard links, because rustc replaces these files. cargo and build scripts write into the files of the
    // other directories.
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
