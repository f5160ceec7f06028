//! `cargo xtask bench` and `cargo xtask demo`: install the system packages they need, and run the crate `rto-bench`.

use std::ffi::OsString;

use crate::{process::run as run_command, setup, tools::cargo};

/// `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Names and options, as in cargo xtask bench --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let is_help = |arg: &OsString| arg == "--help" || arg == "-h";
    if !args.args.iter().any(is_help) {
        setup::run()?;
        setup::clang()?;
    }
    rto_bench(&args.args)
}

pub(crate) fn demo() -> anyhow::Result<()> {
    setup::run()?;
    rto_bench(&["demo".into()])
}

/// Runs the benchmarks beside the programs that they start.
fn rto_bench(args: &[OsString]) -> anyhow::Result<()> {
    let build = "build --quiet --locked --bin=rto-bench --bin=rto-agent --bin=rto-workload";
    run_command(&mut cargo(build))?;
    run_command(cargo("run --quiet --locked --bin rto-bench --").args(args))
}
