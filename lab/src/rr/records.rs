//! A measurement between two hosts as records of the engine, for `rto-lab report` and `rto-lab compare`.

use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use hdrhistogram::Histogram;
use rto_testbed::{
    facts::HostFacts,
    workload::rr::{Client, Error},
};

use super::measure::{Interval, Limit, Plan, Test};
use crate::{
    engine::{self, Design, Log, Manifest, Record, seed_of},
    report::Report,
};

/// The design of the report.
const DESIGN: &str = include_str!("../../experiments/rr.toml");
/// Maximum number of values, at even ranks, that a record keeps for the times of an interval.
const VALUES: u64 = 200;
/// Length of an interval, by default and for a short measurement.
const INTERVAL: Duration = Duration::from_secs(1);

/// Length of the intervals that are recorded.
pub fn interval(limit: Limit) -> Duration {
    match limit {
        // At most 60 intervals, as in a minute.
        Limit::Time(time) => (time / 60).max(INTERVAL),
        Limit::Count(_) => INTERVAL,
    }
}

/// The log of a measurement; measurements with the same plan between the same hosts can be added to it.
#[derive(Debug)]
pub struct Records {
    log: Log,
    manifest: Manifest,
    test: Test,
    all: Vec<Record>,
    /// Number of the next record, after the ones of earlier calls.
    next: u32,
    /// Total measured time, seconds.
    elapsed: f64,
}

impl Records {
    /// Opens the log, and asks the server for the facts of its host. The log has no facts of a server other than
    /// rto-lab's.
    /// Fails if the log is of another measurement, or cannot be written.
    pub fn open(
        dir: &Path,
        plan: &Plan,
        fresh: bool,
        go_on: &dyn Fn() -> bool,
    ) -> anyhow::Result<Self> {
        let to = plan.to.first().context("no address to connect to")?;
        let own = HostFacts::towards(to.ip())?;
        let machine = own.machine.clone();
        let mut hosts = vec![("client".to_owned(), own)];
        let server = server(plan, go_on)?;
        hosts.extend(server.map(|server| ("server".to_owned(), server)));
        let mut design = design(plan)?;
        if hosts.len() == 1 {
            let why = "not known: no rto-lab rr --server answers there".to_owned();
            design.method.push(("server".to_owned(), why));
        }
        let manifest = Manifest {
            machine,
            seed: 0,
            plan: seed_of(0, &design.method),
            design,
            hosts,
        };
        let (log, done) = Log::open::<u32>(dir, &manifest, fresh)?;
        let next = done.iter().map(|(run, _)| run + 1).max().unwrap_or(0);
        let all: Vec<Record> = done.into_iter().flat_map(|(_, records)| records).collect();
        let lengths = all.iter().filter_map(|one| one.weights.get("rate"));
        Ok(Self {
            log,
            manifest,
            test: plan.test,
            elapsed: lengths.sum(),
            all,
            next,
        })
    }

    /// Adds an interval.
    pub fn add(&mut self, interval: &Interval, times: &Histogram<u64>) -> anyhow::Result<()> {
        // An empty rest contains no information.
        if interval.is_rest && interval.transactions == 0 {
            return Ok(());
        }
        self.elapsed += interval.seconds;
        let record = record(self.test, self.next, interval.seconds, times);
        let record = record.with("elapsed", self.elapsed);
        self.log.add(&self.next, std::slice::from_ref(&record))?;
        self.all.push(record);
        self.next += 1;
        Ok(())
    }

    /// The report of all records in the log.
    pub fn report(&self) -> Report {
        engine::report(&self.manifest, &self.all)
    }
}

/// The facts of the server's host; `None` if the server is not rto-lab's.
fn server(plan: &Plan, go_on: &dyn Fn() -> bool) -> anyhow::Result<Option<HostFacts>> {
    let mut failed = None;
    for to in &plan.to {
        let begin = Instant::now();
        let is_in_time = || go_on() && plan.timeout.is_none_or(|most| begin.elapsed() < most);
        match Client::facts(*to, &is_in_time) {
            Ok(facts) => return Ok(Some(facts)),
            // Another kind of server may also answer an unknown request with a reset.
            Err(Error::Io(error)) if error.kind() != io::ErrorKind::ConnectionReset => {
                failed = Some(anyhow::Error::new(error).context(format!("connect to {to}")));
            }
            Err(_) => return Ok(None),
        }
    }
    failed.map_or(Ok(None), Err)
}

