//! `rto-lab outage`.

use std::time::Duration;

use clap::Args;

use super::{measure, predict::duration};
use crate::{cli::Common, experiment::outage::Plan, outage::Version};

/// `rto-lab outage`.
#[derive(Debug, Args)]
pub struct Outage {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Timeout of the first SYN, set by the agent [default: 100ms]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) initial_rto: Option<Duration>,
    /// Lengths of outages [default: 104 from 50ms to 19.1s; quick: 15 up to 6.97s; both just before the kernel's SYNs
    /// too]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    pub(crate) outage: Vec<Duration>,
    /// Compare with the model of this kernel version: 6.5 sends the first SYNs every second [default: this kernel's]
    #[arg(long, value_name = "VERSION")]
    pub(crate) linux: Option<Version>,
    /// Connections of each outage, loss and coverage [default: 5]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=30))]
    pub(crate) runs: Option<u16>,
    /// Discard the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

pub(super) fn run(args: &Outage) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    measure(&args.common, &plan, Plan::TESTBEDS, args.fresh)
}
