//! `rto-lab file`.

use clap::Args;

use super::measure;
use crate::{cli::Common, experiment::file::Plan};

/// `rto-lab file`.
#[derive(Debug, Args)]
pub struct File {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Runs of a cell [default: 5; quick: 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) runs: Option<u32>,
    /// Background load, % of 100 Mbit/s
    #[arg(long, value_delimiter = ',', default_values_t = [75, 100, 125], value_parser = clap::value_parser!(u16).range(20..=400))]
    pub(crate) load: Vec<u16>,
    /// Discard the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

pub(super) fn run(args: &File) -> anyhow::Result<()> {
    // A run needs the whole machine.
    measure(&args.common, &Plan::new(args)?, 1, args.fresh)
}
