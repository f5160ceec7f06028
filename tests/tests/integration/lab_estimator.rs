//! The lab's estimator study over load that it generates.

use std::process::Command;

use anyhow::Context as _;
use rto_tests::process::{beside, stdout_of};
use serde_json::Value;

use super::Test;

pub(super) const TESTS: &[Test] = &[
    ("over_two_loads_of_a_bottleneck", loads),
    ("what_it_cannot_read_is_refused", refusals),
];

fn run(args: &[&str]) -> anyhow::Result<std::process::Output> {
    let mut command = Command::new(beside("rto-lab")?);
    Ok(command.arg("estimator").args(args).output()?)
}

/// A column of a table, as numbers.
fn column(report: &Value, table: &str, column: &str) -> anyhow::Result<Vec<f64>> {
    let tables = report["tables"].as_array().context("no tables")?;
    let table = tables
        .iter()
        .find(|t| t["name"] == table)
        .with_context(|| format!("no table {table}"))?;
    let columns = table["columns"].as_array().context("no columns")?;
    let index = columns
        .iter()
        .position(|c| c == column)
        .with_context(|| format!("no column {column}"))?;
    let rows = table["rows"].as_array().context("no lines")?;
    rows.iter()
        .map(|row| Ok(row[index].as_str().context("no text")?.parse()?))
        .collect()
}

fn loads() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let dir = out.path().to_string_lossy().into_owned();
    let args = [
        "--json", "--length", "4s", "--load", "60,140", "--out", &dir,
    ];
    let text = stdout_of("estimator", run(&args)?)?;
    let report: Value = serde_json::from_str(&text).context(text)?;
    // 20 ms each way, and a queue that only the second load fills.
    let least = column(&report, "samples", "least")?;
    assert!(
        least.iter().all(|ms| (40.0..60.0).contains(ms)),
        "{least:?}"
    );
    let largest = column(&report, "samples", "largest")?;
    assert!(largest[1] > 500.0 && largest[0] < largest[1], "{largest:?}");
    for load in ["60", "140"] {
        let table = format!("weights-load-{load}");
        let [within, exceeding, long] = ["within", "exceeding", "RTO > 1 s"]
            .map(|name| column(&report, &table, name).unwrap_or_default());
        assert_eq!(within.len(), 27);
        for ((within, exceeding), long) in within.iter().zip(&exceeding).zip(&long) {
            let sum = within + exceeding + long;
            assert!((99.9..100.1).contains(&sum), "{sum}");
        }
        // A higher rto_min never sends more again.
        let needless = column(&report, &format!("linux-load-{load}"), "needless")?;
        assert!(needless.is_sorted_by(|a, b| a >= b), "{needless:?}");
    }
    Ok(())
}

fn refusals() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let (dir, file) = (out.path().join("report"), out.path().join("file"));
    std::fs::write(&file, "neither of both")?;
    let (dir, file) = (dir.to_string_lossy(), file.to_string_lossy());
    for (args, said) in [
        (["--pcap", &file], "pcap"),
        (["--stats", &file], "rto-agent stats --json"),
    ] {
        let output = run(&[&args[..], &["--out", &dir]].concat())?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(said) && error.contains(&*file), "{error}");
        assert!(!out.path().join("report").exists());
    }
    Ok(())
}
