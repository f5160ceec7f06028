//! Types of the socket and of `--json`: stable names, documented in `docs/reference/api.md`.
//!
//! Durations are strings with a unit ("100ms"), CIDRs and addresses are strings, times are Unix
//! seconds.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::AddAssign,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::{
    policy::{
        Cidr, HostFacts, PolicyName, Settings, compile::EffectiveSetting, differences::Differences,
        entries::FamilyCounts, plan::ChangeSummary,
    },
    printable,
    wire::{
        holdout::HoldoutView,
        kernel::{Attachment, Feature, Found, Removed, Verdict},
    },
};

/// The time now, Unix seconds.
pub fn now_s() -> u64 {
    now_ms() / 1000
}

/// The time now, Unix milliseconds.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// The client, from the socket's peer credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Caller {
    /// User id.
    pub uid: u32,
    /// Process id.
    pub pid: i32,
}

impl Caller {
    /// The caller for `attach = false` in `[agent]`: no peer has this pid.
    pub const CONFIGURATION: Self = Self { uid: 0, pid: 0 };
    /// The caller for a mark of a detachment that cannot be read, likewise.
    pub const UNREADABLE_MARK: Self = Self { uid: 0, pid: -1 };

    /// Whether no user has detached the program.
    pub fn is_no_user(&self) -> bool {
        [Self::CONFIGURATION, Self::UNREADABLE_MARK].contains(self)
    }

    /// Says that no policy is active because this caller has detached the program, and the fix.
    pub fn detached(&self) -> String {
        format!("no policy is active: detached by {self}; run rto-agent attach to activate them")
    }
}

impl std::fmt::Display for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Self::CONFIGURATION {
            return f.write_str("attach = false in [agent]");
        }
        if *self == Self::UNREADABLE_MARK {
            return f.write_str("a mark that cannot be read");
        }
        write!(f, "uid {} (pid {})", self.uid, self.pid)
    }
}

/// `POST /v1/entries`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AddRequest {
    /// CIDRs, at most [`MAX_CIDRS`](super::bounded::MAX_CIDRS); an address without a prefix length
    /// is one host.
    #[serde(deserialize_with = "super::bounded::cidrs")]
    pub cidrs: Vec<String>,
    /// A policy of the configuration; give either this or `settings`.
    #[serde(default)]
    pub policy: Option<String>,
    /// Settings for these entries; give either this or `policy`.
    #[serde(default)]
    pub settings: Option<Settings>,
    /// Lifetime of the entries, for example "10m".
    #[serde(default)]
    pub ttl: Option<String>,
    /// Save the entries in `policies.d/50-cli.toml` instead of keeping them until the next reboot.
    #[serde(default)]
    pub save: bool,
}

/// `POST /v1/entries/remove`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RemoveRequest {
    /// CIDRs, exactly as listed, at most [`MAX_CIDRS`](super::bounded::MAX_CIDRS).
    #[serde(deserialize_with = "super::bounded::cidrs")]
    pub cidrs: Vec<String>,
    /// Remove them from `policies.d/50-cli.toml`.
    #[serde(default)]
    pub save: bool,
    /// Switch entries of the configuration files on again that were switched off at run time.
    #[serde(default)]
    pub undo: bool,
}

/// `POST /v1/reload`. An empty body leaves out all fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ReloadRequest {
    /// Accept files without any policy.
    #[serde(default)]
    pub allow_empty: bool,
    /// Also end a detachment, like `POST /v1/attach`.
    #[serde(default)]
    pub attach: bool,
    /// Only report what would change.
    #[serde(default)]
    pub dry_run: bool,
}

/// What a change did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ChangeAnswer {
    /// Numbers of entries and policies that were added, changed and removed in the kernel.
    pub changed: ChangeSummary,
    /// Runtime entries that existed already and whose expiry was changed or removed.
    pub lifetimes_changed: usize,
    /// Seconds after which the added entries expire; absent without a TTL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
    /// For a dry run: what would change, one line each; nothing was changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_change: Option<Vec<String>>,
    /// Notes, one sentence each.
    pub notes: Vec<String>,
    /// The policy that entries were added to; for a policy that was created from the request's
    /// settings, a generated name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// The effective values of the policy of the added entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<EffectiveSetting>,
}

