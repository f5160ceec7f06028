//! The lab's blackouts: results of a quick run, resumption of an interrupted one, and agreement of the emulated link
//! with a veth.

use nix::{sys::signal::kill, unistd::Pid};
use rto_testbed::{
    leftovers,
    netns::{Pair, inside},
};
use rto_tests::lab;

use crate::prelude::*;

/// Time that the link and both ends, which are processes, add to a median on an idle machine, milliseconds.
const PROCESSES_MS: f64 = 4.0;
/// The RTO for this smoothed RTT: a timer of 200 ms takes 204 ms.
const LINUX_RTO: Duration = Duration::from_millis(204);

/// The error with which `rto-lab` refuses.
fn refused(out: &Path, args: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(beside("rto-lab")?);
    command.args(["blackout", "--quick", "--out"]).arg(out);
    refusal(&command.args(args).output()?)
}

test!(a_lower_rto_min_gains_in_short_disruptions, || measured(
    gains
));
fn gains() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick(
        "blackout",
        out.path(),
        &["--mechanism", "agent,kernel", "--rto-min", "8ms,200ms"],
    )?;
    let at = |column: &str, line: &str| cell(&report, "medians", column, &[line]);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    // The control: the kernel's timers, without the agent. None is early.
    let kernel = at("kernel", "10")?;
    let expected = 200.0..ms(latest(LINUX_RTO)) + PROCESSES_MS;
    ensure!(
        expected.contains(&kernel),
        "{kernel} is not in {expected:?}\n{report:#}"
    );
    // The model of the kernel's timers is exact to a jiffy; the value is never before the end of the disruption.
    for (column, table) in [("thin 8 ms", "thin-8-ms"), ("thick 8 ms", "thick-8-ms")] {
        let own = at(column, "10")?;
        let model = cell(&report, table, "kernel model", &["10"])?;
        let expected = 10.0..model + ms(jiffy()) + PROCESSES_MS;
        ensure!(
            expected.contains(&own),
            "{column}: {own} is not in {expected:?}\n{report:#}"
        );
    }
    // If the agent sets the kernel's own value, nothing changes: both are within the error of the timer wheel.
    let same = at("thick 200 ms", "10")?;
    ensure!(
        expected.contains(&same),
        "{same} is not in {expected:?}\n{report:#}"
    );
    let page = fs::read_to_string(out.path().join("blackout.html"))?;
    ensure!(page.contains("<svg") && page.contains("difference with its 95 % interval"));
    // The same report again, from the log alone.
    let (page, json) = (
        out.path().join("blackout.html"),
        out.path().join("blackout.json"),
    );
    let before = fs::read_to_string(&json)?;
    fs::remove_file(page.clone())?;
    fs::remove_file(&json)?;
    let output = lab::run(&["report", &out.path().to_string_lossy()])?;
    let text = stdout_of("report", output)?;
    assert_says(&text, &["against kernel: thin 8 ms better in"]);
    ensure!(page.exists());
    let again: Value = serde_json::from_str(&fs::read_to_string(&json)?)?;
    let before: Value = serde_json::from_str(&before)?;
    for of in ["effects", "tables"] {
        ensure!(again[of] == before[of], "{again:#}");
    }
    // Compared with itself there is no difference.
    let same = out.path().join("same");
    let [dir, to] = [out.path(), &same].map(|path| path.to_string_lossy());
    stdout_of("compare", lab::run(&["compare", &dir, &dir, "--out", &to])?)?;
    let compared = fs::read_to_string(same.join("blackout-compared-effects.csv"))?;
    ensure!(
        !compared.contains("better") && !compared.contains("worse"),
        "{compared}"
    );
    Ok(())
}

test!(interrupted_run_resumes);
fn interrupted_run_resumes() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let args = [
        "--mechanism",
        "kernel",
        "--disruption",
        "10ms,20ms",
        "--runs",
        "2",
    ];
    let whole = quick("blackout", out.path(), &args)?;
    // The log as if the run had been killed after two of the four runs, in the middle of a line.
    let log = out.path().join("blackout.jsonl");
    let lines = fs::read_to_string(&log)?;
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines.len(), 5, "{lines:#?}");
    fs::write(
        &log,
        format!("{}\n{}", lines[..3].join("\n"), &lines[3][..20]),
    )?;
    let again = quick("blackout", out.path(), &args)?;
    let now = |report: &Value| {
        let method = report["method"].as_array().cloned().unwrap_or_default();
        method.last().map(|last| last[1].clone())
    };
    assert_eq!(now(&whole), Some("4, 0".into()));
    assert_eq!(now(&again), Some("2, 2".into()));
    let error = refused(out.path(), &[&args[..], &["--seed", "2"]].concat())?;
    assert!(
        error.contains("--out") && error.contains("--fresh"),
        "{error}"
    );
    Ok(())
}

test!(the_emulated_link_and_a_veth_agree, || measured(both_links));
/// With a disruption on which the value depends: one that ends after the first retransmissions.
fn both_links() -> anyhow::Result<()> {
    let median = |link: &str, disruption: &str| -> anyhow::Result<f64> {
        let out = tempfile::tempdir()?;
        let lost = format!("{disruption}ms");
        let args = [
            "--mechanism",
            "route",
            "--rto-min",
            "8ms",
            "--control-runs",
            "5",
        ];
        let args = [&args[..], &["--disruption", &lost, "--link", link]].concat();
        let report = quick("blackout", out.path(), &args)?;
        cell(&report, "thick-8-ms", "route", &[disruption])
    };
    for (disruption, between) in [("75", 105.0..135.0), ("150", 205.0..240.0)] {
        let (relay, veth) = (median("relay", disruption)?, median("nft", disruption)?);
        ensure!(between.contains(&relay), "{disruption}: {relay} {veth}");
        ensure!(between.contains(&veth), "{disruption}: {relay} {veth}");
    }
    Ok(())
}

