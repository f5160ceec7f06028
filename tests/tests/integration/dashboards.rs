//! Alerts and dashboard: they use existing metrics, never divide by zero, and link to documentation.

use std::fmt::Write as _;

use rto_testbed::prometheus;

use super::metrics;
use crate::prelude::*;

const ALERTS: &str = "config/prometheus/alerts.yml";
const RECORDING: &str = "config/prometheus/recording.yml";
const TESTS: &str = "config/prometheus/alerts_test.yml";
const DASHBOARD: &str = "config/grafana/rto-agent.json";

pub(super) fn path(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(file)
}

fn text(file: &str) -> anyhow::Result<String> {
    fs::read_to_string(path(file)).with_context(|| file.to_owned())
}

/// The queries of the dashboard.
pub(super) fn queries() -> anyhow::Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let queries = prometheus::panels(&dashboard)?;
    ensure!(panels.len() > 5 && queries.len() >= panels.len());
    Ok(queries.into_iter().map(|(_, query)| query).collect())
}

/// The alerts by name, each with its lines.
fn alerts() -> anyhow::Result<BTreeMap<String, String>> {
    let text = text(ALERTS)?;
    let alerts = text.split("- alert: ").skip(1).map(|alert| {
        let name = alert.lines().next().unwrap_or_default();
        (name.to_owned(), alert.to_owned())
    });
    let alerts: BTreeMap<_, _> = alerts.collect();
    ensure!(alerts.len() > 5, "{alerts:?}");
    Ok(alerts)
}

test!(dashboards_use_existing_metrics, names);
fn names() -> anyhow::Result<()> {
    // A guarded policy with a control arm.
    let policy = near("\"10.88.0.0/24\"") + "guard = \"on\"\nholdout = \"5%\"\n";
    let (env, port) = metrics::env(&policy)?;
    env.wait_status("the probe", |status| status["probe"].is_object())?;
    // Two transitions, after which the value is active again, and evidence.
    env.cli(&["tune", "freeze", "near"])?;
    env.cli(&["tune", "resume", "near"])?;
    let mut there = metrics::names(port)?;
    // Exported once both arms have connections.
    there.insert("rto_agent_connect_time_difference_seconds".to_owned());
    // Stored as native histograms, which have no suffix.
    for times in ["connect_time", "path_rtt", "smoothed_rtt"] {
        there.insert(format!("rto_agent_{times}_seconds"));
    }
    // Exported once the kernel has refused an option.
    there.insert("rto_agent_setsockopt_failures_total".to_owned());
    // Exported if the kernel counts runs.
    there.insert("rto_agent_program_runs_total".to_owned());
    there.insert("rto_agent_program_run_seconds_total".to_owned());
    for file in [ALERTS, RECORDING, DASHBOARD] {
        let text = text(file)?;
        let used: BTreeSet<String> = text
            // Recorded names contain colons.
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')
            .filter(|word| word.starts_with("rto_agent_"))
            .map(ToOwned::to_owned)
            .collect();
        ensure!(used.len() > 5, "{file}: {used:?}");
        let missing: Vec<_> = used.difference(&there).collect();
        ensure!(missing.is_empty(), "{file} uses {missing:?}");
    }
    Ok(())
}

test!(dashboard_reads_recorded_series_that_exist);
/// Every recorded name in the dashboard is a rule, panels of fleets use no others, and every panel has a description,
/// a unit and thresholds.
fn dashboard_reads_recorded_series_that_exist() -> anyhow::Result<()> {
    let rules = text(RECORDING)?;
    for query in queries()? {
        let names = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
        let recorded: Vec<_> = names.filter(|name| name.contains(':')).collect();
        let is_fleet = !query.contains("$instance");
        ensure!(is_fleet != recorded.is_empty(), "{query}");
        for name in recorded {
            let (long, short) = (format!("record: {name}\n"), format!("record: {name},"));
            ensure!(rules.contains(&long) || rules.contains(&short), "{name}");
        }
    }
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let defaults = &panel["fieldConfig"]["defaults"];
        let texts = [&panel["description"], &defaults["unit"]];
        let has_texts = texts.into_iter().all(Value::is_string);
        let steps = defaults["thresholds"]["steps"].as_array();
        ensure!(has_texts && steps.is_some(), "{}", panel["title"]);
    }
    Ok(())
}

test!(dashboards_never_divide_by_zero, divisions);
/// Without connections a rate is 0: dividing by it, and quantiles of nothing, would be NaN or infinite.
fn divisions() -> anyhow::Result<()> {
    let mut divisions = 0;
    let queries = queries()?;
    let alerts = alerts()?;
    // Only the expression of an alert, not its annotations.
    let rules = alerts
        .values()
        .map(|alert| alert.split("annotations:").next().unwrap_or_default());
    for query in queries.iter().map(String::as_str).chain(rules) {
        for (_, divisor) in query.match_indices(" / ").map(|(at, _)| query.split_at(at)) {
            let divisor = divisor.trim_start_matches(" / ");
            ensure!(is_positive(divisor), "{query} divides by {divisor}");
            divisions += 1;
        }
        let is_quantile = query.contains("histogram_quantile");
        ensure!(!is_quantile || query.ends_with(" > 0"), "{query}");
    }
    ensure!(divisions > 1, "{divisions}");
    // The check itself distinguishes the two cases.
    ensure!(!is_positive("sum(rate(x[5m]))") && !is_positive("(sum(x)) > 0"));
    ensure!(is_positive("(sum by (a) (rate(x[5m])) > 0) > 5"));
    Ok(())
}

