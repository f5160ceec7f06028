//! The metrics endpoint: Prometheus text, health, readiness.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    process::Stdio,
    sync::PoisonError,
};

use rto_testbed::http::Answer;

use super::containers::HIERARCHY_ROOT;
use crate::prelude::*;

/// An address that was free a moment ago; agents of other tests get other ports.
pub(super) fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// An environment whose agent serves metrics at its own port.
pub(super) fn env(policies: &str) -> anyhow::Result<(TestEnv, u16)> {
    let port = free_address()?.port();
    let env = TestEnv::with(&format!(
        "metrics = \"127.0.0.1:{port}\"\nsampling = 1\nmetrics_detail = true\n{policies}"
    ))?;
    Ok((env, port))
}

fn scrape(port: u16, path: &str) -> anyhow::Result<Answer> {
    http::get(TcpStream::connect(("127.0.0.1", port))?, path)
}

/// Samples by name. Each line is checked (text format 0.0.4): families are declared once and before their samples, the
/// suffix matches the type, labels are quoted, values are numbers, and no sample occurs twice.
fn parse(text: &str) -> anyhow::Result<BTreeMap<String, f64>> {
    let mut types: BTreeMap<String, String> = BTreeMap::new();
    let mut helps = BTreeSet::new();
    let mut samples = BTreeMap::new();
    for line in text.lines() {
        let problem = || format!("{line:?}");
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').with_context(problem)?;
            let kinds = ["counter", "gauge", "histogram"];
            ensure!(kinds.contains(&kind), problem());
            ensure!(name.ends_with("_total") == (kind == "counter"), problem());
            ensure!(
                types.insert(name.to_owned(), kind.to_owned()).is_none(),
                problem()
            );
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').with_context(problem)?;
            ensure!(helps.insert(name.to_owned()) && !help.is_empty(), problem());
        } else {
            let (key, value) = line.rsplit_once(' ').with_context(problem)?;
            let name = key.split('{').next().unwrap_or_default();
            if let Some(labels) = key.strip_prefix(name).filter(|l| !l.is_empty()) {
                let inner = labels.strip_prefix('{').and_then(|l| l.strip_suffix('}'));
                for label in inner.with_context(problem)?.split(',') {
                    let (label, value) = label.split_once("=\"").with_context(problem)?;
                    ensure!(value.ends_with('"') && !value.contains(".88."), problem());
                    ensure!(label.bytes().all(|b| b.is_ascii_lowercase()), problem());
                }
            }
            let suffixes = |kind: &str| match kind {
                "histogram" => &["_bucket", "_sum", "_count"][..],
                _ => &[""],
            };
            let family = types.iter().find(|(family, kind)| {
                let mut suffixes = suffixes(kind).iter();
                suffixes.any(|suffix| name.strip_suffix(suffix) == Some(family.as_str()))
            });
            let (family, _) = family.with_context(problem)?;
            ensure!(
                helps.contains(family)
                    && ["rto_agent_", "process_"]
                        .iter()
                        .any(|p| name.starts_with(p)),
                problem()
            );
            let value: f64 = value.parse().with_context(problem)?;
            ensure!(samples.insert(key.to_owned(), value).is_none(), problem());
        }
    }
    check_histograms(&samples)?;
    Ok(samples)
}

