//! What must be right before the daemon begins, said so that it can be fixed.

use anyhow::bail;

use super::{descriptors, privileges, version};

/// Checks kernel, capabilities and the limit of open files. (cgroup and BPF file system are checked where they are used.)
pub fn check() -> anyhow::Result<()> {
    let kernel = version::running()?;
    if !kernel.at_least(version::MINIMUM) {
        let (major, minor) = version::MINIMUM;
        bail!(
            "kernel {kernel} is too old: {major}.{minor} or later is needed (socket storage and \
             TCP options from sock_ops programs)"
        );
    }
    let missing = privileges::missing(privileges::effective().unwrap_or(u64::MAX));
    if !missing.is_empty() {
        let why: Vec<String> = privileges::NEEDED
            .iter()
            .filter(|(_, name, _)| missing.contains(name))
            .map(|(_, name, why)| format!("{name} (to {why})"))
            .collect();
        bail!(
            "missing {}; run as root (sudo rto-agent run, or the systemd unit)",
            why.join(" and ")
        );
    }
    descriptors::ensure(descriptors::DAEMON)
}
