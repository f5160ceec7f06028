//! Checks of the kernel, privileges, cgroup, BPF file system and HZ.

use std::path::Path;

use nix::{
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::{AccessFlags, access},
};
use rto_agent_core::wire::kernel::{Feature, Presence};
use rto_agent_kernel::kernel::{
    cgroup,
    hz::{from_config, measure},
    mounts, privileges, version,
    version::KernelVersion,
};

use super::{Finding, Severity, unless_privileged};

pub(super) fn kernel(kernel: &KernelVersion, findings: &mut Vec<Finding>) {
    const WHY: &str = "the program needs socket storage and TCP options from sock_ops";
    let (major, minor) = version::MINIMUM;
    findings.push(if kernel.at_least(version::MINIMUM) {
        Finding::ok(
            "kernel-version",
            format!("{kernel}, at least {major}.{minor}"),
            WHY,
        )
    } else {
        Finding::bad(
            "kernel-version",
            Severity::Problem,
            format!("{kernel} is older than {major}.{minor}"),
            WHY,
            "boot a newer kernel",
        )
    });
}

pub(super) fn features(features: &[Feature], findings: &mut Vec<Finding>) {
    findings.extend(features.iter().map(feature));
}

fn feature(feature: &Feature) -> Finding {
    const WHY: &str = "some settings need this feature";
    let id = feature.name.clone();
    let how = format!("{} ({})", feature.needed_for, feature.evidence);
    let severity = if feature.required {
        Severity::Problem
    } else {
        Severity::Warning
    };
    let since = &feature.since;
    match feature.presence {
        Presence::Present => Finding::ok(id, format!("present, for {how}"), WHY),
        Presence::Absent => Finding::bad(
            id,
            severity,
            format!("absent: {how}"),
            WHY,
            format!("Linux {since} or later has it"),
        ),
        Presence::Refused => Finding::bad(
            id,
            severity,
            format!("refused: {how}"),
            WHY,
            "check lockdown, the active LSMs and the seccomp filter of the agent's process",
        ),
        Presence::Unknown => Finding::bad(
            id,
            Severity::Warning,
            format!("unknown: {how}"),
            WHY,
            unless_privileged(match cgroup::own() {
                // A socket of this process shows what the kernel supports.
                None => "mount the cgroup2 hierarchy: mount -t cgroup2 none /sys/fs/cgroup/unified",
                Some(_) => {
                    "see the reason in brackets; root has all the privileges that are \
                            needed"
                }
            }),
        ),
    }
}

pub(super) fn privileges(findings: &mut Vec<Finding>) {
    const WHY: &str = "loading and attaching eBPF programs is privileged";
    let missing = privileges::effective().map(privileges::missing);
    findings.push(match missing {
        None => Finding::bad(
            "capabilities",
            Severity::Warning,
            "unknown: /proc/self/status does not show them",
            WHY,
            "mount /proc",
        ),
        Some(missing) if missing.is_empty() => {
            Finding::ok("capabilities", "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN", WHY)
        }
        Some(missing) => Finding::bad(
            "capabilities",
            Severity::Problem,
            format!("missing {}", missing.join(", ")),
            WHY,
            "run as root; in a container grant these capabilities",
        ),
    });
    const LOCKDOWN: &str = "in confidentiality mode the kernel may refuse BPF helpers that read \
                            kernel memory";
    findings.push(
        match privileges::lockdown(&privileges::securityfs()).as_deref() {
            None => Finding::ok(
                "lockdown",
                "no lockdown, or securityfs is not mounted",
                LOCKDOWN,
            ),
            Some("confidentiality") => Finding::bad(
                "lockdown",
                Severity::Warning,
                "confidentiality",
                LOCKDOWN,
                "boot without lockdown=confidentiality if the program is refused",
            ),
            Some(state) => Finding::ok("lockdown", state, LOCKDOWN),
        },
    );
}

