//! `rto-lab loss`.

use clap::Args;

use rto_testbed::agent;

use super::experiment;
use crate::{
    cli::{Common, LinkArg},
    experiment::loss,
};

/// `rto-lab loss`.
#[derive(Debug, Args)]
pub struct Loss {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    link: LinkArg,
    /// Requests of a case with exact losses [default: 100; quick: 20]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: Option<u32>,
    /// Requests of a case with 3 % random losses [default: 5000; quick: 100]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    random: Option<u32>,
    /// Requests of a case with 50 % random losses
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    heavy: u32,
}

pub(super) fn run(args: &Loss) -> anyhow::Result<()> {
    let quick = args.common.quick;
    experiment(&args.common, || {
        loss::run(loss::Options {
            quick,
            backend: args.link.link,
            seed: args.common.seed,
            requests: args.requests.unwrap_or(if quick { 20 } else { 100 }),
            random: args.random.unwrap_or(if quick { 100 } else { 5000 }),
            heavy: args.heavy,
            agent: &agent::find(args.common.agent.as_deref())?,
        })
    })
}
