//! `cargo xtask mutants`: changes one expression of the pure code at a time, and checks whether its unit tests fail.
//!
//! `.cargo/mutants.toml` lists the code that is changed, and each exclusion with its reason.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::{
    process::output,
    root,
    tools::{self, cargo},
    vm::image::copy,
};

/// `cargo xtask mutants`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An area [default: each in turn]
    #[arg(value_parser = AREAS.map(|(name, ..)| name))]
    area: Option<String>,
    /// Run every Nth mutant of an area, starting with the Kth (0 to N-1)
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,
    /// Run only mutants whose name, as printed for missed ones, matches this regular expression (deleted fields always
    /// run)
    #[arg(long, value_name = "REGEX")]
    only: Option<String>,
}

const CARGO_MUTANTS: &str = "27.1.0";

/// Parts of the code with their own lines in the report: a name, options that select the files, and a filter of the unit
/// tests that run. The agent's tests take half a minute, most of it for code far from the change. Files are excluded by
/// globs, because expressions that match names do not apply to deleted fields (cargo-mutants 27.1.0).
const AREAS: [(&str, &str, &str); 4] = [
    ("program", "-p rto-agent-common -p rto-agent-ebpf", ""),
    ("model", "-p rto-model", ""),
    ("policy", "-p rto-agent-core", "policy::"),
    ("engine", "-p rto-agent-daemon", "engine::"),
];

/// Number of mutants per outcome, as in `outcomes.json` of cargo-mutants.
#[derive(Default, Deserialize)]
struct Counts {
    caught: u32,
    missed: u32,
    timeout: u32,
    /// Mutants that do not compile.
    unviable: u32,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let path = tools::ensure("cargo-mutants", CARGO_MUTANTS, &[], "cargo xtask mutants")?;
    let own = root().join("target/mutants");
    let tree = own.join("tree");
    copy_sources(&tree)?;
    let is_chosen = |name| args.area.as_deref().is_none_or(|area| area == name);
    let mut table = vec![
        "area      mutants      run   caught   missed  timeout unviable   caught of viable"
            .to_owned(),
    ];
    for (area, files, filter) in AREAS.into_iter().filter(|(name, ..)| is_chosen(*name)) {
        let mutants = || {
            let mut mutants = cargo();
            mutants
                .args(["mutants", "--in-place", "--dir"])
                .arg(&tree)
                .args(files.split(' '))
                .args(args.only.iter().flat_map(|names| ["--re", names]))
                .env("PATH", &path);
            mutants
        };
        let all = output(mutants().arg("--list"))?.lines().count();
        println!("{area}: {all} mutants");
        let out = own.join(area);
        fs::create_dir_all(&out)?;
        let mut tests = mutants();
        tests
            .arg("--output")
            .arg(&out)
            .args(["--colors", "never"])
            // CARGO_BUILD_JOBS limits the parallel jobs.
            .args(["--jobserver", "false"])
            // A quarter of the time of the model's tests; a mutant that only more cases would detect counts as missed.
            .env("PROPTEST_CASES", "64")
            // The tests of the next mutant must not begin with the input that this mutant failed with.
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true")
            .env("CARGO_TARGET_DIR", own.join("build"));
        if let Some(shard) = &args.shard {
            tests.args(["--shard", shard]);
        }
        tests.args(["--", "--"]).arg(filter);
        let counts = test(&mut tests, &out.join("mutants.out/outcomes.json"))?;
        table.push(counts.row(area, all));
    }
    println!("\n{}", table.join("\n"));
    Ok(())
}

/// Copies the sources to a separate directory that is kept, so that its build can be reused: mutants are written into
/// it, and a run that is killed leaves its last one there.
fn copy_sources(tree: &Path) -> anyhow::Result<()> {
    let list = [
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ];
    let files = output(Command::new("git").current_dir(root()).args(list))?;
    for file in files.split_terminator('\0') {
        let (from, to) = (root().join(file), tree.join(file));
        // A file that is deleted, but not committed yet, is still listed.
        let Ok(text) = fs::read(&from) else { continue };
        // The build of a file that is not written stays fresh.
        if !fs::read(&to).is_ok_and(|there| there == text) {
            copy(&from, &to)?;
        }
    }
    Ok(())
}

/// Runs cargo-mutants. Missed mutants are not an error: the share counts.
fn test(mutants: &mut Command, outcomes: &Path) -> anyhow::Result<Counts> {
    let _absent = fs::remove_file(outcomes);
    let status = mutants.status().context("cannot run cargo mutants")?;
    // 2: some were missed; 3: some timed out.
    let is_result = matches!(status.code(), Some(0 | 2 | 3));
    ensure!(is_result, "cargo mutants: {status}");
    let Ok(text) = fs::read(outcomes) else {
        // This part has no mutants.
        return Ok(Counts::default());
    };
    serde_json::from_slice(&text).context("outcomes.json")
}

impl Counts {
    fn row(&self, area: &str, all: usize) -> String {
        // A busy machine causes timeouts itself: they count as not caught.
        let viable = self.caught + self.missed + self.timeout;
        let ran = viable + self.unviable;
        let outcomes = [ran, self.caught, self.missed, self.timeout, self.unviable];
        let columns = outcomes.map(|count| format!(" {count:>8}")).concat();
        let share = 100.0 * f64::from(self.caught) / f64::from(viable.max(1));
        format!("{area:<8} {all:>8}{columns} {share:>16.1} %")
    }
}
