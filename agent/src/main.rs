//! The `rto-agent` binary: parse, dispatch, say errors.

use std::process::ExitCode;

use rto_agent::{cli::Cli, commands};

fn main() -> ExitCode {
    let cli = Cli::parse_args();
    commands::dispatch(cli.verb)
}