/// Where an entry comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum SourceView {
    /// A configuration file.
    File {
        /// The file.
        #[serde(serialize_with = "printable::serialize_path")]
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// `rto-agent add`.
    Runtime {
        /// Who added it.
        by: Caller,
        /// Seconds until it expires; absent: at the next reboot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expires_in_s: Option<u64>,
    },
}

impl std::fmt::Display for SourceView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { path, line } => {
                let name = path.file_name().map_or(path.as_os_str(), |name| name);
                write!(f, "{}:{line}", printable::path(name.as_ref()))
            }
            Self::Runtime {
                expires_in_s: None, ..
            } => f.write_str("runtime"),
            Self::Runtime {
                expires_in_s: Some(s),
                ..
            } => {
                let left = humantime::format_duration(std::time::Duration::from_secs(*s));
                write!(f, "runtime, {left} left")
            }
        }
    }
}

/// One active entry.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EntryView {
    /// The CIDR.
    pub cidr: Cidr,
    /// Its policy.
    pub policy: PolicyName,
    /// Its source.
    pub source: SourceView,
    /// Connections that used this entry; 4294901760 or more means "at least".
    pub hits: u32,
    /// The entry of the configuration files that it overrides, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overrides: Option<SourceView>,
}

/// What a policy sets.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PolicyView {
    /// The description from its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The policy's settings as configured.
    pub settings: Settings,
    /// The effective values on this host.
    pub effects: Vec<EffectiveSetting>,
}

/// An entry with its policy's settings; a list contains the settings once per policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LookupEntry {
    /// The entry.
    #[serde(flatten)]
    pub entry: EntryView,
    /// The policy's settings.
    #[serde(flatten)]
    pub sets: PolicyView,
}

/// `GET /v1/entries`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListAnswer {
    /// The policies, by name.
    pub policies: BTreeMap<PolicyName, PolicyView>,
    /// Active entries, IPv4 first, by address.
    pub entries: Vec<EntryView>,
    /// Entries of the files that were switched off at run time.
    pub masked: Vec<Cidr>,
    /// Runtime entries that are left out, and why.
    pub left_out: BTreeMap<Cidr, String>,
    /// Who detached the program, if it was detached on purpose; no policy is active then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_by: Option<Caller>,
}

/// `GET /v1/lookup?address=`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LookupAnswer {
    /// The requested address.
    pub address: IpAddr,
    /// The address looked up: the IPv4 one for an IPv4-mapped IPv6 address.
    pub looked_up: IpAddr,
    /// The entry that a connection to the address uses; absent: the kernel's own timers.
    pub entry: Option<LookupEntry>,
    /// Shorter prefixes that match as well and are not applied, longest first.
    pub shadowed: Vec<Cidr>,
    /// Entries of the files that match and were switched off at run time, longest first.
    pub masked: Vec<Cidr>,
    /// The reason, in a sentence.
    pub reason: String,
}

/// Result of the last time the files were read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ReloadView {
    /// When, Unix seconds.
    pub at_s: u64,
    /// What caused it: "start", "file change", "SIGHUP" or the client that requested it.
    pub cause: String,
    /// Whether the configuration was accepted.
    pub ok: bool,
    /// The errors, with file and line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    /// Settings that are allowed, but probably not intended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// When the active configuration was saved on disk by an earlier run (Unix seconds), if the
    /// files have been rejected since the start; otherwise absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_at_s: Option<u64>,
}

