//! `GET /v1/stats`: counters of policies, by arm and by the direction of connections.
//!
//! `counters!` is the only table of counters. A row defines the field of the JSON, of
//! [`DirectionStats`] and of the kernel's [`rto_agent_common::Counters`], the metric, and the name
//! in `rto-agent stats`. `by` is the function of [`Statistics`] that computes a field which is not
//! a counter of the kernel.

use std::collections::BTreeMap;

use rto_agent_common::{RTO_STEPS, SOCKET_OPTIONS, Statistics, arm};
use serde::{Deserialize, Serialize};

use super::{histogram::HistogramView, holdout::HoldoutView};
use crate::policy::{PolicyName, Share};

/// Statistics of a policy in each arm, indexed by [`rto_agent_common::direction::ALL`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArmStatistics {
    /// Statistics of connections that have its settings.
    pub treated: [Statistics; 3],
    /// Statistics of connections with the kernel's own timers; `None` if there is no control arm.
    pub control: Option<[Statistics; 3]>,
}

/// The answer. Counts start at zero with the policy (or the boot) and only grow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StatsAnswer {
    /// When, Unix milliseconds.
    pub at_ms: u64,
    /// Whether anything is counted (`statistics` in `[agent]`).
    pub on: bool,
    /// 1 in this many loss-free connections is sampled until it closes (`sampling` in `[agent]`),
    /// and counts for all of them in `srtt` and `aborted`. Every connection counts in
    /// `connect_time` and `path_rtt`.
    pub sampling: u32,
    /// When smoothed RTTs are sampled (`rtt_sampling` in `[agent]`): "off", "end" or a duration.
    pub rtt_sampling: String,
    /// By policy; "unmatched" has the connections that no entry covers, if they are counted
    /// (`count_unmatched`).
    pub policies: BTreeMap<PolicyName, PolicyStats>,
}

/// Statistics of one policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PolicyStats {
    /// When counting began, Unix milliseconds; absent for a policy that learns nothing and has no guard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// The description from its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Connections that have its settings: all, if it has no control arm.
    #[serde(flatten)]
    pub treated: ArmStats,
    /// Share of connections in its control arm; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holdout: Option<Share>,
    /// Connections of its control arm, which keep the kernel's own timers; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<ArmStats>,
    /// The connects of both arms since the policy has these settings and this holdout, and what
    /// they prove; absent without a control arm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<HoldoutView>,
}

impl PolicyStats {
    /// Whether nothing was counted in either arm.
    pub fn is_empty(&self) -> bool {
        self.arms().all(|(_, stats)| *stats == ArmStats::default())
    }

    /// The arms that exist.
    pub fn arms(&self) -> impl Iterator<Item = (Arm, &ArmStats)> {
        let control = self.control.iter().map(|stats| (Arm::Control, stats));
        std::iter::once((Arm::Treated, &self.treated)).chain(control)
    }

    /// The title of the control arm, if there is one: "control (5%)".
    pub fn control_title(&self) -> Option<String> {
        let control = Arm::Control;
        self.control.as_ref()?;
        Some(match self.holdout {
            Some(share) => format!("{control} ({share})"),
            None => control.to_string(),
        })
    }

    /// The growth since an earlier answer; the verdict is the present one.
    pub fn since(&self, earlier: &Self) -> Self {
        let none = ArmStats::default();
        let before = earlier.control.as_ref().unwrap_or(&none);
        Self {
            since_ms: None,
            description: self.description.clone(),
            treated: self.treated.since(&earlier.treated),
            holdout: self.holdout,
            control: self.control.as_ref().map(|now| now.since(before)),
            verdict: self.verdict.clone(),
        }
    }
}

/// From this share of connections with a spurious SYN or SYN-ACK, an initial RTO is too short for
/// its path.
pub const TOO_MANY_SPURIOUS: f64 = 0.01;

impl From<&ArmStatistics> for PolicyStats {
    /// Without `holdout`, as the kernel does not count the share.
    fn from(statistics: &ArmStatistics) -> Self {
        Self {
            since_ms: None,
            treated: (&statistics.treated).into(),
            control: statistics.control.as_ref().map(Into::into),
            ..Self::default()
        }
    }
}

