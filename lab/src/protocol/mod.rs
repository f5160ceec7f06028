//! Both ends of a [`Workload`], except of flows: HTTP/1.1, HTTP/2, gRPC-like streams, TLS, request/response, and
//! connections like a load balancer's health checks.
//!
//! Both are child processes of the lab (`rto-lab workload ROLE`), like the [roles of the
//! testbed](rto_testbed::workload).

mod http1;
mod http2;
mod page;
mod rr;
mod tls;

pub(crate) use http2::INTERVAL;
pub use page::Object;

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_testbed::{
    process::run_in_real_time,
    tcp::TcpInfo,
    workload::{
        self as testbed, http,
        rr::{Options, listen},
        stdio::{commands, reply},
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    program::Load,
    summary::micros,
    topology::PORT,
    workload::{Work, Workload},
};

impl Workload {
    /// Port of its server.
    const fn port(self) -> u16 {
        match self {
            Self::RequestResponse | Self::Flows | Self::FlowsInTurn | Self::Program(_) => PORT,
            Self::HttpNew
            | Self::HttpClosed
            | Self::Curl
            | Self::HttpKept
            | Self::HttpPipelined
            | Self::Page(_) => PORT + 1,
            Self::Http2 | Self::Grpc => PORT + 2,
            Self::Tls => PORT + 3,
            Self::HealthCheck => PORT + 4,
        }
    }
}

/// The role of a child process of the lab.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Role {
    /// Serves all workloads. Its first reply is its certificate (`Vec<u8>`, DER). For the port of a request/response
    /// client it replies how TCP saw that client's requests (`Vec<TcpInfo>`).
    WorkloadServer {
        /// Address to listen on.
        on: IpAddr,
        /// Options of request/response sockets.
        options: Options,
    },
    /// Connects and makes requests that are not measured; reports when they are done. Then it takes an [`Until`], for
    /// which it replies a [`Seen`].
    WorkloadClient(To),
}

/// A client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct To {
    /// The workload.
    pub workload: Workload,
    /// Address of the server.
    pub to: IpAddr,
    /// The server's certificate, DER.
    pub certificate: Vec<u8>,
    /// The number of requests that are not measured, and the pause after each request.
    pub work: Work,
    /// Options of request/response sockets.
    pub options: Options,
}

/// When a client stops making requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// After this number of requests.
    Count(u32),
    /// After a request took at least this long, and some more.
    Longer {
        /// Minimum duration of the long request.
        at_least: Duration,
        /// Number of requests after it.
        after: u32,
    },
}

/// The measurements of a client.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Durations of the requests, microseconds.
    pub us: Vec<u64>,
    /// Number of requests that timed out.
    pub timed_out: u32,
    /// Objects of web pages; `us` has the pages then.
    pub objects: Vec<Object>,
    /// How TCP saw the connection at each response, and its port; only of request/response.
    pub tcp: Option<(u16, Vec<TcpInfo>)>,
}

/// Runs a child process with this argument; `None` if it is a role of the testbed.
pub fn main(role: &str) -> Option<ExitCode> {
    let role: Role = serde_json::from_str(role).ok()?;
    run_in_real_time();
    Some(testbed::child(|| match role {
        Role::WorkloadServer { on, options } => serve(on, options),
        Role::WorkloadClient(to) => run(&to),
    }))
}

fn serve(on: IpAddr, options: Options) -> anyhow::Result<()> {
    let on = |workload: Workload| {
        let on = SocketAddr::new(on, workload.port());
        listen(on).with_context(|| on.to_string())
    };
    let (small, checks) = (on(Workload::RequestResponse)?, on(Workload::HealthCheck)?);
    let (http1, http2) = (on(Workload::HttpNew)?, on(Workload::Http2)?);
    let (secured, (config, certificate)) = (on(Workload::Tls)?, tls::server()?);
    let infos = rr::Infos::default();
    let all = infos.clone();
    // Each runs until the process ends; the client notices if one of them fails.
    thread::spawn(move || each(&small, move |stream| all.watch(stream, options)));
    thread::spawn(move || each(&checks, move |stream| rr::serve(stream, options)));
    thread::spawn(move || each(&http1, page::serve_connection));
    thread::spawn(move || http2::serve(http2));
    thread::spawn(move || {
        each(&secured, move |stream| {
            tls::serve_connection(stream, &config)
        })
    });
    reply(&certificate)?;
    commands(|port: u16| infos.take(port))
}

