//! A measurement: transactions over one or more persistent connections, or over a new connection each, for a duration
//! or a number of transactions.

use std::{
    net::SocketAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, bail};
use hdrhistogram::Histogram;
use rto_testbed::{
    tcp::TcpInfo,
    workload::rr::{Client, CloseMode, Error, Options, Sizes, TICK},
};
use serde::{Deserialize, Serialize};

use super::worker::{self, Connected, Share};
use crate::summary::micros;

/// The end of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this number of transactions of each connection.
    Count(u64),
}

/// The kind of transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Request and response, over one connection.
    RequestResponse,
    /// The same over a new connection: connect, request, response, close.
    NewConnection,
    /// Only a connection, closed by a reset as soon as it is established.
    Connect,
}

impl Test {
    /// netperf's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RequestResponse => "TCP_RR",
            Self::NewConnection => "TCP_CRR",
            Self::Connect => "TCP_CC",
        }
    }
}

/// The plan of a measurement.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Addresses of the server; the first one that answers is used.
    pub to: Vec<SocketAddr>,
    /// Bytes of a transaction.
    pub sizes: Sizes,
    /// Options of the sockets.
    pub options: Options,
    /// Its end.
    pub limit: Limit,
    /// Pause between a response and the next request.
    pub pause: Duration,
    /// Number of simultaneous connections.
    pub connections: usize,
    /// The kind of transaction.
    pub test: Test,
    /// Warm-up time, during which nothing is recorded.
    pub warmup: Duration,
    /// Maximum wait for a connection or a response; `None`: as long as TCP waits.
    pub timeout: Option<Duration>,
    /// Intervals to report on, if any.
    pub interval: Option<Duration>,
}

/// How a measurement ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// As it was planned.
    Done,
    /// By a signal.
    Interrupted,
    /// Because something failed.
    Failed,
}

/// Times in a few numbers, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "their names say it")]
pub struct Times {
    pub count: u64,
    pub min_us: u64,
    pub mean_us: f64,
    pub p50_us: u64,
    pub p90_us: u64,
    pub p99_us: u64,
    pub p99_9_us: u64,
    pub max_us: u64,
    pub stddev_us: f64,
}

impl Times {
    /// From a histogram; `None` if it is empty.
    pub fn of(histogram: &Histogram<u64>) -> Option<Self> {
        (!histogram.is_empty()).then(|| Self {
            count: histogram.len(),
            min_us: histogram.min(),
            mean_us: histogram.mean(),
            p50_us: histogram.value_at_quantile(0.5),
            p90_us: histogram.value_at_quantile(0.9),
            p99_us: histogram.value_at_quantile(0.99),
            p99_9_us: histogram.value_at_quantile(0.999),
            max_us: histogram.max(),
            stddev_us: histogram.stdev(),
        })
    }
}

/// The longest time between two responses on a connection, without the requested pause.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Idle {
    /// Duration.
    pub us: u64,
    /// Its start, seconds after the start of the measurement.
    pub after_s: f64,
    /// Its start (RFC 3339).
    pub began: String,
    /// Number of the connection, counted from 1.
    pub connection: usize,
    /// Whether the measurement ended before the response came.
    pub unfinished: bool,
}

/// A connection at its end; of consecutive ones, the last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Connection {
    /// Its client's end.
    pub local: SocketAddr,
    /// Its server's end.
    pub peer: SocketAddr,
    /// How long connect(2) took.
    pub connect_us: u64,
    /// As the client's kernel sees it.
    pub client: TcpInfo,
    /// As the server's kernel sees it, if it could still report it.
    pub server: Option<TcpInfo>,
}

/// Part of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Its start, seconds after the start of the measurement.
    pub from_s: f64,
    /// Its length.
    pub seconds: f64,
    /// Transactions that ended in it.
    pub transactions: u64,
    /// How long they took.
    pub latency: Option<Times>,
    /// Whether it ended early: it then contains the measurements after the last complete interval.
    #[serde(skip)]
    pub is_rest: bool,
}

