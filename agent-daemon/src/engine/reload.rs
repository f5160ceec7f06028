//! Reads, checks and applies the configuration files.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use rto_agent_core::{
    config::{AgentConfig, Config, Files, ReadError},
    policy::{Policy, PolicyName, PolicySet, differences::Differences, plan::ChangeSummary},
    printable::counted,
    progress,
    wire::types::{ChangeAnswer, ReloadRequest, ReloadView, now_s},
};
use rto_agent_kernel::{datapath::room_for, kernel::clock::boottime_ms};
use tracing::{debug, error, warn};

use super::{
    Engine, EngineConfig, EngineError,
    audit::{Cause, Source},
    desired::{LoadedConfig, Resolved},
    memory::{self, Need},
    reconcile::{Change, Persist},
    requests::Notes,
};

/// With more entries, a reload answers first and compares the kernel's maps in the background.
const COMPARED_AT_ONCE: usize = 65_536;

impl Engine {
    /// Reads the files again, and logs the result.
    pub(super) fn reload_asked(
        &mut self,
        request: &ReloadRequest,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        self.check_not_restoring()?;
        let files = match self.read_files() {
            Ok(files) => files,
            Err(e) if request.dry_run => return Err(e),
            Err(e) => return Err(self.unread(e, cause)),
        };
        if request.dry_run {
            return self.reload_dry(&files, request.allow_empty);
        }
        let mut answer = self.reload(files, request.allow_empty, cause)?;
        if request.attach {
            answer.notes.extend(self.attach(cause)?.notes);
        }
        self.note_detached(&mut answer);
        Ok(answer)
    }

    pub(super) fn files_changed(&mut self) {
        match self.read_files() {
            Ok(files) if Some(files.fingerprint()) == self.fingerprint => {}
            Ok(files) => {
                let _logged = self.reload(files, false, &Source::File.into());
                memory::trim_heap();
            }
            // The files are checked every half minute: known errors are not logged again.
            Err(e) if self.last_reload.errors == [e.to_string()] => {}
            Err(e) => {
                let _logged = self.unread(e, &Source::File.into());
            }
        }
    }

    /// Reads the files on another thread, while nothing else changes.
    ///
    /// # Errors
    ///
    /// If the file system does not answer, or the daemon is stopped during the read.
    pub(super) fn read_files(&mut self) -> Result<Files, EngineError> {
        let begin = Instant::now();
        let files = self.files.read(&self.config.config_path);
        debug!(took = ?begin.elapsed(), is_read = files.is_ok(), "files read");
        files.map_err(|e| match e {
            ReadError::Failed(errors) => EngineError::Config(errors),
            ReadError::Interrupted => EngineError::Stopping,
        })
    }

    /// Treats unreadable files like rejected ones. Once they are readable again, they are loaded
    /// even if unchanged.
    fn unread(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        if matches!(error, EngineError::Stopping) {
            return error;
        }
        self.fingerprint = None;
        let error = self.not_reloaded(error, cause);
        self.publish();
        error
    }

    /// The files, parsed and compiled for the current host. Reuses the configuration in force if
    /// nothing has changed.
    pub(super) fn load(&self, files: &Files) -> Result<Arc<LoadedConfig>, EngineError> {
        let desired = self.reconciler.desired();
        let (fingerprint, host) = (files.fingerprint(), desired.host);
        progress::step();
        // The files are also watched, so that a replaced file whose user asks for a reload would be
        // parsed twice.
        if (fingerprint, host) == (desired.files.fingerprint, desired.files.host) {
            return Ok(desired.files.clone());
        }
        memory::check(&Need::of_files(files.cidrs()))?;
        Ok(Arc::new(LoadedConfig {
            config: Config::of(files, &host)?,
            fingerprint,
            host,
        }))
    }

    fn reload(
        &mut self,
        files: Files,
        allow_empty: bool,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        self.systemd.reloading();
        self.fingerprint = Some(files.fingerprint());
        let entries = self.reconciler.resolved().maps.entries.len();
        let differences = if entries <= COMPARED_AT_ONCE {
            self.verify().differences
        } else {
            self.comparing.compare_all();
            Differences::default()
        };
        let taken = self.load_and_take_over(files, &Persist::Later, allow_empty, cause);
        let mut result = taken.map_err(|error| self.not_reloaded(error, cause));
        for note in result.iter().flat_map(|answer| &answer.notes) {
            warn!(%cause, "{note}");
        }
        if let Ok(answer) = &mut result
            && !differences.is_empty()
        {
            // Already logged.
            let note = format!("another process had changed the kernel's maps: {differences}");
            answer.notes.push(note);
        }
        self.publish();
        self.compare_next();
        self.systemd.reloaded();
        result
    }