impl From<ArmStats> for PolicyStats {
    /// The statistics of a policy without a control arm.
    fn from(treated: ArmStats) -> Self {
        Self {
            treated,
            ..Self::default()
        }
    }
}

/// An arm of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Connections that have its settings.
    #[default]
    Treated,
    /// Connections with the kernel's own timers.
    Control,
}

impl Arm {
    /// Whether it is the treated arm.
    pub fn is_treated(&self) -> bool {
        *self == Self::Treated
    }

    /// The arm with this number in the program.
    pub const fn of(arm: u32) -> Self {
        match arm::is_control(arm) {
            true => Self::Control,
            false => Self::Treated,
        }
    }
}

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Treated => "treated",
            Self::Control => "control",
        })
    }
}

/// One arm's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ArmStats {
    /// Connections this host opens.
    pub active: DirectionStats,
    /// Connections it accepts.
    pub passive: DirectionStats,
    /// Sockets that were open before their policy: it is unknown which side opened them.
    pub unknown: DirectionStats,
}

impl ArmStats {
    /// The directions and their names.
    pub fn directions(&self) -> [(&'static str, &DirectionStats); 3] {
        [
            ("active", &self.active),
            ("passive", &self.passive),
            ("unknown", &self.unknown),
        ]
    }

    /// The growth since an earlier answer.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            active: self.active.since(&earlier.active),
            passive: self.passive.since(&earlier.passive),
            unknown: self.unknown.since(&earlier.unknown),
        }
    }

    /// The sum of all directions.
    pub fn total(&self) -> DirectionStats {
        self.active.plus(&self.passive).plus(&self.unknown)
    }
}

impl From<&[Statistics; 3]> for ArmStats {
    fn from([active, passive, unknown]: &[Statistics; 3]) -> Self {
        Self {
            active: active.into(),
            passive: passive.into(),
            unknown: unknown.into(),
        }
    }
}

/// The connections that a counter is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Handshakes, which are unknown for sockets that were open before their policy.
    Handshakes,
    /// Established connections.
    Connections,
}

/// A counter, for output that includes all.
#[derive(Debug)]
pub struct Counter {
    /// The metric's name, without prefix and unit.
    pub metric: &'static str,
    /// The metric's help.
    pub help: &'static str,
    /// The connections that it is about.
    pub scope: Scope,
    /// Whether it is a sum of times in microseconds; the metric is in seconds.
    pub is_time: bool,
    /// Its title in `rto-agent stats --policy`; `None` if it is a column of the table instead.
    pub title: Option<&'static str>,
    /// Reads the counter.
    pub value: fn(&DirectionStats) -> u64,
}

