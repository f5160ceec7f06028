//! Events, printed as lines on stdout.

use std::{io::Write as _, time::Instant};

use rto_testbed::workload::counted::Counts;
use serde::Serialize;

use super::{counters::Counted, disturbance::Disturbance, look::Sample};

/// Prefix of each line: a machine's console has other lines too.
const PREFIX: &str = "soak ";

#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(super) enum Event<'a> {
    /// Both machines are ready.
    Begin {
        /// Seed of the order of disturbances.
        seed: u64,
        /// The kernel's release.
        kernel: &'a str,
    },
    /// A sample of the agent's and the kernel's resources, once a second.
    Sample(Sample),
    /// A disturbance is over, and the original state is restored.
    Done {
        disturbance: Disturbance,
        /// How long it took.
        took_s: f64,
    },
    /// An invariant is violated.
    Failure {
        /// The current disturbance, or the last one.
        after: Option<Disturbance>,
        /// The violated invariant.
        why: &'a str,
    },
    /// Counters at the end of a round.
    Counters {
        /// The counts of the host's client.
        host: &'a Counts,
        /// The counts of the peer's client.
        peer: &'a Counts,
        /// Connections that the host's server accepted.
        accepted: u64,
        /// The agent's counters.
        counted: Counted,
    },
    /// The soak has ended.
    End {
        /// Number of checks of the kernel.
        looks: u64,
        /// Longest time between two checks.
        longest_gap_s: f64,
    },
}

/// Prints events with the time since it was created and the round.
pub(super) struct Log {
    begin: Instant,
}

#[derive(Serialize)]
struct Line<'a> {
    t_s: f64,
    round: u32,
    #[serde(flatten)]
    event: &'a Event<'a>,
}

impl Log {
    pub(super) fn new() -> Self {
        Self {
            begin: Instant::now(),
        }
    }

    pub(super) fn print(&self, round: u32, event: &Event<'_>) -> anyhow::Result<()> {
        let line = Line {
            t_s: (self.begin.elapsed().as_secs_f64() * 100.0).round() / 100.0,
            round,
            event,
        };
        // In a single write, because two threads print.
        let text = format!("{PREFIX}{}\n", serde_json::to_string(&line)?);
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        Ok(out.flush()?)
    }
}
