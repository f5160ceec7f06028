//! Who changed what: one line a change, with fields for the journal.

use std::fmt;

use rto_agent_core::{
    config::Config,
    policy::plan::ChangeSummary,
    wire::types::{Caller, ReloadView, now_s},
};
use tracing::info;

/// A change and what it did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// The counts of changed entries and policies.
    pub(super) summary: ChangeSummary,
    /// The changed entries and policies, in words.
    pub(super) detail: String,
    /// Why the runtime entries are not on disk yet.
    pub(super) unsaved: Option<String>,
}

/// Why a change is made.
#[derive(Clone, Debug)]
pub(super) struct Cause {
    /// The trigger.
    source: Source,
    /// What is done, if not what the source always does.
    what: Option<&'static str>,
    /// The client that asked for it, if any.
    by: Option<Caller>,
}

/// The trigger of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The daemon's start.
    Start,
    /// The control socket.
    Socket,
    /// A configuration file that changed.
    File,
    /// SIGHUP.
    Signal,
    /// An entry expired.
    Ttl,
    /// The host's own TCP settings.
    Host,
    /// Another process changed the kernel's maps, or a change could not be rolled back.
    Repair,
    /// The tuner.
    Tuner,
}

impl Source {
    const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Socket => "socket",
            Self::File => "file change",
            Self::Signal => "SIGHUP",
            Self::Ttl => "ttl",
            Self::Host => "host",
            Self::Repair => "repair",
            Self::Tuner => "tuner",
        }
    }

    /// What this source always does.
    const fn action(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Socket | Self::File | Self::Signal => "reload",
            Self::Ttl => "expire",
            Self::Host => "recompute",
            Self::Repair => "repair",
            Self::Tuner => "tune",
        }
    }
}

impl From<Source> for Cause {
    fn from(source: Source) -> Self {
        Self {
            source,
            what: None,
            by: None,
        }
    }
}

impl Cause {
    /// A client asked for it on the socket.
    pub(super) const fn request(by: Caller) -> Self {
        Self {
            source: Source::Socket,
            what: None,
            by: Some(by),
        }
    }

    /// A client's request led to it.
    pub(super) const fn done(what: &'static str, by: Caller) -> Self {
        Self {
            source: Source::Socket,
            what: Some(what),
            by: Some(by),
        }
    }

    /// Whether it is a decision of the daemon, whose reasons are already in the log.
    pub(super) fn is_tuner(&self) -> bool {
        self.source == Source::Tuner
    }

    /// The result of reading the files.
    pub(super) fn reload_view(&self, result: Result<&Config, &str>) -> ReloadView {
        ReloadView {
            at_s: now_s(),
            cause: self.to_string(),
            ok: result.is_ok(),
            errors: result.err().map(str::to_owned).into_iter().collect(),
            warnings: result.map_or_else(|_| Vec::new(), |config| config.warnings.clone()),
            kept_at_s: None,
        }
    }

    /// Logs a change.
    pub(super) fn audit(&self, change: &Change) {
        let summary = &change.summary;
        info!(
            audit = true,
            action = self.what.unwrap_or(self.source.action()),
            source = self.source.name(),
            uid = self.by.map(|by| by.uid),
            pid = self.by.map(|by| by.pid),
            added = summary.added,
            changed = summary.changed,
            removed = summary.removed,
            detail = change.detail,
            "{}",
            match (change.detail.as_str(), &self.by) {
                ("", _) => self.line("no change"),
                (detail, Some(by)) if !by.is_no_user() => format!("uid {} {detail}", by.uid),
                (detail, _) => self.line(detail),
            }
        );
    }

    /// Logs an action that is not a change of entries or policies.
    pub(super) fn audit_other(&self, action: &str) {
        info!(
            audit = true,
            action,
            source = self.source.name(),
            uid = self.by.map(|by| by.uid),
            pid = self.by.map(|by| by.pid),
            "{}",
            self.line(action)
        );
    }

    /// The cause, and what was done: "uid 0: detach", "ttl: removed 10.1.0.0/24".
    fn line(&self, what: &str) -> String {
        match self.by {
            Some(by) if !by.is_no_user() => format!("uid {}: {what}", by.uid),
            _ => format!("{}: {what}", self.source.name()),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.what, &self.by) {
            (Some(what), Some(by)) => write!(f, "{what}, {by}"),
            (None, Some(by)) => write!(f, "requested by {by}"),
            (Some(what), None) => f.write_str(what),
            (None, None) => f.write_str(self.source.name()),
        }
    }
}
