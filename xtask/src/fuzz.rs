//! `cargo xtask fuzz`: fuzzes the parsers of untrusted input with libFuzzer and AddressSanitizer.
//!
//! The command uses the pinned toolchain: RUSTC_BOOTSTRAP enables the unstable flags, so that no nightly is needed.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

use crate::{
    process::{apt_install, have, output, run as run_command},
    root,
    tools::{self, cargo},
};

/// `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One of the targets in fuzz/targets [default: each in turn]
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run the target once with this input instead
    #[arg(long, value_name = "FILE", requires = "target")]
    reproduce: Option<PathBuf>,
    /// Only check the targets with clippy, which no other build compiles
    #[arg(long, conflicts_with_all = ["target", "reproduce"])]
    check: bool,
}

const CARGO_FUZZ: &str = "0.13.2";
/// Memory limit, of which AddressSanitizer uses a part.
const MEMORY_MB: u32 = 1024;
/// Maximum seconds for one input.
const SLOW_S: u32 = 10;
/// Maximum length of an input, bytes: enough for a file with more than 200 errors or hundreds of entries, a capture
/// with more connections than are kept, several requests with a large body (64 KiB), or forty events.
fn longest(target: &str) -> u32 {
    match target {
        "config" | "pcap" => 64 << 10,
        "api" => 128 << 10,
        _ => 4096,
    }
}

/// libFuzzer's final report.
#[derive(Default)]
struct Outcome {
    executions: u64,
    edges: u64,
    corpus: String,
    /// The file with the input that failed.
    failed: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let all = targets()?;
    let chosen: Vec<&String> = match &args.target {
        None => all.iter().collect(),
        Some(name) => {
            let found = all.iter().find(|target| *target == name);
            vec![found.with_context(|| format!("no target {name}; there are {}", all.join(", ")))?]
        }
    };
    if !have("c++") {
        apt_install(&["g++"], "libFuzzer")?;
    }
    if args.check {
        return run_command(
            cargo()
                // The whole workspace. The same command without targets has already checked everything else.
                .args(["clippy", "--workspace", "--all-targets", "--locked"])
                .args(["--features", "rto-fuzz/libfuzzer", "--", "-D", "warnings"]),
        );
    }
    let path = tools::ensure("cargo-fuzz", CARGO_FUZZ, &[], "cargo xtask fuzz")?;
    let programs = build(&path)?;
    if let (Some(input), [target]) = (&args.reproduce, chosen.as_slice()) {
        return run_command(program(&programs, target).arg(input));
    }
    let mut failed = Vec::new();
    for target in chosen {
        let outcome = fuzz(&programs, target, args.seconds)?;
        let Outcome {
            executions,
            edges,
            corpus,
            failed: input,
        } = outcome;
        println!("{target}: {executions} executions, {edges} edges covered, corpus {corpus}");
        if let Some(input) = input {
            println!(
                "{target}: FAILED. Again: cargo xtask fuzz {target} --reproduce {input}\n\
                 To keep it: cp {input} fuzz/seeds/{target}/ and cargo test -p rto-fuzz"
            );
            failed.push(target.as_str());
        }
    }
    ensure!(
        failed.is_empty(),
        "inputs were found that fail: {}",
        failed.join(", ")
    );
    Ok(())
}

/// The targets' names.
fn targets() -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root().join("fuzz/targets"))? {
        let path = entry?.path();
        names.extend(
            path.file_stem()
                .map(|name| name.to_string_lossy().into_owned()),
        );
    }
    names.sort();
    Ok(names)
}

