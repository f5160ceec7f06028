//! `cargo xtask test`: builds as the calling user and runs the integration tests as root.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

use crate::{
    process::as_root,
    root, setup,
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
    let Built {
        integration,
        harness,
    } = build()?;
    let mut all = Counts::default();
    let mut plain = cargo();
    plain
        .args(["test", "--workspace", "--exclude", "rto-tests"])
        .args(["--locked", "--no-fail-fast"])
        .args(args.filter.as_slice());
    count(&mut plain, &mut all)?;
    let mut harness = Command::new(harness);
    harness.current_dir(root().join("tests"));
    count(harness.args(args.filter.as_slice()), &mut all)?;
    if !args.unprivileged {
        let before = all.passed + all.failed;
        let mut tests = as_root(&integration.to_string_lossy());
        if args.long {
            tests.env("RTO_TESTS_LONG", "1");
        }
        count(tests.args(args.filter.as_slice()), &mut all)?;
        let ran = all.passed + all.failed - before;
        println!("integration tests run: {ran}");
        if ran == 0 && args.filter.is_none() {
            bail!("no integration test ran: they need root");
        }
    }
    let Counts {
        passed,
        failed,
        ignored,
    } = all;
    println!("\n{passed} passed, {failed} failed, {ignored} skipped");
    if failed > 0 {
        bail!("{failed} tests failed");
    }
    if !args.unprivileged && args.filter.is_none() {
        vm::check_matrix(&integration)?;
    }
    Ok(())
}

/// The executables of the crate `rto-tests`.
pub(crate) struct Built {
    /// The integration tests.
    pub(crate) integration: PathBuf,
    /// The unit tests of their library.
    harness: PathBuf,
}

/// Builds all programs and tests. One command for all of them: with other packages or without tests, cargo would select
/// other features of the dependencies and compile rto-agent a second time.
pub(crate) fn build() -> anyhow::Result<Built> {
    let [integration, harness] = tools::built(
        cargo().args(["build", "--workspace", "--locked", "--bins", "--tests"]),
        ["integration", "rto_tests"],
    )?;
    Ok(Built {
        integration,
        harness,
    })
}

/// Builds programs and integration tests with little optimisation, for an emulated processor; the programs' directory
/// and the tests' executable.
pub(crate) fn build_for_machines() -> anyhow::Result<(PathBuf, PathBuf)> {
    let [integration] = tools::built(
        cargo()
            .args(["build", "--profile", "machine", "--locked", "--bins"])
            .args(["--package", "rto-agent", "--package", "rto-lab"])
            .args(["--package", "rto-testbed"])
            .args(["--package", "rto-tests", "--test", "integration"]),
        ["integration"],
    )?;
    let programs = integration.ancestors().nth(2).context("a directory")?;
    Ok((programs.to_owned(), integration))
}

/// Runs a command, prints its output, and adds up cargo's "test result" lines. A command that fails
/// without a failed test (it does not build, or dies) is an error.
fn count(command: &mut Command, all: &mut Counts) -> anyhow::Result<()> {
    let mut child = command
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()?;
    let stdout = child.stdout.take().context("no stdout")?;
    let failed_before = all.failed;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        println!("{line}");
        if let Some(result) = line.strip_prefix("test result: ") {
            let number = |what: &str| {
                let part = result
                    .split(['.', ';'])
                    .find(|part| part.trim_end().ends_with(what));
                part.and_then(|part| part.split_whitespace().next()?.parse::<u64>().ok())
                    .unwrap_or(0)
            };
            all.passed += number("passed");
            all.failed += number("failed");
            all.ignored += number("ignored");
        }
    }
    let status = child.wait()?;
    if !status.success() && all.failed == failed_before {
        bail!("a test program ended with {status}");
    }
    Ok(())
}
