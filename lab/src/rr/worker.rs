//! A worker thread of a measurement, with a persistent connection or consecutive new ones.

use std::{
    io,
    sync::{PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use nix::errno::Errno;
use rto_testbed::{
    tcp::TcpInfo,
    workload::rr::{Client, CloseMode, Error, TICK},
};

use super::measure::{Connection, Limit, Plan, Shared, Test};
use crate::summary::micros;

/// At the end, a response overdue by more than this counts as missing.
const SILENCE: Duration = Duration::from_secs(1);

/// A connection, and how long connect(2) took.
pub(super) type Connected = (Client, Duration);

/// The time between two responses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) length: Duration,
    pub(super) began: Instant,
    pub(super) unfinished: bool,
}

/// The measurements of a worker.
pub(super) struct Share {
    pub(super) number: usize,
    pub(super) latencies: Histogram<u64>,
    pub(super) connects: Histogram<u64>,
    pub(super) idle: Option<Gap>,
    pub(super) retransmissions: u64,
    pub(super) end: Option<Connection>,
    /// When it finished.
    pub(super) until: Instant,
    pub(super) failure: Option<String>,
    /// Missing data although nothing failed.
    pub(super) remark: Option<String>,
}

impl Share {
    pub(super) fn new(number: usize) -> anyhow::Result<Self> {
        Ok(Self {
            number,
            latencies: Histogram::new(3)?,
            connects: Histogram::new(3)?,
            idle: None,
            retransmissions: 0,
            end: None,
            until: Instant::now(),
            failure: None,
            remark: None,
        })
    }

    fn gap(&mut self, gap: Gap) {
        if self.idle.is_none_or(|idle| idle.length < gap.length) {
            self.idle = Some(gap);
        }
    }

    /// Records a connection at its end.
    fn ended(&mut self, shared: &Shared<'_>, client: &Client, connect: Duration) -> io::Result<()> {
        let info = TcpInfo::of(client.stream())?;
        self.retransmissions += u64::from(info.total_retrans);
        self.end = Some(Connection {
            local: client.stream().local_addr()?,
            peer: shared.to,
            connect_us: micros(connect),
            client: info,
            server: None,
        });
        Ok(())
    }
}

/// Works until the limit, a stop, or a failure.
pub(super) fn work(mut share: Share, connected: Option<Connected>, shared: &Shared<'_>) -> Share {
    match connected {
        Some((mut client, took)) => {
            record(&mut share.connects, took);
            let outstanding = repeat(shared, &mut share, |_, go_on| client.transact_while(go_on));
            if let Err(error) = share.ended(shared, &client, took) {
                share.failure.get_or_insert_with(|| error.to_string());
            }
            if !outstanding {
                farewell(&mut share, client, shared);
            }
        }
        None => {
            repeat(shared, &mut share, |share, go_on| {
                once(shared, share, go_on)
            });
        }
    }
    share
}

/// Asks the server for its view of the connection.
fn farewell(share: &mut Share, client: Client, shared: &Shared<'_>) {
    // A stop that arrives during this request ends the wait; a worker that was stopped before still asks.
    let stopped = shared.stop.load(Ordering::Relaxed);
    let info = client.close_with_tcp_info(&|| stopped || !shared.stop.load(Ordering::Relaxed));
    let on = share.number + 1;
    match info {
        Ok(info) => {
            if let Some(end) = &mut share.end {
                end.server = Some(info);
            }
        }
        Err(error @ Error::UnexpectedProtocol) => {
            let why = format!("connection {on}, at its end: {error}");
            share.failure.get_or_insert(why);
        }
        Err(error) => {
            let why = match error {
                Error::Stopped => "not in time".to_owned(),
                other => other.to_string(),
            };
            share.remark = Some(format!(
                "connection {on}: the server did not report its TCP's view: {why}"
            ));
        }
    }
}

/// A transaction on a new connection, from connect(2) until the connection has ended; or only the connection.
fn once(
    shared: &Shared<'_>,
    share: &mut Share,
    go_on: &dyn Fn() -> bool,
) -> Result<Duration, Error> {
    let Plan { sizes, options, .. } = *shared.plan;
    let begin = Instant::now();
    let (mut client, connect) = Client::open(shared.to, sizes, options, CloseMode::OneShot, go_on)?;
    if shared.plan.test == Test::Connect {
        share.ended(shared, &client, connect)?;
        // Otherwise each connection would leave a port in TIME_WAIT for a minute.
        client.reset()?;
        return Ok(connect);
    }
    client.transact_while(go_on)?;
    client.wait_for_end(go_on)?;
    let took = begin.elapsed();
    if begin >= shared.from {
        record(&mut share.connects, connect);
    }
    share.ended(shared, &client, connect)?;
    Ok(took)
}

/// Performs transactions in turn; returns whether the last one was still under way.
fn repeat(
    shared: &Shared<'_>,
    share: &mut Share,
    mut transact: impl FnMut(&mut Share, &dyn Fn() -> bool) -> Result<Duration, Error>,
) -> bool {
    let Shared { plan, from, .. } = shared;
    let over = || {
        shared.stop.load(Ordering::Relaxed)
            || shared.deadline.is_some_and(|end| Instant::now() >= end)
    };
    let mut outstanding = false;
    // When the next request became due.
    let mut due = Instant::now();
    let mut number = 0_u64;
    while !over() {
        let begin = Instant::now();
        let patience = || !over() && plan.timeout.is_none_or(|most| begin.elapsed() < most);
        number += 1;
        let done = transact(share, &patience);
        let now = Instant::now();
        let measured = begin >= *from;
        if measured {
            share.gap(Gap {
                length: now.saturating_duration_since(due),
                began: due,
                unfinished: done.is_err(),
            });
        }
        match done {
            Ok(took) if measured => {
                record(&mut share.latencies, took);
                if let Some(live) = shared.live.get(share.number) {
                    let mut live = live.lock().unwrap_or_else(PoisonError::into_inner);
                    record(&mut live, took);
                }
            }
            Ok(_) => {}
            Err(error) => {
                outstanding = true;
                let on = share.number + 1;
                share.failure = why(shared, share, &error, now - begin)
                    .map(|why| format!("connection {on}, transaction {number}: {why}"));
                break;
            }
        }
        if matches!(plan.limit, Limit::Count(count) if share.latencies.len() >= count) {
            break;
        }
        due = now + plan.pause;
        sleep_until(due, &over);
    }
    share.until = Instant::now();
    outstanding
}

/// The reason for a failed transaction, if it counts as a failure.
fn why(shared: &Shared<'_>, share: &Share, error: &Error, waited: Duration) -> Option<String> {
    let waited_s = waited.as_secs_f64();
    match error {
        Error::Stopped if shared.stop.load(Ordering::Relaxed) => None,
        Error::Stopped => {
            let usual = Duration::from_micros(share.latencies.max());
            let timed_out = shared.plan.timeout.is_some_and(|most| waited >= most);
            let silent = share.latencies.is_empty() || waited >= SILENCE.max(usual * 2);
            (timed_out || silent).then(|| {
                let asks = shared.plan.test != Test::Connect;
                let hint = if share.latencies.is_empty() && asks {
                    "; is the server rto-lab rr --server?"
                } else {
                    ""
                };
                format!("no response for {waited_s:.1} s{hint}")
            })
        }
        Error::Io(error) if error.raw_os_error() == Some(Errno::EADDRNOTAVAIL as i32) => Some(
            format!("{error}: no local port is free; reduce the connection rate with --pause"),
        ),
        Error::Io(error) => Some(format!("{error} (after {waited_s:.1} s)")),
        other => Some(other.to_string()),
    }
}

fn sleep_until(until: Instant, over: &dyn Fn() -> bool) {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || over() {
            return;
        }
        thread::sleep(left.min(TICK));
    }
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    // A histogram that resizes itself accepts every value.
    let _ = histogram.record(micros(time));
}
