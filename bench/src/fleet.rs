//! Queries on a fleet of 1,000 hosts in one Prometheus: recording rules, alerts, the dashboard, and advice.
//!
//! The hosts are simulated: one server answers for all of them, with the page of a real agent in which it changes the
//! counts.

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    env::TestEnv,
    http, netns,
    netns::SERVER_V4,
    process::{require, stdout_of},
    prometheus::{self, Prometheus},
    wait::{eventually, eventually_seen},
};
use serde_json::Value;

use crate::{
    process::{check_signals, root},
    result::{BenchResult, Goal, elapsed_ms, table},
    sample::Sample,
    scale::memory_mb,
    suite::SampleSizes,
};

/// Port of the agent, on the loopback interface of its namespace.
const METRICS: u16 = 9464;
/// Port of the simulated hosts.
const HOSTS_PORT: u16 = 9465;
/// Port of the server whose connections the agent counts.
const PORT: u16 = 4830;
const POLICY: &str = "near";
/// Number of connections that the agent counts.
const CONNECTIONS: u32 = 50;
const SCRAPE: Duration = Duration::from_secs(30);
/// Maximum wait until each host is scraped three times and each rule is evaluated.
const WARM: Duration = Duration::from_secs(240);
/// Repetitions of each query.
const REPEATS: usize = 3;
/// Maximum time of an evaluation of the rules, milliseconds: half of the interval.
const GOAL_MS: f64 = 15_000.0;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    require(&["prometheus"])?;
    let mut env = TestEnv::of(programs.join("rto-agent"))?;
    env.configure(&format!(
        "metrics = \"127.0.0.1:{METRICS}\"\nsampling = 1\n[policy.{POLICY}]\ninitial_rto = \"200ms\"\n\
         cidrs = [\"10.88.0.0/24\"]\nguard = \"on\"\nholdout = \"50%\"\n"
    ))?;
    let namespace = env.net.client.clone();
    // `ip netns exec` would hide the BPF file system.
    let inside = format!("--net=/run/netns/{namespace}");
    env.start_under(&["nsenter".to_owned(), inside])?;
    let page = page(&env)?;
    let series = page.samples();
    let listener = netns::inside(&namespace, || {
        Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, HOSTS_PORT))?)
    })?;
    let hosts = Hosts::answer(listener, page)?;
    let prometheus = Prometheus::start(&namespace, &configuration(sizes.hosts))?;
    warm(&prometheus, sizes.hosts)?;
    let mut rows = Vec::new();
    let mut longest_rule = 0.0_f64;
    for (name, kind) in [("recording rules", "record"), ("alerts", "alert")] {
        let times = rule_times(&prometheus, kind)?;
        longest_rule += times.iter().map(|(_, ms)| ms).sum::<f64>();
        rows.push(row(name, &times)?);
    }
    let times = panel_times(&prometheus, "host-0001")?;
    rows.push(row("panels of all hosts, and of one", &times)?);
    rows.push(row(
        "`rto-agent advise --prometheus`",
        &[("all of it".to_owned(), advice(&env, programs)?)],
    )?);
    let status = prometheus.api("/api/v1/status/tsdb")?;
    let in_memory = &status["data"]["headStats"]["numSeries"];
    drop(hosts);
    let text = format!(
        "{} hosts with {series} samples each, scraped every {} s: {in_memory} series; Prometheus has {:.0} MB of memory. Queries \
         are asked while it scrapes. Rules: their last evaluation; panels, each at one moment, and advice: the \
         median of {REPEATS}.\n\n{}",
        sizes.hosts,
        SCRAPE.as_secs(),
        memory_mb(prometheus.pid(), "VmRSS")?,
        table(["", "queries", "all, ms", "longest, ms", "which"], rows)
    );
    Ok(BenchResult {
        text,
        goals: vec![Goal::at_most(
            GOAL_MS,
            " ms",
            "all rules of a fleet, evaluated every 30 s",
            longest_rule,
            0,
        )],
    })
}

