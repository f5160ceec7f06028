//! `rto-agent completions` and `rto-agent man`: made from the definitions, so never out of date.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::CommandFactory as _;

use crate::{
    cli::{Cli, Completions, Man},
    completion,
};

pub(super) fn completions(args: &Completions) -> anyhow::Result<ExitCode> {
    let script = completion::script(args.shell)?;
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn man(args: &Man) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    let command = match &args.verb {
        None => command,
        Some(verb) => command
            .find_subcommand(verb)
            .cloned()
            .ok_or_else(|| anyhow::anyhow!("there is no verb {verb:?}; see rto-agent help"))?,
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    io::stdout().lock().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}
