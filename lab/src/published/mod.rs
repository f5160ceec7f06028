//! Published figures, all in this directory.
//!
//! `loss` and the following functions return them as records, with levels of factors and values of measures in the
//! names of the lab's experiments. [`Table`] is the idle time of a request/response connection (1 byte out, 2 bytes back,
//! one transaction at a time) between two near hosts, by the time for which all its packets were dropped: at the client,
//! in INPUT and in OUTPUT. Its columns are *thin* (linear timeouts of thin streams) or *thick*, and rto_min, which was set
//! on both hosts. One table was computed by its authors, two were measured.

use std::collections::BTreeMap;

use rto_model::retransmit::{RTO_MAX_US, THIN_LINEAR_RETRIES};

use crate::engine::{Record, published};

/// Computed: timeouts of rto_min that double each time (thick) or after six (thin). 25 of its 144 cells are errors (see
/// `docs/research/published.md`).
const THEORY: &str = include_str!("idle_theory_ms.csv");
/// Measured on Linux 6.5, rto_min by route metric. Its HZ is not stated; 250 fits.
const LINUX_6_5: &str = include_str!("idle_linux_6_5_ms.csv");
/// Measured on Linux 6.11, rto_min by sysctl. Its HZ is not stated; 1000 fits.
const LINUX_6_11: &str = include_str!("idle_linux_6_11_ms.csv");
/// Numbers of transfers by their time, for each kind of loss.
const LOSS: &str = include_str!("loss_completion_times_s.csv");
/// A client's latency, microseconds, by the pause after each transaction.
const RTT: &str = include_str!("rr_latency_by_pause_us.csv");
/// Shares of samples, percent, by load, weights and sampling.
const SHARES: &str = include_str!("estimator_shares_percent.csv");
/// Shares that avoid a retransmission at a minimum RTO, as far as a number is stated.
const MINIMUMS: &str = include_str!("minimum_rto_stated_percent.csv");
/// Pairs of weights in the published table.
const WEIGHTS: [&str; 3] = ["W1", "W5", "W9"];

/// The rows of a file; rows that do not parse are omitted, a test counts them.
fn rows(text: &str) -> impl Iterator<Item = BTreeMap<String, String>> {
    csv::Reader::from_reader(text.as_bytes())
        .into_deserialize()
        .flatten()
}

/// The number in a column.
fn number(row: &BTreeMap<String, String>, column: &str) -> Option<f64> {
    row.get(column)?.parse().ok()
}

/// The cost of lost packets in a small HTTP/1.1 transfer.
pub(crate) fn loss() -> Vec<Record> {
    let rows = rows(LOSS).filter_map(|row| {
        let (dropped, timers) = match &*row["dropped"] {
            "every second SYN-ACK, 100 ms at the server" => {
                ("every second SYN-ACK", "published, 100 ms at the server")
            }
            "every second last data segment" => (
                "every second last data segment, server closes, curl",
                "published, kernel",
            ),
            dropped => (dropped, "published, kernel"),
        };
        let time_ms = 1000.0 * number(&row, "time_s")?;
        let record = Record::new([("dropped", dropped), ("timers", timers)], 0);
        let record = record.with("time", time_ms);
        Some(record.weighing("time", number(&row, "transfers")?))
    });
    rows.chain(published(include_str!("loss.toml"))).collect()
}

/// Latencies of a request/response connection by pause.
pub(crate) fn rtt() -> Vec<Record> {
    latencies(("timers", "published"))
}

/// Round trips as a packet sampler reads them, and the same latencies.
pub(crate) fn sampler() -> Vec<Record> {
    let mut all = latencies(("request", "one segment, published"));
    all.extend(published(include_str!("sampler.toml")));
    all
}

fn latencies(level: (&str, &str)) -> Vec<Record> {
    let rows = rows(RTT).map(|row| {
        let record = Record::new([level, ("pause", &row["pause_ms"])], 0);
        let stats = ["least", "mean", "p50", "p90", "p99"];
        let stats = stats.map(|stat| Some((stat, number(&row, stat)? / 1000.0)));
        stats
            .into_iter()
            .flatten()
            .fold(record, |record, (stat, ms)| {
                record.with(&format!("time {stat}"), ms)
            })
    });
    rows.collect()
}

/// Spurious retransmissions with RTO restart and tail loss probes.
pub(crate) fn tail() -> Vec<Record> {
    published(include_str!("tail.toml"))
}

/// Spurious retransmissions of web pages.
pub(crate) fn pages() -> Vec<Record> {
    published(include_str!("pages.toml"))
}

