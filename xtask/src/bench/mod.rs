//! `cargo xtask bench`: what the agent costs, measured on its release build, in namespaces and cgroups
//! of the bench's own.

use std::{
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, bail};
use clap::Subcommand;
use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};
use rto_testbed::{agent, cgroup, netns};

use crate::{
    process::{is_root, run as run_command},
    setup, tools,
};

mod add;
mod callback;
mod gap;
mod idle;
mod overhead;
mod page;
mod pure;
mod rate;
mod scale;
mod start;

/// `cargo xtask bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    page: page::Page,
    /// Where rto-agent and rto-workload are built already, instead of building this tree (and the pure parts
    /// are measured already)
    #[arg(long, global = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

#[derive(Subcommand)]
enum What {
    /// The time of a callback, and connections per second, with statistics and without
    Overhead(overhead::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    if args.what.is_none() && args.programs.is_none() {
        args.page.prepare()?;
    }
    let programs = match &args.programs {
        Some(dir) => dir.clone(),
        None => build()?,
    };
    if !is_root() {
        // Built as the user; measured as root.
        return run_command(
            Command::new("sudo")
                .arg(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .arg("--programs")
                .arg(programs),
        );
    }
    netns::sweep();
    cgroup::sweep();
    agent::sweep();
    catch_signals()?;
    match &args.what {
        Some(What::Overhead(args)) => overhead::run(args, &programs),
        None => args.page.run(&programs),
    }
}

/// Builds what is measured and what measures; the directory they are in.
fn build() -> anyhow::Result<PathBuf> {
    let agent = tools::built(
        tools::cargo()
            .args(["build", "--release", "--locked", "--bins"])
            .args(["--package", "rto-agent", "--package", "rto-testbed"]),
        "rto-agent",
    )?;
    let programs = agent.parent().context("a directory")?;
    Ok(programs.to_owned())
}

static STOPPED: AtomicBool = AtomicBool::new(false);

/// An interrupted bench goes the way of a failed one, which removes what it made.
fn catch_signals() -> anyhow::Result<()> {
    extern "C" fn stop(_: libc::c_int) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    let action = SigAction::new(
        SigHandler::Handler(stop),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// An error once a signal has asked for the end.
fn go_on() -> anyhow::Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// What several measurements of the same thing say.
struct Sample {
    sorted: Vec<f64>,
}

impl Sample {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        Self { sorted }
    }

    /// The value that this share of the others is below.
    fn at(&self, share: f64) -> f64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index"
        )]
        let index = (self.sorted.len().saturating_sub(1) as f64 * share).round() as usize;
        self.sorted.get(index).copied().unwrap_or(f64::NAN)
    }

    fn median(&self) -> f64 {
        self.quarter(2)
    }

    /// The value that so many quarters of the others are below; between two where none is.
    fn quarter(&self, quarters: usize) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else {
            return f64::NAN;
        };
        let (index, rest) = (last * quarters / 4, last * quarters % 4);
        let (low, high) = (self.sorted[index], self.sorted[(index + 1).min(last)]);
        low + (high - low) * [0.0, 0.25, 0.5, 0.75][rest]
    }
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "median {:.3}, half of them {:.3} to {:.3}, all {:.3} to {:.3}",
            self.median(),
            self.quarter(1),
            self.quarter(3),
            self.quarter(0),
            self.quarter(4),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Sample;

    #[test]
    fn quarters() {
        let five = Sample::of([5.0, 1.0, 4.0, 2.0, 3.0].into_iter());
        assert_eq!(
            [0, 1, 2, 3, 4].map(|q| five.quarter(q)),
            [1.0, 2.0, 3.0, 4.0, 5.0]
        );
        assert_eq!(Sample::of([2.0, 1.0].into_iter()).median(), 1.5);
        assert!(Sample::of(std::iter::empty()).median().is_nan());
    }
}
