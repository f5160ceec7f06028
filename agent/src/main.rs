//! The `rto-agent` binary: parses the command line, dispatches, and prints errors.

use std::{process::ExitCode, thread};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rto_agent::{cli::Cli, commands, completion};

/// The stack that every verb has enough of; Linux's default limit.
const STACK: usize = 8 << 20;

fn main() -> ExitCode {
    if has_stack() {
        return run();
    }
    let thread = thread::Builder::new().stack_size(STACK).spawn(run);
    match thread.map(thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(_)) => ExitCode::from(101),
        Err(e) => {
            eprintln!("rto-agent: cannot start a thread: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> ExitCode {
    if let Some(code) = completion::answer() {
        return code;
    }
    let cli = Cli::parse_args();
    commands::dispatch(cli.verb)
}

/// Whether the stack of the main thread can grow far enough. It grows up to the limit in force at
/// that moment (`acct_stack_growth()`, Linux 6.12), so raising the limit is enough where it is
/// allowed; the daemon drops its capabilities on the main thread.
fn has_stack() -> bool {
    let wanted = STACK as u64;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else {
        return true;
    };
    soft >= wanted || setrlimit(Resource::RLIMIT_STACK, wanted, hard.max(wanted)).is_ok()
}
