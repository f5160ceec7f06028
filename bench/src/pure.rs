//! Functions that need no kernel: criterion's benchmarks of the agent.

use std::{fs, path::PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::{
    process::{cargo, run},
    result::{BenchResult, table},
};

/// Names in criterion, and in the table.
const BENCHES: [(&str, &str); 9] = [
    (
        "config_1k",
        "parse and validate a file of 1,000 entries in 16 policies",
    ),
    ("config_16k", "the same with 16,000 entries in 250 policies"),
    (
        "config_1000_lists",
        "the same with 64,000 entries in 1,000 lists, around one list of 200,000",
    ),
    ("compile", "compile a policy into the kernel's units"),
    ("plan_same", "plan a reload of 16,000 unchanged entries"),
    (
        "plan_changed",
        "plan a reload that removes 1,000 of 16,000 entries",
    ),
    ("histogram_1024", "sort 1,024 times into histogram buckets"),
    ("stats_json_32", "statistics of 32 policies as JSON"),
    (
        "metrics_32",
        "statistics of 32 policies as Prometheus metrics",
    ),
];

/// Builds and runs the benchmarks.
pub(crate) fn measure(quick: bool) -> anyhow::Result<()> {
    let bench = "bench --locked --bench pure --package rto-agent";
    let options = "-- --noplot --warm-up-time 1";
    let time = if quick {
        "--quick"
    } else {
        "--measurement-time 3"
    };
    let words = format!("{bench} {options} {time}");
    run(cargo().args(words.split(' ')))
}

/// The results of the benchmarks' last run.
pub(crate) fn result() -> anyhow::Result<BenchResult> {
    let target = target()?;
    let rows = BENCHES.iter().map(|(name, what)| {
        let path = target.join(format!("criterion/{name}/new/estimates.json"));
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let estimates: Value = serde_json::from_str(&text)?;
        let time = |value: &str| {
            let nanos = estimates.pointer(&format!("/median/{value}"));
            anyhow::Ok(time(nanos.and_then(Value::as_f64).context("no estimate")?))
        };
        let low = time("confidence_interval/lower_bound")?;
        let high = time("confidence_interval/upper_bound")?;
        let median = time("point_estimate")?;
        anyhow::Ok([(*what).to_owned(), median, format!("{low} to {high}")])
    });
    let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(BenchResult {
        text: table(["", "median", "95 % confidence interval"], rows),
        goals: Vec::new(),
    })
}

/// The target directory, derived from this program's path because sudo does not pass CARGO_TARGET_DIR on.
fn target() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let target = own.ancestors().nth(2).context("no target directory")?;
    Ok(target.to_owned())
}

/// A time with a unit.
fn time(nanos: f64) -> String {
    match nanos {
        ..1e3 => format!("{nanos:.0} ns"),
        1e3..1e6 => format!("{:.2} us", nanos / 1e3),
        _ => format!("{:.2} ms", nanos / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(time(12.3), "12 ns");
        assert_eq!(time(12_345.0), "12.35 us");
        assert_eq!(time(12_345_678.0), "12.35 ms");
    }
}