    fn load_checked(
        &self,
        files: &Files,
        allow_empty: bool,
    ) -> Result<Arc<LoadedConfig>, EngineError> {
        let loaded = self.load(files)?;
        let former = &self.reconciler.resolved().config().set;
        match emptied(&loaded.config.set, former).filter(|_| !allow_empty) {
            Some(error) => Err(EngineError::Refused(error)),
            None => Ok(loaded),
        }
    }

    /// Reports what a reload would change.
    fn reload_dry(&self, files: &Files, allow_empty: bool) -> Result<ChangeAnswer, EngineError> {
        let loaded = self.load_checked(files, allow_empty)?;
        let before = self.reconciler.resolved();
        let next = before.desired.with_files(loaded, boottime_ms()).resolve()?;
        let mut notes = next.config().warnings.clone();
        notes.extend(restart_notes(
            &self.config.config.agent,
            &next.config().agent,
        ));
        notes.extend(next.left_out_text());
        Ok(ChangeAnswer {
            changed: ChangeSummary::between(&before.maps, &next.maps),
            would_change: Some(difference(before, &next)),
            notes,
            ..ChangeAnswer::default()
        })
    }

    /// Stores the last good configuration again if it was removed.
    pub(super) fn keep_last_good(&mut self) {
        if self.last_good.is_gone()
            && let Ok(files) = self.read_files()
            && files.fingerprint() == self.reconciler.desired().files.fingerprint
        {
            self.last_good.stage(&files);
            self.last_good.commit();
        }
    }

    /// Applies these files, and keeps them as the last good configuration.
    pub(super) fn load_and_take_over(
        &mut self,
        files: Files,
        persist: &Persist,
        allow_empty: bool,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        let loaded = self.load_checked(&files, allow_empty)?;
        self.last_good.stage(&files);
        // The texts take as much memory as the parsed configuration.
        drop(files);
        let taken = self.take_over(loaded, persist, cause);
        match &taken {
            Ok(_) => self.last_good.commit(),
            Err(_) => self.last_good.discard(),
        }
        taken
    }

    /// Applies other files.
    fn take_over(
        &mut self,
        files: Arc<LoadedConfig>,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        let agent = &files.config.agent;
        let mut notes = files.config.warnings.clone();
        let warnings = restart_notes(&self.config.config.agent, agent);
        notes.extend(warnings.iter().cloned());
        let room = |agent: &AgentConfig| room_for(0, agent.max_entries);
        if room(agent) < room(&self.reconciler.resolved().config().agent) {
            notes.push(
                "[agent] max_entries is smaller: it takes effect at the next start".to_owned(),
            );
        }
        // Set first: the snapshot published with the change includes it.
        let last_reload =
            std::mem::replace(&mut self.last_reload, reload_view(cause, Ok(&files.config)));
        let former_warnings = std::mem::replace(&mut self.warnings, warnings);
        let desired = self.reconciler.desired();
        let next = desired.with_files(files, boottime_ms());
        match self.reconcile(next, persist, cause) {
            Ok(Change {
                summary, unsaved, ..
            }) => {
                notes.extend(unsaved);
                notes.append(&mut self.deciding.experiments.notes);
                let followed = self.follow_attach(cause);
                notes.extend(followed.err().map(|e| format!("[agent] attach: {e}")));
                Ok(ChangeAnswer {
                    changed: summary,
                    notes,
                    ..ChangeAnswer::default()
                })
            }
            Err(e) => {
                self.last_reload = last_reload;
                self.warnings = former_warnings;
                Err(e)
            }
        }
    }

    /// Records that the files were rejected, and logs what is in force instead.
    fn not_reloaded(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        const KEPT: &str = "the last good configuration stays active";
        self.last_reload = ReloadView {
            kept_at_s: self.last_reload.kept_at_s,
            ..reload_view(cause, Err(&error.to_string()))
        };
        if error.is_interrupted() {
            return error;
        }
        if error.is_refusal() {
            error!(%cause, "configuration rejected, {KEPT}:\n{error}");
        } else if !self.reconciler.in_sync() {
            // The error's text says what the kernel holds.
            error!(%cause, "the configuration could not be applied: {error}");
            return error;
        } else {
            error!(%cause, "the configuration could not be applied, {KEPT}: {error}");
        }
        EngineError::NotReloaded(Box::new(error))
    }
}

