//! The configuration files, and what was last read from them.

use std::{sync::Arc, time::Instant};

use rto_agent_core::{
    config::{Config, Files, FilesReader, ReadError},
    progress,
    wire::types::ReloadView,
};
use rto_agent_kernel::kernel::clock::boottime_ms;
use tracing::debug;

use super::{
    audit::Cause,
    config::EngineConfig,
    desired::{Desired, LoadedConfig},
    error::EngineError,
    memory::{self, Need},
    store::RuntimeStore,
};

/// Owns the configuration files, the result of reading them, and the last good configuration.
pub(super) struct ConfigFiles {
    config: Arc<EngineConfig>,
    reader: FilesReader,
    /// Fingerprint of the files last read, good or bad; `None` if they could not be read.
    pub(super) fingerprint: Option<u64>,
    pub(super) last_reload: ReloadView,
    /// The change of the last reload that made one.
    pub(super) taken: Option<Taken>,
    /// Changes that need a restart, and what could not be loaded.
    pub(super) warnings: Vec<String>,
}

/// A reload's change.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) at: Instant,
    pub(super) cause: String,
    pub(super) detail: String,
}

/// The desired state at a start: the files and the saved runtime entries; and why some of these are
/// lost.
pub(super) fn load_desired(
    config: &EngineConfig,
    store: &mut RuntimeStore,
) -> anyhow::Result<(Desired, Option<String>)> {
    memory::check(&Need::of_store(store.size()))?;
    let (saved, lost) = store.load()?;
    let files = Arc::new(LoadedConfig {
        config: config.config.clone(),
        fingerprint: config.fingerprint,
        host: config.host,
    });
    let mut runtime = saved.clone();
    runtime.expire(boottime_ms());
    let desired = Desired::new(files, runtime, config.host);
    if desired.runtime != saved {
        store.save(&desired.runtime);
    }
    Ok((desired, lost))
}

impl ConfigFiles {
    /// After a start with this configuration, which is in force.
    pub(super) fn start(config: Arc<EngineConfig>, cause: &Cause, warnings: Vec<String>) -> Self {
        let (fingerprint, last_reload) = match &config.refused {
            None => (
                Some(config.fingerprint),
                cause.reload_view(Ok(&config.config)),
            ),
            Some(refused) => {
                let view = ReloadView {
                    kept_at_s: Some(refused.kept_at_s),
                    ..cause.reload_view(Err(&refused.errors))
                };
                (refused.fingerprint, view)
            }
        };
        Self {
            config,
            reader: FilesReader::default(),
            fingerprint,
            last_reload,
            taken: None,
            warnings,
        }
    }

    /// Reads the files with another reader.
    #[cfg(test)]
    pub(super) fn read_by(&mut self, files: FilesReader) {
        self.reader = files;
    }

    /// Reads the files on another thread, while nothing else changes.
    ///
    /// # Errors
    ///
    /// If the file system does not answer, or the daemon is stopped during the read.
    pub(super) fn read(&mut self) -> Result<Files, EngineError> {
        let begin = Instant::now();
        let files = self.reader.read(&self.config.config_path);
        debug!(took = ?begin.elapsed(), is_read = files.is_ok(), "files read");
        files.map_err(|e| match e {
            ReadError::Failed(errors) => EngineError::Config(errors),
            ReadError::Interrupted => EngineError::Stopping,
        })
    }
}

/// The files, parsed and compiled for the current host. Reuses the configuration in force if
/// nothing has changed.
pub(super) fn load(files: &Files, desired: &Desired) -> Result<Arc<LoadedConfig>, EngineError> {
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
