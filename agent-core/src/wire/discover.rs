//! `GET /v1/discover`: connections that no entry covers, by prefix.

use serde::{Deserialize, Serialize};

use super::histogram::HistogramView;
use crate::policy::Cidr;

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DiscoverAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Since when they are counted, Unix milliseconds.
    pub since_ms: u64,
    /// 1 in this many connections is counted.
    pub one_in: u32,
    /// Prefixes that are left out because an entry now covers them.
    pub covered: usize,
    /// The others, in order.
    pub prefixes: Vec<PrefixStats>,
}

/// Counts of one prefix: a /24 of IPv4, or a /48 of IPv6.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PrefixStats {
    /// The prefix.
    pub prefix: Cidr,
    /// Connections established, of one in `one_in`.
    pub connections: u64,
    /// Of these, connections with a retransmitted SYN or SYN-ACK. Nearly always one was lost, because the timer is 1 s.
    pub recovered: u64,
    /// Durations of loss-free handshakes.
    pub handshake: HistogramView,
}
