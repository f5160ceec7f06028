//! `cargo xtask test`: builds as the calling user and runs the integration tests as root.

use std::{
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, bail, ensure};

use crate::{
    process::as_root,
    setup,
    tools::{self, cargo},
    vm,
};

/// `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this
    filter: Option<String>,
    /// Skip the integration tests
    #[arg(long)]
    unprivileged: bool,
    /// Run more rounds of randomised tests: 1,000 kills instead of 100
    #[arg(long)]
    long: bool,
}

#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.unprivileged {
        setup::run()?;
    }
    let integration = built(&BUILD)?;
    let all = if args.unprivileged {
        count(&mut without_root(args), &mut |line| println!("{line}"))?
    } else {
        count_all(&integration, args)?
    };
    let (passed, failed, ignored) = (all.passed, all.failed, all.ignored);
    println!("\n{passed} passed, {failed} failed, {ignored} skipped");
    ensure!(failed == 0, "{failed} tests failed");
    if !args.unprivileged && args.filter.is_none() {
        vm::check_matrix(&integration)?;
    }
    Ok(())
}

/// All tests except the integration tests.
fn without_root(args: &Args) -> Command {
    let mut tests = cargo();
    tests
        .args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .env("RTO_TESTS_ELSEWHERE", "1")
        .args(args.filter.as_slice());
    tests
}

/// Runs the integration tests and all others in parallel, because integration tests mostly wait for timers. The output
/// of the others is printed afterwards, in one piece.
fn count_all(integration: &Path, args: &Args) -> anyhow::Result<Counts> {
    let mut tests = as_root(&integration.to_string_lossy());
    if args.long {
        tests.env("RTO_TESTS_LONG", "1");
    }
    tests.args(args.filter.as_slice());
    let mut lines = Vec::new();
    let (counts, others) = thread::scope(|scope| {
        let mut keep = |line: &str| lines.push(line.to_owned());
        let others = scope.spawn(move || count(&mut without_root(args), &mut keep));
        let counts = count(&mut tests, &mut |line| println!("{line}"));
        let others = others.join().unwrap_or_else(|_| bail!("a panic"));
        (counts, others)
    });
    for line in lines {
        println!("{line}");
    }
    let counts = counts?;
    let ran = counts.passed + counts.failed;
    println!("integration tests run: {ran}");
    let is_good = ran > 0 || args.filter.is_some();
    ensure!(is_good, "no integration test ran: they need root");
    let others = others?;
    Ok(Counts {
        passed: counts.passed + others.passed,
        failed: counts.failed + others.failed,
        ignored: counts.ignored + others.ignored,
    })
}

/// Arguments of cargo that build what [`run`] runs: the whole workspace, because for single packages cargo would select
/// other features of the dependencies, and compile them a second time.
pub(crate) const BUILD: [&str; 5] = ["build", "--workspace", "--locked", "--bins", "--tests"];

/// Builds all programs and the integration tests, with the same features; returns the tests' executable.
pub(crate) fn build_programs() -> anyhow::Result<PathBuf> {
    let mut build = BUILD;
    build[4] = "--test=integration";
    built(&build)
}

fn built(arguments: &[&str]) -> anyhow::Result<PathBuf> {
    tools::built(cargo().args(arguments), "integration")
}

/// Builds programs and integration tests for an emulated CPU, with little optimisation unless it builds like [`BUILD`];
/// returns the programs' directory and the tests' executable.
pub(crate) fn build_for_machines(unoptimised: bool) -> anyhow::Result<(PathBuf, PathBuf)> {
    let integration = if unoptimised {
        build_programs()?
    } else {
        built(&[
            "build",
            "--profile=machine",
            "--locked",
            "--bins",
            "--package=rto-agent",
            "--package=rto-lab",
            "--package=rto-testbed",
            "--package=rto-tests",
            "--test=integration",
        ])?
    };
    let programs = integration.ancestors().nth(2).context("a directory")?;
    Ok((programs.to_owned(), integration))
}

/// Runs a command, prints its output, and adds up cargo's "test result" lines. A command that fails without a failed
/// test (it does not compile, or crashes) is an error.
fn count(command: &mut Command, print: &mut dyn FnMut(&str)) -> anyhow::Result<Counts> {
    let (reader, writer) = io::pipe()?;
    let mut child = command
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .stdin(Stdio::null())
        .spawn()?;
    // Drops the command's end of the pipe, which would otherwise stay open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    for line in BufReader::new(reader).lines() {
        let line = line?;
        print(&line);
        let result = line.strip_prefix("test result: ").unwrap_or_default();
        for part in result.split(['.', ';']) {
            let (number, what) = part.trim().split_once(' ').unwrap_or_default();
            let number: u64 = number.parse().unwrap_or(0);
            match what {
                "passed" => counts.passed += number,
                "failed" => counts.failed += number,
                "ignored" => counts.ignored += number,
                _ => {}
            }
        }
    }
    let status = child.wait()?;
    if !status.success() && counts.failed == 0 {
        bail!("a test program ended with {status}");
    }
    Ok(counts)
}
