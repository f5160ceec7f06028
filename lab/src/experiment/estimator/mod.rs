//! How often an RTO is too short: RFC 6298 with any weights, sampling and minimum, and Linux's variant, over RTT
//! samples of generated load, of a capture or of the agent's statistics. A run is a load; its flows are what effects are
//! paired by.

mod load;
mod source;

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_model::{
    capture,
    estimator::{Linux, Rfc6298, Sample, Weights},
    published,
    study::{MINIMUMS_US, Sampling, Shares, Study, weights_table},
};
use rto_testbed::machine::Machine;

use self::{load::Load, source::Source};
use crate::{
    cli::Common,
    commands::{advise::read_capture, predict::duration},
    engine::{self, Column, Design, Experiment, Record, Stat},
    summary::{f, micros, ms},
};

/// Of the rate, by TCP.
const TCP: f64 = 0.15;
const FLOWS: u16 = 8;
/// The least that Linux can have at HZ 250, to its default.
const RTO_MINS_US: [u64; 7] = [8_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000];
/// How it is shown.
const DESIGN: &str = include_str!("../../../experiments/estimator.toml");
/// Samplings as they are named.
const SAMPLINGS: [&str; 3] = ["All", "One", "EverySecondAck"];

/// `rto-lab estimator`.
#[derive(Debug, Args)]
pub struct Estimator {
    #[command(flatten)]
    pub(crate) common: Common,
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
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}

/// The whole study.
#[derive(Debug)]
pub struct Plan {
    design: Design,
    loads: Vec<Load>,
    /// In place of loads.
    file: Option<Source>,
    own: Option<Rfc6298>,
    minimums_us: Vec<u64>,
    hz: u32,
}

impl Plan {
    /// What was asked for.
    pub fn new(args: &Estimator) -> anyhow::Result<Self> {
        ensure!(
            args.queue >= Duration::from_millis(1) && args.load.len() <= 100,
            "--queue: at least 1ms; --load: at most 100 of them"
        );
        let file = match (&args.pcap, &args.stats) {
            (Some(path), _) => {
                let source = source::of_capture(&path.display().to_string(), &read_capture(path)?);
                Some(source.with_context(|| path.display().to_string())?)
            }
            (None, Some(path)) => {
                let at = || path.display().to_string();
                let text = fs::read_to_string(path).with_context(at)?;
                Some(source::of_statistics(&text, args.policy.as_deref()).with_context(at)?)
            }
            (None, None) => None,
        };
        let default = Duration::from_secs(if args.common.quick { 5 } else { 30 });
        let load = |percent: &u16| Load {
            rate: args.rate * 1_000_000,
            delay: args.delay,
            queue: args.queue,
            load: f64::from(*percent) / 100.0,
            tcp: TCP,
            flows: FLOWS,
            length: args.length.unwrap_or(default),
            seed: args.common.seed,
        };
        Ok(Self {
            design: toml::from_str(DESIGN)?,
            loads: if file.is_some() {
                Vec::new()
            } else {
                args.load.iter().map(load).collect()
            },
            file,
            own: own(args),
            minimums_us: match args.minimums.is_empty() {
                true => MINIMUMS_US.to_vec(),
                false => args.minimums.iter().copied().map(micros).collect(),
            },
            hz: u32::try_from(Machine::here()?.hz)?,
        })
    }

    /// All loads at once.
    pub(crate) fn jobs(&self) -> usize {
        self.loads.len()
    }

    /// Whether it needs no more than a file, which may be another one of the same name the next time.
    pub(crate) fn is_of_file(&self) -> bool {
        self.file.is_some()
    }

    /// What every estimator makes of a flow.
    fn flow(&self, load: &str, number: u32, samples: &[Sample]) -> Vec<Record> {
        let flows = [samples];
        let rtts = samples.iter().map(|sample| ms(sample.rtt_us));
        let mut records = vec![Record::new([("load", load)], number).with_all("RTT", rtts)];
        let mut weights = |name: &str, sampling: Sampling, shares: &Shares| {
            let sampling = SAMPLINGS[Sampling::ALL
                .iter()
                .position(|one| *one == sampling)
                .unwrap_or(0)];
            let levels = [("load", load), ("weights", name), ("sampling", sampling)];
            let mut record = Record::new(levels, number)
                .with("judged", f(shares.judged))
                .with("within", f(shares.within))
                .with("exceeding", f(shares.exceeding))
                .with("RTO > 1 s", f(shares.long))
                .with("exceeded", f(shares.spurious()));
            for (us, avoided) in &shares.avoided {
                record = record.with(&avoid(*us), f(*avoided));
            }
            records.push(record);
        };
        for row in weights_table(&flows, &self.minimums_us) {
            weights(row.name, row.sampling, &row.shares);
        }
        if let Some(own) = &self.own {
            for sampling in Sampling::ALL {
                let shares = Study::published(sampling).run(own, &flows, &self.minimums_us);
                weights("own", sampling, &shares);
            }
        }
        let every = Study::every(Sampling::All);
        let of = |weights| every.run(&Rfc6298::new(weights), &flows, &RTO_MINS_US);
        for (name, shares) in [
            (
                "Linux",
                every.run(&Linux::new(self.hz), &flows, &RTO_MINS_US),
            ),
            ("RFC 6298, W1", of(Weights::W1)),
            ("RFC 6298, W8", of(Weights::W8)),
        ] {
            for (us, avoided) in &shares.avoided {
                let minimum = (us / 1000).to_string();
                let levels = [("load", load), ("estimator", name), ("minimum", &minimum)];
                records.push(
                    Record::new(levels, number)
                        .with("segments", f(shares.judged))
                        .with("spurious", f(shares.judged - avoided)),
                );
            }
        }
        records
    }
}

