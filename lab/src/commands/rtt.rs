//! `rto-lab rtt`.

use clap::Args;

use rto_testbed::agent;

use super::experiment;
use crate::{
    cli::Common,
    experiment::rtt::{self, Options},
};

/// `rto-lab rtt`.
#[derive(Debug, Args)]
pub struct Rtt {
    #[command(flatten)]
    common: Common,
    /// Transactions of each connection [default: 400; quick: 60]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    transactions: Option<u32>,
}

pub(super) fn run(args: &Rtt) -> anyhow::Result<()> {
    experiment(&args.common, || {
        rtt::run(Options {
            quick: args.common.quick,
            transactions: args.transactions.map(|n| n as usize),
            seed: args.common.seed,
            agent: &agent::find(args.common.agent.as_deref())?,
        })
    })
}