/// The changes that a reload would make: "~ policy near: initial_rto 100ms -> 200ms", "+
/// 10.2.0.0/16 near".
fn difference(before: &Resolved, next: &Resolved) -> Vec<String> {
    let (old, new) = (&before.config().set.policies, &next.config().set.policies);
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut policies = Notes::default();
    for name in names {
        let settings = |policies: &BTreeMap<PolicyName, Policy>| {
            let policy = policies.get(name)?;
            let value = serde_json::to_value(&policy.settings).ok()?;
            let mut object = value.as_object()?.clone();
            object.retain(|key, value| key != "force" || *value != false);
            Some(object)
        };
        let value = |value: &serde_json::Value| {
            value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned)
        };
        match (settings(old), settings(new)) {
            (Some(_), None) => policies.push(|| format!("- policy {name}")),
            (None, Some(new)) => policies.push(|| {
                let new = new.iter().map(|(key, new)| format!("{key} {}", value(new)));
                format!("+ policy {name}: {}", new.collect::<Vec<_>>().join(", "))
            }),
            (Some(old), Some(new)) if old != new => policies.push(|| {
                let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
                let differ = keys
                    .into_iter()
                    .filter(|key| old.get(*key) != new.get(*key));
                let shown = |settings: &serde_json::Map<_, _>, key| {
                    settings.get(key).map_or("(none)".to_owned(), value)
                };
                let changes =
                    differ.map(|key| format!("{key} {} -> {}", shown(&old, key), shown(&new, key)));
                format!(
                    "~ policy {name}: {}",
                    changes.collect::<Vec<_>>().join(", ")
                )
            }),
            _ => {}
        }
    }
    let mut entries = Notes::default();
    before
        .set
        .entries
        .differences(&next.set.entries, |cidr, old, new| {
            entries.push(|| match (old, new) {
                (Some(old), Some(new)) => format!("~ {cidr} {old} -> {new}"),
                (Some(old), None) => format!("- {cidr} {old}"),
                (None, Some(new)) => format!("+ {cidr} {new}"),
                (None, None) => cidr.to_string(),
            });
        });
    [policies.end(), entries.end()].concat()
}

/// Why files without any policy do not replace files with policies: a redirection from a slow
/// command, or a full disk, leaves a file empty for a moment.
pub(super) fn emptied(files: &PolicySet, former: &PolicySet) -> Option<String> {
    let (now, before) = (files.policies.len(), former.policies.len());
    (now == 0 && before != 0).then(|| {
        format!(
            "the files no longer have any of the {}; if this is intended, run rto-agent reload \
             --allow-empty",
            counted(before, "policy", "policies")
        )
    })
}

/// The result of reading the files at the start.
pub(super) fn start_view(config: &EngineConfig, cause: &Cause) -> ReloadView {
    match &config.refused {
        None => reload_view(cause, Ok(&config.config)),
        Some(refused) => ReloadView {
            kept_at_s: Some(refused.kept_at_s),
            ..reload_view(cause, Err(&refused.errors))
        },
    }
}

fn reload_view(cause: &Cause, result: Result<&Config, &str>) -> ReloadView {
    ReloadView {
        at_s: now_s(),
        cause: cause.to_string(),
        ok: result.is_ok(),
        errors: result
            .err()
            .map(|text| vec![text.to_owned()])
            .unwrap_or_default(),
        warnings: result
            .map(|config| config.warnings.clone())
            .unwrap_or_default(),
        kept_at_s: None,
    }
}

/// Changes of `[agent]` that need a restart.
fn restart_notes(started: &AgentConfig, now: &AgentConfig) -> Vec<String> {
    let differs = [
        ("cgroup", started.cgroup != now.cgroup),
        ("pin_dir", started.pin_dir != now.pin_dir),
        ("socket", started.socket != now.socket),
        ("state_dir", started.state_dir != now.state_dir),
        (
            "persistent_dir",
            started.persistent_dir != now.persistent_dir,
        ),
        ("group", started.group != now.group),
        ("metrics", started.metrics != now.metrics),
        ("statistics", started.statistics != now.statistics),
        (
            "count_unmatched",
            started.count_unmatched != now.count_unmatched,
        ),
        ("sampling", started.sampling != now.sampling),
        ("rtt_sampling", started.rtt_sampling != now.rtt_sampling),
    ];
    differs
        .into_iter()
        .filter(|(_, differs)| *differs)
        .map(|(key, _)| format!("[agent] {key} changed: it takes effect at the next start"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::desired::tests::{NEAR, desired, files};

    #[test]
    fn dry_run_shows_settings_and_entries_that_change() {
        let old =
            format!("{NEAR}[policy.gone]\ninitial_rto = \"300ms\"\ncidrs = [\"10.3.0.0/16\"]\n");
        let new = "[policy.near]\ninitial_rto = \"200ms\"\nrto_min = \"20ms\"\ncidrs = [\"10.1.0.0/16\"]\n\
                   [policy.far]\ninitial_rto = \"300ms\"\ncidrs = [\"10.3.0.0/16\", \"10.4.0.0/16\"]\n";
        let before = desired(&old);
        let next = before.with_files(files(new), 0).resolve().unwrap();
        let before = before.resolve().unwrap();
        let wanted = [
            "+ policy far: initial_rto 300ms",
            "- policy gone",
            "~ policy near: initial_rto 100ms -> 200ms, rto_min (none) -> 20ms",
            "~ 10.3.0.0/16 gone -> far",
            "+ 10.4.0.0/16 far",
            "- fd00:1::/48 near",
        ];
        assert_eq!(difference(&before, &next), wanted);
        assert_eq!(difference(&next, &next), Vec::<String>::new());
    }
}
