//! Policies, entries and their effect on a host: `PolicySet`, units, quantisation, and `Plan`, the
//! difference of two states of the kernel's maps.
//!
//! Pure: no I/O here.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use rto_agent_common::{HostDefaults, MAX_POLICIES, syn};
use rto_model::outage;

/// serde for a type in text form.
macro_rules! as_text {
    ($type:ty) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text: String = serde::Deserialize::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

mod adjustment;
mod cidr;
pub mod compile;
pub mod differences;
pub mod entries;
mod name;
pub mod plan;
mod remark;
mod settings;
mod share;
mod target;
pub mod units;

pub use adjustment::{Adjustment, Adjustments, InitialRto, Timer};
pub use cidr::{Cidr, CidrError};
pub use entries::{Entries, EntryRef};
pub use name::{NameError, PolicyName};
pub use remark::{Remark, Terms};
pub(crate) use settings::key;
pub use settings::{
    AutoInitialRto, Effect, Guard, InitialRtoSetting, Key, Mode, Mptcp, SETTINGS, Setting,
    Settings, SynAckRto, SynRetries, True,
};
pub use share::{Share, ShareError};
pub use target::ProbeTarget;

use crate::printable;

/// A location for messages: a file and a line (from 1).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The file.
    pub path: Arc<Path>,
    /// The line, from 1.
    pub line: usize,
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", printable::path(&self.path), self.line)
    }
}

/// A policy of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Its settings.
    pub settings: Settings,
    /// Its purpose, in the author's words.
    pub description: Option<String>,
    /// Where it is defined; `None` if made by `rto-agent add --initial-rto ...`.
    pub location: Option<Location>,
}

impl From<Settings> for Policy {
    /// A policy made by `rto-agent add`.
    fn from(settings: Settings) -> Self {
        Self {
            settings,
            ..Self::default()
        }
    }
}

/// An entry of the configuration: a CIDR pointing at a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of its policy.
    pub policy: PolicyName,
    /// Where the CIDR is listed; `None` for a runtime entry.
    pub location: Option<Location>,
}

/// All policies and entries that should be in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicySet {
    /// Policies by name.
    pub policies: BTreeMap<PolicyName, Policy>,
    /// Entries by CIDR; every `policy` in it is a key of `policies`.
    pub entries: Entries,
}

impl PolicySet {
    /// The entry and policy that apply to an address; `None` if no entry covers it.
    pub fn entry_for(&self, address: std::net::IpAddr) -> Option<(EntryRef<'_>, &Policy)> {
        let entry = self.entries.get(self.entries.covering(address).first()?)?;
        Some((entry, self.policies.get(entry.policy)?))
    }

    /// Checks that the set fits into the kernel's maps.
    ///
    /// # Errors
    ///
    /// If there are too many entries or policies: the number and the limit.
    pub fn check_size(&self) -> Result<(), String> {
        let sizes = [
            (self.entries.len(), MAX_ENTRIES_LIMIT, "entries"),
            (self.policies.len(), MAX_POLICIES, "policies"),
        ];
        for (number, limit, what) in sizes {
            if number > limit as usize {
                return Err(format!("{number} {what}: at most {limit} are possible"));
            }
        }
        Ok(())
    }
}

/// The largest value of `max_entries`.
pub const MAX_ENTRIES_LIMIT: u32 = 4 << 20;

/// Properties of the host that determine the effective values of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HostFacts {
    /// Jiffies a second (CONFIG_HZ), measured.
    pub hz: u32,
    /// `net.ipv4.tcp_syn_retries` of the daemon's network namespace.
    pub tcp_syn_retries: u8,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5, which has no linear phase.
    pub tcp_syn_linear_timeouts: u8,
    /// `net.ipv4.tcp_synack_retries` of the daemon's network namespace.
    pub tcp_synack_retries: u8,
    /// Whether the program can read a request's listener and its namespace (Linux 6.2).
    pub reads_listener: bool,
    /// Whether the program can read a socket's TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX (Linux 6.15).
    pub reads_timers: bool,
    /// Whether TCP_RTO_MAX_MS exists (Linux 6.15).
    pub has_rto_max: bool,
    /// Whether the program can shape the intervals between SYNs (`syn-schedule`).
    pub shapes_syns: bool,
    /// Whether bpf_setsockopt takes TCP_THIN_LINEAR_TIMEOUTS (Linux 6.1).
    pub has_bpf_thin_linear: bool,
    /// Whether BBR is the default congestion control of the daemon's network namespace: under it no stream is thin.
    pub is_bbr_default: bool,
}

