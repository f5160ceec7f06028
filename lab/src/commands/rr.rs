//! `rto-lab rr`.

use std::{
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use clap::{ArgGroup, Args};
use hdrhistogram::Histogram;
use nix::errno::Errno;
use rto_agent_core::printable;
use rto_testbed::workload::rr::{
    Dropper, LONGEST_OUTAGE, Limits, Options, Sizes, Tally, listen, serve_while,
};

use super::predict::duration;
use crate::{
    interrupt,
    rr::{
        measure::{self, Interval, Limit, Outcome, Plan, Test},
        outage, print,
        records::{self, Records},
    },
    topology::PORT,
};

/// Default of --timeout, for a measurement without a duration.
const PATIENCE: Duration = Duration::from_secs(60);

/// Default of --out, with --outage.
const REPORT: &str = "rto-lab-report";
/// Longest measurement.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);
/// Shortest outage.
const SHORTEST_OUTAGE: Duration = Duration::from_millis(1);
/// Shortest interval that gets a line.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// `rto-lab rr`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("side").required(true).args(["server", "connect"])))]
pub struct Rr {
    /// Answer clients, any number of them, until Ctrl-C
    #[arg(long, conflicts_with_all = ["Extent", "Output"])]
    server: bool,
    /// Address to listen on [default: [::]:4700, which also accepts IPv4]
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "connect")]
    on: Option<SocketAddr>,
    /// Maximum number of simultaneous connections; the server closes further ones at once
    #[arg(long, value_name = "N", default_value_t = Limits::CONNECTIONS, conflicts_with = "connect")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    max_connections: u16,
    /// Drop the packets of clients that ask for it (rr --outage); needs root
    #[arg(long, conflicts_with = "connect")]
    outages: bool,
    /// Measure transactions with this server [default port: 4700]
    #[arg(long, value_name = "HOST[:PORT]")]
    connect: Option<String>,
    /// Bytes of a request
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 1,
        conflicts_with = "server"
    )]
    request: u32,
    /// Bytes of a response
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 1,
        conflicts_with = "server"
    )]
    response: u32,
    /// A new connection for each transaction: connect, request, response, close (TCP_CRR)
    #[arg(long, conflicts_with = "server")]
    new_connection: bool,
    /// Measure the longest transaction in outages of these durations, instead of latencies: both hosts drop what arrives
    /// from the other; needs root, and rr --server --outages there
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = outage)]
    #[arg(conflicts_with_all = ["server", "Extent", "new_connection", "interval"])]
    outage: Vec<Duration>,
    /// Number of outages of each duration
    #[arg(long, value_name = "N", default_value_t = 5, requires = "outage")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Name of the timers that are set now, in tables and charts
    #[arg(
        long,
        value_name = "NAME",
        default_value = "default",
        requires = "outage"
    )]
    setting: String,
    /// Drop only what arrives here; the server's timers then decide as well, because it gets the requests
    #[arg(long, requires = "outage")]
    here_only: bool,
    #[command(flatten)]
    extent: Extent,
    /// Linear timeouts of a thin stream, on this side's sockets (TCP_THIN_LINEAR_TIMEOUTS)
    #[arg(long)]
    thin: bool,
    #[command(flatten)]
    output: Output,
}

/// Extent of a client's measurement.
#[derive(Debug, Args)]
pub(super) struct Extent {
    /// Duration, at most 30days [default: 10s]
    #[arg(long, value_parser = measurement)]
    duration: Option<Duration>,
    /// Number of transactions of each connection (handshakes of each worker), instead of a duration
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Pause between a response (handshake) and the next request
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    pause: Duration,
    /// Number of simultaneous connections
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
    connections: u16,
    /// Warm-up time, during which nothing is recorded
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    warmup: Duration,
    /// Fail after this time without a response (connection) [default: 1m with --count, else none]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,
}

impl Extent {
    /// The plan of a test with this extent.
    pub(super) fn of(
        &self,
        test: Test,
        to: &str,
        sizes: Sizes,
        options: Options,
    ) -> anyhow::Result<Plan> {
        for (name, given) in [("duration", self.duration), ("timeout", self.timeout)] {
            ensure!(
                given != Some(Duration::ZERO),
                "--{name} must be longer than 0s"
            );
        }
        let time = self.duration.unwrap_or(Duration::from_secs(10));
        Ok(Plan {
            to: resolve(to)?,
            sizes,
            options,
            limit: self.count.map_or(Limit::Time(time), Limit::Count),
            pause: self.pause,
            connections: self.connections.into(),
            test,
            warmup: self.warmup,
            timeout: self.timeout.or(self.count.map(|_| PATIENCE)),
            interval: None,
        })
    }
}

