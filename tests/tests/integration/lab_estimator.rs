//! The lab's study of estimators, under load that it generates.

use rto_tests::lab::is;

use crate::prelude::*;

fn run(args: &[&str]) -> anyhow::Result<std::process::Output> {
    rto_tests::lab::run(&[&["estimator"], args].concat())
}

/// The numbers in a column of a table, of the rows that begin with a load.
fn column(report: &Value, table: &str, column: &str, load: &str) -> anyhow::Result<Vec<f64>> {
    let (columns, rows) = rto_tests::lab::table(report, table)?;
    let index = columns.iter().position(|c| c == column);
    let index = index.with_context(|| format!("no column {column}"))?;
    let rows = rows.iter().filter(|row| is(&row[0], load));
    rows.map(|row| row[index].as_f64().context("no number"))
        .collect()
}

test!(over_two_loads_of_a_bottleneck);
fn over_two_loads_of_a_bottleneck() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let dir = out.path().to_string_lossy().into_owned();
    let args = [
        "--json", "--length", "4s", "--load", "60,140", "--out", &dir,
    ];
    let text = stdout_of("estimator", run(&args)?)?;
    let report: Value = serde_json::from_str(&text).context(text)?;
    // 20 ms each way, and a queue that only the second load fills.
    let of = |name: &str, load: &str| column(&report, "samples", name, load);
    for load in ["60", "140"] {
        let least = of("least", load)?;
        assert!(
            least.len() == 1 && (40.0..60.0).contains(&least[0]),
            "{least:?}"
        );
    }
    let (low, full) = (of("largest", "60")?[0], of("largest", "140")?[0]);
    assert!(full > 500.0 && low < full, "{low} {full}");
    let spurious = ["60", "140"].map(|load| shares_of(&report, load));
    let [low, full] = spurious;
    // An RTO is too short only when the queue fills, the lowest first.
    let (low, full) = (low?, full?);
    assert!(full[0] > 0.0 && full[0] > low[0], "{low:?} {full:?}");
    Ok(())
}

/// W1 to W9 with three sampling rates.
const WEIGHTS: usize = 27;
/// The values of rto_min with which Linux's estimator is evaluated.
const RTO_MINS: usize = 7;

/// Asserts that the shares of each row add up; returns the spurious retransmissions by rto_min.
fn shares_of(report: &Value, load: &str) -> anyhow::Result<Vec<f64>> {
    let of = |name: &str| -> anyhow::Result<Vec<f64>> {
        let all = column(report, "weights", name, load)?;
        assert_eq!(all.len(), WEIGHTS, "{name}: {all:?}");
        Ok(all)
    };
    let (within, exceeding, long) = (of("within")?, of("exceeding")?, of("RTO > 1 s")?);
    for line in 0..WEIGHTS {
        let sum = within[line] + exceeding[line] + long[line];
        // Each is rounded to one decimal.
        assert!((99.8..100.2).contains(&sum), "line {line}: {sum}");
    }
    // A higher rto_min never causes more spurious retransmissions.
    let spurious = column(report, "minimums", "Linux", load)?;
    assert_eq!(spurious.len(), RTO_MINS, "{spurious:?}");
    assert!(spurious.is_sorted_by(|a, b| a >= b), "{spurious:?}");
    Ok(spurious)
}

test!(unreadable_input_is_refused);
fn unreadable_input_is_refused() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let (dir, file) = (out.path().join("report"), out.path().join("file"));
    fs::write(&file, "neither of both")?;
    let (dir, file) = (dir.to_string_lossy(), file.to_string_lossy());
    for (args, expected) in [
        (["--pcap", &file], "pcap"),
        (["--stats", &file], "rto-agent stats --json"),
    ] {
        let error = refusal(&run(&[&args[..], &["--out", &dir]].concat())?)?;
        assert!(
            error.contains(expected) && error.contains(&*file),
            "{error}"
        );
        assert!(!out.path().join("report").exists());
    }
    Ok(())
}