test!(own_firewall_leaves_probe_timer, || measured(own_firewall));
/// Requests that the client's own firewall drops wait for its probe timer, 200 and 400 ms later, whatever rto_min is; the
/// peer's timers of 8 ms that double would take 816 ms.
fn own_firewall() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let args = [
        "--mechanism",
        "agent,firewall",
        "--rto-min",
        "8ms",
        "--disruption",
        "550ms",
        "--control-runs",
        "5",
    ];
    let report = quick("blackout", out.path(), &args)?;
    let at = |by: &str| cell(&report, "thick-8-ms", by, &["550"]);
    let (firewall, elsewhere, model) = (at("firewall")?, at("agent")?, at("firewall model")?);
    ensure!((600.0..680.0).contains(&firewall), "{firewall}\n{report:#}");
    ensure!(
        (780.0..860.0).contains(&elsewhere),
        "{elsewhere}\n{report:#}"
    );
    ensure!((model - 624.0).abs() <= 4.0, "{model}");
    Ok(())
}

test!(two_hosts_drop_what_arrives, || measured(two_hosts));
fn two_hosts() -> anyhow::Result<()> {
    let pair = Pair::new()?;
    for netns in [&pair.client, &pair.server] {
        sysctl(netns, "net.ipv4.tcp_congestion_control", "reno")?;
    }
    let out = tempfile::tempdir()?;
    let on = format!("{SERVER_V4}:4700");
    let lab = beside("rto-lab")?;
    let listening = || {
        inside(&pair.server, || {
            Ok(std::net::TcpStream::connect(&on).ok().map(drop))
        })
    };
    let server = |more: &[&str]| {
        let mut command = Command::new(&lab);
        command.args(["rr", "--server", "--on", &on]).args(more);
        let server = inside(&pair.server, || Ok(KillOnDrop(command.spawn()?)))?;
        eventually("rr --server", TIMEOUT, listening)?;
        anyhow::Ok(server)
    };
    let client = |more: &[&str]| {
        let mut command = Command::new(&lab);
        command
            .args([
                "rr",
                "--json",
                "--connect",
                SERVER_V4,
                "--outage",
                "50ms,250ms",
                "--out",
            ])
            .arg(out.path())
            .args(more);
        inside(&pair.client, || Ok(command.output()?))
    };
    let refusing = server(&[])?;
    let refused = refusal(&client(&[])?)?;
    ensure!(
        refused.contains("--outages") && refused.contains("--here-only"),
        "{refused}"
    );
    drop(refusing);
    let _dropping = server(&["--outages"])?;
    stdout_of("rr --outage", client(&[])?)?;
    for netns in [&pair.client, &pair.server] {
        sysctl(netns, "net.ipv4.tcp_rto_min_us", "8000")?;
        sysctl(netns, "net.ipv4.tcp_thin_linear_timeouts", "1")?;
    }
    let report = stdout_of("rr --outage", client(&["--setting", "thin 8 ms"])?)?;
    let report: Value = serde_json::from_str(&report)?;
    let at = |setting: &str| cell(&report, "idle", &format!("{setting}, median"), &["250"]);
    // The kernel's own timers as in the tables of blackout; the control.
    let (own, short) = (at("default")?, at("thin 8 ms")?);
    ensure!((400.0..440.0).contains(&own), "{own}\n{report:#}");
    ensure!((250.0..380.0).contains(&short), "{short}\n{report:#}");
    let page = fs::read_to_string(out.path().join("rr-outage.html"))?;
    ensure!(page.matches("<svg").count() == 4, "{page}");
    let rules = |netns| inside(netns, || run("nft list ruleset"));
    ensure!(rules(&pair.client)?.is_empty());
    Ok(())
}

test!(leaves_nothing_when_it_is_interrupted);
fn leaves_nothing_when_it_is_interrupted() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let mut command = Command::new(beside("rto-lab")?);
    command
        .args(["blackout", "--mechanism", "agent", "--out"])
        .arg(out.path());
    command.stderr(std::process::Stdio::piped());
    let mut lab = KillOnDrop(command.spawn()?);
    let pid = lab.0.id();
    let log = out.path().join("blackout.jsonl");
    // Interrupted in the middle.
    eventually("ten lines of runs", TIMEOUT * 2, || {
        let runs = fs::read_to_string(&log).unwrap_or_default();
        Ok((runs.lines().count() >= 10).then_some(()))
    })?;
    let made = leftovers::of(pid)?;
    assert!(made.len() > 2 * 6, "{made:?}");
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGINT)?;
    let status = lab.0.wait()?;
    let mut text = String::new();
    lab.0
        .stderr
        .take()
        .context("no stderr")?
        .read_to_string(&mut text)?;
    assert_eq!(status.code(), Some(1), "{status} {text}");
    assert!(text.contains("interrupted"), "{text}");
    assert_eq!(leftovers::of(pid)?, [] as [&Path; 0]);
    Ok(())
}