/// How often the RTO of RFC 6298 is exceeded, and how often a minimum avoids a retransmission.
pub(crate) fn estimator() -> Vec<Record> {
    let record = |load: &str, weights: &str, sampling: &str| {
        let (weights, sampling) = (format!("{weights}, published"), sampling_name(sampling));
        let levels = [
            ("load", load),
            ("weights", &*weights),
            ("sampling", sampling),
        ];
        Record::new(levels, 0)
    };
    let shares = rows(SHARES).map(|row| {
        let columns = [
            ("within", "rto_up_to_1s_rtt_within_rto"),
            ("exceeding", "rto_up_to_1s_rtt_between_rto_and_1s"),
            ("RTO > 1 s", "rto_above_1s_rtt_within_rto"),
        ];
        let record = record(&row["background_mbps"], &row["weight"], &row["sampling"]);
        columns
            .into_iter()
            .fold(record, |record, (measure, column)| {
                let share = number(&row, column).unwrap_or(f64::NAN);
                record.with(&format!("{measure} percent of judged"), share)
            })
    });
    let minimums = rows(MINIMUMS).filter(|row| row["weight"] != "any");
    let minimums = minimums.filter_map(|row| {
        let ms = 1000.0 * number(&row, "minimum_rto_s")?;
        let record = record(&row["background_mbps"], &row["weight"], &row["sampling"]);
        let share = number(&row, "avoid_retransmission")?;
        Some(record.with(&format!("avoid at {ms} ms percent of judged"), share))
    });
    // "100 at all thresholds".
    let at_first = WEIGHTS.into_iter().flat_map(|weights| {
        ["All", "One", "Some"].map(|sampling| {
            let record = record("75", weights, sampling);
            [250, 500, 750, 1000].iter().fold(record, |record, ms| {
                record.with(&format!("avoid at {ms} ms percent of judged"), 100.0)
            })
        })
    });
    shares.chain(minimums).chain(at_first).collect()
}

/// The lab's name of a way to sample.
fn sampling_name(published: &str) -> &str {
    match published {
        "Some" => "EverySecondAck",
        other => other,
    }
}

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Column {
    /// Whether timeouts are linear.
    pub thin: bool,
    /// rto_min, microseconds.
    pub rto_min_us: u64,
}

impl Column {
    /// Parses a name like "thin_50ms".
    fn parse(name: &str) -> Option<Self> {
        let (kind, rto_min) = name.split_once('_')?;
        let ms: u64 = rto_min.strip_suffix("ms")?.parse().ok()?;
        Some(Self {
            thin: kind == "thin",
            rto_min_us: ms * 1000,
        })
    }

    /// The idle time by RFC 6298 section 5 alone, microseconds: the first retransmission at or after the end of the
    /// disruption. The timeout doubles each time or, with linear timeouts, after six.
    pub fn ideal_idle_us(self, disruption_us: u64) -> u64 {
        let linear = if self.thin { THIN_LINEAR_RETRIES } else { 1 };
        let timeout =
            |n: u32| (self.rto_min_us << n.saturating_sub(linear).min(30)).min(RTO_MAX_US);
        let mut times = (1..).scan(0, |now, n| {
            *now += timeout(n);
            Some(*now)
        });
        times.find(|us| *us >= disruption_us).unwrap_or(u64::MAX)
    }
}

/// Idle time in milliseconds, by column and disruption in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Table(BTreeMap<(Column, u64), f64>);

impl Table {
    /// The computed table.
    pub fn theory() -> Self {
        Self::parse(THEORY)
    }

    /// The table measured on Linux 6.5.
    pub fn linux_6_5() -> Self {
        Self::parse(LINUX_6_5)
    }

    /// The table measured on Linux 6.11.
    pub fn linux_6_11() -> Self {
        Self::parse(LINUX_6_11)
    }

    /// Cells that do not parse are omitted; a test counts the cells.
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let columns: Vec<_> = lines
            .next()
            .unwrap_or("")
            .split(',')
            .skip(1)
            .map(Column::parse)
            .collect();
        let mut table = BTreeMap::new();
        for line in lines {
            let mut cells = line.split(',').map(str::parse::<f64>);
            let Some(Ok(seconds)) = cells.next() else {
                continue;
            };
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "rounded, and some seconds"
            )]
            let disruption_us = (seconds * 1e6).round() as u64;
            for (column, cell) in columns.iter().zip(cells) {
                if let (Some(column), Ok(cell)) = (column, cell) {
                    table.insert((*column, disruption_us), cell);
                }
            }
        }
        Self(table)
    }

    /// Idle time in milliseconds; `None` if there is no such cell.
    pub fn idle_ms(&self, column: Column, disruption_us: u64) -> Option<f64> {
        self.0.get(&(column, disruption_us)).copied()
    }

    /// All cells: column, disruption in microseconds, idle time in milliseconds.
    pub fn cells(&self) -> impl Iterator<Item = (Column, u64, f64)> + '_ {
        self.0
            .iter()
            .map(|((column, disruption_us), idle_ms)| (*column, *disruption_us, *idle_ms))
    }

    /// The disruptions, microseconds, ascending.
    pub fn disruptions_us(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self
            .0
            .keys()
            .map(|(_, disruption_us)| *disruption_us)
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

#[cfg(test)]
mod tests;
