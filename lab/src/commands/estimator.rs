//! `rto-lab estimator`.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_model::{
    estimator::{Rfc6298, Weights},
    study::MINIMUMS_US,
};

use super::{advise::read_capture, experiment, predict::duration, study};
use crate::{
    cli::Common,
    experiment::estimator::{self, Load, Options, Source},
    report::Method,
    summary::micros,
};

/// `rto-lab estimator`.
#[derive(Debug, Args)]
pub struct Estimator {
    #[command(flatten)]
    common: Common,
    /// Of this capture, of the host where it was taken (tcpdump -s 128 -w FILE tcp); nothing is generated then
    #[arg(long, value_name = "FILE", conflicts_with = "stats")]
    pcap: Option<PathBuf>,
    /// Of what `rto-agent stats --json` printed; nothing is generated then
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Of this policy's statistics only
    #[arg(long, requires = "stats")]
    policy: Option<String>,
    /// Weight of a new sample in the smoothed RTT, of an estimator beside W1 to W9
    #[arg(long, value_parser = weight)]
    alpha: Option<f64>,
    /// Its weight in the variation
    #[arg(long, value_parser = weight)]
    beta: Option<f64>,
    /// How many variations the RTO lies above the smoothed RTT
    #[arg(long, short, value_parser = variations)]
    k: Option<f64>,
    /// The clock's granularity
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    granularity: Option<Duration>,
    /// Its least RTO
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    minimum: Option<Duration>,
    /// Minimum RTOs to compare [default: 250ms,500ms,750ms,1s]
    #[arg(long, value_name = "DURATION", value_delimiter = ',', value_parser = duration)]
    minimums: Vec<Duration>,
    /// Loads to generate, % of the bottleneck
    #[arg(long, value_delimiter = ',', default_values_t = [75, 100, 125], value_parser = clap::value_parser!(u16).range(20..=400))]
    load: Vec<u16>,
    /// Rate of the bottleneck, Mbit/s
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100))]
    rate: u64,
    /// One way, without the queue
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "20ms")]
    delay: Duration,
    /// How long a packet waits in the full queue
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1500ms")]
    queue: Duration,
    /// How long each load lasts [default: 30s; quick: 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    length: Option<Duration>,
}

/// Of the rate, by TCP.
const TCP: f64 = 0.15;
const FLOWS: u16 = 8;
/// The least that Linux can have at HZ 250, to its default.
const RTO_MINS_US: [u64; 7] = [8_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000];

pub(super) fn run(args: &Estimator) -> anyhow::Result<()> {
    let options = Options {
        own: own(args),
        minimums_us: if args.minimums.is_empty() {
            MINIMUMS_US.to_vec()
        } else {
            args.minimums.iter().copied().map(micros).collect()
        },
        rto_mins_us: RTO_MINS_US.to_vec(),
        seed: args.common.seed,
    };
    ensure!(
        args.queue >= Duration::from_millis(1) && args.load.len() <= 100,
        "--queue: at least 1ms; --load: at most 100 of them"
    );
    let run = || {
        let (sources, method) = sources(args)?;
        estimator::study(&sources, &options, method)
    };
    if args.pcap.is_some() || args.stats.is_some() {
        study(&args.common, run)
    } else {
        experiment(&args.common, run)
    }
}

fn sources(args: &Estimator) -> anyhow::Result<(Vec<Source>, Method)> {
    if let Some(path) = &args.pcap {
        let at = || path.display().to_string();
        let bytes = read_capture(path)?;
        let source = estimator::of_capture(&path.display().to_string(), &bytes).with_context(at)?;
        return Ok((vec![source], Vec::new()));
    }
    if let Some(path) = &args.stats {
        let at = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(at)?;
        let source = estimator::of_statistics(&text, args.policy.as_deref()).with_context(at)?;
        return Ok((vec![source], Vec::new()));
    }
    let default = if args.common.quick { 5 } else { 30 };
    let length = args.length.unwrap_or(Duration::from_secs(default));
    let loads: Vec<Load> = args
        .load
        .iter()
        .map(|percent| Load {
            rate: args.rate * 1_000_000,
            delay: args.delay,
            queue: args.queue,
            load: f64::from(*percent) / 100.0,
            tcp: TCP,
            flows: FLOWS,
            length,
            seed: args.common.seed,
        })
        .collect();
    let time = |duration| humantime::format_duration(duration).to_string();
    let method = [
        (
            "traffic",
            format!(
                "{FLOWS} TCP flows, bursts of ten segments at random times, {:.0} % of the rate; the rest UDP \
                 packets at random times; for {}",
                TCP * 100.0,
                time(length)
            ),
        ),
        (
            "bottleneck",
            format!(
                "{} Mbit/s, {} one way, a full queue takes {}",
                args.rate,
                time(args.delay),
                time(args.queue)
            ),
        ),
    ];
    let method = method
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec();
    Ok((estimator::generate(&loads)?, method))
}

/// An estimator of one's own, if anything of it was said.
fn own(args: &Estimator) -> Option<Rfc6298> {
    let Estimator {
        alpha,
        beta,
        k,
        granularity,
        minimum,
        ..
    } = args;
    let said = alpha.or(*beta).or(*k).is_some() || granularity.or(*minimum).is_some();
    let mut own = Rfc6298::new(Weights {
        alpha: alpha.unwrap_or(Weights::W1.alpha),
        beta: beta.unwrap_or(Weights::W1.beta),
    });
    own.k = k.unwrap_or(own.k);
    own.granularity_us = granularity.map_or(own.granularity_us, micros);
    own.minimum_us = minimum.map_or(own.minimum_us, micros);
    said.then_some(own)
}

/// More than 0, at most 1; also as a fraction.
fn weight(text: &str) -> Result<f64, String> {
    let number = match text.split_once('/') {
        Some((above, below)) => above
            .parse::<f64>()
            .ok()
            .zip(below.parse::<f64>().ok())
            .map(|(above, below)| above / below),
        None => text.parse().ok(),
    };
    number
        .filter(|weight| *weight > 0.0 && *weight <= 1.0)
        .ok_or_else(|| format!("{text}: a weight is above 0 and at most 1, such as 1/8 or 0.125"))
}

fn variations(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|k| (0.0..=1000.0).contains(k))
        .ok_or_else(|| format!("{text}: 0 to 1000 variations, such as 4"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_variations() {
        assert_eq!(variations("4"), Ok(4.0));
        for text in ["-3", "nan", "inf", "1001", ""] {
            assert!(
                variations(text).unwrap_err().contains("such as 4"),
                "{text}"
            );
        }
    }

    #[test]
    fn weights() {
        assert_eq!(weight("1/8"), Ok(0.125));
        assert_eq!(weight("0.5"), Ok(0.5));
        for text in ["0", "1.5", "1/0", "x", "1/x", "-1"] {
            assert!(weight(text).unwrap_err().contains("such as 1/8"), "{text}");
        }
    }
}
