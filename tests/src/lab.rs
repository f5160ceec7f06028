//! Running the lab's experiments, and reading their reports.

use std::{path::Path, process::Command};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::process::{beside, stdout_of};

/// Runs a quick experiment; its report.
///
/// # Errors
///
/// If it fails.
pub fn quick(experiment: &str, out: &Path, args: &[&str]) -> anyhow::Result<Value> {
    let mut command = Command::new(beside("rto-lab")?);
    command.args([experiment, "--quick", "--json", "--out"]);
    let output = command.arg(out).args(args).output()?;
    let text = stdout_of(experiment, output)?;
    serde_json::from_str(&text).context(text)
}

/// How often a measurement may be wrong: on a machine that runs other tests as well one can be disturbed.
const DISTURBED: usize = 1;

/// Measures; again if it does not come out as it should, and then it has to twice.
///
/// # Errors
///
/// What was wrong.
pub fn measured(mut measure: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let (mut wrong, mut right) = (Vec::new(), 0);
    while right <= wrong.len() {
        match measure() {
            Ok(()) => right += 1,
            Err(error) => wrong.push(format!("{error:#}")),
        }
        if wrong.len() > DISTURBED {
            bail!("wrong twice:\n{}", wrong.join("\n"));
        }
    }
    Ok(())
}

/// A number in a table of a report: in the column of this name, and in the line that begins with these cells.
///
/// # Errors
///
/// If there is no such cell, or no number in it.
pub fn cell(report: &Value, table: &str, column: &str, begin: &[&str]) -> anyhow::Result<f64> {
    let is_list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let table = is_list(&report["tables"])
        .into_iter()
        .find(|one| one["name"] == table)
        .with_context(|| format!("no table {table}"))?;
    let columns = is_list(&table["columns"]);
    let index = columns.iter().position(|name| name == column);
    let index = index.with_context(|| format!("no column {column}: {columns:?}"))?;
    let row = is_list(&table["rows"]).into_iter().find(|row| {
        let mut cells = (0..).zip(begin);
        cells.all(|(at, cell): (usize, _)| row[at] == *cell)
    });
    let row = row.with_context(|| format!("no line {begin:?}: {table:#}"))?;
    let text = row[index].as_str().context("no text")?;
    ensure!(!text.is_empty(), "nothing was measured: {row}");
    text.parse().with_context(|| text.to_owned())
}
