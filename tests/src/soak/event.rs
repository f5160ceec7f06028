//! What happened, as lines on stdout.

use std::{io::Write as _, time::Instant};

use rto_testbed::workload::counted::Counts;
use serde::Serialize;

use super::{counters::Counted, disturbance::Disturbance, look::Sample};

/// Begins each line: the console of a machine has others too.
const PREFIX: &str = "soak ";

/// What happened.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(super) enum Event<'a> {
    /// Both machines are ready.
    Begin {
        /// Of the order of disturbances.
        seed: u64,
        /// The kernel's release.
        kernel: &'a str,
    },
    /// The agent and the kernel, once a second.
    Sample(Sample),
    /// A disturbance is over, and all is as it was.
    Done {
        /// Which.
        disturbance: Disturbance,
        /// How long it took.
        took_s: f64,
    },
    /// Something that must not be.
    Failure {
        /// What was being done, or was done last.
        after: Option<Disturbance>,
        /// What is wrong.
        why: &'a str,
    },
    /// Counters at the end of a round.
    Counters {
        /// What the host's own client did.
        host: &'a Counts,
        /// What the peer's client did.
        peer: &'a Counts,
        /// Connections that the host's server accepted.
        accepted: u64,
        /// What the agent counted.
        counted: Counted,
    },
    /// All is over.
    End {
        /// Looks at the kernel.
        looks: u64,
        /// Longest time between two of them.
        longest_gap_s: f64,
    },
}

/// Prints events, with the time since it was made and the round.
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

    /// Prints it.
    pub(super) fn print(&self, round: u32, event: &Event<'_>) -> anyhow::Result<()> {
        let line = Line {
            t_s: (self.begin.elapsed().as_secs_f64() * 100.0).round() / 100.0,
            round,
            event,
        };
        // In one piece: two threads print.
        let text = format!("{PREFIX}{}\n", serde_json::to_string(&line)?);
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        Ok(out.flush()?)
    }
}