macro_rules! counters {
    (
        $($(#[doc = $doc:literal])+ $field:ident: $metric:literal, $scope:ident
            $(, time $time:literal)? $(, title $title:literal)? $(, by $of:path)?;)*
    ) => {
        /// Statistics of one direction. Fields as in [`rto_agent_common::Counters`].
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(default)]
        pub struct DirectionStats {
            $($(#[doc = $doc])+ pub $field: u64,)*
            /// bpf_setsockopt calls that the kernel refused, by option; zeros are omitted.
            pub setsockopt_failures: BTreeMap<String, u64>,
            /// Retransmission timeouts, by the number of consecutive timeouts before them without
            /// an answer: 0, 1, ... 6, and 7 or more.
            pub rtos: [u64; RTO_STEPS],
            /// Connect times: from the first SYN to ESTABLISHED, losses included. (Of accepted connections the first
            /// SYN-ACK is not seen: the last round trip of the handshake.)
            pub connect_time: HistogramView,
            /// Path RTTs: round-trip times of handshakes, without their losses.
            pub path_rtt: HistogramView,
            /// Smoothed round-trip times.
            pub srtt: HistogramView,
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
                    $($field: f(self.$field, other.$field),)*
                    setsockopt_failures: failures,
                    rtos: std::array::from_fn(|i| f(self.rtos[i], other.rtos[i])),
                    connect_time: self.connect_time.with(&other.connect_time, f),
                    path_rtt: self.path_rtt.with(&other.path_rtt, f),
                    srtt: self.srtt.with(&other.srtt, f),
                }
            }
        }

        impl From<&Statistics> for DirectionStats {
            fn from(statistics: &Statistics) -> Self {
                let c = &statistics.counters;
                let failures = SOCKET_OPTIONS
                    .iter()
                    .map(|row| (row.name, c.setsockopt_failures[row.option as usize]))
                    .filter(|(_, count)| *count > 0)
                    .map(|(name, count)| (name.to_owned(), count));
                Self {
                    $($field: counted!(statistics, $field $(, $of)?),)*
                    setsockopt_failures: failures.collect(),
                    rtos: c.rtos,
                    connect_time: (&statistics.connect_times()).into(),
                    path_rtt: (&statistics.path_rtt).into(),
                    srtt: (&statistics.srtt).into(),
                }
            }
        }

        /// All counters.
        pub const COUNTERS: &[Counter] = &[
            $(Counter {
                metric: $metric,
                help: concat!($($doc),+).trim_ascii(),
                scope: Scope::$scope,
                is_time: optional!($($time)?).is_some(),
                title: optional!($($title)?),
                value: |stats| stats.$field,
            },)*
        ];
    };
}

macro_rules! counted {
    ($statistics:ident, $field:ident) => {
        $statistics.counters.$field
    };
    ($statistics:ident, $field:ident, $of:path) => {
        $of($statistics)
    };
}

macro_rules! optional {
    () => {
        None::<&'static str>
    };
    ($value:literal) => {
        Some($value)
    };
}

impl DirectionStats {
    /// Attempts for connections that this host opens, otherwise connections.
    pub fn connects(&self, direction: &str) -> u64 {
        match direction {
            "active" => self.attempts,
            _ => self.connections,
        }
    }

    /// [`Self::connects`] that were not established within 500 ms, including attempts that are
    /// still in progress.
    pub fn bad(&self, direction: &str) -> u64 {
        self.connects(direction).saturating_sub(self.good_attempts)
    }
}

fn good_attempts(statistics: &Statistics) -> u64 {
    statistics
        .connections()
        .saturating_sub(statistics.counters.late)
}

counters! {
    /// Attempts: connect() calls whose first SYN was sent (active), connection requests of covered peers that were answered (passive)
    attempts: "attempts", Handshakes, title "attempts";
    /// Attempts established within 500 ms of their first SYN; the others are bad (of accepted connections: whose last round trip took no longer)
    good_attempts: "good_attempts", Handshakes, title "established within 500ms", by good_attempts;
    /// Connections established, by connect() (active) and accept() (passive)
    connections: "connections", Handshakes, by Statistics::connections;
    /// SYNs (active) and SYN-ACKs (passive) retransmitted
    handshake_retransmissions: "handshake_retransmissions", Handshakes;
    /// Of these, spurious: the answer to an earlier SYN or SYN-ACK was already on its way
    spurious: "spurious_handshake_retransmissions", Handshakes;
    /// Of these, undecided: unknown whether they were needed
    undecided: "undecided_handshake_retransmissions", Handshakes;
    /// Connections with a spurious retransmission in their handshake
    spurious_connections: "spurious_connections", Handshakes, title "with a spurious SYN or SYN-ACK";
    /// Connections that were established thanks to a needed retransmission
    recovered: "recovered_handshakes", Handshakes;
    /// Time by which connections were established earlier than with the kernel's own timers
    /// (estimate)
    time_saved_us: "handshake_time_saved", Handshakes, time "us";
    /// Time by which connections were established later than with the kernel's own timers
    /// (estimate)
    time_lost_us: "handshake_time_lost", Handshakes, time "us";
    /// Connections established after a SYN or its answer was retransmitted
    retransmitted_handshakes: "retransmitted_handshakes", Handshakes, title "established after a retransmission";
    /// Connections that started with the kernel's own timer because of a fallback
    fallbacks: "fallback_connections", Handshakes, title "in fallback";
    /// Tail loss probes that retransmitted a segment
    tail_loss_probes: "tail_loss_probes", Connections, title "tail loss probes";
    /// Segments retransmitted by established connections, without tail loss probes
    segments_retransmitted: "retransmitted_segments", Connections, title "segments retransmitted";
    /// Time by which established connections got an answer earlier than with the kernel's own rto_min
    data_time_saved_us: "data_time_saved", Connections, time "us";
    /// At most the time by which established connections got an answer later than with the kernel's own rto_min: whether
    /// the kernel's retransmission would have been lost as well is not known
    data_time_lost_us: "data_time_lost", Connections, time "us";
    /// Connections with a loss whose peer reported a duplicate segment (DSACK)
    dsack_connections: "dsack_connections", Connections, title "connections with a DSACK";
    /// Connections that ended before both sides had closed them
    aborted: "aborted_connections", Connections;
    /// Of these, connections with a loss: all of them, not only samples
    aborted_after_loss: "aborted_connections_after_loss", Connections, title "aborted after a loss";
    /// Of these, connections that ended at a retransmission timeout
    expired: "expired_connections", Connections, title "expired";
    /// Times linear mode was ended by linear_retries
    linear_ended: "linear_mode_ended", Connections, title "linear mode ended";
    /// Sockets that were already open when they got the policy
    open_sockets: "open_sockets", Connections, title "open sockets that got the policy";
    /// Connections whose state did not fit into memory: they lack options, or are counted only
    /// in part
    storage_failures: "storage_failures", Connections, title "storage failures";
    /// Connections with a loss that is not counted, because another sock_ops program overwrote their callbacks
    callbacks_lost: "connections_with_lost_callbacks", Connections, title "callbacks lost to another program";
}

