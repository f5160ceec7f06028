//! The `rto-agent` binary: parses the command line, dispatches, and prints errors.

use std::process::ExitCode;

use rto_agent::{cli::Cli, commands, completion};

fn main() -> ExitCode {
    if let Some(code) = completion::answer() {
        return code;
    }
    let cli = Cli::parse_args();
    commands::dispatch(cli.verb)
}
