//! `cargo xtask mutants`: changes one expression of the pure code at a time, and checks whether its unit tests fail.
//!
//! `.cargo/mutants.toml` lists the code that is changed, and each exclusion with its reason.

use std::fs;

use anyhow::{Context as _, ensure};

use crate::{
    root,
    tools::{self, cargo},
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
}

const CARGO_MUTANTS: &str = "27.1.0";

/// Parts of the code with their own lines in the report: a name, options that select the files, and a filter of the unit
/// tests that run. The agent's tests take half a minute, most of it for code far from the change. Files are excluded by
/// globs, because expressions that match names do not apply to deleted fields (cargo-mutants 27.1.0).
const AREAS: [(&str, &str, &str); 4] = [
    ("program", "-p rto-agent-common -p rto-agent-ebpf", ""),
    ("model", "-p rto-model -p rto-advice", ""),
    ("policy", "-p rto-agent-core", "policy::"),
    ("engine", "-p rto-agent-daemon", "engine::"),
];

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let path = tools::ensure("cargo-mutants", CARGO_MUTANTS, &[], "cargo xtask mutants")?;
    let own = root().join("target/mutants");
    let is_chosen = |name| args.area.as_deref().is_none_or(|area| area == name);
    for (area, files, filter) in AREAS.into_iter().filter(|(name, ..)| is_chosen(*name)) {
        println!("{area}:");
        let out = own.join(area);
        fs::create_dir_all(&out)?;
        let mut mutants = cargo("mutants --colors never --output");
        mutants
            .arg(&out)
            .args(files.split(' '))
            .args(args.shard.iter().flat_map(|shard| ["--shard", shard]))
            // CARGO_BUILD_JOBS limits the parallel jobs.
            .args(["--jobserver", "false", "--", "--"])
            .arg(filter)
            .env("PATH", &path)
            // A quarter of the time of the model's tests; a mutant that only more cases would detect counts as missed.
            .env("PROPTEST_CASES", "64")
            // The tests of the next mutant must not begin with the input that this mutant failed with.
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true")
            .env("CARGO_TARGET_DIR", own.join("build"));
        let status = mutants.status().context("cannot run cargo mutants")?;
        // Missed mutants (2) and timeouts (3) are not an error: the share counts.
        let is_result = matches!(status.code(), Some(0 | 2 | 3));
        ensure!(is_result, "cargo mutants: {status}");
    }
    Ok(())
}
