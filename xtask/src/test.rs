//! `cargo xtask test`: everything is built as the user who calls; what needs root runs as root.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

use crate::{
    process::{as_root, run as run_command},
    setup,
    tools::{self, cargo},
};

/// `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name has this in it
    filter: Option<String>,
    /// Leave the integration tests out
    #[arg(long)]
    unprivileged: bool,
    /// More rounds of what goes by chance: 1,000 kills instead of 200
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
    build_programs()?;
    let mut all = Counts::default();
    let mut plain = cargo();
    plain.args([
        "test",
        "--workspace",
        "--locked",
        "--no-fail-fast",
        "--exclude",
        "rto-tests",
    ]);
    count(plain.args(args.filter.as_slice()), &mut all)?;
    let mut harness = cargo();
    harness.args([
        "test",
        "--package",
        "rto-tests",
        "--locked",
        "--no-fail-fast",
        "--lib",
    ]);
    count(harness.args(args.filter.as_slice()), &mut all)?;
    if !args.unprivileged {
        let before = all.passed + all.failed;
        let mut integration = as_root(&integration_binary()?.to_string_lossy());
        if args.long {
            integration.env("RTO_TESTS_LONG", "1");
        }
        count(integration.args(args.filter.as_slice()), &mut all)?;
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
    Ok(())
}

/// Builds the programs that the integration tests drive.
pub(crate) fn build_programs() -> anyhow::Result<()> {
    run_command(cargo().args(["build", "--workspace", "--bins", "--locked"]))
}

/// Builds the integration tests; their executable.
pub(crate) fn integration_binary() -> anyhow::Result<PathBuf> {
    let tests = ["--package", "rto-tests", "--test", "integration"];
    tools::built(
        cargo().args(["test", "--no-run", "--locked"]).args(tests),
        "integration",
    )
}

/// Both, optimised a little, for an emulated processor: the programs' directory, and the tests' executable.
pub(crate) fn build_for_machines() -> anyhow::Result<(PathBuf, PathBuf)> {
    let integration = tools::built(
        cargo()
            .args(["build", "--profile", "machine", "--locked", "--bins"])
            .args(["--package", "rto-agent", "--package", "rto-lab"])
            .args(["--package", "rto-testbed"])
            .args(["--package", "rto-tests", "--test", "integration"]),
        "integration",
    )?;
    let programs = integration.ancestors().nth(2).context("a directory")?;
    Ok((programs.to_owned(), integration))
}

/// Runs a command, shows what it prints, and adds up cargo's "test result" lines. A command that
/// fails without a failed test (it does not build, or dies) is an error.
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
