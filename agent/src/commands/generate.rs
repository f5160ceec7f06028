//! `rto-agent completions` and `rto-agent man`: generated from the definitions, so never out of
//! date.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
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
    if let Some(dir) = &args.dir {
        clap_mangen::generate_to(command, dir).with_context(|| dir.display().to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    command.build();
    let command = match &args.verb {
        None => command,
        Some(verb) => command
            .find_subcommand(verb)
            .cloned()
            .ok_or_else(|| anyhow::anyhow!("unknown verb {verb:?}; see rto-agent help"))?,
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    io::stdout().lock().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_visible_verb_has_man_page() {
        let dir = tempfile::tempdir().unwrap();
        let args = Man {
            verb: None,
            dir: Some(dir.path().to_owned()),
        };
        man(&args).unwrap();
        for verb in Cli::command().get_subcommands() {
            let page = dir.path().join(format!("rto-agent-{}.1", verb.get_name()));
            assert_eq!(page.exists(), !verb.is_hide_set(), "{}", page.display());
        }
        let whole = fs::read_to_string(dir.path().join("rto-agent.1")).unwrap();
        assert!(whole.contains(".TH rto-agent 1"));
    }
}
