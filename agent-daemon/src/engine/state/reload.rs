//! Reads, checks and applies the configuration files.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::{AgentConfig, Files},
    policy::{
        Cidr, Policy, PolicyName, PolicySet, differences::Differences, plan::ChangeSummary,
        units::format_duration,
    },
    progress::stepping,
    wire::types::{ChangeAnswer, ReloadRequest, ReloadView},
};
use rto_agent_kernel::{datapath::room_for, kernel::clock::boottime_ms};
use tracing::{error, warn};

use super::{State, Taken, requests::Notes};
use crate::engine::{
    Engine, EngineError,
    audit::{Cause, Source},
    desired::{LoadedConfig, Resolved},
    error::refused,
    last_good::emptied,
    memory,
    reconcile::Persist,
    runtime::Override,
};

/// How long a reload without a change names the one before.
const RECENTLY: Duration = Duration::from_mins(1);
/// With more entries, a reload answers first and compares the kernel's maps in the background.
const COMPARED_AT_ONCE: usize = 65_536;

impl Engine {
    /// Reads the files again, and logs the result.
    pub(in crate::engine) fn reload_asked(
        &mut self,
        request: &ReloadRequest,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        self.apply.check_not_restoring()?;
        let files = match self.state.read() {
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

    pub(in crate::engine) fn files_changed(&mut self) {
        match self.state.read() {
            Ok(files) if Some(files.fingerprint()) == self.state.fingerprint => {}
            Ok(files) => {
                let _logged = self.reload(files, false, &Source::File.into());
                memory::trim_heap();
            }
            // The files are checked every half minute: known errors are not logged again.
            Err(e) if self.state.last_reload.errors == [e.to_string()] => {}
            Err(e) => {
                let _logged = self.unread(e, &Source::File.into());
            }
        }
    }

    /// Treats unreadable files like rejected ones. Once they are readable again, they are loaded
    /// even if unchanged.
    fn unread(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        if matches!(error, EngineError::Stopping) {
            return error;
        }
        self.state.fingerprint = None;
        let error = self.not_reloaded(error, cause);
        self.publish();
        error
    }

    fn reload(
        &mut self,
        files: Files,
        allow_empty: bool,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        self.systemd.reloading();
        let is_known = self.state.fingerprint == Some(files.fingerprint());
        self.state.fingerprint = Some(files.fingerprint());
        let taken_before = self.state.taken.clone().filter(|_| is_known);
        let entries = self.apply.resolved().maps.entries.len();
        let differences = if entries <= COMPARED_AT_ONCE {
            self.apply.verify().differences
        } else {
            self.apply.compare_all();
            Differences::default()
        };
        let taken = self.load_and_take_over(files, &[], &Persist::Later, allow_empty, cause);
        let mut result = taken.map_err(|error| self.not_reloaded(error, cause));
        // Files that change are taken over at once, so that a reload is often too late to change something.
        if let Ok(answer) = &mut result
            && answer.changed == ChangeSummary::default()
            && let Some(taken) = taken_before.filter(|taken| taken.at.elapsed() < RECENTLY)
        {
            let ago = format_duration(Duration::from_secs(taken.at.elapsed().as_secs().max(1)));
            let Taken { cause, detail, .. } = taken;
            let note = format!("these files were taken over {ago} ago ({cause}): {detail}");
            answer.notes.insert(0, note);
        }
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
        let loaded = State::load(files, self.apply.desired())?;
        let former = &self.apply.resolved().config().set;
        match emptied(&loaded.config.set, former).filter(|_| !allow_empty) {
            Some(error) => refused(error),
            None => Ok(loaded),
        }
    }

    /// Reports what a reload would change.
    fn reload_dry(&self, files: &Files, allow_empty: bool) -> Result<ChangeAnswer, EngineError> {
        let loaded = self.load_checked(files, allow_empty)?;
        let before = self.apply.resolved();
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
    pub(in crate::engine) fn keep_last_good(&mut self) {
        if self.state.last_good.is_gone()
            && let Ok(files) = self.state.read()
            && files.fingerprint() == self.apply.desired().files.fingerprint
        {
            self.state.last_good.stage(&files);
            self.state.last_good.commit();
        }
    }

    /// Applies these files, and keeps them as the last good configuration. Runtime entries and
    /// masks of `saved` end.
    pub(super) fn load_and_take_over(
        &mut self,
        files: Files,
        saved: &[Cidr],
        persist: &Persist,
        allow_empty: bool,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        let loaded = self.load_checked(&files, allow_empty)?;
        self.state.last_good.stage(&files);
        // The texts take as much memory as the parsed configuration.
        drop(files);
        let taken = self.take_over(loaded, saved, persist, cause);
        match &taken {
            Ok(_) => self.state.last_good.commit(),
            Err(_) => self.state.last_good.discard(),
        }
        taken
    }

    /// Applies other files.
    fn take_over(
        &mut self,
        files: Arc<LoadedConfig>,
        saved: &[Cidr],
        persist: &Persist,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        let agent = &files.config.agent;
        let mut notes = files.config.warnings.clone();
        let warnings = restart_notes(&self.config.config.agent, agent);
        notes.extend(warnings.iter().cloned());
        let room = |agent: &AgentConfig| room_for(0, agent.max_entries);
        if room(agent) < room(&self.apply.resolved().config().agent) {
            notes.push(
                "[agent] max_entries is smaller: it takes effect at the next start".to_owned(),
            );
        }
        let (next, ended) = self.apply.desired().without_overrides(saved);
        let next = next.with_files(files.clone(), boottime_ms());
        let change = self.reconcile(&next, persist, cause)?;
        self.state.last_reload = cause.reload_view(Ok(&files.config));
        self.state.warnings = warnings;
        if !change.detail.is_empty() {
            self.state.taken = Some(Taken {
                at: Instant::now(),
                cause: cause.to_string(),
                detail: change.detail.clone(),
            });
        }
        notes.extend(ended_overrides(saved, ended, &files.config.set));
        notes.extend(change.unsaved);
        notes.extend(self.control.take_notes());
        self.apply.follow_persistent_dir();
        let followed = self.follow_attach(cause);
        notes.extend(followed.err().map(|e| format!("[agent] attach: {e}")));
        Ok(ChangeAnswer {
            changed: change.summary,
            notes,
            ..ChangeAnswer::default()
        })
    }

    /// Records that the files were rejected, and logs what is in force instead.
    fn not_reloaded(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        const KEPT: &str = "the last good configuration stays active";
        self.state.last_reload = ReloadView {
            kept_at_s: self.state.last_reload.kept_at_s,
            ..cause.reload_view(Err(&error.to_string()))
        };
        if error.is_interrupted() {
            return error;
        }
        if error.is_refusal() {
            error!(%cause, "configuration rejected, {KEPT}:\n{error}");
        } else if !self.apply.reconciler().in_sync() {
            // The error's text says what the kernel holds.
            error!(%cause, "the configuration could not be applied: {error}");
            return error;
        } else {
            error!(%cause, "the configuration could not be applied, {KEPT}: {error}");
        }
        EngineError::NotReloaded(Box::new(error))
    }
}

/// Notes which runtime entries and masks a change of the saved entries has ended.
fn ended_overrides(saved: &[Cidr], ended: Vec<Option<Override>>, files: &PolicySet) -> Vec<String> {
    let mut notes = Notes::default();
    for (cidr, ended) in stepping(saved).zip(ended) {
        let is_saved = files.entries.contains_key(cidr);
        match ended {
            Some(Override::Entry) if is_saved => notes.push(|| {
                format!("{cidr}: the runtime entry has ended; the saved entry replaces it")
            }),
            Some(Override::Entry) => {
                notes.push(|| format!("{cidr}: the runtime entry has ended as well"));
            }
            Some(Override::Mask) if is_saved => {
                notes.push(|| format!("{cidr} is no longer switched off"));
            }
            Some(Override::Mask) | None => {}
        }
    }
    notes.end()
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

/// Changes of `[agent]` that need a restart.
fn restart_notes(started: &AgentConfig, now: &AgentConfig) -> Vec<String> {
    let keys = started.restart_keys(now).into_iter();
    keys.map(|key| format!("[agent] {key} changed: it takes effect at the next start"))
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
