//! The answer, as `--json` prints it.

use rto_model::{advice::Advice, distribution::Distribution};
use serde::Serialize;

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub struct Answer<S> {
    /// Where the evidence is from.
    pub source: S,
    /// Jiffies per second.
    pub hz: u32,
    /// The highest acceptable share of spurious retransmissions, 0 to 1.
    pub spurious: f64,
    /// How long the peers delay an ACK, microseconds.
    pub peer_delack_us: u64,
    /// The time observed, milliseconds, if known; for several hosts the shortest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_ms: Option<u64>,
    /// The observed times.
    pub evidence: Vec<Evidence>,
    /// The advice on the initial RTO.
    pub initial_rto: Decided,
    /// The advice on the minimum RTO.
    pub rto_min: Decided,
    /// For the configuration: the changed keys of a policy, or a new policy. Absent without a
    /// suggestion, or if `command` is present.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snippet: Option<String>,
    /// The command for a policy that only runtime entries use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Reasons not to follow the advice.
    pub warnings: Vec<String>,
    /// Explanations of the answer.
    pub notes: Vec<String>,
    /// Whether the snippet is a new policy.
    #[serde(skip)]
    pub is_new_policy: bool,
}

/// The advice for a setting.
#[derive(Debug, Serialize)]
pub struct Decided {
    /// "all", or the direction whose connections need the longest value.
    pub by: &'static str,
    /// The advice for them.
    #[serde(flatten)]
    pub advice: Advice,
}

/// One kind of times, in one direction.
#[derive(Debug, Serialize)]
pub struct Evidence {
    /// From the daemon: "connect_time" (including losses, for connections with the policy's
    /// settings), "path_rtt" (without losses, both arms) and "srtt" (smoothed RTT). From a capture:
    /// "handshake" (without losses), "unsampled" (how long a handshake without a round trip was
    /// waited for) and "rtt" (of each ACK).
    pub what: &'static str,
    /// "active", "passive" or "unknown".
    pub direction: &'static str,
    /// The number of samples.
    pub samples: u64,
    /// The median, microseconds. From a histogram quantiles are upper bounds of buckets, absent for
    /// the last bucket, which has none.
    pub p50_us: Option<u64>,
    /// The 90 % quantile.
    pub p90_us: Option<u64>,
    /// The 99 % quantile.
    pub p99_us: Option<u64>,
    /// The 99.9 % quantile.
    pub p999_us: Option<u64>,
    /// The longest time.
    pub longest_us: Option<u64>,
}

impl Evidence {
    fn of(what: &'static str, direction: &'static str, times: &Distribution) -> Self {
        let quantile = |share| times.quantile_us(share).filter(|us| *us < u64::MAX);
        Self {
            what,
            direction,
            samples: times.count(),
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            longest_us: quantile(1.0),
        }
    }

    /// The evidence of each direction with any times.
    pub fn rows(
        what: &'static str,
        directions: &[(&'static str, Distribution)],
    ) -> impl Iterator<Item = Self> {
        let with_any = directions.iter().filter(|(_, times)| times.count() > 0);
        with_any.map(move |(direction, times)| Self::of(what, direction, times))
    }
}
