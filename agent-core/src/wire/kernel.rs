//! The state of the kernel as the datapath and the probes report it.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::printable;

/// Whether the kernel has a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// It works.
    Present,
    /// This kernel does not have it.
    Absent,
    /// Lockdown, an LSM or missing privileges deny access; the kernel may have it.
    Refused,
    /// It could not be determined.
    Unknown,
}

/// A kernel feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// First mainline version with the feature.
    pub since: String,
    /// Whether the kernel has the feature.
    pub presence: Presence,
    /// Whether the agent cannot run without the feature.
    pub required: bool,
    /// The settings that depend on the feature.
    pub settings: Vec<String>,
    /// What depends on the feature, in words.
    pub needed_for: String,
    /// How this was determined.
    pub evidence: String,
}

/// Result of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "verdict", rename_all = "kebab-case")]
pub enum Verdict {
    /// The kernel chose the policy's timer.
    Good {
        /// The address probed.
        address: IpAddr,
        /// The initial RTO, microseconds.
        initial_rto_us: u64,
    },
    /// The kernel chose another timer: another program interferes.
    Interference {
        /// The address probed.
        address: IpAddr,
        /// The policy's initial RTO, microseconds.
        expected_us: u64,
        /// The initial RTO that the kernel chose, microseconds.
        found_us: u64,
    },
    /// The probe has no result.
    NotProbed {
        /// Why.
        reason: String,
    },
}

impl Verdict {
    /// The verdict as a sentence.
    pub fn describe(&self) -> String {
        let text = |us: u64| humantime::format_duration(Duration::from_micros(us)).to_string();
        match self {
            Self::Good {
                address,
                initial_rto_us,
            } => format!(
                "good: a connection to {address} started with {}",
                text(*initial_rto_us)
            ),
            Self::Interference {
                address,
                expected_us,
                found_us,
            } => format!(
                "INTERFERENCE: a connection to {address} started with {} instead of {}",
                text(*found_us),
                text(*expected_us)
            ),
            Self::NotProbed { reason } => {
                format!("not probed: {reason} (rto-agent doctor, run as root, also probes)")
            }
        }
    }
}

/// What the start found of an earlier run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// Nothing: the maps and the program are new.
    #[default]
    Nothing,
    /// The same program, still attached: adopted unchanged.
    Adopted,
    /// Maps of the same layout: kept, with a new program.
    MapsKept,
    /// Only pins of another layout: replaced.
    Replaced,
}

/// Whether the program is attached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Attachment {
    /// The kernel lists the program at the cgroup, and each pin refers to the expected object.
    pub attached: bool,
    /// What is wrong, if anything.
    pub problem: Option<String>,
    /// The cgroup.
    #[serde(serialize_with = "printable::serialize_path")]
    pub cgroup: PathBuf,
    /// The cgroup is the root of the hierarchy: every socket of the host is covered.
    pub is_root: bool,
    /// The kernel's id of the program.
    pub program_id: Option<u32>,
    /// When accepted sockets get `rto_min`; absent while nothing is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<RtoMinTiming>,
}

/// When accepted sockets get `rto_min`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "when", rename_all = "kebab-case")]
pub enum RtoMinTiming {
    /// Before their first RTT sample, by `lsm_cgroup/inet_csk_clone`: the RTO is correct from the
    /// start.
    BeforeFirstSample,
    /// When they are established, after that sample: the RTO falls to the new minimum by a quarter
    /// of the excess per round trip.
    AfterFirstSample {
        /// Why it cannot be set earlier.
        reason: String,
    },
}

/// Pins that were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Removed {
    /// Generations of pins.
    #[serde(serialize_with = "printable::serialize_paths")]
    pub generations: Vec<PathBuf>,
    /// Number of these that contained a link.
    pub links: usize,
    /// Files in the directory that do not belong to rto-agent and were left in place.
    #[serde(serialize_with = "printable::serialize_paths")]
    pub left: Vec<PathBuf>,
}