/// Output of a client.
#[derive(Debug, Args)]
pub(super) struct Output {
    /// Print a line for each interval of this length, at least 10ms
    #[arg(long, value_name = "DURATION", value_parser = interval)]
    #[arg(num_args = 0..=1, default_missing_value = "1s")]
    interval: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Keep its records in this directory, for report and compare; another call adds to them
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Discard the records that an earlier call left in that directory
    #[arg(long, requires = "out")]
    fresh: bool,
}

pub(super) fn run(args: &Rr) -> anyhow::Result<()> {
    interrupt::handle()?;
    match &args.connect {
        Some(host) if !args.outage.is_empty() => outages(args, args.plan(host)?),
        Some(host) => client(args.plan(host)?, &args.output),
        None => server(args),
    }
}

impl Rr {
    fn options(&self) -> Options {
        Options {
            thin_linear: self.thin.then_some(true),
        }
    }

    fn plan(&self, host: &str) -> anyhow::Result<Plan> {
        let sizes = Sizes {
            request: self.request,
            response: self.response,
        };
        sizes.check()?;
        let test = match self.new_connection {
            true => Test::NewConnection,
            false => Test::RequestResponse,
        };
        self.extent.of(test, host, sizes, self.options())
    }
}

/// Measures outages, and prints the report of all settings in the directory.
fn outages(args: &Rr, plan: Plan) -> anyhow::Result<()> {
    let go_on = || !interrupt::interrupted();
    let plan = outage::Plan {
        to: *plan.to.first().context("no address to connect to")?,
        sizes: plan.sizes,
        options: plan.options,
        outages: args.outage.clone(),
        runs: args.runs,
        setting: args.setting.clone(),
        here_only: args.here_only,
    };
    let out = args.output.out.as_deref().unwrap_or(Path::new(REPORT));
    let report = outage::run(&plan, out, args.output.fresh, &go_on)?;
    super::publish(&report, out, args.output.json)
}

/// Measures, and prints the results.
pub(super) fn client(mut plan: Plan, output: &Output) -> anyhow::Result<()> {
    let go_on = || !interrupt::interrupted();
    plan.interval = output.interval;
    let mut records = None;
    if let Some(dir) = &output.out {
        plan.interval.get_or_insert(records::interval(plan.limit));
        records = Some(Records::open(dir, &plan, output.fresh, &go_on)?);
    }
    let mut out = io::stdout().lock();
    let mut each = |interval: &Interval, times: &Histogram<u64>| {
        if let Some(records) = &mut records {
            records.add(interval, times)?;
        }
        if output.interval.is_none() || interval.is_rest {
            return Ok(());
        }
        if output.json {
            // Stdout is a single JSON document.
            return Ok(io::stderr().write_all(print::live(interval).as_bytes())?);
        }
        out.write_all(print::live(interval).as_bytes())?;
        Ok(out.flush()?)
    };
    let outcome = measure::run(&plan, &go_on, &mut each)?;
    if output.json || outcome.transactions > 0 {
        drop(out);
        super::print(output.json, &outcome, || print::text(&outcome))?;
    }
    for remark in &outcome.remarks {
        eprintln!("{remark}");
    }
    if let (Some(records), Some(dir)) = (records, &output.out) {
        records.report().write(dir)?;
        eprintln!("records: {}", printable::path(dir));
    }
    match outcome {
        Outcome {
            reason: Some(reason),
            ..
        } => bail!("{}: {reason}", outcome.to),
        _ => Ok(()),
    }
}

#[expect(clippy::print_stdout, reason = "stdout is data: what was done")]
fn server(args: &Rr) -> anyhow::Result<()> {
    let listener = match args.on {
        Some(on) => listen(on).with_context(|| format!("listen on {on}"))?,
        None => everywhere()?,
    };
    println!("listening on {}", listener.local_addr()?);
    io::stdout().flush()?;
    let tally = Arc::new(Tally::default());
    let go_on = || !interrupt::interrupted();
    let limits = Limits {
        connections: args.max_connections.into(),
        outages: match args.outages {
            true => Some(Arc::new(Dropper::at_server(listener.local_addr()?.port())?)),
            false => None,
        },
        ..Limits::default()
    };
    let report = |peer: SocketAddr, error: &anyhow::Error| eprintln!("{peer}: {error:#}");
    serve_while(&listener, args.options(), limits, &tally, &go_on, report)?;
    println!(
        "connections {}, transactions {}",
        tally.connections.load(Ordering::Relaxed),
        tally.transactions.load(Ordering::Relaxed),
    );
    let refused = tally.refused.load(Ordering::Relaxed);
    if refused > 0 {
        println!("connections refused {refused}");
    }
    Ok(())
}