/// The page of a real agent after some connections.
fn page(env: &TestEnv) -> anyhow::Result<Page> {
    let to = SocketAddr::new(SERVER_V4.parse()?, PORT);
    let _server = env.serve(to)?;
    for _ in 0..CONNECTIONS {
        let client = env.connect(to)?;
        ensure!(client.outcome()?.result == "connected");
    }
    // After two transitions the value is active again, and there is evidence.
    env.cli(&["tune", "freeze", POLICY])?;
    env.cli(&["tune", "resume", POLICY])?;
    let text = || {
        let stream = netns::inside(&env.net.client, || {
            Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, METRICS))?)
        })?;
        Ok(http::get(stream, "/metrics")?.body)
    };
    let counts = |text: &String| {
        let connections = "rto_agent_connections_total{";
        let mut lines = text.lines().filter(|line| line.starts_with(connections));
        lines.any(|line| !line.ends_with(" 0"))
    };
    let text = eventually_seen("counted connections", WARM, text, counts)?;
    Ok(Page::of(&text))
}

/// A page of metrics: its lines, and which of them are of counters and grow.
struct Page {
    lines: Vec<(String, Option<f64>)>,
}

impl Page {
    fn of(text: &str) -> Self {
        let mut is_counter = false;
        let lines = text.lines().map(|line| {
            if let Some(family) = line.strip_prefix("# TYPE ") {
                is_counter = family.ends_with(" counter") || family.ends_with(" histogram");
            }
            let count = match line.rsplit_once(' ') {
                Some((series, value)) if is_counter && !line.starts_with('#') => {
                    value.parse().ok().map(|value| (series.to_owned(), value))
                }
                _ => None,
            };
            match count {
                Some((series, value)) => (series, Some(value)),
                None => (line.to_owned(), None),
            }
        });
        Self {
            lines: lines.collect(),
        }
    }

    fn samples(&self) -> usize {
        let comments = self.lines.iter().filter(|(text, _)| text.starts_with('#'));
        self.lines.len() - comments.count()
    }

    /// The page with all counts multiplied: whole numbers stay whole, and the buckets of a histogram stay in order.
    fn times(&self, factor: f64) -> String {
        let mut text = String::with_capacity(self.lines.len() * 100);
        for (line, count) in &self.lines {
            // Writing into a String does not fail.
            let _written = match count {
                Some(count) => writeln!(text, "{line} {}", count * factor),
                None => writeln!(text, "{line}"),
            };
        }
        text
    }
}