/// Builds all targets; returns their directory.
fn build(path: &std::ffi::OsStr) -> anyhow::Result<PathBuf> {
    let target_dir = root().join("target/fuzz");
    println!("building the targets with AddressSanitizer (some minutes, the first time)");
    run_command(
        cargo()
            .args(["fuzz", "build", "--features", "libfuzzer", "--target-dir"])
            .arg(&target_dir)
            .env("PATH", path)
            .env("RUSTC_BOOTSTRAP", "1")
            // The release profile's settings would cost minutes after each change.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    )?;
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc -vV names no host")?;
    Ok(target_dir.join(host).join("release"))
}

fn program(programs: &Path, target: &str) -> Command {
    let mut program = Command::new(programs.join(target));
    program
        .current_dir(root())
        .arg(format!("-rss_limit_mb={MEMORY_MB}"))
        .arg(format!("-timeout={SLOW_S}"))
        // Leak detection needs ptrace(2), which containers lack; leaks reach the memory limit instead.
        .arg("-detect_leaks=0")
        .env("ASAN_OPTIONS", "detect_leaks=0");
    program
}

fn fuzz(programs: &Path, target: &str, seconds: u64) -> anyhow::Result<Outcome> {
    let own = root().join("target/fuzz");
    let (corpus, artifacts) = (
        own.join("corpus").join(target),
        own.join("artifacts").join(target),
    );
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&artifacts)?;
    println!("{target}: {seconds} s");
    let mut child = program(programs, target)
        .arg(&corpus)
        .arg(root().join("fuzz/seeds").join(target))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={}", longest(target)))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {target}"))?;
    let stderr = child.stderr.take().context("no stderr")?;
    let mut outcome = Outcome::default();
    let mut lines = Vec::new();
    for line in BufReader::new(stderr).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        outcome.parse(&line);
        lines.push(line);
    }
    let status = child.wait()?;
    if !status.success() {
        // Skips progress lines.
        let is_progress = |line: &&String| line.starts_with('#');
        for line in lines.iter().filter(|line| !is_progress(line)) {
            eprintln!("{line}");
        }
        if outcome.failed.is_none() {
            bail!("{target}: {status}");
        }
        if let Some(input) = outcome
            .failed
            .take_if(|input| is_quick_alone(programs, target, input))
        {
            // The timeout measures wall-clock time, including that of other processes.
            println!("{target}: {input} was slow once and is not when it runs alone; no failure");
            fs::remove_file(&input)?;
        }
    }
    Ok(outcome)
}

/// Whether an input that timed out is fast enough when it runs alone.
fn is_quick_alone(programs: &Path, target: &str, input: &str) -> bool {
    let name = Path::new(input).file_name().unwrap_or_default();
    let is_timeout = name.to_string_lossy().starts_with("timeout-");
    is_timeout
        && program(programs, target)
            .arg(input)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
}

impl Outcome {
    /// `#1024 pulse cov: 77 ft: 99 corp: 12/345b ...`, `stat::number_of_executed_units: 1024`,
    /// `...; Test unit written to FILE`.
    fn parse(&mut self, line: &str) {
        if let Some(number) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = number.trim().parse().unwrap_or(0);
        } else if let Some((_, file)) = line.split_once("Test unit written to ") {
            self.failed = Some(file.trim().to_owned());
        } else if line.starts_with('#') {
            let after = |key: &str| {
                let mut words = line.split_whitespace().skip_while(|word| *word != key);
                words.nth(1).map(ToOwned::to_owned)
            };
            if let Some(edges) = after("cov:").and_then(|n| n.parse().ok()) {
                self.edges = edges;
            }
            if let Some(corpus) = after("corp:") {
                self.corpus = corpus;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_libfuzzer() {
        let mut outcome = Outcome::default();
        outcome
            .parse("#4096\tpulse  cov: 77 ft: 99 corp: 12/345b lim: 4096 exec/s: 2048 rss: 60Mb");
        outcome.parse("==1== Test unit written to /x/crash-12");
        outcome.parse("stat::number_of_executed_units: 5000");
        assert_eq!((outcome.executions, outcome.edges), (5000, 77));
        assert_eq!(outcome.corpus, "12/345b");
        assert_eq!(outcome.failed.as_deref(), Some("/x/crash-12"));
    }

    #[test]
    fn each_target_has_seeds() {
        for target in targets().unwrap() {
            let seeds = root().join("fuzz/seeds").join(&target);
            for seed in fs::read_dir(&seeds).unwrap() {
                // A longer seed would be truncated.
                let length = seed.unwrap().metadata().unwrap().len();
                assert!(length <= longest(&target).into(), "{target}: {length}");
            }
        }
    }
}