/// Whether this begins with an expression in brackets that is greater than 0.
fn is_positive(divisor: &str) -> bool {
    let mut depth = 0;
    for (at, c) in divisor.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return divisor[..at].ends_with(" > 0");
        }
    }
    false
}

test!(each_alert_says_where_to_read_on);
/// A page of the sources, and a heading on it that yields the anchor. There are no links to a repository that does not
/// exist.
fn each_alert_says_where_to_read_on() -> anyhow::Result<()> {
    const PLACEHOLDER: &str = "example.invalid";
    for (name, alert) in alerts()? {
        let severities = ["critical", "warning", "info"];
        let is_known = |severity: &str| alert.contains(&format!("severity: {severity}}}"));
        ensure!(severities.into_iter().any(is_known), "{name}: severity");
        let runbook = alert.lines().find_map(|line| {
            let text = line.trim().strip_prefix("runbook: \"")?;
            text.strip_suffix('"')
        });
        let runbook = runbook.with_context(|| format!("{name} has no runbook"))?;
        let (page, anchor) = runbook.split_once('#').context("no section")?;
        let page = text(page)?;
        let mut headings = page.lines().filter(|line| line.starts_with('#'));
        let is_there = headings.any(|heading| {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            heading.replace(' ', "-") == anchor
        });
        ensure!(is_there, "{name}: {runbook} is no section");
    }
    for file in [ALERTS, RECORDING, DASHBOARD, "charts/rto-agent/Chart.yaml"] {
        ensure!(!text(file)?.contains(PLACEHOLDER), "{file}");
    }
    Ok(())
}

/// Runs promtool, which must succeed.
fn promtool(dir: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("promtool")
        .args(arguments)
        .current_dir(dir)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {text}{complaint}");
    Ok(())
}

test!(promtool_accepts_rules_and_alerts_fire, needs = [PROMTOOL]);
/// The rules with their own tests; the dashboard's queries as rules of another file.
fn promtool_accepts_rules_and_alerts_fire() -> anyhow::Result<()> {
    let run = |arguments: &[&str]| promtool(&path("config/prometheus"), arguments);
    run(&["check", "rules", "alerts.yml", "recording.yml"])?;
    run(&[
        "test",
        "rules",
        "alerts_test.yml",
        "alerts_week_test.yml",
        "recording_test.yml",
    ])?;
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (i, query) in queries()?.iter().enumerate() {
        let query = prometheus::filled(query, "host", "5m");
        writeln!(
            rules,
            "      - {{record: \"q{i}\", expr: {}}}",
            Value::from(query)
        )?;
    }
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("queries.yml");
    fs::write(&file, rules)?;
    run(&["check", "rules", &file.to_string_lossy()])
}

test!(each_alert_is_tested_both_ways, needs = [PROMTOOL]);
/// The tests of an alert pass as it is ([`promtool_accepts_rules_and_alerts_fire`]), and fail if it never fires or always fires.
fn each_alert_is_tested_both_ways() -> anyhow::Result<()> {
    let rules = text(ALERTS)?;
    let tests = text(TESTS)?;
    let (head, tests) = tests.split_once("tests:\n").context("no tests")?;
    let dir = tempfile::tempdir()?;
    let mut all = Vec::new();
    for (name, alert) in alerts()? {
        // The tests that concern this alert.
        let of = tests
            .split("\n\n")
            .filter(|test| test.contains("count(ALERTS") || test.contains(&name));
        let of: Vec<_> = of.collect();
        let (before, rest) = alert.split_once("expr: ").context("no expression")?;
        let after = ["\n        for: ", "\n        labels: "];
        let after = after.iter().filter_map(|key| rest.find(key)).min();
        let after = &rest[after.context("no labels")?..];
        for (with, expression) in [("never", "vector(0) > 1"), ("always", "vector(1)")] {
            let other = rules.replace(&alert, &format!("{before}expr: {expression}{after}"));
            ensure!(other != rules, "{name}");
            let file = format!("{name}-{with}.yml");
            fs::write(dir.path().join(&file), other)?;
            let head = head.replace("alerts.yml", &file);
            ensure!(head.contains(&file), "{head}");
            fs::write(
                dir.path().join("test.yml"),
                format!("{head}tests:\n{}\n", of.join("\n\n")),
            )?;
            let passed = promtool(dir.path(), &["test", "rules", "test.yml"]);
            ensure!(passed.is_err(), "{name}: {expression} is not noticed");
            all.push(file);
        }
    }
    // No test failed because Prometheus rejects the rules.
    let check = ["check", "rules"].into_iter();
    let check: Vec<_> = check.chain(all.iter().map(String::as_str)).collect();
    promtool(dir.path(), &check)
}
