//! From the words of a command line to a [`Cli`].

use std::{env, ffi::OsString, process};

use clap::{Command, CommandFactory as _, FromArgMatches as _, error::ErrorKind};

use super::Cli;

impl Cli {
    /// Parses the command line; ends the process with a usage error if it is none.
    pub fn parse_args() -> Self {
        Self::try_parse_args(env::args_os()).unwrap_or_else(|error| match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
            _ => {
                eprint!("{}", usage_error(&error));
                process::exit(error.exit_code());
            }
        })
    }

    pub(super) fn try_parse_args(
        args: impl Iterator<Item = OsString>,
    ) -> Result<Self, clap::Error> {
        let mut command = without_empty_variables(Self::command());
        let mut matches = command.try_get_matches_from_mut(verb_first(args))?;
        Self::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
    }
}

/// A usage error that begins as every other error of this program does.
pub(super) fn usage_error(error: &clap::Error) -> String {
    let text = error.to_string();
    match text.strip_prefix("error: ") {
        Some(rest) => format!("rto-agent: {rest}"),
        None => text,
    }
}

/// Ignores environment variables that are empty: units and manifests often set a variable to nothing.
pub(super) fn without_empty_variables(command: Command) -> Command {
    command
        .mut_args(|arg| match arg.get_env().and_then(env::var_os) {
            Some(value) if value.is_empty() => arg.env(None::<&'static str>),
            _ => arg,
        })
        .mut_subcommands(without_empty_variables)
}

/// Moves the arguments of [`super::BeforeVerb`] behind the verb; without a verb they stay.
fn verb_first(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args = args.peekable();
    let program = args.next();
    let mut moved = Vec::new();
    while let Some(option) = args.next_if(is_movable) {
        let takes_value = option == "--socket";
        moved.push(option);
        if takes_value {
            moved.extend(args.next());
        }
    }
    let verb = args.next_if(|arg| !arg.as_encoded_bytes().starts_with(b"-"));
    let mut all: Vec<OsString> = program.into_iter().chain(verb).collect();
    all.extend(moved.into_iter().chain(args));
    all
}

fn is_movable(arg: &OsString) -> bool {
    let bytes = arg.as_encoded_bytes();
    bytes == b"--json" || bytes == b"--socket" || bytes.starts_with(b"--socket=")
}
