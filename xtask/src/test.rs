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

/// Results of test programs.
#[derive(Default)]
struct Results {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// Each failed test: its name, and the lines of its message.
    failures: Vec<Vec<String>>,
}

/// Lines about failed tests that are repeated at the end.
const LINES_OF_FAILURES: usize = 45;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.unprivileged {
        setup::run()?;
    }
    let integration = built(BUILD)?;
    let mut all = Results::default();
    let ended = if args.unprivileged {
        all.add(&mut without_root(args), &mut |line| println!("{line}"))
    } else {
        all.add_all(&integration, args)
    };
    // Last, because some systems keep only the end of a log.
    let share = (LINES_OF_FAILURES / all.failures.len().max(1)).max(1);
    for line in all
        .failures
        .iter()
        .flat_map(|lines| lines.iter().take(share))
    {
        println!("{line}");
    }
    let (passed, failed, ignored) = (all.passed, all.failed, all.ignored);
    println!("\n{passed} passed, {failed} failed, {ignored} skipped");
    ended?;
    ensure!(failed == 0, "{failed} tests failed");
    if !args.unprivileged && args.filter.is_none() {
        vm::check_matrix(&integration)?;
    }
    Ok(())
}

/// All tests except the integration tests.
fn without_root(args: &Args) -> Command {
    let mut tests = cargo("test --workspace --locked --no-fail-fast");
    tests
        .env("RTO_TESTS_ELSEWHERE", "1")
        .args(args.filter.as_slice());
    tests
}

/// Builds what [`run`] runs: the whole workspace, because for single packages cargo would select other features of the
/// dependencies, and compile them a second time.
pub(crate) const BUILD: &str = "build --workspace --locked --bins --tests";

/// Builds all programs and the integration tests, with the same features; returns the tests' executable.
pub(crate) fn build_programs() -> anyhow::Result<PathBuf> {
    built("build --workspace --locked --bins --test=integration")
}

fn built(words: &str) -> anyhow::Result<PathBuf> {
    tools::built(&mut cargo(words), "integration")
}

/// Builds programs and integration tests for an emulated CPU, with little optimisation unless it builds like [`BUILD`];
/// returns the programs' directory and the tests' executable.
pub(crate) fn build_for_machines(unoptimised: bool) -> anyhow::Result<(PathBuf, PathBuf)> {
    let integration = if unoptimised {
        build_programs()?
    } else {
        built(
            "build --profile=machine --locked --bins --package=rto-agent --package=rto-lab \
             --package=rto-testbed --package=rto-tests --test=integration",
        )?
    };
    let programs = integration.ancestors().nth(2).context("a directory")?;
    Ok((programs.to_owned(), integration))
}

impl Results {
    /// Runs the integration tests and all others in parallel, because integration tests mostly wait for timers. The
    /// output of the others is printed afterwards, in one piece and without the tests that passed.
    fn add_all(&mut self, integration: &Path, args: &Args) -> anyhow::Result<()> {
        let mut tests = as_root(&integration.to_string_lossy());
        if args.long {
            tests.env("RTO_TESTS_LONG", "1");
        }
        tests.args(args.filter.as_slice());
        let (mut others, mut lines) = (Self::default(), Vec::new());
        let (ended, others_ended) = thread::scope(|scope| {
            let running = scope.spawn(|| {
                others.add(&mut without_root(args), &mut |line| {
                    lines.push(line.to_owned());
                })
            });
            // Of tests by name, the result of each is enough: messages of failed ones are printed at the end.
            let is_shown = |line: &str| args.filter.is_none() || line.starts_with("test ");
            let ended = self.add(&mut tests, &mut |line| {
                if is_shown(line) {
                    println!("{line}");
                }
            });
            let others_ended = running.join().unwrap_or_else(|_| bail!("a panic"));
            (ended, others_ended)
        });
        let ran = self.passed + self.failed;
        if args.filter.is_none() || others_ended.is_err() {
            lines.retain(|line| !(line.starts_with("test ") && line.ends_with(" ... ok")));
            println!("{}", lines.join("\n"));
            println!("integration tests run: {ran}");
        }
        self.passed += others.passed;
        self.failed += others.failed;
        self.ignored += others.ignored;
        self.failures.extend(others.failures);
        let is_good = ran > 0 || args.filter.is_some();
        ended.and(others_ended)?;
        ensure!(is_good, "no integration test ran: they need root");
        Ok(())
    }

    /// Runs a command, prints its output, and adds up cargo's "test result" lines. A command that fails without a
    /// failed test (it does not compile, or crashes) is an error.
    fn add(&mut self, command: &mut Command, print: &mut dyn FnMut(&str)) -> anyhow::Result<()> {
        let (reader, writer) = io::pipe()?;
        let mut child = command
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .stdin(Stdio::null())
            .spawn()?;
        // Drops the command's end of the pipe, which would otherwise stay open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let (mut last, mut is_message) = (String::new(), false);
        for line in BufReader::new(reader).lines() {
            let line = line?;
            print(&line);
            is_message = self.take(&line, is_message);
            if !line.is_empty() {
                last = line;
            }
        }
        let status = child.wait()?;
        if !status.success() && self.failed == 0 {
            bail!("a test program ended with {status}: {last}");
        }
        Ok(())
    }

    /// Takes a line of a test program. Returns whether the next one belongs to the message of a failed test too.
    fn take(&mut self, line: &str, is_message: bool) -> bool {
        let result = line.strip_prefix("test result: ").unwrap_or_default();
        for part in result.split(['.', ';']) {
            let (number, what) = part.trim().split_once(' ').unwrap_or_default();
            let number: u64 = number.parse().unwrap_or(0);
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.failures.push(vec![line.to_owned()]);
            return true;
        }
        // "failures:" begins the list of names that follows all messages.
        if !is_message || line == "failures:" || line == "stack backtrace:" {
            return false;
        }
        if let Some(failure) = self.failures.last_mut().filter(|_| !line.is_empty()) {
            failure.push(line.to_owned());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_names_and_messages_of_failed_tests() {
        let mut results = Results::default();
        let output = "test a ... FAILED\n\nfailures:\n\n---- a stdout ----\n\nthread 'a' panicked at a.rs:1:\nleft\n\
                      stack backtrace:\n  0: b\n\n---- c ----\nwhy\n\nfailures:\n    a\n    c\n\n\
                      test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out\n";
        let last = output
            .lines()
            .fold(false, |is, line| results.take(line, is));
        assert!(!last);
        let counts = (results.passed, results.failed, results.ignored);
        assert_eq!(counts, (3, 2, 1));
        let expected = [
            &[
                "---- a stdout ----",
                "thread 'a' panicked at a.rs:1:",
                "left",
            ][..],
            &["---- c ----", "why"],
        ];
        assert_eq!(results.failures, expected);
    }
}
