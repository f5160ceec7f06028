//! Metrics of the daemon itself: version, configuration and health.

use std::{fs, time::Duration};

use nix::{
    time::{ClockId, clock_gettime},
    unistd::{SysconfVar, sysconf},
};
use rto_agent_common::MAX_POLICIES;
use rto_agent_core::{
    policy::{MAX_ENTRIES_LIMIT, differences::Difference},
    wire::{
        kernel::{Presence, Verdict},
        types::StatusAnswer,
    },
};

use super::{Labels, Metrics, number, state_set};

/// The daemon's processor time and memory.
#[expect(clippy::cast_precision_loss, reason = "bytes below 2^53")]
pub(super) fn process(metrics: &mut Metrics) {
    let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID);
    metrics.amounts(
        "process_cpu_seconds",
        "Processor time of the daemon",
        cpu.map(|cpu| (Vec::new(), Duration::from(cpu).as_secs_f64())),
    );
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    let page = page.and_then(|bytes| u64::try_from(bytes).ok());
    let bytes = pages.zip(page).map(|(pages, page)| (pages * page) as f64);
    metrics.gauges(
        "process_resident_memory_bytes",
        "Resident memory of the daemon",
        bytes.map(|bytes| (Vec::new(), bytes)),
    );
}

pub(super) fn about(metrics: &mut Metrics, status: &StatusAnswer) {
    let build: Labels = vec![
        ("version", status.version.clone()),
        ("commit", status.commit.clone()),
        ("target", status.target.clone()),
    ];
    metrics.gauges(
        "build_info",
        "The running version, its commit and build target",
        [(build, 1.0)],
    );
    metrics.gauges(
        "kernel_info",
        "The kernel release",
        [(vec![("release", status.kernel.clone())], 1.0)],
    );
    metrics.gauge(
        "kernel_hz",
        "Jiffies per second (CONFIG_HZ), measured",
        status.host.hz.into(),
    );
    metrics.gauges(
        "feature_present",
        "Whether the kernel has a feature: 1 present; 0 absent, refused or unknown",
        status.features.iter().map(|feature| {
            let is_present = feature.presence == Presence::Present;
            let labels = vec![("feature", feature.name.clone())];
            (labels, f64::from(u8::from(is_present)))
        }),
    );
}

#[expect(clippy::cast_precision_loss, reason = "seconds since 1970")]
pub(super) fn health(metrics: &mut Metrics, status: &StatusAnswer) {
    metrics.flag(
        "attached",
        "Whether the program is attached to its cgroup",
        status.attachment.attached,
    );
    metrics.flag(
        "in_sync",
        "Whether the kernel's maps contain the desired state (files and runtime entries)",
        status.in_sync,
    );
    metrics.counters(
        "map_differences",
        "Changes to the kernel's maps by other processes that were repaired",
        Difference::KINDS.iter().map(|kind| {
            let count = status.map_differences.get(*kind).copied();
            (vec![("kind", (*kind).to_owned())], count.unwrap_or(0))
        }),
    );
    let dropped = [
        ("log", status.dropped.log),
        ("service-manager", status.dropped.service_manager),
    ];
    metrics.counters(
        "messages_dropped",
        "Log lines and messages to the service manager that were dropped because the receiver was \
         too slow",
        dropped.map(|(to, count)| (vec![("to", to.to_owned())], count)),
    );
    metrics.flag(
        "last_reload_successful",
        "Whether the configuration was accepted when the files were last read",
        status.last_reload.ok,
    );
    metrics.flag(
        "last_good_configuration_restored",
        "Whether the active configuration was restored from disk because the files were rejected \
         at the start",
        status.last_reload.kept_at_s.is_some(),
    );
    metrics.gauge(
        "last_reload_timestamp_seconds",
        "Unix time at which the files were last read",
        status.last_reload.at_s as f64,
    );
    metrics.gauge(
        "runtime_entries_left_out",
        "Runtime entries that are not active, because they fail a check that the files pass or \
         exceed a limit",
        number(status.runtime_entries_left_out),
    );
    let entries = [
        ("file", "ipv4", status.entries_of.file.ipv4),
        ("file", "ipv6", status.entries_of.file.ipv6),
        ("runtime", "ipv4", status.entries_of.runtime.ipv4),
        ("runtime", "ipv6", status.entries_of.runtime.ipv6),
    ];
    metrics.gauges(
        "entries",
        "Active entries, by source and address family",
        entries.map(|(source, family, count)| {
            let labels = vec![("source", source.to_owned()), ("family", family.to_owned())];
            (labels, number(count))
        }),
    );
    for (name, help, value) in [
        (
            "entries_max",
            "Current capacity for entries; the maps grow on demand",
            status.max_entries.into(),
        ),
        (
            "entries_limit",
            "Maximum number of entries",
            MAX_ENTRIES_LIMIT.into(),
        ),
        (
            "policies_limit",
            "Maximum number of policies",
            MAX_POLICIES.into(),
        ),
        ("policies", "Active policies", number(status.policies.len())),
        (
            "foreign_programs",
            "Other sock_ops programs between the root of the hierarchy and the attached cgroup",
            number(status.foreign_programs),
        ),
    ] {
        metrics.gauge(name, help, value);
    }
    if let Some(probe) = &status.probe {
        let verdict = match probe.verdict {
            Verdict::Good { .. } => "good",
            Verdict::Interference { .. } => "interference",
            Verdict::NotProbed { .. } => "not-probed",
        };
        let verdicts = ["good", "interference", "not-probed"];
        metrics.gauges(
            "probe_verdict",
            "Result of the last probe of the active timers: 1 for its verdict",
            state_set(&Vec::new(), "verdict", verdicts, verdict),
        );
        metrics.gauge(
            "probe_timestamp_seconds",
            "Unix time of the last probe",
            probe.at_s as f64,
        );
    }
}
