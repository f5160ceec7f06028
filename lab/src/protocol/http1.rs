//! HTTP/1.1 over a persistent connection.

use std::{collections::VecDeque, net::SocketAddr, time::Instant};

use rto_testbed::workload::http;

use super::{Client, Times};

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