pub(super) fn cgroup(given: Option<&Path>, kernel: (u32, u32), findings: &mut Vec<Finding>) {
    const WHY: &str = "the program is attached to a cgroup2 directory and acts on sockets created \
                       by processes in this cgroup or below";
    findings.push(match cgroup::resolve(given) {
        Err(e) => Finding::bad(
            "cgroup",
            Severity::Problem,
            e.to_string(),
            WHY,
            "mount the host's cgroup2 hierarchy, or set [agent] cgroup to a directory on it",
        ),
        Ok(path) => {
            let extent = if cgroup::is_root(&path) {
                "the root of the hierarchy: all sockets of the host"
            } else {
                "as configured: sockets of processes in this cgroup and below"
            };
            Finding::ok("cgroup", format!("{}, {extent}", path.display()), WHY)
        }
    });
    let mounts = mounts::read().unwrap_or_default();
    v1(&cgroup::v1_network_controllers(&mounts), kernel, findings);
}

/// Before 5.15 a socket had one pointer for cgroup2 and v1's net_cls and net_prio. Once either of
/// these was used on a host, cgroup2 programs no longer ran for new sockets of some tasks
/// (`sock_cgroup_data`, fixed by "bpf, cgroups: Fix cgroup v2 fallback on v1/v2 mixed mode").
fn v1(mounted: &[&str], kernel: (u32, u32), findings: &mut Vec<Finding>) {
    const WHY: &str = "before Linux 5.15, using these controllers disables cgroup2 socket programs";
    findings.push(match mounted {
        [] => Finding::ok(
            "cgroup-v1-network",
            "net_cls and net_prio are not mounted",
            WHY,
        ),
        some if kernel >= (5, 15) => Finding::ok(
            "cgroup-v1-network",
            format!(
                "{} mounted, which is harmless on this kernel",
                some.join(" and ")
            ),
            WHY,
        ),
        some => Finding::bad(
            "cgroup-v1-network",
            Severity::Warning,
            format!("{} mounted", some.join(" and ")),
            WHY,
            "boot with cgroup_no_v1=net_cls,net_prio, or use Linux 5.15 or later",
        ),
    });
}

pub(super) fn bpffs(pin_dir: &Path, findings: &mut Vec<Finding>) {
    const WHY: &str = "the link and the maps are pinned there, so that policies stay active if the \
                       daemon is killed, and the next daemon adopts them";
    const MEND: &str = "mount -t bpf bpf /sys/fs/bpf, or set [agent] pin_dir to a directory on one";
    let existing = pin_dir
        .ancestors()
        .find(|dir| dir.exists())
        .unwrap_or(Path::new("/"));
    let on_bpffs = statfs(existing).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC);
    let place = existing.display();
    findings.push(if !on_bpffs {
        let found = format!("{} is not on a BPF file system", pin_dir.display());
        Finding::bad("bpffs", Severity::Problem, found, WHY, MEND)
    } else if access(existing, AccessFlags::W_OK).is_err() {
        let found = format!("{place} cannot be written");
        Finding::bad(
            "bpffs",
            Severity::Problem,
            found,
            WHY,
            unless_privileged("mount it read-write"),
        )
    } else {
        Finding::ok("bpffs", format!("{place} is writable"), WHY)
    });
}

pub(super) fn hz(kernel: Option<&KernelVersion>, findings: &mut Vec<Finding>) {
    const WHY: &str = "timers count in jiffies, 1/HZ s";
    let configured = kernel.and_then(|k| from_config(Path::new("/"), &k.to_string()));
    findings.push(match (measure(), configured) {
        (Err(e), _) => Finding::bad(
            "hz",
            Severity::Problem,
            e.to_string(),
            WHY,
            "report this kernel: without HZ, durations cannot be converted to jiffies",
        ),
        (Ok(measured), Some(configured)) if measured != configured => Finding::bad(
            "hz",
            Severity::Problem,
            format!("measured {measured}, but the kernel's configuration says {configured}"),
            WHY,
            "report this kernel; the configuration file may belong to another one",
        ),
        (Ok(measured), Some(_)) => {
            Finding::ok("hz", format!("{measured}, measured and configured"), WHY)
        }
        (Ok(measured), None) => Finding::ok(
            "hz",
            format!("{measured}, measured (the kernel's configuration is not on this host)"),
            WHY,
        ),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_controllers_matter_on_old_kernels_only() {
        let severity = |mounted: &[&str], kernel| {
            let mut findings = Vec::new();
            v1(mounted, kernel, &mut findings);
            findings[0].severity
        };
        assert_eq!(severity(&[], (5, 10)), Severity::Ok);
        assert_eq!(severity(&["net_cls"], (5, 10)), Severity::Warning);
        assert_eq!(severity(&["net_cls"], (6, 1)), Severity::Ok);
    }
}
