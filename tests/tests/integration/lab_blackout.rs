//! The lab's blackouts: results of a quick run, resumption of an interrupted one, and agreement of the emulated link
//! with a veth.

use nix::{sys::signal::kill, unistd::Pid};
use rto_testbed::leftovers;
use rto_tests::lab::run;

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
    let output = run(&["report", &out.path().to_string_lossy()])?;
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
    stdout_of("compare", run(&["compare", &dir, &dir, "--out", &to])?)?;
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
    let said = refused(out.path(), &[&args[..], &["--seed", "2"]].concat())?;
    assert!(said.contains("--out") && said.contains("--fresh"), "{said}");
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
    let mut said = String::new();
    lab.0
        .stderr
        .take()
        .context("no stderr")?
        .read_to_string(&mut said)?;
    assert_eq!(status.code(), Some(1), "{status} {said}");
    assert!(said.contains("interrupted"), "{said}");
    assert_eq!(leftovers::of(pid)?, [] as [&Path; 0]);
    Ok(())
}
