//! `rto-lab blackout`.

use std::time::Duration;

use clap::Args;

use super::predict::duration;
use crate::{
    cli::EngineArgs,
    experiment::blackout::{self, Mechanism},
};

/// `rto-lab blackout`.
#[derive(Clone, Debug, Args)]
pub struct Blackout {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// The mechanisms of the settings
    #[arg(long = "mechanism", value_name = "MECHANISM")]
    #[arg(value_enum, value_delimiter = ',', default_values_t = [Mechanism::Agent, Mechanism::Route, Mechanism::Sysctl, Mechanism::Firewall, Mechanism::Kernel])]
    pub(crate) mechanisms: Vec<Mechanism>,
    /// Lower bounds of the RTO [default: two jiffies, 50ms, 200ms]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    pub(crate) rto_min: Vec<Duration>,
    /// Durations of the loss [default: as in the published tables, 10ms to 1.5s]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    pub(crate) disruption: Vec<Duration>,
    /// Runs of a cell with the agent and with the kernel's own timers [default: 11; quick: 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: Option<u32>,
    /// Runs of a cell with route, sysctl and firewall [default: 5; quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) control_runs: Option<u32>,
}

pub(super) fn run(args: &Blackout) -> anyhow::Result<()> {
    super::on_links(&args.engine, blackout::plan(args))
}
