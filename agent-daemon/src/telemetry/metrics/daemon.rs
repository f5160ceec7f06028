//! Metrics of the daemon itself: version, configuration and health.

use rto_agent_common::MAX_POLICIES;
use rto_agent_core::{
    policy::{MAX_ENTRIES_LIMIT, differences::Difference},
    wire::{
        kernel::{Presence, Verdict},
        types::StatusAnswer,
    },
};

use super::{Family, Samples, family, flag, gauge, number, seconds};

pub(super) fn about(status: &StatusAnswer) -> Vec<Family> {
    vec![
        family(
            "build",
            "The running version, its commit and build target",
            Samples::Info(vec![
                ("version", status.version.clone()),
                ("commit", status.commit.clone()),
                ("target", status.target.clone()),
            ]),
        ),
        family(
            "kernel",
            "The kernel release",
            Samples::Info(vec![("release", status.kernel.clone())]),
        ),
        gauge(
            "kernel_hz",
            "Jiffies per second (CONFIG_HZ), measured",
            status.host.hz.into(),
        ),
        family(
            "feature_present",
            "Whether the kernel has a feature: 1 present; 0 absent, refused or unknown",
            Samples::Gauge(
                status
                    .features
                    .iter()
                    .map(|f| {
                        let present = f.presence == Presence::Present;
                        let labels = vec![("feature", f.name.clone())];
                        (labels, f64::from(u8::from(present)))
                    })
                    .collect(),
            ),
        ),
    ]
}

pub(super) fn health(status: &StatusAnswer) -> Vec<Family> {
    let entries = [
        ("file", "ipv4", status.entries_of.file.ipv4),
        ("file", "ipv6", status.entries_of.file.ipv6),
        ("runtime", "ipv4", status.entries_of.runtime.ipv4),
        ("runtime", "ipv6", status.entries_of.runtime.ipv6),
    ];
    let mut all = vec![
        flag(
            "attached",
            "Whether the program is attached to its cgroup",
            status.attachment.attached,
        ),
        flag(
            "in_sync",
            "Whether the kernel's maps contain the desired state (files and runtime entries)",
            status.in_sync,
        ),
        family(
            "map_differences",
            "Changes to the kernel's maps by other processes that were repaired",
            Samples::Counter(
                Difference::KINDS
                    .into_iter()
                    .map(|kind| {
                        let count = status.map_differences.get(kind).copied();
                        (vec![("kind", kind.to_owned())], count.unwrap_or(0))
                    })
                    .collect(),
            ),
        ),
        family(
            "messages_dropped",
            "Log lines and messages to the service manager that were dropped because the \
                   receiver was too slow",
            Samples::Counter(vec![
                (vec![("to", "log".to_owned())], status.dropped.log),
                (
                    vec![("to", "service-manager".to_owned())],
                    status.dropped.service_manager,
                ),
            ]),
        ),
        flag(
            "last_reload_successful",
            "Whether the configuration was accepted when the files were last read",
            status.last_reload.ok,
        ),
        flag(
            "last_good_configuration_restored",
            "Whether the active configuration was restored from disk because the files were \
             rejected at the start",
            status.last_reload.kept_at_s.is_some(),
        ),
        seconds(
            "last_reload_timestamp",
            "Unix time at which the files were last read",
            status.last_reload.at_s,
        ),
        gauge(
            "runtime_entries_left_out",
            "Runtime entries that are not active, because they fail a check that the files pass or \
             exceed a limit",
            number(status.runtime_entries_left_out),
        ),
        family(
            "entries",
            "Active entries, by source and address family",
            Samples::Gauge(
                entries
                    .into_iter()
                    .map(|(source, family, count)| {
                        let labels =
                            vec![("source", source.to_owned()), ("family", family.to_owned())];
                        (labels, number(count))
                    })
                    .collect(),
            ),
        ),
        gauge(
            "entries_max",
            "Current capacity for entries; the maps grow on demand",
            status.max_entries.into(),
        ),
        gauge(
            "entries_limit",
            "Maximum number of entries",
            MAX_ENTRIES_LIMIT.into(),
        ),
        gauge(
            "policies_limit",
            "Maximum number of policies",
            MAX_POLICIES.into(),
        ),
        gauge("policies", "Active policies", number(status.policies.len())),
        gauge(
            "foreign_programs",
            "Other sock_ops programs between the root of the hierarchy and the attached cgroup",
            number(status.foreign_programs),
        ),
    ];
    if let Some(probe) = &status.probe {
        let verdict = match probe.verdict {
            Verdict::Good { .. } => "good",
            Verdict::Interference { .. } => "interference",
            Verdict::NotProbed { .. } => "not-probed",
        };
        let verdicts = ["good", "interference", "not-probed"];
        all.push(family(
            "probe_verdict",
            "Result of the last probe of the active timers: 1 for its verdict",
            Samples::Gauge(
                verdicts
                    .into_iter()
                    .map(|one| {
                        let labels = vec![("verdict", one.to_owned())];
                        (labels, f64::from(u8::from(one == verdict)))
                    })
                    .collect(),
            ),
        ));
        all.push(seconds(
            "probe_timestamp",
            "Unix time of the last probe",
            probe.at_s,
        ));
    }
    all
}
