//! Privileges of this process: capabilities, lockdown, LSMs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::mounts::{self, Mount};

/// Capabilities of which other modules ask.
pub mod cap {
    use caps::Capability;

    /// Reads the namespaces and descriptors of other processes.
    pub const SYS_PTRACE: Capability = Capability::CAP_SYS_PTRACE;
    /// Before Linux 5.8, all of bpf(2). Enters namespaces.
    pub const SYS_ADMIN: Capability = Capability::CAP_SYS_ADMIN;
}

/// Capabilities that the daemon needs, with their purpose.
pub const NEEDED: [(Capability, &str, &str); 3] = [
    (
        Capability::CAP_BPF,
        "CAP_BPF",
        "load the program and create its maps",
    ),
    (
        Capability::CAP_PERFMON,
        "CAP_PERFMON",
        "let the verifier accept arithmetic on pointers to map values",
    ),
    (
        Capability::CAP_NET_ADMIN,
        "CAP_NET_ADMIN",
        "attach it to a cgroup and query what is attached",
    ),
];

/// Capabilities that the running daemon keeps. It loads programs and attaches them again, writes
/// maps, and enters other network namespaces if it was given the capabilities for that.
const RUNNING: [Capability; 5] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_SYS_PTRACE,
];

/// Capabilities that it also needs until its sockets are bound: for their group, and for ports
/// below 1024.
const STARTING: [Capability; 2] = [Capability::CAP_CHOWN, Capability::CAP_NET_BIND_SERVICE];

/// Permanently drops every capability that neither the start nor the running daemon needs, and
/// those that a program could gain by execve(2). The process must have one thread, because
/// capabilities belong to a thread.
///
/// Lifts the limit of locked memory first, which needs one of the dropped capabilities
/// (CAP_SYS_RESOURCE): before Linux 5.11, maps count against this limit.
pub fn keep_for_start() -> io::Result<()> {
    // If this is refused, the existing limit may be enough; the unit's is.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    nix::sys::prctl::set_no_new_privs()?;
    // Without CAP_SETPCAP the bounding set stays; then the parent has limited it, or is not root.
    if holds(CapSet::Effective, Capability::CAP_SETPCAP)? {
        for cap in caps::all() {
            // A capability that the kernel does not know cannot be dropped.
            let is_there = holds(CapSet::Bounding, cap).unwrap_or(false);
            if is_there && !RUNNING.contains(&cap) {
                caps::drop(None, CapSet::Bounding, cap).map_err(io::Error::other)?;
            }
        }
    }
    keep(&[RUNNING.as_slice(), &STARTING].concat())
}

/// Drops the capabilities that only the start needed.
pub fn keep_for_running() -> io::Result<()> {
    keep(&RUNNING)
}

fn holds(set: CapSet, cap: Capability) -> io::Result<bool> {
    caps::has_cap(None, set, cap).map_err(io::Error::other)
}

/// Drops all capabilities that are not in `wanted`.
fn keep(wanted: &[Capability]) -> io::Result<()> {
    // This clears the ambient set too: an ambient capability must be inheritable (capabilities(7)).
    for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        let there = caps::read(None, set).map_err(io::Error::other)?;
        let retained: CapsHashSet = there
            .iter()
            .filter(|cap| wanted.contains(cap))
            .copied()
            .collect();
        // Called only if needed, because a seccomp filter may refuse capset(2).
        if retained != there {
            caps::set(None, set, &retained).map_err(io::Error::other)?;
        }
    }
    Ok(())
}

/// This thread's effective capabilities; `None` if they cannot be read.
pub fn effective() -> Option<CapsHashSet> {
    caps::read(None, CapSet::Effective).ok()
}

/// Whether this thread has a capability.
pub fn has(cap: Capability) -> bool {
    holds(CapSet::Effective, cap).unwrap_or(false)
}

/// The capabilities of [`NEEDED`] that a set lacks. CAP_SYS_ADMIN implies CAP_BPF and CAP_PERFMON.
pub fn missing(effective: CapsHashSet) -> Vec<&'static str> {
    let is_implied = |cap| cap != Capability::CAP_NET_ADMIN && effective.contains(&cap::SYS_ADMIN);
    NEEDED
        .iter()
        .filter(|(cap, ..)| !effective.contains(cap) && !is_implied(*cap))
        .map(|(_, name, _)| *name)
        .collect()
}

const SECURITYFS: &str = "/sys/kernel/security";

/// Where securityfs is mounted. In a container the host's may be mounted anywhere, and the usual
/// place is empty.
pub fn securityfs() -> PathBuf {
    let usual = Path::new(SECURITYFS);
    // Tried first, because a host may have thousands of mounts.
    match usual.join("lsm").exists() {
        true => usual.to_owned(),
        false => securityfs_of(&mounts::read().unwrap_or_default()),
    }
}

fn securityfs_of(mounts: &[Mount]) -> PathBuf {
    // A mount of only a part of it, like an LSM's directory, is not enough.
    let is_whole = |mount: &&Mount| mount.kind == "securityfs" && mount.root == Path::new("/");
    let found = mounts.iter().find(is_whole);
    found.map_or_else(|| SECURITYFS.into(), |mount| mount.point.clone())
}

/// The state of lockdown(7): "none", "integrity" or "confidentiality"; `None` if the kernel does
/// not have it.
pub fn lockdown(securityfs: &Path) -> Option<String> {
    let text = fs::read_to_string(securityfs.join("lockdown")).ok()?;
    let chosen = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
    Some(chosen.to_owned())
}

/// Active LSMs; `None` if securityfs does not show them.
pub fn lsms(securityfs: &Path) -> Option<Vec<String>> {
    let text = fs::read_to_string(securityfs.join("lsm")).ok()?;
    Some(text.trim().split(',').map(ToOwned::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_capabilities_are_missing_unless_implied() {
        assert!(missing(caps::all()).is_empty());
        let all = ["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"];
        assert_eq!(missing(CapsHashSet::new()), all);
        let admin = [cap::SYS_ADMIN, Capability::CAP_NET_ADMIN];
        assert!(missing(admin.into_iter().collect()).is_empty());
    }

    #[test]
    fn lockdown_and_lsms_are_parsed() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(lockdown(dir.path()), None);
        let state = "none [integrity] confidentiality\n";
        fs::write(dir.path().join("lockdown"), state).unwrap();
        fs::write(dir.path().join("lsm"), "lockdown,capability,bpf\n").unwrap();
        assert_eq!(lockdown(dir.path()).as_deref(), Some("integrity"));
        assert_eq!(lsms(dir.path()).unwrap().last().unwrap(), "bpf");
    }

    #[test]
    fn securityfs_mount_is_found() {
        let host = "30 24 0:7 / /sys/kernel/security rw shared:8 - securityfs securityfs rw\n";
        let pod = "50 24 0:7 /apparmor /aa ro - securityfs securityfs rw\n\
                   51 24 0:7 / /host/security ro - securityfs securityfs rw\n";
        let of = |text: &str| securityfs_of(&mounts::parse(text));
        assert_eq!(of(host), Path::new("/sys/kernel/security"));
        assert_eq!(of(pod), Path::new("/host/security"));
        assert_eq!(of(""), Path::new("/sys/kernel/security"));
    }
}
