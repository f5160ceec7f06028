//! `rto-lab estimator`.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::Args;

use super::{advise::read_capture, measure, predict::duration, study};
use crate::{
    cli::Common,
    engine,
    estimator::{Rfc6298, Weights},
    experiment::{estimator::Plan, samples::Samples},
    summary::micros,
};

/// `rto-lab estimator`.
#[derive(Debug, Args)]
pub struct Estimator {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Use this capture, as seen by the host where it was taken (tcpdump -s 128 -w FILE tcp), instead of generated load
    #[arg(long, value_name = "FILE", conflicts_with = "stats")]
    pcap: Option<PathBuf>,
    /// Use this output of `rto-agent stats --json` instead of generated load
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Use only this policy's statistics
    #[arg(long, requires = "stats")]
    policy: Option<String>,
    /// Weight of a new sample in the smoothed RTT, for an estimator in addition to W1 to W9
    #[arg(long, value_parser = weight)]
    alpha: Option<f64>,
    /// Its weight in the variation
    #[arg(long, value_parser = weight)]
    beta: Option<f64>,
    /// Number of variations that the RTO is above the smoothed RTT
    #[arg(long, short, value_parser = variations)]
    k: Option<f64>,
    /// The clock's granularity
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    granularity: Option<Duration>,
    /// Its minimum RTO
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    minimum: Option<Duration>,
    /// Minimum RTOs to compare [default: 250ms,500ms,750ms,1s]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    pub(crate) minimums: Vec<Duration>,
    /// Loads to generate, % of the bottleneck
    #[arg(long, value_delimiter = ',', default_values_t = [75, 100, 125], value_parser = clap::value_parser!(u16).range(20..=400))]
    pub(crate) load: Vec<u16>,
    /// Rate of the bottleneck, Mbit/s
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub(crate) rate: u64,
    /// One-way delay without the queue
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "20ms")]
    pub(crate) delay: Duration,
    /// Time that a packet waits in the full queue
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1500ms")]
    pub(crate) queue: Duration,
    /// Duration of each load [default: 30s; quick: 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) length: Option<Duration>,
    /// Discard the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

pub(super) fn run(args: &Estimator) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    if !plan.is_of_file() {
        return measure(&args.common, &plan, plan.jobs(), args.fresh);
    }
    let options = engine::Options {
        seed: args.common.seed,
        jobs: 1,
        out: &args.common.out,
        fresh: true,
    };
    study(&args.common, || engine::run(&plan, &options))
}

impl Estimator {
    /// The samples of a file, if one was given.
    pub(crate) fn file(&self) -> anyhow::Result<Option<Samples>> {
        let samples = match (&self.pcap, &self.stats) {
            (Some(path), _) => {
                let at = path.display().to_string();
                Samples::of_capture(&at, &read_capture(path)?).context(at)?
            }
            (None, Some(path)) => {
                let at = || path.display().to_string();
                let text = fs::read_to_string(path).with_context(at)?;
                Samples::of_statistics(&text, self.policy.as_deref()).with_context(at)?
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(samples))
    }

    /// The user's own estimator, if any of its options was given.
    pub(crate) fn own(&self) -> Option<Rfc6298> {
        let is_given = self.alpha.or(self.beta).or(self.k).is_some()
            || self.granularity.or(self.minimum).is_some();
        let mut own = Rfc6298::new(Weights {
            alpha: self.alpha.unwrap_or(Weights::W1.alpha),
            beta: self.beta.unwrap_or(Weights::W1.beta),
        });
        own.k = self.k.unwrap_or(own.k);
        own.granularity_us = self.granularity.map_or(own.granularity_us, micros);
        own.minimum_us = self.minimum.map_or(own.minimum_us, micros);
        is_given.then_some(own)
    }
}

/// Parses a weight above 0 and at most 1, also as a fraction.
fn weight(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.parse::<f64>().ok();
    let weight = match text.split_once('/') {
        Some((above, below)) => number(above).zip(number(below)).map(|(a, b)| a / b),
        None => number(text),
    };
    weight
        .filter(|weight| *weight > 0.0 && *weight <= 1.0)
        .ok_or_else(|| {
            format!("{text}: a weight must be above 0 and at most 1, such as 1/8 or 0.125")
        })
}

fn variations(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|k| (0.0..=1000.0).contains(k));
    number.ok_or_else(|| format!("{text}: must be between 0 and 1000 variations, such as 4"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variations_are_parsed() {
        assert_eq!(variations("4"), Ok(4.0));
        for text in ["-3", "nan", "inf", "1001", ""] {
            assert!(
                variations(text).unwrap_err().contains("such as 4"),
                "{text}"
            );
        }
    }

    #[test]
    fn weights_are_parsed() {
        assert_eq!(weight("1/8"), Ok(0.125));
        assert_eq!(weight("0.5"), Ok(0.5));
        for text in ["0", "1.5", "1/0", "x", "1/x", "-1"] {
            assert!(weight(text).unwrap_err().contains("such as 1/8"), "{text}");
        }
    }
}
