//! `rto-lab tune`.

use std::path::PathBuf;

use clap::Args;

use super::study;
use crate::{
    cli::Common,
    experiment::tune::{self, Options},
    report,
};

/// `rto-lab tune`.
#[derive(Debug, Args)]
pub struct Tune {
    #[command(flatten)]
    common: Common,
    /// Generated prefixes [default: 2000; quick: 100]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prefixes: Option<u32>,
    /// Also write the tables between the markers of this page
    #[arg(long, value_name = "FILE.md")]
    page: Option<PathBuf>,
}

/// Duration of each generated prefix, seconds.
const SECONDS: u32 = 9_000;
/// Connections per second of the steps.
const RATES: [f64; 4] = [1.0, 20.0, 50.0, 500.0];
/// The largest server near its capacity, SYNs per second.
const SERVER_PER_S: f64 = 10_000.0;

pub(super) fn run(args: &Tune) -> anyhow::Result<()> {
    let quick = args.common.quick;
    let prefixes = args.prefixes.unwrap_or(if quick { 100 } else { 2_000 });
    let options = Options {
        prefixes: usize::try_from(prefixes)?,
        seconds: SECONDS,
        hours: if quick { 6 } else { 12 },
        rates: &RATES,
        server_per_s: SERVER_PER_S,
        seed: args.common.seed,
    };
    study(&args.common, || {
        let found = tune::run(&options)?;
        if let Some(page) = &args.page {
            report::write_tables(page, &found)?;
        }
        Ok(found)
    })
}
