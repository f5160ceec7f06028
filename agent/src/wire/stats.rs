//! `GET /v1/stats`: what policies did, by who began the connections.
//!
//! `counters!` is the one table of the counters: a row gives the field of the JSON, of [`DirectionStats`] and of
//! the kernel's [`rto_agent_common::Counters`], the metric, and what `rto-agent stats` calls it.

use std::collections::BTreeMap;

use rto_agent_common::{RTO_STEPS, SockOpt, Statistics};
use serde::{Deserialize, Serialize};

use super::histogram::HistogramView;
use crate::policy::PolicyName;

/// The answer. Counts begin with the policy (or the boot) and only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StatsAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Whether anything is counted (`statistics` in `[agent]`).
    pub on: bool,
    /// Of so many connections of which nothing was lost one is measured to its end (`sampling` in `[agent]`); it counts
    /// for all of them in `handshake`, `srtt` and `aborted`.
    #[serde(default = "all_connections")]
    pub sampling: u32,
    /// When smoothed RTTs are sampled (`rtt_sampling` in `[agent]`): "off", "end" or a duration.
    pub rtt_sampling: String,
    /// By policy; "unmatched" is what no entry covers, where that is counted (`count_unmatched`).
    pub policies: BTreeMap<PolicyName, PolicyStats>,
}

/// What an agent did that knew no `sampling`.
fn all_connections() -> u32 {
    1
}

/// One policy's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PolicyStats {
    /// Connections this host opens.
    pub active: DirectionStats,
    /// Connections it accepts.
    pub passive: DirectionStats,
    /// Sockets that were open before their policy: who began them is not known.
    pub unknown: DirectionStats,
}

impl PolicyStats {
    /// Each with its name.
    pub fn directions(&self) -> [(&'static str, &DirectionStats); 3] {
        [
            ("active", &self.active),
            ("passive", &self.passive),
            ("unknown", &self.unknown),
        ]
    }

    /// What was counted since an earlier answer.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            active: self.active.since(&earlier.active),
            passive: self.passive.since(&earlier.passive),
            unknown: self.unknown.since(&earlier.unknown),
        }
    }

    /// All directions together.
    pub fn total(&self) -> DirectionStats {
        self.active.plus(&self.passive).plus(&self.unknown)
    }
}

impl From<&[Statistics; 3]> for PolicyStats {
    fn from([active, passive, unknown]: &[Statistics; 3]) -> Self {
        Self {
            active: active.into(),
            passive: passive.into(),
            unknown: unknown.into(),
        }
    }
}

/// Which connections a counter concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Their handshakes: of sockets that were open before their policy they are not known.
    Handshakes,
    /// Established ones.
    Connections,
}

/// One counter, for those who show all.
#[derive(Debug)]
pub struct Counter {
    /// The metric, without prefix and unit.
    pub metric: &'static str,
    /// The metric's help.
    pub help: &'static str,
    /// What it concerns.
    pub scope: Scope,
    /// Whether it is a sum of times in microseconds, which the metric has in seconds.
    pub is_time: bool,
    /// What `rto-agent stats --policy` calls it; `None` for what stands in the table above that.
    pub title: Option<&'static str>,
    /// The counter itself.
    pub value: fn(&DirectionStats) -> u64,
}

