//! Published figures, all in this directory.
//!
//! [`LOSS`] and the following ones are TOML: `[[published]]` with levels of factors and numbers of measures, in the
//! format of `rto-lab`. [`Table`] is the idle time of a request/response connection (1 byte out, 2 bytes back, one
//! transaction at a time) between two near hosts, by the time for which all its packets were dropped. Its columns are
//! *thin* (linear timeouts of thin streams) or *thick*, and rto_min. One table was computed by its authors, two were
//! measured.

use std::collections::BTreeMap;

use rto_model::retransmit::{RTO_MAX_US, THIN_LINEAR_RETRIES};

/// Computed: timeouts of rto_min that double each time (thick) or after six (thin). 25 of its 144 cells are errors (see
/// `docs/research/model.md`).
const THEORY: &str = include_str!("idle_theory_ms.csv");
/// Measured on Linux 6.5, rto_min by route metric; published as HZ 1000, but measured with HZ 250.
const LINUX_6_5: &str = include_str!("idle_linux_6_5_ms.csv");
/// Measured on Linux 6.11, rto_min by sysctl, HZ 1000.
const LINUX_6_11: &str = include_str!("idle_linux_6_11_ms.csv");

/// The cost of one lost packet in a small HTTP/1.1 transfer.
pub const LOSS: &str = include_str!("loss.toml");
/// Latencies of a request/response connection by pause.
pub const RTT: &str = include_str!("rtt.toml");
/// Round trips as a packet sampler reads them.
pub const SAMPLER: &str = include_str!("sampler.toml");
/// Spurious retransmissions with RTO restart and tail loss probes.
pub const TAIL: &str = include_str!("tail.toml");
/// Spurious retransmissions of web pages.
pub const PAGES: &str = include_str!("pages.toml");
/// How often the RTO of RFC 6298 is exceeded.
pub const ESTIMATOR: &str = include_str!("estimator.toml");

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