/// `GET /v1/status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StatusAnswer {
    /// Version of the daemon.
    pub version: String,
    /// The commit it was built from; "unknown" if the build did not set it.
    pub commit: String,
    /// The target it was built for, as named by rustc.
    pub target: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Attached, in sync with the files, last reload good.
    pub healthy: bool,
    /// What is wrong, one sentence each; empty when healthy.
    pub problems: Vec<String>,
    /// Warnings, which do not make the daemon unhealthy.
    pub warnings: Vec<String>,
    /// Whether and where the program is in force.
    pub attachment: Attachment,
    /// Who detached the program, if it was detached on purpose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detached_by: Option<Caller>,
    /// What the start found of an earlier run.
    pub found_at_start: Found,
    /// Whether the kernel's maps contain the desired state (files and runtime entries).
    pub in_sync: bool,
    /// Changes by other processes that were repaired since the start, by kind.
    pub map_differences: BTreeMap<String, u64>,
    /// When the last full comparison of the maps ended, Unix seconds (a part is compared every five
    /// seconds).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maps_compared_at_s: Option<u64>,
    /// Kernel release.
    pub kernel: String,
    /// HZ and the sysctls from which the settings were computed.
    pub host: HostFacts,
    /// The configuration file.
    #[serde(serialize_with = "printable::serialize_path")]
    pub config: PathBuf,
    /// Where the pins are.
    #[serde(serialize_with = "printable::serialize_path")]
    pub pin_dir: PathBuf,
    /// Number of active entries.
    pub entries: usize,
    /// Of these, runtime entries.
    pub runtime_entries: usize,
    /// Runtime entries that are not active, because they fail a check that the files pass or exceed
    /// a limit.
    pub runtime_entries_left_out: usize,
    /// Active entries by source and address family.
    pub entries_of: EntriesView,
    /// Current capacity for entries.
    pub max_entries: u32,
    /// Active policies.
    pub policies: BTreeSet<PolicyName>,
    /// When the counters of all policies had last been read, Unix seconds (the counters of 32
    /// policies are read every five seconds). Warnings and problems about harm are of that time
    /// or later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters_read_at_s: Option<u64>,
    /// The verdicts about policies with a control arm, and proven harm.
    pub holdouts: BTreeMap<PolicyName, HoldoutView>,
    /// Log lines and messages to the service manager that were dropped because the receiver was too
    /// slow.
    pub dropped: DroppedView,
    /// Result of the last time the files were read.
    pub last_reload: ReloadView,
    /// Other sock_ops programs between the root of the hierarchy and the attached cgroup.
    pub foreign_programs: usize,
    /// Features of this kernel, determined when the daemon started.
    pub features: Vec<Feature>,
    /// The last probe of the active timers; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeView>,
    /// The last walk over sockets that were open already; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_sockets: Option<WalkView>,
    /// Timers that are held back, suspended or frozen, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tuning: Vec<String>,
}

/// What was dropped because the receiver was too slow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DroppedView {
    /// Lines of the log.
    pub log: u64,
    /// Messages to the service manager.
    pub service_manager: u64,
}

/// Entries by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EntriesView {
    /// The files.
    pub file: FamilyCounts,
    /// `rto-agent add`.
    pub runtime: FamilyCounts,
}

/// A probe of the active timers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProbeView {
    /// When, Unix seconds.
    pub at_s: u64,
    /// Who probed: the daemon, or `rto-agent doctor` and who ran it.
    pub by: String,
    /// What was found.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// `POST /v1/verify`: the kernel's maps and pins, compared with the desired state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VerifyAnswer {
    /// No difference and no problem.
    pub ok: bool,
    /// Number of desired entries.
    pub entries: usize,
    /// Number of desired policies.
    pub policies: usize,
    /// The differences.
    pub differences: Differences,
    /// Everything is in the desired state now.
    pub repaired: bool,
    /// Other problems: with the program or its pins, and differences that could not be repaired.
    pub problems: Vec<String>,
}

/// `POST /v1/apply`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ApplyRequest {
    /// Skip sockets that already have a policy.
    #[serde(default)]
    pub new_only: bool,
}

/// A walk over open sockets (`GET /v1/apply`: the running or the last one).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct WalkView {
    /// Whether it still runs.
    pub running: bool,
    /// What caused it; empty: there was none yet.
    pub cause: String,
    /// When it began, Unix seconds.
    pub began_at_s: u64,
    /// How long it took, milliseconds; 0 while it runs.
    pub took_ms: u64,
    /// Network namespaces found.
    pub namespaces: usize,
    /// Of these, finished.
    pub namespaces_done: usize,
    /// Of these, left out.
    pub skipped: Vec<SkippedNamespace>,
    /// Established sockets that no entry covers.
    pub uncovered: u64,
    /// When restoring: sockets of policies that no longer exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<OpenSocketsView>,
    /// Established sockets by the policy that covers them.
    pub policies: BTreeMap<PolicyName, OpenSocketsView>,
    /// What failed.
    pub problems: Vec<String>,
    /// What to know.
    pub notes: Vec<String>,
}

