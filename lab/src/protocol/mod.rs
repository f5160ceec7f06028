//! Workloads that need more than a socket: HTTP/2, gRPC-like streams and TLS; beside them HTTP/1.1, request/response and
//! connections as a load balancer's health checks make them, so that all of them have one client and one server.
//!
//! Both are child processes of the lab (`rto-lab workload ROLE`), as the [roles of the testbed](rto_testbed::workload).

mod http2;
mod plain;
mod tls;

use std::{
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::ValueEnum;
use rto_testbed::{
    process::run_in_real_time,
    workload::{
        self as testbed, http, rr,
        stdio::{commands, reply, until_closed},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{summary::micros, topology::PORT};

/// Requests after one that took long enough: what kept it is over.
const AFTER: u32 = 10;
/// Requests before those that are measured: the estimator knows the path, and quick ACKs are over.
const BEFORE: u32 = 30;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Kind {
    /// 1 byte out, 2 bytes back, one at a time, over one connection
    RequestResponse,
    /// GET, a response of three segments, one at a time, over one connection
    Http1,
    /// As http1, four at a time, over one connection
    Http2,
    /// One stream of HTTP/2 both ways, a message of 100 bytes every 10 ms and its echo
    Grpc,
    /// A connection for each: TLS 1.3 handshake, 1 byte out, 1 byte back
    Tls,
    /// A connection for each, as a load balancer checks a server: 1 byte out, 2 bytes back, and its end
    HealthCheck,
}

impl Kind {
    /// For tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RequestResponse => "request/response",
            Self::Http1 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
            Self::Grpc => "gRPC stream",
            Self::Tls => "TLS handshake",
            Self::HealthCheck => "health check",
        }
    }

    /// Whether each request has a connection of its own, whose handshake is part of its time.
    #[must_use]
    pub const fn connects(self) -> bool {
        matches!(self, Self::Tls | Self::HealthCheck)
    }

    /// What it is, in words.
    #[must_use]
    pub fn description(self) -> String {
        let help = self.to_possible_value();
        help.and_then(|value| Some(value.get_help()?.to_string()))
            .unwrap_or_default()
    }

    /// Port of its server.
    const fn port(self) -> u16 {
        match self {
            Self::RequestResponse | Self::HealthCheck => PORT,
            Self::Http1 => PORT + 1,
            Self::Http2 | Self::Grpc => PORT + 2,
            Self::Tls => PORT + 3,
        }
    }
}

/// What a child of the lab does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Role {
    /// Serves all workloads; its first reply is its certificate (`Vec<u8>`, DER).
    WorkloadServer {
        /// Where.
        on: IpAddr,
    },
    /// Takes [`Command`]s.
    WorkloadClient {
        /// Where to.
        to: IpAddr,
        /// The server's certificate, DER.
        certificate: Vec<u8>,
    },
}

/// What the client is told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Over a connection of its own, if it has one: requests that are not measured.
    Open(Kind),
    /// So many of them; says how long each took (`Vec<u64>`, microseconds).
    Requests(u32),
    /// Until some time after one took at least so long; says the longest (`u64`, microseconds).
    Longest {
        /// How long at least.
        at_least: Duration,
    },
}

/// A child that has this as its argument; `None` if it is a role of the testbed's.
#[must_use]
pub fn main(role: &str) -> Option<ExitCode> {
    let role: Role = serde_json::from_str(role).ok()?;
    run_in_real_time();
    Some(testbed::end(match role {
        Role::WorkloadServer { on } => serve(on),
        Role::WorkloadClient { to, certificate } => run(to, &certificate),
    }))
}

fn serve(on: IpAddr) -> anyhow::Result<()> {
    let at = |kind: Kind| SocketAddr::new(on, kind.port());
    let listen = |kind| rr::listen(at(kind)).with_context(|| at(kind).to_string());
    let (small, http1) = (listen(Kind::RequestResponse)?, listen(Kind::Http1)?);
    let (http2, secured) = (listen(Kind::Http2)?, listen(Kind::Tls)?);
    let (config, certificate) = tls::server()?;
    // Each until the process ends; what one of them fails with, the client sees.
    thread::spawn(move || rr::serve(&small, rr::Options::default()));
    thread::spawn(move || plain::serve(&http1, http::serve_connection));
    thread::spawn(move || http2::serve(http2));
    thread::spawn(move || {
        plain::serve(&secured, move |stream| {
            tls::serve_connection(stream, &config)
        })
    });
    reply(&certificate)?;
    until_closed();
    Ok(())
}

/// Times of requests, and when there are enough.
#[derive(Debug, Default)]
struct Times {
    us: Vec<u64>,
    until: Until,
}

#[derive(Clone, Copy, Debug)]
enum Until {
    Count(u32),
    Longer { at_least: Duration, after: u32 },
}

impl Default for Until {
    fn default() -> Self {
        Self::Count(0)
    }
}

impl Times {
    const fn new(until: Until) -> Self {
        let us = Vec::new();
        Self { us, until }
    }