impl HostFacts {
    /// The facts of other hosts: what this mainline kernel has, with BTF and its default sysctls.
    pub fn of_kernel(kernel: (u32, u32), hz: u32) -> Self {
        Self {
            hz,
            tcp_syn_retries: 6,
            tcp_synack_retries: 5,
            reads_listener: kernel >= (6, 2),
            reads_timers: kernel >= (6, 15),
            tcp_syn_linear_timeouts: if kernel >= (6, 5) { 4 } else { 0 },
            has_rto_max: kernel >= (6, 15),
            shapes_syns: true,
            has_bpf_thin_linear: kernel >= (6, 1),
            is_bbr_default: false,
        }
    }

    /// The SYN-ACK retransmissions to assume if the program cannot read them: this namespace's
    /// setting, but at most the kernel's default, which every new namespace starts with.
    pub fn syn_ack_retries(&self) -> u8 {
        const TCP_SYNACK_RETRIES: u8 = 5;
        match self.reads_listener {
            true => self.tcp_synack_retries,
            false => self.tcp_synack_retries.min(TCP_SYNACK_RETRIES),
        }
    }

    /// The host's settings that SYN schedules depend on.
    pub fn syn_schedule(&self) -> outage::Host {
        outage::Host {
            hz: self.hz.into(),
            linear_timeouts: self.tcp_syn_linear_timeouts,
            syn_retries: self.tcp_syn_retries,
        }
    }

    /// The SYN timers that result from an initial RTO, jiffies.
    pub const fn syn_timers(&self, initial_rto: u64) -> outage::Timers {
        if self.shapes_syns {
            outage::Timers::Scheduled(initial_rto)
        } else {
            outage::Timers::Doubling(initial_rto)
        }
    }

    /// The jiffies of a configured initial RTO: at least what keeps two SYNs ten milliseconds apart.
    pub fn initial_rto(&self, asked: Duration) -> u64 {
        let least = syn::least_initial_rto(self.hz);
        units::quantise(asked, self.hz).jiffies.max(least.into())
    }

    /// The values that the program assumes where it cannot read the socket's.
    pub fn defaults(&self) -> HostDefaults {
        let without = Self {
            reads_listener: false,
            ..*self
        };
        HostDefaults {
            syn_retries: self.tcp_syn_retries.into(),
            syn_linear_timeouts: self.tcp_syn_linear_timeouts.into(),
            syn_ack_retries: without.syn_ack_retries().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::HOST;

    /// A listener in another namespace starts with the kernel's default.
    #[test]
    fn unreadable_listener_assumes_default_syn_ack_retries() {
        for (here, unread) in [(3, 3), (5, 5), (9, 5)] {
            let host = HostFacts {
                tcp_synack_retries: here,
                reads_listener: true,
                ..HOST
            };
            assert_eq!(host.syn_ack_retries(), here);
            let blind = HostFacts {
                reads_listener: false,
                ..host
            };
            assert_eq!(blind.syn_ack_retries(), unread);
            let defaults = host.defaults();
            assert_eq!(defaults.syn_ack_retries, u32::from(unread));
            assert_eq!(defaults.syn_retries, u32::from(HOST.tcp_syn_retries));
        }
    }

    #[test]
    fn location_shows_file_and_line() {
        let location = Location {
            path: Path::new("/etc/rto-agent/config.toml").into(),
            line: 7,
        };
        assert_eq!(location.to_string(), "/etc/rto-agent/config.toml:7");
    }
}
