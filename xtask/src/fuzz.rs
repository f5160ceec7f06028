//! `cargo xtask fuzz`: fuzzes the parsers of untrusted input with libFuzzer and AddressSanitizer.
//!
//! The command uses the pinned toolchain: RUSTC_BOOTSTRAP enables the unstable flags, so that no nightly is needed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::{
    process::{command, need, output, run as run_command},
    root,
    tools::{self, cargo},
};

/// `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One of the targets in fuzz/targets [default: each in turn]
    #[arg(value_parser = TARGETS.map(|(name, _)| name))]
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run the target once with this input instead
    #[arg(long, value_name = "FILE", requires = "target")]
    reproduce: Option<PathBuf>,
}

const CARGO_FUZZ: &str = "0.13.2";

/// The targets, and the maximum length of an input of each, bytes: enough for a file with more than 200 errors or
/// hundreds of entries, a capture with more connections than are kept, several requests with a large body (64 KiB), or
/// forty events.
const TARGETS: [(&str, u64); 4] = [
    ("api", 128 << 10),
    ("config", 64 << 10),
    ("events", 4 << 10),
    ("pcap", 64 << 10),
];

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let is_chosen = |name| args.target.as_deref().is_none_or(|target| target == name);
    need(&[("c++", "g++")], "libFuzzer")?;
    let programs = build()?;
    let mut failed = Vec::new();
    for (name, longest) in TARGETS.into_iter().filter(|(name, _)| is_chosen(*name)) {
        if let Some(input) = &args.reproduce {
            return run_command(program(&programs, name).arg(input));
        }
        failed.extend(fuzz(&programs, name, longest, args.seconds)?);
    }
    let failed = failed.join("\n");
    ensure!(failed.is_empty(), "inputs were found that fail:\n{failed}");
    Ok(())
}

/// Builds all targets; returns their directory.
fn build() -> anyhow::Result<PathBuf> {
    let path = tools::ensure("cargo-fuzz", CARGO_FUZZ, &[], "cargo xtask fuzz")?;
    let target_dir = root().join("target/fuzz");
    println!("building the targets with AddressSanitizer (some minutes, the first time)");
    run_command(
        cargo("fuzz build --features linked --target-dir")
            .arg(&target_dir)
            .env("PATH", path)
            .env("RUSTC_BOOTSTRAP", "1")
            // The release profile's settings would cost minutes after each change.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    )?;
    let host = output(&mut command("rustc --print host-tuple"))?;
    Ok(target_dir.join(host).join("release"))
}

/// A target, with at most 1 GB of memory, of which AddressSanitizer uses a part, and 10 s for one input.
fn program(programs: &Path, target: &str) -> Command {
    let mut program = Command::new(programs.join(target));
    program
        .current_dir(root())
        .args(["-rss_limit_mb=1024", "-timeout=10"])
        // Leak detection needs ptrace(2), which containers lack; leaks reach the memory limit instead.
        .arg("-detect_leaks=0")
        .env("ASAN_OPTIONS", "detect_leaks=0");
    program
}

/// Fuzzes a target; returns what to do about an input that failed.
fn fuzz(
    programs: &Path,
    target: &str,
    longest: u64,
    seconds: u64,
) -> anyhow::Result<Option<String>> {
    let own = root().join("target/fuzz");
    let corpus = own.join("corpus").join(target);
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(own.join("artifacts"))?;
    let artifacts = tempfile::tempdir_in(own.join("artifacts"))?;
    println!("{target}: {seconds} s");
    let status = program(programs, target)
        .arg(&corpus)
        .arg(root().join("fuzz/seeds").join(target))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={longest}"))
        .arg(format!("-artifact_prefix={}/", artifacts.path().display()))
        .args(["-verbosity=0", "-print_final_stats=1"])
        .status()
        .with_context(|| format!("cannot start {target}"))?;
    if status.success() {
        return Ok(None);
    }
    let input = fs::read_dir(&artifacts)?.next();
    let input = input.with_context(|| format!("{target}: {status}"))??;
    let is_timeout = input.file_name().to_string_lossy().starts_with("timeout-");
    let mut alone = program(programs, target);
    alone.arg(input.path()).stderr(Stdio::null());
    if is_timeout && alone.status()?.success() {
        // The timeout measures wall-clock time, including that of other processes.
        println!("{target}: an input was slow once and is not when it runs alone; no failure");
        return Ok(None);
    }
    let input = artifacts.keep().join(input.file_name());
    let input = input.display();
    Ok(Some(format!(
        "{target}: again: cargo xtask fuzz {target} --reproduce {input}\n\
         To keep it: cp {input} fuzz/seeds/{target}/ and cargo test -p rto-fuzz"
    )))
}
