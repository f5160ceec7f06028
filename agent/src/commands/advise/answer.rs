//! The advice for a policy.

use rto_advice::advice::Advice;
use serde::Serialize;

use super::evidence::{Evidence, Source};

/// The most CIDRs that are written out.
pub(super) const CIDRS_SHOWN: usize = 8;

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    /// Where the evidence is from.
    pub(super) source: Source,
    /// Jiffies per second.
    pub(super) hz: u32,
    /// The highest acceptable share of spurious retransmissions, 0 to 1.
    pub(super) spurious: f64,
    /// How long the peers delay an ACK, microseconds.
    pub(super) peer_delack_us: u64,
    /// The time observed, milliseconds, if known; for several hosts the shortest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) observed_ms: Option<u64>,
    /// The observed times.
    pub(super) evidence: Vec<Evidence>,
    /// The advice, and the direction that determines it.
    pub(super) initial_rto: Decided,
    pub(super) rto_min: Decided,
    /// For the configuration: the changed keys of a policy, or a new policy. Absent without a
    /// suggestion, or if `command` is present.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) snippet: Option<String>,
    /// The command for a policy that only runtime entries use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) command: Option<String>,
    /// Reasons not to follow the advice.
    pub(super) warnings: Vec<String>,
    /// Explanations of the answer.
    pub(super) notes: Vec<String>,
}

/// The advice for a setting.
#[derive(Debug, Serialize)]
pub(super) struct Decided {
    /// "all", or the direction whose connections need the longest value.
    pub(super) by: &'static str,
    #[serde(flatten)]
    pub(super) advice: Advice,
}
