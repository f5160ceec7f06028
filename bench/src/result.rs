//! Results of a benchmark: Markdown tables, and goals with the measured values.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use crate::sample::Sample;

/// The results of a benchmark.
#[derive(Debug)]
pub(crate) struct BenchResult {
    /// Markdown.
    pub(crate) text: String,
    pub(crate) goals: Vec<Goal>,
}

/// A limit, and the value measured against it.
#[derive(Debug)]
pub(crate) struct Goal {
    /// The quantity.
    pub(crate) what: &'static str,
    /// The limit, in words.
    pub(crate) limit: String,
    /// The value, in words.
    pub(crate) measured: String,
    pub(crate) met: bool,
}

impl Goal {
    /// A ratio that must not be smaller than this.
    pub(crate) fn at_least(least: f64, what: &'static str, ratio: &Sample) -> Self {
        Self {
            what,
            limit: format!("at least {least}"),
            measured: ratio.with_range(3),
            met: ratio.median() >= least,
        }
    }
}

pub(crate) fn goals_table(goals: &[Goal]) -> String {
    let rows = goals.iter().map(|goal| {
        [
            goal.what.to_owned(),
            goal.limit.clone(),
            goal.measured.clone(),
            if goal.met { "met" } else { "**missed**" }.to_owned(),
        ]
    });
    table(["", "goal", "measured", ""], rows)
}

/// A table in Markdown.
pub(crate) fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&head.map(str::to_owned));
    // Writing into a String does not fail.
    let _written = writeln!(text, "|{}", "---|".repeat(N));
    for row in rows {
        text.push_str(&line(&row));
    }
    text
}

/// A table of times in milliseconds.
pub(crate) fn times_table(samples: &[(&str, Sample)]) -> String {
    let rows = samples.iter().map(|(name, sample)| {
        [
            (*name).to_owned(),
            format!("{:.2}", sample.median()),
            format!(
                "{:.2} to {:.2}",
                sample.quantile(0.25),
                sample.quantile(0.75)
            ),
            format!("{:.2}", sample.max()),
        ]
    });
    table(["ms", "median", "interquartile range", "maximum"], rows)
}

/// Runs a function and returns its duration, milliseconds.
pub(crate) fn elapsed_ms(what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let begin = Instant::now();
    what()?;
    Ok(millis(begin.elapsed()))
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
