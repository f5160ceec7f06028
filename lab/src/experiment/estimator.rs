//! How often an RTO is too short: RFC 6298 with any weights, sampling and minimum, and Linux's variant, over RTT
//! samples of generated load, of a capture or of the agent's statistics. A run is a load; effects are paired by its
//! flows.

use std::time::Duration;

use anyhow::ensure;
use rto_model::estimator::{Linux, Sample};
use rto_testbed::machine::Machine;

use super::samples::Samples;
use crate::{
    commands::estimator::Estimator,
    engine::{Column, Design, Experiment, Record, Stat},
    estimator::{Rfc6298, Weights},
    load::Load,
    published,
    study::{MINIMUMS_US, Sampling, Shares, Study},
    summary::{f, micros, ms},
};

/// From Linux's minimum at HZ 250 (two jiffies) to RFC 6298's minimum of 1 s.
const RTO_MINS_US: [u64; 7] = [8_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000];
/// The design of the report.
const DESIGN: &str = include_str!("../../experiments/estimator.toml");

/// The source of the flows.
#[derive(Debug)]
enum Source {
    /// Generated loads, with a run for each.
    Loads(Vec<Load>),
    File(Samples),
}

/// The whole study.
#[derive(Debug)]
pub struct Plan {
    design: Design,
    source: Source,
    /// RFC 6298 without a minimum, by weights.
    weights: Vec<(&'static str, Rfc6298)>,
    minimums_us: Vec<u64>,
    hz: u32,
}

impl Plan {
    /// Plans the study that the arguments describe.
    pub fn new(args: &Estimator) -> anyhow::Result<Self> {
        ensure!(
            args.queue >= Duration::from_millis(1) && args.load.len() <= 100,
            "--queue must be at least 1ms; --load accepts at most 100 values"
        );
        let default = Duration::from_secs(if args.common.quick { 5 } else { 30 });
        let load = |percent: &u16| Load {
            rate: args.rate * 1_000_000,
            delay: args.delay,
            queue: args.queue,
            load: f64::from(*percent) / 100.0,
            tcp: 0.15,
            length: args.length.unwrap_or(default),
            seed: args.common.seed,
        };
        let source = match args.file()? {
            Some(file) => Source::File(file),
            None => Source::Loads(args.load.iter().map(load).collect()),
        };
        let weights = Weights::ALL.map(|(name, weights)| (name, Rfc6298::new(weights)));
        let own = args.own().map(|own| ("own", own));
        let minimums_us = match args.minimums.is_empty() {
            true => MINIMUMS_US.to_vec(),
            false => args.minimums.iter().copied().map(micros).collect(),
        };
        Ok(Self {
            design: design(&source, own, &minimums_us)?,
            source,
            weights: weights.into_iter().chain(own).collect(),
            minimums_us,
            hz: u32::try_from(Machine::here()?.hz)?,
        })
    }

    /// All loads at once.
    pub(crate) fn jobs(&self) -> usize {
        match &self.source {
            Source::Loads(loads) => loads.len(),
            Source::File(_) => 1,
        }
    }

    /// Whether it needs only a file, which may be a different one of the same name next time.
    pub(crate) fn is_of_file(&self) -> bool {
        matches!(self.source, Source::File(_))
    }

