//! What is examined, and what was found.

use std::path::PathBuf;

use rto_agent_core::{
    policy::{HostFacts, PolicySet, SETTINGS},
    wire::kernel::{Feature, Verdict},
};
use rto_agent_kernel::kernel::privileges;
use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing to do.
    Ok,
    /// What only the operator can judge, a default of the kernel that can be improved, or a feature that no policy uses.
    Note,
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
    /// Whether policies are applied to sockets that are already open.
    pub apply_to_open: bool,
    /// The host's facts for computing settings; `None` if they could not be read.
    pub host: Option<HostFacts>,
    /// Why the configuration could not be read.
    pub config_error: Option<String>,
    /// Users other than root who may change the configuration; one line each, with the fix.
    pub exposed: &'a [String],
    /// Timers that are shorter than the path RTTs that the daemon has counted, one line each.
    pub short_timers: Vec<String>,
    /// Why the metrics cannot be reached, if so.
    pub metrics: Option<String>,
    /// Features of this kernel.
    pub features: &'a [Feature],
    /// The result of a probe of the active timers, if one ran.
    pub verdict: Option<Verdict>,
}

impl Input<'_> {
    /// Whether a policy, or `[agent]`, sets one of these settings.
    pub(super) fn uses(&self, settings: &[String]) -> bool {
        let policies = || self.set.iter().flat_map(|set| set.policies.values());
        let is_set = |name: &str| {
            let setting = SETTINGS.iter().find(|setting| setting.key.name == name);
            setting.is_some_and(|s| policies().any(|policy| (s.text)(&policy.settings).is_some()))
        };
        settings
            .iter()
            .any(|name| is_set(name) || (self.apply_to_open && name == "apply_to_open"))
    }
}

/// The stable name of a check, and why it matters.
#[derive(Clone, Copy)]
pub(super) struct Check<'a>(pub(super) &'a str, pub(super) &'static str);

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

    pub(super) fn ok(self, found: impl Into<String>) -> Finding {
        self.finding(Severity::Ok, found, None)
    }

    pub(super) fn note(self, found: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.finding(Severity::Note, found, Some(fix.into()))
    }

    /// A note that asks for nothing.
    pub(super) fn remark(self, found: impl Into<String>) -> Finding {
        self.finding(Severity::Note, found, None)
    }

    pub(super) fn warning(self, found: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.finding(Severity::Warning, found, Some(fix.into()))
    }

    pub(super) fn problem(self, found: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.finding(Severity::Problem, found, Some(fix.into()))
    }
}

/// "run as root", or `fix` if the process already has root's privileges.
pub(super) fn unless_privileged(fix: &'static str) -> &'static str {
    let missing = privileges::effective().map(privileges::missing);
    fix_for(missing.is_some_and(|missing| missing.is_empty()), fix)
}

pub(super) fn fix_for(is_privileged: bool, fix: &'static str) -> &'static str {
    if is_privileged { fix } else { "run as root" }
}

/// The most policies, listeners and rules that a finding names.
pub(super) const SHOWN: usize = 5;

/// "a, b, c", and the number of others.
pub(super) fn list(all: impl IntoIterator<Item = String>) -> String {
    let all: Vec<String> = all.into_iter().collect();
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", all[..all.len().min(SHOWN)].join(", "))
}
