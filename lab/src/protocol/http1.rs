//! HTTP/1.1 over a persistent connection, and by curl.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rto_testbed::workload::http;

use super::{Client, Times};
use crate::{program, summary::micros};

/// Attempts to connect; connecting is not measured.
const CONNECTS: u32 = 5;

/// Requests over one connection, some of them pipelined.
pub(super) struct Kept {
    to: SocketAddr,
    at_once: usize,
    client: http::Client,
}

impl Kept {
    pub(super) fn connect(to: SocketAddr, at_once: usize) -> anyhow::Result<Self> {
        let client = patiently(to)?;
        Ok(Self {
            to,
            at_once,
            client,
        })
    }
}

impl Client for Kept {
    /// After a request that timed out, it continues over another connection.
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        // Send times of the requests under way.
        let mut sent = VecDeque::new();
        loop {
            while sent.len() < self.at_once && times.next() {
                sent.push_back(Instant::now());
                self.client.request("")?;
            }
            let Some(begun) = sent.pop_front() else {
                return Ok(());
            };
            let answered = self.client.response();
            if !times.done(begun, answered)? {
                for begun in sent.drain(..) {
                    times.seen.timed_out += 1;
                    times.add(begun.elapsed());
                }
                self.client = patiently(self.to)?;
            }
            times.rest();
        }
    }
}

/// Retries after timeouts.
fn patiently(to: SocketAddr) -> anyhow::Result<http::Client> {
    for _ in 1..CONNECTS {
        match http::Client::connect(to) {
            Err(error) if http::is_timeout(&error) => {}
            connected => return connected,
        }
    }
    http::Client::connect(to)
}

/// A process of curl for each transfer.
pub(super) struct Curl {
    pub(super) to: SocketAddr,
}

impl Client for Curl {
    /// The time is curl's `time_total`, without its start.
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let line = format!(
            "{} -s -o /dev/null -w %{{time_total}} -m {} http://{}/{}",
            program::CURL.0,
            http::TIMEOUT.as_secs(),
            self.to,
            http::CLOSES
        );
        while times.next() {
            let text = program::output(&line, Path::new("/"))?;
            let seconds = text.trim().parse().with_context(|| text.clone())?;
            times.seen.us.push(micros(Duration::from_secs_f64(seconds)));
            times.rest();
        }
        Ok(())
    }
}