impl Experiment for Plan {
    /// Number of a load.
    type Run = usize;
    type Shared = ();
    /// Number of its link.
    type Testbed = u8;
    type Seat<'a> = u8;

    fn design(&self) -> Design {
        let time = |duration| humantime::format_duration(duration).to_string();
        let mut method = vec![(
            "judged",
            "each sample against the RTO before it; weights: what the estimator takes; minimums: every segment"
                .to_owned(),
        )];
        if let Some(file) = &self.file {
            method.extend(
                file.remarks
                    .iter()
                    .map(|remark| ("samples", remark.clone())),
            );
        }
        if let Some(load) = self.loads.first() {
            method.push((
                "traffic",
                format!(
                    "{FLOWS} TCP flows, bursts of ten segments at random times, {:.0} % of the rate; the rest UDP \
                     packets at random times; for {}",
                    TCP * 100.0,
                    time(load.length)
                ),
            ));
            let loads: Vec<String> = self.loads.iter().map(name).collect();
            method.push(("loads", loads.join(", ")));
            method.push((
                "bottleneck",
                format!(
                    "{} Mbit/s, {} one way, a full queue takes {}",
                    load.rate / 1_000_000,
                    time(load.delay),
                    time(load.queue)
                ),
            ));
        }
        if let Some(own) = &self.own {
            method.push(("own", format!("{own:?}")));
        }
        let mut design = self.design.clone();
        if let Some(file) = &self.file {
            // Its log is not that of what was measured.
            design.name = "estimator-file".to_owned();
            if file.is_drawn {
                design.run_is = "drawn flow".to_owned();
            }
        }
        design.method = method
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        if let Some(table) = design.tables.last_mut() {
            table.columns.extend(self.minimums_us.iter().map(|us| {
                let name = avoid(*us);
                Column::new(&name, Stat::PercentOf("judged".to_owned()), &name)
            }));
        }
        if self.file.is_none() {
            design.references = engine::published(published::ESTIMATOR);
            let is_load = |one: &Record| {
                self.loads
                    .iter()
                    .any(|load| name(load) == one.level("load"))
            };
            design.references.retain(is_load);
        }
        design
    }

    fn runs(&self) -> Vec<usize> {
        (0..self.loads.len().max(1)).collect()
    }

    fn share(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![self.loads.len().max(1)]
    }

    fn testbed(&self, (): &(), _: usize, number: u8) -> anyhow::Result<u8> {
        Ok(number)
    }

    fn seat(&self, number: &mut u8) -> u8 {
        *number
    }

    fn kind(&self, _: &usize) -> usize {
        0
    }

    fn measure(&self, number: &mut u8, run: &usize) -> anyhow::Result<Vec<Record>> {
        if let Some(file) = &self.file {
            let flows = (0..).zip(&file.flows);
            return Ok(flows
                .flat_map(|(n, flow)| self.flow(&file.title, n, flow))
                .collect());
        }
        let load = &self.loads[*run];
        let name = name(load);
        let flows = load.run(*number)?;
        ensure!(!flows.is_empty(), "no flow of TCP in the capture");
        let records = (0..)
            .zip(&flows)
            .flat_map(|(n, flow): (u32, &capture::Flow)| {
                let counts = Record::new([("load", &*name)], n)
                    .with("sent", f(flow.counts.segments))
                    .with("retransmitted", f(flow.counts.retransmitted));
                std::iter::once(counts)
                    .chain(self.flow(&name, n, &flow.samples()))
                    .collect::<Vec<_>>()
            });
        Ok(records.collect())
    }

    fn expected(&self, run: &usize) -> Duration {
        self.loads.get(*run).map_or(Duration::ZERO, Load::takes)
    }
}

/// Of the bottleneck, percent.
fn name(load: &Load) -> String {
    format!("{:.0}", load.load * 100.0)
}

fn avoid(us: u64) -> String {
    format!("avoid at {} ms", us / 1000)
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
