//! Benchmarks of rto-agent and its demo. `cargo xtask bench` and `cargo xtask demo` install the system packages they
//! need and run this program.
#![expect(clippy::print_stdout, reason = "results go to stdout")]

use std::{path::PathBuf, process::Command};

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use rto_testbed::{leftovers, process::beside};

mod add;
mod alternatives;
mod callback;
mod demo;
mod fleet;
mod gap;
mod idle;
mod memory;
mod page;
mod placement;
mod process;
mod pure;
mod rate;
mod result;
mod sample;
mod scale;
mod start;
mod suite;
mod tick;
mod traffic;

use process::{catch_signals, is_root};

/// Measure what rto-agent costs, on its release build, in temporary namespaces and cgroups
#[derive(Parser)]
#[command(bin_name = "cargo xtask bench", args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Verb>,
    #[command(flatten)]
    suite: suite::Args,
    /// Measure the programs in this directory instead of building this tree; `pure` then reports the last run of its
    /// benchmarks
    #[arg(long, global = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Verb {
    /// Compare callback time and connections per second with statistics and without: `callback` and `rate`
    Overhead,
    /// Show connect() through outages without and with the agent (cargo xtask demo)
    Demo,
}

fn main() -> anyhow::Result<()> {
    let mut cli = Cli::parse();
    if matches!(cli.command, Some(Verb::Overhead)) {
        cli.suite.choose_overhead();
    }
    let programs = match &cli.programs {
        Some(dir) => dir.clone(),
        None => cli.build()?,
    };
    if !is_root() {
        // Built as the user, run as root.
        return process::run(
            Command::new("sudo")
                .arg(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .arg("--programs")
                .arg(programs),
        );
    }
    leftovers::sweep();
    catch_signals()?;
    match &cli.command {
        Some(Verb::Demo) => demo::run(&programs),
        _ => cli.suite.run(&programs),
    }
}

impl Cli {
    /// Builds the programs of benchmarks, and runs those that need no privilege; the directory of the programs.
    fn build(&self) -> anyhow::Result<PathBuf> {
        if let Some(Verb::Demo) = self.command {
            // Beside this program, as cargo xtask demo builds them.
            let agent = beside("rto-agent")?;
            return Ok(agent.parent().context("a directory")?.to_owned());
        }
        self.suite.prepare()?;
        process::build_programs()
    }
}
