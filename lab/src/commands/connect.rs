//! `rto-lab connect`.

use clap::Args;
use rto_testbed::workload::rr::{Options, Sizes};

use super::rr::{self, Extent, Output};
use crate::{interrupt, rr::measure::Test};

/// `rto-lab connect`.
#[derive(Debug, Args)]
pub struct Connect {
    /// Any TCP server [default port: 4700]; for an `rto-lab rr --server` the records also include its host
    #[arg(value_name = "HOST[:PORT]")]
    to: String,
    #[command(flatten)]
    extent: Extent,
    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: &Connect) -> anyhow::Result<()> {
    interrupt::handle()?;
    let (sizes, options) = (Sizes::SMALL, Options::default());
    let plan = args.extent.of(Test::Connect, &args.to, sizes, options)?;
    rr::client(plan, &args.output)
}
