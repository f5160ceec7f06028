//! `rto-lab tail`.

use clap::Args;

use rto_testbed::agent;

use super::experiment;
use crate::{
    cli::Common,
    experiment::tail::{self, Plan},
};

/// `rto-lab tail`.
#[derive(Debug, Args)]
pub struct Tail {
    #[command(flatten)]
    common: Common,
    /// Flows of a cell [default: 5; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
}

pub(super) fn run(args: &Tail) -> anyhow::Result<()> {
    let mut plan = Plan::new(args.common.quick);
    plan.runs = args.runs.unwrap_or(plan.runs);
    experiment(&args.common, || {
        tail::run(&tail::Options {
            plan,
            seed: args.common.seed,
            agent: &agent::find(args.common.agent.as_deref())?,
        })
    })
}
