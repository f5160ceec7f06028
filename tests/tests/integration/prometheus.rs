//! A real Prometheus that scrapes two agents: the queries of the panels, the rules, and advice from its data.

use rto_testbed::{
    agent::Agent,
    netns,
    prometheus::{self, Prometheus, filled},
    workload::arrivals::{Arrivals, Clients},
};

use rto_tests::path::Path as Link;

use super::dashboards;
use crate::prelude::*;

/// On the loopback interface of the namespace, which no other test uses.
const METRICS: [u16; 2] = [9464, 9465];
const POLICY: &str = "sampling = 1\nmetrics_detail = true\n[policy.near]\ninitial_rto = \"200ms\"\ncidrs = [\"10.88.0.0/24\"]\n";
/// With a control arm; long enough that it never falls back here.
const GUARDED: &str = "guard = \"on\"\nholdout = \"50%\"\n";
/// Exported if the kernel counts runs.
const RUNS: &str = "rto_agent_program_run";
/// Exported once the kernel has refused an option.
const REFUSED: &str = "rto_agent_setsockopt_failures";

/// Two agents in one namespace, each with its own cgroup.
struct Fleet {
    env: TestEnv,
    other: Agent,
}

impl Fleet {
    /// Starts them with these additional settings.
    fn start(settings: &str) -> anyhow::Result<Self> {
        let mut env = TestEnv::new()?;
        let mut other = Agent::new(find(None)?)?;
        // `ip netns exec` would hide the BPF file system.
        let inside = format!("--net=/run/netns/{}", env.net.client);
        let inside = ["nsenter".to_owned(), inside];
        for (agent, port) in [&mut *env, &mut other].into_iter().zip(METRICS) {
            agent.configure(&format!(
                "metrics = \"127.0.0.1:{port}\"\n{POLICY}{settings}"
            ))?;
            agent.start_under(&inside)?;
        }
        Ok(Self { env, other })
    }

    fn agents(&self) -> [&Agent; 2] {
        [&self.env, &self.other]
    }

    /// Starts to make connections in each cgroup, ten a second, which end when this is dropped.
    fn traffic(&self) -> anyhow::Result<Vec<Arrivals>> {
        let started = |agent: &Agent| {
            let clients = Clients::new(to(SERVER_V4, PORT), Duration::from_millis(100));
            let (netns, cgroup) = (&self.env.net.client, Some(agent.cgroup.path()));
            let mut clients = Arrivals::start(netns, cgroup, &clients)?;
            clients.begin(10_000)?;
            Ok(clients)
        };
        self.agents().into_iter().map(started).collect()
    }

    fn prometheus(&self, histograms: Histograms) -> anyhow::Result<Prometheus> {
        let rules = |name: &str| dashboards::path("config/prometheus").join(name);
        let rules = ["alerts.yml", "recording.yml"].map(rules);
        let (config, netns) = (config(&rules), &self.env.net.client);
        match histograms {
            Histograms::Classic => Prometheus::start(netns, &config),
            Histograms::Native => {
                let program = std::env::var(PROMETHEUS3)?;
                let convert = "global: {convert_classic_histograms_to_nhcb: true, ";
                let config = config.replacen("global: {", convert, 1);
                Prometheus::start_program(&program, netns, &config)
            }
        }
    }
}

/// How Prometheus stores histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Histograms {
    /// A series for each bucket.
    Classic,
    /// Native histograms with custom buckets: no series for buckets.
    Native,
}

fn config(rules: &[impl AsRef<Path>]) -> String {
    let targets = METRICS.map(|port| format!("127.0.0.1:{port}"));
    config_of(rules, "1s", &format!("[{{targets: {targets:?}}}]"))
}

/// A configuration with these rules, interval of scrapes and evaluations, and targets.
fn config_of(rules: &[impl AsRef<Path>], interval: &str, targets: &str) -> String {
    let rules = rules.iter().map(|path| path.as_ref().display().to_string());
    let rules: Vec<_> = rules.collect();
    format!(
        "global: {{scrape_interval: {interval}, evaluation_interval: {interval}}}\n\
         rule_files: {rules:?}\n\
         scrape_configs: [{{job_name: rto-agent, static_configs: {targets}}}]\n"
    )
}

