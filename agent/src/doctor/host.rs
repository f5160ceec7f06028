//! Checks of the kernel, privileges, cgroup, BPF file system and HZ.

use std::path::Path;

use nix::{
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::{AccessFlags, access},
};
use rto_agent_core::wire::kernel::{Feature, Presence};
use rto_agent_kernel::kernel::{
    cgroup,
    hz::measure,
    privileges,
    version::{self, KernelVersion},
};

use super::{Check, Finding, unless_privileged};

pub(super) fn kernel<E: ToString>(kernel: &Result<KernelVersion, E>) -> Finding {
    let check = Check(
        "kernel-version",
        "the program needs socket storage and TCP options from sock_ops",
    );
    let (major, minor) = version::MINIMUM;
    match kernel {
        Err(e) => check.warning(e.to_string(), "report this release string"),
        Ok(kernel) if kernel.at_least(version::MINIMUM) => {
            check.ok(format!("{kernel}, at least {major}.{minor}"))
        }
        Ok(kernel) => check.problem(
            format!("{kernel} is older than {major}.{minor}"),
            "boot a newer kernel",
        ),
    }
}

/// `is_used`: whether a policy needs the feature.
pub(super) fn feature(feature: &Feature, is_used: bool) -> Finding {
    let check = Check(&feature.name, "some settings need this feature");
    let how = format!("{} ({})", feature.needed_for, feature.evidence);
    let bad = |found: String, fix: String| match (feature.required, is_used) {
        (true, _) => check.problem(found, fix),
        (false, true) => check.warning(found, fix),
        (false, false) => check.note(found, fix),
    };
    match feature.presence {
        Presence::Present => check.ok(format!("present, for {how}")),
        Presence::Absent => bad(
            format!("absent: {how}"),
            format!("Linux {} or later has it", feature.since),
        ),
        Presence::Refused => bad(
            format!("refused: {how}"),
            "check lockdown, the active LSMs and the seccomp filter of the agent's process".into(),
        ),
        Presence::Unknown => {
            let fix = match cgroup::own() {
                // A socket of this process shows what the kernel supports.
                None => "mount the cgroup2 hierarchy: mount -t cgroup2 none /sys/fs/cgroup/unified",
                Some(_) => {
                    "see the reason in brackets; root has all the privileges that are needed"
                }
            };
            let (found, fix) = (format!("unknown: {how}"), unless_privileged(fix));
            match is_used || feature.required {
                true => check.warning(found, fix),
                false => check.note(found, fix),
            }
        }
    }
}

pub(super) fn privileges() -> Finding {
    let check = Check(
        "capabilities",
        "loading and attaching eBPF programs is privileged",
    );
    match privileges::effective().map(privileges::missing) {
        None => check.warning(
            "unknown: /proc/self/status does not show them",
            "mount /proc",
        ),
        Some(missing) if missing.is_empty() => check.ok("CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"),
        Some(missing) => check.problem(
            format!("missing {}", missing.join(", ")),
            "run as root; in a container grant these capabilities",
        ),
    }
}

pub(super) fn lockdown() -> Finding {
    let check = Check(
        "lockdown",
        "in confidentiality mode the kernel may refuse BPF helpers that read kernel memory",
    );
    match privileges::lockdown(&privileges::securityfs()).as_deref() {
        None => check.ok("no lockdown, or securityfs is not mounted"),
        Some("confidentiality") => check.warning(
            "confidentiality",
            "boot without lockdown=confidentiality if the program is refused",
        ),
        Some(state) => check.ok(state),
    }
}

pub(super) fn cgroup(given: Option<&Path>) -> Finding {
    let check = Check(
        "cgroup",
        "the program is attached to a cgroup2 directory and acts on sockets created by processes in \
         this cgroup or below",
    );
    match cgroup::resolve(given) {
        Err(e) => check.problem(
            e.to_string(),
            "mount the host's cgroup2 hierarchy, or set [agent] cgroup to a directory on it",
        ),
        Ok(path) => {
            let extent = if cgroup::is_root(&path) {
                "the root of the hierarchy: all sockets of the host"
            } else {
                "as configured: sockets of processes in this cgroup and below"
            };
            check.ok(format!("{}, {extent}", path.display()))
        }
    }
}

/// Before 5.15 a socket had one pointer for cgroup2 and v1's net_cls and net_prio. Once either of
/// these was used on a host, cgroup2 programs no longer ran for new sockets of some tasks
/// (`sock_cgroup_data`, fixed by "bpf, cgroups: Fix cgroup v2 fallback on v1/v2 mixed mode").
pub(super) fn v1(mounted: &[&str], kernel: (u32, u32)) -> Finding {
    let check = Check(
        "cgroup-v1-network",
        "before Linux 5.15, using these controllers disables cgroup2 socket programs",
    );
    let found = format!("{} mounted", mounted.join(" and "));
    match mounted {
        [] => check.ok("net_cls and net_prio are not mounted"),
        _ if kernel >= (5, 15) => check.ok(found + ", which is harmless on this kernel"),
        _ => check.warning(
            found,
            "boot with cgroup_no_v1=net_cls,net_prio, or use Linux 5.15 or later",
        ),
    }
}

pub(super) fn bpffs(pin_dir: &Path) -> Finding {
    let check = Check(
        "bpffs",
        "the link and the maps are pinned there, so that policies stay active if the daemon is \
         killed, and the next daemon adopts them",
    );
    let existing = pin_dir
        .ancestors()
        .find(|dir| dir.exists())
        .unwrap_or(Path::new("/"));
    let on_bpffs = statfs(existing).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC);
    let place = existing.display();
    if !on_bpffs {
        check.problem(
            format!("{} is not on a BPF file system", pin_dir.display()),
            "mount -t bpf bpf /sys/fs/bpf, or set [agent] pin_dir to a directory on one",
        )
    } else if access(existing, AccessFlags::W_OK).is_err() {
        let fix = unless_privileged("mount it read-write");
        check.problem(format!("{place} cannot be written"), fix)
    } else {
        check.ok(format!("{place} is writable"))
    }
}

pub(super) fn hz() -> Finding {
    let check = Check("hz", "timers count in jiffies, 1/HZ s");
    match measure() {
        Ok(hz) => check.ok(format!("{hz}, measured")),
        Err(e) => check.problem(
            e.to_string(),
            "report this kernel: without HZ, durations cannot be converted to jiffies",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Severity, *};

    #[test]
    fn v1_controllers_matter_on_old_kernels_only() {
        assert_eq!(v1(&[], (5, 10)).severity, Severity::Ok);
        assert_eq!(v1(&["net_cls"], (5, 10)).severity, Severity::Warning);
        assert_eq!(v1(&["net_cls"], (6, 1)).severity, Severity::Ok);
    }
}