    fn add(&mut self, took: Duration) {
        self.us.push(micros(took));
        match &mut self.until {
            Until::Count(left) => *left = left.saturating_sub(1),
            Until::Longer { at_least, after } => {
                if self.us.iter().any(|us| *us >= micros(*at_least)) {
                    *after = after.saturating_sub(1);
                }
            }
        }
    }

    const fn are_enough(&self) -> bool {
        matches!(self.until, Until::Count(0) | Until::Longer { after: 0, .. })
    }
}

/// What makes requests.
trait Client {
    /// As many as are enough.
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()>;
}

/// One at a time.
impl<F: FnMut() -> anyhow::Result<()>> Client for F {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        while !times.are_enough() {
            let begun = Instant::now();
            self()?;
            times.add(begun.elapsed());
        }
        Ok(())
    }
}

fn client(kind: Kind, to: IpAddr, certificate: &[u8]) -> anyhow::Result<Box<dyn Client>> {
    let to = SocketAddr::new(to, kind.port());
    Ok(match kind {
        Kind::RequestResponse => {
            let mut client = rr::Client::connect(to, rr::Sizes::SMALL, rr::Options::default())?;
            Box::new(move || Ok(client.transact().map(drop)?))
        }
        Kind::Http1 => {
            let mut client = http::Client::connect(to)?;
            Box::new(move || {
                client.request()?;
                client.response()
            })
        }
        Kind::Http2 => Box::new(http2::Requests::connect(to)?),
        Kind::Grpc => Box::new(http2::Stream::connect(to)?),
        Kind::Tls => {
            let config = tls::client(certificate)?;
            Box::new(move || tls::handshake(to, &config))
        }
        Kind::HealthCheck => Box::new(move || plain::check(to)),
    })
}

fn run(to: IpAddr, certificate: &[u8]) -> anyhow::Result<()> {
    reply(&())?;
    let mut current: Option<Box<dyn Client>> = None;
    commands(|command| -> anyhow::Result<Value> {
        let mut take = |until| -> anyhow::Result<Vec<u64>> {
            let mut times = Times::new(until);
            let client = current.as_mut().context("not connected")?;
            client.requests(&mut times)?;
            Ok(times.us)
        };
        match command {
            Command::Requests(count) => Ok(json!(take(Until::Count(count))?)),
            Command::Longest { at_least } => {
                let until = Until::Longer {
                    at_least,
                    after: AFTER,
                };
                Ok(json!(take(until)?.into_iter().max()))
            }
            Command::Open(kind) => {
                let opened = current.insert(client(kind, to, certificate)?);
                let before = if kind.connects() { 1 } else { BEFORE };
                opened.requests(&mut Times::new(Until::Count(before)))?;
                Ok(Value::Null)
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn roles_are_told_from_the_testbeds() {
        let own = Role::WorkloadServer {
            on: Ipv4Addr::LOCALHOST.into(),
        };
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<Role>(&text).unwrap(), own);
        assert!(serde_json::from_str::<testbed::Role>(&text).is_err());
        assert!(main(r#"{"http-server":{"on":"127.0.0.1:1"}}"#).is_none());
    }

    #[test]
    fn enough_is_a_count_or_some_after_a_long_one() {
        let mut times = Times::new(Until::Count(2));
        times.add(Duration::from_millis(1));
        assert!(!times.are_enough());
        times.add(Duration::from_millis(1));
        assert!(times.are_enough());
        let mut times = Times::new(Until::Longer {
            at_least: Duration::from_millis(50),
            after: 2,
        });
        for ms in [1, 2, 60] {
            times.add(Duration::from_millis(ms));
            assert!(!times.are_enough(), "{ms}");
        }
        times.add(Duration::from_millis(1));
        assert!(times.are_enough());
        assert_eq!(times.us.into_iter().max(), Some(60_000));
    }

    /// Each workload over the loopback, with a server of its own.
    #[test]
    fn conversations() {
        let on: IpAddr = Ipv4Addr::LOCALHOST.into();
        let any = || rr::listen(SocketAddr::new(on, 0)).unwrap();
        let enough = |client: &mut dyn Client| {
            let mut times = Times::new(Until::Count(9));
            client.requests(&mut times).unwrap();
            assert!((9..=12).contains(&times.us.len()), "{times:?}");
        };
        let listener = any();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || http2::serve(listener));
        enough(&mut http2::Requests::connect(to).unwrap());
        enough(&mut http2::Stream::connect(to).unwrap());
        let listener = any();
        let to = listener.local_addr().unwrap();
        let (config, certificate) = tls::server().unwrap();
        thread::spawn(move || {
            plain::serve(&listener, move |stream| {
                tls::serve_connection(stream, &config)
            })
        });
        let config = tls::client(&certificate).unwrap();
        enough(&mut || tls::handshake(to, &config));
        // Another certificate is not trusted.
        let (_, other) = tls::server().unwrap();
        let config = tls::client(&other).unwrap();
        assert!(tls::handshake(to, &config).is_err());
        let listener = any();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || rr::serve(&listener, rr::Options::default()));
        enough(&mut || plain::check(to));
    }
}