/// The value of the only sample.
fn value(samples: &[Value]) -> Option<f64> {
    match samples {
        [one] => one["value"][1].as_str()?.parse().ok(),
        _ => None,
    }
}

test!(
    every_panel_and_rule_has_series,
    needs = [PROMETHEUS, PROMTOOL],
    || panels(Histograms::Classic)
);
test!(
    native_histograms_fill_every_panel_and_rule,
    needs = [NATIVE_HISTOGRAMS],
    || panels(Histograms::Native)
);
fn panels(histograms: Histograms) -> anyhow::Result<()> {
    let fleet = Fleet::start(GUARDED)?;
    for agent in fleet.agents() {
        // Two transitions, after which the value is active again, and evidence.
        agent.cli(&["tune", "freeze", "near"])?;
        agent.cli(&["tune", "resume", "near"])?;
    }
    let _server = fleet.env.echo_server(to(SERVER_V4, PORT))?;
    let prometheus = fleet.prometheus(histograms)?;
    let traffic = fleet.traffic()?;
    // Recording rules must have samples too; alerts do not fire.
    let rules = prometheus.rules("record")?;
    let recorded = rules.iter().filter_map(|rule| rule["name"].as_str());
    let mut without: Vec<String> = recorded.map(ToOwned::to_owned).collect();
    ensure!(without.len() > 20, "{without:?}");
    // A ratio needs bad attempts in both arms.
    without.retain(|name| !name.contains("holdout_bad_ratio"));
    if histograms == Histograms::Native {
        // Sums of buckets, of which there are no series; the quantiles do without.
        without.retain(|name| !name.contains("_seconds_bucket:"));
    }
    let panels = dashboards::queries()?;
    let absent = |query: &str| query.contains(RUNS) || query.contains(REFUSED);
    without.retain(|name| !absent(name));
    let panels = panels.iter().filter(|query| !absent(query));
    let host = format!("127.0.0.1:{}", METRICS[0]);
    without.extend(panels.map(|query| filled(query, &host, "10s")));
    eventually_seen(
        "series of every panel and rule",
        3 * TIMEOUT,
        || {
            let mut left = Vec::new();
            for query in std::mem::take(&mut without) {
                if prometheus.query(&query)?.is_empty() {
                    left.push(query);
                }
            }
            without.clone_from(&left);
            Ok(left)
        },
        Vec::is_empty,
    )?;
    drop(traffic);
    let buckets = prometheus.query("rto_agent_connect_time_seconds_bucket")?;
    assert_eq!(buckets.is_empty(), histograms == Histograms::Native);
    // The control: an unknown metric has no samples.
    ensure!(prometheus.query("rto_agent_no_such_metric")?.is_empty());
    ensure!(
        prometheus
            .query("ALERTS{alertstate=\"firing\"}")?
            .is_empty()
    );
    // On a busy host a scrape may take longer than its timeout of a second.
    let up = || prometheus.query("up{job=\"rto-agent\"} == 1");
    eventually_seen("agents that are up", TIMEOUT, up, |up| {
        up.len() == METRICS.len()
    })?;
    // The sums cover both agents.
    let counted = || {
        let sum = "sum(rto_agent_connections_total{direction=\"active\"})";
        Ok(value(&prometheus.query(sum)?).unwrap_or_default())
    };
    let mut expected = 0.0;
    for agent in fleet.agents() {
        let stats = agent.json(&["stats"])?;
        let near = &stats["policies"]["near"]["active"]["connections"];
        expected += near.as_f64().with_context(|| stats.to_string())?;
    }
    ensure!(expected > 1.0, "{expected}");
    eventually_seen("every connection", TIMEOUT, counted, |sum| *sum == expected)?;
    Ok(())
}

