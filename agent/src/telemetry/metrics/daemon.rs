//! Metrics of the daemon itself: version, configuration and health.

use rto_agent_common::MAX_POLICIES;

use super::{Family, Samples, flag, gauge, number, seconds};
use crate::{
    kernel::{features::Presence, interference::Verdict},
    policy::{MAX_ENTRIES_LIMIT, differences::Difference},
    wire::types::StatusAnswer,
};

pub(super) fn about(status: &StatusAnswer) -> Vec<Family> {
    vec![
        Family {
            name: "build",
            help: "The running version, the commit it was built from and what for",
            unit: None,
            samples: Samples::Info(vec![
                ("version", status.version.clone()),
                ("commit", status.commit.clone()),
                ("target", status.target.clone()),
            ]),
        },
        Family {
            name: "kernel",
            help: "The kernel it runs on",
            unit: None,
            samples: Samples::Info(vec![("release", status.kernel.clone())]),
        },
        gauge(
            "kernel_hz",
            "Jiffies a second (CONFIG_HZ), measured",
            status.host.hz.into(),
        ),
        Family {
            name: "feature_present",
            help: "Whether the kernel has a feature: 1 present, 0 absent, refused or unknown",
            unit: None,
            samples: Samples::Gauge(
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
        },
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
            "Whether the program is in force at its cgroup",
            status.attachment.attached,
        ),
        flag(
            "in_sync",
            "Whether the kernel's maps hold what files and runtime entries say",
            status.in_sync,
        ),
        Family {
            name: "map_differences",
            help: "Changes of the kernel's maps by other processes, which were repaired",
            unit: None,
            samples: Samples::Counter(
                Difference::KINDS
                    .into_iter()
                    .map(|kind| {
                        let count = status.map_differences.get(kind).copied();
                        (vec![("kind", kind.to_owned())], count.unwrap_or(0))
                    })
                    .collect(),
            ),
        },
        Family {
            name: "messages_dropped",
            help: "Lines of the log, and messages to the service manager, that were dropped as they were not read",
            unit: None,
            samples: Samples::Counter(vec![
                (vec![("to", "log".to_owned())], status.dropped.log),
                (
                    vec![("to", "service-manager".to_owned())],
                    status.dropped.service_manager,
                ),
            ]),
        },
        flag(
            "last_reload_successful",
            "Whether the files were taken over when they were last read",
            status.last_reload.ok,
        ),
        flag(
            "last_good_configuration_restored",
            "Whether the configuration in force was restored from disk, as the files were refused at the start",
            status.last_reload.kept_at_s.is_some(),
        ),
        seconds(
            "last_reload_timestamp",
            "When the files were last read, Unix time",
            status.last_reload.at_s,
        ),
        gauge(
            "runtime_entries_left_out",
            "Runtime entries that are not in force: they fail a check that files pass, or there is no room for them",
            number(status.runtime_entries_left_out),
        ),
        Family {
            name: "entries",
            help: "Entries in force, by where they come from and their address family",
            unit: None,
            samples: Samples::Gauge(
                entries
                    .into_iter()
                    .map(|(source, family, count)| {
                        let labels =
                            vec![("source", source.to_owned()), ("family", family.to_owned())];
                        (labels, number(count))
                    })
                    .collect(),
            ),
        },
        gauge(
            "entries_max",
            "Entries there is room for now; the maps grow",
            status.max_entries.into(),
        ),
        gauge(
            "entries_limit",
            "The most entries there can be",
            MAX_ENTRIES_LIMIT.into(),
        ),
        gauge(
            "policies_limit",
            "The most policies there can be",
            MAX_POLICIES.into(),
        ),
        gauge(
            "policies",
            "Policies in force",
            number(status.policies.len()),
        ),
        gauge(
            "foreign_programs",
            "sock_ops programs of others between the hierarchy's root and the attached cgroup",
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
        all.push(Family {
            name: "probe_verdict",
            help: "What the last probe of the timers in force found: 1 for its verdict",
            unit: None,
            samples: Samples::Gauge(
                verdicts
                    .into_iter()
                    .map(|one| {
                        let labels = vec![("verdict", one.to_owned())];
                        (labels, f64::from(u8::from(one == verdict)))
                    })
                    .collect(),
            ),
        });
        all.push(seconds(
            "probe_timestamp",
            "When it was last probed, Unix time",
            probe.at_s,
        ));
    }
    all
}
