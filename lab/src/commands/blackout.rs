//! `rto-lab blackout`.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_model::published::Table;
use rto_testbed::{agent, machine::jiffy};

use super::{experiment, predict::duration};
use crate::{
    cli::{Common, LinkArg},
    experiment::blackout::{self, Mechanism, Options, Plan, Setting},
};

/// `rto-lab blackout`.
#[derive(Debug, Args)]
pub struct Blackout {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    link: LinkArg,
    /// By which mechanisms settings are made
    #[arg(long = "mechanism", alias = "ways", value_name = "MECHANISM")]
    #[arg(value_enum, value_delimiter = ',', default_values_t = [Mechanism::Agent, Mechanism::Route, Mechanism::Sysctl, Mechanism::Kernel])]
    mechanisms: Vec<Mechanism>,
    /// Lower bounds of the RTO [default: two jiffies, 50ms, 200ms]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    rto_min: Vec<Duration>,
    /// How long all is lost [default: those of the published tables, 10ms to 1.5s]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    disruption: Vec<Duration>,
    /// Runs of a cell, by the agent and of the kernel's own timers [default: 11; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: Option<u32>,
    /// Runs of a cell, by route and sysctl [default: 5; quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    control_runs: Option<u32>,
    /// Runs at once: all but one of them wait for their disruption to end
    #[arg(long, alias = "lanes", value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long, alias = "again")]
    fresh: bool,
}

pub(super) fn run(args: &Blackout) -> anyhow::Result<()> {
    let plan = plan(args)?;
    experiment(&args.common, || {
        blackout::run(Options {
            plan,
            backend: args.link.link,
            seed: args.common.seed,
            jobs: args.jobs.into(),
            out: &args.common.out,
            fresh: args.fresh,
            agent: &agent::find(args.common.agent.as_deref())?,
        })
    })
}

fn plan(args: &Blackout) -> anyhow::Result<Plan> {
    let quick = args.common.quick;
    let ms = Duration::from_millis;
    let two_jiffies = 2 * jiffy();
    let rto_mins = match (args.rto_min.is_empty(), quick) {
        (false, _) => args.rto_min.clone(),
        (true, false) => vec![two_jiffies, ms(50), ms(200)],
        (true, true) => vec![two_jiffies, ms(200)],
    };
    for rto_min in &rto_mins {
        ensure!(
            (two_jiffies..=ms(200)).contains(rto_min),
            "--rto-min {}: this kernel takes {} to 200ms",
            humantime::format_duration(*rto_min),
            humantime::format_duration(two_jiffies)
        );
    }
    let disruptions_us = match (args.disruption.is_empty(), quick) {
        (false, _) => args.disruption.iter().map(|d| micros(*d)).collect(),
        (true, false) => Ok(Table::theory().disruptions_us()),
        (true, true) => Ok(vec![10_000, 60_000, 200_000, 700_000]),
    }?;
    ensure!(
        disruptions_us.iter().all(|us| *us >= 2_000),
        "--disruption: at least 2ms, which is longer than a transaction"
    );
    let settings = rto_mins.iter().flat_map(|rto_min| {
        let rto_min_us = micros(*rto_min).unwrap_or(u64::MAX);
        [true, false].map(|thin| Setting { thin, rto_min_us })
    });
    Ok(Plan {
        mechanisms: args.mechanisms.clone(),
        settings: settings.collect(),
        disruptions_us,
        runs: args.runs.unwrap_or(if quick { 3 } else { 11 }),
        control_runs: args.control_runs.unwrap_or(if quick { 1 } else { 5 }),
    })
}

fn micros(duration: Duration) -> anyhow::Result<u64> {
    u64::try_from(duration.as_micros()).context("too long")
}