/// Asserts that a histogram's buckets are cumulative, and that the last one, without a bound, has the total.
fn check_histograms(samples: &BTreeMap<String, f64>) -> anyhow::Result<()> {
    for (key, count) in samples.iter().filter(|(key, _)| key.contains("_count{")) {
        let series = key.replace("_count{", "_bucket{");
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (bucket, value) in samples {
            let Some((before, rest)) = bucket.split_once("le=\"") else {
                continue;
            };
            let (end, after) = rest.split_once('"').with_context(|| bucket.clone())?;
            // `le` may be the first of the labels, or the last.
            let rest = after.trim_start_matches(',');
            let before = match rest {
                "}" => before.trim_end_matches(','),
                _ => before,
            };
            if format!("{before}{rest}") == series {
                buckets.push((end.parse()?, *value));
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all = buckets.last().with_context(|| key.clone())?;
        ensure!(all.0.is_infinite() && all.1 == *count, "{key}: {buckets:?}");
        let grows = |pair: &[(f64, f64)]| pair[0].1 <= pair[1].1;
        ensure!(buckets.windows(2).all(grows), "{key}: {buckets:?}");
        ensure!(buckets.len() > 20, "{key}: {buckets:?}");
    }
    Ok(())
}

/// The names of all samples.
pub(super) fn names(port: u16) -> anyhow::Result<BTreeSet<String>> {
    let samples = parse(&scrape(port, "/metrics")?.body)?;
    let name = |key: String| key.split('{').next().unwrap_or_default().to_owned();
    Ok(samples.into_keys().map(name).collect())
}

test!(every_line_is_in_text_format, well_formed);
fn well_formed() -> anyhow::Result<()> {
    let no_other = HIERARCHY_ROOT.lock();
    let _no_other = no_other.unwrap_or_else(PoisonError::into_inner);
    let (env, port) = env(&near("\"10.88.0.0/24\""))?;
    let answer = scrape(port, "/metrics")?;
    assert_eq!(answer.status, 200);
    assert!(
        answer
            .head
            .contains("content-type: text/plain; version=0.0.4"),
        "{}",
        answer.head
    );
    let samples = parse(&answer.body)?;
    assert_eq!(samples["rto_agent_attached"], 1.0);
    let status = env.status()?;
    let built = |key: &str| status[key].as_str().unwrap_or_default().to_owned();
    let [version, commit, target] = ["version", "commit", "target"].map(built);
    let build = format!(
        "rto_agent_build_info{{version=\"{version}\",commit=\"{commit}\",target=\"{target}\"}}"
    );
    assert_eq!(samples.get(&build), Some(&1.0), "{build}");
    assert_eq!(
        env.cli(&["--version"])?,
        format!("rto-agent {version} (commit {commit}, {target})\n")
    );
    assert_eq!(samples["rto_agent_in_sync"], 1.0);
    assert_eq!(samples["rto_agent_last_reload_successful"], 1.0);
    assert_eq!(
        samples["rto_agent_entries{source=\"file\",family=\"ipv4\"}"],
        1.0
    );
    assert_eq!(samples["rto_agent_foreign_programs"], 0.0);
    assert_eq!(samples["rto_agent_entries_limit"], f64::from(4 << 20));
    assert_eq!(samples["rto_agent_policies_limit"], 1024.0);
    // The control: the parser rejects invalid text.
    for wrong in [
        answer
            .body
            .replace("rto_agent_connections_total{", "rto_agent_connections{"),
        answer
            .body
            .replacen("# TYPE rto_agent_attached gauge\n", "", 1),
        answer
            .body
            .replace("rto_agent_attached 1", "rto_agent_attached one"),
        answer.body.replace("le=\"+Inf\"", "le=\"1e9\""),
    ] {
        assert!(wrong == answer.body || parse(&wrong).is_err());
        assert_ne!(wrong, answer.body);
    }
    // A rejected configuration is exported as well.
    env.configure(&format!("metrics = \"127.0.0.1:{port}\"\n[policy.x]\n"))?;
    env.wait_status("the refusal", |status| status["last_reload"]["ok"] == false)?;
    let samples = parse(&scrape(port, "/metrics")?.body)?;
    assert_eq!(samples["rto_agent_last_reload_successful"], 0.0);
    let landing = scrape(port, "/")?;
    assert!(landing.status == 200 && landing.body.contains("href=\"/metrics\""));
    assert_eq!(scrape(port, "/healthz")?.status, 200);
    assert_eq!(scrape(port, "/other")?.status, 404);
    Ok(())
}

test!(counts_are_those_of_status);
fn counts_are_those_of_status() -> anyhow::Result<()> {
    let (env, port) = env(&near("\"10.88.0.0/24\""))?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    env.connect_and_close(to(SERVER_V4, PORT))?;
    let samples = parse(&scrape(port, "/metrics")?.body)?;
    for (series, labels, value) in [
        ("connections_total", "", 1.0),
        ("attempts_total", "", 1.0),
        ("handshake_retransmissions_total", "", 0.0),
        ("retransmission_timeouts_total", ",step=\"0\"", 0.0),
        ("path_rtt_seconds_count", "", 1.0),
        ("handshake_time_saved_seconds_total", "", 0.0),
    ] {
        let name = format!("rto_agent_{series}{{policy=\"near\",direction=\"active\"{labels}}}");
        assert_eq!(samples.get(&name), Some(&value), "{name}: {samples:#?}");
    }
    Ok(())
}

test!(promtool_finds_no_problem, needs = [PROMTOOL]);
fn promtool_finds_no_problem() -> anyhow::Result<()> {
    let (env, port) = env(&near("\"10.88.0.0/24\""))?;
    env.wait_status("the probe", |status| status["probe"].is_object())?;
    let text = scrape(port, "/metrics")?;
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = promtool.stdin.take().context("no input")?;
    input.write_all(text.body.as_bytes())?;
    drop(input);
    let output = promtool.wait_with_output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && error.is_empty(),
        "{output:?}\n{error}"
    );
    Ok(())
}

test!(readiness_asks_the_kernel);
/// An entry that another program deletes from the map is noticed, so readiness does not rely on the daemon's own state.
fn readiness_asks_the_kernel() -> anyhow::Result<()> {
    let (env, port) = env(&near("\"10.88.0.0/24\""))?;
    let ready = scrape(port, "/readyz")?;
    assert_eq!((ready.status, ready.body.as_str()), (200, "ready\n"));
    let map = env.pins()?.join("ENTRIES_V4");
    // The key: prefix length 24, then the address.
    run(&format!(
        "bpftool map delete pinned {} key 24 0 0 0 10 88 0 0",
        map.display()
    ))?;
    // The first request after the repair reports it; the counter shows it to all.
    let repaired = "the kernel's maps were repaired: entry 10.88.0.0/24 near is missing";
    let counted = || {
        let ready = scrape(port, "/readyz")?;
        let right = ready.status == 200 || ready.body.contains(repaired);
        ensure!(right, "{ready:?}");
        let samples = parse(&scrape(port, "/metrics")?.body)?;
        Ok(samples["rto_agent_map_differences_total{kind=\"entry-missing\"}"])
    };
    eventually_seen("the difference", TIMEOUT, counted, |count| *count > 0.0)?;
    readyz_becomes(port, 200)?;
    let samples = parse(&scrape(port, "/metrics")?.body)?;
    assert_eq!(samples["rto_agent_in_sync"], 1.0);
    env.cli(&["detach"])?;
    readyz_becomes(port, 503)?;
    let samples = parse(&scrape(port, "/metrics")?.body)?;
    assert_eq!(samples["rto_agent_attached"], 0.0);
    Ok(())
}

/// Waits, as the maps are compared at most once a second.
fn readyz_becomes(port: u16, status: u16) -> anyhow::Result<Answer> {
    let what = format!("status {status} of /readyz");
    let is_it = |answer: &Answer| answer.status == status;
    eventually_seen(&what, TIMEOUT, || scrape(port, "/readyz"), is_it)
}

test!(off_serves_nothing);
fn off_serves_nothing() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let listening = run("ss -tlnpH")?;
    let pid = format!("pid={},", env.pid()?);
    assert!(!listening.contains(&pid), "{listening}");
    Ok(())
}