    /// The results of every estimator for a flow.
    fn flow(&self, load: &str, number: u32, samples: &[Sample]) -> Vec<Record> {
        let flows = [samples];
        let rtts = samples.iter().map(|sample| ms(sample.rtt_us));
        let mut records = vec![Record::new([("load", load)], number).with_all("RTT", rtts)];
        for (weights, estimator) in &self.weights {
            for sampling in Sampling::ALL {
                let shares = Study::Published(sampling).run(estimator, &flows, &self.minimums_us);
                let name = format!("{sampling:?}");
                let levels = [("load", load), ("weights", *weights), ("sampling", &name)];
                records.push(with_shares(Record::new(levels, number), &shares));
            }
        }
        let every = Study::Every;
        let of = |weights| every.run(&Rfc6298::new(weights), &flows, &RTO_MINS_US);
        let linux = every.run(&Linux::new(self.hz), &flows, &RTO_MINS_US);
        for (name, shares) in [
            ("Linux", linux),
            ("RFC 6298, W1", of(Weights::W1)),
            ("RFC 6298, W8", of(Weights::W8)),
        ] {
            records.extend(shares.avoided.iter().map(|(us, avoided)| {
                let minimum = (us / 1000).to_string();
                let levels = [("load", load), ("estimator", name), ("minimum", &minimum)];
                Record::new(levels, number)
                    .with("segments", f(shares.judged))
                    .with("spurious", f(shares.judged - avoided))
            }));
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

    fn design(&self) -> Design {
        self.design.clone()
    }

    fn runs(&self) -> Vec<usize> {
        (0..self.jobs()).collect()
    }

    fn share(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn testbeds(&self) -> Vec<usize> {
        vec![self.jobs()]
    }

    fn testbed(&self, (): &(), _: usize, number: u8) -> anyhow::Result<u8> {
        Ok(number)
    }

    fn measure(&self, number: &mut u8, run: &usize) -> anyhow::Result<Vec<Record>> {
        let load = match &self.source {
            Source::Loads(loads) => &loads[*run],
            Source::File(file) => {
                let flows = (0..).zip(&file.flows);
                let records = flows.flat_map(|(n, flow)| self.flow(&file.title, n, flow));
                return Ok(records.collect());
            }
        };
        let flows = load.run(*number)?;
        ensure!(!flows.is_empty(), "no TCP flows in the capture");
        let records = (0..).zip(&flows).flat_map(|(n, flow)| {
            let counts = Record::new([("load", &*load.name())], n)
                .with("sent", f(flow.counts.segments))
                .with("retransmitted", f(flow.counts.retransmitted));
            [counts]
                .into_iter()
                .chain(self.flow(&load.name(), n, &flow.samples()))
        });
        Ok(records.collect())
    }

    fn expected(&self, run: &usize) -> Duration {
        match &self.source {
            Source::Loads(loads) => loads[*run].takes(),
            Source::File(_) => Duration::ZERO,
        }
    }
}

/// Adds these shares of samples to a record.
pub(super) fn with_shares(record: Record, shares: &Shares) -> Record {
    let record = record
        .with("judged", f(shares.judged))
        .with("within", f(shares.within))
        .with("exceeding", f(shares.exceeding))
        .with("RTO > 1 s", f(shares.long))
        .with("exceeded", f(shares.spurious()));
    let avoided = shares.avoided.iter();
    avoided.fold(record, |record, (us, avoided)| {
        record.with(&avoid(*us), f(*avoided))
    })
}

/// The design of the report.
fn design(
    source: &Source,
    own: Option<(&str, Rfc6298)>,
    minimums_us: &[u64],
) -> anyhow::Result<Design> {
    let mut design: Design = toml::from_str(DESIGN)?;
    let mut add = |name: &str, value: String| design.method.push((name.to_owned(), value));
    match source {
        Source::Loads(loads) => {
            let names: Vec<String> = loads.iter().map(Load::name).collect();
            if let Some(load) = loads.first() {
                add("traffic", load.traffic());
                add("loads", names.join(", "));
                add("bottleneck", load.bottleneck());
            }
            "connections of the load 200 ms".clone_into(&mut design.rto_min);
            design.references = published::estimator();
            let is_load = |one: &Record| names.iter().any(|name| name == one.level("load"));
            design.references.retain(is_load);
        }
        Source::File(file) => {
            for remark in &file.remarks {
                add("samples", remark.clone());
            }
            // Its log is separate from the log of measurements.
            design.name = "estimator-file".to_owned();
            if file.is_drawn {
                design.run_is = "drawn flow".to_owned();
            }
        }
    }
    if let Some((name, own)) = own {
        add(name, format!("{own:?}"));
    }
    if let Some(table) = design.tables.last_mut() {
        table.columns.extend(minimums_us.iter().map(|us| {
            let name = avoid(*us);
            Column::new(&name, Stat::PercentOf("judged".to_owned()), &name)
        }));
    }
    Ok(design)
}

fn avoid(us: u64) -> String {
    format!("avoid at {} ms", us / 1000)
}
