//! One file for each verb. Each only sends a request, prints the answer and sets the exit status.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use rto_agent_core::printable;
use rto_agent_kernel::kernel::descriptors;

use self::output::{exit, print, print_coloured, print_table};
use crate::cli::Verb;

mod add;
mod advise;
mod apply;
mod check;
mod detach;
mod discover;
mod doctor;
mod explain;
mod generate;
mod holdout;
mod known_rtt;
mod list;
mod lookup;
mod output;
mod probe;
mod reload;
mod remove;
mod run;
mod sock_diag;
mod stats;
mod status;
mod table;
mod terminal;
mod top;
mod tune;
mod verify;
mod watch;

/// Runs a verb. Exit status: 0 done, 1 refused or failed (clap exits with 2 for wrong usage).
pub fn dispatch(verb: Verb) -> ExitCode {
    if let Err(error) = descriptors::ensure(descriptors::CLIENT) {
        return failed(&error);
    }
    let result = match verb {
        Verb::Run(args) => run::run(&args),
        Verb::Check(args) => check::run(&args),
        Verb::Add(args) => add::run(args),
        Verb::Remove(args) => remove::run(args),
        Verb::List(args) => list::run(&args),
        Verb::Lookup(args) => lookup::run(&args),
        Verb::Explain(args) => explain::run(&args),
        Verb::Stats(args) => stats::run(&args),
        Verb::Watch(args) => watch::run(&args),
        Verb::Top(args) => top::run(&args),
        Verb::Tune(args) => tune::run(&args),
        Verb::Status(args) => status::run(&args),
        Verb::Reload(args) => reload::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Advise(args) => advise::run(&args),
        Verb::Discover(args) => discover::run(&args),
        Verb::Apply(args) => apply::run(&args),
        Verb::Detach(args) => detach::run(&args),
        Verb::Attach(args) => detach::attach(&args),
        Verb::Doctor(args) => doctor::run(&args),
        Verb::Completions(args) => generate::completions(&args),
        Verb::Man(args) => generate::man(&args),
        Verb::SelfTest(args) => doctor::self_test(&args),
        Verb::Probe(args) => probe::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    // If stderr is gone too, the message is lost.
    let text = format!("rto-agent: {error:#}");
    let text = terminal::wrapped_message(&printable::lines(&text));
    let _ = io::stderr().write_all(text.as_bytes());
    ExitCode::FAILURE
}

/// A reader that closes the pipe early (`| head`) is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