macro_rules! counters {
    (
        by_direction { $($(#[doc = $split_doc:literal])+ $split:ident: $split_metric:literal, $split_scope:ident
            $(, title $split_title:literal)?;)* }
        total { $($(#[doc = $doc:literal])+ $field:ident: $metric:literal, $scope:ident
            $(, time $time:literal)? $(, title $title:literal)?;)* }
    ) => {
        /// One direction's. Fields as in [`rto_agent_common::Counters`].
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(default)]
        pub struct DirectionStats {
            $($(#[doc = $split_doc])+ pub $split: u64,)*
            $($(#[doc = $doc])+ pub $field: u64,)*
            /// bpf_setsockopt calls the kernel refused, by option; only those that happened.
            pub setsockopt_failures: BTreeMap<String, u64>,
            /// Retransmission timeouts by how many came right before without an answer: 0, 1, ... 6, and 7 or
            /// more.
            pub rtos: [u64; RTO_STEPS],
            /// How long handshakes took.
            pub handshake: HistogramView,
            /// Smoothed round-trip times.
            pub srtt: HistogramView,
        }

        /// What a policy did since its counters began, in `GET /v1/status`: a short form of [`PolicyStats`].
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(default)]
        pub struct CountersView {
            /// Initial RTOs set on connecting sockets.
            pub syn_timeouts_set: u64,
            /// Initial RTOs set on connection requests.
            pub syn_ack_timeouts_set: u64,
            /// Connections established by connect().
            pub established_active: u64,
            /// Connections established by accept().
            pub established_passive: u64,
            /// SYNs retransmitted.
            pub syn_retransmissions: u64,
            /// SYN-ACKs retransmitted before a connection was established.
            pub syn_ack_retransmissions: u64,
            $($(#[doc = $doc])+ pub $field: u64,)*
            /// bpf_setsockopt calls the kernel refused, by option; only those that happened.
            pub setsockopt_failures: BTreeMap<String, u64>,
            /// As [`DirectionStats::rtos`].
            pub rtos: [u64; RTO_STEPS],
        }

        impl From<&PolicyStats> for CountersView {
            fn from(stats: &PolicyStats) -> Self {
                let (active, passive, all) = (&stats.active, &stats.passive, stats.total());
                Self {
                    syn_timeouts_set: active.initial_rtos_set,
                    syn_ack_timeouts_set: passive.initial_rtos_set,
                    established_active: active.connections,
                    established_passive: passive.connections,
                    syn_retransmissions: active.handshake_retransmissions,
                    syn_ack_retransmissions: passive.handshake_retransmissions,
                    $($field: all.$field,)*
                    setsockopt_failures: all.setsockopt_failures,
                    rtos: all.rtos,
                }
            }
        }

        impl DirectionStats {
            fn with(&self, other: &Self, f: impl Fn(u64, u64) -> u64 + Copy) -> Self {
                let mut failures = self.setsockopt_failures.clone();
                for (option, count) in &other.setsockopt_failures {
                    let sum = failures.entry(option.clone()).or_default();
                    *sum = f(*sum, *count);
                }
                failures.retain(|_, count| *count > 0);
                Self {
                    $($split: f(self.$split, other.$split),)*
                    $($field: f(self.$field, other.$field),)*
                    setsockopt_failures: failures,
                    rtos: std::array::from_fn(|i| f(self.rtos[i], other.rtos[i])),
                    handshake: self.handshake.with(&other.handshake, f),
                    srtt: self.srtt.with(&other.srtt, f),
                }
            }
        }

        impl From<&Statistics> for DirectionStats {
            fn from(statistics: &Statistics) -> Self {
                let c = &statistics.counters;
                let failures = SockOpt::NAMES
                    .iter()
                    .map(|(option, name)| ((*name).to_owned(), c.setsockopt_failures[*option as usize]))
                    .filter(|(_, count)| *count > 0);
                Self {
                    $($split: c.$split,)*
                    $($field: c.$field,)*
                    setsockopt_failures: failures.collect(),
                    rtos: c.rtos,
                    handshake: (&statistics.handshake).into(),
                    srtt: (&statistics.srtt).into(),
                }
            }
        }

        /// All of them.
        pub const COUNTERS: &[Counter] = &[
            $(Counter {
                metric: $split_metric,
                help: concat!($($split_doc),+).trim_ascii(),
                scope: Scope::$split_scope,
                is_time: false,
                title: optional!($($split_title)?),
                value: |stats| stats.$split,
            },)*
            $(Counter {
                metric: $metric,
                help: concat!($($doc),+).trim_ascii(),
                scope: Scope::$scope,
                is_time: is_time!($($time)?),
                title: optional!($($title)?),
                value: |stats| stats.$field,
            },)*
        ];
    };
}

macro_rules! optional {
    () => {
        None
    };
    ($value:literal) => {
        Some($value)
    };
}

macro_rules! is_time {
    () => {
        false
    };
    ($unit:literal) => {
        true
    };
}

counters! {
    by_direction {
        /// Initial RTOs set, on connecting sockets (active) and on connection requests (passive)
        initial_rtos_set: "initial_rto_set", Handshakes, title "initial RTOs set";
        /// Connections established, by connect() (active) and accept() (passive)
        connections: "connections", Handshakes;
        /// SYNs (active) and SYN-ACKs (passive) retransmitted
        handshake_retransmissions: "handshake_retransmissions", Handshakes;
    }
    total {
        /// Of these, spurious ones: the answer to an earlier copy was on its way
        spurious: "spurious_handshake_retransmissions", Handshakes;
        /// Of these, those of which it could not be told whether they were needed
        undecided: "undecided_handshake_retransmissions", Handshakes;
        /// Connections that a needed retransmission brought about
        recovered: "recovered_handshakes", Handshakes;
        /// By how much sooner these were established than with the kernel's own timers (estimate)
        time_saved_us: "handshake_time_saved", Handshakes, time "us";
        /// By how much later, where a policy's timers are longer (estimate)
        time_lost_us: "handshake_time_lost", Handshakes, time "us";
        /// Tail loss probes that retransmitted a segment
        tail_loss_probes: "tail_loss_probes", Connections, title "tail loss probes";
        /// Segments retransmitted by established connections, other than by a tail loss probe
        segments_retransmitted: "retransmitted_segments", Connections, title "segments retransmitted";
        /// Connections that ended without both sides having finished
        aborted: "aborted_connections", Connections;
        /// Of these, connections given up at a retransmission timeout
        expired: "expired_connections", Connections, title "expired";
        /// Times linear mode was ended by linear_retries
        linear_ended: "linear_mode_ended", Connections, title "linear mode ended";
        /// Sockets that were open already and got the policy
        open_sockets: "open_sockets", Connections, title "open sockets taken over";
        /// Connections for whose state memory was short: they lack options, or are not counted in full
        storage_failures: "storage_failures", Connections, title "storage failures";
    }
}

impl DirectionStats {
    /// The sum of two.
    pub fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    /// What was counted since an earlier answer.
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }
}