impl DirectionStats {
    /// The sum of two.
    pub fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    /// The growth since an earlier answer.
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(connections: u64) -> [Statistics; 3] {
        let mut active = Statistics::default();
        active.counters.untimed = connections;
        active.counters.attempts = connections + 1;
        active.counters.late = 2;
        active.counters.spurious_connections = 3;
        active.counters.dsack_connections = 4;
        [active, Statistics::default(), Statistics::default()]
    }

    fn statistics(control: Option<[Statistics; 3]>) -> PolicyStats {
        let treated = counted(100);
        (&ArmStatistics { treated, control }).into()
    }

    #[test]
    fn control_arm_is_listed_with_its_policys_directions() {
        let stats = PolicyStats {
            holdout: "5%".parse().ok(),
            ..statistics(Some(counted(5)))
        };
        let json = serde_json::to_value(&stats).unwrap();
        assert_eq!(json["active"]["connections"], 100);
        assert_eq!(json["holdout"], "5%");
        let active = &json["control"]["active"];
        let counters = ["connections", "attempts", "good_attempts"];
        let more = ["spurious_connections", "dsack_connections"];
        let counts = counters.iter().chain(&more).map(|key| active[key].as_u64());
        assert_eq!(counts.collect::<Vec<_>>(), [5, 6, 3, 3, 4].map(Some));
        assert_eq!(serde_json::from_value::<PolicyStats>(json).unwrap(), stats);
    }

    #[test]
    fn absent_control_arm_is_omitted() {
        let stats = statistics(None);
        let json = serde_json::to_value(&stats).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["active", "passive", "unknown"]);
        assert_eq!(serde_json::from_value::<PolicyStats>(json).unwrap(), stats);
        assert_eq!(stats.control_title(), None);
    }

    #[test]
    fn sums_exclude_control_arm() {
        let stats = statistics(Some(counted(5)));
        assert_eq!(stats.treated.active.bad("active"), 3);
        // Failed attempts are known only for connections that this host opens.
        assert_eq!(stats.treated.active.bad("passive"), 2);
        let names: Vec<_> = stats.arms().map(|(arm, _)| arm.to_string()).collect();
        assert_eq!(names, ["treated", "control"]);
        // The share comes from the configuration, which is missing here.
        assert_eq!(stats.control_title().as_deref(), Some("control"));
    }
}
