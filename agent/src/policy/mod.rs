//! Policies, entries and what becomes of them on a host: `PolicySet`, units,
//! quantisation, and `Plan`, the difference of two states of the kernel's maps.
//!
//! Pure: no I/O here.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use rto_agent_common::HostDefaults;

mod cidr;
pub mod compile;
pub mod entries;
mod gain;
mod name;
pub mod plan;
pub mod predict;
mod target;
pub mod units;

pub use cidr::{Cidr, CidrError};
pub use entries::{Entries, EntryRef};
pub use name::{NameError, PolicyName};

/// What a policy sets. A field that is `None` leaves the kernel's own value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Timeout of the first SYN (RFC 6298 section 2.1), replacing TCP_TIMEOUT_INIT (1 s).
    pub initial_rto: Option<Duration>,
    /// Timeout of the first SYN-ACK.
    pub syn_ack_rto: SynAckRto,
    /// Lower bound of the RTO of an established connection (TCP_BPF_RTO_MIN).
    pub rto_min: Option<Duration>,
    /// rto_min less the smoothed RTT while fewer than four segments are outstanding: RTO restart (RFC
    /// 7765), as far as a program can do it. Needs `rto_min`.
    pub rto_restart: Option<bool>,
    /// Longest delay of an ACK (TCP_BPF_DELACK_MAX).
    pub delack_max: Option<Duration>,
    /// Linear instead of exponential backoff for thin streams (TCP_THIN_LINEAR_TIMEOUTS).
    pub thin_linear: Option<bool>,
    /// How many timeouts in a row keep their interval in linear mode, 1 to 6
    /// (TCP_THIN_LINEAR_RETRIES, the kernel's own, is 6); then it doubles.
    pub linear_retries: Option<u8>,
    /// Upper bound of any RTO (TCP_RTO_MAX_MS, Linux 6.15).
    pub rto_max: Option<Duration>,
    /// How long sent data may stay unacknowledged (TCP_USER_TIMEOUT).
    pub user_timeout: Option<Duration>,
    /// How many SYN retransmissions connect() makes before it gives up.
    pub syn_retries: SynRetries,
    /// Whether SYNs of MPTCP sockets get `initial_rto`.
    pub mptcp: Mptcp,
    /// Allows a short initial RTO on a very wide prefix.
    pub force: bool,
}

/// The `syn_retries` setting (TCP_SYNCNT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SynRetries {
    /// Raise it so that connect() gives up no sooner than with the kernel's own timers.
    #[default]
    Auto,
    /// Leave the socket's value: connect() gives up sooner in proportion to the initial RTO.
    Keep,
    /// This many, 1 to 127.
    Fixed(u8),
}

/// The `syn_ack_rto` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SynAckRto {
    /// As short as `initial_rto`, but no shorter than what keeps a half-open request for 31 s, or as long as
    /// the kernel's own timers do.
    #[default]
    Auto,
    /// The kernel's own.
    Keep,
    /// This, however soon a request ends by it.
    Fixed(Duration),
}

/// The `mptcp` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mptcp {
    /// SYNs of MPTCP sockets keep the kernel's timer: after a few timeouts the kernel falls back to TCP, and
    /// does without MPTCP for an hour (`net.mptcp.blackhole_timeout`).
    #[default]
    Keep,
    /// They get `initial_rto` as any other.
    Apply,
}

/// Where something was said, for messages: a file and a line (from 1).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The file.
    pub path: Arc<Path>,
    /// The line, from 1.
    pub line: usize,
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// A policy of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Its settings.
    pub settings: Settings,
    /// Where its settings stand; `None` for one made by `rto-agent add --initial-rto ...`.
    pub location: Option<Location>,
}

/// An entry of the configuration: a CIDR pointing at a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of its policy.
    pub policy: PolicyName,
    /// Where the CIDR stands; `None` for one added by hand.
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
    /// The entry a connection to an address takes, and its policy; `None` if none covers it.
    #[must_use]
    pub fn entry_for(&self, address: std::net::IpAddr) -> Option<(EntryRef<'_>, &Policy)> {
        let entry = self.entries.get(self.entries.covering(address).first()?)?;
        Some((entry, self.policies.get(entry.policy)?))
    }
}

/// What compiling a policy needs to know of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
    /// Whether TCP_RTO_MAX_MS exists (Linux 6.15).
    pub has_rto_max: bool,
    /// Whether bpf_setsockopt takes TCP_THIN_LINEAR_TIMEOUTS (Linux 6.1).
    pub has_bpf_thin_linear: bool,
}

impl HostFacts {
    /// The SYN-ACK retransmissions to reckon with where the program cannot read them: those of this
    /// namespace, but no more than the kernel's default, which every new namespace begins with.
    #[must_use]
    pub fn syn_ack_retries(&self) -> u8 {
        const TCP_SYNACK_RETRIES: u8 = 5;
        match self.reads_listener {
            true => self.tcp_synack_retries,
            false => self.tcp_synack_retries.min(TCP_SYNACK_RETRIES),
        }
    }

    /// What the program goes by where it cannot ask the socket.
    #[must_use]
    pub fn defaults(&self) -> HostDefaults {
        let without = Self {
            reads_listener: false,
            ..*self
        };
        HostDefaults {
            syn_retries: self.tcp_syn_retries.into(),
            syn_ack_retries: without.syn_ack_retries().into(),
        }
    }
}
