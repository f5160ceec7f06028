//! Runs the lab's experiments and reads their reports.

use std::{
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context as _, bail};
use rto_testbed::{
    control::Control,
    process::{beside, stdout_of},
};
use serde_json::Value;

/// Runs a command of `rto-lab`.
pub fn run(args: &[&str]) -> anyhow::Result<Output> {
    Ok(Command::new(beside("rto-lab")?).args(args).output()?)
}

/// Runs a quick experiment; returns its report.
pub fn quick(experiment: &str, out: &Path, args: &[&str]) -> anyhow::Result<Value> {
    let mut command = Command::new(beside("rto-lab")?);
    command.args([experiment, "--quick", "--json", "--out"]);
    let output = command.arg(out).args(args).output()?;
    let text = stdout_of(experiment, output)?;
    serde_json::from_str(&text).context(text)
}

/// Most attempts.
const TRIES: usize = 6;

/// Runs a measurement. It is repeated only if plain timers beside it were late, so that the machine may have caused the
/// failure.
pub fn measured(mut measure: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    loop {
        let control = Control::start();
        let outcome = measure();
        let observed = control.stop();
        let Err(error) = outcome else {
            return Ok(());
        };
        let error = format!("{error:#}");
        // The rest is a report; the report of the last attempt is enough.
        let what = error.lines().next().unwrap_or_default();
        eprintln!("lab: {what}; {observed}");
        wrong.push(format!("{what}; {observed}"));
        if wrong.len() == TRIES || !observed.was_late() {
            bail!("wrong each time:\n{}\n{error}", wrong.join("\n"));
        }
    }
}

/// The columns and rows of a table of a report.
pub fn table<'a>(report: &'a Value, name: &str) -> anyhow::Result<(&'a [Value], &'a [Value])> {
    let mut tables = report["tables"].as_array().into_iter().flatten();
    let table = tables.find(|one| one["name"] == name);
    let table = table.with_context(|| format!("no table {name}"))?;
    let list = |key: &str| {
        let list = table[key].as_array().map(Vec::as_slice);
        list.with_context(|| format!("no {key}"))
    };
    Ok((list("columns")?, list("rows")?))
}

/// A number in a table of a report: in the column with this name, in the first row that begins with these cells.
pub fn cell(report: &Value, table: &str, column: &str, begin: &[&str]) -> anyhow::Result<f64> {
    let (columns, rows) = self::table(report, table)?;
    let index = columns.iter().position(|name| name == column);
    let index = index.with_context(|| format!("no column {column}: {columns:?}"))?;
    let row = rows.iter().find(|row| {
        let mut cells = (0..).zip(begin);
        cells.all(|(at, cell): (usize, _)| is(&row[at], cell))
    });
    let row = row.with_context(|| format!("no line {begin:?}: {rows:#?}"))?;
    row[index]
        .as_f64()
        .with_context(|| format!("nothing was measured: {row}"))
}

/// Whether a cell of a report has this value; numbers are compared as numbers.
pub fn is(cell: &Value, wanted: &str) -> bool {
    match cell.as_f64() {
        Some(number) => wanted.parse() == Ok(number),
        None => cell.as_str() == Some(wanted),
    }
}
