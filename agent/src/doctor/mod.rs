//! Finds problems of this host for the agent, why they matter, and how to fix them.

use rto_agent_kernel::kernel::{cgroup, mounts, version, version::KernelVersion};
use serde::Serialize;

use self::finding::{Check, SHOWN, list, unless_privileged};
pub use self::finding::{Finding, Input, Severity};

mod finding;
mod firewall;
mod handshake;
mod host;
mod listeners;
mod network;
pub(crate) mod routes;
pub mod self_test;
mod state;

/// The findings of all checks, as `doctor` prints them.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Kernel release.
    pub kernel: String,
    /// The worst of the findings.
    pub worst: Severity,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// Examines the host, including the probe's results. Nothing is changed.
pub fn examine(input: &Input<'_>) -> Report {
    let kernel = version::running();
    let number = kernel
        .as_ref()
        .map_or(version::MINIMUM, |k: &KernelVersion| k.number);
    let mut findings = vec![host::kernel(&kernel)];
    let features = input.features.iter();
    findings.extend(features.map(|feature| host::feature(feature, input.uses(&feature.settings))));
    findings.extend([host::privileges(), host::lockdown()]);
    findings.push(host::cgroup(input.cgroup.as_deref()));
    let mounts = mounts::read().unwrap_or_default();
    findings.push(host::v1(&cgroup::v1_network_controllers(&mounts), number));
    findings.push(host::bpffs(&input.pin_dir));
    findings.push(host::hz());
    findings.extend(state::files(&input.state_files));
    findings.extend(network::sysctls());
    findings.extend(handshake::findings(input));
    findings.extend(network::programs(input.cgroup.as_deref(), &input.ours));
    findings.extend(network::other_agents(
        input.cgroup.as_deref(),
        &input.pin_dir,
    ));
    findings.extend(input.verdict.as_ref().map(network::interference));
    findings.extend(network::routes(input.set));
    findings.push(network::rto_min_default());
    findings.extend(input.set.map(network::metrics));
    if let Some(error) = &input.config_error {
        let check = Check(
            "configuration",
            "a daemon does not start with an invalid configuration; a running daemon keeps the \
             last good one",
        );
        let fix = "fix the file, and validate it with rto-agent check";
        findings.push(check.problem(error, fix));
    }
    let check = Check(
        "path-rtt",
        "a timer below the path RTT retransmits before the answer can arrive",
    );
    findings.extend(input.short_timers.iter().map(|found| {
        check.warning(
            found,
            "raise the value, or set it to \"auto\", and run rto-agent reload",
        )
    }));
    let check = Check("metrics", "a collector on another host sees nothing");
    findings.extend(
        input
            .metrics
            .iter()
            .map(|found| check.warning(found, "systemctl edit rto-agent, and restart the service")),
    );
    if !input.exposed.is_empty() {
        let check = Check(
            "configuration-permissions",
            "any user who can write the configuration controls the timers of every connection",
        );
        findings.push(check.warning(
            input.exposed.join("\n"),
            "make root the owner of the files and directories, and remove write permission for all \
             others",
        ));
    }
    let worst = findings
        .iter()
        .map(|f| f.severity)
        .max()
        .unwrap_or(Severity::Ok);
    Report {
        kernel: kernel.map_or_else(|e| e.to_string(), |k| k.to_string()),
        worst,
        findings,
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_kernel::kernel::privileges;

    use super::{finding::fix_for, *};

    #[test]
    fn every_bad_finding_says_how_to_fix_it() {
        let input = Input {
            cgroup: Some("/proc".into()),
            pin_dir: "/proc/none".into(),
            config_error: Some("no such file".to_owned()),
            ..Input::default()
        };
        let report = examine(&input);
        assert_eq!(report.worst, Severity::Problem);
        for finding in &report.findings {
            assert_eq!(
                finding.severity >= Severity::Warning,
                finding.fix.is_some(),
                "{finding:?}"
            );
            assert!(!finding.why.is_empty() && !finding.found.is_empty());
        }
        for id in ["cgroup", "bpffs", "configuration"] {
            let finding = report.findings.iter().find(|f| f.id == id).unwrap();
            assert_eq!(finding.severity, Severity::Problem, "{finding:?}");
        }
    }

    #[test]
    fn root_gets_no_hint_to_run_as_root() {
        assert_eq!(fix_for(false, "mount it"), "run as root");
        assert_eq!(fix_for(true, "mount it"), "mount it");
        if privileges::effective().map(privileges::missing) == Some(Vec::new()) {
            let report = examine(&Input::default());
            let fixes = report.findings.iter().filter_map(|f| f.fix.as_ref());
            assert!(!fixes.into_iter().any(|fix| fix.contains("run as root")));
        }
    }
}
