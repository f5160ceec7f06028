//! Results of a benchmark: Markdown tables, and goals with the measured values.

use std::time::{Duration, Instant};

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
    /// A value that must not be larger than this.
    pub(crate) fn at_most(
        most: f64,
        unit: &str,
        what: &'static str,
        value: f64,
        digits: usize,
    ) -> Self {
        Self {
            what,
            limit: format!("at most {most}{unit}"),
            measured: format!("{value:.digits$}{unit}"),
            met: value <= most,
        }
    }

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
    let line = |cells: [String; N]| format!("| {} |\n", cells.join(" | "));
    let head = line(head.map(str::to_owned));
    let rows: String = rows.into_iter().map(line).collect();
    format!("{head}|{}\n{rows}", "---|".repeat(N))
}

/// A table of times in milliseconds.
pub(crate) fn times_table(samples: &[(&str, Sample)]) -> String {
    let rows = samples.iter().map(|(name, sample)| {
        let [low, median, high, max] =
            [0.25, 0.5, 0.75, 1.0].map(|share| format!("{:.2}", sample.quantile(share)));
        [(*name).to_owned(), median, format!("{low} to {high}"), max]
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
