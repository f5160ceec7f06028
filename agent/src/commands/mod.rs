//! One file for each verb. Each only sends a request, prints the answer and sets the exit status.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use rto_agent_core::printable;
use rto_agent_kernel::kernel::descriptors;
use serde::Serialize;

use self::terminal::coloured;
use crate::cli::{ColorArg, Verb};

mod add;
mod advise;
mod apply;
mod check;
mod detach;
mod discover;
mod doctor;
mod experiment;
mod explain;
mod flags;
mod generate;
mod list;
mod lookup;
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
        Verb::Experiment(args) => experiment::run(&args),
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
    let _told = writeln!(io::stderr(), "{}", printable::lines(&text));
    ExitCode::FAILURE
}

/// Exit status 0 if `good`, else 1.
fn exit(good: bool) -> ExitCode {
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A reader that closes the pipe early (`| head`) is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints a text, or the value as JSON. Returns the exit status of a verb that has nothing to add.
fn print<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<ExitCode> {
    print_styled(json, value, text, |text| text)
}

/// The same with coloured states, if colours are enabled.
fn print_coloured<T: Serialize>(
    json: bool,
    value: &T,
    color: ColorArg,
    text: impl FnOnce() -> String,
) -> anyhow::Result<ExitCode> {
    print_styled(json, value, text, |text| coloured(text, color))
}

/// Escapes the text before colouring it, so that the only control sequences are this program's own.
fn print_styled<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
    style: impl FnOnce(String) -> String,
) -> anyhow::Result<ExitCode> {
    // Without a buffer, each of a million lines would be a system call.
    let mut out = io::BufWriter::new(io::stdout().lock());
    if json {
        serde_json::to_writer_pretty(printable::JsonWriter(&mut out), value)
            .map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        let text = printable::lines(&text()).into_owned();
        out.write_all(style(text).as_bytes())?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