/// A server for all hosts; it stops when dropped.
struct Hosts {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hosts {
    fn answer(listener: TcpListener, page: Page) -> anyhow::Result<Self> {
        listener.set_nonblocking(true)?;
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let begin = Instant::now();
        let serve = move || {
            while !is_over.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        // A host without an answer is not up, which the benchmark checks.
                        let _answered = answer(stream, &page, begin);
                    }
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        };
        Ok(Self {
            ends,
            thread: Some(thread::spawn(serve)),
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// The path is the host's number. The counts of each host differ, and grow.
fn answer(mut stream: TcpStream, page: &Page, begin: Instant) -> anyhow::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut reader = BufReader::new(&stream);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1).context("no path")?;
    let host: u64 = path.trim_start_matches('/').parse()?;
    let factor = 1 + host % 7 + begin.elapsed().as_secs();
    #[expect(clippy::cast_precision_loss, reason = "hundreds")]
    let text = page.times(factor as f64);
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{text}",
        text.len()
    )?;
    Ok(())
}

/// All hosts have the same address and differ in their path.
fn configuration(hosts: u32) -> String {
    let rules = ["alerts.yml", "recording.yml"].map(|name| {
        let path = root().join("config/prometheus").join(name);
        path.display().to_string()
    });
    let seconds = SCRAPE.as_secs();
    let mut text = format!(
        "global: {{scrape_interval: {seconds}s, evaluation_interval: {seconds}s}}\nrule_files: {rules:?}\n\
         scrape_configs:\n- job_name: rto-agent\n  static_configs:\n"
    );
    for host in 0..hosts {
        let _written = writeln!(
            text,
            "  - {{targets: ['127.0.0.1:{HOSTS_PORT}'], labels: {{__metrics_path__: /{host}, instance: host-{host:04}}}}}"
        );
    }
    text
}

/// Waits until each host is scraped three times, and each rule is evaluated after that.
fn warm(prometheus: &Prometheus, hosts: u32) -> anyhow::Result<()> {
    let query = "count(count_over_time(up{job=\"rto-agent\"}[10m]) >= 3)";
    let count = || {
        check_signals()?;
        thread::sleep(Duration::from_secs(1));
        Ok(prometheus
            .query(query)?
            .first()
            .map(|one| one["value"][1].clone()))
    };
    let all = Some(Value::from(hosts.to_string()));
    eventually_seen("three scrapes of each host", WARM, count, |now| *now == all)?;
    let up = prometheus.query("count(up == 1)")?;
    ensure!(
        up.first().map(|one| &one["value"][1]) == all.as_ref(),
        "{up:?}"
    );
    let evaluated = || -> anyhow::Result<Vec<Value>> {
        let all = prometheus.rules("record")?;
        Ok(all
            .iter()
            .map(|rule| rule["lastEvaluation"].clone())
            .collect())
    };
    let before = evaluated()?;
    eventually("evaluation of each rule", WARM, || {
        check_signals()?;
        let is_later = before
            .iter()
            .zip(evaluated()?)
            .all(|(then, now)| *then != now);
        Ok(is_later.then_some(()))
    })
}

/// Time of the last evaluation of each rule, milliseconds.
fn rule_times(prometheus: &Prometheus, kind: &str) -> anyhow::Result<Vec<(String, f64)>> {
    let time = |rule: &Value| {
        ensure!(rule["health"] == "ok", "{rule}");
        let name = rule["name"].as_str().context("no name")?;
        let seconds = rule["evaluationTime"].as_f64().context("no time")?;
        Ok((name.to_owned(), seconds * 1e3))
    };
    prometheus.rules(kind)?.iter().map(time).collect()
}

/// Time of each query of the dashboard, whose last row shows this host.
fn panel_times(server: &Prometheus, instance: &str) -> anyhow::Result<Vec<(String, f64)>> {
    let file = root().join("config/grafana/rto-agent.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(file)?)?;
    let panels = prometheus::panels(&dashboard)?.into_iter();
    let times = panels.map(|(title, query)| {
        check_signals()?;
        let query = prometheus::filled(&query, instance, "2m");
        Ok((title, median_ms(|| server.query(&query).map(drop))?))
    });
    times.collect()
}

/// Time of `rto-agent advise --prometheus` for all hosts.
fn advice(env: &TestEnv, programs: &Path) -> anyhow::Result<f64> {
    let server = format!("http://127.0.0.1:{}", prometheus::PORT);
    median_ms(|| {
        let mut advise = Command::new(programs.join("rto-agent"));
        advise.args(["advise", "--json", "--spurious", "50%", "--policy", POLICY]);
        advise.args(["--range", "10m", "--prometheus", &server]);
        let text = stdout_of(
            "advise",
            netns::inside(&env.net.client, || Ok(advise.output()?))?,
        )?;
        let answer: Value = serde_json::from_str(&text)?;
        ensure!(answer["source"]["hosts"].as_u64() > Some(1), "{answer}");
        Ok(())
    })
}

fn median_ms(ask: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let times = (0..REPEATS).map(|_| elapsed_ms(&ask));
    Ok(Sample::of(times.collect::<anyhow::Result<Vec<_>>>()?).median())
}

fn row(name: &str, times: &[(String, f64)]) -> anyhow::Result<[String; 5]> {
    let longest = times.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let (which, longest) = longest.with_context(|| format!("no {name}"))?;
    let all: f64 = times.iter().map(|(_, ms)| ms).sum();
    Ok([
        name.to_owned(),
        times.len().to_string(),
        format!("{all:.0}"),
        format!("{longest:.0}"),
        which.clone(),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_grow_and_nothing_else() {
        let text =
            "# TYPE a counter\n# HELP a b 1\na_total{x=\"y z\"} 2\n# TYPE g gauge\ng 3\n# EOF\n";
        let page = Page::of(text);
        assert_eq!(page.samples(), 2);
        assert_eq!(page.times(1.0), text);
        assert_eq!(page.times(3.0), text.replace("} 2", "} 6"));
    }
}