fn measurement(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|e| format!("{text}: {e}; a number and a unit, such as 10s"))?;
    if duration > LONGEST {
        return Err(format!("{text}: at most 30days"));
    }
    Ok(duration)
}

fn outage(text: &str) -> Result<Duration, String> {
    let outage = duration(text)?;
    if !(SHORTEST_OUTAGE..=LONGEST_OUTAGE).contains(&outage) {
        return Err(format!("{text}: from 1ms to 17m"));
    }
    Ok(outage)
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < SHORTEST_INTERVAL {
        return Err(format!("{text}: at least 10ms"));
    }
    Ok(interval)
}

/// Listens on both families, or only on IPv4 if there is no IPv6.
fn everywhere() -> anyhow::Result<TcpListener> {
    let on = |ip: IpAddr| SocketAddr::new(ip, PORT);
    let both = on(Ipv6Addr::UNSPECIFIED.into());
    match listen(both) {
        Err(e) if e.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) => {
            let v4 = on(Ipv4Addr::UNSPECIFIED.into());
            listen(v4).with_context(|| format!("listen on {v4}"))
        }
        done => done.with_context(|| format!("listen on {both}")),
    }
}

/// The addresses of "name", "name:port", "1.2.3.4:port", "::1", "[::1]" and "[::1]:port".
fn resolve(host: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let bracketed = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let bare = bracketed.unwrap_or(host);
    let at_default_port = || (bare, PORT).to_socket_addrs();
    let found = match bare.parse::<IpAddr>() {
        Ok(_) => at_default_port(),
        Err(_) => host.to_socket_addrs().or_else(|_| at_default_port()),
    };
    Ok(found.with_context(|| host.to_owned())?.collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn parsed(line: &str) -> Result<Rr, clap::Error> {
        let words = ["rto-lab", "rr"].into_iter().chain(line.split(' '));
        Cli::try_parse_from(words).map(|cli| match cli.verb {
            Verb::Rr(args) => args,
            _ => unreachable!(),
        })
    }

    #[test]
    fn hosts_and_ports_are_parsed() {
        let at = |ip: &str, port| vec![SocketAddr::new(ip.parse().unwrap(), port)];
        for (text, expected) in [
            ("10.0.0.1", at("10.0.0.1", 4700)),
            ("10.0.0.1:65535", at("10.0.0.1", 65535)),
            ("::1", at("::1", 4700)),
            ("2001:db8::1:2", at("2001:db8::1:2", 4700)),
            ("[::1]", at("::1", 4700)),
            ("[::1]:80", at("::1", 80)),
        ] {
            assert_eq!(resolve(text).unwrap(), expected, "{text}");
        }
        for bad in ["", ":80", "a:", "a:65536", "a:b", "[::1", "[::1]80"] {
            assert!(resolve(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rr_arguments_give_plan() {
        let plan = |line: &str| {
            let line = format!("--connect 127.0.0.1 {line}");
            parsed(line.trim()).unwrap().plan("127.0.0.1")
        };
        let default = plan("").unwrap();
        assert_eq!(default.limit, Limit::Time(Duration::from_secs(10)));
        assert_eq!(default.timeout, None);
        let args = parsed("--connect a --interval").unwrap();
        assert_eq!(args.output.interval, Some(Duration::from_secs(1)));
        let counted = plan("--count 5 --thin").unwrap();
        assert_eq!(counted.limit, Limit::Count(5));
        assert_eq!(counted.timeout, Some(PATIENCE));
        assert_eq!(counted.options.thin_linear, Some(true));
        for bad in ["--duration 0s", "--response 0", "--request 9999999"] {
            assert!(plan(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_rr_arguments_are_refused() {
        for bad in [
            "--json",
            "--server --json",
            "--server --out a",
            "--server --connect a",
            "--server --count 3",
            "--connect a --on 127.0.0.1:1",
            "--connect a --count 3 --duration 1s",
            "--connect a --count 0",
            "--connect a --connections 0",
            "--connect a --max-connections 3",
            "--server --max-connections 0",
            "--connect a --duration 31days",
            "--connect a --interval 9ms",
            "--connect a --fresh",
            "--connect a --outages",
            "--server --outage 1s",
            "--connect a --outage 0s",
            "--connect a --outage 1s --duration 1s",
            "--connect a --runs 3",
            "--connect a --here-only",
        ] {
            assert_eq!(parsed(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }
}
