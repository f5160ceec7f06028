//! The `rto-lab` binary: parses the command line, dispatches, and prints errors.

use std::process::ExitCode;

use clap::Parser as _;
use rto_lab::{cli::Cli, commands};

fn main() -> ExitCode {
    let cli = Cli::parse();
    commands::dispatch(cli.verb)
}
