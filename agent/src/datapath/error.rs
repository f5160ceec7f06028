//! What can go wrong between the daemon and the kernel, and what to do about it.

use std::{io, path::PathBuf};

use rto_agent_common::MAX_POLICIES;

use crate::policy::{Cidr, PolicyName};

/// An error of the datapath. The text says what failed and how to mend it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatapathError {
    /// The pin directory cannot be used.
    #[error(
        "cannot use {path} for pins: {reason}; it must lie on a BPF file system that root can \
         write (mount -t bpf bpf /sys/fs/bpf)"
    )]
    PinDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// The object could not be loaded.
    #[error("the kernel did not take the eBPF program: {0}")]
    Load(String),
    /// The link could not be made.
    #[error("cannot attach to {cgroup}: {reason}")]
    Attach {
        /// The cgroup.
        cgroup: PathBuf,
        /// Why, and how to mend it.
        reason: String,
    },
    /// A pin could not be made, moved or removed.
    #[error("pin {path}: {reason}")]
    Pin {
        /// The pin.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A map could not be read or opened.
    #[error("map {map}: {reason}")]
    Map {
        /// Its name.
        map: &'static str,
        /// Why.
        reason: String,
    },
    /// An entry could not be written or removed.
    #[error("entry {cidr}: {reason}")]
    Entry {
        /// The entry.
        cidr: Cidr,
        /// Why.
        reason: String,
    },
    /// An entry names a policy that has no slot.
    #[error("entry {cidr} names policy {policy}, which the kernel does not hold")]
    UnknownPolicy {
        /// The entry.
        cidr: Cidr,
        /// The policy.
        policy: PolicyName,
    },
    /// All slots for policies are taken.
    #[error(
        "no slot left for policy {0}: the kernel's table holds {max} policies; use fewer distinct settings",
        max = MAX_POLICIES - 1
    )]
    PolicyTableFull(PolicyName),
}

/// [`DatapathError::Map`].
pub(super) fn map(map: &'static str, reason: String) -> DatapathError {
    DatapathError::Map { map, reason }
}