fn record(test: Test, run: u32, seconds: f64, times: &Histogram<u64>) -> Record {
    let count = times.len().min(VALUES);
    let ranks = (0..count).map(|rank| (rank as f64 + 0.5) / count as f64);
    let values = ranks.map(|share| times.value_at_quantile(share) as f64);
    // The weight is a rate, because a busy second has more transactions than a slow one, and the last interval is
    // shorter.
    let seconds = seconds.max(1e-6);
    let record = Record::new([("test", test.name())], run)
        .with_all("time", values)
        .with("rate", times.len() as f64 / seconds)
        .weighing("rate", seconds);
    match count {
        0 => record,
        _ => record
            .weighing("time", times.len() as f64 / count as f64)
            .with("longest", times.max() as f64),
    }
}

/// The design of the report.
fn design(plan: &Plan) -> anyhow::Result<Design> {
    let is_connect = plan.test == Test::Connect;
    let text = match is_connect {
        true => DESIGN.replace("transactions", "handshakes"),
        false => DESIGN.to_owned(),
    };
    let mut design: Design = toml::from_str(&text)?;
    if is_connect {
        "connect".clone_into(&mut design.name);
    }
    for spec in &mut design.effects {
        plan.test.name().clone_into(&mut spec.base);
    }
    let to: Vec<String> = plan.to.iter().map(ToString::to_string).collect();
    let mut method = vec![("to", to.join(", ")), ("test", plan.test.name().to_owned())];
    if !is_connect {
        let sizes = plan.sizes;
        method.push((
            "bytes",
            format!("{} out, {} back", sizes.request, sizes.response),
        ));
    }
    let time = |time: Duration| humantime::format_duration(time).to_string();
    if let Some(thin) = plan.options.thin_linear {
        method.push(("TCP_THIN_LINEAR_TIMEOUTS", u8::from(thin).to_string()));
    }
    method.extend([
        ("pause", time(plan.pause)),
        ("not recorded at first", time(plan.warmup)),
        (
            "interval",
            plan.interval.map_or_else(|| "none".to_owned(), time),
        ),
        ("connections at the same time", plan.connections.to_string()),
        (
            "values",
            format!(
                "at most {VALUES} of each interval, at even ranks, each weighted by the number of \
                 values it represents, and the longest"
            ),
        ),
    ]);
    let method = method.into_iter();
    design.method = method.map(|(name, is)| (name.to_owned(), is)).collect();
    Ok(design)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Stat, Weighted};

    #[test]
    fn record_has_distribution() {
        let mut times = Histogram::<u64>::new(3).unwrap();
        for us in 1..=10_000 {
            times.record(us).unwrap();
        }
        let record = record(Test::Connect, 3, 2.0, &times);
        let values = &record.values["time"];
        assert_eq!((values.len(), record.run), (200, 3));
        assert!(values.is_sorted());
        let weighted: Vec<Weighted> = values
            .iter()
            .map(|us| (*us, record.weights["time"]))
            .collect();
        assert_eq!(Stat::Count.of_values(&weighted), Some(10_000.0));
        let p50 = Stat::P50.of_values(&weighted).unwrap();
        assert!((4900.0..5100.0).contains(&p50), "{p50}");
        assert_eq!(record.values["rate"], [5000.0]);
        assert!((10_000.0..10_020.0).contains(&record.values["longest"][0]));
        // All values, if there are few.
        let mut times = Histogram::<u64>::new(3).unwrap();
        times.record(7).unwrap();
        let few = super::record(Test::Connect, 0, 1.0, &times);
        assert_eq!(few.values["time"], [7.0]);
        assert_eq!(few.weights["time"], 1.0);
        // No transaction ended in it, but its rate counts.
        let none = super::record(Test::Connect, 0, 1.0, &Histogram::new(3).unwrap());
        assert_eq!(
            (
                &none.values["rate"][..],
                none.values.contains_key("longest")
            ),
            (&[0.0][..], false)
        );
    }

    #[test]
    fn long_measurements_have_longer_intervals() {
        let time = |s| interval(Limit::Time(Duration::from_secs(s)));
        assert_eq!(time(10), Duration::from_secs(1));
        assert_eq!(time(3600), Duration::from_secs(60));
        assert_eq!(interval(Limit::Count(5)), Duration::from_secs(1));
    }
}