impl WalkView {
    /// The state of a walk that begins now.
    pub fn begin(cause: &str) -> Self {
        Self {
            running: true,
            cause: cause.to_owned(),
            began_at_s: now_s(),
            ..Self::default()
        }
    }

    /// Whether the walk has ended and has reached all sockets.
    pub fn is_complete(&self) -> bool {
        !self.running && self.skipped.is_empty() && self.problems.is_empty()
    }

    /// Adds the counts of another walk.
    pub fn add_counts_of(&mut self, other: &Self) {
        for (name, counts) in &other.policies {
            *self.policies.entry(name.clone()).or_default() += *counts;
        }
        if let Some(former) = other.former {
            *self.former.get_or_insert_default() += former;
        }
    }
}

/// A network namespace that a walk left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SkippedNamespace {
    /// Its number, as in `readlink /proc/self/ns/net`.
    pub inode: u64,
    /// A process in the namespace.
    #[serde(serialize_with = "printable::serialize_path")]
    pub place: PathBuf,
    /// Why it was left out.
    pub reason: String,
}

/// What a walk over open sockets did to the sockets of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OpenSocketsView {
    /// Sockets that were visited.
    pub seen: u64,
    /// Options that were set or restored.
    pub changed: u64,
    /// Sockets that already had a policy and were skipped.
    pub kept: u64,
    /// Sockets on which the kernel refused at least one option.
    pub refused: u64,
}

impl AddAssign for OpenSocketsView {
    fn add_assign(&mut self, more: Self) {
        self.seen += more.seen;
        self.changed += more.changed;
        self.kept += more.kept;
        self.refused += more.refused;
    }
}

impl From<rto_agent_common::WalkCounts> for OpenSocketsView {
    fn from(counts: rto_agent_common::WalkCounts) -> Self {
        Self {
            seen: counts.seen.into(),
            changed: counts.changed.into(),
            kept: counts.kept.into(),
            refused: counts.refused.into(),
        }
    }
}

/// `POST /v1/detach`. An empty body means all fields left out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DetachRequest {
    /// Restore the options that sockets had before a policy set them.
    #[serde(default)]
    pub restore: bool,
}

/// What `POST /v1/detach` answers, and what `rto-agent detach` prints.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DetachAnswer {
    /// What was removed: a daemon removes only its link, and keeps the maps with their counters.
    pub removed: Removed,
    /// Whether a daemon detached the program (otherwise the command line did).
    pub by_daemon: bool,
    /// Sockets that are connecting with a policy's timers. The program stays for them and treats no others.
    #[serde(default)]
    pub connecting: u64,
    /// Notes, one sentence each.
    pub notes: Vec<String>,
    /// When the detachment ends, if not only by `rto-agent attach`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_lasting: Option<NotLasting>,
    /// The restored options of sockets, if requested. If some sockets could not be reached, the
    /// maps are kept, so that `rto-agent detach --restore` as root can finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<WalkView>,
    /// Directory of the maps that were kept, because not every socket was reached.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "printable::serialize_optional"
    )]
    pub kept: Option<PathBuf>,
}

/// A detachment that could not be kept on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NotLasting {
    /// When it ends.
    pub until: Lasts,
    /// Why.
    pub why: String,
}

/// When a detachment ends that could not be kept on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Lasts {
    /// At the next reboot.
    UntilReboot,
    /// At the next start of the daemon.
    UntilStart,
}

impl std::fmt::Display for Lasts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::UntilReboot => "the next reboot",
            Self::UntilStart => "the next start of the daemon",
        })
    }
}

/// The answer to every failed request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ErrorAnswer {
    /// What is wrong and how to fix it, in a sentence; several lines for several errors.
    pub error: String,
}
