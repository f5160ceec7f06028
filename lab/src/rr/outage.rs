//! Outages between two hosts: how long a transaction takes, by the length of the outage that it meets.

use std::{
    net::SocketAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_testbed::{
    machine::Machine,
    workload::rr::{Client, CloseMode, Dropper, Options, Sizes},
};

use crate::{
    engine::{self, Design, Log, Manifest, Record, seed_of},
    report::Report,
    summary::{micros, millis},
};

/// The design of the report.
const DESIGN: &str = include_str!("../../experiments/rr-outage.toml");
/// Transactions before an outage: the estimator knows the path, and quick ACKs are over.
const WARM: u32 = 40;
/// Time from the request for an outage until it begins, in which the control connection ends.
const DELAY: Duration = Duration::from_millis(200);
/// Transactions after the outage.
const AFTER: u32 = 10;
/// Longest wait for a transaction: this time plus this multiple of the outage.
const PATIENCE: (Duration, u32) = (Duration::from_secs(10), 10);

/// The plan of a measurement.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The server.
    pub to: SocketAddr,
    /// Bytes of a transaction.
    pub sizes: Sizes,
    /// Options of the sockets.
    pub options: Options,
    /// Durations of the outages.
    pub outages: Vec<Duration>,
    /// Outages of each duration.
    pub runs: u32,
    /// Name of the timers that are set now.
    pub setting: String,
    /// Drop only what arrives here.
    pub here_only: bool,
}

/// The setting, the outage in microseconds, and a number.
type Run = (String, u64, u32);

/// Measures every outage, and adds it to the log of this directory; another setting is another call. The report has all
/// of them.
pub fn run(
    plan: &Plan,
    dir: &Path,
    fresh: bool,
    go_on: &dyn Fn() -> bool,
) -> anyhow::Result<Report> {
    let mut design: Design = toml::from_str(DESIGN)?;
    let dropped = match plan.here_only {
        true => "only what arrives at the client: requests still reach the server",
        false => "what arrives at either host",
    };
    let Sizes { request, response } = plan.sizes;
    for (name, is) in [
        ("to", plan.to.to_string()),
        ("bytes", format!("{request} out, {response} back")),
        ("dropped", dropped.to_owned()),
    ] {
        design.method.push((name.to_owned(), is));
    }
    let manifest = Manifest {
        machine: Machine::here()?,
        seed: 0,
        plan: seed_of(0, &design.method),
        design,
        hosts: Vec::new(),
    };
    let dropper = Dropper::at_client(plan.to.port())?;
    let (mut log, done) = Log::open::<Run>(dir, &manifest, fresh)?;
    let count = |us| {
        let same = done
            .iter()
            .filter(|((setting, of, _), _)| *setting == plan.setting && *of == us);
        u32::try_from(same.count())
    };
    let mut next = Vec::new();
    for outage in &plan.outages {
        next.push((*outage, count(micros(*outage))?));
    }
    let mut records: Vec<Record> = done.into_iter().flat_map(|(_, records)| records).collect();
    for number in 0..plan.runs {
        for (outage, before) in &next {
            let at = || format!("outage of {}", humantime::format_duration(*outage));
            let took = one(plan, &dropper, *outage, go_on).with_context(at)?;
            let run = (plan.setting.clone(), micros(*outage), before + number);
            let lost = millis(*outage).to_string();
            let levels = [("setting", &*plan.setting), ("lost", &lost)];
            let record = Record::new(levels, run.2).with("idle", millis(took));
            log.add(&run, std::slice::from_ref(&record))?;
            records.push(record);
        }
    }
    Ok(engine::report(&manifest, &records))
}

/// The longest transaction of a new connection through an outage.
fn one(
    plan: &Plan,
    dropper: &Dropper,
    length: Duration,
    go_on: &dyn Fn() -> bool,
) -> anyhow::Result<Duration> {
    let close = CloseMode::ByClient;
    let (mut client, _) = Client::open(plan.to, plan.sizes, plan.options, close, go_on)?;
    for _ in 0..WARM {
        client.transact_while(go_on)?;
    }
    if !plan.here_only
        && let Some(why) = Client::outage(plan.to, length, DELAY, go_on)?
    {
        bail!(
            "{} drops no packets: {why}: run rto-lab rr --server --outages there, or give --here-only",
            plan.to.ip()
        );
    }
    let begins = Instant::now() + DELAY;
    let patience = PATIENCE.0 + PATIENCE.1 * length;
    thread::scope(|scope| {
        let dropping = scope.spawn(|| {
            thread::sleep(begins.saturating_duration_since(Instant::now()));
            dropper.start(plan.to.ip(), length)
        });
        let mut longest = Duration::ZERO;
        let mut after = 0;
        let is_patient = || go_on() && begins.elapsed() < patience;
        while after < AFTER {
            let took = client.transact_while(&is_patient)?;
            longest = longest.max(took);
            after += u32::from(Instant::now() > begins + length);
        }
        match dropping.join() {
            Ok(dropped) => dropped?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        Ok(longest)
    })
}