/// Callback for each interval, with all its times, microseconds.
pub type Each<'a> = &'a mut dyn FnMut(&Interval, &Histogram<u64>) -> anyhow::Result<()>;

/// The outcome of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The server.
    pub to: SocketAddr,
    /// netperf's name for it: TCP_RR, TCP_CRR with new connections, TCP_CC without requests.
    pub test: &'static str,
    /// Bytes of a request.
    pub request_bytes: u32,
    /// Bytes of a response.
    pub response_bytes: u32,
    /// Pause between a response and the next request.
    pub pause_us: u64,
    /// Number of simultaneous connections.
    pub connections: usize,
    /// Its start, after the warm-up (RFC 3339).
    pub began: String,
    /// Its duration without the warm-up.
    pub elapsed_s: f64,
    /// Number of measured transactions.
    pub transactions: u64,
    /// Rate of all connections together.
    pub transactions_per_s: f64,
    /// Duration of a transaction; with new connections, from connect(2) to the end of the connection; without requests,
    /// of connect(2) only.
    pub latency: Option<Times>,
    /// How long connect(2) took.
    pub connect: Option<Times>,
    /// The longest idle time.
    pub longest_idle: Option<Idle>,
    /// Retransmissions of all connections, as the client's kernel counts them.
    pub retransmissions: u64,
    /// The connections at their end, as TCP sees them.
    pub tcp: Vec<Connection>,
    /// Missing data, with the reason.
    pub remarks: Vec<String>,
    /// How it ended.
    pub ended: Ended,
    /// The reason, if it failed.
    pub reason: Option<String>,
}

/// State that the workers share.
pub(super) struct Shared<'a> {
    pub(super) plan: &'a Plan,
    pub(super) to: SocketAddr,
    pub(super) stop: AtomicBool,
    /// Start of the recording.
    pub(super) from: Instant,
    pub(super) deadline: Option<Instant>,
    /// By worker: the times since the last interval.
    pub(super) live: Vec<Mutex<Histogram<u64>>>,
}