/// Serves each connection on its own thread; returns when the listener fails.
fn each<E>(
    listener: &TcpListener,
    connection: impl Fn(TcpStream) -> Result<(), E> + Clone + Send + 'static,
) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        let connection = connection.clone();
        // A client that disconnects is not an error of the server.
        let _ = thread::Builder::new().spawn(move || connection(stream).is_ok());
    }
}

/// Durations of requests, and how many more to make.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) seen: Seen,
    pub(crate) until: Until,
    pause: Duration,
}

impl Times {
    fn new(until: Until, pause: Duration) -> Self {
        let seen = Seen::default();
        Self { seen, until, pause }
    }

    /// Whether to make another request, which starts now.
    const fn next(&mut self) -> bool {
        match &mut self.until {
            Until::Count(0) | Until::Longer { after: 0, .. } => false,
            Until::Count(left) => {
                *left -= 1;
                true
            }
            Until::Longer { .. } => true,
        }
    }

    fn add(&mut self, took: Duration) {
        self.seen.us.push(micros(took));
        if let Until::Longer { at_least, after } = &mut self.until
            && micros(took) >= micros(*at_least)
        {
            // From this point each request counts, including the ones under way.
            *at_least = Duration::ZERO;
            *after = after.saturating_sub(1);
        }
    }

    /// Records the end of a request that began at `begun`; returns whether it was answered. An error if it failed other
    /// than by a loss.
    fn done(&mut self, begun: Instant, done: anyhow::Result<()>) -> anyhow::Result<bool> {
        let is_answered = match done {
            Ok(()) => true,
            Err(error) if http::is_timeout(&error) => false,
            Err(error) => return Err(error),
        };
        self.add(begun.elapsed());
        self.seen.timed_out += u32::from(!is_answered);
        Ok(is_answered)
    }

    fn rest(&self) {
        if !self.pause.is_zero() {
            thread::sleep(self.pause);
        }
    }
}

/// A client that makes requests.
pub(crate) trait Client {
    /// Makes requests until there are no more.
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()>;
}

/// One request at a time.
impl<F: FnMut() -> anyhow::Result<()>> Client for F {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        while times.next() {
            let begun = Instant::now();
            let done = self();
            times.done(begun, done)?;
            times.rest();
        }
        Ok(())
    }
}

fn client(of: &To) -> anyhow::Result<Box<dyn Client>> {
    let to = SocketAddr::new(of.to, of.workload.port());
    let options = of.options;
    Ok(match of.workload {
        Workload::RequestResponse => Box::new(rr::Transactions::connect(to, of.work, options)?),
        Workload::HealthCheck => Box::new(move || rr::check(to, options)),
        Workload::HttpNew => Box::new(move || http::Client::connect(to)?.transact()),
        Workload::HttpClosed => Box::new(move || http::Client::connect(to)?.get(http::CLOSES)),
        Workload::Curl => Box::new(http1::Curl { to }),
        Workload::HttpKept => Box::new(http1::Kept::connect(to, 1)?),
        Workload::HttpPipelined => Box::new(http1::Kept::connect(to, 2)?),
        Workload::Http2 => Box::new(http2::Requests::connect(to)?),
        Workload::Grpc => Box::new(http2::Stream::connect(to)?),
        Workload::Tls => {
            let config = tls::client(&of.certificate)?;
            Box::new(move || tls::handshake(to, &config))
        }
        Workload::Page(page) => Box::new(page::Pages::new(to, page)),
        Workload::Program(program) => Box::new(Load { program, to }),
        Workload::Flows | Workload::FlowsInTurn => bail!("flows are implemented by the testbed"),
    })
}

