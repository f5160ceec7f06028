//! What the agent uses of the kernel, and since when it is there.

use serde::Serialize;

use super::{facts::has_rto_max, sysctl, version::KernelVersion};

/// Something the kernel has or lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// First mainline version with it.
    pub since: &'static str,
    /// Whether it is there.
    pub present: bool,
    /// Whether nothing works without it.
    pub required: bool,
    /// What depends on it.
    pub needed_for: &'static str,
    /// How this was found out.
    pub evidence: &'static str,
}

const BY_VERSION: &str = "by kernel version";
const PROBED: &str = "probed";

/// The features of this kernel.
#[must_use]
pub fn all(kernel: &KernelVersion) -> Vec<Feature> {
    let by_version = |name, since, number, required, needed_for| Feature {
        name,
        since,
        present: kernel.at_least(number),
        required,
        needed_for,
        evidence: BY_VERSION,
    };
    let probed = |name, since, present, needed_for| Feature {
        name,
        since,
        present,
        required: false,
        needed_for,
        evidence: PROBED,
    };
    vec![
        by_version(
            "sock_ops-timeout-init",
            "4.13",
            (4, 13),
            true,
            "initial_rto",
        ),
        by_version(
            "cgroup-bpf-link",
            "5.7",
            (5, 7),
            true,
            "attaching beside other programs",
        ),
        by_version(
            "sock_ops-socket-storage",
            "5.10",
            (5, 10),
            true,
            "a connection keeps its policy",
        ),
        by_version(
            "bpf-rto-min-delack-max",
            "5.10",
            (5, 10),
            true,
            "rto_min, delack_max",
        ),
        by_version(
            "syn-ack-retransmission-timeout",
            "5.17 (5.15.y since July 2024)",
            (5, 15),
            false,
            "initial_rto beyond the first SYN-ACK",
        ),
        by_version(
            "bpf-getsockopt-syncnt",
            "6.1",
            (6, 1),
            false,
            "syn_retries = \"auto\" by socket",
        ),
        by_version("bpf-thin-linear", "6.1", (6, 1), false, "thin_linear"),
        probed(
            "tcp-syn-linear-timeouts",
            "6.5",
            sysctl::ipv4::<u8>("tcp_syn_linear_timeouts").is_some(),
            "five SYNs at the initial RTO before it doubles",
        ),
        probed("tcp-rto-max", "6.15", has_rto_max(), "rto_max"),
        probed(
            "btf",
            "5.4",
            std::path::Path::new("/sys/kernel/btf/vmlinux").exists(),
            "nothing yet",
        ),
    ]
}