test!(
    advice_is_that_of_the_agents_statistics,
    needs = [PROMETHEUS],
    || advice(Histograms::Classic)
);
test!(
    advice_from_native_histograms_is_the_same,
    needs = [NATIVE_HISTOGRAMS],
    || advice(Histograms::Native)
);
/// Every host's handshakes are in the evidence; advice from metrics is never shorter than advice from the statistics.
fn advice(histograms: Histograms) -> anyhow::Result<()> {
    /// Fewer than 300 are no evidence.
    const CONNECTIONS: u32 = 600;
    let fleet = Fleet::start("")?;
    let address = to(SERVER_V4, PORT);
    let _server = Traffic::echo_server(&fleet.env.net.server, None, address, false)?;
    let prometheus = fleet.prometheus(histograms)?;
    let scraped = |each: u32| {
        let count = match histograms {
            Histograms::Classic => "rto_agent_path_rtt_seconds_count{direction=\"active\"}",
            Histograms::Native => {
                "histogram_count(rto_agent_path_rtt_seconds{direction=\"active\"})"
            }
        };
        let query = format!("count({count} >= {each})");
        eventually_seen(
            "scrape of both",
            TIMEOUT,
            || Ok(value(&prometheus.query(&query)?)),
            |hosts| *hosts == Some(2.0),
        )
    };
    // The first sample of a counter is not an increase.
    scraped(0)?;
    for agent in fleet.agents() {
        let clients = Clients::new(address, Duration::from_millis(1));
        let (netns, cgroup) = (&fleet.env.net.client, Some(agent.cgroup.path()));
        let mut clients = Arrivals::start(netns, cgroup, &clients)?;
        clients.begin(CONNECTIONS)?;
        clients.done()?;
        let stats = agent.json(&["stats"])?;
        let handshakes = &stats["policies"]["near"]["active"]["path_rtt"]["count"];
        assert_eq!(*handshakes, CONNECTIONS, "{stats}");
    }
    scraped(CONNECTIONS)?;
    let server = format!("http://127.0.0.1:{}", prometheus::PORT);
    let netns = fleet.env.net.client.as_str();
    let ask = |arguments: &[&str]| -> anyhow::Result<Value> {
        let mut advise = Command::new(find(None)?);
        advise.args(["advise", "--spurious", "50%", "--json"]);
        advise.args(arguments);
        let output = netns::inside(netns, || Ok(advise.output()?))?;
        let text = stdout_of("advise", output)?;
        Ok(serde_json::from_str(&text)?)
    };
    let of_metrics = ask(&[
        "--prometheus",
        &server,
        "--range",
        "10m",
        "--policy",
        "near",
    ])?;
    assert_eq!(of_metrics["source"]["hosts"], METRICS.len());
    let samples = |answer: &Value| {
        let evidence = answer["evidence"].as_array().into_iter().flatten();
        let mut of = evidence.filter(|e| e["what"] == "connect_time" && e["direction"] == "active");
        of.next().and_then(|one| one["samples"].as_u64())
    };
    let found = samples(&of_metrics).with_context(|| format!("{of_metrics:#}"))?;
    // increase() omits what was before the first sample, and extrapolates to the ends of the range.
    let counted = u64::from(CONNECTIONS) * 2;
    ensure!(
        found >= counted / 2 && found <= 2 * counted,
        "{found} of {counted}"
    );
    let suggested = &of_metrics["initial_rto"]["suggestion"]["value_us"];
    ensure!(suggested.is_u64(), "{of_metrics:#}");
    // Other labels select nothing.
    let mut other = Command::new(find(None)?);
    other.args(["advise", "--prometheus", &server]);
    other.args(["--match", "job=\"other\""]);
    let error = refusal(&netns::inside(netns, || Ok(other.output()?))?)?;
    ensure!(error.contains("no metrics of rto-agent"), "{error}");
    Ok(())
}