/// Measures. It calls `each` for each interval; if that fails, the measurement ends. It also ends when `go_on` returns
/// false.
/// Fails if the connections cannot be made, or a time of the plan is out of the clock's range. The outcome contains later
/// errors.
pub fn run(plan: &Plan, go_on: &dyn Fn() -> bool, each: Each<'_>) -> anyhow::Result<Outcome> {
    plan.sizes.check()?;
    later(Instant::now(), plan.pause)?;
    let (to, clients) = connect(plan, go_on)?;
    let (begin, began) = (Instant::now(), SystemTime::now());
    let from = later(begin, plan.warmup)?;
    let mut live = Vec::new();
    if plan.interval.is_some() {
        for _ in &clients {
            live.push(Mutex::new(Histogram::new(3)?));
        }
    }
    let shared = Shared {
        plan,
        to,
        stop: AtomicBool::new(false),
        from,
        deadline: match plan.limit {
            Limit::Time(time) => Some(later(from, time)?),
            Limit::Count(_) => None,
        },
        live,
    };
    let mut ended = Ended::Done;
    let mut failed = None;
    let shares = thread::scope(|scope| -> anyhow::Result<Vec<Share>> {
        let (sender, receiver) = mpsc::channel();
        for (number, client) in clients.into_iter().enumerate() {
            let (shared, sender) = (&shared, sender.clone());
            let share = Share::new(number)?;
            let worker = thread::Builder::new().name(format!("connection {}", number + 1));
            let spawned = worker.spawn_scoped(scope, move || {
                // The receiver is gone only if other workers failed.
                let _ = sender.send(worker::work(share, client, shared));
            });
            if spawned.is_err() {
                shared.stop.store(true, Ordering::Relaxed);
            }
            spawned.context("cannot start a thread for each connection")?;
        }
        drop(sender);
        let mut shares: Vec<Share> = Vec::new();
        let mut last = from;
        loop {
            let now = Instant::now();
            let next = plan
                .interval
                .and_then(|interval| last.checked_add(interval));
            let wait = next.map_or(TICK, |next| next.saturating_duration_since(now).min(TICK));
            match receiver.recv_timeout(wait) {
                Ok(share) => {
                    if share.failure.is_some() {
                        shared.stop.store(true, Ordering::Relaxed);
                    }
                    shares.push(share);
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if ended == Ended::Done && !go_on() {
                ended = Ended::Interrupted;
                shared.stop.store(true, Ordering::Relaxed);
            }
            let stopping = shared.stop.load(Ordering::Relaxed);
            if next.is_some_and(|next| Instant::now() >= next) && failed.is_none() && !stopping {
                let (interval, times) = drain(&shared, from, &mut last)?;
                // With a warm-up, the first start is in the future.
                if let Err(error) = each(&interval, &times) {
                    failed = Some(error);
                    shared.stop.store(true, Ordering::Relaxed);
                }
            }
        }
        if plan.interval.is_some() && failed.is_none() {
            let (mut rest, times) = drain(&shared, from, &mut last)?;
            rest.is_rest = true;
            each(&rest, &times)?;
        }
        Ok(shares)
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let mut outcome = assemble(&shared, shares, began + plan.warmup)?;
    // On a busy host the time may be over before the first transaction begins, which is not a failure of a connection.
    if outcome.transactions == 0 && ended == Ended::Done && outcome.reason.is_none() {
        outcome.reason = Some("the time ended before the first transaction".to_owned());
    }
    if outcome.reason.is_some() {
        outcome.ended = Ended::Failed;
    } else {
        outcome.ended = ended;
    }
    Ok(outcome)
}

fn later(instant: Instant, by: Duration) -> anyhow::Result<Instant> {
    let later = instant.checked_add(by);
    later.with_context(|| format!("{} s are out of the clock's range", by.as_secs()))
}

/// Takes the times that the workers have measured since the last interval.
fn drain(
    shared: &Shared<'_>,
    from: Instant,
    last: &mut Instant,
) -> anyhow::Result<(Interval, Histogram<u64>)> {
    let mut all = Histogram::<u64>::new(3)?;
    for one in &shared.live {
        let mut one = one.lock().unwrap_or_else(PoisonError::into_inner);
        all.add(&*one)?;
        one.reset();
    }
    let now = Instant::now();
    let interval = Interval {
        from_s: last.saturating_duration_since(from).as_secs_f64(),
        seconds: now.saturating_duration_since(*last).as_secs_f64(),
        transactions: all.len(),
        latency: Times::of(&all),
        is_rest: false,
    };
    *last = now;
    Ok((interval, all))
}

/// The address that answers, and a client for each worker (none if each transaction has its own).
fn connect(
    plan: &Plan,
    go_on: &dyn Fn() -> bool,
) -> anyhow::Result<(SocketAddr, Vec<Option<Connected>>)> {
    let keeps = plan.test == Test::RequestResponse;
    let close = if keeps {
        CloseMode::WithTcpInfo
    } else {
        // Only checks whether the address answers; nothing is sent.
        CloseMode::OneShot
    };
    let mut error = None;
    for to in &plan.to {
        let open = || {
            let begin = Instant::now();
            let patience = || go_on() && plan.timeout.is_none_or(|most| begin.elapsed() < most);
            Client::open(*to, plan.sizes, plan.options, close, &patience)
        };
        let first = match open() {
            Ok(first) => first,
            Err(Error::Stopped) if !go_on() => {
                bail!("interrupted before a connection was established")
            }
            Err(refused) => {
                error = Some(anyhow::Error::new(refused).context(format!("connect to {to}")));
                continue;
            }
        };
        let mut clients = vec![keeps.then_some(first)];
        while clients.len() < plan.connections {
            let next = keeps.then(open).transpose();
            let number = clients.len() + 1;
            clients.push(next.with_context(|| format!("connection {number} to {to}"))?);
        }
        return Ok((*to, clients));
    }
    Err(error.unwrap_or_else(|| anyhow::anyhow!("no address to connect to")))
}

fn assemble(shared: &Shared<'_>, shares: Vec<Share>, began: SystemTime) -> anyhow::Result<Outcome> {
    let Shared { plan, to, from, .. } = shared;
    let mut latencies = Histogram::<u64>::new(3)?;
    let mut connects = Histogram::<u64>::new(3)?;
    let mut shares = shares;
    shares.sort_by_key(|share| share.number);
    for share in &shares {
        latencies.add(&share.latencies)?;
        connects.add(&share.connects)?;
    }
    let until = shares.iter().map(|share| share.until).max();
    let elapsed = until.map_or(Duration::ZERO, |until| {
        until.saturating_duration_since(*from)
    });
    let longest = shares
        .iter()
        .filter_map(|share| Some((share.idle?, share.number)))
        .max_by_key(|(idle, _)| idle.length);
    let mut missing = shares.iter().filter_map(|share| share.remark.clone());
    let mut remarks: Vec<String> = missing.next().into_iter().collect();
    let more = missing.count();
    if more > 0 {
        remarks.push(format!("and {more} more connections likewise"));
    }
    let seconds = elapsed.as_secs_f64();
    let per_s = if seconds > 0.0 {
        latencies.len() as f64 / seconds
    } else {
        0.0
    };
    Ok(Outcome {
        to: *to,
        test: plan.test.name(),
        request_bytes: plan.sizes.request,
        response_bytes: plan.sizes.response,
        pause_us: micros(plan.pause),
        connections: plan.connections,
        began: humantime::format_rfc3339_millis(began).to_string(),
        elapsed_s: seconds,
        transactions: latencies.len(),
        transactions_per_s: per_s,
        latency: Times::of(&latencies),
        connect: Times::of(&connects),
        longest_idle: longest.map(|(idle, number)| {
            let after = idle.began.saturating_duration_since(*from);
            Idle {
                us: micros(idle.length),
                after_s: after.as_secs_f64(),
                began: humantime::format_rfc3339_millis(began + after).to_string(),
                connection: number + 1,
                unfinished: idle.unfinished,
            }
        }),
        retransmissions: shares.iter().map(|share| share.retransmissions).sum(),
        reason: shares.iter().find_map(|share| share.failure.clone()),
        tcp: shares.into_iter().filter_map(|share| share.end).collect(),
        remarks,
        ended: Ended::Done,
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use rto_testbed::workload::rr::serve;

    #[test]
    fn times_beyond_the_clock_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, Options::default()));
        let plan = Plan {
            to: vec![to],
            sizes: Sizes::SMALL,
            options: Options::default(),
            limit: Limit::Time(Duration::from_millis(200)),
            pause: Duration::from_millis(1),
            connections: 1,
            test: Test::RequestResponse,
            warmup: Duration::ZERO,
            timeout: None,
            interval: None,
        };
        let long = Duration::from_secs(u64::MAX);
        for plan in [
            Plan {
                limit: Limit::Time(long),
                ..plan.clone()
            },
            Plan {
                warmup: long,
                ..plan.clone()
            },
            Plan {
                pause: long,
                ..plan.clone()
            },
        ] {
            let error = run(&plan, &|| true, &mut |_, _| Ok(())).unwrap_err();
            assert!(
                error.to_string().contains("out of the clock's range"),
                "{error}"
            );
        }
        let plan = Plan {
            interval: Some(long),
            ..plan
        };
        run(&plan, &|| true, &mut |_, _| Ok(())).unwrap();
    }
}
