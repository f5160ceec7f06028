//! What `discover` has found.

use rto_agent_core::policy::Cidr;
use serde::Serialize;

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Discovery {
    /// Time of the answer, Unix milliseconds.
    pub(super) at_ms: u64,
    /// Start of the counts, Unix milliseconds.
    pub(super) since_ms: u64,
    /// Jiffies per second.
    pub(super) hz: u32,
    /// One in this many connections was counted.
    pub(super) one_in: u32,
    /// The candidates, the best first.
    pub(super) prefixes: Vec<Candidate>,
    /// Prefixes beyond `--limit`.
    pub(super) more: usize,
    /// Skipped /24s and /48s, because an entry covers them by now.
    pub(super) covered: usize,
    /// Skipped loopback, link-local, multicast and reserved prefixes.
    pub(super) special: usize,
    /// Policies for the configuration, for the prefixes above that would save time; absent if none
    /// would.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) snippet: Option<String>,
    /// Reasons not to follow the suggestion.
    pub(super) warnings: Vec<String>,
    /// Explanations of the answer.
    pub(super) notes: Vec<String>,
}

/// A prefix without an entry.
#[derive(Debug, Serialize)]
pub(super) struct Candidate {
    pub(super) cidr: Cidr,
    /// Whether the prefix is a route's destination.
    pub(super) is_route: bool,
    /// The number of /24s or /48s in it with a connection.
    pub(super) seen: usize,
    /// Connections established (estimate).
    pub(super) connections: u64,
    /// Connections among these that lost a SYN or SYN-ACK (estimate).
    pub(super) lost: u64,
    /// Handshake times that were counted, and how many more a suggestion needs.
    pub(super) samples: u64,
    pub(super) missing: u64,
    /// Median and 99.9 % quantile of the handshake times, microseconds, as upper bounds of
    /// histogram buckets; null: no samples, or beyond the last bound.
    pub(super) p50_us: Option<u64>,
    pub(super) p999_us: Option<u64>,
    /// An upper bound of the 99.9 % quantile at 95 % confidence, microseconds; null: too few
    /// samples.
    pub(super) p999_at_most_us: Option<u64>,
    /// The timer that the times allow, microseconds; null: too few samples, or not shorter than the
    /// kernel's.
    pub(super) initial_rto_us: Option<u64>,
    /// The time it would save per day, seconds (estimate). One end assumes that all losses belong
    /// to outages, the other that losses are independent.
    pub(super) saved_s_per_day: Saved,
}

/// A range that includes the uncertainty of the counts.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Saved {
    pub(super) outages: f64,
    pub(super) independent: f64,
}
