//! The files: read again, checked, and taken over.

use std::{sync::Arc, time::Instant};

use tracing::{debug, error, warn};

use super::{
    Engine, EngineConfig, EngineError,
    audit::{Cause, Source},
    desired::LoadedConfig,
    memory::{self, Need},
    reconcile::{Change, Persist},
};
use crate::{
    config::{AgentConfig, Config, Files, ReadError},
    progress,
    wire::types::{ChangeAnswer, ReloadView, now_s},
};

impl Engine {
    /// Reads the files again; also ends a detachment made on purpose. What comes of the files is logged.
    pub(super) fn reload_and_attach(&mut self, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        self.check_not_restoring()?;
        let files = match self.read_files() {
            Ok(files) => files,
            Err(e) => return Err(self.unread(e, cause)),
        };
        let mut answer = self.reload(files, cause)?;
        if self.detached_by.is_some() {
            answer.changed = self.reconciler.reopen()?.summary;
            self.detached_by = None;
            self.maps_are_new();
            self.publish();
            self.resume_events();
            self.probing.look(&self.reconciler.options().cgroup);
            answer.notes.push("attached again".to_owned());
            cause.audit_other("attach");
            self.apply_to_open(cause);
        }
        Ok(answer)
    }

    pub(super) fn files_changed(&mut self) {
        match self.read_files() {
            Ok(files) if Some(files.fingerprint()) == self.fingerprint => {}
            Ok(files) => {
                let _logged = self.reload(files, &Source::File.into());
                memory::trim_heap();
            }
            // They are looked at every half minute: what is known is not said again.
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
    /// If their file system does not answer, or the daemon is told to stop meanwhile.
    pub(super) fn read_files(&mut self) -> Result<Files, EngineError> {
        let begin = Instant::now();
        let files = self.files.read(&self.config.config_path);
        debug!(took = ?begin.elapsed(), is_read = files.is_ok(), "files read");
        files.map_err(|e| match e {
            ReadError::Failed(errors) => EngineError::Config(errors),
            ReadError::Interrupted => EngineError::Stopping,
        })
    }

    /// Files that cannot be read are as good as bad ones. Once they can, they are read whatever is in them.
    fn unread(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        if matches!(error, EngineError::Stopping) {
            return error;
        }
        self.fingerprint = None;
        let error = self.not_reloaded(error, cause);
        self.publish();
        error
    }

    /// What the files say, for the host as it is; read anew only if they are others than those in force.
    pub(super) fn load(&self, files: &Files) -> Result<Arc<LoadedConfig>, EngineError> {
        let desired = self.reconciler.desired();
        let (fingerprint, host) = (files.fingerprint(), desired.host);
        progress::step();
        // Who replaces a file and asks for a reload has it read twice otherwise: the file is watched.
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

    fn reload(&mut self, files: Files, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        self.systemd.reloading();
        self.fingerprint = Some(files.fingerprint());
        let differences = self.verify().differences;
        let taken = self.load_and_take_over(files, &Persist::Later, cause);
        let mut result = taken.map_err(|error| self.not_reloaded(error, cause));
        for note in result.iter().flat_map(|answer| &answer.notes) {
            warn!(%cause, "{note}");
        }
        if let Ok(answer) = &mut result
            && !differences.is_empty()
        {
            // The log has had it.
            let note = format!("somebody else had changed the kernel's maps: {differences}");
            answer.notes.push(note);
        }
        self.publish();
        self.systemd.reloaded();
        result
    }

    /// Puts these files in force, and keeps them as the last good ones.
    pub(super) fn load_and_take_over(
        &mut self,
        files: Files,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<ChangeAnswer, EngineError> {
        let loaded = self.load(&files)?;
        self.last_good.stage(&files);
        // Their texts are as large as what they say.
        drop(files);
        let taken = self.take_over(loaded, persist, cause);
        match &taken {
            Ok(_) => self.last_good.commit(),
            Err(_) => self.last_good.discard(),
        }
        taken
    }

    /// Puts other files in force.
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
        if agent.max_entries < self.reconciler.resolved().config().agent.max_entries {
            notes.push(
                "[agent] max_entries is smaller: it takes effect with the next start".to_owned(),
            );
        }
        // What is published with the change says how it went.
        let last_reload =
            std::mem::replace(&mut self.last_reload, reload_view(cause, Ok(&files.config)));
        let former_warnings = std::mem::replace(&mut self.warnings, warnings);
        let next = self.reconciler.desired().with_files(files);
        match self.reconcile(next, persist, cause) {
            Ok(Change {
                summary, unsaved, ..
            }) => {
                notes.extend(unsaved);
                notes.extend(self.deciding.experiments.take_notes());
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

    /// Remembers that the files were not taken over, and says what is in force instead.
    fn not_reloaded(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        const KEPT: &str = "the last good configuration stays in force";
        self.last_reload = ReloadView {
            kept_at_s: self.last_reload.kept_at_s,
            ..reload_view(cause, Err(&error.to_string()))
        };
        if error.is_interrupted() {
            return error;
        }
        if error.is_refusal() {
            error!(%cause, "configuration refused, {KEPT}:\n{error}");
        } else if !self.reconciler.in_sync() {
            // The text says what the kernel holds.
            error!(%cause, "the configuration could not be put in force: {error}");
            return error;
        } else {
            error!(%cause, "the configuration could not be put in force, {KEPT}: {error}");
        }
        EngineError::NotReloaded(Box::new(error))
    }
}

/// How the reading of the files went that the start goes by.
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

/// What of `[agent]` a reload does not take over.
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
        .map(|(key, _)| format!("[agent] {key} changed: it takes effect with the next start"))
        .collect()
}