fn run(of: &To) -> anyhow::Result<()> {
    let mut client = client(of)?;
    let mut seen = |until| -> anyhow::Result<Seen> {
        let mut times = Times::new(until, of.work.pause);
        client.requests(&mut times)?;
        Ok(times.seen)
    };
    seen(Until::Count(of.work.skip))?;
    reply(&())?;
    commands(seen)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::experiment::definition::Settings;

    #[test]
    fn roles_differ_from_the_testbeds() {
        let own = Role::WorkloadServer {
            on: Ipv4Addr::LOCALHOST.into(),
            options: Options::default(),
        };
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<Role>(&text).unwrap(), own);
        assert!(serde_json::from_str::<testbed::Role>(&text).is_err());
        assert!(main(r#"{"flow-server":{"on":"127.0.0.1:1"}}"#).is_none());
    }

    #[test]
    fn client_stops_after_count_or_long_request() {
        let pause = Duration::ZERO;
        let mut times = Times::new(Until::Count(2), pause);
        assert_eq!(
            [times.next(), times.next(), times.next()],
            [true, true, false]
        );
        let until = Until::Longer {
            at_least: Duration::from_millis(50),
            after: 2,
        };
        let mut times = Times::new(until, pause);
        for ms in [1, 2, 60] {
            times.add(Duration::from_millis(ms));
            assert!(times.next(), "{ms}");
        }
        times.add(Duration::from_millis(1));
        assert!(!times.next());
        assert_eq!(times.seen.us.into_iter().max(), Some(60_000));
    }

    /// Each workload over the loopback interface, with its own server.
    #[test]
    fn protocols_exchange_requests() {
        let on: IpAddr = Ipv4Addr::LOCALHOST.into();
        let any = || listen(SocketAddr::new(on, 0)).unwrap();
        let nine = |client: &mut dyn Client| {
            let mut times = Times::new(Until::Count(9), Duration::from_micros(1));
            client.requests(&mut times).unwrap();
            assert_eq!(
                (times.seen.us.len(), times.seen.timed_out),
                (9, 0),
                "{times:?}"
            );
            times.seen
        };
        let listener = any();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || http2::serve(listener));
        nine(&mut http2::Requests::connect(to).unwrap());
        nine(&mut http2::Stream::connect(to).unwrap());
        let listener = any();
        let to = listener.local_addr().unwrap();
        let (config, certificate) = tls::server().unwrap();
        thread::spawn(move || {
            each(&listener, move |stream| {
                tls::serve_connection(stream, &config)
            })
        });
        let config = tls::client(&certificate).unwrap();
        nine(&mut || tls::handshake(to, &config));
        // Another certificate is not trusted.
        let (_, other) = tls::server().unwrap();
        let config = tls::client(&other).unwrap();
        assert!(tls::handshake(to, &config).is_err());
        let listener = any();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || each(&listener, page::serve_connection));
        nine(&mut || http::Client::connect(to)?.transact());
        nine(&mut || http::Client::connect(to)?.get(http::CLOSES));
        for at_once in [1, 2] {
            nine(&mut http1::Kept::connect(to, at_once).unwrap());
        }
        let listener = any();
        let (to, options) = (listener.local_addr().unwrap(), Options::default());
        let (infos, all) = (rr::Infos::default(), rr::Infos::default());
        let watching = infos.clone();
        thread::spawn(move || each(&listener, move |stream| watching.watch(stream, options)));
        nine(&mut || rr::check(to, options));
        let work = |connections| Work {
            request: 1449,
            connections,
            ..Settings::default().work()
        };
        let seen = nine(&mut rr::Transactions::connect(to, work(1), options).unwrap());
        let (port, at_client) = seen.tcp.unwrap();
        assert_eq!((at_client.len(), infos.take(port).unwrap().len()), (9, 9));
        let mut three = rr::Transactions::connect(to, work(3), options).unwrap();
        let mut times = Times::new(Until::Count(9), Duration::from_micros(1));
        three.requests(&mut times).unwrap();
        assert_eq!(
            (times.seen.us.len(), times.seen.tcp.unwrap().1.len()),
            (27, 9)
        );
        assert!(all.take(port).is_err());
    }
}
