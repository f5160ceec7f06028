//! `rto-lab run`, and the lab's own experiments that are defined by files.

use std::path::Path;

use clap::Args;

use super::on_links;
use crate::{cli::EngineArgs, experiment::definition::Plan};

/// Options of an experiment that is defined by a file.
#[derive(Clone, Debug, Args)]
pub struct Defined {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Runs of a cell [default: as in the definition]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: Option<u32>,
    /// Only this level of a factor; may be repeated for more levels [default: all levels of all factors]
    #[arg(long, value_name = "FACTOR=LEVEL", value_parser = factor_level)]
    pub(crate) only: Vec<(String, String)>,
}

fn factor_level(text: &str) -> Result<(String, String), String> {
    let (factor, level) = text
        .split_once('=')
        .ok_or_else(|| format!("{text}: not of the form FACTOR=LEVEL, such as timers=kernel"))?;
    Ok((factor.to_owned(), level.to_owned()))
}

/// Runs one of the lab's own experiments.
pub(super) fn own(verb: &str, args: &Defined) -> anyhow::Result<()> {
    on_links(&args.engine, Plan::own(verb, args))
}

pub(super) fn run(file: &Path, args: &Defined) -> anyhow::Result<()> {
    on_links(&args.engine, Plan::read(file, args))
}