test!(
    bad_push_is_noticed_in_documented_times,
    needs = [PROMETHEUS],
    bad_push
);
/// A timer of 40 ms on a path of 50 ms, after a good one of 300 ms: the journal, `status` and the alert report it within
/// the times of docs/operate/rollout.md, and a correction ends it. The one host is scraped as three.
fn bad_push() -> anyhow::Result<()> {
    const RTT: Duration = Duration::from_millis(50);
    const PER_S: u32 = 20;
    const INTERVAL: Duration = Duration::from_secs(15);
    /// Within which the journal and `status` report it, and `status` its end.
    const ON_THE_HOST: Duration = Duration::from_secs(10);
    /// The next scrape, the next evaluation, and the time until Prometheus answers on a busy machine.
    const ALERT: Duration = Duration::from_secs(10 + 2 * 15 + 10);
    let policy = |initial_rto: &str| {
        format!(
            "metrics = \"127.0.0.1:{}\"\n[policy.near]\ninitial_rto = \"{initial_rto}\"\ncidrs = [\"10.89.0.0/24\"]\n",
            METRICS[0]
        )
    };
    let mut env = configured(&policy("300ms"))?;
    let inside = format!("--net=/run/netns/{}", env.net.client);
    env.start_under(&["nsenter".to_owned(), inside])?;
    let path = Link::new(env, RTT)?;
    let env = &path.env;
    let targets = ["a", "b", "c"].map(|host| {
        format!(
            "{{targets: [\"127.0.0.1:{}\"], labels: {{instance: {host}}}}}",
            METRICS[0]
        )
    });
    let rules = [dashboards::path("config/prometheus").join("alerts.yml")];
    let config = config_of(&rules, "15s", &format!("[{}]", targets.join(", ")));
    ensure!(config.contains(&format!("{}s", INTERVAL.as_secs())));
    let prometheus = Prometheus::start(&env.net.client, &config)?;
    let alert = "ALERTS{alertname=\"RtoAgentPolicyTooShort\",alertstate=\"firing\"}";
    let readyz = || -> anyhow::Result<u16> {
        let address = format!("127.0.0.1:{}", METRICS[0]);
        let stream = netns::inside(&env.net.client, || {
            Ok(std::net::TcpStream::connect(&address)?)
        })?;
        Ok(http::get(stream, "/readyz")?.status)
    };
    let mut clients = path.clients(PER_S, 2, TIMEOUT)?;
    clients.begin(5 * PER_S)?;
    path.begun(4 * PER_S as usize)?;
    ensure!(env.try_cli(&["status"])?.status.success());
    clients.begin(60 * PER_S)?;
    env.configure(&policy("40ms"))?;
    let pushed = Instant::now();
    let noticed = |what: &str, limit: Duration, is: &dyn Fn() -> anyhow::Result<bool>| {
        eventually(what, limit, || Ok(is()?.then(|| pushed.elapsed())))
    };
    let journal = noticed("the journal", TIMEOUT, &|| {
        Ok(env.log().contains("fallback (spurious)"))
    })?;
    let status = noticed("status", TIMEOUT, &|| {
        Ok(env.try_cli(&["status"])?.status.code() == Some(1))
    })?;
    assert_eq!(readyz()?, 200);
    let fires = noticed("the alert", 2 * ALERT, &|| {
        Ok(!prometheus.query(alert)?.is_empty())
    })?;
    let severity = prometheus.query(alert)?[0]["metric"]["severity"].clone();
    assert_eq!(severity, "critical");
    assert_eq!(readyz()?, 200);
    env.configure(&policy("300ms"))?;
    let corrected = Instant::now();
    let good = eventually("the correction", TIMEOUT, || {
        let good = env.try_cli(&["status"])?.status.success();
        Ok(good.then(|| corrected.elapsed()))
    })?;
    eprintln!(
        "journal after {journal:.1?}, status {status:.1?}, alert {fires:.1?}; good {good:.1?} after the correction"
    );
    ensure!(journal <= ON_THE_HOST && status <= ON_THE_HOST && good <= ON_THE_HOST);
    ensure!(fires <= ALERT, "{fires:?}");
    Ok(())
}
