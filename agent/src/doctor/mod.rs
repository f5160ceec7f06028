//! Finds problems of this host for the agent, why they matter, and how to fix them.

use std::path::PathBuf;

use rto_agent_core::{
    policy::{HostFacts, PolicySet},
    wire::kernel::{Feature, Verdict},
};
use rto_agent_kernel::kernel::{cgroup, mounts, privileges, version, version::KernelVersion};
use serde::Serialize;

mod firewall;
mod handshake;
mod host;
mod listeners;
mod network;
pub(crate) mod routes;
pub mod self_test;
mod state;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing to do.
    Ok,
    /// Works, but not as the operator may expect.
    Warning,
    /// The agent, or a setting, does not work.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name of the check.
    pub id: String,
    /// How bad it is.
    pub severity: Severity,
    /// What the check found.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// How to fix it, if there is something to fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// What is examined.
#[derive(Debug, Default)]
pub struct Input<'a> {
    /// The cgroup to attach to; `None`: the host's root.
    pub cgroup: Option<PathBuf>,
    /// Where pins are or will be.
    pub pin_dir: PathBuf,
    /// Files in which the daemon keeps state across restarts, and what is lost with each.
    pub state_files: Vec<(PathBuf, &'static str)>,
    /// Ids of the agent's own programs.
    pub ours: Vec<u32>,
    /// The configuration's entries, for conflicts with routes.
    pub set: Option<&'a PolicySet>,
    /// The host's facts for computing settings; `None` if they could not be read.
    pub host: Option<HostFacts>,
    /// Why the configuration could not be read.
    pub config_error: Option<String>,
    /// Users other than root who may change the configuration; one line each, with the fix.
    pub exposed: &'a [String],
    /// Features of this kernel.
    pub features: &'a [Feature],
    /// The result of a probe of the active timers, if one ran.
    pub verdict: Option<Verdict>,
}

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

/// The stable name of a check, and why it matters.
#[derive(Clone, Copy)]
struct Check<'a>(&'a str, &'static str);

impl Check<'_> {
    fn finding(self, severity: Severity, found: impl Into<String>, fix: Option<String>) -> Finding {
        Finding {
            id: self.0.to_owned(),
            severity,
            found: found.into(),
            why: self.1,
            fix,
        }
    }

    fn ok(self, found: impl Into<String>) -> Finding {
        self.finding(Severity::Ok, found, None)
    }

    fn warning(self, found: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.finding(Severity::Warning, found, Some(fix.into()))
    }

    fn problem(self, found: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.finding(Severity::Problem, found, Some(fix.into()))
    }
}

/// "run as root", or `fix` if the process already has root's privileges.
fn unless_privileged(fix: &'static str) -> &'static str {
    let missing = privileges::effective().map(privileges::missing);
    fix_for(missing.is_some_and(|missing| missing.is_empty()), fix)
}

fn fix_for(is_privileged: bool, fix: &'static str) -> &'static str {
    if is_privileged { fix } else { "run as root" }
}

/// Examines the host, including the probe's results. Nothing is changed.
pub fn examine(input: &Input<'_>) -> Report {
    let kernel = version::running();
    let number = kernel
        .as_ref()
        .map_or(version::MINIMUM, |k: &KernelVersion| k.number);
    let mut findings = vec![host::kernel(&kernel)];
    findings.extend(input.features.iter().map(host::feature));
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

/// The most policies, listeners and rules that a finding names.
const SHOWN: usize = 5;

/// "a, b, c", and the number of others.
fn list(all: impl IntoIterator<Item = String>) -> String {
    let all: Vec<String> = all.into_iter().collect();
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", all[..all.len().min(SHOWN)].join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

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
                finding.severity != Severity::Ok,
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
    fn root_is_not_told_to_run_as_root() {
        assert_eq!(fix_for(false, "mount it"), "run as root");
        assert_eq!(fix_for(true, "mount it"), "mount it");
        if privileges::effective().map(privileges::missing) == Some(Vec::new()) {
            let report = examine(&Input::default());
            let fixes = report.findings.iter().filter_map(|f| f.fix.as_ref());
            assert!(!fixes.into_iter().any(|fix| fix.contains("run as root")));
        }
    }
}
